// Block tables in device memory: what they are in host memory.
#include "support/cuda.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace {

using support::CudaTest;
using support::Entered;
using support::num_calls;
using support::num_devices;
using support::on_standin;
using support::Stream;

using Ids = std::vector<std::int32_t>;
using Positions = std::vector<std::int64_t>;

template <typename T>
std::vector<T> read(const void* data, std::size_t count) {
    const Entered entered;
    std::vector<T> values(count);
    if (count == 0) return values;
    DRIVER(cuMemcpyDtoH_v2(values.data(), support::address(data), count * sizeof(T)));
    return values;
}

constexpr kvpages_device kCuda{KVPAGES_DEVICE_KIND_CUDA, 0, nullptr};

kvpages_table_group group_of(std::uint64_t block_size, std::uint64_t kernel_block_size,
                             std::uint64_t row_blocks, std::uint32_t is_replicated = 0) {
    return {block_size, kernel_block_size, row_blocks, is_replicated, 0};
}

/// The requests of a step, which are gone once a call returns.
struct Step {
    Ids requests, query_start{0}, seq_lens;
    Positions positions;

    void add(std::int32_t request, const Positions& tokens) {
        requests.push_back(request);
        positions.insert(positions.end(), tokens.begin(), tokens.end());
        query_start.push_back(static_cast<std::int32_t>(positions.size()));
        std::int64_t longest = -1;
        for (const std::int64_t position : tokens) longest = std::max(longest, position);
        seq_lens.push_back(static_cast<std::int32_t>(
            std::max<std::int64_t>(longest + 1, static_cast<std::int64_t>(tokens.size()))));
    }

    kvpages::Batch batch(void* stream = nullptr) const {
        return {requests, query_start, seq_lens, positions, stream};
    }
};

/// Tables in host memory and tables in device memory, of which the same is asked.
class Twins {
public:
    Twins(const std::vector<kvpages_table_group>& groups, kvpages::TablesConfig config)
        : host_(kvpages::Tables::make(groups, config)), device_(make_on_device(groups, config)) {}

    kvpages::Tables& device() { return device_; }
    std::size_t num_groups() const { return host_.num_groups(); }

    /// Calls both with what `call(tables)` does. Either both succeed, or both fail alike.
    template <typename Call>
    bool both(Call call) {
        const std::string host = kind_of([&] { call(host_); });
        const std::string device = kind_of([&] { call(device_); });
        EXPECT_EQ(device, host);
        return host.empty();
    }

    /// Prepares a step with arrays that are overwritten as soon as the call returns.
    bool prepare(const Step& step, void* stream) {
        const std::string host = kind_of([&] { host_.prepare(step.batch()); });
        Step passing = step;
        const std::string device = kind_of([&] { last_ = device_.prepare(passing.batch(stream)); });
        for (Ids* ids : {&passing.requests, &passing.query_start, &passing.seq_lens}) {
            std::fill(ids->begin(), ids->end(), -77);
        }
        std::fill(passing.positions.begin(), passing.positions.end(), -77);
        EXPECT_EQ(device, host);
        if (host.empty()) prepared_ = step;
        return host.empty();
    }

    /// Once all streams were waited for.
    void compare() const {
        for (std::size_t group = 0; group < num_groups(); ++group) {
            SCOPED_TRACE("group " + std::to_string(group));
            compare<std::int32_t>(host_.table(group), device_.table(group));
            compare<std::int32_t>(host_.input_table(group), device_.input_table(group));
            compare<std::int64_t>(host_.slots(group), device_.slots(group));
        }
        if (last_.query_start == nullptr) return;
        EXPECT_EQ(read<std::int32_t>(last_.query_start, prepared_.query_start.size()),
                  prepared_.query_start);
        EXPECT_EQ(read<std::int32_t>(last_.seq_lens, prepared_.seq_lens.size()),
                  prepared_.seq_lens);
        EXPECT_EQ(read<std::int64_t>(last_.positions, prepared_.positions.size()),
                  prepared_.positions);
    }

