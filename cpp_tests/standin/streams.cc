// Streams and events.
#include "capture.h"
#include "work.h"

using namespace standin;

namespace {

CUresult create_stream(CUstream* stream, unsigned flags) {
    if ((flags & ~static_cast<unsigned>(CU_STREAM_NON_BLOCKING)) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto made = std::make_shared<CUstream_st>();
    made->context = current_context();
    made->flags = flags;
    *stream = state().streams.add(std::move(made));
    return CUDA_SUCCESS;
}

bool is_done(const CUevent_st& event) {
    return event.point.stream == nullptr ||
           event.point.stream->completed >= event.point.position;
}

// The event, when the call may wait for it or ask about it.
CUresult resolve_event(CUevent handle, std::shared_ptr<CUevent_st>* event) {
    *event = state().events.find(handle);
    if (*event == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    return (*event)->capture == nullptr ? CUDA_SUCCESS : refuse_captured_event(**event);
}

// The stream, when the call may wait for it or ask about it.
CUresult resolve_idle_stream(CUstream handle, std::shared_ptr<CUstream_st>* stream) {
    const CUresult result = resolve_stream(handle, stream);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    return (*stream)->capture == nullptr ? CUDA_SUCCESS : refuse_captured(**stream);
}

CUresult wait_for_event(CUstream handle, const std::shared_ptr<CUevent_st>& event) {
    std::shared_ptr<CUstream_st> stream;
    const CUresult result = resolve_stream(handle, &stream);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (stream->capture != nullptr && stream->capture->invalid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (stream->capture != nullptr || event->capture != nullptr) {
        return wait_in_capture(*stream, *event);
    }
    if (event->point.stream == nullptr) {
        return CUDA_SUCCESS;
    }
    stream->queue.push_back({{event->point}, nullptr});
    ++stream->submitted;
    if (!state().deferred) {
        finish_stream(stream);
    }
    return CUDA_SUCCESS;
}

CUresult record_event(CUstream handle, const std::shared_ptr<CUevent_st>& event) {
    std::shared_ptr<CUstream_st> stream;
    const CUresult result = resolve_stream(handle, &stream);
    if (result != CUDA_SUCCESS) {
        return result;
    }
    if (stream->context != event->context) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (stream->capture != nullptr) {
        if (stream->capture->invalid) {
            return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        }
        record_event_in_capture(*stream, *event);
        return CUDA_SUCCESS;
    }
    event->capture.reset();
    const auto when = std::make_shared<std::chrono::steady_clock::time_point>();
    event->when = when;
    const CUresult submitted =
        submit(handle, [when] { *when = std::chrono::steady_clock::now(); });
    event->point = {stream, stream->submitted};
    return submitted;
}

}  // namespace

DRIVER_FUNCTION(cuStreamCreate, CUstream* stream, unsigned flags) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] { return create_stream(stream, flags); });
}

DRIVER_FUNCTION(cuStreamCreateWithPriority, CUstream* stream, unsigned flags, int priority) {
    static_cast<void>(priority);
    return driver_call(__func__, NEEDS_CONTEXT, [&] { return create_stream(stream, flags); });
}

// Its work is done nevertheless, but the call does not wait for it: whoever relies on that sees in
// deferred mode that nothing has happened yet.
DRIVER_FUNCTION(cuStreamDestroy_v2, CUstream handle) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        const auto stream = state().streams.find(handle);
        if (stream == nullptr) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        if (stream->capture != nullptr) {
            stream->capture->invalid = true;
            stream->capture->streams.erase(handle);
            if (stream->capture->origin == handle) {
                for (const CUstream joined : stream->capture->streams) {
                    joined->capture.reset();
                }
                state().captures.erase(stream->capture);
            }
        }
        if (!stream->queue.empty()) {
            state().orphans.push_back(stream);
        }
        state().streams.remove(handle);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuStreamSynchronize, CUstream handle) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        std::shared_ptr<CUstream_st> stream;
        CUresult result = resolve_idle_stream(handle, &stream);
        if (result == CUDA_SUCCESS) {
            result = refuse_during_capture();
        }
        if (result != CUDA_SUCCESS) {
            return result;
        }
        finish_stream(stream);
        if (stream == stream->context->stream) {  // waits for the blocking streams too
            for (const auto& other : streams_of(stream->context)) {
                if ((other->flags & CU_STREAM_NON_BLOCKING) == 0) {
                    finish_stream(other);
                }
            }
        }
        return outcome(stream->context);
    });
}

