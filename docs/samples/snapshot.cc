// A cache of two groups, a pool that counts its blocks, and what collects numbers.
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <cstdlib>
#include <vector>

namespace {

struct Pool {
    std::uint64_t used(int group) const { return group == 0 ? 3 : 2; }
};

struct Metrics {
    template <typename T>
    void gauge(const char*, T value) const {
        if (value < T{}) std::abort();
    }
};

}  // namespace

int main() {
    kvpages::AttentionSpec full;
    full.num_kv_heads = 2;
    full.head_size = 64;
    kvpages::AttentionSpec window = full;
    window.kind = kvpages::AttentionKind::sliding_window;
    window.sliding_window = 64;
    kvpages::Model model;
    const auto flash = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
    model.add("layers.0.attn", full, flash);
    model.add("layers.1.attn", window, flash);
    kvpages::PlanConfig config;
    config.memory_bytes = 1 << 20;
    config.max_model_len = 256;
    const auto plan = kvpages::Plan::make(model, config);
    const auto cache = kvpages::Cache::allocate(plan, kvpages::Memory::host());
    const Pool pool;
    const Metrics metrics;

    // SAMPLE
}
