// Snapshots: the numbers are the plan's, the memory's and the tables' own.
#include "support/api.h"
#include "support/failure.h"
#include "support/refusal.h"
#include "support/tables.h"
#include "support/world.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <vector>

using namespace support;
using Json = nlohmann::json;

namespace {

kvpages_cache_usage usage_of(const std::vector<std::uint64_t>& counts) {
    kvpages_cache_usage usage = KVPAGES_CACHE_USAGE_INIT;
    usage.blocks_in_use = counts.data();
    usage.num_counts = counts.size();
    return usage;
}

kvpages_cache_snapshot snapshot(const Cache& cache, const std::vector<std::uint64_t>& counts = {}) {
    const kvpages_cache_usage usage = usage_of(counts);
    kvpages_cache_snapshot out = KVPAGES_CACHE_SNAPSHOT_INIT;
    must(kvpages_cache_get_snapshot(cache.get(), counts.empty() ? nullptr : &usage, &out));
    return out;
}

std::string snapshot_text(const Cache& cache, const std::vector<std::uint64_t>& counts = {}) {
    const kvpages_cache_usage usage = usage_of(counts);
    std::size_t length = 0;
    EXPECT_EQ(kvpages_cache_copy_snapshot(cache.get(), &usage, nullptr, 0, &length),
              KVPAGES_STATUS_BUFFER_TOO_SMALL);
    std::string text(length + 1, '\0');
    must(kvpages_cache_copy_snapshot(cache.get(), &usage, &text[0], text.size(), &length));
    text.resize(length);
    return text;
}

kvpages_cache_group group(const Cache& cache, std::size_t number) {
    kvpages_cache_group out = KVPAGES_CACHE_GROUP_INIT;
    must(kvpages_cache_get_group(cache.get(), number, &out));
    return out;
}

Cache cache_of_blocks(const Plan& plan, std::uint64_t num_blocks, std::uint32_t flags = 0) {
    const Memory memory = host_memory();
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    config.num_blocks = num_blocks;
    config.flags = flags;
    kvpages_cache* raw = nullptr;
    must(kvpages_cache_create(plan.get(), &config, &raw, nullptr));
    return Cache(raw);
}

/// The keys of a JSON object.
std::set<std::string> keys(const Json& json) {
    std::set<std::string> all;
    for (const auto& item : json.items()) all.insert(item.key());
    return all;
}

/// Everything that the struct says is what the accessors and the plan's explanation say.
void expect_of_plan(const Plan& plan, const Cache& cache) {
    const kvpages_worker_info worker = worker_info(plan);
    const kvpages_cache_snapshot now = snapshot(cache);
    EXPECT_EQ(now.max_blocks, worker.num_blocks);
    EXPECT_EQ(now.num_blocks, kvpages_cache_num_blocks(cache.get()));
    EXPECT_EQ(now.bytes_per_block, worker.bytes_per_block);
    EXPECT_EQ(now.block_bytes, now.num_blocks * worker.bytes_per_block);
    EXPECT_EQ(now.num_groups, worker.num_groups);
    EXPECT_EQ(now.num_layers, kvpages_cache_num_layers(cache.get()));
    EXPECT_EQ(now.num_allocations, kvpages_cache_num_allocations(cache.get()));
    EXPECT_EQ(now.num_regions, kvpages_cache_num_regions(cache.get()));
    EXPECT_EQ(now.has_usage + now.has_group_usage + now.is_poisoned + now.reserved0, 0u);
    EXPECT_EQ(now.blocks_in_use + now.bytes_in_use + now.content_bytes_in_use +
                  now.padding_bytes_in_use + now.unused_bytes_in_use,
              0u);
    EXPECT_EQ(now.utilisation, 0.0);
    std::uint64_t allocated = 0, of_regions = 0;
    for (std::size_t i = 0; i < now.num_allocations; ++i) {
        allocated += allocation(cache, i).size_bytes;
    }
    for (std::size_t i = 0; i < now.num_regions; ++i) {
        kvpages_region region{};
        must(kvpages_cache_get_region(cache.get(), i, &region));
        of_regions += region.block_step_bytes;
    }
    EXPECT_EQ(now.allocation_bytes, allocated);
    EXPECT_EQ(now.bytes_per_block, of_regions);

    const Json explained = Json::parse(explanation(plan, KVPAGES_TEXT_FORMAT_JSON));
    const Json& groups = explained.at("workers").at(0).at("groups");
    ASSERT_EQ(groups.size(), now.num_groups);
    std::uint64_t content = 0, padding = 0, unused = 0, blocks = 0;
    std::vector<std::uint64_t> counts;
    for (std::size_t i = 0; i < now.num_groups; ++i) {
        SCOPED_TRACE("group " + std::to_string(i));
        const kvpages_cache_group of_cache = group(cache, i);
        const Json& of_plan = groups.at(i);
        EXPECT_EQ(of_cache.block_size, of_plan.at("block_size"));
        const Json& kernel = of_plan.at("kernel_block_size");
        EXPECT_EQ(of_cache.kernel_block_size, kernel.is_null() ? 0 : kernel.get<std::uint64_t>());
        EXPECT_EQ(of_cache.num_layers, of_plan.at("layers").size());
        EXPECT_EQ(of_cache.padding_bytes_per_block, of_plan.at("padding_bytes_per_block"));
        EXPECT_EQ(of_cache.unused_bytes_per_block, of_plan.at("unused_bytes_per_block"));
        EXPECT_EQ(of_cache.content_bytes_per_block + of_cache.padding_bytes_per_block,
                  of_plan.at("bytes_per_block").get<std::uint64_t>());
        counts.push_back(i + 1);
        blocks += i + 1;
        content += (i + 1) * of_cache.content_bytes_per_block;
        padding += (i + 1) * of_cache.padding_bytes_per_block;
        unused += (i + 1) * of_cache.unused_bytes_per_block;
    }
    ASSERT_LE(blocks, now.num_blocks);
    const kvpages_cache_snapshot used = snapshot(cache, counts);
    EXPECT_EQ(used.has_usage, 1u);
    EXPECT_EQ(used.has_group_usage, 1u);
    EXPECT_EQ(used.blocks_in_use, blocks);
    EXPECT_EQ(used.bytes_in_use, blocks * worker.bytes_per_block);
    EXPECT_EQ(used.content_bytes_in_use, content);
    EXPECT_EQ(used.padding_bytes_in_use, padding);
    EXPECT_EQ(used.unused_bytes_in_use, unused);
    EXPECT_DOUBLE_EQ(used.utilisation,
                     static_cast<double>(blocks) / static_cast<double>(now.num_blocks));

    const Json json = Json::parse(snapshot_text(cache, counts));
    EXPECT_EQ(json.at("snapshot_version"), 1);
    EXPECT_EQ(json.at("kind"), "cache");
    EXPECT_EQ(json.at("generation"), used.generation);
    EXPECT_EQ(json.at("num_blocks"), used.num_blocks);
    EXPECT_EQ(json.at("max_blocks"), used.max_blocks);
    EXPECT_EQ(json.at("bytes_per_block"), used.bytes_per_block);
    EXPECT_EQ(json.at("block_bytes"), used.block_bytes);
    EXPECT_EQ(json.at("held_bytes"), used.held_bytes);
    EXPECT_EQ(json.at("allocation_bytes"), used.allocation_bytes);
    EXPECT_EQ(json.at("is_poisoned"), false);
    EXPECT_EQ(json.at("usage").at("blocks_in_use"), used.blocks_in_use);
    EXPECT_EQ(json.at("usage").at("bytes_in_use"), used.bytes_in_use);
    EXPECT_EQ(json.at("usage").at("utilisation"), used.utilisation);
    const Json& of_groups = json.at("usage").at("of_groups");
    EXPECT_EQ(of_groups.at("content_bytes"), used.content_bytes_in_use);
    EXPECT_EQ(of_groups.at("padding_bytes"), used.padding_bytes_in_use);
    EXPECT_EQ(of_groups.at("unused_bytes"), used.unused_bytes_in_use);
    for (std::size_t i = 0; i < now.num_groups; ++i) {
        EXPECT_EQ(json.at("groups").at(i).at("blocks_in_use"), i + 1);
        EXPECT_EQ(json.at("groups").at(i).at("padding_bytes"),
                  group(cache, i).padding_bytes_per_block);
    }
    std::uint64_t held = 0;
    for (const Json& part : json.at("allocations")) {
        held += part.at("held_bytes").get<std::uint64_t>();
    }
    EXPECT_EQ(held, used.held_bytes);
    for (std::size_t i = 0; i < now.num_regions; ++i) {
        kvpages_region region{};
        must(kvpages_cache_get_region(cache.get(), i, &region));
        const Json& part = json.at("regions").at(i);
        EXPECT_EQ(part.at("allocation"), region.allocation);
        EXPECT_EQ(part.at("size_bytes"), region.size_bytes);
        EXPECT_EQ(part.at("block_step_bytes"), region.block_step_bytes);
        EXPECT_EQ(part.at("num_blocks"), region.num_blocks);
        EXPECT_EQ(static_cast<unsigned char*>(allocation(cache, region.allocation).data) +
                      part.at("offset_bytes").get<std::uint64_t>(),
                  region.data);
    }
}

}  // namespace

