// The log callback: what is said, to whom, and that nothing else happens.
#include "support/api.h"
#include "support/failure.h"
#include "support/world.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace support;
using kvpages::LogLevel;

namespace {

/// Keeps all messages.
class Recorder : public kvpages::Logger {
public:
    explicit Recorder(LogLevel max_level) { kvpages::set_logger(this, max_level); }
    ~Recorder() override { kvpages::set_logger(nullptr); }

    void log(LogLevel level, const char* message) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        messages_.emplace_back(level, message);
    }

    std::vector<std::pair<LogLevel, std::string>> take() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return std::exchange(messages_, {});
    }

    /// The messages of a level that hold all words.
    static std::size_t count(const std::vector<std::pair<LogLevel, std::string>>& messages,
                             LogLevel level, const std::vector<std::string>& words) {
        std::size_t count = 0;
        for (const auto& [of_level, message] : messages) {
            bool has_all = of_level == level;
            for (const std::string& word : words) {
                has_all = has_all && message.find(word) != std::string::npos;
            }
            count += has_all ? 1 : 0;
        }
        return count;
    }

private:
    std::mutex mutex_;
    std::vector<std::pair<LogLevel, std::string>> messages_;
};

std::string all_of(const std::vector<std::pair<LogLevel, std::string>>& messages) {
    std::string text;
    for (const auto& [level, message] : messages) {
        text += std::to_string(static_cast<std::uint32_t>(level)) + " " + message + "\n";
    }
    return text;
}

Cache growable(const Plan& plan, const Memory& memory, std::uint64_t num_blocks,
               std::uint32_t flags = 0) {
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    config.num_blocks = num_blocks;
    config.flags = flags;
    kvpages_cache* raw = nullptr;
    must(kvpages_cache_create(plan.get(), &config, &raw, nullptr));
    return Cache(raw);
}

using Tables = std::unique_ptr<kvpages_tables, Destroy<kvpages_tables, kvpages_tables_destroy>>;

Tables tables() {
    const kvpages_table_group group{16, 16, 4, 0, 0};
    kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
    config.groups = &group;
    config.num_groups = 1;
    config.max_requests = 2;
    config.max_tokens = 16;
    kvpages_tables* raw = nullptr;
    must(kvpages_tables_create(&config, &raw));
    return Tables(raw);
}

}  // namespace

TEST(Log, SaysWhatWasDecidedAndTaken) {
    Recorder recorder(LogLevel::info);
    const World world;
    const auto of_world = recorder.take();
    EXPECT_EQ(Recorder::count(of_world, LogLevel::info,
                              {"plan of the policy reference for 1 worker", "48 blocks",
                               "2 groups", "requests of up to 64"}),
              1u)
        << all_of(of_world);
    EXPECT_EQ(Recorder::count(of_world, LogLevel::info,
                              {"cache of worker 0: 48 of 48 blocks of 2048 bytes",
                               "2 allocations of 98304 bytes"}),
              1u)
        << all_of(of_world);
    EXPECT_EQ(Recorder::count(of_world, LogLevel::info, {"poisoned"}), 0u);
    {
        const Cache c = growable(world.planned, world.memory, 4, KVPAGES_CACHE_POISON);
        must(kvpages_cache_resize(c.get(), 40, nullptr, 0));
        must(kvpages_cache_resize(c.get(), 40, nullptr, 0));  // nothing changes
        must(kvpages_cache_resize(c.get(), 8, nullptr, 0));
        EXPECT_EQ(kvpages_cache_resize(c.get(), 0, nullptr, 0), KVPAGES_STATUS_INVALID_ARGUMENT);
    }
    const auto of_cache = recorder.take();
    EXPECT_EQ(Recorder::count(of_cache, LogLevel::info,
                              {"cache of worker 0: 4 of 48 blocks", "are poisoned"}),
              1u);
    EXPECT_EQ(Recorder::count(of_cache, LogLevel::info, {"grew from 4 to 40 blocks"}), 1u);
    EXPECT_EQ(Recorder::count(of_cache, LogLevel::info, {"shrank from 40 to 8 blocks"}), 1u);
    EXPECT_EQ(of_cache.size(), 3u) << all_of(of_cache);
    const Tables t = tables();
    const auto of_tables = recorder.take();
    EXPECT_EQ(Recorder::count(of_tables, LogLevel::info,
                              {"tables of 1 groups, 2 requests and 16 tokens"}),
              1u)
        << all_of(of_tables);
}

