// Bodies of kernels on their own: what no call of the library can reach.

#include "../kernels/tables.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>

namespace {

constexpr std::uint64_t top = UINT32_MAX;

::testing::AssertionResult divides(std::uint64_t value, std::uint64_t divisor) {
    const kvp::Split split = kvp::split({UINT64_MAX / divisor, divisor}, value);
    if (split.quotient == value / divisor && split.rest == value % divisor) {
        return ::testing::AssertionSuccess();
    }
    return ::testing::AssertionFailure() << value << " / " << divisor << " is not "
                                         << split.quotient << " rest " << split.rest;
}

TEST(Kernels, DividingIsExactAtTheEdges) {
    for (const std::uint64_t divisor :
         {std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{3}, std::uint64_t{5}, std::uint64_t{7},
          std::uint64_t{16}, std::uint64_t{48}, std::uint64_t{1056}, std::uint64_t{65537},
          std::uint64_t{1} << 31, top - 1, top}) {
        for (const std::uint64_t multiple :
             {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{2}, std::uint64_t{1000},
              top / divisor}) {
            const std::uint64_t edge = std::min(multiple * divisor, top);
            EXPECT_TRUE(divides(edge == 0 ? 0 : edge - 1, divisor));
            EXPECT_TRUE(divides(edge, divisor));
            EXPECT_TRUE(divides(std::min(edge + 1, top), divisor));
            EXPECT_TRUE(divides(top, divisor));
        }
    }
}

TEST(Kernels, DividingIsExact) {
    std::mt19937 random(7);
    std::uniform_int_distribution<std::uint32_t> any, positive(1);
    for (int i = 0; i < 100000; ++i) {
        // Few bits as often as many.
        const std::uint64_t divisor = std::max(positive(random) >> (i % 32), 1u);
        ASSERT_TRUE(divides(any(random), divisor));
    }
}

TEST(Kernels, SlotsOfPositionsThatNoRowHas) {
    const std::int32_t ids[]{3, 5};
    const kvp::SlotRule rule{{UINT64_MAX / 4, 4}, {UINT64_MAX, 1}, {UINT64_MAX, 1}, 0, 1, 4};
    EXPECT_EQ(kvp::slot_of(rule, {ids, 2}, 6), 22);
    for (const std::int64_t position : {std::int64_t{8}, std::int64_t{-1}, INT64_MIN, INT64_MAX,
                                        static_cast<std::int64_t>(top) + 1}) {
        EXPECT_EQ(kvp::slot_of(rule, {ids, 2}, position), kvp::kPadSlot) << position;
    }
    EXPECT_EQ(kvp::slot_of(rule, {nullptr, 0}, 0), kvp::kPadSlot);
}

}  // namespace
