// What tests steer the stand-in with.
#include "standin.h"

#include "work.h"

namespace standin {

void check_all_guards();
void release_all_memory();
void release_all_virtual_memory();

namespace {

// Keeps a text for the calling thread.
const char* keep(std::string text) {
    thread_local std::string kept;
    kept = std::move(text);
    return kept.c_str();
}

bool is_device(int device) { return device >= 0 && device < max_devices; }

struct Leak {
    std::string kind;
    std::string what;
};

std::vector<Leak> leaks() {
    const State& all = state();
    std::vector<Leak> found;
    for (const auto& [address, plain] : all.plain) {
        found.push_back({"device memory", std::to_string(plain.bytes) + " bytes of device " +
                                              std::to_string(plain.context->device)});
    }
    for (const auto& [address, pinned] : all.pinned) {
        found.push_back({"pinned memory", std::to_string(pinned.bytes) + " bytes"});
    }
    for (const auto& [address, bytes] : all.reservations) {
        found.push_back({"reservation", std::to_string(bytes) + " bytes"});
    }
    for (const auto& [handle, physical] : all.physical) {
        if (physical.handles > 0) {  // else it is a mapping's
            found.push_back({"physical memory",
                             std::to_string(physical.bytes) + " bytes of device " +
                                 std::to_string(physical.properties.location.id) + ", " +
                                 std::to_string(physical.handles) + " handles"});
        }
    }
    for (const auto& [address, mapping] : all.mappings) {
        found.push_back({"mapping", std::to_string(mapping.bytes) + " bytes"});
    }
    for (const auto& [handle, stream] : all.streams.all()) {
        found.push_back({"stream", "of device " + std::to_string(stream->context->device)});
    }
    for (const auto& [handle, event] : all.events.all()) {
        found.push_back({"event", "of device " + std::to_string(event->context->device)});
    }
    for (const auto& [handle, module] : all.modules.all()) {
        found.push_back({"module", "of device " + std::to_string(module->context->device)});
    }
    for (const auto& [handle, graph] : all.graphs.all()) {
        found.push_back({"graph", std::to_string(graph->operations.size()) + " operations"});
    }
    for (const auto& [handle, exec] : all.execs.all()) {
        found.push_back({"graph exec", std::to_string(exec->operations.size()) + " operations"});
    }
    for (const auto& [handle, context] : all.contexts.all()) {
        for (std::uint64_t i = 0; i < context->references; ++i) {
            found.push_back({"context", std::string(context->primary ? "primary" : "created") +
                                            " of device " + std::to_string(context->device)});
        }
    }
    return found;
}

void drop_work(CUstream_st& stream) {
    stream.completed = stream.submitted;
    stream.queue.clear();
    stream.capture.reset();
}

// Operations hold streams, and streams hold operations.
void drop_all_work() {
    for (const auto& [handle, stream] : state().streams.all()) {
        drop_work(*stream);
    }
    for (const auto& orphan : state().orphans) {
        drop_work(*orphan);
    }
    state().orphans.clear();
    for (const auto& [handle, context] : state().contexts.all()) {
        drop_work(*context->stream);
    }
}

}  // namespace

}  // namespace standin

using namespace standin;
using Lock = std::lock_guard<std::recursive_mutex>;

void standin_reset() {
    State& all = state();
    const Lock lock(all.mutex);
    all.protect = false;
    apply_protection();
    drop_all_work();
    all.captures.clear();
    all.graphs.clear();
    all.execs.clear();
    all.modules.clear();
    all.events.clear();
    all.streams.clear();
    release_all_memory();
    release_all_virtual_memory();
    all.contexts.clear();

    all.initialized = false;
    all.deferred = false;
    all.driver_version = 13000;
    all.granularity_bytes = usual_granularity_bytes;
    all.num_devices = max_devices;
    for (Device& device : all.devices) {
        device = Device{};
    }
    all.calls.clear();
    all.num_calls = 0;
    all.failures.clear();
    all.num_failed = 0;
    all.last_failed.clear();
    all.violations.clear();
    ++all.resets;
}