    const kvpages_step& last() const { return last_; }

    template <typename Call>
    static std::string kind_of(Call call) {
        try {
            call();
            return {};
        } catch (const kvpages::Error& error) {
            return error.kind();
        }
    }

private:
    static kvpages::Tables make_on_device(const std::vector<kvpages_table_group>& groups,
                                          kvpages::TablesConfig config) {
        config.device = kCuda;
        return kvpages::Tables::make(groups, config);
    }

    template <typename T>
    static void compare(const kvpages::Tensor& host, const kvpages::Tensor& device) {
        ASSERT_EQ(host.num_elements(), device.num_elements());
        const auto count = static_cast<std::size_t>(host.num_elements());
        const auto* values = static_cast<const T*>(host.data);
        ASSERT_EQ(read<T>(device.data, count), std::vector<T>(values, values + count));
    }

    kvpages::Tables host_, device_;
    kvpages_step last_{};
    Step prepared_;
};

class CudaTables : public CudaTest {
protected:
    void SetUp() override {
        ASSERT_NO_FATAL_FAILURE(CudaTest::SetUp());
        // Streams live no longer than the context, which tables alone would not keep for the next.
        CUcontext kept = nullptr;
        ASSERT_EQ(cuDevicePrimaryCtxRetain(&kept, 0), CUDA_SUCCESS);
    }

    void TearDown() override {
        EXPECT_EQ(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
        CudaTest::TearDown();
    }

    static std::uint64_t num_waits() {
        return num_calls("cuStreamSynchronize") + num_calls("cuCtxSynchronize") +
               num_calls("cuEventSynchronize");
    }
};

class Random {
public:
    explicit Random(std::uint64_t seed) : random_(seed) {}

    /// `low` to `high`.
    std::int64_t any(std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(random_() %
                                               static_cast<std::uint64_t>(high - low + 1));
    }
    std::size_t below(std::size_t end) { return random_() % end; }

    Ids blocks(std::size_t count, std::int32_t num_blocks) {
        Ids ids(count);
        for (std::int32_t& id : ids) id = static_cast<std::int32_t>(any(0, num_blocks - 1));
        return ids;
    }

private:
    std::mt19937_64 random_;
};

constexpr std::int32_t kBlocks = 1000;

/// Any tables, and any calls on them.
class Fuzz {
public:
    explicit Fuzz(std::uint64_t seed) : random_(seed) {
        const std::size_t num_groups = 1 + random_.below(4);
        for (std::size_t group = 0; group < num_groups; ++group) {
            const std::uint64_t kernel_block = 4 * (1 + random_.below(3));
            groups_.push_back(group_of(kernel_block * (1 + random_.below(4)), kernel_block,
                                       random_.below(7), random_.below(3) == 0));
        }
        config_.max_requests = 1 + random_.below(7);
        config_.max_tokens = 1 + random_.below(40);
        config_.num_blocks = kBlocks;
        config_.context_parallel_size = 1 + random_.below(3);
        config_.context_parallel_rank = random_.below(config_.context_parallel_size);
        config_.context_parallel_interleave = std::size_t{1} << random_.below(3);
        config_.aligned_rows = random_.below(3) == 0;
        twins_ = std::make_unique<Twins>(groups_, config_);
    }

