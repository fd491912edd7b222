#include "call.h"

#include "capture.h"

#include <algorithm>

namespace standin {

State& state() {
    static State* const only = new State;
    return *only;
}

namespace {

std::set<std::string>& mutable_functions() {
    static auto* const names = new std::set<std::string>;
    return *names;
}

}  // namespace

Registered::Registered(const char* name) { mutable_functions().insert(name); }

const std::set<std::string>& registered_functions() { return mutable_functions(); }

std::vector<CUcontext>& context_stack() {
    struct Stack {
        std::uint64_t resets = 0;
        std::vector<CUcontext> contexts;
    };
    thread_local Stack stack;
    if (stack.resets != state().resets) {
        stack = {state().resets, {}};
    }
    return stack.contexts;
}

CUcontext current_context() {
    const auto& stack = context_stack();
    return stack.empty() ? nullptr : stack.back();
}

CUresult count_call(const char* name) {
    State& all = state();
    ++all.calls[name];
    ++all.num_calls;
    CUresult due = CUDA_SUCCESS;
    for (Failure& failure : all.failures) {
        if (!failure.function.empty() && failure.function != name) {
            continue;
        }
        if (--failure.calls_left == 0 && due == CUDA_SUCCESS) {
            due = failure.code;
            all.last_failed = name;
            ++all.num_failed;
        }
    }
    all.failures.erase(
        std::remove_if(all.failures.begin(), all.failures.end(),
                       [](const Failure& failure) { return failure.calls_left == 0; }),
        all.failures.end());
    return due;
}

CUresult refusal(unsigned traits) {
    if ((traits & NEEDS_INIT) != 0 && !state().initialized) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if ((traits & NEEDS_CONTEXT) == NEEDS_CONTEXT) {
        const CUcontext context = current_context();
        if (context == nullptr) {
            return CUDA_ERROR_INVALID_CONTEXT;
        }
        if (context->references == 0) {
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        }
        if (context->broken != CUDA_SUCCESS) {
            return context->broken;
        }
    }
    return (traits & UNSAFE_IN_CAPTURE) != 0 ? refuse_during_capture() : CUDA_SUCCESS;
}

}  // namespace standin
