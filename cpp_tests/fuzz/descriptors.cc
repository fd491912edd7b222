// Texts that may be descriptors: whatever is read says where things are inside the allocations that it
// states, is written as it was read, and can be resharded to itself or says why not.
#include <string>

#include "check.h"
#include "world.h"

namespace {

using fuzz::ok;

void check_runs(const kvpages_descriptor* descriptor, std::size_t layer, std::uint64_t block,
                const kvpages_described_layer& said) {
    if (said.num_runs > 64) {
        return;
    }
    std::vector<kvpages_run> runs(static_cast<std::size_t>(said.num_runs));
    std::size_t count = 0;
    FUZZ_CHECK(ok(kvpages_descriptor_copy_block_runs(descriptor, layer, block, runs.data(),
                                                     runs.size(), &count)));
    for (std::size_t run = 0; run < count; ++run) {
        const std::uint64_t size = kvpages_descriptor_allocation_bytes(
            descriptor, static_cast<std::size_t>(runs[run].allocation));
        FUZZ_CHECK(runs[run].size_bytes <= size);
        FUZZ_CHECK(runs[run].offset_bytes <= size - runs[run].size_bytes);
    }
}

void check_row(const kvpages_descriptor* descriptor, std::size_t layer, std::uint64_t block,
               const kvpages_described_layer& said) {
    if (said.row_format == KVPAGES_ROW_FORMAT_NONE) {
        return;
    }
    for (const std::uint32_t part : {KVPAGES_ROW_PART_KEY, KVPAGES_ROW_PART_VALUE}) {
        kvpages_row row{};
        if (!ok(kvpages_descriptor_get_row(descriptor, layer, block, said.block_slots - 1,
                                           said.num_kv_heads - 1, part, &row))) {
            continue;
        }
        const std::uint64_t size = kvpages_descriptor_allocation_bytes(
            descriptor, static_cast<std::size_t>(row.allocation));
        const std::uint64_t last =
            (row.num_elements + row.scale_elements - 1) * row.stride_elements;
        FUZZ_CHECK(row.offset_bytes + (last + 1) * kvpages_dtype_bytes(said.dtype) <= size);
    }
}

void check_layers(const kvpages_descriptor* descriptor) {
    kvpages_descriptor_info info = KVPAGES_DESCRIPTOR_INFO_INIT;
    FUZZ_CHECK(ok(kvpages_descriptor_get_info(descriptor, &info)));
    FUZZ_CHECK(info.num_layers == kvpages_descriptor_num_layers(descriptor));
    for (std::size_t layer = 0; layer < info.num_layers; ++layer) {
        kvpages_described_layer said = KVPAGES_DESCRIBED_LAYER_INIT;
        FUZZ_CHECK(ok(kvpages_descriptor_get_layer(descriptor, layer, &said)));
        FUZZ_CHECK(kvpages_descriptor_layer_name(descriptor, layer) != nullptr);
        if (info.num_blocks > 0) {
            for (const std::uint64_t block : {std::uint64_t{0}, info.num_blocks - 1}) {
                check_runs(descriptor, layer, block, said);
                check_row(descriptor, layer, block, said);
            }
        }
        for (std::size_t state = 0; state < said.num_states; ++state) {
            kvpages_described_state part = KVPAGES_DESCRIBED_STATE_INIT;
            FUZZ_CHECK(ok(kvpages_descriptor_get_state(descriptor, layer, state, &part)));
            FUZZ_CHECK(part.size_bytes <= said.page_size_bytes);
        }
    }
}

void check_reshard(const kvpages_descriptor* descriptor) {
    kvpages_reshard_config config = KVPAGES_RESHARD_CONFIG_INIT;
    config.sources = config.targets = &descriptor;
    config.num_sources = config.num_targets = 1;
    kvpages_reshard* reshard = nullptr;
    if (!ok(kvpages_reshard_create(&config, &reshard))) {
        FUZZ_CHECK(reshard == nullptr);
        return;
    }
    const kvpages_block_move move{0, 0, 0};
    std::vector<kvpages_strided_copy> copies(64);
    std::size_t count = 0;
    ok(kvpages_reshard_copy_copies(reshard, &move, 1, copies.data(), copies.size(), &count));
    kvpages_reshard_destroy(reshard);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    kvpages_descriptor* descriptor = nullptr;
    const char* const text = reinterpret_cast<const char*>(data);
    if (!ok(kvpages_descriptor_create(text, size, &descriptor))) {
        FUZZ_CHECK(descriptor == nullptr);
        return 0;
    }
    check_layers(descriptor);
    check_reshard(descriptor);
    std::size_t length = 0;
    FUZZ_CHECK(kvpages_descriptor_copy_json(descriptor, nullptr, 0, &length) ==
               KVPAGES_STATUS_BUFFER_TOO_SMALL);
    std::string json(length + 1, '\0');
    FUZZ_CHECK(ok(kvpages_descriptor_copy_json(descriptor, &json[0], json.size(), &length)));
    kvpages_descriptor_destroy(descriptor);

    FUZZ_CHECK(ok(kvpages_descriptor_create(json.data(), length, &descriptor)));
    std::string again(length + 1, '\0');
    FUZZ_CHECK(ok(kvpages_descriptor_copy_json(descriptor, &again[0], again.size(), &length)));
    FUZZ_CHECK(again == json);
    kvpages_descriptor_destroy(descriptor);
    return 0;
}