TEST(Snapshot, OfACacheIsWhatThePlanSays) {
    {
        SCOPED_TRACE("full and sliding layers, and one that shares");
        const World world;
        expect_of_plan(world.planned, world.allocated);
        EXPECT_EQ(snapshot(world.allocated).held_bytes, snapshot(world.allocated).allocation_bytes);
    }
    {
        SCOPED_TRACE("keys and values apart, kernel blocks smaller than blocks");
        const Model m = model();
        add(m, "A", full(32, 1, 8), backend_of_sizes(kv_first, {16}));
        add(m, "B", full(32, 1, 8), backend_of_sizes(kv_first, {16}));
        const Plan p = plan_of_blocks(m, 5);
        expect_of_plan(p, cache(p));
    }
    {
        SCOPED_TRACE("attention beside a state, and a layer that no backend reads");
        State state;
        state.add(KVPAGES_DTYPE_F32, {100}).block(64);
        const Model m = model();
        add(m, "A", full(64, 2, 8), backend(packed_nhd));
        add(m, "S", state.spec(), state_backend());
        add(m, "unread", full(64, 2, 8));
        const Plan p = plan_of_blocks(m, 8);
        expect_of_plan(p, cache(p));
        std::uint64_t padding = 0;
        for (std::size_t i = 0; i < worker_info(p).num_groups; ++i) {
            padding += group(cache(p), i).padding_bytes_per_block;
        }
        EXPECT_GT(padding, 0u) << "the state's page is padded";
    }
    {
        SCOPED_TRACE("groups over each other, by the policy compact");
        const Model m = model();
        for (int i = 0; i < 5; ++i) {
            const kvpages_spec spec = i < 3 ? full(16, 2, 8) : sliding(32, 16, 3, 24);
            add(m, "layers." + std::to_string(i), spec, backend(packed_nhd));
        }
        kvpages_plan_config config = plan_config(256);
        config.policy = KVPAGES_POLICY_COMPACT;
        config.max_tokens_in_flight = 16;
        const Plan p = plan({{m.get(), 1000000}}, config);
        expect_of_plan(p, cache(p));
    }
    {
        SCOPED_TRACE("packed");
        const Model m = model();
        for (int i = 0; i < 4; ++i) {
            const kvpages_spec spec = i < 3 ? full(16, 2, 8) : sliding(32, 16, 2, 8);
            add(m, "layers." + std::to_string(i), spec, backend(packed_nhd));
        }
        const Plan p = plan_of_blocks(m, 12, KVPAGES_PLAN_CROSS_LAYER_BLOCKS);
        expect_of_plan(p, cache(p));
    }
}

