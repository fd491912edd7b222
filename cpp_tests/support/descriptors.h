// Descriptors of caches, for tests of them and of resharding.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_DESCRIPTORS_H
#define KVPAGES_CPP_TESTS_SUPPORT_DESCRIPTORS_H

#include "api.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace support {

using Descriptor =
    std::unique_ptr<kvpages_descriptor, Destroy<kvpages_descriptor, kvpages_descriptor_destroy>>;
using Reshard = std::unique_ptr<kvpages_reshard, Destroy<kvpages_reshard, kvpages_reshard_destroy>>;

inline std::string descriptor_json(const Cache& cache,
                                   const kvpages_descriptor_config* config = nullptr) {
    std::size_t length = 0;
    const std::int32_t asked =
        kvpages_cache_copy_descriptor(cache.get(), config, nullptr, 0, &length);
    if (asked != KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        must(asked);
    }
    std::string text(length + 1, '\0');
    must(kvpages_cache_copy_descriptor(cache.get(), config, &text[0], text.size(), &length));
    text.resize(length);
    return text;
}

inline std::string json_of(const Descriptor& descriptor) {
    std::size_t length = 0;
    const std::int32_t asked = kvpages_descriptor_copy_json(descriptor.get(), nullptr, 0, &length);
    if (asked != KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        must(asked);
    }
    std::string text(length + 1, '\0');
    must(kvpages_descriptor_copy_json(descriptor.get(), &text[0], text.size(), &length));
    text.resize(length);
    return text;
}

inline Descriptor descriptor_of(const std::string& json) {
    kvpages_descriptor* raw = nullptr;
    must(kvpages_descriptor_create(json.data(), json.size(), &raw));
    return Descriptor(raw);
}

inline kvpages_described_layer described(const Descriptor& descriptor, std::size_t layer) {
    kvpages_described_layer out = KVPAGES_DESCRIBED_LAYER_INIT;
    must(kvpages_descriptor_get_layer(descriptor.get(), layer, &out));
    return out;
}

inline std::vector<kvpages_run> runs_of(const Descriptor& descriptor, std::size_t layer,
                                        std::uint64_t block) {
    std::size_t count = 0;
    std::vector<kvpages_run> runs(static_cast<std::size_t>(described(descriptor, layer).num_runs));
    must(kvpages_descriptor_copy_block_runs(descriptor.get(), layer, block, runs.data(),
                                            runs.size(), &count));
    return runs;
}

inline kvpages_row row_of(const Descriptor& descriptor, std::size_t layer, std::uint64_t block,
                          std::uint64_t slot, std::uint64_t head, std::uint32_t part) {
    kvpages_row row{};
    must(kvpages_descriptor_get_row(descriptor.get(), layer, block, slot, head, part, &row));
    return row;
}

}  // namespace support

#endif
