// The arithmetic of examples/smollm, as far as it needs no model.
#include "smollm/math.h"
#include "smollm/quant.h"
#include "smollm/threads.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace smollm;

namespace {

using Bytes = std::vector<std::uint8_t>;
using Floats = std::vector<float>;

GgufTensor tensor_of(TensorType type, std::size_t num_columns, std::size_t num_rows,
                     const Bytes& bytes) {
    return {"weights", type, {num_columns, num_rows}, bytes.data(), bytes.size()};
}

Floats dequantised(TensorType type, std::size_t num_columns, const Bytes& bytes,
                   std::uint64_t row = 0) {
    const GgufTensor tensor = tensor_of(type, num_columns, row + 1, bytes);
    Floats out(num_columns);
    dequantise_row(tensor, row, out.data());
    return out;
}

void append_half(Bytes& bytes, std::uint16_t half) {
    bytes.push_back(static_cast<std::uint8_t>(half & 255));
    bytes.push_back(static_cast<std::uint8_t>(half >> 8));
}

constexpr std::uint16_t kHalfOne = 0x3c00;
constexpr std::uint16_t kHalfTwo = 0x4000;
constexpr std::uint16_t kHalfMinusThree = 0xc200;

TEST(SmollmHalf, IsExact) {
    EXPECT_EQ(half_to_float(0), 0.0f);
    EXPECT_TRUE(std::signbit(half_to_float(0x8000)));
    EXPECT_EQ(half_to_float(kHalfOne), 1.0f);
    EXPECT_EQ(half_to_float(kHalfMinusThree), -3.0f);
    EXPECT_EQ(half_to_float(0x7bff), 65504.0f);
    EXPECT_EQ(half_to_float(0x0400), 0x1p-14f);  // the smallest normal one
    EXPECT_EQ(half_to_float(0x0001), 0x1p-24f);  // the smallest
    EXPECT_EQ(half_to_float(0x83ff), -0x1.ff8p-15f);
    EXPECT_EQ(half_to_float(0xfc00), -std::numeric_limits<float>::infinity());
    EXPECT_TRUE(std::isnan(half_to_float(0x7e00)));
}

TEST(SmollmQuant, Q4_1HasLowHalvesThenHighOnes) {
    Bytes bytes;
    append_half(bytes, kHalfTwo);
    append_half(bytes, kHalfMinusThree);
    for (unsigned i = 0; i < 16; ++i) bytes.push_back(static_cast<std::uint8_t>(i | (15 - i) << 4));
    const Floats out = dequantised(TensorType::q4_1, 32, bytes);
    for (std::size_t i = 0; i < 16; ++i) {
        EXPECT_EQ(out[i], 2.0f * static_cast<float>(i) - 3.0f);
        EXPECT_EQ(out[16 + i], 2.0f * static_cast<float>(15 - i) - 3.0f);
    }
}

TEST(SmollmQuant, Q8_0IsSigned) {
    Bytes bytes(34);  // the first row
    append_half(bytes, kHalfTwo);
    for (int i = 0; i < 32; ++i) bytes.push_back(static_cast<std::uint8_t>(i * 8 - 128));
    const Floats out = dequantised(TensorType::q8_0, 32, bytes, 1);
    for (int i = 0; i < 32; ++i) {
        EXPECT_EQ(out[static_cast<std::size_t>(i)], 2.0f * static_cast<float>(i * 8 - 128));
    }
}

TEST(SmollmQuant, Q6_KPutsBitsTogether) {
    // Number i of the block is to be i % 61, and its scale what scale_of says.
    const auto number = [](std::size_t i) { return static_cast<unsigned>(i % 61); };
    const auto scale_of = [](std::size_t i) { return static_cast<int>(i / 16) * 16 - 120; };
    Bytes bytes(208);
    for (std::size_t i = 0; i < 256; ++i) {
        const std::size_t half = i / 128, run = i % 128 / 32, at = i % 32;
        const unsigned low = (number(i) & 15u) << (run < 2 ? 0 : 4);
        const unsigned high = (number(i) >> 4) << (2 * run);
        std::uint8_t& low_byte = bytes[half * 64 + run % 2 * 32 + at];
        std::uint8_t& high_byte = bytes[128 + half * 32 + at];
        low_byte = static_cast<std::uint8_t>(low_byte | low);
        high_byte = static_cast<std::uint8_t>(high_byte | high);
        bytes[192 + i / 16] = static_cast<std::uint8_t>(scale_of(i));
    }
    append_half(bytes, kHalfTwo);
    const Floats out = dequantised(TensorType::q6_k, 256, bytes);
    for (std::size_t i = 0; i < 256; ++i) {
        EXPECT_EQ(out[i], static_cast<float>(2 * scale_of(i) * (static_cast<int>(number(i)) - 32)))
            << i;
    }
}

TEST(SmollmQuant, UnquantisedTypesAreRead) {
    Bytes halves;
    for (const auto half : {kHalfOne, kHalfTwo, kHalfMinusThree}) append_half(halves, half);
    EXPECT_EQ(dequantised(TensorType::f16, 3, halves), (Floats{1.0f, 2.0f, -3.0f}));
    const Floats numbers = {0.1f, -2.5f, 3e30f};
    Bytes bytes(sizeof(float) * 3);
    std::memcpy(bytes.data(), numbers.data(), bytes.size());
    EXPECT_EQ(dequantised(TensorType::f32, 3, bytes), numbers);
}

class SmollmMatmul : public testing::Test {
protected:
    static constexpr std::size_t kNumColumns = 96;
    static constexpr std::size_t kNumRows = 23;  // tiles and rows that are left over
    static constexpr std::size_t kMaxTokens = 9;

