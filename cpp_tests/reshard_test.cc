// Blocks that move between tensor-parallel sizes and layouts, through the C interface: written and
// read back through the views of real caches.
#include "support/api.h"
#include "support/bytes.h"
#include "support/descriptors.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

using namespace support;

namespace {

constexpr std::uint64_t block_size = 8;
constexpr std::uint64_t model_heads = 4;
const char* const nhd = "block | token | head | kv*content";
const char* const head_first = "block | head | token | kv*content";

struct Side {
    std::string layout;
    std::string order;
    std::uint64_t ranks = 1;
    std::uint64_t kernel_block = 0;
    std::uint64_t num_blocks = 5;
    std::uint64_t padding = 0;  // bytes of a page
};

// One rank of a model: two full layers, one sliding, one that shares, a latent.
struct Rank {
    Plan planned;
    Cache cache;
    Descriptor descriptor;
    std::vector<kvpages_allocation> allocations;
    std::uint64_t first_head = 0;

    kvpages_rank_memory memory() const { return {allocations.data(), allocations.size()}; }
};

const std::vector<std::string>& layers() {
    static const std::vector<std::string> all{"full.0", "sliding.1", "full.2", "shares.3",
                                              "latent.4"};
    return all;
}

Rank rank(const Side& side, std::uint64_t number) {
    const std::uint64_t heads = side.ranks < model_heads ? model_heads / side.ranks : 1;
    BackendOptions options;
    options.layout = side.layout;
    options.memory_order = side.order;
    if (side.kernel_block != 0) {
        options.sizes = {side.kernel_block};
        options.multiples.clear();
    }
    const Backend kernels = backend(options);
    kvpages_spec of_full = full(block_size, heads, 4, KVPAGES_DTYPE_F32);
    kvpages_spec of_sliding = sliding(16, block_size, heads, 4, KVPAGES_DTYPE_F32);
    if (side.padding != 0) {
        of_full.page_size_padded_bytes = page_bytes(of_full) + side.padding;
        of_sliding.page_size_padded_bytes = page_bytes(of_sliding) + side.padding;
    }
    const Model m = model();
    add(m, layers()[0], of_full, kernels);
    add(m, layers()[1], of_sliding, kernels);
    add(m, layers()[2], of_full, kernels);
    share(m, layers()[3], layers()[0], kernels);
    add(m, layers()[4], mla(block_size, 6, KVPAGES_DTYPE_F32), backend(latent));
    const std::uint64_t page = page_bytes(of_full);
    const std::uint64_t of_latent = page_bytes(mla(block_size, 6, KVPAGES_DTYPE_F32));
    Parts parts;
    parts.num_blocks = side.num_blocks;
    parts.groups = {{{layers()[0], layers()[2], layers()[3]}, 0},
                    {{layers()[1]}, 0},
                    {{layers()[4]}, 0}};
    parts.tensors = {{side.num_blocks * page, {layers()[0], layers()[1]}, 0, 0},
                     {side.num_blocks * page, {layers()[2]}, 0, 0},
                     {side.num_blocks * of_latent, {layers()[4]}, 0, 0}};
    Rank made;
    made.planned = plan_from(m, parts);
    made.cache = cache(made.planned);
    for (std::size_t i = 0; i < kvpages_cache_num_allocations(made.cache.get()); ++i) {
        made.allocations.push_back(allocation(made.cache, i));
    }
    const std::vector<std::uint64_t> heads_of_layers(layers().size(), model_heads);
    kvpages_descriptor_config config = KVPAGES_DESCRIPTOR_CONFIG_INIT;
    config.tensor_parallel_size = side.ranks;
    config.tensor_parallel_rank = number;
    config.model_kv_heads = heads_of_layers.data();
    config.num_model_kv_heads = heads_of_layers.size();
    made.descriptor = descriptor_of(descriptor_json(made.cache, &config));
    made.first_head = number * model_heads / side.ranks;
    return made;
}

std::vector<Rank> ranks(const Side& side) {
    std::vector<Rank> all;
    for (std::uint64_t number = 0; number < side.ranks; ++number) {
        all.push_back(rank(side, number));
    }
    return all;
}

// Every element of a block of a layer: where its view has it, and the number that names it.
void for_each_element(const Rank& rank, const std::string& name, std::uint64_t block,
                      std::uint32_t named_block,
                      const std::function<void(unsigned char*, std::uint32_t)>& see) {
    const std::size_t number = find(rank.cache, name);
    kvpages_view_axes axes = KVPAGES_VIEW_AXES_INIT;
    must(kvpages_cache_get_axes(rank.cache.get(), number, &axes));
    const kvpages_tensor tensor = view(rank.cache, number);
    const bool is_latent = name == layers()[4];
    const auto owner = static_cast<std::uint32_t>(name == layers()[3] ? 0 : number);
    for (std::uint64_t slot = 0; slot < block_size; ++slot) {
        for (std::uint64_t head = 0; head < axes.num_heads; ++head) {
            for (std::uint32_t part = 0; part < 2; ++part) {
                const std::uint64_t elements =
                    part == 0 ? axes.key_elements : axes.value_elements;
                for (std::uint64_t e = 0; e < elements; ++e) {
                    const std::uint64_t kernel_block =
                        block * (block_size / axes.kernel_block_slots) +
                        slot / axes.kernel_block_slots;
                    const std::uint64_t at = kernel_block * axes.kernel_block_stride +
                                             slot % axes.kernel_block_slots * axes.token_stride +
                                             head * axes.head_stride + e * axes.content_stride +
                                             (part == 0 ? 0 : axes.value_offset);
                    const std::uint64_t of_model = (is_latent ? 0 : rank.first_head) + head;
                    const std::uint32_t id =
                        ((((named_block * 8 + owner) * 2 + part) * 16 +
                          static_cast<std::uint32_t>(of_model)) *
                             16 +
                         static_cast<std::uint32_t>(slot)) *
                            16 +
                        static_cast<std::uint32_t>(e);
                    see(static_cast<unsigned char*>(tensor.data) + at * 4, id);
                }
            }
        }
    }
}

void write(const Rank& rank, const std::string& name, std::uint64_t block, std::uint32_t named) {
    for_each_element(rank, name, block, named, [](unsigned char* at, std::uint32_t id) {
        std::memcpy(at, &id, sizeof id);
    });
}

void expect(const Rank& rank, const std::string& name, std::uint64_t block, std::uint32_t named) {
    std::size_t wrong = 0;
    for_each_element(rank, name, block, named, [&](unsigned char* at, std::uint32_t id) {
        wrong += std::memcmp(at, &id, sizeof id) != 0 ? 1 : 0;
    });
    EXPECT_EQ(wrong, 0u) << name << ", block " << block;
}

void clear(const std::vector<Rank>& all) {
    for (const Rank& rank : all) {
        Allocations(rank.cache).fill(0xCD);
    }
}

std::int32_t try_reshard(const std::vector<const kvpages_descriptor*>& from,
                         const std::vector<const kvpages_descriptor*>& to, kvpages_reshard** out) {
    kvpages_reshard_config config = KVPAGES_RESHARD_CONFIG_INIT;
    config.sources = from.data();
    config.num_sources = from.size();
    config.targets = to.data();
    config.num_targets = to.size();
    return kvpages_reshard_create(&config, out);
}

std::vector<const kvpages_descriptor*> descriptors(const std::vector<Rank>& all) {
    std::vector<const kvpages_descriptor*> found;
    for (const Rank& rank : all) {
        found.push_back(rank.descriptor.get());
    }
    return found;
}

std::vector<kvpages_strided_copy> copies(const std::vector<Rank>& from, const std::vector<Rank>& to,
                                         const std::vector<kvpages_block_move>& moves) {
    kvpages_reshard* raw = nullptr;
    must(try_reshard(descriptors(from), descriptors(to), &raw));
    const Reshard reshard(raw);
    std::size_t count = 0;
    const std::int32_t asked = kvpages_reshard_copy_copies(raw, moves.data(), moves.size(),
                                                           nullptr, 0, &count);
    EXPECT_EQ(asked, KVPAGES_STATUS_BUFFER_TOO_SMALL);
    std::vector<kvpages_strided_copy> all(count);
    must(kvpages_reshard_copy_copies(raw, moves.data(), moves.size(), all.data(), all.size(),
                                     &count));
    return all;
}

void run(const std::vector<kvpages_strided_copy>& all, const std::vector<Rank>& from,
         const std::vector<Rank>& to) {
    std::vector<kvpages_rank_memory> sources;
    std::vector<kvpages_rank_memory> targets;
    for (const Rank& rank : from) sources.push_back(rank.memory());
    for (const Rank& rank : to) targets.push_back(rank.memory());
    must(kvpages_copy_strided(all.data(), all.size(), sources.data(), sources.size(),
                              targets.data(), targets.size()));
}

// Blocks 1 and 2 of the full group, 3 of the sliding one and 4 of the latents go there and back.
void check_there_and_back(const Side& a, const Side& b) {
    const std::vector<Rank> from = ranks(a);
    const std::vector<Rank> to = ranks(b);
    clear(from);
    clear(to);
    struct Written {
        std::string layer;
        std::uint64_t group;
        std::int32_t source;
        std::int32_t target;
    };
    const std::vector<Written> written{
        {layers()[0], 0, 1, 3}, {layers()[2], 0, 1, 3}, {layers()[0], 0, 2, 1},
        {layers()[2], 0, 2, 1}, {layers()[1], 1, 3, 2}, {layers()[4], 2, 4, 0}};
    std::vector<kvpages_block_move> there{{0, 1, 3}, {0, 2, 1}, {1, 3, 2}, {2, 4, 0}};
    std::vector<kvpages_block_move> back{{0, 3, 0}, {0, 1, 4}, {1, 2, 1}, {2, 0, 3}};
    for (const Written& w : written) {
        for (const Rank& rank : from) {
            write(rank, w.layer, static_cast<std::uint64_t>(w.source),
                  static_cast<std::uint32_t>(w.source));
        }
    }
    run(copies(from, to, there), from, to);
    for (const Written& w : written) {
        for (const Rank& rank : to) {
            expect(rank, w.layer, static_cast<std::uint64_t>(w.target),
                   static_cast<std::uint32_t>(w.source));
        }
    }
    for (const Rank& rank : to) {
        expect(rank, layers()[3], 3, 1);
    }
    clear(from);
    run(copies(to, from, back), to, from);
    for (const Rank& rank : from) {
        expect(rank, layers()[0], 0, 1);
        expect(rank, layers()[2], 0, 1);
        expect(rank, layers()[3], 0, 1);
        expect(rank, layers()[0], 4, 2);
        expect(rank, layers()[2], 4, 2);
        expect(rank, layers()[1], 1, 3);
        expect(rank, layers()[4], 3, 4);
    }
}

kvpages_strided_copy one_copy() {
    kvpages_strided_copy copy;
    std::memset(&copy, 0, sizeof copy);
    return copy;
}

}  // namespace