    void call() {
        Twins& twins = *twins_;
        void* const stream = streams_[random_.below(2)].get();
        const std::size_t row = request(), other = request(), group = random_.below(groups_.size());
        const Ids blocks = random_.blocks(random_.below(4), kBlocks + (random_.below(30) == 0));
        switch (random_.below(16)) {
            case 0:
            case 1:
            case 2:
                twins.both([&](kvpages::Tables& t) { t.append(row, group, blocks); });
                break;
            case 3:
                twins.both([&](kvpages::Tables& t) { t.overwrite(row, group, blocks); });
                break;
            case 4:
                twins.both([&](kvpages::Tables& t) {
                    t.truncate(row, group, blocks.size());
                });
                break;
            case 5:
                twins.both([&](kvpages::Tables& t) { t.move(row, other); });
                break;
            case 6:
                twins.both([&](kvpages::Tables& t) { t.swap(row, other); });
                break;
            case 7:
                twins.both([&](kvpages::Tables& t) { t.clear(row); });
                break;
            case 8:
                twins.both([&](kvpages::Tables& t) { t.apply(stream); });
                break;
            case 9: {
                const Step any = step();
                const std::size_t num_rows =
                    any.requests.size() + random_.below(config_.max_requests);
                twins.both([&](kvpages::Tables& t) { t.gather(any.requests, num_rows, stream); });
                break;
            }
            case 10: {
                const Step any = step();
                twins.both([&](kvpages::Tables& t) {
                    t.map_slots(any.requests, any.query_start, any.positions, stream);
                });
                break;
            }
            case 11:
                if (random_.below(2) == 0) {
                    twins.both([&](kvpages::Tables& t) { t.gather_dummies(1, stream); });
                } else {
                    twins.both([&](kvpages::Tables& t) { t.map_dummies(stream); });
                }
                break;
            case 12:
                if (random_.below(8) == 0) {
                    twins.both([&](kvpages::Tables& t) { t.reset(stream); });
                }
                break;
            default:
                twins.prepare(step(), stream);
        }
    }

    void compare() const {
        for (const Stream& stream : streams_) stream.wait();
        twins_->compare();
    }

private:
    std::size_t request() { return random_.below(config_.max_requests + (random_.below(50) == 0)); }

    Step step() {
        Step step;
        const std::size_t count = random_.below(config_.max_requests + 1);
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t room = config_.max_tokens - step.positions.size();
            Positions tokens(random_.below(std::min<std::size_t>(room, 9) + 1));
            for (std::int64_t& position : tokens) position = random_.any(-1, 150);
            step.add(static_cast<std::int32_t>(request()) - (random_.below(9) == 0), tokens);
        }
        return step;
    }

    Random random_;
    std::vector<kvpages_table_group> groups_;
    kvpages::TablesConfig config_;
    std::unique_ptr<Twins> twins_;
    Stream streams_[2];
};

TEST_F(CudaTables, AreWhatTheyAreInHostMemory) {
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
        SCOPED_TRACE("seed " + std::to_string(seed));
        Fuzz fuzz(seed);
        ASSERT_NO_FATAL_FAILURE(fuzz.compare()) << "fresh";
        for (int round = 0; round < 25; ++round) {
            for (std::uint64_t call = seed % 12; call < 12; ++call) fuzz.call();
            ASSERT_NO_FATAL_FAILURE(fuzz.compare());
            ASSERT_FALSE(HasFailure());
        }
    }
}

kvpages::TablesConfig config_of(std::uint64_t max_requests, std::uint64_t max_tokens) {
    kvpages::TablesConfig config;
    config.max_requests = max_requests;
    config.max_tokens = max_tokens;
    return config;
}

/// Three groups as of a hybrid model.
std::vector<kvpages_table_group> three_groups(std::uint64_t row_blocks) {
    return {group_of(16, 16, row_blocks), group_of(32, 16, row_blocks), group_of(64, 64, 1, 1)};
}

/// A step in which each of the first `count` requests has one token, behind `length`.
Step decode(std::size_t count, std::int64_t length) {
    Step step;
    for (std::size_t i = 0; i < count; ++i) step.add(static_cast<std::int32_t>(i), {length});
    return step;
}

