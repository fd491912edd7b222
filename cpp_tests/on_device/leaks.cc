// After all tests, nothing is left on the device.
#include "standin.h"

#include <gtest/gtest.h>

namespace {

class NothingIsLeft : public ::testing::Environment {
public:
    void TearDown() override {
        EXPECT_EQ(standin_num_leaks(nullptr), 0u) << standin_describe_leaks();
        EXPECT_EQ(standin_num_violations(), 0u) << standin_describe_violations();
        EXPECT_GT(standin_num_calls("cuMemMap"), 0u) << "caches were not on the device";
        EXPECT_GT(standin_num_calls("cuLaunchKernel"), 0u);
    }
};

[[maybe_unused]] const auto* const environment =
    ::testing::AddGlobalTestEnvironment(new NothingIsLeft);

}  // namespace
