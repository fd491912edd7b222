// What a descriptor says, read back from its text, against the cache's own views: bytes are written
// through a view and looked for in raw memory where the descriptor says they are.
#include "support/api.h"
#include "support/axes.h"
#include "support/bytes.h"
#include "support/descriptors.h"
#include "support/expected.h"
#include "support/failure.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstring>
#include <string>
#include <vector>

using namespace support;

namespace {

// An attention layer of a cache, and the layout that its backend has.
struct Reader {
    std::string name;
    std::string layout;
    std::string order;
    std::string pages_of;  // the owner's name; empty: its own
    bool scales_at_end = false;
};

// All bytes that are not as Allocations::fill() left them lie in the runs of the block.
void expect_only_runs(const Allocations& memory, const std::vector<kvpages_run>& runs) {
    for (std::size_t i = 0; i < memory.size(); ++i) {
        for (std::size_t byte = 0; byte < memory.bytes(i); ++byte) {
            if (memory.data(i)[byte] == Image::untouched) {
                continue;
            }
            bool owned = false;
            for (const kvpages_run& run : runs) {
                owned = owned || (run.allocation == i && byte >= run.offset_bytes &&
                                  byte < run.offset_bytes + run.size_bytes);
            }
            ASSERT_TRUE(owned) << "byte " << byte << " of allocation " << i;
        }
    }
}

// The runs of a block lie inside their allocations and have the bytes of a page.
void expect_a_page(const Descriptor& descriptor, std::size_t layer,
                   const std::vector<kvpages_run>& runs) {
    std::uint64_t bytes = 0;
    for (const kvpages_run& run : runs) {
        bytes += run.size_bytes;
        ASSERT_LE(run.offset_bytes + run.size_bytes,
                  kvpages_descriptor_allocation_bytes(descriptor.get(),
                                                      static_cast<std::size_t>(run.allocation)));
    }
    ASSERT_EQ(bytes, described(descriptor, layer).page_size_bytes);
}

void check_rows(const Cache& cache, const Plan& plan, const Descriptor& descriptor,
                const Reader& reader, bool has_state) {
    const std::string owner = reader.pages_of.empty() ? reader.name : reader.pages_of;
    const ExpectedLayer layer(pages_of(plan, owner), AxisLayout(reader.layout, reader.order),
                              has_state, reader.scales_at_end);
    const std::size_t number = find(cache, reader.name);
    std::size_t found = 0;
    must(kvpages_descriptor_find_layer(descriptor.get(), reader.name.c_str(), &found));
    ASSERT_EQ(found, number);
    ASSERT_EQ(kvpages_descriptor_layer_name(descriptor.get(), number), reader.name);
    const kvpages_described_layer said = described(descriptor, number);
    const kvpages_tensor tensor = view(cache, number);
    ASSERT_EQ(said.dtype, tensor.dtype);
    ASSERT_EQ(said.owner_layer, find(cache, owner));
    ASSERT_EQ(static_cast<std::int64_t>(said.num_kv_heads), layer.sizes[head_axis]);
    const auto ratio = static_cast<std::uint64_t>(layer.ratio);
    ASSERT_EQ(said.block_slots, said.kernel_block_slots * ratio);
    const bool beside = layer.sizes[kv_axis] == 1 && said.value_elements != 0;
    const std::uint64_t row_elements = said.key_elements + said.inline_scale_elements;
    const Allocations memory(cache);
    for (std::uint64_t block = 0; block < layer.pages.num_blocks; ++block) {
        memory.fill(Image::untouched);
        for_each_place(layer.sizes, [&](const AxisValues& at) {
            if (static_cast<std::uint64_t>(layer.block(at)) == block) {
                value_of(number, at, layer.element_bytes,
                         element(tensor, layer.layout.index(at, layer.sizes)));
            }
        });
        for_each_place(layer.sizes, [&](const AxisValues& at) {
            if (static_cast<std::uint64_t>(layer.block(at)) != block) {
                return;
            }
            auto e = static_cast<std::uint64_t>(at[content_axis]);
            bool is_value = at[kv_axis] == 1;
            if (beside && e >= row_elements) {
                is_value = true;
                e -= row_elements;
            }
            const auto kernel_block = static_cast<std::uint64_t>(at[block_axis]) % ratio;
            const kvpages_row row =
                row_of(descriptor, number, block,
                       kernel_block * said.kernel_block_slots +
                           static_cast<std::uint64_t>(at[token_axis]),
                       static_cast<std::uint64_t>(at[head_axis]),
                       is_value ? KVPAGES_ROW_PART_VALUE : KVPAGES_ROW_PART_KEY);
            ASSERT_EQ(row.num_elements, is_value ? said.value_elements : said.key_elements);
            ASSERT_LT(e, row.num_elements + row.scale_elements);
            const std::uint64_t start =
                row.offset_bytes + e * row.stride_elements * layer.element_bytes;
            unsigned char wanted[8];
            value_of(number, at, layer.element_bytes, wanted);
            ASSERT_EQ(std::memcmp(memory.data(static_cast<std::size_t>(row.allocation)) + start,
                                  wanted, static_cast<std::size_t>(layer.element_bytes)),
                      0);
        });
        const std::vector<kvpages_run> runs = runs_of(descriptor, number, block);
        expect_a_page(descriptor, number, runs);
        expect_only_runs(memory, runs);
        if (::testing::Test::HasFatalFailure()) {
            return;
        }
    }
}

void check_states(const Cache& cache, const Descriptor& descriptor, const std::string& name) {
    const std::size_t number = find(cache, name);
    const kvpages_described_layer said = described(descriptor, number);
    ASSERT_EQ(said.num_states, kvpages_cache_num_views(cache.get(), number));
    ASSERT_EQ(said.row_format, static_cast<std::uint32_t>(KVPAGES_ROW_FORMAT_NONE));
    const Allocations memory(cache);
    for (std::uint64_t block = 0; block < kvpages_cache_num_blocks(cache.get()); ++block) {
        const std::vector<kvpages_run> runs = runs_of(descriptor, number, block);
        expect_a_page(descriptor, number, runs);
        ASSERT_EQ(runs.size(), 1u);
        memory.fill(Image::untouched);
        for (std::size_t state = 0; state < said.num_states; ++state) {
            const kvpages_tensor tensor = view(cache, number, state);
            kvpages_described_state of_state = KVPAGES_DESCRIBED_STATE_INIT;
            must(kvpages_descriptor_get_state(descriptor.get(), number, state, &of_state));
            ASSERT_EQ(of_state.dtype, tensor.dtype);
            ASSERT_EQ(of_state.ndim + 1, tensor.ndim);
            for (std::uint32_t dim = 0; dim < of_state.ndim; ++dim) {
                ASSERT_EQ(of_state.shape[dim], static_cast<std::uint64_t>(tensor.shape[dim + 1]));
            }
            const std::uint64_t bytes = kvpages_dtype_bytes(tensor.dtype);
            std::uint64_t count = 0;
            for_each_index(shape(tensor), [&](const std::vector<std::int64_t>& index) {
                if (static_cast<std::uint64_t>(index[0]) != block) {
                    return;
                }
                const AxisValues at{index[0], static_cast<std::int64_t>(count),
                                    static_cast<std::int64_t>(state), 0, 0};
                unsigned char wanted[8];
                value_of(number, at, bytes, wanted);
                std::memcpy(element(tensor, index), wanted, static_cast<std::size_t>(bytes));
                const unsigned char* page =
                    memory.data(static_cast<std::size_t>(runs[0].allocation)) +
                    runs[0].offset_bytes;
                const unsigned char* there = page + of_state.offset_bytes + count++ * bytes;
                ASSERT_EQ(std::memcmp(there, wanted, static_cast<std::size_t>(bytes)), 0);
            });
            ASSERT_EQ(count * bytes, of_state.size_bytes);
        }
        expect_only_runs(memory, runs);
    }
}

// The cache of a plan against its descriptor, which went through text and back.
Descriptor check(const Cache& c, const Plan& plan, const std::vector<Reader>& readers,
                 const std::vector<std::string>& states = {}) {
    const std::string json = descriptor_json(c);
    EXPECT_EQ(descriptor_json(c), json);
    Descriptor descriptor = descriptor_of(json);
    EXPECT_EQ(json_of(descriptor), json);
    EXPECT_TRUE(nlohmann::json::accept(json));
    for (const Reader& reader : readers) {
        SCOPED_TRACE(reader.name);
        check_rows(c, plan, descriptor, reader, !states.empty());
    }
    for (const std::string& name : states) {
        SCOPED_TRACE(name);
        check_states(c, descriptor, name);
    }
    return descriptor;
}

Backend kernels(const std::string& layout, const std::string& order, std::uint64_t kernel_block = 0,
                std::uint32_t flags = KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE) {
    BackendOptions options;
    options.layout = layout;
    options.memory_order = order;
    options.flags = flags;
    if (kernel_block != 0) {
        options.sizes = {kernel_block};
        options.multiples.clear();
    }
    return backend(options);
}

const std::vector<std::pair<std::string, std::string>>& layouts() {
    static const std::vector<std::pair<std::string, std::string>> all{
        {block_first, ""},
        {kv_first, ""},
        {packed_nhd, ""},
        {"block | head | token | kv*content", ""},
        {"block | head | token | kv*content", packed_nhd},
        {kv_first, "kv | block | head | token | content"},
        {"block | kv*token*head*content", ""},
        {"block*token | head | kv*content", ""},
        {"kv*block | token | head | content", ""},
        {"kv | block*token | head*content", ""},
        {"block | content | kv | token | head", ""},
        {"content | block | token | kv*head", ""},
        {"head | block | kv | token | content", ""},
        {"kv | head | block | token | content", ""},
        {"token | block | kv | head | content", ""},
        {"kv | token | head | content | block", ""},
        {block_first, "content | head | token | kv | block"},
    };
    return all;
}

Parts one_tensor(std::uint64_t num_blocks, std::uint64_t page) {
    Parts parts;
    parts.num_blocks = num_blocks;
    parts.groups = {{{"layer"}, 0}};
    parts.tensors = {{num_blocks * page, {"layer"}, 0, 0}};
    return parts;
}

}  // namespace

