// Random models: whatever plans and allocates keeps every promise about bytes, looked at one by
// one; whatever is refused says why.
#include "support/api.h"
#include "support/axes.h"
#include "support/bytes.h"
#include "support/descriptors.h"
#include "support/expected.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

using namespace support;

namespace {

constexpr std::size_t buffer_bytes = std::size_t{1} << 20;

// Aligned beyond what the library asks for.
unsigned char* buffer() {
    struct Free {
        void operator()(void* data) const { std::free(data); }
    };
    static const std::unique_ptr<void, Free> owned(std::aligned_alloc(4096, buffer_bytes));
    return static_cast<unsigned char*>(owned.get());
}

class Random {
public:
    explicit Random(std::uint64_t seed) : engine_(seed) {}

    // One of 0 to count - 1. Not a std distribution, whose numbers differ between libraries.
    std::uint64_t below(std::uint64_t count) { return engine_() % count; }
    bool one_in(std::uint64_t count) { return below(count) == 0; }
    template <typename T>
    const T& of(const std::vector<T>& values) {
        return values[below(values.size())];
    }

private:
    std::mt19937_64 engine_;
};

struct Layer {
    std::string name;
    std::string layout;  // empty: a state
    std::string order;
    std::string owner;  // empty: itself
    bool has_backend = true;
    bool is_encoder = false;
    bool scales_at_end = false;
    bool follows_stride = true;
    std::uint64_t alignment = 1;
    std::vector<std::uint64_t> sizes;
    std::vector<std::uint64_t> multiples;
};

struct RandomModel {
    Model handle = model();
    std::vector<Layer> layers;  // in the model's order
    bool has_state = false;
};

const std::vector<std::pair<std::string, std::string>>& pair_layouts() {
    static const std::vector<std::pair<std::string, std::string>> all{
        {block_first, ""},
        {kv_first, ""},
        {packed_nhd, ""},
        {"block | head | token | kv*content", ""},
        {"block | head | token | kv*content", packed_nhd},
        {"kv | block | token | head | content", "kv | block | head | token | content"},
        {"block | kv*token*head*content", ""},
        {"block*token | head | kv*content", ""},
        {"block | content | kv | token | head", ""},
        {"head | block | kv | token | content", ""},
        {"content | block | token | kv*head", ""},
        {"kv | token | head | content | block", ""},
    };
    return all;
}

const std::vector<std::pair<std::string, std::string>>& single_layouts() {
    static const std::vector<std::pair<std::string, std::string>> all{
        {"block | token | head | content", ""},
        {"block | head | token | content", ""},
        {"block | token*head*content", ""},
        {"head | block | token | content", ""},
        {"block | token | head | content", "block | content | head | token"},
    };
    return all;
}

kvpages_spec random_attention(Random& random, bool& is_single) {
    static const std::vector<std::uint32_t> kinds{
        KVPAGES_SPEC_KIND_FULL_ATTENTION,  KVPAGES_SPEC_KIND_FULL_ATTENTION,
        KVPAGES_SPEC_KIND_FULL_ATTENTION,  KVPAGES_SPEC_KIND_SLIDING_WINDOW,
        KVPAGES_SPEC_KIND_SLIDING_WINDOW,  KVPAGES_SPEC_KIND_CHUNKED_LOCAL,
        KVPAGES_SPEC_KIND_CROSS_ATTENTION, KVPAGES_SPEC_KIND_ENCODER_ONLY,
        KVPAGES_SPEC_KIND_MLA,             KVPAGES_SPEC_KIND_HIDDEN_STATE,
        KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA};
    static const std::vector<std::uint32_t> dtypes{KVPAGES_DTYPE_F16, KVPAGES_DTYPE_F16,
                                                   KVPAGES_DTYPE_F32, KVPAGES_DTYPE_I8};
    const std::uint32_t kind = random.of(kinds);
    kvpages_spec spec =
        attention(kind, std::vector<std::uint64_t>{2, 4, 4, 4, 8}[random.below(5)],
                  1 + random.below(2), 2 * (1 + random.below(3)), random.of(dtypes));
    is_single = kind == KVPAGES_SPEC_KIND_MLA || kind == KVPAGES_SPEC_KIND_HIDDEN_STATE ||
                kind == KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA;
    if (kind == KVPAGES_SPEC_KIND_SLIDING_WINDOW || kind == KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA) {
        spec.sliding_window = 4 * (1 + random.below(2));
    }
    if (kind == KVPAGES_SPEC_KIND_CHUNKED_LOCAL) {
        spec.attention_chunk_size = 4;
    }
    if (kind == KVPAGES_SPEC_KIND_MLA && random.one_in(3)) {
        spec.compress_ratio = 2;
    }
    if (is_single && random.one_in(4)) {
        spec.alignment_bytes = 24;
    }
    if (kind == KVPAGES_SPEC_KIND_FULL_ATTENTION && random.one_in(6)) {
        spec.head_size_v = random.one_in(2) ? 3 : KVPAGES_HEAD_SIZE_NONE;
        is_single = spec.head_size_v == KVPAGES_HEAD_SIZE_NONE;
    }
    if (spec.dtype == KVPAGES_DTYPE_I8 && random.one_in(2)) {
        spec.quant_mode = random.one_in(2) ? KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD
                                           : KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD;
    }
    return spec;
}

// Padding that is mostly, but not always, possible.
std::uint64_t random_padding(Random& random, std::uint64_t page) {
    switch (random.below(8)) {
        case 0:
            return page + 16;
        case 1:
            return 2 * page;
        case 2:
            return page + 2 * random.below(20);
        case 3:
            return random.below(page) + 1;
        default:
            return 0;
    }
}

Backend random_backend(Random& random, bool is_single, Layer& layer) {
    const auto& [layout, order] = random.of(is_single ? single_layouts() : pair_layouts());
    BackendOptions options;
    options.name = "kernels." + std::to_string(random.below(3));
    options.layout = layer.layout = layout;
    options.memory_order = layer.order = order;
    options.multiples.clear();
    switch (random.below(4)) {
        case 0:
            options.multiples = {2};
            break;
        case 1:
            options.sizes = {2, 4};
            break;
        case 2:
            options.sizes = {2};
            break;
        default:
            options.multiples = {1};
    }
    layer.sizes = options.sizes;
    layer.multiples = options.multiples;
    layer.follows_stride = !random.one_in(4);
    layer.scales_at_end = random.one_in(5);
    options.flags = (layer.follows_stride ? KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE : 0u) |
                    (layer.scales_at_end ? KVPAGES_BACKEND_SCALES_AT_PAGE_END : 0u);
    layer.alignment = std::vector<std::uint64_t>{1, 1, 1, 8, 16}[random.below(5)];
    options.alignment = layer.alignment;
    options.index_bits = random.one_in(2) ? 32 : 0;
    return backend(options);
}

// Whether a refusal says which layer or which number.
void expect_reason(const Failure& failure, const std::vector<std::string>& names) {
    EXPECT_FALSE(failure.kind.empty()) << failure.message;
    EXPECT_NE(failure.status, KVPAGES_STATUS_INTERNAL) << failure.message;
    EXPECT_NE(failure.status, KVPAGES_STATUS_POISONED) << failure.message;
    bool said = failure.message.find_first_of("0123456789") != std::string::npos;
    for (const std::string& name : names) {
        said = said || failure.message.find(name) != std::string::npos;
    }
    EXPECT_TRUE(said) << failure.kind << ": " << failure.message;
}

RandomModel random_model(Random& random) {
    RandomModel made;
    const std::uint64_t count = 1 + random.below(5);
    // Few different specs, so that layers do share.
    std::vector<kvpages_spec> specs;
    std::vector<bool> singles;
    for (std::uint64_t i = 0; i < 1 + random.below(3); ++i) {
        bool is_single = false;
        specs.push_back(random_attention(random, is_single));
        singles.push_back(is_single);
        kvpages_spec_info info = KVPAGES_SPEC_INFO_INIT;
        if (kvpages_spec_describe(&specs.back(), &info) == KVPAGES_STATUS_OK) {
            specs.back().page_size_padded_bytes = random_padding(random, info.page_size_bytes);
        }
    }
    for (std::uint64_t i = 0; i < count; ++i) {
        Layer layer;
        layer.name = "layers." + std::to_string(i);
        if (random.one_in(5)) {
            State state;
            state.add(KVPAGES_DTYPE_F16, {2, 2 + random.below(5)});
            if (random.one_in(2)) {
                state.add(KVPAGES_DTYPE_F32, {3});
            }
            const kvpages_spec spec = state.spec();
            if (try_add(made.handle, layer.name, &spec, state_backend().get()) ==
                KVPAGES_STATUS_OK) {
                made.has_state = true;
                made.layers.push_back(layer);
            } else {
                expect_reason(failure_of(KVPAGES_STATUS_INVALID_ARGUMENT), {layer.name});
            }
            continue;
        }
        const std::size_t which = random.below(specs.size());
        const Backend reads = random_backend(random, singles[which], layer);
        layer.has_backend = !random.one_in(8);
        layer.is_encoder = specs[which].kind == KVPAGES_SPEC_KIND_ENCODER_ONLY;
        const std::int32_t status = try_add(made.handle, layer.name, &specs[which],
                                            layer.has_backend ? reads.get() : nullptr);
        if (status != KVPAGES_STATUS_OK) {
            const Failure failure = failure_of(status);
            EXPECT_NE(failure.message.find(layer.name), std::string::npos) << failure.message;
            expect_reason(failure, {layer.name});
            continue;
        }
        made.layers.push_back(layer);
        if (layer.has_backend && random.one_in(5)) {
            Layer sharer = layer;
            sharer.name = "layers." + std::to_string(100 + i);
            sharer.owner = layer.name;
            share(made.handle, sharer.name, layer.name, reads);
            made.layers.push_back(sharer);
        }
    }
    return made;
}

// An engine's own plan of the model: every layer a group of its own, pages of one size in one
// tensor or all in packed slots, mostly right.
Parts random_parts(Random& random, const RandomModel& made, const Plan& like) {
    Parts parts;
    parts.num_blocks = 1 + random.below(4);
    std::vector<std::string> layers;
    const std::uint64_t groups = worker_info(like).num_groups;
    for (std::uint64_t group = 0; group < groups; ++group) {
        Parts::Group given;
        given.layers = group_layers(like, group);
        for (std::uint64_t i = 0; i < group_info(like, group).num_layers; ++i) {
            layers.push_back(given.layers[i]);
        }
        parts.groups.push_back(given);
    }
    static_cast<void>(made);
    std::uint64_t offset = random.one_in(2) ? 0 : 2 * random.below(9);
    for (const std::string& layer : layers) {
        Parts::Tensor tensor;
        tensor.layers = {layer};
        tensor.offset = offset;
        offset += page_bytes(pages_of(like, layer).spec) + (random.one_in(2) ? 0 : random.below(9));
        parts.tensors.push_back(tensor);
    }
    const std::uint64_t stride = offset + (random.one_in(2) ? 0 : random.below(20));
    for (Parts::Tensor& tensor : parts.tensors) {
        tensor.stride = stride;
        tensor.size = stride * parts.num_blocks;
    }
    return parts;
}

// Everything that is promised of the bytes of a cache.
void check(const RandomModel& made, const Plan& plan, const Cache& cache) {
    const Allocations allocations(cache);
    const kvpages_worker_info worker = worker_info(plan);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < allocations.size(); ++i) {
        total += allocations.bytes(i);
        ASSERT_EQ(reinterpret_cast<std::uintptr_t>(allocations.data(i)) % 256, 0u);
        ASSERT_TRUE(std::all_of(allocations.data(i), allocations.data(i) + allocations.bytes(i),
                                [](unsigned char byte) { return byte == 0; }));
    }
    ASSERT_EQ(total, worker.total_bytes);
    ASSERT_EQ(kvpages_cache_num_blocks(cache.get()), worker.num_blocks);

