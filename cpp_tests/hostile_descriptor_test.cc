// Texts that are no descriptors, or that lie: refused, or harmless.
#include "support/api.h"
#include "support/descriptors.h"
#include "support/failure.h"
#include "support/garbage.h"
#include "support/refusal.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

using namespace support;

namespace {

Cache small_cache() {
    const Model m = model();
    const Backend kernels = backend(kv_first);
    add(m, "a", full(4, 2, 4), kernels);
    add(m, "b", full(4, 2, 4), kernels);
    share(m, "c", "a", kernels);
    State state;
    state.block(4).add(KVPAGES_DTYPE_F32, {3, 2}).padded(page_bytes(full(4, 2, 4)));
    add(m, "d", state.spec(), state_backend());
    return cache(plan_of_blocks(m, 3));
}

std::string text_of(const Cache& c) {
    kvpages_descriptor_config config = KVPAGES_DESCRIPTOR_CONFIG_INIT;
    config.tensor_parallel_size = 2;
    return descriptor_json(c, &config);
}

// Whatever is read: all that it answers lies inside the allocations that it states.
void expect_harmless(const std::string& json) {
    Out<kvpages_descriptor*> raw;
    const std::int32_t status = kvpages_descriptor_create(json.data(), json.size(), &raw);
    if (status != KVPAGES_STATUS_OK) {
        ASSERT_TRUE(status == KVPAGES_STATUS_INVALID_ARGUMENT ||
                    status == KVPAGES_STATUS_UNSUPPORTED)
            << kvpages_last_error_message();
        ASSERT_TRUE(raw.is_zero());
        return;
    }
    const Descriptor d(raw.value);
    kvpages_descriptor_info info = KVPAGES_DESCRIPTOR_INFO_INIT;
    must(kvpages_descriptor_get_info(d.get(), &info));
    for (std::size_t layer = 0; layer < kvpages_descriptor_num_layers(d.get()); ++layer) {
        const kvpages_described_layer said = described(d, layer);
        const std::uint64_t size = kvpages_descriptor_allocation_bytes(
            d.get(), static_cast<std::size_t>(said.allocation));
        for (const std::uint64_t block : {std::uint64_t{0}, info.num_blocks - 1}) {
            if (info.num_blocks == 0 || said.num_runs > 1000) {
                continue;
            }
            for (const kvpages_run& run : runs_of(d, layer, block)) {
                ASSERT_LE(run.size_bytes, size);
                ASSERT_LE(run.offset_bytes, size - run.size_bytes);
            }
            if (said.row_format == KVPAGES_ROW_FORMAT_NONE) {
                continue;
            }
            for (const std::uint32_t part : {0u, 1u}) {
                kvpages_row row{};
                if (kvpages_descriptor_get_row(d.get(), layer, block, said.block_slots - 1,
                                               said.num_kv_heads - 1, part,
                                               &row) != KVPAGES_STATUS_OK) {
                    continue;
                }
                const std::uint64_t last =
                    (row.num_elements + row.scale_elements - 1) * row.stride_elements;
                ASSERT_LE(row.offset_bytes + (last + 1) * kvpages_dtype_bytes(said.dtype), size);
            }
        }
    }
}

}  // namespace

TEST(HostileDescriptor, TruncatedAtEveryByte) {
    const std::string json = text_of(small_cache());
    for (std::size_t length = 0; length < json.size(); ++length) {
        kvpages_descriptor* raw = nullptr;
        EXPECT_TRUE(fails(kvpages_descriptor_create(json.data(), length, &raw),
                          KVPAGES_STATUS_INVALID_ARGUMENT, "descriptor_not_json", {}))
            << length;
        ASSERT_EQ(raw, nullptr);
    }
    descriptor_of(json);
}

