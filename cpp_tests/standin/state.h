// Everything the stand-in knows, behind one lock.
#ifndef KVPAGES_STANDIN_STATE_H
#define KVPAGES_STANDIN_STATE_H

#include "driver.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace standin {

constexpr int max_devices = 2;
constexpr std::size_t usual_granularity_bytes = std::size_t{2} << 20;
constexpr unsigned char fresh_byte = 0xA5;

// What work on a stream does. It may run more than once: graphs are replayed.
using Operation = std::function<void()>;

// The stream's position after its first `position` operations.
struct Point {
    std::shared_ptr<CUstream_st> stream;
    std::uint64_t position = 0;
};

struct Queued {
    std::vector<Point> after;
    Operation run;
};

// How much of each captured stream is known to come before a point of a capture.
using Clock = std::map<CUstream, std::uint64_t>;

struct Capture {
    CUstream origin;
    std::thread::id thread;
    int mode;
    bool invalid = false;
    bool ended = false;
    std::vector<Operation> operations;  // in an order that keeps every dependency
    std::set<CUstream> streams;
};

// Objects that live until they are given back.
template <typename T>
class Objects {
public:
    T* add(std::shared_ptr<T> object) {
        T* const handle = object.get();
        all_.emplace(handle, std::move(object));
        return handle;
    }
    std::shared_ptr<T> find(T* handle) const {
        const auto found = all_.find(handle);
        return found == all_.end() ? nullptr : found->second;
    }
    bool remove(T* handle) { return all_.erase(handle) == 1; }
    void clear() { all_.clear(); }
    const std::map<T*, std::shared_ptr<T>>& all() const { return all_; }

private:
    std::map<T*, std::shared_ptr<T>> all_;
};

struct Device {
    std::uint64_t total_bytes = std::uint64_t{1} << 30;
    std::uint64_t used_bytes = 0;
    std::map<int, int> attributes;
    CUcontext primary = nullptr;
};

// Device memory of cuMemAlloc, amid guard bytes and inaccessible pages.
struct Plain {
    std::size_t bytes;
    CUcontext context;
    unsigned char* pages;  // the accessible ones
    std::size_t pages_bytes;
    bool overrun = false;  // seen once, said once
};

struct Pinned {
    std::size_t bytes;
    CUcontext context;
};

// Physical memory of cuMemCreate, a file in memory.
struct Physical {
    int file;
    std::size_t bytes;
    CUmemAllocationProp properties;
    std::size_t handles = 1;  // given out by cuMemCreate and cuMemRetainAllocationHandle
    std::size_t mappings = 0;
};

struct Mapping {
    std::size_t bytes;
    CUmemGenericAllocationHandle physical;
    std::set<int> devices;  // that may access it
};

struct Failure {
    std::string function;  // empty: any
    std::uint64_t calls_left;
    CUresult code;
};

struct State {
    std::recursive_mutex mutex;

    bool initialized = false;
    int driver_version = 13000;
    int num_devices = max_devices;
    Device devices[max_devices];

    Objects<CUctx_st> contexts;
    Objects<CUstream_st> streams;
    // Streams that were destroyed before their work was done.
    std::vector<std::shared_ptr<CUstream_st>> orphans;
    Objects<CUevent_st> events;
    Objects<CUmod_st> modules;
    Objects<CUgraph_st> graphs;
    Objects<CUgraphExec_st> execs;
    std::set<std::shared_ptr<Capture>> captures;

    std::map<CUdeviceptr, Plain> plain;
    std::map<CUdeviceptr, Pinned> pinned;
    std::map<CUdeviceptr, std::size_t> reservations;
    std::map<CUdeviceptr, Mapping> mappings;
    std::map<CUmemGenericAllocationHandle, Physical> physical;
    std::size_t granularity_bytes = usual_granularity_bytes;
    CUmemGenericAllocationHandle next_physical = 0x51000;

    bool deferred = false;
    bool protect = false;
    int open = 0;  // how many pieces of work of the driver are running

    std::map<std::string, std::uint64_t> calls;
    std::uint64_t num_calls = 0;
    std::vector<Failure> failures;
    std::uint64_t num_failed = 0;
    std::string last_failed;

    std::vector<std::string> violations;
    std::uint64_t resets = 0;
};

// Never destroyed, so that programs may call the driver until their very end.
State& state();

// --- ranges -------------------------------------------------------------------

// Whether bytes lie within [start, start + size), without overflow.
inline bool lies_within(CUdeviceptr address, std::size_t bytes, CUdeviceptr start,
                        std::size_t size) {
    return address >= start && bytes <= size && address - start <= size - bytes;
}

// The entry of a map of ranges that starts at or before the address; end() if there is none.
template <typename Ranges>
auto at_or_before(Ranges& ranges, CUdeviceptr address) {
    auto next = ranges.upper_bound(address);
    return next == ranges.begin() ? ranges.end() : --next;
}

inline std::size_t round_up(std::size_t bytes, std::size_t multiple) {
    return (bytes + multiple - 1) / multiple * multiple;
}

constexpr int any_device = -1;

// Whether a device may access the bytes as its memory.
bool is_device_memory(CUdeviceptr address, std::size_t bytes, int device);
bool is_pinned(const void* address, std::size_t bytes);

// --- protection ---------------------------------------------------------------

// Device memory is reachable while one of these lives.
class OpenMemory {
public:
    OpenMemory();
    ~OpenMemory();
    OpenMemory(const OpenMemory&) = delete;
    OpenMemory& operator=(const OpenMemory&) = delete;
};

// What the host may do with device memory right now, for mprotect.
int host_protection();
// Applies host_protection to all of it.
void apply_protection();

}  // namespace standin

// --- what handles point at -----------------------------------------------------

struct CUctx_st {
    int device = 0;
    bool primary = false;
    std::uint64_t references = 0;         // of a primary; 1 for a created one
    std::shared_ptr<CUstream_st> stream;  // the legacy default stream
    CUresult broken = CUDA_SUCCESS;       // what every later call returns
};

struct CUstream_st {
    CUcontext context = nullptr;
    unsigned flags = 0;
    std::uint64_t submitted = 0;
    std::uint64_t completed = 0;
    std::deque<standin::Queued> queue;

    std::shared_ptr<standin::Capture> capture;
    std::uint64_t captured = 0;
    standin::Clock clock;
};

struct CUevent_st {
    CUcontext context = nullptr;
    unsigned flags = 0;
    standin::Point point;  // no stream: never recorded
    std::shared_ptr<std::chrono::steady_clock::time_point> when;

    std::shared_ptr<standin::Capture> capture;  // where it was recorded last
    standin::Clock clock;
};

struct CUfunc_st {
    using Run = void (*)(const unsigned* grid, const unsigned* block, void** parameters);
    CUmodule module = nullptr;
    std::string name;
    Run run = nullptr;
    std::vector<std::size_t> parameter_bytes;
};

struct CUmod_st {
    CUcontext context = nullptr;
    std::map<std::string, CUfunc_st> functions;
};

struct CUgraph_st {
    std::vector<standin::Operation> operations;
};

struct CUgraphExec_st {
    CUcontext context = nullptr;
    std::vector<standin::Operation> operations;
};

#endif
