// Kernels of devices, compiled for the host and run over random grids, against the host's loops.
//
// A kernel does all of its work on any grid: these are not those that src/kernels/device.rs
// chooses, which its own tests look at.

#include "../../kernels/device.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

extern "C" {
void kvpages_host_fill(const kvp::Piece* pieces, size_t num_pieces, const uint32_t* ids,
                       size_t num_ids, kvp::byte value);
void kvpages_host_copy(const kvp::Piece* pieces, size_t num_pieces, const kvp::Move* moves,
                       size_t num_moves, kvp::byte* spare);
void kvpages_host_write(uint32_t form, uint32_t row_type, const kvp::Rows* rows,
                        const kvp::Slots* slots);
void kvpages_host_gather(uint32_t form, uint32_t row_type, const kvp::Rows* rows,
                         const kvp::Slots* slots);
void kvpages_host_gather_row(kvp::Row row, int32_t* to, uint64_t begin, uint64_t end);
void kvpages_host_map_slots(const kvp::SlotRule* rule, kvp::Row row, const int64_t* positions,
                            int64_t* slots, uint64_t count);
}

namespace {

using kvp::byte;

std::mt19937 random_bits(1);

// From `least` to `most`.
uint64_t any(uint64_t least, uint64_t most) {
    return std::uniform_int_distribution<uint64_t>(least, most)(random_bits);
}

bool coin() { return any(0, 1) == 1; }

template <typename T, size_t count>
T any_of(const std::array<T, count>& values) {
    return values[any(0, count - 1)];
}

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// --- running a kernel ----------------------------------------------------------------------------

template <typename Argument>
void run(const std::string& name, uint32_t grid_x, uint32_t block_x, uint32_t block_y,
         Argument argument) {
    using Kernel = void (*)(const uint32_t*, const uint32_t*, void**);
    const auto kernel = reinterpret_cast<Kernel>(dlsym(RTLD_DEFAULT, ("kvhost_" + name).c_str()));
    const auto* sizes =
        static_cast<const uint32_t*>(dlsym(RTLD_DEFAULT, ("kvsizes_" + name).c_str()));
    ASSERT_TRUE(kernel != nullptr && sizes != nullptr) << name;
    ASSERT_EQ(sizes[0], 1u) << name;
    ASSERT_EQ(sizes[1], sizeof(Argument)) << name;
    const uint32_t grid[3] = {grid_x, 1, 1}, block[3] = {block_x, block_y, 1};
    void* parameters[] = {&argument};
    kernel(grid, block, parameters);
}

// Memory of exactly `bytes`, `offset` past a multiple of 64, once for each side.
class Twice {
public:
    Twice(uint64_t bytes, uint64_t offset) : bytes_(bytes), offset_(offset) {
        for (auto& side : sides_) {
            void* memory = nullptr;
            if (posix_memalign(&memory, 64, offset + std::max<uint64_t>(bytes, 1)) != 0) {
                std::abort();
            }
            side.reset(static_cast<byte*>(memory));
        }
        fill_with_bits();
    }
    byte* at(int side) const { return sides_[static_cast<size_t>(side)].get() + offset_; }
    uint64_t bytes() const { return bytes_; }
    bool same() const { return std::memcmp(at(0), at(1), bytes_) == 0; }

    void fill_with_bits() {
        for (uint64_t i = 0; i < bytes_; ++i) at(0)[i] = static_cast<byte>(random_bits());
        copy();
    }