TEST(Descriptor, RowsAreWhereViewsHaveThem) {
    int checked = 0;
    for (const auto& [layout, order] : layouts()) {
        for (const std::uint64_t kernel_block : {4u, 2u, 1u}) {
            for (const std::uint64_t padding : {0u, 3u}) {
                for (const std::uint64_t num_blocks : {1u, 2u, 3u}) {
                    SCOPED_TRACE(layout + " in memory " + order + ", kernel block " +
                                 std::to_string(kernel_block) + ", padding " +
                                 std::to_string(padding) + ", blocks " +
                                 std::to_string(num_blocks));
                    kvpages_spec spec = full(4, 2, 3);
                    if (padding != 0) {
                        spec.page_size_padded_bytes =
                            page_bytes(spec) + padding * 2 * (4 / kernel_block);
                    }
                    const Model m = model();
                    add(m, "layer", spec, kernels(layout, order, kernel_block));
                    kvpages_plan* raw = nullptr;
                    if (try_parts(m, one_tensor(num_blocks, page_bytes(spec)), &raw) !=
                        KVPAGES_STATUS_OK) {
                        continue;  // axes are fused that padding parts
                    }
                    const Plan plan(raw);
                    check(cache(plan), plan, {{"layer", layout, order, "", false}});
                    ++checked;
                    if (::testing::Test::HasFailure()) {
                        return;
                    }
                }
            }
        }
    }
    EXPECT_GT(checked, 200);
}