TEST(Log, LevelsAreThoseAskedFor) {
    const std::uint64_t step = 1039680;
    BackendOptions options;
    options.layout = packed_nhd;
    options.index_bits = 32;
    const Model layers = model();
    add(layers, "layers.0", page_of(step), backend(options));
    kvpages_plan_config config = plan_config(64);
    config.policy = KVPAGES_POLICY_COMPACT;
    const auto say = [&](LogLevel level) {
        Recorder recorder(level);
        plan({{layers.get(), static_cast<std::int64_t>(3000 * step)}}, config);
        return recorder.take();
    };
    EXPECT_TRUE(say(LogLevel::off).empty());
    const auto warnings = say(LogLevel::warn);
    ASSERT_EQ(warnings.size(), 1u) << all_of(warnings);
    EXPECT_EQ(Recorder::count(warnings, LogLevel::warn,
                              {"worker 0", "layers.0", "reaches 2065 blocks", "memory for 3000"}),
              1u)
        << all_of(warnings);
    const auto infos = say(LogLevel::info);
    EXPECT_EQ(Recorder::count(infos, LogLevel::warn, {}), 1u);
    EXPECT_EQ(Recorder::count(infos, LogLevel::info, {"plan of the policy compact"}), 1u);
    EXPECT_EQ(Recorder::count(infos, LogLevel::debug, {}), 0u);
    const auto details = say(LogLevel::debug);
    EXPECT_EQ(Recorder::count(details, LogLevel::debug, {"capacity", "wasted"}), 1u)
        << all_of(details);
    // One kind of layers is a plan in which nothing can be better than the reference's.
    const Model same = model();
    add(same, "layers.0", full(16, 2, 8), backend(packed_nhd));
    Recorder recorder(LogLevel::info);
    plan({{same.get(), 100000}}, config);
    const auto taken = recorder.take();
    EXPECT_EQ(Recorder::count(taken, LogLevel::info,
                              {"compact took the groups and pages of the policy reference"}),
              1u)
        << all_of(taken);
}

TEST(Log, NothingIsSaidOnceItIsOff) {
    auto recorder = std::make_unique<Recorder>(LogLevel::debug);
    kvpages::set_logger(nullptr, LogLevel::debug);
    const World world;
    EXPECT_TRUE(recorder->take().empty());
    kvpages::set_logger(recorder.get(), LogLevel::off);
    const World other;
    EXPECT_TRUE(recorder->take().empty());
    kvpages::set_logger(recorder.get(), LogLevel::info);
    const World third;
    EXPECT_FALSE(recorder->take().empty());
    recorder.reset();
    const World fourth;  // a use after free, were it still set
}

TEST(Log, StepsSayNothing) {
    const World world;
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_concurrency = 1;
    kvpages_ops* raw = nullptr;
    must(kvpages_ops_create(world.allocated.get(), &config, &raw));
    const Ops ops(raw);
    const Tables t = tables();
    Recorder recorder(LogLevel::debug);
    const std::int32_t ids[]{1, 2}, requests[]{0}, query_start[]{0, 2}, seq_lens[]{2};
    const std::int64_t positions[]{0, 1};
    must(kvpages_ops_zero_blocks(ops.get(), ids, 2, nullptr, nullptr));
    must(kvpages_ops_poison_blocks(ops.get(), ids, 2, nullptr, nullptr));
    must(kvpages_tables_append(t.get(), 0, 0, ids, 2));
    kvpages_batch batch = KVPAGES_BATCH_INIT;
    batch.requests = requests;
    batch.num_requests = 1;
    batch.query_start = query_start;
    batch.seq_lens = seq_lens;
    batch.positions = positions;
    batch.num_positions = 2;
    kvpages_step step = KVPAGES_STEP_INIT;
    must(kvpages_tables_prepare(t.get(), &batch, &step));
    must(kvpages_tables_reset(t.get(), nullptr));
    view(world.allocated, 0);
    kvpages_cache_snapshot snapshot = KVPAGES_CACHE_SNAPSHOT_INIT;
    must(kvpages_cache_get_snapshot(world.allocated.get(), nullptr, &snapshot));
    const auto said = recorder.take();
    EXPECT_TRUE(said.empty()) << all_of(said);
}