TEST_F(CudaTables, ADecodeStepIsOneCopyAndTwoLaunches) {
    NEEDS_STANDIN("counts calls and lets work wait");
    Twins twins(three_groups(40), config_of(256, 256));
    Stream stream;
    const auto calls_of_step = [&](std::int64_t length) {
        const std::uint64_t waits = num_waits();
        const std::uint64_t copies = standin_num_calls("cuMemcpyHtoDAsync_v2");
        const std::uint64_t launches = standin_num_calls("cuLaunchKernel");
        const std::uint64_t taken = standin_num_calls("cuMemAlloc_v2") +
                                    standin_num_calls("cuMemHostAlloc");
        EXPECT_TRUE(twins.prepare(decode(256, length), stream.get()));
        EXPECT_EQ(num_waits(), waits);
        EXPECT_EQ(standin_num_calls("cuMemcpyHtoDAsync_v2"), copies + 1);
        EXPECT_EQ(standin_num_calls("cuMemAlloc_v2") + standin_num_calls("cuMemHostAlloc"), taken);
        return standin_num_calls("cuLaunchKernel") - launches;
    };
    for (std::size_t request = 0; request < 256; ++request) {
        const auto block = static_cast<std::int32_t>(request + 1);
        for (std::size_t group = 0; group < 3; ++group) {
            twins.both([&](kvpages::Tables& t) { t.append(request, group, Ids{block}); });
        }
    }
    EXPECT_EQ(calls_of_step(14), 2u);
    EXPECT_EQ(calls_of_step(15), 1u) << "no row has changed";
    for (std::size_t request = 0; request < 256; request += 16) {
        twins.both([&](kvpages::Tables& t) { t.append(request, 0, Ids{7}); });
    }
    EXPECT_EQ(calls_of_step(16), 2u);
    EXPECT_GT(standin_num_pending(), 0u) << "on the stream, and not done yet";
    stream.wait();
    ASSERT_NO_FATAL_FAILURE(twins.compare());
}

TEST_F(CudaTables, ChangesThatHaveNoRoomOnAPageGoBeforeIt) {
    constexpr std::size_t kRequests = 3000, kRow = 3000;
    Twins twins({group_of(16, 16, kRow), group_of(32, 16, 2)}, config_of(kRequests, kRequests));
    Stream stream;
    Random random(1);
    // More entries than eight pages hold, and more rows than one does.
    for (std::size_t request = 0; request < 60; ++request) {
        const Ids blocks = random.blocks(kRow - request, kBlocks);
        twins.both([&](kvpages::Tables& t) { t.append(request, 0, blocks); });
    }
    for (std::size_t request = 0; request < kRequests; ++request) {
        const Ids blocks = random.blocks(1 + request % 2, kBlocks);
        twins.both([&](kvpages::Tables& t) { t.append(request, 1, blocks); });
    }
    const std::uint64_t launches = num_calls("cuLaunchKernel");
    ASSERT_TRUE(twins.prepare(decode(kRequests, 20), stream.get()));
    if (on_standin()) {
        EXPECT_GE(num_calls("cuLaunchKernel") - launches, 12u);
    }
    stream.wait();
    ASSERT_NO_FATAL_FAILURE(twins.compare());
    // What is cut becomes null, that far.
    twins.both([&](kvpages::Tables& t) { t.truncate(1, 0, 3); });
    twins.both([&](kvpages::Tables& t) { t.move(2, 3); });
    twins.both([&](kvpages::Tables& t) { t.apply(stream.get()); });
    stream.wait();
    ASSERT_NO_FATAL_FAILURE(twins.compare());
}

TEST_F(CudaTables, WaitOnlyWhenTheDeviceIsEightCallsBehind) {
    NEEDS_STANDIN("counts calls and lets work wait");
    Twins twins(three_groups(40), config_of(4, 8));
    Stream stream;
    const std::uint64_t before = num_waits();
    for (std::int64_t step = 0; step < 30; ++step) {
        twins.both([&](kvpages::Tables& t) { t.append(1, 0, Ids{static_cast<int>(step)}); });
        ASSERT_TRUE(twins.prepare(decode(4, step), stream.get()));
        if (step == 7) {
            EXPECT_EQ(num_waits(), before);
        }
    }
    EXPECT_GT(num_waits(), before);
    EXPECT_GT(standin_num_pending(), 0u);
    stream.wait();
    ASSERT_NO_FATAL_FAILURE(twins.compare());
}

