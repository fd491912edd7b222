// A cache, and a consumer of tensors that looks at one and gives it back.
#include <kvpages/kvpages.hpp>

namespace {

void take(DLManagedTensorVersioned* tensor) { kvpages_dlpack_destroy(tensor); }

}  // namespace

int main() {
    kvpages::AttentionSpec spec;
    spec.num_kv_heads = 2;
    spec.head_size = 64;
    kvpages::Model model;
    model.add("model.layers.0.self_attn", spec,
              kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd));
    kvpages::PlanConfig config;
    config.memory_bytes = 1 << 20;
    config.max_model_len = 256;
    const auto plan = kvpages::Plan::make(model, config);
    const auto cache = kvpages::Cache::allocate(plan, kvpages::Memory::host());

    // SAMPLE
}
