// Every element of every layout, written through its view's tensor of DLPack and looked for in raw
// memory.
#include "support/api.h"
#include "support/axes.h"
#include "support/bytes.h"
#include "support/descriptors.h"
#include "support/dlpack.h"
#include "support/expected.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

using namespace support;

namespace {

struct Layout {
    std::string layout;
    std::string order;
};

const std::vector<Layout>& own_layouts() {
    static const std::vector<Layout> all{
        {block_first, ""},
        {kv_first, ""},
        {packed_nhd, ""},
        {"block | head | token | kv*content", ""},
        {"block | head | token | kv*content", packed_nhd},
        {"kv | block | token | head | content", "kv | block | head | token | content"},
        {"kv | block | token | head | content", "block | kv | token | head | content"},
        {"block | kv | token | head | content", "kv | block | token | head | content"},
        {"block | kv | token | head | content", "block | token | kv | content | head"},
        {"block | kv*token*head*content", ""},
        {"block*token | head | kv*content", ""},
        {"block*kv | token | head | content", ""},
        {"kv*block | token | head | content", ""},
        {"block | kv*head | token | content", ""},
        {"block | token | kv*head | content", ""},
        {"kv | block | token*head | content", ""},
        {"kv | block*token | head*content", ""},
        {"block*kv*token*head*content", ""},
        {"block | content | kv | token | head", ""},
        {"block | content*token | kv*head", ""},
        {"block | head | token | content | kv", ""},
        {"content | block | token | kv*head", ""},
        {"head | block | kv | token | content", ""},
        {"kv | head | block | token | content", ""},
        {"token | block | kv | head | content", ""},
        {"kv | token | head | content | block", ""},
        {"block | kv | token | head | content", "content | head | token | kv | block"},
    };
    return all;
}

Backend kernels(const Layout& layout, std::uint64_t kernel_block, std::uint32_t flags) {
    BackendOptions options;
    options.layout = layout.layout;
    options.memory_order = layout.order;
    options.flags = flags;
    if (kernel_block != 0) {
        options.sizes = {kernel_block};
        options.multiples.clear();
    }
    return backend(options);
}

// One attention layer that writes to a cache.
struct Writer {
    std::string name;
    Layout layout;
    std::string pages_of;  // the owner's name; empty: its own
};

using Chosen = std::function<bool(std::int64_t block, std::size_t group)>;

bool every_block(std::int64_t, std::size_t) { return true; }

// What is said of the axes leads to the elements of the view, whatever the layout fuses.
void check_axes(const Cache& cache, std::size_t number, const ExpectedLayer& layer) {
    kvpages_view_axes axes = KVPAGES_VIEW_AXES_INIT;
    must(kvpages_cache_get_axes(cache.get(), number, &axes));
    const kvpages_tensor tensor = view(cache, number);
    const auto key = static_cast<std::int64_t>(axes.key_elements);
    const auto value = static_cast<std::int64_t>(axes.value_elements);
    const auto scale = static_cast<std::int64_t>(axes.scale_elements);
    ASSERT_EQ(static_cast<std::int64_t>(axes.kernel_block_slots), layer.sizes[token_axis]);
    ASSERT_EQ(static_cast<std::int64_t>(axes.num_heads), layer.sizes[head_axis]);
    const bool beside = layer.sizes[kv_axis] == 1 && value != 0;
    ASSERT_EQ(layer.sizes[content_axis], beside ? key + value + 2 * scale : key + scale);
    for_each_place(layer.sizes, [&](const AxisValues& at) {
        std::int64_t e = at[content_axis];
        bool is_value = at[kv_axis] == 1;
        if (beside && e >= key + scale) {
            is_value = true;
            e -= key + scale;
        }
        if (e >= (is_value ? value : key)) {
            return;  // a scale
        }
        const auto step = [](std::int64_t index, std::uint64_t stride) {
            return static_cast<std::uint64_t>(index) * stride;
        };
        const std::uint64_t said = step(at[block_axis], axes.kernel_block_stride) +
                                   step(at[token_axis], axes.token_stride) +
                                   step(at[head_axis], axes.head_stride) +
                                   step(e, axes.content_stride) +
                                   (is_value ? axes.value_offset : 0);
        ASSERT_EQ(static_cast<unsigned char*>(tensor.data) + said * layer.element_bytes,
                  element(tensor, layer.layout.index(at, layer.sizes)));
    });
}

// Writes all chosen blocks of an attention layer through its view, and into the image where the
// rules say they lie.
void write(const Cache& cache, const Plan& plan, const Writer& writer, bool has_state,
           bool scales_at_end, const Chosen& chosen, Image& image) {
    const std::string owner = writer.pages_of.empty() ? writer.name : writer.pages_of;
    const ExpectedLayer layer(pages_of(plan, owner),
                              AxisLayout(writer.layout.layout, writer.layout.order), has_state,
                              scales_at_end);
    const std::size_t number = find(cache, writer.name);
    const kvpages_tensor tensor = view(cache, number);
    const DlpackTensor exported = dlpack(cache, number);
    const kvpages_view_report proven = report(cache, number);
    ASSERT_EQ(shape(tensor), layer.layout.shape(layer.sizes));
    ASSERT_EQ(kvpages_dtype_bytes(tensor.dtype), layer.element_bytes);
    check_axes(cache, number, layer);
    std::vector<unsigned char>& bytes = image[proven.allocation];
    for_each_place(layer.sizes, [&](const AxisValues& at) {
        if (!chosen(layer.block(at), layer.pages.group)) {
            return;
        }
        const std::vector<std::int64_t> index = layer.layout.index(at, layer.sizes);
        unsigned char* through_tensor = element(exported->dl_tensor, index);
        ASSERT_EQ(through_tensor, element(tensor, index));
        const Place place =
            image.allocations().place(through_tensor, static_cast<std::size_t>(layer.element_bytes));
        const std::size_t start = layer.byte(at);
        ASSERT_EQ(place.allocation, proven.allocation);
        ASSERT_EQ(place.offset, start);
        value_of(number, at, layer.element_bytes, through_tensor);
        value_of(number, at, layer.element_bytes, bytes.data() + start);
        // The block owns the byte, in the page or in one of its runs.
        const auto block = static_cast<std::uint64_t>(layer.block(at));
        if (!layer.spread) {
            const std::uint64_t page_start = layer.pages.offset + block * layer.pages.step;
            ASSERT_GE(start, page_start);
            ASSERT_LE(start + layer.element_bytes, page_start + layer.pages.page);
        }
        bool owned = false;
        for (std::uint64_t run = 0; run < proven.num_runs; ++run) {
            const std::uint64_t run_start = proven.offset_bytes + run * proven.run_step_bytes +
                                            block * proven.block_step_bytes;
            owned = owned || (start >= run_start && start + layer.element_bytes <=
                                                        run_start + proven.block_span_bytes);
        }
        ASSERT_TRUE(owned) << "block " << block << " does not own byte " << start;
    });
}

// Writes all chosen blocks of a state layer.
void write_state(const Cache& cache, const Plan& plan, const std::string& name,
                 const Chosen& chosen, Image& image) {
    const Pages pages = pages_of(plan, name);
    const std::size_t number = find(cache, name);
    std::uint64_t state_offset = 0;
    for (std::size_t state = 0; state < kvpages_cache_num_views(cache.get(), number); ++state) {
        const kvpages_tensor tensor = view(cache, number, state);
        const DlpackTensor exported = dlpack(cache, number, state);
        const std::uint64_t element_bytes = kvpages_dtype_bytes(tensor.dtype);
        std::vector<unsigned char>& bytes = image[report(cache, number, state).allocation];
        std::uint64_t elements = 1;
        for (std::uint32_t dim = 1; dim < tensor.ndim; ++dim) {
            elements *= static_cast<std::uint64_t>(tensor.shape[dim]);
        }
        std::uint64_t count = 0;
        for_each_index(shape(tensor), [&](const std::vector<std::int64_t>& index) {
            const std::uint64_t linear = count++;
            const std::uint64_t block = linear / elements;
            if (!chosen(static_cast<std::int64_t>(block), pages.group)) {
                return;
            }
            unsigned char* through_tensor = element(exported->dl_tensor, index);
            ASSERT_EQ(through_tensor, element(tensor, index));
            const std::size_t start = pages.offset + block * pages.step + state_offset +
                                      (linear % elements) * element_bytes;
            const Place place = image.allocations().place(through_tensor, element_bytes);
            ASSERT_EQ(place.offset, start);
            const AxisValues at{static_cast<std::int64_t>(linear), static_cast<std::int64_t>(state),
                                0, 0, 0};
            value_of(number, at, element_bytes, through_tensor);
            value_of(number, at, element_bytes, bytes.data() + start);
        });
        state_offset += elements * element_bytes;
    }
}

// The memory of a plan, written by one layer.
void check_alone(const Plan& plan, const Writer& writer, bool scales_at_end = false) {
    const Cache c = cache(plan);
    expect_descriptor_of_views(c);
    expect_dlpack_of_views(c);
    expect_reshards_to_itself(c);
    Image image(c);
    write(c, plan, writer, false, scales_at_end, every_block, image);
    EXPECT_EQ(image.difference(), "");
}

kvpages_spec spec_of_two_heads(std::uint32_t dtype) { return full(4, 2, 3, dtype); }

}  // namespace