TEST(Reshard, BetweenTensorParallelSizesAndLayouts) {
    const std::vector<Side> sides{
        {head_first, nhd, 1}, {head_first, nhd, 2},        {head_first, nhd, 4},
        {head_first, nhd, 8}, {head_first, "", 1},         {head_first, "", 2},
        {kv_first, "", 1},    {kv_first, "", 4},           {block_first, "", 2},
        {block_first, "", 1, 2}, {head_first, nhd, 2, 4, 7, 64},
        {block_first, "block | content | kv | token | head", 1},
    };
    for (const Side& a : sides) {
        for (const Side& b : sides) {
            SCOPED_TRACE(a.layout + " in memory " + a.order + " on " + std::to_string(a.ranks) +
                         " to " + b.layout + " in memory " + b.order + " on " +
                         std::to_string(b.ranks));
            check_there_and_back(a, b);
            if (::testing::Test::HasFailure()) {
                return;
            }
        }
    }
}

TEST(Reshard, AWholePageIsOneCopy) {
    const std::vector<Rank> from = ranks({head_first, nhd, 2});
    const std::vector<Rank> to = ranks({head_first, nhd, 2, 0, 9});
    const std::vector<kvpages_strided_copy> all = copies(from, to, {{0, 1, 8}});
    ASSERT_EQ(all.size(), 4u);  // two layers on two ranks
    for (const kvpages_strided_copy& copy : all) {
        EXPECT_EQ(copy.source_rank, copy.target_rank);
        EXPECT_EQ(copy.num_dims, 0u);
        EXPECT_EQ(copy.run_bytes, 2u * block_size * 2 * 4 * 4);
    }
}