    // Numbers of which most are neither huge nor tiny; random bits are nearly never that.
    template <typename Type>
    void fill_with_numbers() {
        const float scale = std::exp2(static_cast<float>(any(0, 24)) - 12.0f);
        for (uint64_t i = 0; i + Type::bytes <= bytes_; i += Type::bytes) {
            if (any(0, 15) == 0) continue;  // bits, also of NaN and infinity
            const float value = std::normal_distribution<float>()(random_bits);
            Type::put(at(0) + i, value * scale);
        }
        copy();
    }

private:
    struct Free {
        void operator()(byte* memory) const { std::free(memory); }
    };
    void copy() { std::memcpy(at(1), at(0), bytes_); }
    std::array<std::unique_ptr<byte, Free>, 2> sides_;
    uint64_t bytes_;
    uint64_t offset_;
};

struct Width {
    const char* name;
    uint64_t bytes;
};
constexpr std::array<Width, 3> widths{{{"_v16", 16}, {"_v4", 4}, {"_v1", 1}}};

// --- whole blocks --------------------------------------------------------------------------------

constexpr int host = 0, device = 1;

struct Pool {
    std::vector<Twice> memory;
    std::vector<kvp::Piece> pieces[2];
};

Pool pool_of(uint64_t num_blocks, uint64_t width) {
    Pool pool;
    const uint64_t num_pieces = any(1, 4);
    for (uint64_t i = 0; i < num_pieces; ++i) {
        const uint64_t span = any(0, 80) * width;
        const uint64_t step = span + any(0, 3) * width;
        pool.memory.emplace_back(num_blocks * step + width, any(0, 3) * width);
        for (const int side : {host, device}) {
            pool.pieces[side].push_back({pool.memory.back().at(side), step, span});
        }
    }
    return pool;
}

// Fills in the pieces, in the argument or in a table elsewhere.
template <typename List>
void give_pieces(List& list, const std::vector<kvp::Piece>& pieces) {
    list.num_pieces = static_cast<uint32_t>(pieces.size());
    if (coin()) {
        list.table = pieces.data();
    } else {
        std::copy(pieces.begin(), pieces.end(), list.pieces);
    }
}

std::vector<uint32_t> shuffled(uint64_t count) {
    std::vector<uint32_t> ids(count);
    std::iota(ids.begin(), ids.end(), 0u);
    std::shuffle(ids.begin(), ids.end(), random_bits);
    return ids;
}

void expect_same(const Pool& pool, const std::string& name) {
    for (const Twice& memory : pool.memory) ASSERT_TRUE(memory.same()) << name;
}

TEST(DeviceKernels, ZeroAsTheHost) {
    for (int round = 0; round < 600; ++round) {
        const Width width = any_of(widths);
        const uint64_t num_blocks = any(1, 40);
        const Pool pool = pool_of(num_blocks, width.bytes);
        std::vector<uint32_t> ids = shuffled(num_blocks);
        ids.resize(any(1, num_blocks));
        kvpages_host_fill(pool.pieces[host].data(), pool.pieces[host].size(), ids.data(),
                          ids.size(), 0);
        kvp::BlockList list{};
        give_pieces(list, pool.pieces[device]);
        list.num_ids = static_cast<uint32_t>(ids.size());
        std::copy(ids.begin(), ids.end(), list.ids);
        const std::string name = std::string("kvpages_zero") + width.name;
        const auto chunks = static_cast<uint32_t>(any(1, 3));
        run(name, list.num_pieces * list.num_ids * chunks, static_cast<uint32_t>(any(1, 40)), 1,
            list);
        expect_same(pool, name);
    }
}

void copy_on_both(const Pool& pool, uint64_t width, const std::vector<kvp::Move>& moves,
                  const std::string& name, uint32_t places) {
    std::vector<byte> spare(100 * width);
    kvpages_host_copy(pool.pieces[host].data(), pool.pieces[host].size(), moves.data(),
                      moves.size(), spare.data());
    kvp::MoveList list{};
    give_pieces(list, pool.pieces[device]);
    list.num_moves = static_cast<uint32_t>(moves.size());
    std::copy(moves.begin(), moves.end(), list.moves);
    run(name, list.num_pieces * places * static_cast<uint32_t>(any(1, 3)),
        static_cast<uint32_t>(any(1, 40)), 1, list);
    expect_same(pool, name);
}

TEST(DeviceKernels, CopyAsTheHost) {
    for (int round = 0; round < 600; ++round) {
        const Width width = any_of(widths);
        const uint64_t num_blocks = any(2, 40);
        const Pool pool = pool_of(num_blocks, width.bytes);
        // The second half is read, the first half written.
        const std::vector<uint32_t> ids = shuffled(num_blocks);
        std::vector<kvp::Move> moves(any(1, num_blocks / 2));
        for (size_t i = 0; i < moves.size(); ++i) {
            moves[i] = {ids[any(num_blocks / 2, num_blocks - 1)], ids[i]};
        }
        copy_on_both(pool, width.bytes, moves, std::string("kvpages_copy") + width.name,
                     static_cast<uint32_t>(moves.size()));
    }
}

// Any moves in any order, also through the spare page: what is not in order comes out otherwise.
TEST(DeviceKernels, CopyInOrderAsTheHost) {
    for (int round = 0; round < 600; ++round) {
        const Width width = any_of(widths);
        const uint64_t num_blocks = any(2, 12);
        const Pool pool = pool_of(num_blocks, width.bytes);
        bool spare_has_something = false;
        const auto block = [&](bool may_be_spare) {
            const uint64_t id = any(0, num_blocks - (may_be_spare ? 0 : 1));
            return id == num_blocks ? kvp::kSpare : static_cast<uint32_t>(id);
        };
        std::vector<kvp::Move> moves(any(1, 40));
        // Nobody asks for a copy of a block over itself.
        for (kvp::Move& move : moves) {
            do move = {block(spare_has_something), block(true)};
            while (move.from == move.to);
            spare_has_something = spare_has_something || move.to == kvp::kSpare;
        }
        copy_on_both(pool, width.bytes, moves, std::string("kvpages_copy_in_order") + width.name,
                     1);
    }
}

// --- rows ----------------------------------------------------------------------------------------

struct FormOf {
    const char* name;
    uint32_t number;
    uint64_t bytes;  // of an element
};
constexpr FormOf same{"same", 0, 0};
constexpr std::array<FormOf, 5> converted{
    {{"f32", 1, 4}, {"f16", 2, 2}, {"bf16", 3, 2}, {"e4m3", 4, 1}, {"e5m2", 5, 1}}};
constexpr std::array<FormOf, 4> scaled{{{"scaled_e4m3", 6, 1},
                                        {"scaled_e5m2", 7, 1},
                                        {"scaled_int8", 8, 1},
                                        {"scaled_int4", 9, 1}}};
constexpr FormOf packed_latent{"packed_latent", 10, 1};

struct RowTypeOf {
    const char* name;
    uint32_t number;
    uint64_t bytes;
};
constexpr std::array<RowTypeOf, 3> row_types{{{"f32", 0, 4}, {"f16", 1, 2}, {"bf16", 2, 2}}};

// What rows and cache of a case are multiples of, and what their elements are.
struct Shape {
    FormOf form;
    RowTypeOf row_type;
    uint64_t row_align;
    uint64_t cell_align;
    uint64_t elements_align;
    bool dense;
};

struct Layer {
    std::vector<Twice> memory;  // cache, keys, values
    kvp::Rows rows[2];
};

// Bytes of `elements` in the cache.
uint64_t stored_bytes(const Shape& shape, uint64_t elements, uint64_t element) {
    const bool has_scale = shape.form.number >= scaled[0].number;
    if (shape.form.number == packed_latent.number) return 656;
    if (!has_scale) return elements * element;
    return elements / (shape.form.number == scaled[3].number ? 2 : 1) + 4;
}

void fill_with_numbers(Twice& memory, const RowTypeOf& type) {
    switch (type.number) {
        case 0: memory.fill_with_numbers<kvp::F32>(); break;
        case 1: memory.fill_with_numbers<kvp::F16>(); break;
        default: memory.fill_with_numbers<kvp::Bf16>(); break;
    }
}

// Distances from a token to the next and from a head to the next, and the bytes of all.
struct Strides {
    uint64_t token, head, all;
};

Strides row_strides(uint64_t count, uint64_t heads, uint64_t run, uint64_t align) {
    const auto padded = [align](uint64_t bytes) {
        return round_up(bytes, align) + (coin() ? 0 : any(0, 2) * align);
    };
    Strides strides{};
    if (coin()) {
        strides.head = padded(run);
        strides.token = padded(heads * strides.head);
        strides.all = count * strides.token;
    } else {
        strides.token = padded(run);
        strides.head = padded(count * strides.token);
        strides.all = heads * strides.head;
    }
    return strides;
}

// A layer whose axes lie in any order.
Layer layer_of(const Shape& shape, uint64_t num_slots, uint64_t kernel_block_slots,
               uint64_t count) {
    kvp::Rows rows{};
    const bool is_packed = shape.form.number == packed_latent.number;
    rows.element = shape.form.number == same.number ? shape.row_type.bytes : shape.form.bytes;
    rows.kernel_block_slots = kernel_block_slots;
    rows.heads = is_packed ? 1 : any(1, 4);
    const uint64_t unit = shape.elements_align;
    rows.key_elements = is_packed ? 512 : any(1, 40 / unit + 3) * unit;
    rows.value_elements = is_packed ? 64 : coin() ? rows.key_elements : any(0, 6) * unit;
    rows.key_scale = 0.25f + static_cast<float>(any(0, 100)) / 64.0f;
    rows.value_scale = 0.25f + static_cast<float>(any(0, 100)) / 64.0f;

    struct Axis {
        uint64_t* stride;
        uint64_t extent;
    };
    uint64_t end = std::max(stored_bytes(shape, rows.key_elements, rows.element),
                            stored_bytes(shape, rows.value_elements, rows.element));
    rows.content = rows.element;
    std::vector<Axis> axes{{&rows.kernel_block, num_slots / kernel_block_slots},
                           {&rows.token, kernel_block_slots},
                           {&rows.head, rows.heads},
                           {&rows.value, 2}};
    if (!shape.dense) {
        end = rows.element;
        axes.push_back({&rows.content, std::max(rows.key_elements, rows.value_elements)});
    }
    std::shuffle(axes.begin(), axes.end(), random_bits);
    for (const Axis& axis : axes) {
        *axis.stride = round_up(end, shape.cell_align) + (coin() ? 0 : shape.cell_align);
        end = *axis.stride * axis.extent;
    }
    if (is_packed) rows.value = 0;

    Layer layer;
    const auto offset = [](uint64_t align) { return any(0, 3) * align; };
    const uint64_t key_run = rows.key_elements * shape.row_type.bytes;
    const uint64_t value_run = rows.value_elements * shape.row_type.bytes;
    const Strides keys = row_strides(count, rows.heads, key_run, shape.row_align);
    const Strides values = row_strides(count, rows.heads, value_run, shape.row_align);
    layer.memory.emplace_back(end, offset(shape.cell_align));
    layer.memory.emplace_back(keys.all, offset(shape.row_align));
    layer.memory.emplace_back(values.all, offset(shape.row_align));
    rows.key_token = keys.token;
    rows.key_head = keys.head;
    rows.value_token = values.token;
    rows.value_head = values.head;
    fill_with_numbers(layer.memory[1], shape.row_type);
    fill_with_numbers(layer.memory[2], shape.row_type);
    for (const int side : {host, device}) {
        rows.cache = layer.memory[0].at(side);
        rows.keys = layer.memory[1].at(side);
        rows.values = layer.memory[2].at(side);
        layer.rows[side] = rows;
    }
    return layer;
}

// Rows in several layers, written and read on both sides, on any grid.
void compare_rows(const Shape& shape, const std::string& suffix) {
    const uint64_t kernel_block_slots = any(1, 6), num_kernel_blocks = any(1, 5);
    const uint64_t num_slots = kernel_block_slots * num_kernel_blocks;
    std::vector<uint32_t> order = shuffled(num_slots);
    std::vector<int64_t> slots[2];
    std::vector<int32_t> blocks;
    uint64_t count = any(1, num_slots);
    if (coin()) {
        for (uint64_t i = 0; i < count; ++i) {
            int64_t slot = order[i];
            if (any(0, 7) == 0) slot = -1;
            slots[host].push_back(slot);
            // One past the end means no token on a device, where nobody can refuse it.
            slots[device].push_back(slot < 0 && coin() ? static_cast<int64_t>(num_slots) : slot);
        }
    } else {
        order = shuffled(num_kernel_blocks);
        order.resize(any(1, num_kernel_blocks));
        blocks.assign(order.begin(), order.end());
        count = blocks.size() * kernel_block_slots;
    }
    std::vector<Layer> layers;
    for (uint64_t i = any(1, 3); i > 0; --i) {
        layers.push_back(layer_of(shape, num_slots, kernel_block_slots, count));
    }
    const auto slots_of = [&](int side) {
        return kvp::Slots{blocks.empty() ? slots[side].data() : nullptr, blocks.data(),
                          kernel_block_slots, count};
    };
    kvp::RowBatch batch{};
    batch.slots = slots_of(device);
    batch.num_slots = num_slots;
    batch.num_layers = static_cast<uint32_t>(layers.size());
    batch.form = shape.form.number;
    for (size_t i = 0; i < layers.size(); ++i) {
        const kvp::Rows& rows = batch.layers[i] = layers[i].rows[device];
        const uint64_t parts = rows.value_elements == 0 ? 1 : 2;
        const bool is_packed = shape.form.number == packed_latent.number;
        const uint64_t units = is_packed ? kvp::kTiles + 1 : rows.heads * parts;
        batch.units = std::max(batch.units, static_cast<uint32_t>(units));
    }
    const bool one_lane = shape.form.number >= scaled[0].number;
    for (const char* way : {"write_", "gather_"}) {
        const bool is_write = way[0] == 'w';
        for (const Layer& layer : layers) {
            const kvp::Slots given = slots_of(host);
            (is_write ? kvpages_host_write : kvpages_host_gather)(
                shape.form.number, shape.row_type.number, &layer.rows[host], &given);
        }
        const std::string name = std::string("kvpages_") + way + suffix;
        const auto lanes = static_cast<uint32_t>(one_lane ? 1 : any(1, 9));
        run(name, batch.num_layers * static_cast<uint32_t>(any(1, 5)), lanes,
            static_cast<uint32_t>(any(1, 8)), batch);
        for (Layer& layer : layers) {
            for (const Twice& memory : layer.memory) ASSERT_TRUE(memory.same()) << name;
            // What is read next is not what was written.
            layer.memory[0].fill_with_bits();
        }
    }
}

TEST(DeviceKernels, RowsOfOneTypeAsTheHost) {
    for (int round = 0; round < 1000; ++round) {
        const Width width = any_of(widths);
        const uint64_t element = uint64_t{1} << any(0, 3);
        const uint64_t unit = std::max<uint64_t>(width.bytes / element, 1);
        const RowTypeOf type{"", 0, element};
        const uint64_t align = width.bytes;
        compare_rows({same, type, align, align, unit, true}, std::string("same") + width.name);
    }
}

TEST(DeviceKernels, RowsOfOneTypeInAnyLayoutAsTheHost) {
    for (int round = 0; round < 500; ++round) {
        const RowTypeOf type{"", 0, uint64_t{1} << any(0, 3)};
        compare_rows({same, type, 1, 1, 1, coin()}, "same_strided");
    }
}

TEST(DeviceKernels, ConvertedRowsAsTheHost) {
    for (const RowTypeOf& type : row_types) {
        for (const FormOf& form : converted) {
            if (std::string(type.name) == form.name) continue;
            const std::string name = std::string(type.name) + "_" + form.name;
            for (int round = 0; round < 60; ++round) {
                compare_rows({form, type, 1, 1, 1, coin()}, type.name + std::string("_converted"));
                compare_rows({form, type, 4 * type.bytes, 4 * form.bytes, 4, true}, name);
            }
        }
    }
}

TEST(DeviceKernels, ScaledRowsAsTheHost) {
    for (const RowTypeOf& type : row_types) {
        for (const FormOf& form : scaled) {
            for (int round = 0; round < 60; ++round) {
                compare_rows({form, type, 1, 1, 2, true},
                             std::string(type.name) + "_scaled");
            }
        }
    }
}

TEST(DeviceKernels, PackedLatentsAsTheHost) {
    for (const RowTypeOf& type : row_types) {
        for (int round = 0; round < 40; ++round) {
            compare_rows({packed_latent, type, 1, 1, 1, true},
                         std::string(type.name) + "_packed_latent");
        }
    }
}

// --- far apart -----------------------------------------------------------------------------------

// Address space of which only what is touched becomes memory.
class Reserved {
public:
    explicit Reserved(uint64_t bytes) : bytes_(bytes) {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        data_ = memory == MAP_FAILED ? nullptr : static_cast<byte*>(memory);
    }
    ~Reserved() {
        if (data_ != nullptr) munmap(data_, bytes_);
    }
    Reserved(const Reserved&) = delete;
    Reserved& operator=(const Reserved&) = delete;
    byte* data() const { return data_; }

private:
    byte* data_;
    uint64_t bytes_;
};

constexpr uint64_t GiB = uint64_t{1} << 30;

TEST(DeviceKernels, BlocksMoreThan4GiBApart) {
    const Reserved memory(20 * GiB);
    ASSERT_NE(memory.data(), nullptr);
    const uint64_t step = 3 * GiB, span = 64;
    const auto block = [&](uint64_t id) { return memory.data() + id * step; };
    std::memset(block(2), 2, span);
    std::memset(block(5), 5, span);
    const kvp::Piece piece{memory.data(), step, span};
    for (const Width& width : widths) {
        kvp::MoveList moves{};
        moves.num_pieces = moves.num_moves = 1;
        moves.pieces[0] = piece;
        moves.moves[0] = {5, 3};
        run(std::string("kvpages_copy") + width.name, 1, 32, 1, moves);
        EXPECT_EQ(block(3)[0], 5);
        moves.moves[0] = {2, 4};
        run(std::string("kvpages_copy_in_order") + width.name, 1, 64, 1, moves);
        EXPECT_EQ(block(4)[0], 2);
        kvp::BlockList ids{};
        ids.num_pieces = 1;
        ids.num_ids = 2;
        ids.pieces[0] = piece;
        ids.ids[0] = 3;
        ids.ids[1] = 4;
        run(std::string("kvpages_zero") + width.name, 2, 64, 1, ids);
        EXPECT_EQ(block(3)[0], 0);
        EXPECT_EQ(block(4)[0], 0);
    }
}

TEST(DeviceKernels, RowsMoreThan4GiBApart) {
    const Reserved cache(40 * GiB), given(40 * GiB);
    ASSERT_TRUE(cache.data() != nullptr && given.data() != nullptr);
    kvp::Rows rows{};
    rows.cache = cache.data();
    rows.keys = given.data();
    rows.values = given.data() + 20 * GiB;
    rows.key_token = rows.value_token = 9 * GiB;
    rows.key_head = rows.value_head = 4 * GiB + 4096;
    rows.kernel_block = 18 * GiB;
    rows.token = 9 * GiB;
    rows.head = 4 * GiB + 4096;
    rows.value = 1 * GiB;
    rows.kernel_block_slots = 2;
    rows.heads = 2;
    rows.key_elements = rows.value_elements = 16;
    rows.key_scale = rows.value_scale = 1.0f;
    const int64_t slots[] = {3, 0};
    struct Case {
        const char* name;
        uint32_t form;
        uint64_t element;
    };
    for (const Case& c :
         {Case{"same_v16", 0, 4}, Case{"same_v4", 0, 4}, Case{"same_v1", 0, 4},
          Case{"same_strided", 0, 4}, Case{"f32_converted", 3, 2}, Case{"f32_bf16", 3, 2},
          Case{"f32_scaled", 8, 1}}) {
        rows.element = rows.content = c.element;
        kvp::RowBatch batch{};
        batch.slots = {slots, nullptr, 2, 2};
        batch.num_slots = 4;
        batch.num_layers = 1;
        batch.units = 4;
        batch.form = c.form;
        batch.layers[0] = rows;
        const uint32_t lanes = c.element == 1 ? 1 : 4;
        const auto row = [&](uint64_t token, uint64_t head, bool is_value) {
            return (is_value ? rows.values : rows.keys) + token * rows.key_token +
                   head * rows.key_head;
        };
        const auto each = [&](auto call) {
            for (uint64_t token : {0u, 1u}) {
                for (uint64_t head : {0u, 1u}) {
                    for (bool is_value : {false, true}) {
                        call(row(token, head, is_value),
                             static_cast<float>(1 + token * 4 + head * 2 + (is_value ? 1 : 0)));
                    }
                }
            }
        };
        each([](byte* to, float value) {
            for (uint64_t i = 0; i < 16; ++i) kvp::F32::put(to + 4 * i, value);
        });
        run(std::string("kvpages_write_") + c.name, 2, lanes, 2, batch);
        each([](byte* to, float) { std::memset(to, 0, 64); });
        run(std::string("kvpages_gather_") + c.name, 2, lanes, 2, batch);
        each([&](const byte* from, float value) {
            EXPECT_NEAR(kvp::F32::get(from), value, 0.01f) << c.name;
            EXPECT_NEAR(kvp::F32::get(from + 60), value, 0.01f) << c.name;
        });
        // Where a slot's cells are is told by the host.
        kvp::Rows check = rows;
        const kvp::Slots told{slots, nullptr, 2, 2};
        each([](byte* to, float) { std::memset(to, 0, 64); });
        kvpages_host_gather(c.form, 0, &check, &told);
        each([&](const byte* from, float value) {
            EXPECT_NEAR(kvp::F32::get(from), value, 0.01f) << c.name;
        });
    }
}

// --- tables --------------------------------------------------------------------------------------

kvp::Divider divider(uint64_t divisor) { return {UINT64_MAX / divisor, divisor}; }

kvp::SlotRule any_rule() {
    const uint64_t interleave = any(1, 4), kernel_block = interleave * any(1, 4);
    const uint64_t ratio = any(1, 4), ranks = any(1, 3);
    return {divider(kernel_block * ratio), divider(interleave),  divider(ranks), any(0, ranks - 1),
            ratio,                         static_cast<int64_t>(kernel_block)};
}

constexpr uint64_t kRows = 6, kTokens = 40;

// A group, the device's side and the host's.
struct TestGroup {
    uint64_t width = any(1, 300);
    kvp::SlotRule rule = any_rule();
    std::vector<int32_t> table = std::vector<int32_t>(kRows * width, kvp::kNullBlock);
    std::vector<int32_t> host_table = table;
    std::vector<int32_t> input = std::vector<int32_t>(kRows * width, -7);
    std::vector<int32_t> host_input = input;
    std::vector<uint32_t> ends;  // of the rows of `input` that are written
    std::vector<int64_t> slots = std::vector<int64_t>(kTokens, -7);
    std::vector<int64_t> host_slots = slots;
    std::vector<uint32_t> lengths = std::vector<uint32_t>(kRows, 0);