TEST(Bytes, OwnLayoutsAlone) {
    int refused = 0;
    int written = 0;
    for (const Layout& layout : own_layouts()) {
        for (const std::uint32_t dtype :
             {KVPAGES_DTYPE_F16, KVPAGES_DTYPE_U8, KVPAGES_DTYPE_F32}) {
            for (const std::uint64_t kernel_block : {4u, 2u, 1u}) {
                for (const std::uint64_t padding : {0u, 1u, 5u}) {
                    for (const std::uint64_t num_blocks : {1u, 2u, 3u}) {
                        SCOPED_TRACE(layout.layout + " in memory " + layout.order + ", dtype " +
                                     std::to_string(dtype) + ", kernel block " +
                                     std::to_string(kernel_block) + ", padding " +
                                     std::to_string(padding) + ", blocks " +
                                     std::to_string(num_blocks));
                        kvpages_spec spec = spec_of_two_heads(dtype);
                        const std::uint64_t page = page_bytes(spec);
                        if (padding != 0) {
                            spec.page_size_padded_bytes =
                                page + padding * kvpages_dtype_bytes(dtype) * (4 / kernel_block);
                        }
                        const Model m = model();
                        add(m, "layer", spec,
                            kernels(layout, kernel_block, KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE));
                        Parts parts;
                        parts.num_blocks = num_blocks;
                        parts.groups = {{{"layer"}, 0}};
                        parts.tensors = {{num_blocks * page_bytes(spec), {"layer"}, 0, 0}};
                        kvpages_plan* raw = nullptr;
                        const std::int32_t status = try_parts(m, parts, &raw);
                        // Whether it can be had is known before the library is asked.
                        Pages pages;
                        pages.spec = spec;
                        pages.kernel_block_size = kernel_block;
                        pages.page = pages.step = page_bytes(spec);
                        pages.num_blocks = num_blocks;
                        pages.alone = true;
                        const ExpectedLayer wanted(
                            pages, AxisLayout(layout.layout, layout.order), false);
                        if (!wanted.has_strides()) {
                            EXPECT_TRUE(fails(status, KVPAGES_STATUS_CONTRACT_BROKEN,
                                              "fused_axes_apart", {"layer", layout.layout}));
                            EXPECT_EQ(raw, nullptr);
                            ++refused;
                            continue;
                        }
                        ASSERT_EQ(status, KVPAGES_STATUS_OK) << kvpages_last_error_message();
                        check_alone(Plan(raw), {"layer", layout, ""});
                        ++written;
                        if (::testing::Test::HasFailure()) {
                            return;
                        }
                    }
                }
            }
        }
    }
    EXPECT_GT(written, 1000);
    EXPECT_GT(refused, 100);
}