TEST(Descriptor, ScalesAndLatents) {
    struct Case {
        std::string layout;
        kvpages_spec spec;
        std::uint32_t flags;
        std::uint32_t format;
    };
    kvpages_spec int8 = full(4, 2, 4, KVPAGES_DTYPE_I8);
    int8.quant_mode = KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD;
    kvpages_spec int4 = full(4, 2, 6, KVPAGES_DTYPE_U8);
    int4.quant_mode = KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD;
    kvpages_spec fp8 = full(4, 2, 6, KVPAGES_DTYPE_U8);
    fp8.quant_mode = KVPAGES_QUANT_MODE_FP8_PER_TENSOR;
    kvpages_spec unequal = full(4, 2, 4);
    unequal.head_size_v = 3;
    kvpages_spec packed = full(4, 2, 4, KVPAGES_DTYPE_U8);
    packed.kind = KVPAGES_SPEC_KIND_TURBO_QUANT;
    packed.tq_slot_bytes = 10;
    kvpages_spec v32 = mla(4, 576, KVPAGES_DTYPE_U8);
    v32.cache_dtype = "fp8_ds_mla";
    kvpages_spec compressed = mla(8, 6);
    compressed.compress_ratio = 2;
    constexpr std::uint32_t follows = KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE;
    const std::vector<Case> cases{
        {block_first, int8, follows, KVPAGES_ROW_FORMAT_INT8_PER_TOKEN_HEAD},
        {packed_nhd, int8, follows, KVPAGES_ROW_FORMAT_INT8_PER_TOKEN_HEAD},
        {kv_first, int8, follows, KVPAGES_ROW_FORMAT_INT8_PER_TOKEN_HEAD},
        {packed_nhd, int4, follows, KVPAGES_ROW_FORMAT_INT4_PER_TOKEN_HEAD},
        {block_first, int8, follows | KVPAGES_BACKEND_SCALES_AT_PAGE_END,
         KVPAGES_ROW_FORMAT_INT8_PER_TOKEN_HEAD},
        {block_first, fp8, follows, KVPAGES_ROW_FORMAT_FP8_PER_TENSOR},
        {packed_nhd, unequal, follows, KVPAGES_ROW_FORMAT_PLAIN},
        {packed_nhd, packed, follows, KVPAGES_ROW_FORMAT_TURBO_QUANT},
        {latent, mla(4, 6), follows, KVPAGES_ROW_FORMAT_PLAIN},
        {latent, v32, follows, KVPAGES_ROW_FORMAT_FP8_DS_MLA},
        {latent, compressed, follows, KVPAGES_ROW_FORMAT_PLAIN},
    };
    for (const Case& c : cases) {
        SCOPED_TRACE(c.layout + ", format " + std::to_string(c.format));
        const Model m = model();
        add(m, "layer", c.spec, kernels(c.layout, "", 0, c.flags));
        const Plan plan = plan_of_blocks(m, 3);
        const bool at_end = (c.flags & KVPAGES_BACKEND_SCALES_AT_PAGE_END) != 0;
        const Descriptor d =
            check(cache(plan), plan, {{"layer", c.layout, "", "", at_end}});
        const kvpages_described_layer said = described(d, 0);
        EXPECT_EQ(said.row_format, c.format);
        EXPECT_EQ(said.page_end_scale_bytes, at_end ? 2u * 4 * 2 * 4 : 0u);
        EXPECT_EQ(said.content_bytes, describe(c.spec).unpadded_page_size_bytes);
        if (::testing::Test::HasFailure()) {
            return;
        }
    }
}