TEST(Snapshot, UsageIsOfAllGroupsOrOfEach) {
    const World world;
    const kvpages_cache_snapshot all = snapshot(world.allocated, {47});
    EXPECT_EQ(all.has_usage, 1u);
    EXPECT_EQ(all.has_group_usage, 0u);
    EXPECT_EQ(all.blocks_in_use, 47u);
    EXPECT_EQ(all.bytes_in_use, 47 * all.bytes_per_block);
    EXPECT_EQ(all.content_bytes_in_use + all.padding_bytes_in_use + all.unused_bytes_in_use, 0u);
    EXPECT_DOUBLE_EQ(all.utilisation, 47.0 / 48.0);
    const Json json = Json::parse(snapshot_text(world.allocated, {47}));
    EXPECT_TRUE(json.at("usage").at("of_groups").is_null());
    EXPECT_TRUE(json.at("groups").at(0).at("blocks_in_use").is_null());
    EXPECT_EQ(snapshot(world.allocated, {48}).utilisation, 1.0);
    EXPECT_EQ(snapshot(world.allocated, {0, 48}).utilisation, 1.0);
    EXPECT_EQ(snapshot(world.allocated, {0}).has_usage, 1u);
    EXPECT_TRUE(Json::parse(snapshot_text(world.allocated)).at("usage").is_null());
    // Of one group, one number is both.
    const Model m = model();
    add(m, "A", full(16, 2, 8), backend(packed_nhd));
    const Cache one = cache(plan_of_blocks(m, 4));
    EXPECT_EQ(snapshot(one, {3}).has_group_usage, 1u);
    EXPECT_EQ(snapshot(one, {3}).content_bytes_in_use, 3 * snapshot(one).bytes_per_block);
}