TEST(Bytes, KernelsThatNeedDensePages) {
    for (const Layout& layout : own_layouts()) {
        SCOPED_TRACE(layout.layout + " in memory " + layout.order);
        for (const std::uint64_t kernel_block : {4u, 2u}) {
            kvpages_spec spec = spec_of_two_heads(KVPAGES_DTYPE_F16);
            const Model m = model();
            add(m, "layer", spec, kernels(layout, kernel_block, 0));
            check_alone(plan_of_blocks(m, 3), {"layer", layout, ""});
            spec.page_size_padded_bytes = page_bytes(spec) + 8;
            const Model padded = model();
            add(padded, "layer", spec, kernels(layout, kernel_block, 0));
            kvpages_plan_config config = plan_config();
            config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
            config.num_blocks_override = 3;
            kvpages_plan* raw = nullptr;
            EXPECT_TRUE(fails(try_plan({{padded.get(), 0}}, config, &raw),
                              KVPAGES_STATUS_CONTRACT_BROKEN, "page_not_dense", {"layer"}));
            EXPECT_EQ(raw, nullptr);
        }
    }
}

TEST(Bytes, PresetsAlone) {
    struct Case {
        std::uint32_t preset;
        Layout layout;
        std::uint64_t block_size;
        kvpages_spec spec;
    };
    const Layout nhd{"block | head | token | kv*content", packed_nhd};
    const Layout hnd{"block | head | token | kv*content", ""};
    const Layout one{latent, ""};
    const kvpages_spec two = full(1, 2, 4);
    kvpages_spec unequal = two;
    unequal.head_size_v = 3;
    kvpages_spec packed = two;
    packed.kind = KVPAGES_SPEC_KIND_TURBO_QUANT;
    packed.tq_slot_bytes = 10;
    kvpages_spec keys = sliding(8, 1, 2, 4);
    keys.head_size_v = KVPAGES_HEAD_SIZE_NONE;
    kvpages_spec hidden = attention(KVPAGES_SPEC_KIND_HIDDEN_STATE, 1, 2, 4);
    kvpages_spec v32 = mla(1, 576, KVPAGES_DTYPE_U8);
    v32.cache_dtype = "fp8_ds_mla";
    const std::vector<Case> cases{
        {KVPAGES_PRESET_FLASH_ATTENTION_NHD, nhd, 16, two},
        {KVPAGES_PRESET_FLASH_ATTENTION_HND, hnd, 16, two},
        {KVPAGES_PRESET_TRITON_NHD, nhd, 32, two},
        {KVPAGES_PRESET_TRITON_HND, hnd, 32, two},
        {KVPAGES_PRESET_FLASH_INFER_NHD, nhd, 128, two},
        {KVPAGES_PRESET_FLASH_INFER_HND, hnd, 48, two},
        {KVPAGES_PRESET_FLASH_ATTENTION_DIFF_KV_NHD, nhd, 16, unequal},
        {KVPAGES_PRESET_FLASH_ATTENTION_DIFF_KV_HND, hnd, 16, unequal},
        {KVPAGES_PRESET_FLEX_ATTENTION, nhd, 16, two},
        {KVPAGES_PRESET_CPU_ATTENTION, hnd, 16, two},
        {KVPAGES_PRESET_ROCM_ATTENTION, {kv_first, ""}, 16, two},
        {KVPAGES_PRESET_ROCM_AITER_FLASH_ATTENTION, hnd, 64, two},
        {KVPAGES_PRESET_ROCM_AITER_UNIFIED_ATTENTION, hnd, 16, two},
        {KVPAGES_PRESET_HPC_ATTENTION, {block_first, ""}, 128, two},
        {KVPAGES_PRESET_TURBO_QUANT, hnd, 16, packed},
        {KVPAGES_PRESET_SLIDING_CONVOLUTION, {"block | head | token | content", ""}, 3, keys},
        {KVPAGES_PRESET_HIDDEN_STATE, {"block | token | head | content", ""}, 3, hidden},
        {KVPAGES_PRESET_TRITON_MLA, one, 16, mla(1, 7)},
        {KVPAGES_PRESET_FLASH_MLA, one, 128, mla(1, 7)},
        {KVPAGES_PRESET_FLASH_MLA_SPARSE, one, 64, v32},
        {KVPAGES_PRESET_FLASH_INFER_MLA, one, 96, mla(1, 7)},
        {KVPAGES_PRESET_FLASH_INFER_MLA_SPARSE, one, 64, mla(1, 7)},
        {KVPAGES_PRESET_ROCM_AITER_MLA, one, 5, mla(1, 7)},
        {KVPAGES_PRESET_ROCM_AITER_MLA_SPARSE, one, 7, mla(1, 7)},
        {KVPAGES_PRESET_DEEPSEEK_V32_INDEXER, one, 64, mla(1, 132, KVPAGES_DTYPE_U8)},
        {KVPAGES_PRESET_DEEPSEEK_V4_MLA, one, 256, mla(1, 7)},
        {KVPAGES_PRESET_DEEPSEEK_V4_INDEXER, one, 256, mla(1, 7)},
        {KVPAGES_PRESET_DEEPSEEK_V4_SLIDING_WINDOW, one, 64, mla(1, 7)},
        {KVPAGES_PRESET_DEEPSEEK_V4_COMPRESSOR, one, 4, mla(1, 7)},
    };
    for (const Case& given : cases) {
        for (const std::uint64_t num_blocks : {1u, 2u, 3u}) {
            SCOPED_TRACE("preset " + std::to_string(given.preset) + ", blocks " +
                         std::to_string(num_blocks));
            kvpages_spec spec = given.spec;
            spec.block_size = given.block_size;
            const Model m = model();
            add(m, "layer", spec, preset(given.preset));
            Parts parts;
            parts.num_blocks = num_blocks;
            parts.groups = {{{"layer"}, 0}};
            parts.tensors = {{num_blocks * page_bytes(spec), {"layer"}, 0, 0}};
            check_alone(plan_from(m, parts), {"layer", given.layout, ""});
        }
    }
}