TEST(Descriptor, PackedSharedStatesAndPagesThatNobodyReads) {
    {
        SCOPED_TRACE("two groups in packed blocks, a layer that shares, one without a backend");
        const Model m = model();
        const Backend nhd = kernels("block | head | token | kv*content", packed_nhd);
        add(m, "a", full(4, 2, 4), nhd);
        add(m, "b", full(4, 2, 4), nhd);
        add(m, "mute", full(4, 2, 4));
        share(m, "c", "b", nhd);
        const std::uint64_t page = page_bytes(full(4, 2, 4));
        Parts parts;
        parts.num_blocks = 3;
        parts.groups = {{{"a", "mute"}, 0}, {{"b", "c"}, 0}};
        parts.tensors = {{3 * 2 * page, {"a", "b"}, 0, 2 * page},
                         {3 * 2 * page, {"mute"}, page, 2 * page}};
        const Plan plan = plan_from(m, parts);
        const Cache c = cache(plan);
        const std::string layout = "block | head | token | kv*content";
        const Descriptor d = check(c, plan,
                                   {{"a", layout, packed_nhd, "", false},
                                    {"b", layout, packed_nhd, "", false},
                                    {"c", layout, packed_nhd, "b", false}});
        ASSERT_EQ(kvpages_descriptor_num_layers(d.get()), 4u);
        EXPECT_STREQ(kvpages_descriptor_layer_name(d.get(), 3), "mute");
        const kvpages_described_layer mute = described(d, 3);
        EXPECT_EQ(mute.row_format, static_cast<std::uint32_t>(KVPAGES_ROW_FORMAT_NONE));
        EXPECT_EQ(mute.group, 0u);
        const std::vector<kvpages_run> runs = runs_of(d, 3, 2);
        ASSERT_EQ(runs.size(), 1u);
        EXPECT_EQ(runs[0].offset_bytes, 2 * 2 * page + page);
        EXPECT_EQ(runs[0].size_bytes, page);
        kvpages_row row{};
        EXPECT_TRUE(fails(
            kvpages_descriptor_get_row(d.get(), 3, 0, 0, 0, KVPAGES_ROW_PART_KEY, &row),
            KVPAGES_STATUS_UNSUPPORTED, "rows_not_supported", {"mute", "no backend"}));
        kvpages_described_group group = KVPAGES_DESCRIBED_GROUP_INIT;
        must(kvpages_descriptor_get_group(d.get(), 1, &group));
        EXPECT_EQ(group.block_size, 4u);
        EXPECT_EQ(group.kernel_block_size, 4u);
    }
    {
        SCOPED_TRACE("states, and attention that shares their tensors");
        const Model m = model();
        State state;
        state.block(4).add(KVPAGES_DTYPE_F32, {3, 2}).add(KVPAGES_DTYPE_F16, {5});
        const Backend of_states = state_backend();
        const kvpages_spec spec = full(4, 2, 4);
        add(m, "attn.0", spec, kernels(kv_first, ""));
        add(m, "mamba.1", state.padded(page_bytes(spec)).spec(), of_states);
        add(m, "attn.2", spec, kernels(kv_first, ""));
        add(m, "mamba.3", state.spec(), of_states);
        const Plan plan = plan_of_blocks(m, 3);
        check(cache(plan), plan,
              {{"attn.0", kv_first, "", "", false}, {"attn.2", kv_first, "", "", false}},
              {"mamba.1", "mamba.3"});
    }
}

