// What lets one text be compiled for the host and for a device.
//
// Bodies in these headers are plain functions of explicit indices: an index space stands in a
// comment, and one function does the work of one index. They use no run-time library, no
// allocation and no exceptions, so that a device function may be made of them.
#ifndef KVPAGES_KERNELS_PORT_H
#define KVPAGES_KERNELS_PORT_H

#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__) || defined(__CUDACC_RTC__) || defined(__CUDA__)
#define KVP_FN __host__ __device__ __forceinline__
#else
#define KVP_FN inline
#endif

// How often a loop's body stands in a kernel. On the host the compiler knows best.
#if defined(__CUDA_ARCH__)
#define KVP_ROLLED _Pragma("unroll 1")
#define KVP_UNROLLED _Pragma("unroll")
#else
#define KVP_ROLLED
#define KVP_UNROLLED
#endif

namespace kvp {

using byte = unsigned char;

// The bits of one value, read as another type of the same size.
template <typename To, typename From>
KVP_FN To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "two types of one size");
    To to;
    __builtin_memcpy(&to, &from, sizeof(To));
    return to;
}

// The upper half of the product.
KVP_FN uint64_t multiply_high(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    __extension__ using Wide = unsigned __int128;
    return static_cast<uint64_t>((static_cast<Wide>(a) * b) >> 64);
#endif
}

// A value at an address that need not be a multiple of its size.
template <typename T>
KVP_FN T load(const byte* from) {
    T value;
    __builtin_memcpy(&value, from, sizeof(T));
    return value;
}

template <typename T>
KVP_FN void store(byte* to, T value) {
    __builtin_memcpy(to, &value, sizeof(T));
}

}  // namespace kvp

#endif