TEST_F(CudaTables, CallsTakeEffectOneAfterAnotherOnAnyStreams) {
    Twins twins(three_groups(40), config_of(4, 8));
    Stream first, second;
    twins.both([&](kvpages::Tables& t) { t.append(2, 0, Ids{5, 6}); });
    twins.both([&](kvpages::Tables& t) { t.apply(first.get()); });
    twins.both([&](kvpages::Tables& t) { t.gather(Ids{2}, 1, second.get()); });
    second.wait();
    ASSERT_NO_FATAL_FAILURE(twins.compare());
    first.wait();
}

TEST_F(CudaTables, ArraysOfAStepStayWhereTheyAre) {
    Twins twins(three_groups(40), config_of(4, 8));
    Stream stream;
    ASSERT_TRUE(twins.prepare(decode(4, 3), stream.get()));
    const kvpages_step one = twins.last();
    // Padded positions come along; kernels of a padded step read them.
    Step padded = decode(2, 4);
    padded.positions.resize(7, 11);
    ASSERT_TRUE(twins.prepare(padded, stream.get()));
    const kvpages_step other = twins.last();
    EXPECT_EQ(one.query_start, other.query_start);
    EXPECT_EQ(one.seq_lens, other.seq_lens);
    EXPECT_EQ(one.positions, other.positions);
    EXPECT_EQ(one.block_tables[1].data, other.block_tables[1].data);
    EXPECT_EQ(one.slot_mappings[1].data, other.slot_mappings[1].data);
    EXPECT_NE(other.query_start, other.query_start_host);
    EXPECT_NE(other.seq_lens, other.seq_lens_host_bound);
    // Other calls leave them as they are.
    twins.both([&](kvpages::Tables& t) { t.append(0, 0, Ids{5, 6}); });
    twins.both([&](kvpages::Tables& t) { t.apply(stream.get()); });
    twins.both([&](kvpages::Tables& t) { t.gather(Ids{3, 0}, 2, stream.get()); });
    twins.both([&](kvpages::Tables& t) {
        t.map_slots(Ids{0, 1}, Ids{0, 5, 6}, Positions{1, 2, 3, 4, 5, 6}, stream.get());
    });
    stream.wait();
    ASSERT_NO_FATAL_FAILURE(twins.compare());
}

TEST_F(CudaTables, AStreamThatIsCapturedIsRefused) {
    Twins twins(three_groups(40), config_of(4, 8));
    Stream stream;
    twins.both([&](kvpages::Tables& t) { t.append(2, 0, Ids{5, 6}); });
    {
        const Entered entered;
        ASSERT_EQ(cuStreamBeginCapture_v2(stream.get(), 0), CUDA_SUCCESS);
    }
    kvpages::Tables& tables = twins.device();
    const Step step = decode(4, 3);
    const std::uint64_t generation = tables.snapshot().generation;
    const auto refused = [](auto call) {
        EXPECT_EQ(Twins::kind_of(call), "stream_is_capturing");
    };
    refused([&] { tables.prepare(step.batch(stream.get())); });
    refused([&] { tables.apply(stream.get()); });
    refused([&] { tables.gather(step.requests, 4, stream.get()); });
    refused([&] { tables.gather_dummies(1, stream.get()); });
    refused([&] { tables.map_slots(step.requests, step.query_start, step.positions, stream.get()); });
    refused([&] { tables.map_dummies(stream.get()); });
    refused([&] { tables.reset(stream.get()); });
    EXPECT_EQ(tables.snapshot().generation, generation);
    CUgraph graph = nullptr;
    {
        const Entered entered;
        ASSERT_EQ(cuStreamEndCapture(stream.get(), &graph), CUDA_SUCCESS) << "it was not spoilt";
        ASSERT_EQ(cuGraphDestroy(graph), CUDA_SUCCESS);
    }
    ASSERT_NO_FATAL_FAILURE(twins.compare()) << "nothing has changed";
    ASSERT_TRUE(twins.prepare(step, stream.get()));
    stream.wait();
    ASSERT_NO_FATAL_FAILURE(twins.compare());
}

