// Block tables in device memory where drivers, streams and sizes are at their worst.
#include "support/cuda.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using Ids = std::vector<std::int32_t>;
using Positions = std::vector<std::int64_t>;
using kvpages::Tables;
using support::Entered;

constexpr unsigned kBlocking = 0, kNonBlocking = 1;

class Stream {
public:
    explicit Stream(unsigned flags = kNonBlocking) {
        const Entered entered;
        EXPECT_EQ(cuStreamCreate(&stream_, flags), CUDA_SUCCESS);
    }
    ~Stream() {
        const Entered entered;
        EXPECT_EQ(cuStreamDestroy_v2(stream_), CUDA_SUCCESS);
    }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    CUstream get() const { return stream_; }

    void wait() const {
        const Entered entered;
        EXPECT_EQ(cuStreamSynchronize(stream_), CUDA_SUCCESS);
    }

    void capture() const {
        const Entered entered;
        EXPECT_EQ(cuStreamBeginCapture_v2(stream_, 0), CUDA_SUCCESS);
    }

    /// What the end of the capture returns.
    CUresult end_capture() const {
        const Entered entered;
        CUgraph graph = nullptr;
        const CUresult result = cuStreamEndCapture(stream_, &graph);
        if (graph != nullptr) {
            EXPECT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
        }
        return result;
    }

private:
    CUstream stream_ = nullptr;
};

template <typename T>
std::vector<T> read(const kvpages::Tensor& tensor) {
    const Entered entered;
    std::vector<T> values(static_cast<std::size_t>(tensor.num_elements()));
    if (values.empty()) return values;
    EXPECT_EQ(cuMemcpyDtoH_v2(values.data(), reinterpret_cast<CUdeviceptr>(tensor.data),
                              values.size() * sizeof(T)),
              CUDA_SUCCESS);
    return values;
}

template <typename T>
std::vector<T> read_host(const kvpages::Tensor& tensor) {
    const auto* const values = static_cast<const T*>(tensor.data);
    return std::vector<T>(values, values + tensor.num_elements());
}

kvpages_table_group group_of(std::uint64_t block_size, std::uint64_t kernel_block_size,
                             std::uint64_t row_blocks, std::uint32_t is_replicated = 0) {
    return {block_size, kernel_block_size, row_blocks, is_replicated, 0};
}

kvpages::TablesConfig config_of(std::uint64_t max_requests, std::uint64_t max_tokens) {
    kvpages::TablesConfig config;
    config.max_requests = max_requests;
    config.max_tokens = max_tokens;
    return config;
}

Tables make_on_device(const std::vector<kvpages_table_group>& groups,
                      kvpages::TablesConfig config) {
    config.device = {KVPAGES_DEVICE_KIND_CUDA, 0, nullptr};
    return Tables::make(groups, config);
}

/// What failed, or an empty text.
std::string kind_of(const std::function<void()>& call) {
    try {
        call();
        return {};
    } catch (const kvpages::Error& error) {
        return error.kind();
    }
}

/// The requests of a step.
struct Step {
    Ids requests, query_start{0}, seq_lens;
    Positions positions;

    void add(std::int32_t request, const Positions& tokens) {
        requests.push_back(request);
        positions.insert(positions.end(), tokens.begin(), tokens.end());
        query_start.push_back(static_cast<std::int32_t>(positions.size()));
        seq_lens.push_back(10000000);
    }
    kvpages::Batch batch(void* stream) const {
        return {requests, query_start, seq_lens, positions, stream};
    }
};

/// Each of `count` requests has a token at `position`.
Step decode(std::int32_t count, std::int64_t position) {
    Step step;
    for (std::int32_t i = 0; i < count; ++i) step.add(i, {position});
    return step;
}

