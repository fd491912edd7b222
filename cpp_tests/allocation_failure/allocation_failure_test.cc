// Every allocation whose size a caller decides may fail: the call says so, leaves nothing behind, and does
// what it was asked when it is called again. The linker leads the library's calls of the allocator and of
// the system here; the first, the second, ... that is large is refused.
#include "support/api.h"
#include "support/descriptors.h"
#include "support/dlpack_structs.h"
#include "support/failure.h"

#include <gtest/gtest.h>

#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

using namespace support;

namespace {

// Allocations of so many bytes are of a size that these tests decide. What the library needs for itself, a
// handle, a message or a name, is smaller, and is not refused: no program goes on without that.
constexpr std::size_t kLarge = 64 << 10;

// What is large: less where a call is to be refused whatever it asks for.
std::size_t large = kLarge;
// Large allocations since the last start, and which of them is refused; 0 for none.
std::size_t num_large = 0;
std::size_t refused = 0;
bool is_counting = false;
std::size_t num_refused_in_all = 0;

bool refuses(std::size_t bytes) {
    if (!is_counting || bytes < large) {
        return false;
    }
    ++num_large;
    num_refused_in_all += num_large == refused ? 1 : 0;
    return num_large == refused;
}

}  // namespace

extern "C" {

void* __real_malloc(std::size_t bytes);
void* __real_calloc(std::size_t count, std::size_t bytes);
void* __real_realloc(void* memory, std::size_t bytes);
int __real_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes);
int __real_mprotect(void* address, std::size_t bytes, int protection);
void* __real_mmap(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset);

void* __wrap_malloc(std::size_t bytes);
void* __wrap_calloc(std::size_t count, std::size_t bytes);
void* __wrap_realloc(void* memory, std::size_t bytes);
int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes);
void* __wrap_mmap(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset);
int __wrap_mprotect(void* address, std::size_t bytes, int protection);

void* __wrap_malloc(std::size_t bytes) {
    return refuses(bytes) ? nullptr : __real_malloc(bytes);
}

void* __wrap_calloc(std::size_t count, std::size_t bytes) {
    return refuses(count * bytes) ? nullptr : __real_calloc(count, bytes);
}

void* __wrap_realloc(void* memory, std::size_t bytes) {
    return refuses(bytes) ? nullptr : __real_realloc(memory, bytes);
}

int __wrap_posix_memalign(void** memory, std::size_t alignment, std::size_t bytes) {
    return refuses(bytes) ? ENOMEM : __real_posix_memalign(memory, alignment, bytes);
}

void* __wrap_mmap(void* address, std::size_t bytes, int protection, int flags, int file,
                  off_t offset) {
    if (refuses(bytes)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return __real_mmap(address, bytes, protection, flags, file, offset);
}

// How memory is put behind addresses, and taken away, which cannot fail.
int __wrap_mprotect(void* address, std::size_t bytes, int protection) {
    if (protection != PROT_NONE && refuses(bytes)) {
        errno = ENOMEM;
        return -1;
    }
    return __real_mprotect(address, bytes, protection);
}
}

namespace {

// Calls until no allocation is left to refuse. `call` gives a status, `check` looks at what a refusal left.
std::size_t refuse_each(const std::function<std::int32_t()>& call, const std::function<void()>& check) {
    for (std::size_t which = 1;; ++which) {
        num_large = 0;
        refused = which;
        is_counting = true;
        const std::int32_t status = call();
        is_counting = false;
        const bool was_refused = num_large >= which;
        if (!was_refused) {
            EXPECT_EQ(status, KVPAGES_STATUS_OK) << kvpages_last_error_message();
            std::printf("  %zu allocations refused\n", which - 1);
            return which - 1;
        }
        EXPECT_EQ(status, KVPAGES_STATUS_OUT_OF_HOST_MEMORY)
            << "allocation " << which << ": " << kvpages_last_error_message();
        EXPECT_STRNE(kvpages_last_error_message(), "");
        check();
        if (::testing::Test::HasFailure()) {
            return which;
        }
    }
}

Model two_kinds() {
    Model layers = model();
    const Backend kernels = backend(packed_nhd);
    add(layers, "full.0", full(16, 2, 32), kernels);
    add(layers, "window.0", sliding(64, 16, 2, 32), kernels);
    return layers;
}

// Makes a handle that is to be NULL after every refusal.
template <typename Handle, void (*destroy)(Handle*)>
std::size_t refuse_in_creation(const std::function<std::int32_t(Handle**)>& create) {
    Handle* raw = nullptr;
    const std::size_t points = refuse_each([&] { return create(&raw); },
                                           [&] { EXPECT_EQ(raw, nullptr); });
    EXPECT_NE(raw, nullptr);
    destroy(raw);
    return points;
}

}  // namespace

TEST(AllocationFailure, Caches) {
    const Model layers = two_kinds();
    const Plan planned = plan_of_blocks(layers, 600);
    const Memory memory = host_memory();
    const std::size_t points = refuse_in_creation<kvpages_cache, kvpages_cache_destroy>(
        [&](kvpages_cache** out) { return try_cache(planned, memory, out); });
    EXPECT_GE(points, 1u);
}