    // For each byte its block, and for each group the layer that has it.
    std::vector<std::vector<std::int64_t>> block_of;
    std::vector<std::map<std::pair<std::size_t, std::size_t>, std::string>> layer_of(
        allocations.size());
    for (std::size_t i = 0; i < allocations.size(); ++i) {
        block_of.emplace_back(allocations.bytes(i), -1);
    }
    std::vector<kvpages_region> regions(kvpages_cache_num_regions(cache.get()));
    for (std::size_t i = 0; i < regions.size(); ++i) {
        must(kvpages_cache_get_region(cache.get(), i, &regions[i]));
        ASSERT_EQ(regions[i].num_blocks, worker.num_blocks);
    }

    std::size_t with_views = 0;
    for (const Layer& layer : made.layers) {
        SCOPED_TRACE(layer.name + " " + layer.layout);
        if (!layer.has_backend || layer.is_encoder) {
            std::size_t number = 0;
            ASSERT_EQ(kvpages_cache_find_layer(cache.get(), layer.name.c_str(), &number),
                      KVPAGES_STATUS_NOT_FOUND);
            continue;
        }
        const std::size_t number = find(cache, layer.name);
        ASSERT_EQ(number, with_views++);
        if (!layer.owner.empty()) {
            const std::size_t owner = find(cache, layer.owner);
            ASSERT_EQ(report(cache, number).owner_layer, owner);
            ASSERT_EQ(view(cache, number).data, view(cache, owner).data);
            ASSERT_EQ(strides(view(cache, number)), strides(view(cache, owner)));
            continue;
        }
        const Pages pages = pages_of(plan, layer.name);
        std::map<std::size_t, bool> seen;  // bytes of this layer
        for (std::size_t v = 0; v < kvpages_cache_num_views(cache.get(), number); ++v) {
            const kvpages_tensor tensor = view(cache, number, v);
            const kvpages_view_report proven = report(cache, number, v);
            const auto bytes = static_cast<std::size_t>(kvpages_dtype_bytes(tensor.dtype));
            std::size_t end = 0;
            std::size_t largest = 0;
            std::size_t elements = 0;
            const auto take = [&](const unsigned char* data, std::int64_t block) {
                const Place place = allocations.place(data, bytes);
                ASSERT_EQ(place.allocation, proven.allocation);
                ASSERT_EQ(reinterpret_cast<std::uintptr_t>(data) % bytes, 0u);
                end = std::max(end, place.offset + bytes);
                largest = std::max(largest, (place.offset - proven.offset_bytes) / bytes);
                ++elements;
                bool in_region = false;
                for (const kvpages_region& region : regions) {
                    const auto start = reinterpret_cast<std::uintptr_t>(region.data) +
                                       static_cast<std::uint64_t>(block) * region.block_step_bytes;
                    const auto at = reinterpret_cast<std::uintptr_t>(data);
                    in_region = in_region || (region.allocation == proven.allocation &&
                                              at >= start &&
                                              at + bytes <= start + region.block_step_bytes &&
                                              at + bytes <= reinterpret_cast<std::uintptr_t>(
                                                                region.data) + region.size_bytes);
                }
                ASSERT_TRUE(in_region);
                for (std::size_t byte = place.offset; byte < place.offset + bytes; ++byte) {
                    ASSERT_FALSE(seen[byte]) << "byte " << byte << " is two elements";
                    seen[byte] = true;
                    std::int64_t& owner = block_of[place.allocation][byte];
                    ASSERT_TRUE(owner == -1 || owner == block)
                        << "byte " << byte << " is of block " << owner << " and of " << block;
                    owner = block;
                    std::string& other = layer_of[place.allocation][{pages.group, byte}];
                    ASSERT_TRUE(other.empty() || other == layer.name)
                        << "byte " << byte << " is also of " << other;
                    other = layer.name;
                }
            };
            if (layer.layout.empty()) {
                for_each_index(shape(tensor), [&](const std::vector<std::int64_t>& index) {
                    take(element(tensor, index), index[0]);
                });
                ASSERT_EQ(proven.block_dim, 0u);
            } else {
                const ExpectedLayer wanted(pages, AxisLayout(layer.layout, layer.order),
                                           made.has_state, layer.scales_at_end);
                ASSERT_EQ(shape(tensor), wanted.layout.shape(wanted.sizes));
                for_each_place(wanted.sizes, [&](const AxisValues& at) {
                    const unsigned char* data =
                        element(tensor, wanted.layout.index(at, wanted.sizes));
                    ASSERT_EQ(allocations.place(data, bytes).offset, wanted.byte(at));
                    take(data, wanted.block(at));
                });
                const std::uint64_t step =
                    static_cast<std::uint64_t>(wanted.strides[block_axis]) * bytes;
                // What the backend demands.
                const std::uint64_t kernel = pages.kernel_block_size;
                bool takes = std::count(layer.sizes.begin(), layer.sizes.end(), kernel) > 0;
                for (const std::uint64_t base : layer.multiples) {
                    takes = takes || kernel % base == 0;
                }
                ASSERT_TRUE(takes) << kernel;
                ASSERT_EQ(pages.offset % layer.alignment, 0u);
                if (wanted.sizes[block_axis] > 1) {
                    ASSERT_EQ(step % layer.alignment, 0u);
                }
                if (!layer.follows_stride && !wanted.spread) {
                    ASSERT_EQ(step * static_cast<std::uint64_t>(wanted.ratio),
                              wanted.content_bytes);
                }
            }
            ASSERT_EQ(proven.end_bytes, end);
            ASSERT_EQ(proven.largest_element_offset, largest);
            ASSERT_EQ(proven.logical_bytes, elements * bytes);
            ASSERT_EQ(proven.fits_int32, 1u);
        }
    }
    ASSERT_EQ(kvpages_cache_num_layers(cache.get()), with_views);
}