TEST(Reshard, SaysWhichLayerCannotMove) {
    const Side plain{head_first, nhd, 1};
    const std::vector<Rank> one = ranks(plain);
    const auto refused = [&](const std::vector<const kvpages_descriptor*>& from,
                             const std::vector<const kvpages_descriptor*>& to,
                             const std::vector<std::string>& words) {
        kvpages_reshard* raw = nullptr;
        EXPECT_TRUE(fails(try_reshard(from, to, &raw), KVPAGES_STATUS_UNSUPPORTED,
                          "layer_not_reshardable", words));
        EXPECT_EQ(raw, nullptr);
    };
    const std::vector<Rank> two = ranks({head_first, nhd, 2});
    refused({two[1].descriptor.get()}, descriptors(one), {"full.0", "kv head 0"});
    // Of one layer something else.
    const auto changed = [&](const std::string& from, const std::string& to) {
        std::string json = json_of(one[0].descriptor);
        const std::size_t at = json.find(from);
        EXPECT_NE(at, std::string::npos) << from;
        json.replace(at, from.size(), to);
        return descriptor_of(json);
    };
    const Descriptor named = changed("\"full.2\"", "\"full.9\"");
    refused({named.get()}, descriptors(one), {"full.2", "no source has a layer"});
}

TEST(Reshard, StatesMoveBetweenTheSameRanks) {
    const auto make = [](std::uint64_t size, std::uint64_t number, std::uint64_t padding) {
        const Model m = model();
        State state;
        state.block(8).add(KVPAGES_DTYPE_F32, {3, 2}).add(KVPAGES_DTYPE_F16, {6});
        state.padded(36 + padding);
        add(m, "mamba", state.spec(), state_backend());
        Rank made;
        made.planned = plan_of_blocks(m, 3);
        made.cache = cache(made.planned);
        made.allocations.push_back(allocation(made.cache, 0));
        kvpages_descriptor_config config = KVPAGES_DESCRIPTOR_CONFIG_INIT;
        config.tensor_parallel_size = size;
        config.tensor_parallel_rank = number;
        made.descriptor = descriptor_of(descriptor_json(made.cache, &config));
        return made;
    };
    std::vector<Rank> from;
    std::vector<Rank> to;
    for (std::uint64_t number = 0; number < 2; ++number) {
        from.push_back(make(2, number, 0));
        to.push_back(make(2, number, 12));
    }
    for (std::size_t number = 0; number < 2; ++number) {
        auto* data = static_cast<unsigned char*>(from[number].allocations[0].data);
        for (unsigned char byte = 0; byte < 36; ++byte) {
            data[36 + byte] = static_cast<unsigned char>(byte + 100 * number);
        }
    }
    run(copies(from, to, {{0, 1, 2}}), from, to);
    for (std::size_t number = 0; number < 2; ++number) {
        const auto* data = static_cast<unsigned char*>(to[number].allocations[0].data);
        EXPECT_EQ(std::memcmp(data + 2 * 48,
                              static_cast<unsigned char*>(from[number].allocations[0].data) + 36,
                              36),
                  0);
    }
    const Rank alone = make(1, 0, 0);
    kvpages_reshard* raw = nullptr;
    EXPECT_TRUE(fails(try_reshard(descriptors(from), {alone.descriptor.get()}, &raw),
                      KVPAGES_STATUS_UNSUPPORTED, "layer_not_reshardable",
                      {"mamba", "rank 0 of 1"}));
}

