// What examples/smollm does in each layer, with an attention that looks at one element.
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <vector>

namespace {

struct Metadata {
    std::vector<std::int64_t> slots;
};

void attend(int, const kvpages::Tensor& view, const Metadata&, const float*, float* out, int) {
    out[0] = view.at<float>(1, 0, 0, 0);
}

}  // namespace

int main() {
    kvpages::AttentionSpec spec;
    spec.dtype = kvpages::Dtype::f32;
    spec.head_size = 64;
    kvpages::Model model;
    model.add("layers.0.attn", spec, kvpages::Backend::preset(kvpages::Preset::cpu_attention));
    kvpages::PlanConfig config;
    config.memory_bytes = 1 << 20;
    config.max_model_len = 64;
    const auto cache =
        kvpages::Cache::allocate(kvpages::Plan::make(model, config), kvpages::Memory::host());
    const kvpages::Ops ops_(cache);
    const std::vector<kvpages::Tensor> views_{cache.view(0)};
    const Metadata metadata{{16}};
    const std::vector<float> row(64, 0.5f);
    const float *keys = row.data(), *values = row.data(), *queries = row.data();
    float out[1] = {0};
    const std::size_t layer = 0;
    const int shape_ = 0, threads_ = 1;

    // SAMPLE

    return out[0] > 0.4f && out[0] < 0.6f ? 0 : 1;
}
