// The step of examples/smollm/kv_cache.cc.
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <vector>

namespace {

class KvCache {
public:
    KvCache(const kvpages::Plan& plan, const kvpages::TablesConfig& config)
        : tables_(kvpages::Tables::make(plan, config)),
          attention_(kvpages::Attention::make(plan)) {}

    void begin_step(kvpages::Span<const std::int32_t> rows,
                    kvpages::Span<const std::int32_t> query_start,
                    kvpages::Span<const std::int32_t> seq_lens,
                    kvpages::Span<const std::int64_t> positions) {
        // SAMPLE
    }

private:
    kvpages::Tables tables_;
    kvpages::Attention attention_;
};

}  // namespace

int main() {
    kvpages::AttentionSpec spec;
    spec.head_size = 64;
    kvpages::Model model;
    model.add("layers.0.attn", spec, kvpages::Backend::preset(kvpages::Preset::cpu_attention));
    kvpages::PlanConfig config;
    config.memory_bytes = 1 << 20;
    config.max_model_len = 64;
    kvpages::TablesConfig sizes;
    sizes.max_requests = 2;
    sizes.max_tokens = 8;
    KvCache cache(kvpages::Plan::make(model, config), sizes);
    const std::vector<std::int32_t> rows{0}, query_start{0, 1}, seq_lens{1};
    const std::vector<std::int64_t> positions{0};
    cache.begin_step(rows, query_start, seq_lens, positions);
    return 0;
}