TEST(HostileDescriptor, EveryBitFlipped) {
    const std::string json = text_of(small_cache());
    for (std::size_t at = 0; at < json.size(); ++at) {
        for (int bit = 0; bit < 8; ++bit) {
            std::string changed = json;
            changed[at] = static_cast<char>(static_cast<unsigned char>(changed[at]) ^ (1u << bit));
            expect_harmless(changed);
            if (::testing::Test::HasFatalFailure()) {
                FAIL() << "bit " << bit << " of byte " << at << ": " << changed;
            }
        }
    }
}

TEST(HostileDescriptor, EveryNumberHuge) {
    const std::string json = text_of(small_cache());
    for (const std::string number :
         {"0", "1", "3", "4294967296", "9223372036854775807", "9223372036854775808",
          "18446744073709551615", "18446744073709551616", "-1", "1.5", "1e9", "1e400", "null",
          "\"1\"", "[]", "{}", "true"}) {
        for (std::size_t at = 0; at < json.size(); ++at) {
            const bool starts = json[at] >= '0' && json[at] <= '9' &&
                                (json[at - 1] == ':' || json[at - 1] == '[' || json[at - 1] == ',');
            if (!starts) {
                continue;
            }
            const std::size_t end = json.find_first_not_of("0123456789", at);
            expect_harmless(json.substr(0, at) + number + json.substr(end));
            if (::testing::Test::HasFatalFailure()) {
                FAIL() << number << " at byte " << at;
            }
        }
    }
}

TEST(HostileDescriptor, OtherTexts) {
    const std::string json = text_of(small_cache());
    const auto refused = [](const std::string& text, std::int32_t status, const std::string& kind,
                            const std::vector<std::string>& words) {
        kvpages_descriptor* raw = nullptr;
        EXPECT_TRUE(fails(kvpages_descriptor_create(text.data(), text.size(), &raw), status, kind,
                          words))
            << text;
        EXPECT_EQ(raw, nullptr);
    };
    const auto changed = [&](const std::string& from, const std::string& to) {
        std::string text = json;
        const std::size_t at = text.find(from);
        EXPECT_NE(at, std::string::npos) << from;
        return text.replace(at, from.size(), to);
    };
    constexpr std::int32_t invalid = KVPAGES_STATUS_INVALID_ARGUMENT;
    for (const std::string version : {"0", "2", "18446744073709551615"}) {
        refused("{\"descriptor_version\":" + version + "}", KVPAGES_STATUS_UNSUPPORTED,
                "descriptor_version", {version, "reads version 1"});
    }
    refused("{}", invalid, "descriptor_not_json", {"descriptor_version"});
    refused(std::string(100000, '['), invalid, "descriptor_not_json", {});
    refused(changed("\"num_blocks\"", "\"blocks\""), invalid, "descriptor_not_json",
            {"num_blocks"});
    refused(changed("\"num_blocks\":3", "\"num_blocks\":3,\"num_blocks\":3"), invalid,
            "descriptor_not_json", {"duplicate"});
    refused(json + "x", invalid, "descriptor_not_json", {});
    refused(changed("\"name\":\"b\"", "\"name\":\"a\""), invalid, "descriptor_invalid",
            {"layer a", "two layers"});
    refused(changed("\"name\":\"b\"", "\"name\":\"b\\u0000\""), invalid, "descriptor_invalid", {});
    refused(changed("\"float16\"", "\"float17\""), invalid, "descriptor_not_json", {"float17"});
    refused(changed("\"plain\"", "\"spread\""), invalid, "descriptor_not_json", {"spread"});
    refused(changed("\"max_blocks\":3", "\"max_blocks\":4"), invalid, "descriptor_invalid",
            {"layer a"});
    refused(changed("\"num_blocks\":3", "\"num_blocks\":4"), invalid, "descriptor_invalid",
            {"num_blocks is 4"});
    // A short text must not make its reader list more runs than fit in memory.
    const std::string huge = std::to_string(std::uint64_t{1} << 60);
    const std::string huge_page = std::to_string(std::uint64_t{1} << 61);
    std::string runs = changed("\"num_runs\":1", "\"num_runs\":" + huge);
    for (const char* bytes : {"\"page_bytes\":", "\"size_bytes\":"}) {
        const std::size_t at = runs.find(bytes) + std::string(bytes).size();
        runs.replace(at, runs.find_first_not_of("0123456789", at) - at, huge_page);
    }
    refused(runs, invalid, "descriptor_invalid", {"pages.num_runs", huge, "1048576"});
    // Keys of a later library that does the same otherwise.
    descriptor_of(changed("\"num_blocks\"", "\"colour\":[{\"deep\":[1,2]}],\"num_blocks\""));
    descriptor_of(" " + json + "\n");
    // What may be null may be left out.
    for (const std::string key : {"\"scale_dtype\":null,", "\"context_parallel\":null,"}) {
        EXPECT_EQ(json_of(descriptor_of(changed(key, ""))), json);
    }
    EXPECT_EQ(json_of(descriptor_of(changed(",\"states\":null", ""))), json);
}

