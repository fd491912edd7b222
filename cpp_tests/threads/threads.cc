// What the header says of threads: many read one plan, one cache and one set of operations while one
// changes tables, others make and destroy handles of the same plan, and errors are each thread's own. Views
// are handed out and given back, and the log callback comes and goes meanwhile.
// scripts/test tsan runs it with a library that ThreadSanitizer watches.
#include "support/world.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

using namespace support;

namespace {

constexpr int kRounds = 300;
constexpr std::size_t kReaders = 3;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "threads: %s; %s\n", what, kvpages_last_error_message());
    std::abort();
}

#define MUST(condition) ((condition) ? void() : fail(#condition))

// What a thread asks of a plan and a cache that others ask too.
void read(const World& world, const std::string& explanation_text) {
    kvpages_worker_info info = KVPAGES_WORKER_INFO_INIT;
    MUST(kvpages_plan_get_worker(world.planned.get(), 0, &info) == KVPAGES_STATUS_OK);
    std::string text(explanation_text.size() + 1, '\0');
    std::size_t length = 0;
    MUST(kvpages_plan_copy_explanation(world.planned.get(), KVPAGES_TEXT_FORMAT_TEXT, &text[0],
                                       text.size(), &length) == KVPAGES_STATUS_OK);
    text.resize(length);
    MUST(text == explanation_text);
    const kvpages_cache* const cache = world.allocated.get();
    for (std::size_t layer = 0; layer < kvpages_cache_num_layers(cache); ++layer) {
        kvpages_tensor view{};
        kvpages_view_report report = KVPAGES_VIEW_REPORT_INIT;
        MUST(kvpages_cache_get_view(cache, layer, 0, &view) == KVPAGES_STATUS_OK);
        MUST(kvpages_cache_get_report(cache, layer, 0, &report) == KVPAGES_STATUS_OK);
        MUST(view.ndim > 0 && report.end_bytes > 0);
    }
    std::vector<char> described(1 << 16);
    MUST(kvpages_cache_copy_descriptor(cache, nullptr, described.data(), described.size(),
                                       &length) == KVPAGES_STATUS_OK);
    kvpages_tensor none{};
    MUST(kvpages_cache_get_view(cache, 99, 0, &none) == KVPAGES_STATUS_NOT_FOUND);
    MUST(std::string(kvpages_last_error_kind()) == "not_found");
}

// Numbers of a cache that others read too, and a tensor of it that this thread gives back.
void look(const kvpages_cache* cache) {
    kvpages_cache_snapshot now = KVPAGES_CACHE_SNAPSHOT_INIT;
    MUST(kvpages_cache_get_snapshot(cache, nullptr, &now) == KVPAGES_STATUS_OK);
    MUST(now.generation == 1 && now.num_blocks == kvpages_cache_num_blocks(cache));
    DLManagedTensorVersioned* tensor = nullptr;
    MUST(kvpages_cache_export_dlpack(cache, 0, 0, 0, &tensor) == KVPAGES_STATUS_OK);
    kvpages_dlpack_destroy(tensor);
}

// A log callback that is set, called by other threads, and taken away before what it uses goes.
void listen() {
    struct Heard {
        std::atomic<int> now{0};
    };
    const auto hear = [](void* user, std::uint32_t, const char* message) {
        auto* const heard = static_cast<Heard*>(user);
        ++heard->now;
        MUST(message[0] != '\0');
        --heard->now;
    };
    Heard heard;
    MUST(kvpages_set_log_callback(KVPAGES_LOG_LEVEL_DEBUG, hear, &heard) == KVPAGES_STATUS_OK);
    std::this_thread::yield();
    MUST(kvpages_set_log_callback(KVPAGES_LOG_LEVEL_OFF, nullptr, nullptr) == KVPAGES_STATUS_OK);
    MUST(heard.now == 0);
}

// A plan of the same layers, a cache and tables of it, of the thread's own.
void make(const World& world) {
    const Plan own = plan({{world.layers.get(), 100000}}, world.config);
    const Cache of_shared = cache(world.planned, world.memory);
    Cache of_own = cache(own, world.memory);
    MUST(kvpages_cache_num_layers(of_shared.get()) == kvpages_cache_num_layers(of_own.get()));
    DLManagedTensorVersioned* last = nullptr;
    MUST(kvpages_cache_export_dlpack(of_own.get(), 0, 0, 0, &last) == KVPAGES_STATUS_OK);
    of_own.reset();
    // The memory goes here.
    std::thread([last] { kvpages_dlpack_destroy(last); }).join();
}