// A callback may call the library: what that says is dropped, and it cannot change the callback.
TEST(Log, ACallbackMayCallTheLibrary) {
    class Caller : public kvpages::Logger {
    public:
        void log(LogLevel, const char*) override {
            ++count;
            const World inner;
            status = kvpages_set_log_callback(KVPAGES_LOG_LEVEL_INFO, nullptr, nullptr);
            kind = kvpages_last_error_kind();
        }
        int count = 0;
        std::int32_t status = 0;
        std::string kind;
    };
    const Memory memory = host_memory();
    Caller caller;
    kvpages::set_logger(&caller);
    const Tables t = tables();
    EXPECT_EQ(caller.count, 1);
    EXPECT_EQ(caller.status, KVPAGES_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(caller.kind, "log_callback_is_running");
    const Tables other = tables();
    EXPECT_EQ(caller.count, 2) << "it is still set";
    kvpages::set_logger(nullptr);
}

TEST(Log, WhatALoggerThrowsIsDropped) {
    class Thrower : public kvpages::Logger {
    public:
        void log(LogLevel, const char*) override {
            ++count;
            throw std::runtime_error("from a logger");
        }
        int count = 0;
    };
    const Memory memory = host_memory();
    Thrower thrower;
    kvpages::set_logger(&thrower);
    const World world;
    kvpages::set_logger(nullptr);
    world.expect_unchanged();
    EXPECT_EQ(thrower.count, 2);
}

TEST(Log, HostileArguments) {
    const Memory memory = host_memory();
    Recorder recorder(LogLevel::info);
    for (const std::uint32_t level : {4u, 100u, 0xffffffffu}) {
        EXPECT_TRUE(fails(kvpages_set_log_callback(level, nullptr, nullptr),
                          KVPAGES_STATUS_INVALID_ARGUMENT, "unknown_value",
                          {"max_level", std::to_string(level)}));
    }
    const Tables t = tables();
    EXPECT_EQ(recorder.take().size(), 1u) << "what was set stays";
}

namespace {

/// Ends the test when it is called after it was taken away.
class Fleeting : public kvpages::Logger {
public:
    Fleeting(std::atomic<std::uint64_t>& count, std::atomic<std::uint64_t>& stray)
        : count_(count), stray_(stray) {}
    ~Fleeting() override { is_alive_ = false; }

    void log(LogLevel, const char* message) override {
        if (!is_alive_ || message == nullptr || *message == '\0') ++stray_;
        ++running_;
        std::this_thread::yield();
        ++count_;
        --running_;
    }
    int running() const { return running_; }

private:
    std::atomic<std::uint64_t>& count_;
    std::atomic<std::uint64_t>& stray_;
    std::atomic<bool> is_alive_{true};
    std::atomic<int> running_{0};
};

}  // namespace

TEST(Log, LoggersComeAndGoWhileThreadsSpeak) {
    std::atomic<std::uint64_t> count{0}, stray{0};
    std::atomic<bool> is_over{false};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&is_over] {
            while (!is_over) {
                tables();
            }
        });
    }
    std::uint64_t num_running = 0;
    for (int round = 0; round < 300 || (count < 100 && round < 100000); ++round) {
        auto logger = std::make_unique<Fleeting>(count, stray);
        kvpages::set_logger(logger.get(), round % 3 == 0 ? LogLevel::debug : LogLevel::info);
        std::this_thread::yield();
        kvpages::set_logger(nullptr);
        num_running += static_cast<std::uint64_t>(logger->running());
    }
    is_over = true;
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(stray, 0u);
    EXPECT_EQ(num_running, 0u) << "none is running once another is set";
    EXPECT_GE(count, 100u);
}