struct Counts {
    int planned = 0;
    int refused = 0;
    std::map<std::string, int> kinds;
};

void allocate_and_check(const RandomModel& made, const Plan& plan) {
    std::fill(buffer(), buffer() + buffer_bytes, static_cast<unsigned char>(0xEE));
    const Memory memory = adopted_memory(buffer(), buffer_bytes);
    const Cache c = cache(plan, memory);
    expect_descriptor_of_views(c);
    expect_reshards_to_itself(c);
    check(made, plan, c);
}

std::vector<std::string> names_of(const RandomModel& made) {
    std::vector<std::string> names;
    for (const Layer& layer : made.layers) {
        names.push_back(layer.name);
    }
    return names;
}

kvpages_plan_config random_config(Random& random) {
    kvpages_plan_config config = plan_config(1 + random.below(12));
    config.max_tokens_in_flight = random.below(4);
    config.max_encoder_tokens = random.below(6);
    config.reserved_blocks = random.below(2);
    config.flags |= random.one_in(3) ? KVPAGES_PLAN_CROSS_LAYER_BLOCKS : 0u;
    config.flags |= random.one_in(8) ? KVPAGES_PLAN_HYBRID_MANAGER_OFF : 0u;
    config.flags |= random.one_in(4) ? KVPAGES_PLAN_AUTO_FIT : 0u;
    if (random.one_in(2)) {
        config.flags |= KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
        config.num_blocks_override = random.below(12);
    }
    return config;
}

