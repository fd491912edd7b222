// A small user of the C++ API: from two layers to their views.
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <cstdio>

namespace {

kvpages::Plan plan_two_layers() {
    kvpages::AttentionSpec spec;
    spec.num_kv_heads = 2;
    spec.head_size = 64;
    const auto backend = kvpages::Backend::preset(kvpages::Preset::cpu_attention);
    kvpages::Model model;
    model.add("layers.0.attn", spec, backend);
    model.add("layers.1.attn", spec, backend);
    kvpages::PlanConfig config;
    config.memory_bytes = std::int64_t{1} << 20;
    config.max_model_len = 256;
    return kvpages::Plan::make(model, config);
}

bool refuses_a_model_that_does_not_fit() {
    kvpages::Model model;
    kvpages::AttentionSpec spec;
    spec.head_size = 64;
    model.add("layers.0.attn", spec);
    kvpages::PlanConfig config;
    config.max_model_len = std::uint64_t{1} << 30;
    config.memory_bytes = 1 << 20;
    try {
        kvpages::Plan::make(model, config);
    } catch (const kvpages::Error& error) {
        return error.status() == KVPAGES_STATUS_DOES_NOT_FIT;
    }
    return false;
}

}  // namespace

int main() {
    std::printf("kvpages %s from C++\n", kvpages_version());
    const kvpages::Cache cache =
        kvpages::Cache::allocate(plan_two_layers(), kvpages::Memory::host());
    const kvpages::Tensor view = cache.view("layers.1.attn");
    view.at<std::uint16_t>(1, 0, 0, 0) = 0x3f80;  // 1.0 in bf16
    const bool works = cache.num_layers() == 2 && view.dtype == kvpages::Dtype::bf16 &&
                       view.shape[0] == static_cast<std::int64_t>(cache.num_blocks()) &&
                       static_cast<std::uint16_t*>(view.data)[view.strides[0]] == 0x3f80;
    return works && refuses_a_model_that_does_not_fit() ? 0 : 1;
}
