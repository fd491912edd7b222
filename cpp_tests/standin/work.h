// Work on streams: it waits in queues, and runs at once unless it is deferred.
#ifndef KVPAGES_STANDIN_WORK_H
#define KVPAGES_STANDIN_WORK_H

#include "call.h"

namespace standin {

// The legacy default stream (the per-thread one is taken for the same).
bool is_default_stream(CUstream handle);

// The stream of a handle, by the rules of the driver: null is the current context's default one.
// An error when there is none.
CUresult resolve_stream(CUstream handle, std::shared_ptr<CUstream_st>* stream);

// Puts work on a stream, or into the graph when the stream is being captured.
CUresult submit(CUstream handle, Operation run);
// The same for something that a graph cannot hold.
CUresult submit_uncapturable(CUstream handle, Operation run);

// The streams of a context but its default one, destroyed ones with work left included.
std::vector<std::shared_ptr<CUstream_st>> streams_of(CUcontext context);

// Runs the stream's work up to a position, and before it whatever it waits for.
void finish(const Point& point);
void finish_stream(const std::shared_ptr<CUstream_st>& stream);
void finish_context(CUcontext context);
void finish_device(int device);
void finish_all();

// Records that work of a context went wrong.
void break_context(CUcontext context, const std::string& why);
// What a call that waited returns: the context's error.
inline CUresult outcome(CUcontext context) { return context->broken; }

// Runs the function; false, and where, when it touches memory that it may not.
bool run_guarded(const std::function<void()>& function, const void** address);

}  // namespace standin

#endif
