// Runs tests of CUDA, says on which driver, and lets none be skipped on the stand-in.
#include "support/cuda.h"

#include <gtest/gtest.h>

#include <cstdio>

void support::driver_failed(const char* call, CUresult code) {
    const char* name = nullptr;
    cuGetErrorName(code, &name);
    ADD_FAILURE() << call << " returns " << code << ", " << (name == nullptr ? "no name" : name);
}

namespace {

class Driver : public ::testing::EmptyTestEventListener {
    void OnTestProgramStart(const ::testing::UnitTest&) override {
        std::printf("driver: %s\n", support::on_standin() ? "the stand-in" : "not the stand-in");
    }
    void OnTestEnd(const ::testing::TestInfo& test) override {
        if (support::on_standin() && test.result()->Skipped()) {
            ADD_FAILURE() << "a test was skipped on the stand-in, which can do everything";
        }
    }
};

}  // namespace

int main(int argc, char** argv) {
    ::testing::InitGoogleTest(&argc, argv);
    ::testing::UnitTest::GetInstance()->listeners().Append(new Driver);
    return RUN_ALL_TESTS();
}