/// Some groups of many: each read makes all memory accessible, and takes that away again.
void expect_equal(const Tables& host, const Tables& device) {
    ASSERT_EQ(host.num_groups(), device.num_groups());
    const std::size_t stride = 1 + host.num_groups() / 100;
    for (std::size_t group = 0; group < host.num_groups(); group += stride) {
        SCOPED_TRACE("group " + std::to_string(group));
        ASSERT_EQ(read<std::int32_t>(device.table(group)),
                  read_host<std::int32_t>(host.table(group)));
        ASSERT_EQ(read<std::int32_t>(device.input_table(group)),
                  read_host<std::int32_t>(host.input_table(group)));
        ASSERT_EQ(read<std::int64_t>(device.slots(group)),
                  read_host<std::int64_t>(host.slots(group)));
    }
}

class CudaTablesHostile : public ::testing::Test {
protected:
    void SetUp() override {
        NEEDS_STANDIN("fails when it is told to, lets work wait, and forgives what is refused");
        standin_reset();
        ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
        standin_set_protected(true);
        standin_set_deferred(true);
        CUcontext kept = nullptr;
        ASSERT_EQ(cuDevicePrimaryCtxRetain(&kept, 0), CUDA_SUCCESS);
    }

    void TearDown() override {
        if (!support::on_standin()) return;
        standin_fail_nothing();
        EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
        EXPECT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
        EXPECT_EQ(standin_num_violations(), 0u) << standin_describe_violations();
        standin_reset();
    }
};

class Random {
public:
    explicit Random(std::uint64_t seed) : random_(seed) {}

    std::size_t below(std::size_t end) { return random_() % end; }
    bool one_in(std::size_t count) { return below(count) == 0; }

    Ids blocks(std::size_t count) {
        Ids ids(count);
        for (std::int32_t& id : ids) id = static_cast<std::int32_t>(below(1000));
        return ids;
    }

private:
    std::mt19937_64 random_;
};

// --- failures ------------------------------------------------------------------------------------

/// Calls in any order on any stream, of which the driver fails many. Those are made until they
/// succeed.
class Failing {
public:
    Failing(std::uint64_t seed, std::vector<kvpages_table_group> groups,
            const kvpages::TablesConfig& config, std::size_t most_blocks)
        : random_(seed), groups_(std::move(groups)), config_(config), most_blocks_(most_blocks),
          host_(Tables::make(groups_, config_)), device_(make_on_device(groups_, config_)) {}

    void call() {
        stage(random_.below(4));
        switch (random_.below(8)) {
            case 0: both([](Tables& t, void* stream) { t.apply(stream); }); break;
            case 1: {
                const Step any = step();
                both([&](Tables& t, void* stream) {
                    t.gather(any.requests, any.requests.size(), stream);
                });
                break;
            }
            case 2: {
                const Step any = step();
                both([&](Tables& t, void* stream) {
                    t.map_slots(any.requests, any.query_start, any.positions, stream);
                });
                break;
            }
            case 3: both([](Tables& t, void* stream) { t.map_dummies(stream); }); break;
            case 4: both([](Tables& t, void* stream) { t.gather_dummies(0, stream); }); break;
            case 5:
                if (random_.one_in(3)) {
                    both([](Tables& t, void* stream) { t.reset(stream); });
                }
                break;
            default: {
                const Step any = step();
                both([&](Tables& t, void* stream) { t.prepare(any.batch(stream)); });
            }
        }
    }

    void compare() {
        standin_fail_nothing();
        for (const Stream& stream : streams_) stream.wait();
        expect_equal(host_, device_);
    }

    std::size_t num_failures() const { return num_failures_; }

private:
    void both(const std::function<void(Tables&, void*)>& call) {
        // Some functions on their own, so that others around them succeed.
        static const char* const functions[] = {nullptr,
                                                nullptr,
                                                "cuLaunchKernel",
                                                "cuMemcpyHtoDAsync_v2",
                                                "cuEventRecord",
                                                "cuEventSynchronize",
                                                "cuStreamWaitEvent",
                                                "cuStreamSynchronize"};
        for (std::size_t i = random_.below(4); i > 0; --i) {
            standin_fail(functions[random_.below(8)], 1 + random_.below(12), CUDA_ERROR_UNKNOWN);
        }
        bool has_failed = false;
        for (;;) {
            try {
                call(device_, any_stream());
                break;
            } catch (const kvpages::Error& error) {
                ASSERT_EQ(error.status(), KVPAGES_STATUS_DEVICE_UNAVAILABLE) << error.what();
                ++num_failures_;
                has_failed = true;
                stage(random_.below(2));
            }
        }
        // Nobody is told whether the call that mended a failure applied what was staged: the driver
        // may have refused the failed one before it began.
        if (has_failed) {
            standin_fail_nothing();
            device_.apply(any_stream());
            host_.apply();
            call(device_, any_stream());
        }
        call(host_, nullptr);
    }