// Plans random models, checks every byte of those that have a plan, and counts both.
Counts plan_and_check(const std::function<void(Random&, kvpages_plan_config&)>& change) {
    Counts counts;
    for (std::uint64_t seed = 0; seed < 4000; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        Random random(seed);
        const RandomModel made = random_model(random);
        kvpages_plan_config config = random_config(random);
        const auto bytes = static_cast<std::int64_t>(random.below(6000));
        change(random, config);
        auto* raw = reinterpret_cast<kvpages_plan*>(&counts);
        const std::int32_t status = try_plan({{made.handle.get(), bytes}}, config, &raw);
        if (status == KVPAGES_STATUS_OK) {
            ++counts.planned;
            allocate_and_check(made, Plan(raw));
        } else {
            const Failure failure = failure_of(status);
            ++counts.refused;
            ++counts.kinds[failure.kind];
            expect_reason(failure, names_of(made));
            EXPECT_EQ(raw, nullptr);
        }
        if (testing::Test::HasFailure()) {
            break;
        }
    }
    return counts;
}

}  // namespace

TEST(OwnershipProperty, PlannedModels) {
    const Counts counts = plan_and_check([](Random&, kvpages_plan_config&) {});
    EXPECT_GT(counts.planned, 1000);
    EXPECT_GT(counts.refused, 500);
    EXPECT_GT(counts.kinds.size(), 8u);
    for (const auto& [kind, count] : counts.kinds) {
        RecordProperty(kind, count);
    }
}