// Steps of an engine; only this thread has the tables.
void step(kvpages_tables* tables) {
    const std::int32_t blocks[3]{1, 2, 3};
    const std::int32_t requests[1]{0}, query_start[2]{0, 4}, seq_lens[1]{20};
    const std::int64_t positions[4]{16, 17, 18, 19};
    kvpages_batch batch = KVPAGES_BATCH_INIT;
    batch.requests = requests;
    batch.num_requests = 1;
    batch.query_start = query_start;
    batch.seq_lens = seq_lens;
    batch.positions = positions;
    batch.num_positions = 4;
    kvpages_step prepared = KVPAGES_STEP_INIT;
    for (std::size_t group = 0; group < kvpages_tables_num_groups(tables); ++group) {
        MUST(kvpages_tables_overwrite(tables, 0, group, blocks, 3) == KVPAGES_STATUS_OK);
    }
    MUST(kvpages_tables_prepare(tables, &batch, &prepared) == KVPAGES_STATUS_OK);
    MUST(kvpages_tables_clear(tables, 0) == KVPAGES_STATUS_OK);
}

// Rows of the thread's own slots, through operations that all threads share.
void write(const kvpages_ops* ops, std::size_t layer, std::size_t thread) {
    std::vector<float> keys(64, static_cast<float>(thread)), values(64, 1.0f);
    const std::int64_t slots[1]{static_cast<std::int64_t>(16 * thread)};
    kvpages_kv_rows rows{};
    rows.layer = layer;
    rows.keys = keys.data();
    rows.values = values.data();
    kvpages_kv_write write = KVPAGES_KV_WRITE_INIT;
    write.layers = &rows;
    write.num_layers = 1;
    write.slots = slots;
    write.num_slots = 1;
    write.dtype = KVPAGES_DTYPE_F32;
    MUST(kvpages_ops_write_kv(ops, &write) == KVPAGES_STATUS_OK);
    std::vector<float> read_keys(64), read_values(64);
    kvpages_kv_rows_out out{};
    out.layer = layer;
    out.keys = read_keys.data();
    out.values = read_values.data();
    kvpages_kv_gather gather = KVPAGES_KV_GATHER_INIT;
    gather.layers = &out;
    gather.num_layers = 1;
    gather.slots = slots;
    gather.num_slots = 1;
    gather.dtype = KVPAGES_DTYPE_F32;
    MUST(kvpages_ops_gather_kv(ops, &gather) == KVPAGES_STATUS_OK);
    MUST(read_keys[0] == static_cast<float>(thread));
}

}  // namespace

int main() {
    const World world;
    const std::string text = explanation(world.planned, KVPAGES_TEXT_FORMAT_TEXT);
    // Whose explanation nobody has asked for: the threads do, at once.
    const World fresh;

    const Model rows = model();
    add(rows, "rows", full(16, 2, 8, KVPAGES_DTYPE_F32), backend(packed_nhd));
    const Cache pages = cache(plan_of_blocks(rows, kReaders + 2));
    kvpages_ops_config ops_config = KVPAGES_OPS_CONFIG_INIT;
    ops_config.max_concurrency = 1;
    kvpages_ops* raw_ops = nullptr;
    must(kvpages_ops_create(pages.get(), &ops_config, &raw_ops));
    const Ops ops(raw_ops);

    kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
    config.max_requests = 2;
    config.max_tokens = 16;
    kvpages_tables* tables = nullptr;
    must(kvpages_tables_create_for_plan(world.planned.get(), 0, &config, &tables));

    std::atomic<bool> go{false};
    std::vector<std::thread> threads;
    const auto run = [&](auto work) {
        threads.emplace_back([&go, work] {
            while (!go.load()) {
            }
            for (int round = 0; round < kRounds; ++round) {
                work();
            }
        });
    };
    for (std::size_t thread = 0; thread < kReaders; ++thread) {
        run([&world, &fresh, &text, &ops, thread] {
            read(world, text);
            read(fresh, text);
            look(world.allocated.get());
            write(ops.get(), 0, thread + 1);
        });
    }
    run([tables] { step(tables); });
    run([&world] { make(world); });
    run([] { listen(); });
    go.store(true);
    for (std::thread& thread : threads) {
        thread.join();
    }
    kvpages_tables_destroy(tables);
    std::printf("%zu threads, %d rounds each\n", threads.size(), kRounds);
    return 0;
}