TEST(Descriptor, SaysWhatTheRankIs) {
    const Model m = model();
    add(m, "a", full(16, 2, 8), kernels(block_first, ""));
    add(m, "b", full(16, 1, 16), kernels(block_first, ""));
    const Cache c = cache(plan_of_blocks(m, 2));
    kvpages_descriptor_config config = KVPAGES_DESCRIPTOR_CONFIG_INIT;
    config.tensor_parallel_size = 4;
    config.tensor_parallel_rank = 3;
    config.context_parallel_size = 2;
    config.context_parallel_rank = 1;
    config.context_parallel_interleave = 16;
    const std::vector<std::uint64_t> heads{0, 2};
    config.model_kv_heads = heads.data();
    config.num_model_kv_heads = heads.size();
    const Descriptor d = descriptor_of(descriptor_json(c, &config));
    kvpages_descriptor_info info = KVPAGES_DESCRIPTOR_INFO_INIT;
    must(kvpages_descriptor_get_info(d.get(), &info));
    EXPECT_EQ(info.num_blocks, 2u);
    EXPECT_EQ(info.max_blocks, 2u);
    EXPECT_EQ(info.num_layers, 2u);
    EXPECT_EQ(info.tensor_parallel_size, 4u);
    EXPECT_EQ(info.tensor_parallel_rank, 3u);
    EXPECT_EQ(info.context_parallel_size, 2u);
    EXPECT_EQ(info.context_parallel_rank, 1u);
    EXPECT_EQ(info.context_parallel_interleave, 16u);
    EXPECT_EQ(described(d, 0).model_kv_heads, 8u);
    EXPECT_EQ(described(d, 0).first_model_kv_head, 6u);
    // Two heads on four ranks: each is on two.
    EXPECT_EQ(described(d, 1).model_kv_heads, 2u);
    EXPECT_EQ(described(d, 1).first_model_kv_head, 1u);
    const Descriptor untold = descriptor_of(descriptor_json(c));
    EXPECT_EQ(described(untold, 0).model_kv_heads, 0u);
}

