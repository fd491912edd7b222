#include "kv_cache.h"

#include <memory>
#include <numeric>
#include <optional>
#include <utility>

namespace smollm {

namespace {

/// The contract of attention.cc: it reads any order of the axes, in kernel blocks of one size.
kvpages::Backend own_kernels(const CacheOptions& options) {
    kvpages::BackendConfig config;
    config.name = "SMOLLM";
    config.layout = options.layout.dimensions;
    config.kernel_block_sizes = {options.kernel_block_size != 0 ? options.kernel_block_size
                                                                : options.block_size};
    config.alignment_bytes = sizeof(float);
    return kvpages::Backend(config);
}

kvpages::Plan make_plan(const ModelConfig& model, const CacheOptions& options) {
    kvpages::AttentionSpec spec;
    spec.dtype = options.type.dtype;
    spec.quant_mode = options.type.quant_mode;
    spec.block_size = options.block_size;
    spec.num_kv_heads = model.num_kv_heads;
    spec.head_size = model.head_size;

    const kvpages::Backend backend = own_kernels(options);
    kvpages::Model layers;
    for (std::size_t i = 0; i < model.num_layers; ++i) {
        layers.add("blk." + std::to_string(i) + ".attn", spec, backend,
                   static_cast<std::uint32_t>(model.num_heads));
    }
    kvpages::PlanConfig config;
    config.reserved_blocks = 1;  // block 0 stands for no block
    config.num_blocks_override = options.num_blocks + config.reserved_blocks;
    config.max_model_len = model.context_length;
    config.max_tokens_in_flight = options.max_tokens;
    config.auto_fit = true;  // a sequence is as long as the blocks allow
    return kvpages::Plan::make(layers, config);
}

kvpages::TablesConfig tables_config(const CacheOptions& options, const kvpages::Cache& cache) {
    kvpages::TablesConfig config;
    config.device = cache.device();
    config.max_requests = options.max_requests;
    config.max_tokens = options.max_tokens;
    return config;
}

/// Keeps the metadata of a step as it comes, but for the block table, which attention reads on the
/// host. Kernels on a device would read it where it is.
class MetadataBuilder : public kvpages::Builder {
public:
    explicit MetadataBuilder(const device::Device& device) : read_table_(device) {}

    void* build(const kvpages_common_metadata& common, void*) override {
        metadata_.num_requests = common.num_requests;
        metadata_.query_start = common.query_start_host;
        metadata_.seq_lens = common.seq_lens_host_bound;  // the batch's own, so exact
        metadata_.block_table = device::download_table(read_table_, common.block_table);
        metadata_.slots = kvpages::Tensor(common.slot_mapping)
                              .span<const std::int64_t>()
                              .first(common.num_tokens);
        return &metadata_;
    }

private:
    device::Download<std::int32_t> read_table_;
    StepMetadata metadata_;
};

}  // namespace

const std::vector<CacheType>& cache_types() {
    using kvpages::Dtype;
    using kvpages::QuantMode;
    static const std::vector<CacheType> types{
        {"f16", Dtype::f16, QuantMode::none},
        {"bf16", Dtype::bf16, QuantMode::none},
        {"f32", Dtype::f32, QuantMode::none},
        {"fp8", Dtype::f8_e4m3fn, QuantMode::fp8_per_tensor},
        {"int8", Dtype::i8, QuantMode::int8_per_token_head},
    };
    return types;
}

const std::vector<CacheLayout>& cache_layouts() {
    static const std::vector<CacheLayout> layouts{
        {"nhd", "block | token | head | kv*content"},
        {"hnd", "block | head | token | kv*content"},
        {"kv-first", "kv | block | token | head | content"},
    };
    return layouts;
}

KvCache::KvCache(const ModelConfig& model, const CacheOptions& options, ThreadPool& threads)
    : options_(options),
      shape_{model.num_heads, model.num_kv_heads, model.head_size},
      threads_(threads),
      device_(options.place),
      plan_(make_plan(model, options)),
      cache_(kvpages::Cache::allocate(plan_, device_.memory())),
      pages_(device_, plan_, cache_),
      keys_(device_),
      values_(device_),
      tables_(kvpages::Tables::make(plan_, tables_config(options, cache_))),
      ops_(cache_),
      builders_(device_),
      attention_(kvpages::Attention::make(plan_, builders_)) {
    for (std::size_t layer = 0; layer < cache_.num_layers(); ++layer) {
        views_.push_back({pages_.cache().view(layer), cache_.axes(layer)});
    }
    touch_all_blocks();
}

/// The system hands out memory when it is first written to, which is better done now than in a step.
void KvCache::touch_all_blocks() {
    std::vector<std::int32_t> ids(num_blocks());
    std::iota(ids.begin(), ids.end(), 0);
    ops_.zero_blocks(ids, device_.stream());
}

std::unique_ptr<kvpages::Builder> KvCache::Builders::create(const kvpages_builder_info&) {
    return std::make_unique<MetadataBuilder>(device_);
}

/// Runs a call to kvpages on the engine's clock.
template <typename Call>
void KvCache::timed(Call call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    in_kvpages_ += std::chrono::steady_clock::now() - begin;
}

void KvCache::append_blocks(std::size_t row, kvpages::Span<const std::int32_t> ids) {
    timed([&] { tables_.append(row, 0, ids); });
}

void KvCache::clear_row(std::size_t row) {
    timed([&] { tables_.clear(row); });
}

void KvCache::copy_blocks(kvpages::Span<const kvpages_block_copy> copies) {
    timed([&] { ops_.copy_blocks(copies, device_.stream()); });
}

void KvCache::begin_step(kvpages::Batch batch) {
    batch.stream = device_.stream();
    timed([&] { attention_.build(tables_.prepare(batch)); });
}

void KvCache::run(std::size_t layer, const float* queries, const float* keys, const float* values,
                  float* out) {
    const auto& metadata = *attention_.metadata<const StepMetadata>(layer);
    const std::size_t size = metadata.slots.size() * shape_.num_kv_heads * shape_.head_size;
    const auto rows =
        kvpages::kv_rows(layer, keys_({keys, size}).data(), values_({values, size}).data());
    timed([&] {
        ops_.write(rows, metadata.slots, kvpages::Dtype::f32, std::nullopt, device_.stream());
    });
    pages_.fetch(layer, metadata.block_table, {metadata.seq_lens, metadata.num_requests});
    attend(shape_, views_[layer], metadata, queries, out, threads_);
}

}  // namespace smollm
