// A plan of two layers, and a cache of it in host memory.
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

int main() {
    kvpages::AttentionSpec spec;
    spec.num_kv_heads = 2;
    spec.head_size = 64;
    kvpages::Model model;
    const auto flash = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
    model.add("layers.0.attn", spec, flash);
    model.add("layers.1.attn", spec, flash);
    kvpages::PlanConfig config;
    config.memory_bytes = 1 << 20;
    config.max_model_len = 256;
    config.max_tokens_in_flight = 64;
    config.reserved_blocks = 1;
    const auto plan = kvpages::Plan::make(model, config);
    const auto cache = kvpages::Cache::allocate(plan, kvpages::Memory::host());

    // SAMPLE
}
