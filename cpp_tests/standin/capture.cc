#include "capture.h"

#include "work.h"

#include <algorithm>

namespace standin {

namespace {

// What cuThreadExchangeStreamCaptureMode exchanges.
int& thread_mode() {
    struct Mode {
        std::uint64_t resets = 0;
        int mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    };
    thread_local Mode mode;
    if (mode.resets != state().resets) {
        mode = {state().resets, CU_STREAM_CAPTURE_MODE_GLOBAL};
    }
    return mode.mode;
}

// Whether a capture forbids unsafe calls on this thread.
bool forbids(const Capture& capture) {
    const bool ours = capture.thread == std::this_thread::get_id();
    if (thread_mode() == CU_STREAM_CAPTURE_MODE_RELAXED) {
        return false;
    }
    if (ours) {
        return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
    }
    return thread_mode() == CU_STREAM_CAPTURE_MODE_GLOBAL &&
           capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

template <typename Which>
CUresult invalidate(Which which, CUresult code) {
    CUresult result = CUDA_SUCCESS;
    for (const auto& capture : state().captures) {
        if (which(*capture)) {
            capture->invalid = true;
            result = code;
        }
    }
    return result;
}

bool has_blocking_stream(const Capture& capture, CUcontext context) {
    return std::any_of(
        capture.streams.begin(), capture.streams.end(), [context](CUstream stream) {
            return stream->context == context && (stream->flags & CU_STREAM_NON_BLOCKING) == 0;
        });
}

void merge(Clock& into, const Clock& from) {
    for (const auto& [stream, position] : from) {
        into[stream] = std::max(into[stream], position);
    }
}

void join(CUstream_st& stream, const std::shared_ptr<Capture>& capture) {
    stream.capture = capture;
    stream.captured = 0;
    stream.clock.clear();
    capture->streams.insert(&stream);
}

bool all_joined(const Capture& capture) {
    return std::all_of(capture.streams.begin(), capture.streams.end(), [&](CUstream stream) {
        return stream == capture.origin || capture.origin->clock[stream] >= stream->captured;
    });
}

void leave(Capture& capture) {
    for (const CUstream stream : capture.streams) {
        stream->capture.reset();
        stream->clock.clear();
    }
    capture.ended = true;
}

}  // namespace

CUresult record(CUstream_st& stream, Operation run) {
    if (stream.capture->invalid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    stream.capture->operations.push_back(std::move(run));
    stream.clock[&stream] = ++stream.captured;
    return CUDA_SUCCESS;
}

CUresult refuse_captured(CUstream_st& stream) {
    if (stream.capture->invalid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    stream.capture->invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

CUresult refuse_captured_event(CUevent_st& event) {
    event.capture->invalid = true;
    return CUDA_ERROR_CAPTURED_EVENT;
}

CUresult refuse_during_capture() {
    return invalidate(forbids, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

CUresult refuse_legacy_during_capture(CUcontext context) {
    return invalidate(
        [context](const Capture& capture) { return has_blocking_stream(capture, context); },
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
}

CUresult refuse_context_during_capture(CUcontext context) {
    return invalidate(
        [context](const Capture& capture) {
            return std::any_of(
                capture.streams.begin(), capture.streams.end(),
                [context](CUstream stream) { return stream->context == context; });
        },
        CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

CUresult wait_in_capture(CUstream_st& stream, CUevent_st& event) {
    if (event.capture == nullptr) {  // a captured stream waits for work that no graph holds
        stream.capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (event.capture->ended) {
        return CUDA_ERROR_CAPTURED_EVENT;
    }
    if (event.capture->invalid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (stream.capture == nullptr) {
        join(stream, event.capture);
    } else if (stream.capture != event.capture) {
        stream.capture->invalid = true;
        event.capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    merge(stream.clock, event.clock);
    return CUDA_SUCCESS;
}

void record_event_in_capture(CUstream_st& stream, CUevent_st& event) {
    event.capture = stream.capture;
    event.clock = stream.clock;
}

}  // namespace standin

using namespace standin;

DRIVER_FUNCTION(cuStreamBeginCapture_v2, CUstream handle, int mode) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        const auto stream = state().streams.find(handle);
        if (stream == nullptr) {  // default streams cannot be captured
            return handle == nullptr ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
                                     : CUDA_ERROR_INVALID_HANDLE;
        }
        if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (stream->capture) {
            return CUDA_ERROR_ILLEGAL_STATE;
        }
        auto capture = std::make_shared<Capture>();
        capture->origin = handle;
        capture->thread = std::this_thread::get_id();
        capture->mode = mode;
        join(*stream, capture);
        state().captures.insert(capture);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuStreamEndCapture, CUstream handle, CUgraph* graph) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        *graph = nullptr;
        const auto stream = state().streams.find(handle);
        if (stream == nullptr) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        const auto capture = stream->capture;
        if (capture == nullptr) {
            return CUDA_ERROR_ILLEGAL_STATE;
        }
        if (capture->origin != handle) {
            return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
        }
        if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED &&
            capture->thread != std::this_thread::get_id()) {
            return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        }
        const bool joined = all_joined(*capture);
        leave(*capture);
        state().captures.erase(capture);
        if (capture->invalid) {
            return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        }
        if (!joined) {
            return CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        }
        auto made = std::make_shared<CUgraph_st>();
        made->operations = std::move(capture->operations);
        *graph = state().graphs.add(std::move(made));
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuStreamIsCapturing, CUstream handle, int* status) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (is_default_stream(handle)) {  // asking invalidates nothing
            const CUcontext current = current_context();
            const auto& captures = state().captures;
            *status = CU_STREAM_CAPTURE_STATUS_NONE;
            return std::any_of(captures.begin(), captures.end(),
                               [current](const auto& capture) {
                                   return has_blocking_stream(*capture, current);
                               })
                       ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                       : CUDA_SUCCESS;
        }
        const auto stream = state().streams.find(handle);
        if (stream == nullptr) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        *status = stream->capture == nullptr   ? CU_STREAM_CAPTURE_STATUS_NONE
                  : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                               : CU_STREAM_CAPTURE_STATUS_ACTIVE;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuThreadExchangeStreamCaptureMode, int* mode) {
    return driver_call(__func__, NEEDS_NOTHING, [&] {
        if (*mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        std::swap(*mode, thread_mode());
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuGraphGetNodes, CUgraph graph, CUgraphNode* nodes, std::size_t* count) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        const auto found = state().graphs.find(graph);
        if (found == nullptr) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (nodes != nullptr) {
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        *count = found->operations.size();
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuGraphInstantiateWithFlags, CUgraphExec* exec, CUgraph graph,
                unsigned long long flags) {
    static_cast<void>(flags);
    return driver_call(__func__, NEEDS_CONTEXT | UNSAFE_IN_CAPTURE, [&] {
        const auto found = state().graphs.find(graph);
        if (found == nullptr) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        auto made = std::make_shared<CUgraphExec_st>();
        made->context = current_context();
        made->operations = found->operations;
        *exec = state().execs.add(std::move(made));
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuGraphLaunch, CUgraphExec exec, CUstream stream) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        const auto found = state().execs.find(exec);
        if (found == nullptr) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        return submit(stream, [found] {
            for (const Operation& run : found->operations) {
                run();
            }
        });
    });
}

DRIVER_FUNCTION(cuGraphDestroy, CUgraph graph) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        return state().graphs.remove(graph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}

DRIVER_FUNCTION(cuGraphExecDestroy, CUgraphExec exec) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        return state().execs.remove(exec) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    });
}
