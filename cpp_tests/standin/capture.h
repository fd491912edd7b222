// Capturing streams into graphs, and what may not be called meanwhile.
#ifndef KVPAGES_STANDIN_CAPTURE_H
#define KVPAGES_STANDIN_CAPTURE_H

#include "call.h"

namespace standin {

// Adds work of a capturing stream to its graph.
CUresult record(CUstream_st& stream, Operation run);
// A call that a capturing stream does not take: invalidates the capture.
CUresult refuse_captured(CUstream_st& stream);
// A call on an event of a capture: invalidates the capture.
CUresult refuse_captured_event(CUevent_st& event);

// A potentially unsafe call of this thread.
CUresult refuse_during_capture();
// A use of the default stream, which would wait for blocking streams that are being captured.
CUresult refuse_legacy_during_capture(CUcontext context);
// A synchronisation of the whole context.
CUresult refuse_context_during_capture(CUcontext context);

// A stream waits for an event, where one of them is of a capture.
CUresult wait_in_capture(CUstream_st& stream, CUevent_st& event);
void record_event_in_capture(CUstream_st& stream, CUevent_st& event);

}  // namespace standin

#endif
