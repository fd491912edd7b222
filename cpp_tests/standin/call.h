// What every function of the driver does first: it is counted, may be made to fail, and is refused
// when what it needs is not there.
#ifndef KVPAGES_STANDIN_CALL_H
#define KVPAGES_STANDIN_CALL_H

#include "state.h"

namespace standin {

enum Traits : unsigned {
    NEEDS_NOTHING = 0,
    NEEDS_INIT = 1,
    NEEDS_CONTEXT = 2 | NEEDS_INIT,
    // Does its work even when it is made to fail.
    GIVES_BACK = 4,
    // "Potentially unsafe" while a stream is being captured.
    UNSAFE_IN_CAPTURE = 8,
};

// Enters the name into the list of functions.
struct Registered {
    explicit Registered(const char* name);
};
const std::set<std::string>& registered_functions();

// The calling thread's contexts, the current one last.
std::vector<CUcontext>& context_stack();
CUcontext current_context();

// Counts the call; the code of a failure that is due.
CUresult count_call(const char* name);
// Why a call of these traits is refused now.
CUresult refusal(unsigned traits);

template <typename Body>
CUresult driver_call(const char* name, unsigned traits, Body body) {
    const std::lock_guard<std::recursive_mutex> lock(state().mutex);
    const CUresult injected = count_call(name);
    const bool gives_back = (traits & GIVES_BACK) != 0;
    if (injected != CUDA_SUCCESS && !gives_back) {
        return injected;
    }
    const CUresult refused = refusal(traits);
    const bool broken = refused == CUDA_ERROR_ILLEGAL_ADDRESS;
    if (refused != CUDA_SUCCESS && !(broken && gives_back)) {
        return refused;
    }
    const CUresult result = body();
    if (injected != CUDA_SUCCESS) {
        return injected;
    }
    return result == CUDA_SUCCESS ? refused : result;
}

// Opens the definition of a driver's function and enters it into the list.
#define DRIVER_FUNCTION(name, ...)                         \
    static const standin::Registered registered_##name(#name); \
    CUresult name(__VA_ARGS__)

}  // namespace standin

#endif
