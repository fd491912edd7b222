// Measures the library on a GPU through the driver alone. scripts/gpu-check makes a report of it.
#include "bench.h"

#include "pool.h"
#include "standin.h"

#include <kvpages/kvpages.hpp>

#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

enum Status { kDone = 0, kFailed = 1, kMissesTargets = 2, kNoDevice = 3 };

const char kUsage[] =
    "usage: kvpages_gpu_bench [--quick] [--max-bytes N] PART...\n"
    "\n"
    "Prints parts of a report in Markdown:\n"
    "  --device       the device and its driver\n"
    "  --first-load   how long the first operations of a process take\n"
    "  --bandwidth    operations beside the driver's copy and memset, rows of 1 MiB to 8 GiB\n"
    "  --host         how long calls keep the host, and their launches where these are counted\n"
    "\n"
    "--quick measures next to nothing, and judges nothing. --max-bytes leaves larger sizes out; "
    "it\n"
    "takes MiB and GiB.\n"
    "\n"
    "Exit status: 0, all is well; 1, something failed; 2, a target was missed; 3, there is no "
    "device.\n";

std::uint64_t bytes_of(const char* text) {
    char* end = nullptr;
    const std::uint64_t number = std::strtoull(text, &end, 10);
    const std::string unit = end;
    const int shift = unit == "GiB" ? 30 : unit == "MiB" ? 20 : unit.empty() ? 0 : -1;
    if (end == text || shift < 0) fail(std::string("no number of bytes: ") + text);
    return number << shift;
}

void need_device() {
    int count = 0;
    const CUresult code = cuInit(0);
    if (code == CUDA_SUCCESS && cuDeviceGetCount(&count) == CUDA_SUCCESS && count > 0) return;
    std::fprintf(stderr, "gpu_bench: the driver has no device; cuInit returns %d\n", code);
    std::exit(kNoDevice);
}

int attribute(int which) {
    int value = 0;
    DRIVER(cuDeviceGetAttribute(&value, which, 0));
    return value;
}

double ms_since(std::chrono::steady_clock::time_point begin) {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::milli>(now - begin).count();
}

}  // namespace

void support::driver_failed(const char* call, CUresult code) {
    const char* name = nullptr;
    cuGetErrorName(code, &name);
    fail(std::string(call) + " returns " + std::to_string(code) + ", " +
         (name == nullptr ? "no name" : name));
}

void fail(const std::string& what) {
    std::fflush(stdout);
    std::fprintf(stderr, "gpu_bench: %s\n", what.c_str());
    std::_Exit(kFailed);  // destructors would call a driver that may be broken
}

bool on_standin() { return dlsym(RTLD_DEFAULT, "standin_reset") != nullptr; }

void print_device() {
    char name[256] = {};
    int driver = 0;
    std::size_t free = 0, total = 0;
    DRIVER(cuDeviceGetName(name, sizeof(name), 0));
    DRIVER(cuDriverGetVersion(&driver));
    DRIVER(cuMemGetInfo_v2(&free, &total));
    std::printf("| device | %s |\n", name);
    std::printf("| compute capability | %d.%d |\n",
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR));
    std::printf("| multiprocessors | %d |\n", attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
    std::printf("| memory | %.1f GiB, %.1f of them free |\n",
                static_cast<double>(total) / (1 << 30), static_cast<double>(free) / (1 << 30));
    std::printf("| second-level cache | %d MiB |\n",
                attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE) >> 20);
    // Two transfers a clock.
    const double peak = 2e3 * attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) *
                        attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8;
    if (peak > 0) {
        std::printf("| bandwidth by clock and bus | %.0f GB/s |\n", peak / 1e9);
    } else {
        std::printf("| bandwidth by clock and bus | the driver does not tell |\n");
    }
    std::printf("| driver is for CUDA | %d.%d%s |\n", driver / 1000, driver % 1000 / 10,
                on_standin() ? ", a stand-in: no number here is a device's" : "");
}

/// The driver compiles the kernels then, or finds in its cache what it made of them.
void print_first_load(double context_ms) {
    const auto begin = std::chrono::steady_clock::now();
    Pool pool(kBf16, 1);
    pool.ops().zero_blocks(pool.ids());
    DRIVER(cuCtxSynchronize());
    std::printf("| %.0f ms | %.0f ms |\n", context_ms, ms_since(begin));
}

int main(int argc, char** argv) {
    Options options;
    std::vector<std::string> parts;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument == "--quick") {
            options.quick = true;
        } else if (argument == "--max-bytes" && i + 1 < argc) {
            options.max_bytes = bytes_of(argv[++i]);
        } else if (argument == "--device" || argument == "--first-load" ||
                   argument == "--bandwidth" || argument == "--host") {
            parts.push_back(argument);
        } else {
            std::fputs(kUsage, argument == "--help" ? stdout : stderr);
            return argument == "--help" ? kDone : kFailed;
        }
    }
    options.judges = !options.quick && !on_standin();
    need_device();
    const auto begin = std::chrono::steady_clock::now();
    const support::Entered held;  // memory and streams of a context go with it
    const double context_ms = ms_since(begin);
    bool reached = true;
    try {
        for (const std::string& part : parts) {
            if (part == "--device") print_device();
            if (part == "--first-load") print_first_load(context_ms);
            if (part == "--bandwidth") reached = print_bandwidth(options) && reached;
            if (part == "--host") reached = print_host_times(options) && reached;
        }
    } catch (const std::exception& error) {
        fail(error.what());
    }
    return reached ? kDone : kMissesTargets;
}
