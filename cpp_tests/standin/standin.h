/* A stand-in for NVIDIA's driver, on host memory: what tests steer it with.
 *
 * The library is called libcuda.so.1, and a program that links it is given it by
 * dlopen("libcuda.so.1") as well. It has two devices of 1 GiB. Fresh device memory is 0xA5. Kernels
 * are those of kernels/device.cu, compiled for the host and run thread by thread.
 *
 * It is stricter than a driver where a driver would let a mistake pass: device memory ends in guard
 * bytes and guard pages, freed addresses are never used again, and work that touches memory which
 * is gone leaves its context with CUDA_ERROR_ILLEGAL_ADDRESS. It does not model real concurrency
 * of host and device, the compiler of images (any image loads), nor per-thread default streams.
 *
 * Every function may be called from any thread. Strings live until the same thread's next call that
 * returns one. */
#ifndef KVPAGES_STANDIN_H
#define KVPAGES_STANDIN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Defined by programs that also run with a real driver in the place of this library: these
 * functions are null then, and a program asks for one of them before it calls any. */
#ifdef STANDIN_MAY_BE_ABSENT
#define STANDIN_FUNCTION __attribute__((weak))
#else
#define STANDIN_FUNCTION
#endif

#ifdef __cplusplus
#pragma GCC visibility push(default)
extern "C" {
#endif

/* Back to the state of a fresh process: every object is gone, every setting is as it was at first.
 * No other thread may be inside the driver, and no handle may be used afterwards. The calling
 * thread has no current context then. */
STANDIN_FUNCTION void standin_reset(void);

/* --- Failures --------------------------------------------------------------------------------- */

/* The nth call from now (1 is the next) of this function, or of any when it is NULL, returns
 * `code`. A function that gives something back (free, unmap, destroy, pop, release) does so
 * nevertheless, like a driver that reports an earlier failure there. Failures add up until
 * standin_fail_nothing. False when there is no such function. */
STANDIN_FUNCTION bool standin_fail(const char* function, uint64_t nth, int code);

/* Forgets the failures that have not happened. */
STANDIN_FUNCTION void standin_fail_nothing(void);

/* Failures that have happened since the last reset, and the function that the last one hit (NULL
 * before there was one). */
STANDIN_FUNCTION uint64_t standin_num_failed(void);
STANDIN_FUNCTION const char* standin_last_failed(void);

/* --- What was called -------------------------------------------------------------------------- */

/* Calls of this function, or of all when it is NULL, since the last reset. */
STANDIN_FUNCTION uint64_t standin_num_calls(const char* function);

/* The functions that this driver has, in the order of their names. */
STANDIN_FUNCTION size_t standin_num_functions(void);
STANDIN_FUNCTION const char* standin_function(size_t index);

/* Makes it a driver of another version (1000 for each major and 10 for each minor number), or its
 * devices others. */
STANDIN_FUNCTION void standin_set_driver_version(int version);
STANDIN_FUNCTION void standin_set_num_devices(int count);
STANDIN_FUNCTION void standin_set_attribute(int device, int attribute, int value);
STANDIN_FUNCTION void standin_set_total_bytes(int device, uint64_t bytes);
/* What sizes and addresses of virtual memory are multiples of: 2 MiB at first, a power of two from
 * 4096 on. Set it before there is any. False for another number. */
STANDIN_FUNCTION bool standin_set_granularity_bytes(size_t bytes);

/* --- What is alive ---------------------------------------------------------------------------- */

/* Kinds: "device memory", "pinned memory", "reservation", "physical memory", "mapping", "stream",
 * "event", "module", "graph", "graph exec", "context" (retained or created). NULL counts all.
 * What a destroyed context still owned is counted too: it was never given back. */
STANDIN_FUNCTION size_t standin_num_leaks(const char* kind);
/* One line for each of them; empty when there is none. */
STANDIN_FUNCTION const char* standin_describe_leaks(void);

/* Bytes of a device that are in use. */
STANDIN_FUNCTION uint64_t standin_used_bytes(int device);

/* --- How work runs ---------------------------------------------------------------------------- */

/* Deferred: work on streams runs only when something waits for it (synchronisation, an event, a
 * free), so what is not waited for is seen not to have happened. Destroying a stream is no waiting.
 * Setting it back runs all work. */
STANDIN_FUNCTION void standin_set_deferred(bool deferred);
/* Operations that wait to be run, on all streams and those that were destroyed before. */
STANDIN_FUNCTION size_t standin_num_pending(void);

/* Protected: device memory cannot be read or written but by work of the driver, so a host that
 * touches it faults. */
STANDIN_FUNCTION void standin_set_protected(bool protect);

/* --- What went wrong -------------------------------------------------------------------------- */

/* Misuse that a driver would not, or only later, report: guard bytes overwritten, work on memory
 * that is gone. Guard bytes are looked at here, and when the memory is freed. */
STANDIN_FUNCTION size_t standin_num_violations(void);
STANDIN_FUNCTION const char* standin_describe_violations(void);

#ifdef __cplusplus
}
#pragma GCC visibility pop
#endif

#endif