TEST(OwnershipProperty, CompactlyPlannedModels) {
    const Counts counts = plan_and_check([](Random& random, kvpages_plan_config& config) {
        config.policy = KVPAGES_POLICY_COMPACT;
        config.typical_len = random.below(12);
        config.choose_block_sizes = random.one_in(3) ? 1u : 0u;
    });
    EXPECT_GT(counts.planned, 1000);
    EXPECT_GT(counts.refused, 500);
    for (const auto& [kind, count] : counts.kinds) {
        RecordProperty(kind, count);
    }
}

TEST(OwnershipProperty, PackedByTheEngine) {
    Counts counts;
    for (std::uint64_t seed = 100000; seed < 103000; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        Random random(seed);
        const RandomModel made = random_model(random);
        kvpages_plan_config config = plan_config();
        config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
        config.num_blocks_override = 50;
        kvpages_plan* raw = nullptr;
        if (try_plan({{made.handle.get(), 0}}, config, &raw) != KVPAGES_STATUS_OK) {
            continue;
        }
        const Plan like(raw);
        const Parts parts = random_parts(random, made, like);
        raw = reinterpret_cast<kvpages_plan*>(&counts);
        const std::int32_t status = try_parts(made.handle, parts, &raw);
        if (status == KVPAGES_STATUS_OK) {
            ++counts.planned;
            allocate_and_check(made, Plan(raw));
        } else {
            const Failure failure = failure_of(status);
            ++counts.refused;
            ++counts.kinds[failure.kind];
            expect_reason(failure, names_of(made));
            EXPECT_EQ(raw, nullptr);
        }
        if (HasFailure()) {
            return;
        }
    }
    EXPECT_GT(counts.planned, 100);
    EXPECT_GT(counts.refused, 300);
    EXPECT_GT(counts.kinds.size(), 3u);
}