    void* any_stream() { return streams_[random_.below(3)].get(); }

    void stage(std::size_t count) {
        while (count-- > 0) {
            const std::size_t row = random_.below(config_.max_requests);
            const std::size_t other = random_.below(config_.max_requests);
            const std::size_t group = random_.below(groups_.size());
            const Ids blocks = random_.blocks(random_.below(most_blocks_));
            const std::size_t what = random_.below(6);
            const auto write = [&](Tables& t) {
                switch (what) {
                    case 0: t.truncate(row, group, blocks.size()); break;
                    case 1: t.move(row, other); break;
                    case 2: t.swap(row, other); break;
                    case 3: t.clear(row); break;
                    case 4: t.overwrite(row, group, blocks); break;
                    default: t.append(row, group, blocks);
                }
            };
            ASSERT_EQ(kind_of([&] { write(device_); }), kind_of([&] { write(host_); }));
        }
    }

    Step step() {
        Step step;
        for (std::size_t i = random_.below(config_.max_requests + 1); i > 0; --i) {
            const std::size_t room = config_.max_tokens - step.positions.size();
            Positions tokens(random_.below(std::min<std::size_t>(room, 5) + 1));
            for (auto& position : tokens) position = static_cast<std::int64_t>(random_.below(200));
            step.add(static_cast<std::int32_t>(random_.below(config_.max_requests)) -
                         static_cast<std::int32_t>(random_.one_in(8)),
                     tokens);
        }
        return step;
    }

    Random random_;
    std::vector<kvpages_table_group> groups_;
    kvpages::TablesConfig config_;
    std::size_t most_blocks_;
    Stream streams_[3];
    Tables host_, device_;
    std::size_t num_failures_ = 0;
};

TEST_F(CudaTablesHostile, ManyFailuresInAnyOrderAreMended) {
    std::size_t num_failures = 0;
    for (std::uint64_t seed = 0; seed < 40; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        Failing failing(seed, {group_of(16, 16, 6), group_of(32, 8, 5), group_of(8, 8, 0)},
                        config_of(1 + seed % 6, 1 + seed % 17), 5);
        for (int call = 0; call < 60; ++call) {
            failing.call();
            if (call % 3 == 2) {
                ASSERT_NO_FATAL_FAILURE(failing.compare());
            }
            ASSERT_FALSE(HasFailure()) << "call " << call;
        }
        num_failures += failing.num_failures();
    }
    EXPECT_GT(num_failures, 300u);
}

TEST_F(CudaTablesHostile, FailuresAmidAChangeOfManyPagesAreMended) {
    std::size_t num_failures = 0;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        Failing failing(seed, {group_of(16, 16, 40000), group_of(16, 16, 3)}, config_of(4, 8),
                        40000);
        for (int call = 0; call < 10; ++call) {
            failing.call();
            ASSERT_NO_FATAL_FAILURE(failing.compare());
            ASSERT_FALSE(HasFailure()) << "call " << call;
        }
        num_failures += failing.num_failures();
    }
    EXPECT_GT(num_failures, 10u);
}

