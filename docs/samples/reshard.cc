// A rank with all heads sends blocks to two ranks with half of them each.
#include <kvpages/kvpages.hpp>

#include <array>
#include <cstdint>
#include <vector>

namespace {

kvpages::Cache cache_of(std::uint64_t heads) {
    kvpages::AttentionSpec spec;
    spec.num_kv_heads = heads;
    spec.head_size = 64;
    kvpages::Model model;
    model.add("layers.0.attn", spec,
              kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd));
    kvpages::PlanConfig config;
    config.memory_bytes = 1 << 20;
    config.max_model_len = 256;
    return kvpages::Cache::allocate(kvpages::Plan::make(model, config), kvpages::Memory::host());
}

kvpages::Descriptor described(const kvpages::Cache& cache, std::uint64_t rank,
                              std::uint64_t ranks) {
    kvpages::DescriptorConfig config;
    config.tensor_parallel_size = ranks;
    config.tensor_parallel_rank = rank;
    return kvpages::Descriptor::parse(cache.descriptor(config));
}

}  // namespace

int main() {
    const auto all = cache_of(4), low = cache_of(2), high = cache_of(2);
    const auto all_ranks = described(all, 0, 1);
    const auto low_rank = described(low, 0, 2), high_rank = described(high, 1, 2);
    const std::array<const kvpages::Descriptor*, 1> sources{&all_ranks};
    const std::array<const kvpages::Descriptor*, 2> targets{&low_rank, &high_rank};
    const std::array<kvpages_allocation, 3> memory{all.allocation(0), low.allocation(0),
                                                   high.allocation(0)};
    const std::array<kvpages_rank_memory, 1> source_memory{{{&memory[0], 1}}};
    const std::array<kvpages_rank_memory, 2> target_memory{{{&memory[1], 1}, {&memory[2], 1}}};
    const std::uint64_t group = 0;
    const std::int32_t source_block = 3, target_block = 5;
    all.view(0).at<std::uint16_t>(source_block, 2, 0, 0) =
        0x3f80;  // the third head's first element

    // SAMPLE

    return high.view(0).at<std::uint16_t>(target_block, 0, 0, 0) == 0x3f80 ? 0 : 1;
}
