#include "work.h"

#include "capture.h"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <iterator>

namespace standin {

namespace {

constexpr std::uintptr_t legacy_stream = 1;
constexpr std::uintptr_t per_thread_stream = 2;

bool is_blocking(const CUstream_st& stream) {
    return (stream.flags & CU_STREAM_NON_BLOCKING) == 0;
}

// The default stream waits for all blocking streams of its context, and they for it.
std::vector<Point> implied_order(const std::shared_ptr<CUstream_st>& stream) {
    std::vector<Point> after;
    const auto& legacy = stream->context->stream;
    if (stream != legacy) {
        if (is_blocking(*stream)) {
            after.push_back({legacy, legacy->submitted});
        }
        return after;
    }
    for (const auto& other : streams_of(stream->context)) {
        if (is_blocking(*other)) {
            after.push_back({other, other->submitted});
        }
    }
    return after;
}

void run_first(CUstream_st& stream) {
    const Queued next = std::move(stream.queue.front());
    stream.queue.pop_front();
    for (const Point& point : next.after) {
        finish(point);
    }
    // A context that is broken does no more work.
    if (next.run && stream.context->broken == CUDA_SUCCESS) {
        const OpenMemory open;
        next.run();
    }
    ++stream.completed;
}

sigjmp_buf* guarded = nullptr;
const void* fault_address = nullptr;

void on_fault(int, siginfo_t* info, void*) {
    fault_address = info->si_addr;
    siglongjmp(*guarded, 1);
}

}  // namespace

bool is_default_stream(CUstream handle) {
    const auto value = reinterpret_cast<std::uintptr_t>(handle);
    return value == 0 || value == legacy_stream || value == per_thread_stream;
}

CUresult resolve_stream(CUstream handle, std::shared_ptr<CUstream_st>* stream) {
    const CUcontext current = current_context();
    if (is_default_stream(handle)) {
        if (current == nullptr) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        *stream = current->stream;
        return refuse_legacy_during_capture(current);
    }
    *stream = state().streams.find(handle);
    if (*stream == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return CUDA_SUCCESS;
}

namespace {

CUresult submit_as(CUstream handle, Operation run, bool capturable) {
    std::shared_ptr<CUstream_st> stream;
    const CUresult result = resolve_stream(handle, &stream);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (stream->context != current_context()) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->capture) {
        return capturable ? record(*stream, std::move(run)) : refuse_captured(*stream);
    }
    std::vector<Point> after = implied_order(stream);
    stream->queue.push_back({std::move(after), std::move(run)});
    ++stream->submitted;
    if (!state().deferred) {
        finish_stream(stream);
        return outcome(stream->context);
    }
    return CUDA_SUCCESS;
}

}  // namespace

CUresult submit(CUstream handle, Operation run) { return submit_as(handle, std::move(run), true); }

CUresult submit_uncapturable(CUstream handle, Operation run) {
    return submit_as(handle, std::move(run), false);
}

void finish(const Point& point) {
    while (point.stream->completed < point.position && !point.stream->queue.empty()) {
        run_first(*point.stream);
    }
}

void finish_stream(const std::shared_ptr<CUstream_st>& stream) {
    finish({stream, stream->submitted});
}

std::vector<std::shared_ptr<CUstream_st>> streams_of(CUcontext context) {
    std::vector<std::shared_ptr<CUstream_st>> found;
    for (const auto& [handle, stream] : state().streams.all()) {
        if (stream->context == context) {
            found.push_back(stream);
        }
    }
    std::copy_if(state().orphans.begin(), state().orphans.end(), std::back_inserter(found),
                 [context](const auto& orphan) { return orphan->context == context; });
    return found;
}

void finish_context(CUcontext context) {
    finish_stream(context->stream);
    for (const auto& stream : streams_of(context)) {
        finish_stream(stream);
    }
    auto& orphans = state().orphans;
    orphans.erase(std::remove_if(orphans.begin(), orphans.end(),
                                 [](const auto& orphan) { return orphan->queue.empty(); }),
                  orphans.end());
}

void finish_device(int device) {
    for (const auto& [handle, context] : state().contexts.all()) {
        if (context->device == device && context->references > 0) {
            finish_context(handle);
        }
    }
}

void finish_all() {
    for (int device = 0; device < max_devices; ++device) {
        finish_device(device);
    }
}

void break_context(CUcontext context, const std::string& why) {
    state().violations.push_back(why);
    context->broken = CUDA_ERROR_ILLEGAL_ADDRESS;
}

// Faults of kernels become errors, as on a device. The lock is held, so one runs at a time.
bool run_guarded(const std::function<void()>& function, const void** address) {
    sigjmp_buf here;
    struct sigaction action = {};
    struct sigaction before_segv = {};
    struct sigaction before_bus = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigemptyset(&action.sa_mask);
    guarded = &here;
    const volatile bool ran = [&] {
        if (sigsetjmp(here, 1) != 0) {
            return false;
        }
        sigaction(SIGSEGV, &action, &before_segv);
        sigaction(SIGBUS, &action, &before_bus);
        function();
        return true;
    }();
    sigaction(SIGSEGV, &before_segv, nullptr);
    sigaction(SIGBUS, &before_bus, nullptr);
    guarded = nullptr;
    *address = fault_address;
    return ran;
}

}  // namespace standin

using namespace standin;

DRIVER_FUNCTION(cuCtxSynchronize, void) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        const CUcontext context = current_context();
        const CUresult refused = refuse_context_during_capture(context);
        if (refused != CUDA_SUCCESS) {
            return refused;
        }
        finish_context(context);
        return outcome(context);
    });
}
