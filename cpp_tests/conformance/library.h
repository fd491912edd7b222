// The library's handles and failures, in C++ terms.
#pragma once

#include <kvpages/kvpages.h>

#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "json.h"

namespace conformance {

// A call that the library refused. Its kind is an outcome like any other.
class LibraryError : public std::exception {
public:
    LibraryError(std::string kind, std::string message)
        : kind_(std::move(kind)), message_(std::move(message)) {}

    const char* what() const noexcept override { return message_.c_str(); }

    const std::string& kind() const { return kind_; }

    Json outcome() const { return {{"error", kind_}, {"message", message_}}; }

private:
    std::string kind_;
    std::string message_;
};

// Throws LibraryError unless the call succeeded.
void check(kvpages_status status);

// What the callbacks of a call throw, since nothing may be thrown through the library.
class Thrown {
public:
    // Runs the body of a callback.
    template <typename Body>
    std::int32_t keep(Body body) noexcept {
        try {
            return body();
        } catch (...) {
            thrown_ = std::current_exception();
            return 1;
        }
    }

    // Throws what a callback threw, or as conformance::check.
    void check(kvpages_status status) {
        if (thrown_ != nullptr) {
            std::rethrow_exception(std::exchange(thrown_, nullptr));
        }
        conformance::check(status);
    }

private:
    std::exception_ptr thrown_;
};

// A name that the library must know.
std::string text(const char* name);

// A struct for the library to read or fill, every field but its size zero.
template <typename T>
T sized() {
    T value{};
    value.struct_size = sizeof(T);
    return value;
}

template <auto destroy>
struct Destroy {
    template <typename Handle>
    void operator()(Handle* handle) const {
        destroy(handle);
    }
};

using BackendHandle = std::unique_ptr<kvpages_backend, Destroy<kvpages_backend_destroy>>;
using ModelHandle = std::unique_ptr<kvpages_model, Destroy<kvpages_model_destroy>>;
using PlanHandle = std::unique_ptr<kvpages_plan, Destroy<kvpages_plan_destroy>>;
using MemoryHandle = std::unique_ptr<kvpages_memory, Destroy<kvpages_memory_destroy>>;
using AttentionHandle = std::unique_ptr<kvpages_attention, Destroy<kvpages_attention_destroy>>;
using CacheHandle = std::unique_ptr<kvpages_cache, Destroy<kvpages_cache_destroy>>;
using OpsHandle = std::unique_ptr<kvpages_ops, Destroy<kvpages_ops_destroy>>;

}  // namespace conformance
