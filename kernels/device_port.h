// The words of CUDA that device.cu uses, for a CUDA compiler, or for a C++ compiler of the host.
//
// On the host a kernel becomes two symbols: kvhost_NAME(grid, block, parameters), which runs every
// thread of the grid one after another, with parameters as cuLaunchKernel takes them; and
// kvsizes_NAME, how many parameters there are and the bytes of each. So kernels use no shared
// memory, barriers or votes.
#ifndef KVPAGES_KERNELS_DEVICE_PORT_H
#define KVPAGES_KERNELS_DEVICE_PORT_H

#include "port.h"

#if defined(__CUDACC__) || defined(__CUDA__)

#define KVP_DEVICE __device__ __forceinline__

namespace kvp {

// A pointer of which the compiler knows nothing, so that it does not compile a loop twice, for null
// and for others.
template <typename T>
KVP_DEVICE T* opaque(T* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

}  // namespace kvp

#define KVP_KERNEL(name, argument, body) \
    extern "C" __global__ void __launch_bounds__(256) name(const argument list) { body(list); }

#else

namespace kvp {

struct Indices {
    uint32_t x, y, z;
};

// Of the thread of a kernel that runs in this thread of the host.
extern thread_local Indices gridDim, blockDim, blockIdx, threadIdx;

template <typename Argument>
inline void run_grid(void (*body)(const Argument&), const uint32_t* grid, const uint32_t* block,
                     void** parameters) {
    // A kernel has a copy of its own.
    const Argument argument = *static_cast<const Argument*>(parameters[0]);
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    const auto each = [](Indices count, Indices& index, auto call) {
        for (index.z = 0; index.z < count.z; ++index.z) {
            for (index.y = 0; index.y < count.y; ++index.y) {
                for (index.x = 0; index.x < count.x; ++index.x) call();
            }
        }
    };
    each(gridDim, blockIdx, [&] { each(blockDim, threadIdx, [&] { body(argument); }); });
}

}  // namespace kvp

#define KVP_DEVICE inline

namespace kvp {

template <typename T>
inline T* opaque(T* pointer) {
    return pointer;
}

}  // namespace kvp

#define KVP_HOST_SYMBOL extern "C" __attribute__((visibility("default")))
#define KVP_KERNEL(name, argument, body)                                                        \
    KVP_HOST_SYMBOL void kvhost_##name(const uint32_t* grid, const uint32_t* block,             \
                                       void** parameters);                                      \
    KVP_HOST_SYMBOL void kvhost_##name(const uint32_t* grid, const uint32_t* block,             \
                                       void** parameters) {                                     \
        kvp::run_grid<argument>(body, grid, block, parameters);                                 \
    }                                                                                           \
    KVP_HOST_SYMBOL const uint32_t kvsizes_##name[2];                                           \
    KVP_HOST_SYMBOL const uint32_t kvsizes_##name[2] = {1, sizeof(argument)};

#endif

#endif