    kvp::Row host_row(int32_t request) const {
        if (request < 0) return {host_table.data(), 0};
        const auto row = static_cast<uint64_t>(request);
        return {host_table.data() + row * width, lengths[row]};
    }
};

TEST(DeviceKernels, TablesArePatchedAndFilledAsTheHostDoes) {
    for (int round = 0; round < 3000; ++round) {
        std::vector<TestGroup> groups(any(1, 4));
        std::vector<kvp::GroupTables> given;
        std::vector<kvp::RowPatch> patches;
        std::vector<int32_t> ids;
        for (TestGroup& group : groups) {
            const auto number = static_cast<uint32_t>(&group - groups.data());
            for (uint32_t row = 0; row < kRows; ++row) {
                if (coin()) continue;
                const auto column = static_cast<uint32_t>(any(0, group.width - 1));
                const auto count = static_cast<uint32_t>(any(0, group.width - column));
                patches.push_back({number, row, column, count, ids.size()});
                for (uint32_t i = 0; i < count; ++i) {
                    ids.push_back(static_cast<int32_t>(any(1, 1000)));
                    group.host_table[row * group.width + column + i] = ids.back();
                }
                group.lengths[row] = column + count;
            }
            given.push_back({group.table.data(), group.input.data(), group.slots.data(),
                             group.width, group.rule});
        }
        const uint64_t count = any(0, kRows);
        std::vector<int32_t> requests, query_start{0};
        std::vector<int64_t> positions;
        for (uint64_t i = 0; i < count; ++i) {
            requests.push_back(static_cast<int32_t>(any(0, kRows)) - 1);
            const uint64_t room = std::min<uint64_t>(kTokens - positions.size(), 12);
            for (uint64_t token = any(0, room); token > 0; --token) {
                positions.push_back(static_cast<int64_t>(any(0, 700)) - 2);
            }
            query_start.push_back(static_cast<int32_t>(positions.size()));
        }
        std::vector<uint32_t> lengths;
        for (const TestGroup& group : groups) {
            for (const int32_t request : requests) {
                lengths.push_back(static_cast<uint32_t>(group.host_row(request).length));
            }
        }
        const uint64_t num_rows = any(count, kRows);
        std::vector<uint32_t> ends;
        for (TestGroup& group : groups) {
            group.ends.clear();
            for (uint64_t row = 0; row < num_rows; ++row) {
                const uint64_t length = group.host_row(row < count ? requests[row] : -1).length;
                group.ends.push_back(static_cast<uint32_t>(any(length, group.width)));
            }
            ends.insert(ends.end(), group.ends.begin(), group.ends.end());
        }
        kvp::TableStep step{};
        step.groups = given.data();
        step.patches = patches.data();
        step.ids = ids.data();
        step.requests = requests.data();
        step.lengths = lengths.data();
        step.ends = ends.data();
        step.query_start = query_start.data();
        step.positions = positions.data();
        step.num_groups = static_cast<uint32_t>(groups.size());
        step.num_patches = static_cast<uint32_t>(patches.size());
        step.num_requests = static_cast<uint32_t>(count);
        step.num_rows = static_cast<uint32_t>(num_rows);
        step.num_slots = any(positions.size(), kTokens);
        const auto threads = [] { return static_cast<uint32_t>(any(1, 64)); };
        run("kvpages_patch_tables", static_cast<uint32_t>(any(1, 9)), threads(), 1, step);
        // Rows and slots by one launch, or by one each.
        step.gather_ctas = static_cast<uint32_t>(any(1, 9));
        const auto map_ctas = static_cast<uint32_t>(any(1, 9));
        if (coin()) {
            run("kvpages_fill_tables", step.gather_ctas + map_ctas, threads(), 1, step);
        } else {
            run("kvpages_fill_tables", step.gather_ctas, threads(), 1, step);
            step.gather_ctas = 0;
            run("kvpages_fill_tables", map_ctas, threads(), 1, step);
        }
        for (TestGroup& group : groups) {
            for (uint64_t row = 0; row < step.num_rows; ++row) {
                kvpages_host_gather_row(group.host_row(row < count ? requests[row] : -1),
                                        group.host_input.data() + row * group.width, 0,
                                        group.ends[row]);
            }
            std::fill_n(group.host_slots.begin(), step.num_slots, kvp::kPadSlot);
            for (uint64_t i = 0; i < count; ++i) {
                const auto from = static_cast<uint64_t>(query_start[i]);
                const auto to = static_cast<uint64_t>(query_start[i + 1]);
                kvpages_host_map_slots(&group.rule, group.host_row(requests[i]),
                                       positions.data() + from, group.host_slots.data() + from,
                                       to - from);
            }
            ASSERT_EQ(group.table, group.host_table) << round;
            ASSERT_EQ(group.input, group.host_input) << round;
            ASSERT_EQ(group.slots, group.host_slots) << round;
        }
    }
}

/// Memory of which only what is written exists.
class Vast {
public:
    explicit Vast(uint64_t bytes)
        : bytes_(bytes), data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
    ~Vast() {
        if (is_there()) munmap(data_, bytes_);
    }
    Vast(const Vast&) = delete;
    Vast& operator=(const Vast&) = delete;