    void SetUp() override {
        std::uniform_int_distribution<int> byte(0, 255);
        for (std::size_t block = 0; block < kNumRows * kNumColumns / 32; ++block) {
            append_half(bytes_, static_cast<std::uint16_t>(0x2c00 + byte(random_)));
            append_half(bytes_, static_cast<std::uint16_t>(0xb400 + byte(random_)));
            for (int i = 0; i < 16; ++i) {
                bytes_.push_back(static_cast<std::uint8_t>(byte(random_)));
            }
        }
        std::normal_distribution<float> normal;
        for (float& x : input_) x = normal(random_);
    }

    GgufTensor weights() const {
        return tensor_of(TensorType::q4_1, kNumColumns, kNumRows, bytes_);
    }

    Floats multiply(std::size_t first, std::size_t num_tokens, ThreadPool& threads) const {
        Floats output(num_tokens * kNumRows);
        matmul(weights(), &input_[first * kNumColumns], num_tokens, output.data(), threads);
        return output;
    }

    /// The sum that math.h describes, written out.
    float sum_in_order(const Floats& row, std::size_t token) const {
        float lanes[kNumLanes] = {};
        for (std::size_t i = 0; i < kNumColumns; ++i) {
            const volatile float product = row[i] * input_[token * kNumColumns + i];
            lanes[i % kNumLanes] += product;
        }
        for (std::size_t half = kNumLanes / 2; half > 0; half /= 2) {
            for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
        }
        return lanes[0];
    }