bool standin_fail(const char* function, uint64_t nth, int code) {
    const Lock lock(state().mutex);
    const std::string name = function == nullptr ? "" : function;
    if (nth == 0 || (!name.empty() && registered_functions().count(name) == 0)) {
        return false;
    }
    state().failures.push_back({name, nth, code});
    return true;
}

void standin_fail_nothing() {
    const Lock lock(state().mutex);
    state().failures.clear();
}

uint64_t standin_num_failed() {
    const Lock lock(state().mutex);
    return state().num_failed;
}

const char* standin_last_failed() {
    const Lock lock(state().mutex);
    return state().last_failed.empty() ? nullptr : keep(state().last_failed);
}

uint64_t standin_num_calls(const char* function) {
    const Lock lock(state().mutex);
    if (function == nullptr) {
        return state().num_calls;
    }
    const auto found = state().calls.find(function);
    return found == state().calls.end() ? 0 : found->second;
}

size_t standin_num_functions() { return registered_functions().size(); }

const char* standin_function(size_t index) {
    const auto& names = registered_functions();
    return index < names.size()
               ? std::next(names.begin(), static_cast<std::ptrdiff_t>(index))->c_str()
               : nullptr;
}

void standin_set_driver_version(int version) {
    const Lock lock(state().mutex);
    state().driver_version = version;
}

void standin_set_num_devices(int count) {
    const Lock lock(state().mutex);
    state().num_devices = count < 0 ? 0 : count > max_devices ? max_devices : count;
}

void standin_set_attribute(int device, int attribute, int value) {
    const Lock lock(state().mutex);
    if (is_device(device)) {
        state().devices[device].attributes[attribute] = value;
    }
}

void standin_set_total_bytes(int device, uint64_t bytes) {
    const Lock lock(state().mutex);
    if (is_device(device)) {
        const std::uint64_t used = state().devices[device].used_bytes;
        state().devices[device].total_bytes = bytes < used ? used : bytes;
    }
}

bool standin_set_granularity_bytes(size_t bytes) {
    const Lock lock(state().mutex);
    const bool is_good = bytes >= 4096 && (bytes & (bytes - 1)) == 0;
    if (is_good) {
        state().granularity_bytes = bytes;
    }
    return is_good;
}

size_t standin_num_leaks(const char* kind) {
    const Lock lock(state().mutex);
    size_t count = 0;
    for (const Leak& leak : leaks()) {
        count += kind == nullptr || leak.kind == kind ? 1 : 0;
    }
    return count;
}

const char* standin_describe_leaks() {
    const Lock lock(state().mutex);
    std::string text;
    for (const Leak& leak : leaks()) {
        text += leak.kind + ": " + leak.what + "\n";
    }
    return keep(std::move(text));
}

uint64_t standin_used_bytes(int device) {
    const Lock lock(state().mutex);
    return is_device(device) ? state().devices[device].used_bytes : 0;
}

void standin_set_deferred(bool deferred) {
    const Lock lock(state().mutex);
    state().deferred = deferred;
    if (!deferred) {
        finish_all();
    }
}

size_t standin_num_pending() {
    const Lock lock(state().mutex);
    size_t pending = 0;
    for (const auto& [handle, stream] : state().streams.all()) {
        pending += stream->queue.size();
    }
    for (const auto& orphan : state().orphans) {
        pending += orphan->queue.size();
    }
    for (const auto& [handle, context] : state().contexts.all()) {
        pending += context->stream->queue.size();
    }
    return pending;
}

void standin_set_protected(bool protect) {
    const Lock lock(state().mutex);
    state().protect = protect;
    apply_protection();
}

size_t standin_num_violations() {
    const Lock lock(state().mutex);
    check_all_guards();
    return state().violations.size();
}

const char* standin_describe_violations() {
    const Lock lock(state().mutex);
    std::string text;
    for (const std::string& violation : state().violations) {
        text += violation + "\n";
    }
    return keep(std::move(text));
}
