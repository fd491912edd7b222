// Tensors of DLPack of caches in a device's memory.
#include "support/api.h"
#include "support/cuda.h"
#include "support/dlpack.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

using namespace support;

namespace {

using CudaDlpack = CudaTest;

Plan two_layers() {
    const Model m = model();
    add(m, "layers.0", full(16, 2, 8, KVPAGES_DTYPE_BF16), backend(kv_first));
    add(m, "layers.1", full(16, 2, 8, KVPAGES_DTYPE_BF16), backend(packed_nhd));
    return plan_of_blocks(m, 3);
}

Memory cuda_memory(std::uint32_t ordinal, std::uint32_t flags, CUcontext context = nullptr) {
    kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
    config.context = context;
    config.ordinal = ordinal;
    config.flags = flags;
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_cuda(&config, &raw));
    return Memory(raw);
}

// A consumer's work: the last element is written on its device, and seen at its place in the
// allocation.
void write_last(const DLTensor& tensor, const Cache& cache, int device) {
    const std::vector<std::int64_t> last(tensor.shape, tensor.shape + tensor.ndim);
    std::vector<std::int64_t> index;
    for (const std::int64_t size : last) {
        index.push_back(size - 1);
    }
    const unsigned char* const place = element(tensor, index);
    const kvpages_allocation whole = allocation(cache, 0);
    const Entered entered(device);
    const std::uint16_t written = 0xBEEF;
    upload(address(place), &written, sizeof written);
    std::uint16_t seen = 0;
    const std::uint64_t offset = whole.size_bytes - sizeof seen;  // dense pages: the last bytes
    DRIVER(cuMemcpyDtoH_v2(&seen, address(whole.data) + offset, sizeof seen));
    EXPECT_EQ(seen, written);
}

}  // namespace

TEST_F(CudaDlpack, ATensorSaysItsDevice) {
    for (std::uint32_t device = 0; device < num_devices(); ++device) {
        for (const std::uint32_t flags : {0u, KVPAGES_CUDA_MEMORY_VIRTUAL + 0u}) {
            SCOPED_TRACE("device " + std::to_string(device) + ", flags " + std::to_string(flags));
            const Cache c = cache(two_layers(), cuda_memory(device, flags));
            expect_dlpack_of_views(c);
            const DlpackTensor tensor = dlpack(c, 0);
            EXPECT_EQ(tensor->dl_tensor.device.device_type, kDLCUDA);
            EXPECT_EQ(tensor->dl_tensor.device.device_id, static_cast<std::int32_t>(device));
            write_last(tensor->dl_tensor, c, static_cast<int>(device));
        }
    }
}

TEST_F(CudaDlpack, OfAContextAndABufferOfTheEngines) {
    const Entered primary;
    const Cache c = cache(two_layers(), cuda_memory(7, 0, primary.get()));
    EXPECT_EQ(dlpack(c, 0)->dl_tensor.device.device_id, 0);
    expect_dlpack_of_views(c);

    const DeviceArray buffer(1 << 16);
    const kvpages_device device{KVPAGES_DEVICE_KIND_CUDA, 0, nullptr};
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_adopted_device(&device, buffer.data(), buffer.size(), &raw));
    const Cache adopted = cache(two_layers(), Memory(raw));
    expect_dlpack_of_views(adopted);
    EXPECT_EQ(dlpack(adopted, 0)->dl_tensor.device.device_type, kDLCUDA);
}

// To whom it is handed it is memory of the host: PyTorch takes no kDLCUDAHost, and finds out that
// memory is pinned by itself.
TEST_F(CudaDlpack, PinnedMemoryIsTheHosts) {
    kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_pinned(&config, &raw));
    const Cache c = cache(two_layers(), Memory(raw));
    expect_dlpack_of_views(c);
    EXPECT_EQ(dlpack(c, 0)->dl_tensor.device.device_type, kDLCPU);
}

// The last tensor gives the memory back on whatever thread, where no context is current, and leaves
// none there.
TEST_F(CudaDlpack, MemoryGoesWithTheLastTensorOnAnyThread) {
    for (const std::uint32_t flags : {0u, KVPAGES_CUDA_MEMORY_VIRTUAL + 0u}) {
        Cache c = cache(two_layers(), cuda_memory(0, flags));
        DlpackTensor first = dlpack(c, 0);
        UnversionedDlpackTensor second = unversioned_dlpack(c, 1);
        write_last(first->dl_tensor, c, 0);
        c.reset();
        if (on_standin()) {
            EXPECT_GT(standin_used_bytes(0), 0u);
        }
        first.reset();
        if (on_standin()) {
            EXPECT_GT(standin_used_bytes(0), 0u);
        }
        std::thread([&second] {
            second.reset();
            EXPECT_EQ(current(), nullptr);
        }).join();
        if (on_standin()) {
            EXPECT_EQ(standin_used_bytes(0), 0u);
        }
    }
}
