// Runs one path of a step a fixed number of times, for callgrind to count its instructions: unlike
// times, they are the same on a busy machine. `scripts/test counts` runs this and compares them
// with counts.txt. Without arguments it lists the names; given one, it prints how often the path
// ran.

#include <cstdio>
#include <cstring>
#include <functional>

#include "metadata.h"
#include "must.h"
#include "ops.h"
#include "tables.h"
#include "views.h"

/// callgrind collects in here and nowhere else, by this name. A std::function, so that the name is
/// no template's.
extern "C" __attribute__((noinline)) void kvpages_counted(const std::function<void()>& path,
                                                          int times) {
    for (int i = 0; i < times; ++i) path();
}

namespace {

/// Once before that, for what only the first call pays: memory touched, buffers grown.
void count(int times, const std::function<void()>& path) {
    path();
    kvpages_counted(path, times);
    std::printf("%d\n", times);
}

/// The compiler must take it that `value` is read.
template <typename T>
void keep(const T& value) {
    asm volatile("" : : "g"(&value) : "memory");
}

void append256() {
    kvpages::Tables of = tables();
    const Writes one(1);
    const kvpages_row_writes writes = one.get();
    count(32, [&] {
        must(kvpages_tables_write(of.get(), &writes));
        must(kvpages_tables_apply(of.get(), nullptr));
    });
}

void gather256() {
    kvpages::Tables of = tables();
    const Writes many(64);
    of.write(many.get());
    of.apply();
    count(32, [&] {
        must(kvpages_tables_gather(of.get(), many.requests.data(), kRequests, kRequests, nullptr));
    });
}

void slots8192() {
    constexpr std::size_t kBatchRequests = 32;
    kvpages::Tables of = tables();
    const Writes many(1024);
    of.write(many.get());
    of.apply();
    const Batch batch(kBatchRequests);
    count(8, [&] {
        must(kvpages_tables_map_slots(of.get(), many.requests.data(), kBatchRequests,
                                      batch.query_start.data(), batch.positions.data(),
                                      batch.positions.size(), nullptr));
    });
}

void prepare256() {
    kvpages::Tables of = tables();
    const Writes many(64);
    of.write(many.get());
    const Decode decode;
    count(32, [&] { keep(of.prepare(decode.batch())); });
}

void metadata256() {
    MetadataStep step;
    count(32, [&] {
        step.build();
        for (std::size_t layer = 0; layer < kNumLayers; ++layer) keep(step.layer(layer));
    });
}

void zero() {
    World world(kvpages::Preset::flash_attention_nhd);
    count(1, [&] { world.ops().zero_blocks(span(world.ids())); });
}

void copy() {
    World world(kvpages::Preset::flash_attention_nhd);
    count(1, [&] { world.ops().copy_blocks(span(world.copies())); });
}

void write() {
    World world(kvpages::Preset::flash_attention_nhd);
    const std::vector<kvpages_kv_rows> rows = world.rows();
    count(1, [&] { world.ops().write(span(rows), span(world.slots()), kvpages::Dtype::f16); });
}

void gather() {
    World world(kvpages::Preset::flash_attention_nhd);
    const std::vector<kvpages_kv_rows_out> room = world.room();
    count(1, [&] { world.ops().gather(span(room), span(world.slots()), kvpages::Dtype::f16); });
}

void view_query() {
    const Cache64 cache;
    std::size_t layer = 0;
    count(640, [&] {
        kvpages_tensor tensor;
        must(kvpages_cache_get_view(cache.get(), layer, 0, &tensor));
        keep(tensor);
        layer = (layer + 1) % 64;
    });
}

void views64() {
    const kvpages::Model model = state_hybrid64();
    const Parts64 parts;
    FreeMemory free_memory;
    const kvpages::Memory memory = free_memory.memory();
    count(4, [&] {
        kvpages_plan* plan = create_plan_from(model, parts);
        kvpages_cache_destroy(create_cache(plan, memory));
        kvpages_plan_destroy(plan);
    });
}

struct Path {
    const char* name;
    void (*run)();
};

constexpr Path kPaths[] = {
    {"step/append256", append256},
    {"step/gather256", gather256},
    {"step/prepare256", prepare256},
    {"step/slots8192", slots8192},
    {"step/metadata256", metadata256},
    {"ops/zero", zero},
    {"ops/copy", copy},
    {"ops/write", write},
    {"ops/gather", gather},
    {"view_query", view_query},
    {"views64", views64},
};

}  // namespace

int main(int argc, char** argv) {
    for (const Path& path : kPaths) {
        if (argc < 2) {
            std::printf("%s\n", path.name);
        } else if (std::strcmp(argv[1], path.name) == 0) {
            path.run();
            return 0;
        }
    }
    if (argc < 2) return 0;
    std::fprintf(stderr, "counts: no path %s\n", argv[1]);
    return 1;
}