TEST(Bytes, LayersOfSeveralGroupsInOneTensor) {
    const std::vector<Layout> layouts{
        {block_first, ""},
        {kv_first, ""},
        {kv_first, "kv | block | head | token | content"},
        {"block | head | token | kv*content", packed_nhd},
        {"block | kv*token*head*content", ""},
        {"block | content | kv | token | head", ""},
        {"content | block | token | kv*head", ""},
        {"head | block | kv | token | content", ""},
        {"kv | token | head | content | block", ""},
    };
    for (const std::uint64_t padding : {0u, 32u}) {
        for (const std::uint64_t num_blocks : {1u, 2u, 3u, 20u}) {
            SCOPED_TRACE("padding " + std::to_string(padding) + ", blocks " +
                         std::to_string(num_blocks));
            kvpages_spec spec = spec_of_two_heads(KVPAGES_DTYPE_F16);
            if (padding != 0) {
                spec.page_size_padded_bytes = page_bytes(spec) + padding;
            }
            const Model m = model();
            Parts parts;
            parts.num_blocks = num_blocks;
            parts.tensors = {{num_blocks * page_bytes(spec), {}, 0, 0}};
            std::vector<Writer> writers;
            for (std::size_t i = 0; i < layouts.size(); ++i) {
                const std::string name = "layer." + std::to_string(i);
                const std::uint64_t kernel_blocks[]{4, 2, 1};
                add(m, name, spec,
                    kernels(layouts[i], kernel_blocks[i % 3],
                            KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE));
                parts.groups.push_back({{name}, 0});
                parts.tensors[0].layers.push_back(name);
                writers.push_back({name, layouts[i], ""});
            }
            const Plan p = plan_from(m, parts);
            const Cache c = cache(p);
            expect_descriptor_of_views(c);
            expect_dlpack_of_views(c);
            expect_reshards_to_itself(c);
            Image image(c);
            // A block belongs to one group at a time.
            const Chosen turns = [&layouts](std::int64_t block, std::size_t group) {
                return static_cast<std::size_t>(block) % layouts.size() == group;
            };
            for (const Writer& writer : writers) {
                write(c, p, writer, false, false, turns, image);
            }
            EXPECT_EQ(image.difference(), "");
            // And each group may have them all.
            for (const Writer& writer : writers) {
                Image whole(c);
                write(c, p, writer, false, false, every_block, whole);
                EXPECT_EQ(whole.difference(), "") << writer.name;
            }
        }
    }
}