TEST(Snapshot, GenerationAndMemoryFollowTheSizeOfTheCache) {
    const Model m = model();
    add(m, "A", full(16, 2, 64), backend(kv_first));
    const Plan p = plan_of_blocks(m, 64);
    const Cache c = cache_of_blocks(p, 2, KVPAGES_CACHE_POISON);
    kvpages_cache_snapshot before = snapshot(c);
    EXPECT_EQ(before.generation, 1u);
    EXPECT_EQ(before.is_poisoned, 1u);
    EXPECT_EQ(before.block_bytes, 2 * before.bytes_per_block);
    for (const std::uint64_t num_blocks : {64u, 64u, 3u, 1u, 40u}) {
        must(kvpages_cache_resize(c.get(), num_blocks, nullptr, 0));
        const kvpages_cache_snapshot now = snapshot(c);
        EXPECT_EQ(now.generation, before.generation + (num_blocks == before.num_blocks ? 0 : 1));
        EXPECT_EQ(now.num_blocks, num_blocks);
        EXPECT_EQ(now.max_blocks, 64u);
        EXPECT_EQ(now.block_bytes, num_blocks * now.bytes_per_block);
        EXPECT_GE(now.held_bytes, now.block_bytes);
        EXPECT_EQ(now.held_bytes > before.held_bytes, num_blocks > before.num_blocks);
        EXPECT_EQ(now.held_bytes < before.held_bytes, num_blocks < before.num_blocks);
        before = now;
    }
    EXPECT_NE(kvpages_cache_resize(c.get(), 65, nullptr, 0), KVPAGES_STATUS_OK);
    EXPECT_EQ(snapshot(c).generation, before.generation);
    // In use are blocks that have memory.
    kvpages_cache_snapshot out = KVPAGES_CACHE_SNAPSHOT_INIT;
    const std::vector<std::uint64_t> counts{41};
    const kvpages_cache_usage too_many = usage_of(counts);
    EXPECT_TRUE(fails(kvpages_cache_get_snapshot(c.get(), &too_many, &out),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "too_many_blocks_in_use", {"41", "40"}));
    EXPECT_EQ(out.num_blocks, 0u) << "what a failed call leaves is zero";
    EXPECT_EQ(out.struct_size, sizeof(out));
}