TEST(AllocationFailure, CachesThatGrow) {
    const Model layers = two_kinds();
    const Plan planned = plan_of_blocks(layers, 6000);
    const Memory memory = host_memory();
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    config.num_blocks = 2;
    kvpages_cache* made = nullptr;
    const std::size_t points = refuse_each(
        [&] { return kvpages_cache_create(planned.get(), &config, &made, nullptr); },
        [&] { EXPECT_EQ(made, nullptr); });
    EXPECT_GE(points, 1u);
    const Cache cache(made);
    const std::size_t commits =
        refuse_each([&] { return kvpages_cache_resize(cache.get(), 6000, nullptr, 0); },
                    [&] { EXPECT_EQ(kvpages_cache_num_blocks(cache.get()), 2u); });
    EXPECT_GE(commits, 1u);
    EXPECT_EQ(kvpages_cache_num_blocks(cache.get()), 6000u);
}

TEST(AllocationFailure, Tables) {
    const std::array<kvpages_table_group, 3> groups{
        {{16, 16, 4096, 0, 0}, {64, 16, 2048, 0, 0}, {16, 16, 8192, 1, 0}}};
    kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
    config.groups = groups.data();
    config.num_groups = groups.size();
    config.max_requests = 64;
    config.max_tokens = 20000;
    const std::size_t points = refuse_in_creation<kvpages_tables, kvpages_tables_destroy>(
        [&](kvpages_tables** out) { return kvpages_tables_create(&config, out); });
    // Rows, input rows and slots of each group at least.
    EXPECT_GE(points, 3 * groups.size());
}

TEST(AllocationFailure, Operations) {
    const Model layers = two_kinds();
    const Cache pages = cache(plan_of_blocks(layers, 20000));
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_concurrency = 1;
    const std::size_t points = refuse_in_creation<kvpages_ops, kvpages_ops_destroy>(
        [&](kvpages_ops** out) { return kvpages_ops_create(pages.get(), &config, out); });
    EXPECT_GE(points, 1u);
}

TEST(AllocationFailure, ListsOfTheCaller) {
    // So many kernel block sizes, dimensions of a state, and moves of blocks.
    std::vector<std::uint64_t> multiples(20000, 16);
    BackendOptions options;
    options.layout = packed_nhd;
    options.multiples = multiples;
    refuse_in_creation<kvpages_backend, kvpages_backend_destroy>(
        [&](kvpages_backend** out) { return try_backend(options, out); });

    const Model layers = two_kinds();
    const Cache pages = cache(plan_of_blocks(layers, 4));
    kvpages_descriptor_config whole = KVPAGES_DESCRIPTOR_CONFIG_INIT;
    whole.tensor_parallel_size = 1;
    const Descriptor descriptor = descriptor_of(descriptor_json(pages, &whole));
    const kvpages_descriptor* const rank = descriptor.get();
    kvpages_reshard_config config = KVPAGES_RESHARD_CONFIG_INIT;
    config.sources = config.targets = &rank;
    config.num_sources = config.num_targets = 1;
    kvpages_reshard* raw = nullptr;
    must(kvpages_reshard_create(&config, &raw));
    const Reshard reshard(raw);
    const std::vector<kvpages_block_move> moves(20000, {0, 1, 2});
    std::vector<kvpages_strided_copy> copies(moves.size() * 4);
    std::size_t count = 7;
    std::int32_t status = KVPAGES_STATUS_OK;
    // Moves into one block are refused in the end, after all of them were looked at.
    for (std::size_t which = 1;; ++which) {
        num_large = 0;
        refused = which;
        is_counting = true;
        status = kvpages_reshard_copy_copies(reshard.get(), moves.data(), moves.size(), copies.data(),
                                             copies.size(), &count);
        is_counting = false;
        if (num_large < which) {
            break;
        }
        EXPECT_EQ(status, KVPAGES_STATUS_OUT_OF_HOST_MEMORY) << kvpages_last_error_message();
        EXPECT_EQ(count, 0u);
    }
    EXPECT_NE(status, KVPAGES_STATUS_OUT_OF_HOST_MEMORY);
}