DRIVER_FUNCTION(cuStreamQuery, CUstream handle) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        std::shared_ptr<CUstream_st> stream;
        CUresult result = resolve_idle_stream(handle, &stream);
        if (result == CUDA_SUCCESS) {
            result = refuse_during_capture();
        }
        if (result != CUDA_SUCCESS) {
            return result;
        }
        return stream->completed < stream->submitted ? CUDA_ERROR_NOT_READY
                                                     : outcome(stream->context);
    });
}

DRIVER_FUNCTION(cuStreamWaitEvent, CUstream stream, CUevent handle, unsigned flags) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        const auto event = state().events.find(handle);
        if (event == nullptr) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        return flags > 1 ? CUDA_ERROR_INVALID_VALUE : wait_for_event(stream, event);
    });
}

DRIVER_FUNCTION(cuStreamGetCtx, CUstream handle, CUcontext* context) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        std::shared_ptr<CUstream_st> stream;
        const CUresult result = resolve_stream(handle, &stream);
        if (result == CUDA_SUCCESS) {
            *context = stream->context;
        }
        return result;
    });
}

DRIVER_FUNCTION(cuStreamGetFlags, CUstream handle, unsigned* flags) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        std::shared_ptr<CUstream_st> stream;
        const CUresult result = resolve_stream(handle, &stream);
        if (result == CUDA_SUCCESS) {
            *flags = stream->flags;
        }
        return result;
    });
}

DRIVER_FUNCTION(cuEventCreate, CUevent* event, unsigned flags) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        constexpr unsigned known_flags = 7;  // blocking sync, disable timing, interprocess
        if ((flags & ~known_flags) != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        auto made = std::make_shared<CUevent_st>();
        made->context = current_context();
        made->flags = flags;
        *event = state().events.add(std::move(made));
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuEventDestroy_v2, CUevent event) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        return state().events.remove(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    });
}

DRIVER_FUNCTION(cuEventRecord, CUevent handle, CUstream stream) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        const auto event = state().events.find(handle);
        return event == nullptr ? CUDA_ERROR_INVALID_HANDLE : record_event(stream, event);
    });
}

DRIVER_FUNCTION(cuEventQuery, CUevent handle) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        std::shared_ptr<CUevent_st> event;
        CUresult result = resolve_event(handle, &event);
        if (result == CUDA_SUCCESS) {
            result = refuse_during_capture();
        }
        if (result != CUDA_SUCCESS) {
            return result;
        }
        return is_done(*event) ? outcome(event->context) : CUDA_ERROR_NOT_READY;
    });
}

DRIVER_FUNCTION(cuEventSynchronize, CUevent handle) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        std::shared_ptr<CUevent_st> event;
        CUresult result = resolve_event(handle, &event);
        if (result == CUDA_SUCCESS) {
            result = refuse_during_capture();
        }
        if (result != CUDA_SUCCESS) {
            return result;
        }
        if (event->point.stream != nullptr) {
            finish(event->point);
        }
        return outcome(event->context);
    });
}

DRIVER_FUNCTION(cuEventElapsedTime, float* milliseconds, CUevent start, CUevent end) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        const auto first = state().events.find(start);
        const auto last = state().events.find(end);
        if (first == nullptr || last == nullptr || first->when == nullptr ||
            last->when == nullptr) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        if (!is_done(*first) || !is_done(*last)) {
            return CUDA_ERROR_NOT_READY;
        }
        *milliseconds =
            std::chrono::duration<float, std::milli>(*last->when - *first->when).count();
        return CUDA_SUCCESS;
    });
}