// docs/observability.md has them all.
TEST(Snapshot, KeysOfTheJson) {
    const World world;
    const Json json = Json::parse(snapshot_text(world.allocated, {1, 2}));
    EXPECT_EQ(keys(json),
              (std::set<std::string>{"snapshot_version", "kind", "cuda_device", "generation",
                                     "num_blocks", "max_blocks", "bytes_per_block", "block_bytes",
                                     "held_bytes", "allocation_bytes", "is_poisoned", "usage",
                                     "groups", "allocations", "regions"}));
    EXPECT_EQ(keys(json.at("usage")), (std::set<std::string>{"blocks_in_use", "utilisation",
                                                             "bytes_in_use", "of_groups"}));
    EXPECT_EQ(keys(json.at("usage").at("of_groups")),
              (std::set<std::string>{"content_bytes", "padding_bytes", "unused_bytes"}));
    EXPECT_EQ(keys(json.at("groups").at(0)),
              (std::set<std::string>{"block_size", "kernel_block_size", "num_layers",
                                     "content_bytes", "padding_bytes", "unused_bytes",
                                     "blocks_in_use"}));
    EXPECT_EQ(keys(json.at("allocations").at(0)),
              (std::set<std::string>{"size_bytes", "held_bytes"}));
    EXPECT_EQ(keys(json.at("regions").at(0)),
              (std::set<std::string>{"allocation", "offset_bytes", "size_bytes",
                                     "block_step_bytes", "num_blocks"}));
}

TEST(Snapshot, HostileArguments) {
    const World world;
    const Cache& c = world.allocated;
    kvpages_cache_snapshot out = KVPAGES_CACHE_SNAPSHOT_INIT;
    const std::int32_t bad = KVPAGES_STATUS_INVALID_ARGUMENT;
    const std::int32_t null = KVPAGES_STATUS_NULL_ARGUMENT;
    const auto with = [&](const std::vector<std::uint64_t>& counts) {
        const kvpages_cache_usage usage = usage_of(counts);
        return kvpages_cache_get_snapshot(c.get(), &usage, &out);
    };
    EXPECT_TRUE(fails(with({1, 2, 3}), bad, "counts_of_groups", {"3", "2 groups"}));
    EXPECT_TRUE(fails(with({49}), bad, "too_many_blocks_in_use", {"49", "48"}));
    EXPECT_TRUE(fails(with({24, 25}), bad, "too_many_blocks_in_use", {"49", "48"}));
    EXPECT_TRUE(fails(with({UINT64_MAX, UINT64_MAX}), bad, "too_many_blocks_in_use", {"48"}));
    kvpages_cache_usage usage = KVPAGES_CACHE_USAGE_INIT;
    usage.num_counts = 2;
    EXPECT_TRUE(fails(kvpages_cache_get_snapshot(c.get(), &usage, &out), null, "null_argument",
                      {"blocks_in_use"}));
    usage.num_counts = SIZE_MAX;
    const std::uint64_t count = 0;
    usage.blocks_in_use = &count;
    EXPECT_TRUE(fails(kvpages_cache_get_snapshot(c.get(), &usage, &out), bad, "overflow"));
    usage = KVPAGES_CACHE_USAGE_INIT;
    usage.struct_size = 8;
    EXPECT_TRUE(fails(kvpages_cache_get_snapshot(c.get(), &usage, &out), bad, "struct_size"));
    EXPECT_TRUE(fails(kvpages_cache_get_snapshot(nullptr, nullptr, &out), null, "null_argument"));
    EXPECT_TRUE(fails(kvpages_cache_get_snapshot(c.get(), nullptr, nullptr), null, "null_argument"));
    out.struct_size = sizeof(out) - 8;
    EXPECT_TRUE(fails(kvpages_cache_get_snapshot(c.get(), nullptr, &out), bad, "struct_size"));
    kvpages_cache_group of_group = KVPAGES_CACHE_GROUP_INIT;
    EXPECT_TRUE(fails(kvpages_cache_get_group(c.get(), 2, &of_group), KVPAGES_STATUS_NOT_FOUND,
                      "not_found", {"2"}));
    EXPECT_TRUE(fails(kvpages_cache_get_group(c.get(), SIZE_MAX, &of_group),
                      KVPAGES_STATUS_NOT_FOUND, "not_found"));
    EXPECT_TRUE(fails(kvpages_cache_copy_snapshot(c.get(), nullptr, nullptr, 0, nullptr), null,
                      "null_argument", {"out_length"}));
    std::size_t length = 77;
    char small[4] = "abc";
    EXPECT_TRUE(fails(kvpages_cache_copy_snapshot(c.get(), nullptr, small, 4, &length),
                      KVPAGES_STATUS_BUFFER_TOO_SMALL, "buffer_too_small"));
    EXPECT_EQ(std::string(small), "abc");
    EXPECT_GT(length, 100u);
    std::string exact(length + 1, 'x');
    must(kvpages_cache_copy_snapshot(c.get(), nullptr, &exact[0], exact.size(), &length));
    EXPECT_EQ(exact.back(), '\0');
    kvpages_tables_snapshot of_tables = KVPAGES_TABLES_SNAPSHOT_INIT;
    EXPECT_TRUE(fails(kvpages_tables_get_snapshot(nullptr, &of_tables), null, "null_argument"));
    EXPECT_TRUE(fails(kvpages_tables_copy_snapshot(nullptr, nullptr, 0, &length), null,
                      "null_argument"));
    world.expect_unchanged();
}