TEST(Reshard, HostileCalls) {
    const std::vector<Rank> one = ranks({head_first, nhd, 1});
    kvpages_reshard* raw = nullptr;
    EXPECT_EQ(kvpages_reshard_create(nullptr, &raw), KVPAGES_STATUS_NULL_ARGUMENT);
    kvpages_reshard_config config = KVPAGES_RESHARD_CONFIG_INIT;
    EXPECT_EQ(kvpages_reshard_create(&config, nullptr), KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_TRUE(fails(kvpages_reshard_create(&config, &raw), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "bad_values", {"0 sources"}));
    EXPECT_EQ(try_reshard({nullptr}, descriptors(one), &raw), KVPAGES_STATUS_NULL_ARGUMENT);
    must(try_reshard(descriptors(one), descriptors(one), &raw));
    const Reshard reshard(raw);
    std::size_t count = 7;
    const auto ask = [&](std::uint64_t group, std::int32_t source, std::int32_t target) {
        const kvpages_block_move moves[2] = {{0, 0, 0}, {group, source, target}};
        return kvpages_reshard_copy_copies(raw, moves, 2, nullptr, 0, &count);
    };
    EXPECT_TRUE(fails(ask(3, 0, 1), KVPAGES_STATUS_NOT_FOUND, "not_found", {"entry 1", "3"}));
    EXPECT_EQ(count, 0u);
    for (const std::int32_t block : {-1, 5, INT32_MIN, INT32_MAX}) {
        EXPECT_TRUE(fails(ask(0, block, 1), KVPAGES_STATUS_INVALID_ARGUMENT,
                          "block_id_out_of_range", {"source", std::to_string(block)}));
        EXPECT_TRUE(fails(ask(0, 1, block), KVPAGES_STATUS_INVALID_ARGUMENT,
                          "block_id_out_of_range", {"target", std::to_string(block)}));
    }
    EXPECT_TRUE(fails(ask(1, 1, 0), KVPAGES_STATUS_INVALID_ARGUMENT, "duplicate_block_id", {"0"}));
    EXPECT_EQ(kvpages_reshard_copy_copies(raw, nullptr, 1, nullptr, 0, &count),
              KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_reshard_copy_copies(raw, nullptr, 0, nullptr, 0, nullptr),
              KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_reshard_copy_copies(raw, nullptr, 0, nullptr, 0, &count),
              KVPAGES_STATUS_OK);
    EXPECT_EQ(kvpages_reshard_copy_copies(nullptr, nullptr, 0, nullptr, 0, &count),
              KVPAGES_STATUS_NULL_ARGUMENT);
    kvpages_reshard_destroy(nullptr);
}

TEST(Reshard, CopiesStayInTheirAllocations) {
    unsigned char from[64];
    unsigned char to[64];
    for (unsigned char byte = 0; byte < 64; ++byte) {
        from[byte] = byte;
        to[byte] = 0xAA;
    }
    const kvpages_allocation source{from, 64};
    const kvpages_allocation target{to, 64};
    const kvpages_rank_memory sources{&source, 1};
    const kvpages_rank_memory targets{&target, 1};
    const auto run_two = [&](const kvpages_strided_copy& second) {
        kvpages_strided_copy first = one_copy();
        first.run_bytes = 1;
        const kvpages_strided_copy both[2] = {first, second};
        return kvpages_copy_strided(both, 2, &sources, 1, &targets, 1);
    };
    struct Case {
        std::string name;
        std::function<void(kvpages_strided_copy&)> change;
        std::int32_t status;
        std::string kind;
    };
    constexpr std::int32_t invalid = KVPAGES_STATUS_INVALID_ARGUMENT;
    const std::vector<Case> cases{
        {"source rank", [](auto& c) { c.source_rank = 1; }, KVPAGES_STATUS_NOT_FOUND, "not_found"},
        {"target rank", [](auto& c) { c.target_rank = UINT64_MAX; }, KVPAGES_STATUS_NOT_FOUND,
         "not_found"},
        {"source allocation", [](auto& c) { c.source_allocation = 1; }, KVPAGES_STATUS_NOT_FOUND,
         "not_found"},
        {"target allocation", [](auto& c) { c.target_allocation = UINT64_MAX; },
         KVPAGES_STATUS_NOT_FOUND, "not_found"},
        {"source end", [](auto& c) { c.source_offset_bytes = 61; }, invalid, "copy_out_of_bounds"},
        {"target end", [](auto& c) { c.target_offset_bytes = 61; }, invalid, "copy_out_of_bounds"},
        {"source wraps", [](auto& c) { c.source_offset_bytes = UINT64_MAX - 1; }, invalid,
         "overflow"},
        {"target wraps", [](auto& c) { c.target_offset_bytes = UINT64_MAX - 1; }, invalid,
         "bad_values"},
        {"run", [](auto& c) { c.run_bytes = UINT64_MAX; }, invalid, "overflow"},
        {"count", [](auto& c) { c.dims[0].count = UINT64_MAX; }, invalid, "overflow"},
        {"source step", [](auto& c) { c.dims[0].source_step_bytes = 1ull << 62; }, invalid,
         "overflow"},
        {"target step", [](auto& c) { c.dims[0].target_step_bytes = 21; }, invalid,
         "copy_out_of_bounds"},
        {"overlap", [](auto& c) { c.dims[0].target_step_bytes = 3; }, invalid,
         "copy_overlaps_itself"},
        {"dims", [](auto& c) { c.num_dims = 7; }, invalid, "bad_values"},
        {"many dims", [](auto& c) { c.num_dims = UINT64_MAX; }, invalid, "bad_values"},
    };
    kvpages_strided_copy good = one_copy();
    good.run_bytes = 4;
    good.num_dims = 1;
    good.dims[0] = {4, 8, 4};
    for (const Case& c : cases) {
        SCOPED_TRACE(c.name);
        kvpages_strided_copy copy = good;
        c.change(copy);
        EXPECT_TRUE(fails(run_two(copy), c.status, c.kind, {}));
        for (const unsigned char byte : to) {
            ASSERT_EQ(byte, 0xAA);
        }
    }
    EXPECT_EQ(run_two(good), KVPAGES_STATUS_OK);
    for (std::size_t i = 0; i < 16; ++i) {
        EXPECT_EQ(to[i], i / 4 * 8 + i % 4);
    }
    EXPECT_EQ(to[16], 0xAA);
    EXPECT_EQ(kvpages_copy_strided(nullptr, 0, nullptr, 0, nullptr, 0), KVPAGES_STATUS_OK);
    EXPECT_EQ(kvpages_copy_strided(nullptr, 1, nullptr, 0, nullptr, 0),
              KVPAGES_STATUS_NULL_ARGUMENT);
    const kvpages_allocation nothing{nullptr, 64};
    const kvpages_rank_memory no_memory{&nothing, 1};
    EXPECT_EQ(kvpages_copy_strided(&good, 1, &no_memory, 1, &targets, 1),
              KVPAGES_STATUS_NULL_ARGUMENT);
    const kvpages_rank_memory no_array{nullptr, 1};
    EXPECT_EQ(kvpages_copy_strided(&good, 1, &sources, 1, &no_array, 1),
              KVPAGES_STATUS_NULL_ARGUMENT);
}