TEST(Bytes, PackedSlots) {
    const std::vector<Layout> layouts{{block_first, ""},
                                      {kv_first, ""},
                                      {"block | head | token | kv*content", packed_nhd},
                                      {"block | kv*token*head*content", ""},
                                      {"content | block | token | kv*head", ""},
                                      {"kv | head | block | token | content", ""}};
    const std::uint64_t page = page_bytes(spec_of_two_heads(KVPAGES_DTYPE_F16));
    // With and without unused bytes between and behind the slots.
    for (const std::uint64_t gap : {0u, 2u, 30u}) {
        for (const std::uint64_t num_blocks : {1u, 2u, 3u}) {
            SCOPED_TRACE("gap " + std::to_string(gap) + ", blocks " + std::to_string(num_blocks));
            const std::uint64_t stride = layouts.size() * (page + gap);
            const Model m = model();
            Parts parts;
            parts.num_blocks = num_blocks;
            parts.groups = {{{}, 0}, {{}, 0}};
            std::vector<Writer> writers;
            for (std::size_t i = 0; i < layouts.size(); ++i) {
                parts.tensors.push_back({stride * num_blocks, {}, i * (page + gap) + gap, stride});
                for (std::size_t group = 0; group < 2; ++group) {
                    // The second group has another layout in each slot.
                    const Layout& layout = layouts[(i + group) % layouts.size()];
                    const std::string name =
                        "group" + std::to_string(group) + "." + std::to_string(i);
                    add(m, name, spec_of_two_heads(KVPAGES_DTYPE_F16),
                        kernels(layout, 0, KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE));
                    parts.groups[group].layers.push_back(name);
                    parts.tensors[i].layers.push_back(name);
                    writers.push_back({name, layout, ""});
                }
            }
            const Plan p = plan_from(m, parts);
            const Cache c = cache(p);
            expect_descriptor_of_views(c);
            expect_dlpack_of_views(c);
            expect_reshards_to_itself(c);
            ASSERT_EQ(kvpages_cache_num_allocations(c.get()), 1u);
            Image image(c);
            const Chosen turns = [](std::int64_t block, std::size_t group) {
                return static_cast<std::size_t>(block) % 2 == group;
            };
            for (const Writer& writer : writers) {
                write(c, p, writer, false, false, turns, image);
            }
            EXPECT_EQ(image.difference(), "");
        }
    }
}