// Nothing of a tensor is large, and a consumer may ask for many: all that an export takes is refused. What
// was taken of the cache goes back, or its memory would stay.
TEST(AllocationFailure, ExportsAsDlpack) {
    static int live;
    live = 0;
    kvpages_memory_callbacks callbacks = KVPAGES_MEMORY_CALLBACKS_INIT;
    callbacks.allocate = [](void*, std::size_t bytes, std::size_t alignment, void** out) {
        ++live;
        return std::int32_t{posix_memalign(out, alignment, bytes)};
    };
    callbacks.release = [](void*, void* data, std::size_t) {
        --live;
        std::free(data);
    };
    kvpages_memory* memory = nullptr;
    must(kvpages_memory_create_external(&callbacks, &memory));
    Cache pages = cache(plan_of_blocks(two_kinds(), 3), Memory(memory));
    DLManagedTensorVersioned* tensor = nullptr;
    DLManagedTensor* unversioned = nullptr;
    large = 1;
    EXPECT_EQ(refuse_each([&] { return kvpages_cache_export_dlpack(pages.get(), 0, 0, 0, &tensor); },
                          [&] { EXPECT_EQ(tensor, nullptr); }),
              2u);
    EXPECT_EQ(refuse_each(
                  [&] {
                      return kvpages_cache_export_dlpack_unversioned(pages.get(), 1, 0,
                                                                     &unversioned);
                  },
                  [&] { EXPECT_EQ(unversioned, nullptr); }),
              2u);
    large = kLarge;
    EXPECT_GE(live, 1);
    pages.reset();
    EXPECT_GE(live, 1);
    kvpages_dlpack_destroy(tensor);
    EXPECT_GE(live, 1);
    kvpages_dlpack_destroy_unversioned(unversioned);
    EXPECT_EQ(live, 0);
}

// Blocks that are poisoned when they come.
TEST(AllocationFailure, CachesThatArePoisoned) {
    const Plan planned = plan_of_blocks(two_kinds(), 6000);
    const Memory memory = host_memory();
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    config.num_blocks = 2;
    config.flags = KVPAGES_CACHE_POISON;
    kvpages_cache* made = nullptr;
    EXPECT_GE(refuse_each([&] { return kvpages_cache_create(planned.get(), &config, &made, nullptr); },
                          [&] { EXPECT_EQ(made, nullptr); }),
              1u);
    const Cache cache(made);
    kvpages_cache_snapshot before = KVPAGES_CACHE_SNAPSHOT_INIT;
    must(kvpages_cache_get_snapshot(made, nullptr, &before));
    const auto expect_as_before = [&] {
        kvpages_cache_snapshot now = KVPAGES_CACHE_SNAPSHOT_INIT;
        must(kvpages_cache_get_snapshot(made, nullptr, &now));
        EXPECT_EQ(now.num_blocks, 2u);
        EXPECT_EQ(now.generation, before.generation);
        EXPECT_EQ(now.held_bytes, before.held_bytes);
    };
    EXPECT_GE(refuse_each([&] { return kvpages_cache_resize(made, 6000, nullptr, 0); },
                          expect_as_before),
              1u);
    kvpages_cache_snapshot now = KVPAGES_CACHE_SNAPSHOT_INIT;
    must(kvpages_cache_get_snapshot(made, nullptr, &now));
    EXPECT_EQ(now.generation, before.generation + 1);
}

// Who watches an engine asks for them when memory is short, too.
TEST(AllocationFailure, TextsOfSnapshots) {
    const Model layers = model();
    const Backend kernels = backend(packed_nhd);
    for (int layer = 0; layer < 1000; ++layer) {
        add(layers, "layers." + std::to_string(layer), full(16, 2, 8), kernels);
    }
    const Cache pages = cache(plan_of_blocks(layers, 2));
    std::string text(1 << 20, '\0');
    std::size_t length = 7;
    EXPECT_GE(refuse_each(
                  [&] {
                      return kvpages_cache_copy_snapshot(pages.get(), nullptr, &text[0],
                                                         text.size(), &length);
                  },
                  [&] { EXPECT_EQ(length, 0u); }),
              1u);
    EXPECT_GT(length, kLarge);

    const std::vector<kvpages_table_group> groups(1000, {16, 16, 4, 0, 0});
    kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
    config.groups = groups.data();
    config.num_groups = groups.size();
    config.max_requests = 1;
    config.max_tokens = 16;
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create(&config, &raw));
    const std::unique_ptr<kvpages_tables, Destroy<kvpages_tables, kvpages_tables_destroy>> tables(raw);
    EXPECT_GE(refuse_each(
                  [&] {
                      return kvpages_tables_copy_snapshot(raw, &text[0], text.size(), &length);
                  },
                  [&] { EXPECT_EQ(length, 0u); }),
              1u);
    EXPECT_GT(length, kLarge);
}

TEST(AllocationFailure, TextsOfDescriptors) {
    const Model layers = model();
    const Backend kernels = backend(packed_nhd);
    for (int layer = 0; layer < 200; ++layer) {
        add(layers, "layers." + std::to_string(layer), full(16, 2, 8), kernels);
    }
    const Descriptor descriptor = descriptor_of(descriptor_json(cache(plan_of_blocks(layers, 2))));
    std::string text(1 << 20, '\0');
    std::size_t length = 7;
    EXPECT_GE(refuse_each(
                  [&] {
                      return kvpages_descriptor_copy_json(descriptor.get(), &text[0], text.size(),
                                                          &length);
                  },
                  [&] { EXPECT_EQ(length, 0u); }),
              1u);
    EXPECT_GT(length, kLarge);
}

// What all of the tests above refused; last, since it says something of them.
TEST(AllocationFailure, ZPointsInAll) {
    std::printf("  %zu allocations refused in all\n", num_refused_in_all);
    EXPECT_GE(num_refused_in_all, 15u);
}