    std::mt19937 random_{1};
    Bytes bytes_;
    Floats input_ = Floats(kMaxTokens * kNumColumns);
};

TEST_F(SmollmMatmul, IsCloseToTheExactProduct) {
    ThreadPool threads(1);
    const Floats output = multiply(0, kMaxTokens, threads);
    for (std::size_t row = 0; row < kNumRows; ++row) {
        Floats numbers(kNumColumns);
        dequantise_row(weights(), row, numbers.data());
        for (std::size_t token = 0; token < kMaxTokens; ++token) {
            double exact = 0, size = 0;
            for (std::size_t i = 0; i < kNumColumns; ++i) {
                const double product = double{numbers[i]} * input_[token * kNumColumns + i];
                exact += product;
                size += std::abs(product);
            }
            EXPECT_NEAR(double{output[token * kNumRows + row]}, exact, 1e-6 * size);
        }
    }
}

// Also finds out multiplications and additions that the compiler made one.
TEST_F(SmollmMatmul, AddsInTheOrderDescribed) {
    ThreadPool threads(1);
    const Floats output = multiply(0, kMaxTokens, threads);
    for (std::size_t row = 0; row < kNumRows; ++row) {
        Floats numbers(kNumColumns);
        dequantise_row(weights(), row, numbers.data());
        for (std::size_t token = 0; token < kMaxTokens; ++token) {
            const float expected = sum_in_order(numbers, token);
            EXPECT_EQ(output[token * kNumRows + row], expected) << row << " " << token;
            EXPECT_EQ(dot(numbers.data(), &input_[token * kNumColumns], kNumColumns), expected);
        }
    }
}

TEST_F(SmollmMatmul, HasTheSameBitsInEveryBatchAndWithAnyThreads) {
    ThreadPool one_thread(1);
    const Floats expected = multiply(0, kMaxTokens, one_thread);
    for (std::size_t num_threads = 1; num_threads <= 3; ++num_threads) {
        ThreadPool threads(num_threads);
        for (std::size_t num_tokens = 1; num_tokens <= kMaxTokens; ++num_tokens) {
            for (std::size_t first = 0; first + num_tokens <= kMaxTokens; ++first) {
                const Floats output = multiply(first, num_tokens, threads);
                EXPECT_EQ(std::memcmp(output.data(), &expected[first * kNumRows],
                                      output.size() * sizeof(float)),
                          0)
                    << num_threads << " threads, " << num_tokens << " tokens from " << first;
            }
        }
    }
}

TEST_F(SmollmMatmul, OfNoTokensIsNothing) {
    ThreadPool threads(2);
    EXPECT_TRUE(multiply(0, 0, threads).empty());
}

TEST(SmollmMatmulOfOtherSizes, IsRefusedByName) {
    const Bytes bytes(17 * sizeof(float));
    const GgufTensor weights = tensor_of(TensorType::f32, 17, 1, bytes);
    const Floats input(17);
    float output;
    ThreadPool threads(1);
    try {
        matmul(weights, input.data(), 1, &output, threads);
        FAIL() << "17 columns were multiplied";
    } catch (const std::invalid_argument& error) {
        EXPECT_STREQ(error.what(), "tensor weights has 17 columns, not a multiple of 16");
    }
}

TEST(SmollmNorm, MakesTheMeanSquareOne) {
    const std::size_t size = 64;
    Floats input(size), weights(size), output(size);
    double square = 0;
    for (std::size_t i = 0; i < size; ++i) {
        input[i] = static_cast<float>(i) * 0.25f - 3.0f;
        weights[i] = 1.0f + static_cast<float>(i % 3);
        square += double{input[i]} * double{input[i]};
    }
    rms_norm(input.data(), weights, 0.5f, output.data());
    const double scale = 1 / std::sqrt(square / size + 0.5);
    for (std::size_t i = 0; i < size; ++i) {
        EXPECT_NEAR(double{output[i]}, input[i] * scale * double{weights[i]}, 1e-6);
    }
}

TEST(SmollmSwiglu, GatesByTheSigmoid) {
    Floats gate = {0.0f, 1.0f, -2.0f, 100.0f, -100.0f};
    const Floats up = {5.0f, 2.0f, 3.0f, 2.0f, 2.0f};
    swiglu(gate.data(), up.data(), gate.size());
    const Floats expected = {0.0f, 2.0f / (1 + std::exp(-1.0f)), -6.0f / (1 + std::exp(2.0f)),
                             200.0f, 0.0f};
    for (std::size_t i = 0; i < gate.size(); ++i) EXPECT_NEAR(gate[i], expected[i], 1e-6f) << i;
}

TEST(SmollmAdd, AddsToItsOutput) {
    Floats output = {1.0f, 2.0f};
    const Floats input = {10.0f, 20.0f};
    add(output.data(), input.data(), output.size());
    EXPECT_EQ(output, (Floats{11.0f, 22.0f}));
}

TEST(SmollmRope, RotatesNeighboursByPositionTimesFrequency) {
    const std::size_t head_size = 8;
    const double base = 100;
    const Rope rope(head_size, static_cast<float>(base));
    Floats rotation(head_size);
    rope.make_rotation(7, rotation.data());
    Floats heads(2 * head_size);
    for (std::size_t i = 0; i < heads.size(); ++i) heads[i] = static_cast<float>(i) - 5.0f;
    const Floats before = heads;
    rope.rotate(rotation.data(), 2, heads.data());
    for (std::size_t i = 0; i < heads.size(); i += 2) {
        const double frequency =
            std::pow(base, -static_cast<double>(i % head_size) / static_cast<double>(head_size));
        const double cosine = std::cos(7 * frequency), sine = std::sin(7 * frequency);
        EXPECT_NEAR(heads[i], before[i] * cosine - before[i + 1] * sine, 1e-5);
        EXPECT_NEAR(heads[i + 1], before[i] * sine + before[i + 1] * cosine, 1e-5);
    }
}

TEST(SmollmRope, ChangesNothingAtTheStart) {
    const Rope rope(4, 10000.0f);
    Floats rotation(4), head = {1.0f, 2.0f, 3.0f, 4.0f};
    rope.make_rotation(0, rotation.data());
    rope.rotate(rotation.data(), 1, head.data());
    EXPECT_EQ(head, (Floats{1.0f, 2.0f, 3.0f, 4.0f}));
}

TEST(SmollmThreads, CoverEveryCountOnce) {
    for (std::size_t num_threads = 1; num_threads <= 4; ++num_threads) {
        ThreadPool threads(num_threads);
        EXPECT_EQ(threads.size(), num_threads);
        for (std::size_t count = 0; count < 50; ++count) {
            std::vector<std::atomic<int>> visits(count);
            threads.run(count, [&](std::size_t begin, std::size_t end) {
                EXPECT_LT(begin, end);
                for (std::size_t i = begin; i < end; ++i) ++visits[i];
            });
            for (const auto& visit : visits) EXPECT_EQ(visit, 1);
        }
    }
}

TEST(SmollmThreads, WakeUpAfterASleep) {
    ThreadPool threads(3);
    std::atomic<std::size_t> sum{0};
    for (int round = 0; round < 5; ++round) {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        threads.run(100, [&](std::size_t begin, std::size_t end) { sum += end - begin; });
    }
    EXPECT_EQ(sum, 500u);
}

TEST(SmollmThreads, AreMoreThanOne) {
    ThreadPool threads(2);
    // Each of two ranges waits for the other, which one thread alone would do for ever.
    std::atomic<int> num_here{0};
    threads.run(2, [&](std::size_t, std::size_t) {
        ++num_here;
        while (num_here < 2) std::this_thread::yield();
    });
    EXPECT_EQ(num_here, 2);
}

TEST(SmollmThreads, ThrowWhatABodyThrew) {
    for (std::size_t num_threads = 1; num_threads <= 3; ++num_threads) {
        ThreadPool threads(num_threads);
        for (std::size_t bad = 0; bad < 12; ++bad) {
            const auto body = [&](std::size_t begin, std::size_t end) {
                if (begin <= bad && bad < end) throw std::out_of_range(std::to_string(bad));
            };
            try {
                threads.run(12, body);
                ADD_FAILURE() << "nothing was thrown";
            } catch (const std::out_of_range& error) {
                EXPECT_EQ(error.what(), std::to_string(bad));
            }
            std::atomic<std::size_t> sum{0};
            threads.run(12, [&](std::size_t begin, std::size_t end) { sum += end - begin; });
            EXPECT_EQ(sum, 12u);  // works as before
        }
    }
}

TEST(SmollmThreads, RefuseALoopWithinALoop) {
    ThreadPool threads(2);
    const auto nothing = [](std::size_t, std::size_t) {};
    EXPECT_THROW(threads.run(4, [&](std::size_t, std::size_t) { threads.run(4, nothing); }),
                 std::logic_error);
    threads.run(4, nothing);
}

TEST(SmollmThreads, AreAtLeastOne) { EXPECT_THROW(ThreadPool(0), std::invalid_argument); }

}  // namespace