TEST_F(CudaTables, MayBeDestroyedWithWorkUnderWay) {
    Stream stream;
    {
        Twins twins(three_groups(40), config_of(4, 8));
        for (std::int64_t step = 0; step < 5; ++step) {
            ASSERT_TRUE(twins.prepare(decode(4, step), stream.get()));
        }
        if (on_standin()) {
            EXPECT_GT(standin_num_pending(), 0u);
        }
    }
    stream.wait();
}

TEST_F(CudaTables, SayWhereTheyAre) {
    Twins twins(three_groups(4), config_of(4, 8));
    const kvpages_device device = twins.device().device();
    EXPECT_EQ(device.kind, static_cast<std::uint32_t>(KVPAGES_DEVICE_KIND_CUDA));
    EXPECT_NE(device.context, nullptr);
    const auto host = kvpages::Tables::make(three_groups(4), config_of(4, 8));
    EXPECT_EQ(host.device().kind, static_cast<std::uint32_t>(KVPAGES_DEVICE_KIND_HOST));
    kvpages::TablesConfig config = config_of(4, 8);
    config.device = {KVPAGES_DEVICE_KIND_CUDA, num_devices(), nullptr};
    EXPECT_EQ(Twins::kind_of([&] { kvpages::Tables::make(three_groups(4), config); }), "no_device");
    config.device = {7, 0, nullptr};
    EXPECT_EQ(Twins::kind_of([&] { kvpages::Tables::make(three_groups(4), config); }),
              "unknown_value");
    config.device = {KVPAGES_DEVICE_KIND_HOST, 1, nullptr};
    EXPECT_EQ(Twins::kind_of([&] { kvpages::Tables::make(three_groups(4), config); }),
              "bad_values");
}

TEST_F(CudaTables, MayLieInAContextOfTheEngines) {
    CUcontext context = nullptr;
    const std::uint32_t last = num_devices() - 1;
    ASSERT_EQ(cuCtxCreate_v2(&context, 0, static_cast<int>(last)), CUDA_SUCCESS);
    ASSERT_EQ(cuCtxPopCurrent_v2(nullptr), CUDA_SUCCESS);
    {
        kvpages::TablesConfig config = config_of(4, 8);
        config.device = {KVPAGES_DEVICE_KIND_CUDA, 0, context};
        auto tables = kvpages::Tables::make(three_groups(4), config);
        EXPECT_EQ(tables.device().context, context);
        EXPECT_EQ(tables.device().ordinal, last);
        tables.append(0, 0, Ids{3});
        tables.prepare(decode(1, 2).batch());
        CUcontext current = nullptr;
        EXPECT_EQ(cuCtxGetCurrent(&current), CUDA_SUCCESS);
        EXPECT_EQ(current, nullptr);
    }
    ASSERT_EQ(cuCtxDestroy_v2(context), CUDA_SUCCESS);
}

TEST_F(CudaTables, TooLargeOnesAreRefused) {
    NEEDS_STANDIN("is small");
    kvpages::TablesConfig config = config_of(1 << 10, 8);
    config.device = kCuda;
    const std::vector<kvpages_table_group> groups{group_of(16, 16, 150000)};
    try {
        kvpages::Tables::make(groups, config);
        FAIL() << "1.2 GB on a device of 1 GiB";
    } catch (const kvpages::Error& error) {
        EXPECT_EQ(error.status(), KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY) << error.what();
    }
}