TEST(Bytes, StatesBesideAttention) {
    const std::vector<Layout> layouts{{kv_first, ""},
                                      {block_first, ""},
                                      {"head | block | kv | token | content", ""}};
    for (const Layout& layout : layouts) {
        for (const std::uint64_t num_blocks : {1u, 2u, 3u}) {
            for (const std::uint64_t kernel_block : {4u, 2u}) {
                SCOPED_TRACE(layout.layout + ", blocks " + std::to_string(num_blocks));
                State state;
                state.add(KVPAGES_DTYPE_BF16, {3, 4}).add(KVPAGES_DTYPE_F32, {2, 3}).padded(96);
                const kvpages_spec spec = spec_of_two_heads(KVPAGES_DTYPE_F16);
                ASSERT_EQ(page_bytes(spec), 96u);
                const Model m = model();
                const Backend reads =
                    kernels(layout, kernel_block, KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE);
                add(m, "attn.0", spec, reads);
                add(m, "mamba", state.spec(), state_backend());
                // Alone in its tensor, and page by page all the same.
                add(m, "attn.1", spec, reads);
                Parts parts;
                parts.num_blocks = num_blocks;
                parts.groups = {{{"attn.0", "attn.1"}, 0}, {{"mamba"}, 0}};
                parts.tensors = {{num_blocks * 96, {"attn.0", "mamba"}, 0, 0},
                                 {num_blocks * 96, {"attn.1"}, 0, 0}};
                const Plan p = plan_from(m, parts);
                EXPECT_EQ(worker_info(p).needs_zeroing, 1u);
                const Cache c = cache(p);
                expect_descriptor_of_views(c);
                expect_dlpack_of_views(c);
                expect_reshards_to_itself(c);
                Image image(c);
                const Chosen turns = [](std::int64_t block, std::size_t group) {
                    return static_cast<std::size_t>(block) % 2 == group;
                };
                write(c, p, {"attn.0", layout, ""}, true, false, turns, image);
                write(c, p, {"attn.1", layout, ""}, true, false, every_block, image);
                write_state(c, p, "mamba", turns, image);
                EXPECT_EQ(image.difference(), "");
            }
        }
    }
}