TEST(HostileDescriptor, Pointers) {
    const Cache c = small_cache();
    const std::string json = text_of(c);
    const Descriptor d = descriptor_of(json);
    constexpr std::int32_t null = KVPAGES_STATUS_NULL_ARGUMENT;
    constexpr std::int32_t invalid = KVPAGES_STATUS_INVALID_ARGUMENT;
    std::size_t length = 7;
    EXPECT_EQ(kvpages_cache_copy_descriptor(nullptr, nullptr, nullptr, 0, &length), null);
    EXPECT_EQ(kvpages_cache_copy_descriptor(c.get(), nullptr, nullptr, 0, nullptr), null);
    EXPECT_EQ(kvpages_cache_copy_descriptor(c.get(), nullptr, nullptr, 1 << 20, &length), null);
    EXPECT_EQ(kvpages_cache_copy_descriptor(c.get(), nullptr, nullptr, 0, odd(&length)), invalid);
    kvpages_descriptor_config config = KVPAGES_DESCRIPTOR_CONFIG_INIT;
    config.struct_size = 3;
    EXPECT_TRUE(fails(kvpages_cache_copy_descriptor(c.get(), &config, nullptr, 0, &length), invalid,
                      "struct_size", {}));
    config = KVPAGES_DESCRIPTOR_CONFIG_INIT;
    config.tensor_parallel_rank = 1;
    EXPECT_TRUE(fails(kvpages_cache_copy_descriptor(c.get(), &config, nullptr, 0, &length), invalid,
                      "bad_values", {"tensor_parallel_size is 0"}));
    config.tensor_parallel_size = 1;
    EXPECT_TRUE(fails(kvpages_cache_copy_descriptor(c.get(), &config, nullptr, 0, &length), invalid,
                      "descriptor_invalid", {"tensor_parallel.rank is 1"}));
    config.tensor_parallel_size = UINT64_MAX;
    EXPECT_TRUE(fails(kvpages_cache_copy_descriptor(c.get(), &config, nullptr, 0, &length), invalid,
                      "overflow", {}));
    config.tensor_parallel_size = 2;
    config.num_model_kv_heads = 2;
    EXPECT_EQ(kvpages_cache_copy_descriptor(c.get(), &config, nullptr, 0, &length), null);
    const std::uint64_t heads[2] = {4, 4};
    config.model_kv_heads = heads;
    EXPECT_TRUE(fails(kvpages_cache_copy_descriptor(c.get(), &config, nullptr, 0, &length), invalid,
                      "per_layer_array_length", {"2", "4"}));

    Out<kvpages_descriptor*> raw;
    EXPECT_EQ(kvpages_descriptor_create(nullptr, 3, &raw), null);
    EXPECT_TRUE(raw.is_zero());
    EXPECT_EQ(kvpages_descriptor_create(json.data(), json.size(), nullptr), null);
    EXPECT_EQ(kvpages_descriptor_create(json.data(), SIZE_MAX, &raw), invalid);
    kvpages_descriptor_destroy(nullptr);
    EXPECT_EQ(kvpages_descriptor_num_layers(nullptr), 0u);
    EXPECT_EQ(kvpages_descriptor_allocation_bytes(nullptr, 0), 0u);
    EXPECT_EQ(kvpages_descriptor_allocation_bytes(d.get(), SIZE_MAX), 0u);
    EXPECT_EQ(kvpages_descriptor_layer_name(nullptr, 0), nullptr);
    EXPECT_EQ(kvpages_descriptor_layer_name(d.get(), SIZE_MAX), nullptr);

    std::size_t layer = 7;
    EXPECT_EQ(kvpages_descriptor_find_layer(d.get(), nullptr, &layer), null);
    EXPECT_TRUE(fails(kvpages_descriptor_find_layer(d.get(), "z", &layer),
                      KVPAGES_STATUS_NOT_FOUND, "not_found", {"z"}));
    EXPECT_EQ(layer, 0u);
    Info<kvpages_described_layer> described_layer;
    EXPECT_EQ(kvpages_descriptor_get_layer(d.get(), 4, &described_layer), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_TRUE(described_layer.is_zero());
    Info<kvpages_described_state> state;
    EXPECT_EQ(kvpages_descriptor_get_state(d.get(), 0, 0, &state), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(kvpages_descriptor_get_state(d.get(), 3, 1, &state), KVPAGES_STATUS_NOT_FOUND);
    Info<kvpages_described_group> group;
    EXPECT_EQ(kvpages_descriptor_get_group(d.get(), SIZE_MAX, &group), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(kvpages_descriptor_get_info(d.get(), nullptr), null);

    kvpages_run runs[2];
    std::size_t count = 7;
    EXPECT_EQ(kvpages_descriptor_copy_block_runs(d.get(), 0, 0, nullptr, 2, &count), null);
    EXPECT_EQ(kvpages_descriptor_copy_block_runs(d.get(), 0, 0, nullptr, 0, &count),
              KVPAGES_STATUS_BUFFER_TOO_SMALL);
    EXPECT_EQ(count, described(d, 0).num_runs);
    EXPECT_EQ(kvpages_descriptor_copy_block_runs(d.get(), 0, UINT64_MAX, runs, 2, &count), invalid);
    EXPECT_EQ(kvpages_descriptor_copy_block_runs(d.get(), 9, 0, runs, 2, &count),
              KVPAGES_STATUS_NOT_FOUND);

    Out<kvpages_row> row;
    const auto ask = [&](std::size_t of, std::uint64_t block, std::uint64_t slot,
                         std::uint64_t head, std::uint32_t part) {
        return kvpages_descriptor_get_row(d.get(), of, block, slot, head, part, &row);
    };
    EXPECT_TRUE(fails(ask(0, 3, 0, 0, 0), invalid, "block_id_out_of_range", {"layer a", "3"}));
    EXPECT_TRUE(fails(ask(0, 0, 4, 0, 0), invalid, "row_out_of_range", {"slot 4"}));
    EXPECT_TRUE(fails(ask(0, 0, 0, 2, 0), invalid, "row_out_of_range", {"head 2"}));
    EXPECT_TRUE(fails(ask(0, 0, 0, 0, 2), invalid, "unknown_value", {"part is 2"}));
    EXPECT_TRUE(fails(ask(3, 0, 0, 0, 0), KVPAGES_STATUS_UNSUPPORTED, "rows_not_supported", {"d"}));
    EXPECT_TRUE(fails(ask(4, 0, 0, 0, 0), KVPAGES_STATUS_NOT_FOUND, "not_found", {"4"}));
    EXPECT_TRUE(row.is_zero());
    EXPECT_EQ(kvpages_descriptor_get_row(d.get(), 0, 0, 0, 0, 0, nullptr), null);
}