TEST_F(CudaTablesHostile, AnyCallAfterAFailureAppliesWhatIsStaged) {
    const std::vector<kvpages_table_group> groups{group_of(16, 16, 6)};
    Tables host = Tables::make(groups, config_of(4, 8));
    Tables device = make_on_device(groups, config_of(4, 8));
    const Stream stream;
    const std::function<void(Tables&)> calls[] = {
        [&](Tables& t) { t.gather(Ids{1, 0}, 2, stream.get()); },
        [&](Tables& t) { t.gather_dummies(1, stream.get()); },
        [&](Tables& t) { t.map_slots(Ids{1}, Ids{0, 2}, Positions{0, 17}, stream.get()); },
        [&](Tables& t) { t.map_dummies(stream.get()); },
    };
    std::int32_t id = 0;
    for (const auto& failing : calls) {
        for (const auto& next : calls) {
            id += 3;
            for (Tables* each : {&host, &device}) {
                each->append(0, 0, Ids{id});
                each->prepare(decode(3, 3).batch(stream.get()));
                each->overwrite(1, 0, Ids{id + 1, id + 2});
                each->clear(0);
            }
            ASSERT_TRUE(standin_fail("cuLaunchKernel", 1, CUDA_ERROR_UNKNOWN));
            ASSERT_EQ(kind_of([&] { failing(device); }), "driver_failed");
            next(device);
            host.apply();
            next(host);
            stream.wait();
            ASSERT_EQ(read<std::int32_t>(device.table(0)), read_host<std::int32_t>(host.table(0)));
            // What the failed call was to write is unknown until it is written again.
            calls[0](host);
            calls[0](device);
            calls[2](host);
            calls[2](device);
            stream.wait();
            ASSERT_NO_FATAL_FAILURE(expect_equal(host, device));
            const std::uint64_t launches = standin_num_calls("cuLaunchKernel");
            calls[0](device);
            EXPECT_EQ(standin_num_calls("cuLaunchKernel"), launches + 1) << "rows go once";
        }
    }
}

TEST_F(CudaTablesHostile, WorkThatCannotBeWaitedForKeepsItsPage) {
    const std::vector<kvpages_table_group> groups{group_of(16, 16, 6)};
    Tables host = Tables::make(groups, config_of(8, 16)), device =
        make_on_device(groups, config_of(8, 16));
    const Stream stream, other;
    for (Tables* each : {&host, &device}) {
        for (std::size_t row = 0; row < 8; ++row) each->append(row, 0, Ids{1, 2, 3});
    }
    // The patches are under way when the second launch fails, and nothing says when they are done.
    ASSERT_TRUE(standin_fail("cuLaunchKernel", 2, CUDA_ERROR_UNKNOWN));
    ASSERT_TRUE(standin_fail("cuStreamSynchronize", 1, CUDA_ERROR_UNKNOWN));
    ASSERT_TRUE(standin_fail("cuCtxSynchronize", 1, CUDA_ERROR_UNKNOWN));
    const Step step = decode(8, 3);
    EXPECT_EQ(kind_of([&] { device.prepare(step.batch(stream.get())); }), "driver_failed");
    EXPECT_EQ(standin_num_failed(), 3u);
    // Another stream that can be waited for says nothing of the first.
    for (int i = 0; i < 2; ++i) {
        ASSERT_TRUE(standin_fail("cuCtxSynchronize", 1, CUDA_ERROR_UNKNOWN));
        ASSERT_TRUE(standin_fail("cuCtxSynchronize", 2, CUDA_ERROR_UNKNOWN));
        EXPECT_EQ(kind_of([&] { device.prepare(step.batch(other.get())); }), "driver_failed");
        EXPECT_EQ(standin_num_failed(), 5u + 2u * static_cast<unsigned>(i));
    }
    for (Tables* each : {&host, &device}) {
        // Were the page written now, the patches would be made of these.
        for (std::size_t row = 0; row < 8; ++row) each->overwrite(row, 0, Ids(6, 907));
        each->prepare(step.batch(stream.get()));
    }
    stream.wait();
    expect_equal(host, device);
}

// --- captures ------------------------------------------------------------------------------------

/// Tables are made, used often enough to wait for a page, changed by much, reset and destroyed.
void live(void* stream) {
    Tables tables = make_on_device({group_of(16, 16, 30000)}, config_of(8, 16));
    for (std::int64_t step = 0; step < 20; ++step) {
        tables.append(1, 0, Ids{7});
        tables.prepare(decode(8, step).batch(stream));
    }
    tables.append(2, 0, Ids(30000, 5));
    tables.apply(stream);
    tables.reset(stream);
    tables.prepare(decode(8, 3).batch(stream));
}