// The bytes that a report says a block owns are those that the block's states are in, and no
// others' block has any of them.
TEST(Bytes, BlocksOfStatesOwnTheirBytes) {
    State state;
    state.add(KVPAGES_DTYPE_BF16, {3, 4}).add(KVPAGES_DTYPE_F32, {2, 3}).padded(96);
    const Model m = model();
    add(m, "mamba", state.spec(), state_backend());
    const Cache c = cache(plan_of_blocks(m, 3));
    const Allocations allocations(c);
    for (std::size_t number = 0; number < 2; ++number) {
        SCOPED_TRACE("state " + std::to_string(number));
        const kvpages_view_report proven = report(c, "mamba", number);
        ASSERT_EQ(proven.num_runs, 1u);
        EXPECT_LE(proven.block_span_bytes, proven.block_step_bytes);
        const std::uint64_t last = proven.offset_bytes + 2 * proven.block_step_bytes;
        EXPECT_LE(last + proven.block_span_bytes, allocation(c, 0).size_bytes)
            << "the last block would reach outside the allocation";
        EXPECT_EQ(proven.offset_bytes / proven.block_step_bytes,
                  (proven.offset_bytes + proven.block_span_bytes - 1) / proven.block_step_bytes)
            << "a block would reach into the next one";
        const kvpages_tensor tensor = view(c, "mamba", number);
        for_each_index(shape(tensor), [&](const std::vector<std::int64_t>& index) {
            const std::uint64_t start =
                allocations.place(element(tensor, index), kvpages_dtype_bytes(tensor.dtype)).offset;
            const auto block = static_cast<std::uint64_t>(index[0]);
            const std::uint64_t block_start = proven.offset_bytes + block * proven.block_step_bytes;
            EXPECT_GE(start, block_start);
            EXPECT_LT(start, block_start + proven.block_span_bytes);
        });
    }
}

