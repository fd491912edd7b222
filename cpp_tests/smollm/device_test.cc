// smollm's cache on a device whose memory the host cannot touch, and where work waits until it is
// waited for: to the last bit what it is on the host. No model is needed.
#include "smollm/kv_cache.h"

#include "engine/blocks.h"
#include "standin.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace {

using namespace smollm;

class SmolLmDevice : public testing::Test {
protected:
    void SetUp() override {
        standin_reset();
        standin_set_protected(true);
        standin_set_deferred(true);
    }

    void TearDown() override {
        EXPECT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
        EXPECT_EQ(standin_num_violations(), 0u) << standin_describe_violations();
        standin_reset();
    }
};

const ModelConfig kModel{2, 6, 2, 32, 192, 64, 100, 512, 10000, 1e-5f};

/// Requests of different lengths, a chunk and a token at a time; one is a fork of another.
class Steps {
public:
    explicit Steps(const CacheOptions& options)
        : cache_(kModel, options, threads_), pool_(cache_.num_blocks()) {
        pool_.shuffle(5);
    }

    /// All that attention gave.
    std::vector<float> run() {
        for (std::size_t row = 0; row < 3; ++row) add(0);
        step({37, 1, 18});
        step({1, 33, 1});
        fork(1);
        for (int i = 0; i < 4; ++i) step({1, 1, 1, 1});
        release(0);
        step({0, 5, 1, 20});
        return outputs_;
    }

private:
    struct Request {
        std::uint64_t length = 0;
        engine::HeldBlocks blocks;
    };

    void add(std::uint64_t length) {
        requests_.push_back({length, engine::HeldBlocks(cache_.block_size())});
    }

    void fork(std::size_t from) {
        Request& other = requests_[from];
        requests_.push_back({other.length, other.blocks.fork(other.length, pool_)});
        const auto &before = other.blocks.ids(), &after = requests_.back().blocks.ids();
        std::vector<kvpages_block_copy> copies;
        for (std::size_t i = 0; i < after.size(); ++i) {
            if (after[i] != before[i]) copies.push_back({before[i], after[i]});
        }
        EXPECT_EQ(copies.size(), 1u);
        cache_.copy_blocks(copies);
        cache_.append_blocks(requests_.size() - 1, after);
    }

    void release(std::size_t row) {
        requests_[row].blocks.release_all(pool_);
        cache_.clear_row(row);
    }

    /// Each request gets so many tokens.
    void step(const std::vector<std::uint64_t>& num_tokens) {
        std::vector<std::int32_t> rows, query_start{0}, seq_lens;
        std::vector<std::int64_t> positions;
        for (std::size_t row = 0; row < num_tokens.size(); ++row) {
            if (num_tokens[row] == 0) continue;
            Request& request = requests_[row];
            const std::uint64_t end = request.length + num_tokens[row];
            cache_.append_blocks(row, request.blocks.grow(end, pool_));
            for (; request.length < end; ++request.length) {
                positions.push_back(static_cast<std::int64_t>(request.length));
            }
            rows.push_back(static_cast<std::int32_t>(row));
            query_start.push_back(static_cast<std::int32_t>(positions.size()));
            seq_lens.push_back(static_cast<std::int32_t>(end));
        }
        cache_.begin_step({rows, query_start, seq_lens, positions});
        const std::size_t query_size = kModel.num_heads * kModel.head_size;
        const std::size_t kv_size = kModel.num_kv_heads * kModel.head_size;
        for (std::size_t layer = 0; layer < kModel.num_layers; ++layer) {
            const std::vector<float> queries = numbers(positions.size() * query_size);
            const std::vector<float> keys = numbers(positions.size() * kv_size);
            const std::vector<float> values = numbers(positions.size() * kv_size);
            std::vector<float> out(queries.size());
            cache_.run(layer, queries.data(), keys.data(), values.data(), out.data());
            outputs_.insert(outputs_.end(), out.begin(), out.end());
        }
    }

    std::vector<float> numbers(std::size_t count) {
        std::vector<float> all(count);
        for (float& one : all) one = static_cast<float>(random_() >> 8) / 8388608.0f - 1;
        return all;
    }

    std::mt19937 random_{3};
    ThreadPool threads_{2};
    KvCache cache_;
    engine::BlockPool pool_;
    std::vector<Request> requests_;
    std::vector<float> outputs_;
};

TEST_F(SmolLmDevice, AttentionIsThatOfTheHostToTheBit) {
    CacheOptions options;
    options.num_blocks = 40;
    options.max_requests = 4;
    options.max_tokens = 64;
    for (const CacheType& type : cache_types()) {
        for (const CacheLayout& layout : cache_layouts()) {
            for (const std::uint64_t kernel_block : {std::uint64_t{16}, std::uint64_t{8}}) {
                SCOPED_TRACE(std::string(type.name) + " " + layout.name);
                options.type = type;
                options.layout = layout;
                options.kernel_block_size = kernel_block;
                options.place = {};
                const std::vector<float> on_host = Steps(options).run();
                options.place = {1};
                EXPECT_EQ(Steps(options).run(), on_host);
            }
        }
    }
}

TEST_F(SmolLmDevice, ADeviceThatIsNotThereIsSaid) {
    ThreadPool threads(1);
    CacheOptions options;
    options.place = {2};
    try {
        const KvCache cache(kModel, options, threads);
        ADD_FAILURE() << "a device that is not there";
    } catch (const kvpages::Error& error) {
        EXPECT_EQ(error.status(), KVPAGES_STATUS_DEVICE_UNAVAILABLE);
    }
}

}  // namespace