TEST(Snapshot, OfTablesFollowsWhatIsDoneToThem) {
    const std::vector<kvpages_table_group> groups{{16, 8, 4, 0, 0}, {16, 16, 4, 0, 0}};
    kvpages::TablesConfig config;
    config.max_requests = 5;
    config.max_tokens = 32;
    kvpages::Tables tables = kvpages::Tables::make(groups, config);
    kvpages_tables_snapshot now = tables.snapshot();
    EXPECT_EQ(now.generation, 1u);
    EXPECT_EQ(now.num_groups, 2u);
    EXPECT_EQ(now.max_requests, 5u);
    EXPECT_EQ(now.max_tokens, 32u);
    EXPECT_EQ(now.max_entries, 5u * (8 + 4));
    EXPECT_EQ(now.rows_in_use + now.num_entries + now.pending_rows + now.batch_requests +
                  now.batch_tokens + now.is_lost,
              0u);
    // Tables, input tables and slots at the least.
    EXPECT_GE(now.host_bytes + now.device_bytes, 2 * 5 * (8 + 4) * 4u + 2 * 32 * 8u);
    EXPECT_EQ(now.device_bytes == 0, now.pinned_bytes == 0);

    const std::vector<std::int32_t> blocks{1, 2, 3};
    tables.append(0, 0, blocks);
    tables.append(0, 1, blocks);
    tables.append(3, 1, blocks);
    now = tables.snapshot();
    EXPECT_EQ(now.generation, 1u) << "nothing is applied yet";
    EXPECT_EQ(now.rows_in_use, 2u);
    EXPECT_EQ(now.num_entries, 6u + 3 + 3);
    EXPECT_EQ(now.pending_rows, 3u);

    const std::vector<std::int32_t> requests{0, -1, 3}, query_start{0, 2, 2, 3}, seq_lens{2, 1, 1};
    const std::vector<std::int64_t> positions{0, 1, 0};
    tables.prepare({requests, query_start, seq_lens, positions, nullptr});
    now = tables.snapshot();
    EXPECT_EQ(now.generation, 2u);
    EXPECT_EQ(now.pending_rows, 0u);
    EXPECT_EQ(now.batch_requests, 3u);
    EXPECT_EQ(now.batch_tokens, 3u);
    EXPECT_LE(now.pinned_pages_in_use, now.pinned_pages);

    const Json json = Json::parse(tables.snapshot_json());
    EXPECT_EQ(keys(json),
              (std::set<std::string>{"snapshot_version", "kind", "cuda_device", "generation",
                                     "max_requests", "max_tokens", "rows_in_use", "num_entries",
                                     "max_entries", "pending_rows", "batch_requests",
                                     "batch_tokens", "host_bytes", "device_bytes", "pinned_bytes",
                                     "pinned_pages", "pinned_pages_in_use", "is_lost", "groups"}));
    EXPECT_EQ(json.at("snapshot_version"), 1);
    EXPECT_EQ(json.at("kind"), "tables");
    EXPECT_EQ(json.at("generation"), 2);
    EXPECT_EQ(json.at("num_entries"), now.num_entries);
    EXPECT_EQ(json.at("host_bytes"), now.host_bytes);
    EXPECT_EQ(json.at("is_lost"), false);
    ASSERT_EQ(json.at("groups").size(), 2u);
    EXPECT_EQ(keys(json.at("groups").at(0)),
              (std::set<std::string>{"block_size", "kernel_block_size", "row_blocks", "row_width",
                                     "rows_in_use", "num_entries", "max_entries",
                                     "pending_rows"}));
    EXPECT_EQ(json.at("groups").at(0).at("num_entries"), 6);
    EXPECT_EQ(json.at("groups").at(0).at("rows_in_use"), 1);
    EXPECT_EQ(json.at("groups").at(1).at("num_entries"), 6);
    EXPECT_EQ(json.at("groups").at(1).at("rows_in_use"), 2);
    EXPECT_EQ(json.at("groups").at(0).at("row_width"), 8);

    // A refused call changes nothing; each that changes what kernels read counts.
    EXPECT_NE(kvpages_tables_append(tables.get(), 9, 0, blocks.data(), 3), KVPAGES_STATUS_OK);
    const std::int32_t too_many[]{7};
    EXPECT_NE(kvpages_tables_gather(tables.get(), too_many, 1, 1, nullptr), KVPAGES_STATUS_OK);
    EXPECT_EQ(tables.snapshot().generation, 2u);
    must(kvpages_tables_clear(tables.get(), 0));
    EXPECT_EQ(tables.snapshot().rows_in_use, 1u);
    EXPECT_EQ(tables.snapshot().pending_rows, 2u);
    must(kvpages_tables_apply(tables.get(), nullptr));
    EXPECT_EQ(tables.snapshot().generation, 3u);
    must(kvpages_tables_gather_dummies(tables.get(), 2, nullptr));
    must(kvpages_tables_map_dummies(tables.get(), nullptr));
    now = tables.snapshot();
    EXPECT_EQ(now.generation, 5u);
    EXPECT_EQ(now.batch_requests + now.batch_tokens, 0u);
    must(kvpages_tables_reset(tables.get(), nullptr));
    now = tables.snapshot();
    EXPECT_EQ(now.generation, 6u);
    EXPECT_EQ(now.rows_in_use + now.num_entries + now.pending_rows, 0u);
}