// The first version as it is: what was written once must be read by every library that knows it.
TEST(Descriptor, TheTextOfVersionOne) {
    const std::string text =
        R"({"descriptor_version":1,"num_blocks":2,"max_blocks":2,)"
        R"("tensor_parallel":{"size":2,"rank":1},"context_parallel":null,"alignment_bytes":256,)"
        R"("allocations":[{"size_bytes":256},{"size_bytes":256}],)"
        R"("groups":[{"block_size_tokens":4,"kernel_block_size_tokens":4},)"
        R"({"block_size_tokens":4,"kernel_block_size_tokens":4}],)"
        R"("layers":[{"name":"a","kind":"full attention","group":0,"owner_layer":0,"allocation":0,)"
        R"("pages":{"offset_bytes":0,"block_step_bytes":128,"num_runs":1,"run_bytes":128,)"
        R"("run_step_bytes":0,"page_bytes":128,"content_bytes":128},)"
        R"("attention":{"dtype":"bfloat16","format":"plain","num_kv_heads":2,"model_kv_heads":4,)"
        R"("first_model_kv_head":2,"block_slots":4,"kernel_block_slots":4,)"
        R"("kernel_block_stride_elements":64,"slot_stride_elements":8,"head_stride_elements":4,)"
        R"("content_stride_elements":1,"value_offset_elements":32,"key_elements":4,)"
        R"("value_elements":4,"scale_dtype":null,"inline_scale_elements":0,)"
        R"("page_end_scale_bytes":0},"states":null},)"
        R"({"name":"b","kind":"state","group":1,"owner_layer":1,"allocation":1,)"
        R"("pages":{"offset_bytes":0,"block_step_bytes":128,"num_runs":1,"run_bytes":128,)"
        R"("run_step_bytes":0,"page_bytes":128,"content_bytes":34},"attention":null,)"
        R"("states":[{"dtype":"float32","shape":[3,2],"offset_bytes":0},)"
        R"({"dtype":"float16","shape":[5],"offset_bytes":24}]}]})";
    const Model m = model();
    State state;
    state.block(4).add(KVPAGES_DTYPE_F32, {3, 2}).add(KVPAGES_DTYPE_F16, {5}).padded(128);
    add(m, "a", full(4, 2, 4, KVPAGES_DTYPE_BF16), kernels(kv_first, ""));
    add(m, "b", state.spec(), state_backend());
    Parts parts;
    parts.num_blocks = 2;
    parts.groups = {{{"a"}, 0}, {{"b"}, 0}};
    parts.tensors = {{256, {"a"}, 0, 0}, {256, {"b"}, 0, 0}};
    kvpages_descriptor_config config = KVPAGES_DESCRIPTOR_CONFIG_INIT;
    config.tensor_parallel_size = 2;
    config.tensor_parallel_rank = 1;
    EXPECT_EQ(descriptor_json(cache(plan_from(m, parts)), &config), text);
    EXPECT_EQ(json_of(descriptor_of(text)), text);
}

TEST(Descriptor, BlocksWithoutMemoryAreNotFound) {
    const Model m = model();
    add(m, "a", full(16, 2, 8), kernels(kv_first, ""));
    const Plan plan = plan_of_blocks(m, 5);
    const Memory memory = host_memory();
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    config.num_blocks = 2;
    kvpages_cache* raw = nullptr;
    must(kvpages_cache_create(plan.get(), &config, &raw, nullptr));
    const Cache c(raw);
    const Descriptor before = descriptor_of(descriptor_json(c));
    must(kvpages_cache_resize(c.get(), 3, nullptr, 0));
    const Descriptor after = descriptor_of(descriptor_json(c));
    EXPECT_EQ(runs_of(after, 0, 1)[1].offset_bytes, runs_of(before, 0, 1)[1].offset_bytes);
    std::size_t count = 0;
    kvpages_run runs[2];
    EXPECT_TRUE(fails(kvpages_descriptor_copy_block_runs(before.get(), 0, 2, runs, 2, &count),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "block_id_out_of_range", {"a", "2"}));
    EXPECT_EQ(kvpages_descriptor_copy_block_runs(after.get(), 0, 2, runs, 2, &count),
              KVPAGES_STATUS_OK);
    EXPECT_EQ(count, 2u);
}
