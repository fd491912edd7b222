// One of two ranks sends the descriptor of its cache; who reads it has the same memory here.
#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace {

std::string received;
std::size_t bytes_read = 0;

void send(const std::string& text) { received = text; }

void read_remote(const std::byte* from, std::uint64_t bytes) {
    for (std::uint64_t i = 0; i < bytes; ++i) bytes_read += from[i] == std::byte{0} ? 1u : 0u;
}

}  // namespace

int main() {
    kvpages::AttentionSpec spec;
    spec.num_kv_heads = 2;
    spec.head_size = 64;
    kvpages::Model model;
    model.add("model.layers.7.self_attn", spec,
              kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd));
    kvpages::PlanConfig config;
    config.memory_bytes = 1 << 20;
    config.max_model_len = 256;
    const auto plan = kvpages::Plan::make(model, config);
    const auto cache = kvpages::Cache::allocate(plan, kvpages::Memory::host());
    std::vector<const std::byte*> base;
    for (std::size_t i = 0; i < cache.num_allocations(); ++i) {
        base.push_back(static_cast<const std::byte*>(cache.allocation(i).data));
    }
    const std::uint64_t block = 3, slot = 5, head = 1;

    // SAMPLE

    const auto axes = cache.axes(0);
    const std::uint64_t expected = 2 * axes.key(block, slot, head);
    return bytes_read == 16 * 2 * 2 * 64 * 2 && key.offset_bytes == expected ? 0 : 1;
}