TEST(Snapshot, ManyThreadsMayLook) {
    const World world;
    std::vector<std::thread> threads;
    std::vector<int> faults(4, 0);
    for (std::size_t i = 0; i < faults.size(); ++i) {
        threads.emplace_back([&world, &fault = faults[i]] {
            for (int round = 0; round < 200; ++round) {
                kvpages_cache_snapshot out = KVPAGES_CACHE_SNAPSHOT_INIT;
                const std::uint64_t counts[]{3, 4};
                kvpages_cache_usage usage = KVPAGES_CACHE_USAGE_INIT;
                usage.blocks_in_use = counts;
                usage.num_counts = 2;
                const std::int32_t status =
                    kvpages_cache_get_snapshot(world.allocated.get(), &usage, &out);
                fault += status != KVPAGES_STATUS_OK || out.blocks_in_use != 7 ? 1 : 0;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(faults, std::vector<int>(4, 0));
}

TEST(Snapshot, ThroughTheHeaderOfCxx) {
    kvpages::AttentionSpec spec;
    spec.block_size = 16;
    spec.num_kv_heads = 2;
    spec.head_size = 8;
    kvpages::Model model;
    model.add("layers.0.attn", spec,
              kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd));
    kvpages::PlanConfig config;
    config.memory_bytes = 100000;
    config.max_model_len = 64;
    config.max_tokens_in_flight = 16;
    const kvpages::Plan plan = kvpages::Plan::make(model, config);
    const kvpages::Cache cache = kvpages::Cache::allocate(plan, kvpages::Memory::host());
    const std::vector<std::uint64_t> in_use{5};
    EXPECT_EQ(cache.snapshot().has_usage, 0u);
    EXPECT_EQ(cache.snapshot(in_use).blocks_in_use, 5u);
    EXPECT_EQ(Json::parse(cache.snapshot_json(in_use)).at("usage").at("blocks_in_use"), 5);
    EXPECT_EQ(cache.group(0).block_size, 16u);
    try {
        static_cast<void>(cache.group(1));
        FAIL() << "there is no such group";
    } catch (const kvpages::Error& error) {
        EXPECT_EQ(error.status(), KVPAGES_STATUS_NOT_FOUND);
    }
}