TEST_F(CudaTablesHostile, LiveBesideACaptureWithoutSpoilingIt) {
    const Stream captured, own;
    captured.capture();
    EXPECT_EQ(kind_of([&] { live(own.get()); }), "");
    std::thread([&] { EXPECT_EQ(kind_of([&] { live(own.get()); }), ""); }).join();
    EXPECT_EQ(captured.end_capture(), CUDA_SUCCESS);
    own.wait();
}

TEST_F(CudaTablesHostile, AFailureBesideACaptureDoesNotSpoilIt) {
    const Stream captured, own;
    Tables tables = make_on_device({group_of(16, 16, 6)}, config_of(8, 16));
    captured.capture();
    for (const char* function : {"cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuEventRecord"}) {
        ASSERT_TRUE(standin_fail(function, 1, CUDA_ERROR_UNKNOWN));
        EXPECT_EQ(kind_of([&] { tables.prepare(decode(8, 1).batch(own.get())); }),
                  "driver_failed");
        tables.prepare(decode(8, 1).batch(own.get()));
    }
    EXPECT_EQ(captured.end_capture(), CUDA_SUCCESS);
    own.wait();
}

TEST_F(CudaTablesHostile, TheDefaultStreamIsRefusedWhileAStreamThatItWaitsForIsCaptured) {
    const std::vector<kvpages_table_group> groups{group_of(16, 16, 6)};
    Tables host = Tables::make(groups, config_of(8, 16)), device =
        make_on_device(groups, config_of(8, 16));
    host.append(1, 0, Ids{4});
    device.append(1, 0, Ids{4});
    const Stream captured(kBlocking);
    captured.capture();
    const Step step = decode(8, 1);
    EXPECT_EQ(kind_of([&] { device.prepare(step.batch(nullptr)); }), "stream_is_capturing");
    EXPECT_EQ(kind_of([&] { device.apply(nullptr); }), "stream_is_capturing");
    EXPECT_EQ(kind_of([&] { device.reset(nullptr); }), "stream_is_capturing");
    EXPECT_EQ(captured.end_capture(), CUDA_SUCCESS);
    host.prepare(step.batch(nullptr));
    device.prepare(step.batch(nullptr));
    expect_equal(host, device);
}

// --- streams -------------------------------------------------------------------------------------

TEST_F(CudaTablesHostile, StreamsMayGoBeforeTheTablesAre) {
    const std::vector<kvpages_table_group> groups{group_of(16, 16, 6)};
    Tables host = Tables::make(groups, config_of(8, 16)), device =
        make_on_device(groups, config_of(8, 16));
    for (std::int32_t round = 0; round < 20; ++round) {
        const Stream passing;
        for (Tables* each : {&host, &device}) {
            each->overwrite(1, 0, Ids{round});
            each->prepare(decode(8, round % 5).batch(passing.get()));
        }
    }
    const Stream last;
    host.gather(Ids{1}, 1);
    device.gather(Ids{1}, 1, last.get());
    last.wait();
    expect_equal(host, device);
    const Stream passing;
    device.prepare(decode(8, 2).batch(passing.get()));
}

TEST_F(CudaTablesHostile, ThePinnedMemoryOutlivesWorkOfAllStreams) {
    auto streams = std::make_unique<Stream[]>(3);
    {
        Tables tables = make_on_device({group_of(16, 16, 6)}, config_of(8, 16));
        for (std::size_t call = 0; call < 7; ++call) {
            tables.overwrite(1, 0, Ids{3});
            tables.prepare(decode(8, 2).batch(streams[call % 3].get()));
        }
        streams.reset();
        // Freeing memory may not wait.
        standin_fail("cuMemFree_v2", 1, CUDA_ERROR_UNKNOWN);
    }
    standin_fail_nothing();
}