    bool is_there() const { return data_ != MAP_FAILED; }
    int32_t* ids() const { return static_cast<int32_t*>(data_); }

private:
    uint64_t bytes_;
    void* data_;
};

TEST(DeviceKernels, TablesMayHaveMoreEntriesThan32BitsCount) {
    constexpr uint64_t kWidth = uint64_t{1} << 20, kVastRows = 4200;
    constexpr uint32_t kLast = kVastRows - 1;
    static_assert(kLast * kWidth > UINT32_MAX);
    const Vast table(kVastRows * kWidth * 4), input(kVastRows * kWidth * 4);
    if (!table.is_there() || !input.is_there()) GTEST_SKIP() << "addresses are short";
    std::vector<int64_t> slots(1, -7);
    const kvp::SlotRule rule{{UINT64_MAX / 16, 16}, {UINT64_MAX, 1}, {UINT64_MAX, 1}, 0, 1, 16};
    const kvp::GroupTables group{table.ids(), input.ids(), slots.data(), kWidth, rule};
    const kvp::RowPatch patch{0, kLast, 3, 2, 0};
    const std::vector<int32_t> ids{2000000000, 8}, requests(kVastRows, static_cast<int32_t>(kLast));
    std::vector<int32_t> query_start(kVastRows + 1, 0);
    query_start.back() = 1;
    const std::vector<int64_t> positions{3 * 16 + 5};
    const std::vector<uint32_t> lengths(kVastRows, 5);
    std::vector<uint32_t> ends(kVastRows, 0);
    ends.back() = 6;
    kvp::TableStep step{};
    step.groups = &group;
    step.patches = &patch;
    step.ids = ids.data();
    step.requests = requests.data();
    step.lengths = lengths.data();
    step.ends = ends.data();
    step.query_start = query_start.data();
    step.positions = positions.data();
    step.num_groups = 1;
    step.num_patches = 1;
    step.num_requests = step.num_rows = static_cast<uint32_t>(kVastRows);
    step.num_slots = 1;
    step.gather_ctas = 7;
    run("kvpages_patch_tables", 1, 4, 1, step);
    run("kvpages_fill_tables", 9, 4, 1, step);
    for (const Vast* each : {&table, &input}) {
        const int32_t* const row = each->ids() + kLast * kWidth;
        const std::vector<int32_t> wanted{0, 0, 0, ids[0], ids[1], 0};
        EXPECT_EQ(std::vector<int32_t>(row, row + 6), wanted);
    }
    EXPECT_EQ(slots[0], int64_t{2000000000} * 16 + 5);
}

}  // namespace
