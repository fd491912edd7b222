// The metadata of a step of 256 requests: 64 layers, builders that do nothing.

#pragma once

#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "must.h"

constexpr std::size_t kNumLayers = 64;
constexpr std::int64_t kNumRequests = 256;

struct EmptyCallbacks {
    static std::int32_t create(void*, const kvpages_builder_info*, void**) { return 0; }
    static std::int32_t build(void* user, void*, const kvpages_common_metadata*, void*,
                              void** out) {
        *out = user;
        return 0;
    }
    static void destroy(void*, void*) {}
};

/// 256 requests decode one token each.
class MetadataStep {
public:
    MetadataStep() {
        kvpages_builder_callbacks callbacks = KVPAGES_BUILDER_CALLBACKS_INIT;
        callbacks.user = &metadata_;
        callbacks.create = EmptyCallbacks::create;
        callbacks.build = EmptyCallbacks::build;
        callbacks.destroy = EmptyCallbacks::destroy;
        kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
        config.callbacks = &callbacks;
        must(kvpages_attention_create(plan().get(), &config, &attention_));
        const std::size_t num_groups = kvpages_attention_num_cache_groups(attention_);

        tables_.assign(num_groups,
                       {table_.data(), table_shape_, table_strides_, KVPAGES_DTYPE_I32, 2});
        mappings_.assign(num_groups,
                         {slots_.data(), slots_shape_, slots_strides_, KVPAGES_DTYPE_I64, 1});
        std::iota(starts_.begin(), starts_.end(), 0);
        step_.num_requests = step_.num_tokens = kNumRequests;
        step_.max_query_len = 1;
        step_.max_seq_len = 4096;
        step_.query_start = step_.query_start_host = step_.seq_lens = starts_.data();
        step_.block_tables = tables_.data();
        step_.slot_mappings = mappings_.data();
        step_.num_block_tables = step_.num_slot_mappings = step_.num_cache_groups = num_groups;
    }
    MetadataStep(const MetadataStep&) = delete;
    MetadataStep& operator=(const MetadataStep&) = delete;
    ~MetadataStep() { kvpages_attention_destroy(attention_); }

    std::size_t num_groups() const { return tables_.size(); }
    void build() { must(kvpages_attention_build(attention_, &step_)); }
    auto layer(std::size_t layer) const {
        return kvpages_attention_layer_metadata(attention_, 0, layer);
    }

private:
    static kvpages::Plan plan() {
        const kvpages::Backend backend = kvpages::Backend::preset(kvpages::Preset::triton_nhd);
        kvpages::AttentionSpec sliding;
        sliding.kind = kvpages::AttentionKind::sliding_window;
        sliding.num_kv_heads = 8;
        sliding.head_size = 128;
        sliding.sliding_window = 1024;
        kvpages::AttentionSpec full;
        full.num_kv_heads = 8;
        full.head_size = 128;
        kvpages::Model model;
        for (std::size_t i = 0; i < kNumLayers; ++i) {
            model.add("model.layers." + std::to_string(i), i % 4 == 3 ? full : sliding, backend,
                      16);
        }
        kvpages::PlanConfig config;
        config.max_model_len = 4096;
        config.num_blocks_override = 4096;
        return kvpages::Plan::make(model, config);
    }

    static constexpr std::int64_t table_shape_[] = {kNumRequests, 256}, table_strides_[] = {256, 1};
    static constexpr std::int64_t slots_shape_[] = {kNumRequests}, slots_strides_[] = {1};

    int metadata_ = 0;
    kvpages_attention* attention_ = nullptr;
    std::vector<std::int32_t> starts_ = std::vector<std::int32_t>(kNumRequests + 1);
    std::vector<std::int32_t> table_ = std::vector<std::int32_t>(kNumRequests * 256);
    std::vector<std::int64_t> slots_ = std::vector<std::int64_t>(kNumRequests);
    std::vector<kvpages_tensor> tables_, mappings_;
    kvpages_step step_ = KVPAGES_STEP_INIT;
};