TEST_F(CudaTablesHostile, AStreamOfAnotherContextIsRefusedAndDoesNoHarm) {
    CUcontext context = nullptr;
    ASSERT_EQ(cuCtxCreate_v2(&context, 0, 0), CUDA_SUCCESS);
    CUstream foreign = nullptr;
    ASSERT_EQ(cuStreamCreate(&foreign, 1), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_SUCCESS);
    const std::vector<kvpages_table_group> groups{group_of(16, 16, 6)};
    Tables host = Tables::make(groups, config_of(8, 16)), device =
        make_on_device(groups, config_of(8, 16));
    const Stream own;
    for (std::int32_t round = 0; round < 3; ++round) {
        for (Tables* each : {&host, &device}) each->overwrite(1, 0, Ids{round});
        EXPECT_EQ(kind_of([&] { device.prepare(decode(8, 1).batch(foreign)); }), "driver_failed");
        EXPECT_EQ(kind_of([&] { device.reset(foreign); }), "driver_failed");
        for (Tables* each : {&host, &device}) each->prepare(decode(8, 1).batch(own.get()));
        own.wait();
        expect_equal(host, device);
    }
    ASSERT_EQ(cuStreamDestroy_v2(foreign), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxDestroy_v2(context), CUDA_SUCCESS);
}

// --- sizes ---------------------------------------------------------------------------------------

/// A few steps of tables of any size, compared with those of the host.
void step_through(const std::vector<kvpages_table_group>& groups,
                  const kvpages::TablesConfig& config) {
    Tables host = Tables::make(groups, config), device = make_on_device(groups, config);
    const Stream stream;
    ASSERT_NO_FATAL_FAILURE(expect_equal(host, device)) << "fresh";
    const auto requests =
        static_cast<std::int32_t>(std::min<std::uint64_t>(config.max_requests, 4));
    for (std::int32_t round = 0; round < 3; ++round) {
        const std::uint64_t tokens = round == 1 ? config.max_tokens / 2 : config.max_tokens;
        Step step;
        step.add(requests - 1, Positions(tokens, 1));
        for (Tables* each : {&host, &device}) {
            void* const where = each == &device ? stream.get() : nullptr;
            for (std::size_t group = 0; group < groups.size(); ++group) {
                const auto id = static_cast<std::int32_t>(group % 900);
                const std::size_t full = groups[group].row_blocks;
                each->overwrite(static_cast<std::size_t>(requests) - 1, group, Ids(full, id));
            }
            each->prepare(step.batch(where));
            each->gather_dummies(1, where);
            each->gather(Ids{requests - 1}, 1, where);
            each->map_dummies(where);
            each->map_slots(step.requests, step.query_start, step.positions, where);
        }
        stream.wait();
        ASSERT_NO_FATAL_FAILURE(expect_equal(host, device));
    }
    device.reset(stream.get());
    host.reset();
    stream.wait();
    ASSERT_NO_FATAL_FAILURE(expect_equal(host, device));
}

TEST_F(CudaTablesHostile, AreAsSmallAsTheyCanBe) {
    step_through({}, config_of(1, 1));
    step_through({}, config_of(4, 3));
    step_through({group_of(16, 16, 0)}, config_of(1, 1));
    step_through({group_of(1, 1, 1)}, config_of(1, 1));
    step_through({group_of(16, 16, 0), group_of(16, 8, 1), group_of(16, 16, 0)}, config_of(2, 2));
}

TEST_F(CudaTablesHostile, MayHaveMoreGroupsThanAllPagesHold) {
    // What the device knows of a group is 104 bytes; a page of these has 181 KB.
    step_through(std::vector<kvpages_table_group>(14400, group_of(16, 16, 1)), config_of(1, 1));
}

TEST_F(CudaTablesHostile, OddSizesAreAlignedOnAPage) {
    for (std::uint64_t size = 1; size < 12; ++size) {
        SCOPED_TRACE(size);
        step_through({group_of(8, 8, 3 * size - 1), group_of(4, 2, size), group_of(2, 2, 1)},
                     config_of(12 - size, size));
    }
}