/// Makes tables, and uses them. A call that fails is made once more. Returns the status of the first
/// failure, and of what cannot be made.
std::int32_t scenario(CUstream stream, bool is_checked) {
    std::int32_t status = KVPAGES_STATUS_OK;
    const auto again = [&](auto call) {
        try {
            call();
        } catch (const kvpages::Error& error) {
            status = error.status();
            call();
        }
    };
    try {
        const std::vector<kvpages_table_group> groups = three_groups(4);
        auto host = kvpages::Tables::make(groups, config_of(4, 8));
        kvpages::TablesConfig config = config_of(4, 8);
        config.device = kCuda;
        auto tables = kvpages::Tables::make(groups, config);
        for (kvpages::Tables* each : {&host, &tables}) {
            each->append(0, 0, Ids{3, 4});
            each->append(1, 1, Ids{9});
            each->append(2, 2, Ids{8});
            again([&] { each->prepare(decode(3, 2).batch(stream)); });
            each->swap(0, 1);
            again([&] { each->apply(stream); });
            again([&] { each->gather(Ids{1, 2}, 2, stream); });
            again([&] { each->map_slots(Ids{1}, Ids{0, 1}, Positions{1}, stream); });
            each->truncate(1, 0, 1);
            again([&] { each->prepare(decode(2, 1).batch(stream)); });
        }
        if (!is_checked) return status;
        standin_fail_nothing();
        const Entered entered;
        EXPECT_EQ(cuStreamSynchronize(stream), CUDA_SUCCESS);
        for (std::size_t group = 0; group < groups.size(); ++group) {
            for (const auto& [a, b] :
                 {std::pair(host.table(group), tables.table(group)),
                  std::pair(host.input_table(group), tables.input_table(group))}) {
                const auto* ids = static_cast<const std::int32_t*>(a.data);
                const auto count = static_cast<std::size_t>(a.num_elements());
                EXPECT_EQ(read<std::int32_t>(b.data, count), Ids(ids, ids + count));
            }
            const auto* slots = static_cast<const std::int64_t*>(host.slots(group).data);
            EXPECT_EQ(read<std::int64_t>(tables.slots(group).data, 8), Positions(slots, slots + 8));
        }
        return status;
    } catch (const kvpages::Error& error) {
        return error.status();
    }
}

TEST_F(CudaTables, AFailureAtAnyCallIsToldAndMendedByTheNextCall) {
    NEEDS_STANDIN("fails when it is told to");
    auto stream = std::make_unique<Stream>();
    ASSERT_EQ(scenario(stream->get(), false), KVPAGES_STATUS_OK);  // opens the driver
    const std::uint64_t before = standin_num_calls(nullptr);
    ASSERT_EQ(scenario(stream->get(), false), KVPAGES_STATUS_OK);
    const std::uint64_t num_calls = standin_num_calls(nullptr) - before;
    ASSERT_GT(num_calls, 60u);
    std::size_t num_told = 0;
    for (std::uint64_t nth = 1; nth <= num_calls; ++nth) {
        ASSERT_TRUE(standin_fail(nullptr, nth, CUDA_ERROR_UNKNOWN));
        std::int32_t status = scenario(stream->get(), true);
        if (standin_num_failed() == 0) {  // it is behind the check
            ASSERT_TRUE(standin_fail(nullptr, nth, CUDA_ERROR_UNKNOWN));
            status = scenario(stream->get(), false);
        }
        ASSERT_NE(standin_last_failed(), nullptr);
        const std::string function = standin_last_failed();
        SCOPED_TRACE("call " + std::to_string(nth) + ", " + function);
        standin_fail_nothing();
        num_told += status == KVPAGES_STATUS_DEVICE_UNAVAILABLE;
        if (function == "cuLaunchKernel" || function == "cuMemcpyHtoDAsync_v2" ||
            function == "cuStreamIsCapturing" || function == "cuMemsetD8Async") {
            EXPECT_EQ(status, KVPAGES_STATUS_DEVICE_UNAVAILABLE);
        }
        ASSERT_EQ(HasFailure(), false);
        // Memory cannot be given back to a context that cannot be entered.
        stream.reset();
        ASSERT_EQ(cuDevicePrimaryCtxRelease_v2(0), CUDA_SUCCESS);
        if (standin_num_leaks(nullptr) != 0) {
            EXPECT_EQ(function, "cuCtxPushCurrent_v2") << standin_describe_leaks();
        }
        SetUp();
        stream = std::make_unique<Stream>();
    }
    EXPECT_GT(num_told, num_calls / 2);
}

}  // namespace