TEST(Bytes, QuantisedPages) {
    struct Case {
        std::uint32_t mode;
        std::uint32_t dtype;
        std::uint64_t head_size;
    };
    const std::vector<Layout> layouts{{block_first, ""},
                                      {kv_first, ""},
                                      {"block | head | token | kv*content", packed_nhd}};
    for (const Case& given :
         {Case{KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD, KVPAGES_DTYPE_I8, 6},
          Case{KVPAGES_QUANT_MODE_FP8_PER_TOKEN_HEAD, KVPAGES_DTYPE_F8_E4M3FN, 6},
          Case{KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD, KVPAGES_DTYPE_U8, 6},
          Case{KVPAGES_QUANT_MODE_FP8_PER_TENSOR, KVPAGES_DTYPE_F8_E5M2, 6},
          Case{KVPAGES_QUANT_MODE_NVFP4, KVPAGES_DTYPE_U8, 16}}) {
        for (const Layout& layout : layouts) {
            for (const std::uint64_t kernel_block : {4u, 2u}) {
                SCOPED_TRACE(layout.layout + ", mode " + std::to_string(given.mode));
                kvpages_spec spec = full(4, 2, given.head_size, given.dtype);
                spec.quant_mode = given.mode;
                const Model m = model();
                add(m, "layer", spec, kernels(layout, kernel_block, 0));
                const Plan p = plan_of_blocks(m, 3);
                check_alone(p, {"layer", layout, ""});
                // Every byte of the page is content.
                EXPECT_EQ(report(cache(p), "layer").logical_bytes, 3 * page_bytes(spec));
            }
        }
    }
    // Scales behind the data are no part of the view, and the view leaves them alone.
    for (const Layout& layout : layouts) {
        kvpages_spec spec = full(4, 2, 6, KVPAGES_DTYPE_I8);
        spec.quant_mode = KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD;
        const Model m = model();
        add(m, "layer", spec,
            kernels(layout, 0,
                    KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE | KVPAGES_BACKEND_SCALES_AT_PAGE_END));
        const Plan p = plan_of_blocks(m, 3);
        check_alone(p, {"layer", layout, ""}, true);
        EXPECT_EQ(report(cache(p), "layer").logical_bytes, 3 * 4 * 2 * 12u);
        EXPECT_EQ(page_bytes(spec), 4 * 2 * 12u + 4 * 2 * 8u);
    }
}

TEST(Bytes, KeysAndValuesOfDifferentWidths) {
    kvpages_spec spec = full(4, 2, 6);
    spec.head_size_v = 3;
    for (const Layout& layout : {Layout{"block | head | token | kv*content", packed_nhd},
                                 Layout{"block | head | token | kv*content", ""},
                                 Layout{"block*token | head | kv*content", ""},
                                 Layout{"head | block | token | kv*content", ""}}) {
        const Model m = model();
        add(m, "layer", spec, kernels(layout, 2, 0));
        check_alone(plan_of_blocks(m, 3), {"layer", layout, ""});
    }
    for (const Layout& layout : {Layout{kv_first, ""}, Layout{block_first, ""},
                                 Layout{"block | kv*token*head*content", ""}}) {
        const Model m = model();
        add(m, "layer", spec, kernels(layout, 2, 0));
        kvpages_plan_config config = plan_config();
        config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
        config.num_blocks_override = 3;
        kvpages_plan* raw = nullptr;
        EXPECT_TRUE(fails(try_plan({{m.get(), 0}}, config, &raw), KVPAGES_STATUS_CONTRACT_BROKEN,
                          "view_size_mismatch", {"layer", "6", "3"}));
    }
}

// What a report says of the steps between kernel blocks is what the view does.
TEST(Bytes, ReportedStepsAreThoseOfTheBytes) {
    for (const Layout& layout : own_layouts()) {
        SCOPED_TRACE(layout.layout + " in memory " + layout.order);
        const Model m = model();
        add(m, "layer", spec_of_two_heads(KVPAGES_DTYPE_F16), kernels(layout, 2, 0));
        const Plan p = plan_of_blocks(m, 3);
        const Cache c = cache(p);
        expect_descriptor_of_views(c);
        expect_dlpack_of_views(c);
        expect_reshards_to_itself(c);
        const ExpectedLayer wanted(pages_of(p, "layer"), AxisLayout(layout.layout, layout.order),
                                   false);
        const kvpages_view_report proven = report(c, "layer");
        EXPECT_EQ(proven.kernel_block_step_bytes,
                  static_cast<std::uint64_t>(wanted.strides[block_axis]) * 2);
        // Two kernel blocks in a block.
        EXPECT_EQ(proven.block_step_bytes,
                  2 * 2 * static_cast<std::uint64_t>(wanted.strides[block_axis]));
        const auto step = static_cast<std::uint64_t>(wanted.strides[block_axis]) * 2;
        EXPECT_EQ(proven.alignment_bytes, std::min<std::uint64_t>(256, step & (~step + 1)));
        EXPECT_EQ(proven.logical_bytes, 3u * 96);
        EXPECT_EQ(proven.end_bytes, 3u * 96);
        EXPECT_EQ(proven.largest_element_offset, 3u * 48 - 1);
    }
}
