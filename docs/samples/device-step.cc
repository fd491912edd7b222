// A cache on a device, attention groups without builders, and a batch of two requests.
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <cstdlib>
#include <vector>

namespace {

// The model's kernels of a step.
[[maybe_unused]] void launch(const std::int64_t* slots, void*) {
    if (slots == nullptr) std::abort();
}

}  // namespace

int main() {
    kvpages::AttentionSpec spec;
    spec.num_kv_heads = 2;
    spec.head_size = 64;
    kvpages::Model model;
    model.add("layers.0.attn", spec,
              kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd));
    kvpages::PlanConfig plan_config;
    plan_config.memory_bytes = 1 << 20;
    plan_config.max_model_len = 256;
    plan_config.max_tokens_in_flight = 64;
    plan_config.reserved_blocks = 1;
    const auto plan = kvpages::Plan::make(model, plan_config);
    const auto cache = kvpages::Cache::allocate(plan, kvpages::Memory::cuda());
    auto attention = kvpages::Attention::make(plan);
    const std::vector<std::int32_t> requests{0, 3}, query_start{0, 1, 4}, seq_lens{1, 3};
    const std::vector<std::int64_t> positions{0, 0, 1, 2};
    void* const stream = nullptr;

    // SAMPLE

    return tables.device().kind == KVPAGES_DEVICE_KIND_CUDA ? 0 : 1;
}