TEST_F(CudaTablesHostile, APageThatIsFullOfChangesHasRoomForABatch) {
    standin_set_protected(false);  // which takes long for this much memory
    // Changes of one row, of 24 bytes and 4 for each entry, take a page's 64 KiB to the last byte.
    constexpr std::size_t kRow = ((64u << 10) - 24) / 4;
    for (const std::uint64_t max_tokens : {1u, 121u}) {
        for (const std::size_t count : {kRow - 1, kRow, kRow + 1, kRow + 2}) {
            SCOPED_TRACE(std::to_string(max_tokens) + " tokens, " + std::to_string(count));
            const std::vector<kvpages_table_group> groups{group_of(16, 16, count)};
            const kvpages::TablesConfig config = config_of(120, max_tokens);
            Tables host = Tables::make(groups, config), device = make_on_device(groups, config);
            const Stream stream;
            Step step;
            for (std::int32_t i = 0; i < 120; ++i) {
                step.add(i, Positions(max_tokens == 1 ? i == 0 : 1, 5));
            }
            for (Tables* each : {&host, &device}) {
                each->append(3, 0, Ids(count, 9));
                each->prepare(step.batch(stream.get()));
                each->overwrite(3, 0, Ids(count, 8));
            }
            // Only a call that mends packs changes and the tokens of a batch as well.
            ASSERT_TRUE(standin_fail("cuLaunchKernel", 1, CUDA_ERROR_UNKNOWN));
            EXPECT_EQ(kind_of([&] { device.gather_dummies(1, stream.get()); }), "driver_failed");
            host.gather_dummies(1);
            host.apply();
            for (Tables* each : {&host, &device}) {
                each->map_slots(step.requests, step.query_start, step.positions, stream.get());
                each->gather_dummies(1, stream.get());
            }
            stream.wait();
            ASSERT_NO_FATAL_FAILURE(expect_equal(host, device));
        }
    }
}

TEST_F(CudaTablesHostile, PositionsMayBePaddedPastAllTokens) {
    const std::vector<kvpages_table_group> groups{group_of(16, 16, 6)};
    Tables host = Tables::make(groups, config_of(4, 5)), device =
        make_on_device(groups, config_of(4, 5));
    const Stream stream;
    for (const std::size_t count : {5u, 6u, 31u, 32u, 33u, 5000u}) {
        Step step;
        step.add(1, {1, 2, 3});
        for (std::size_t i = step.positions.size(); i < count; ++i) step.positions.push_back(77);
        kvpages_step prepared{};
        for (Tables* each : {&host, &device}) {
            each->overwrite(1, 0, Ids{4});
            prepared = each->prepare(step.batch(stream.get()));
        }
        stream.wait();
        const Entered entered;
        Positions positions(5);
        ASSERT_EQ(cuMemcpyDtoH_v2(positions.data(),
                                  reinterpret_cast<CUdeviceptr>(prepared.positions), 5 * 8),
                  CUDA_SUCCESS);
        EXPECT_EQ(positions, (Positions{1, 2, 3, 77, 77}));
        expect_equal(host, device);
    }
}

// --- threads -------------------------------------------------------------------------------------

TEST_F(CudaTablesHostile, SeveralInOneContextAreUsedByAThreadEach) {
    const auto run = [] {
        const Stream stream;
        const std::vector<kvpages_table_group> groups{group_of(16, 16, 6), group_of(32, 8, 5)};
        for (int life = 0; life < 5; ++life) {
            Tables host = Tables::make(groups, config_of(8, 16));
            Tables device = make_on_device(groups, config_of(8, 16));
            for (std::int32_t round = 0; round < 40; ++round) {
                for (Tables* each : {&host, &device}) {
                    each->overwrite(static_cast<std::size_t>(round) % 8, 1, Ids{round, 5});
                    each->prepare(decode(8, round % 40).batch(stream.get()));
                }
            }
            stream.wait();
            expect_equal(host, device);
        }
    };
    standin_set_protected(false);
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back(run);
    for (std::thread& thread : threads) thread.join();
}

}  // namespace
