// Device memory of cuMemAlloc, pinned host memory, what pointers are, and protection.
#include "work.h"

#include <cstdlib>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

namespace standin {

namespace {

// Addresses are multiples of this and of nothing more, so that nobody relies on page alignment.
constexpr std::size_t alignment_bytes = 256;
constexpr unsigned char guard_byte = 0xC7;

std::size_t page_bytes() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

bool is_device_memory(CUdeviceptr address, std::size_t bytes, int device) {
    if (bytes == 0) {
        return true;
    }
    auto& plain = state().plain;
    const auto found = at_or_before(plain, address);
    if (found != plain.end() &&
        lies_within(address, bytes, found->first, found->second.bytes)) {
        return device == any_device || found->second.context->device == device;
    }
    auto& mappings = state().mappings;
    while (bytes > 0) {  // a range may span mappings that lie next to each other
        const auto part = at_or_before(mappings, address);
        if (part == mappings.end() || !lies_within(address, 1, part->first, part->second.bytes)) {
            return false;
        }
        const auto& devices = part->second.devices;
        if (devices.empty() || (device != any_device && devices.count(device) == 0)) {
            return false;
        }
        const std::size_t rest = part->second.bytes - (address - part->first);
        const std::size_t step = rest < bytes ? rest : bytes;
        address += step;
        bytes -= step;
    }
    return true;
}

bool is_pinned(const void* address, std::size_t bytes) {
    const auto value = reinterpret_cast<CUdeviceptr>(address);
    auto& pinned = state().pinned;
    const auto found = at_or_before(pinned, value);
    return found != pinned.end() && lies_within(value, bytes, found->first, found->second.bytes);
}

int host_protection() {
    return state().protect && state().open == 0 ? PROT_NONE : PROT_READ | PROT_WRITE;
}

void apply_protection() {
    const int protection = host_protection();
    for (const auto& [address, plain] : state().plain) {
        mprotect(plain.pages, plain.pages_bytes, protection);
    }
    for (const auto& [address, mapping] : state().mappings) {
        if (!mapping.devices.empty()) {
            mprotect(reinterpret_cast<void*>(address), mapping.bytes, protection);
        }
    }
}

OpenMemory::OpenMemory() {
    if (state().open++ == 0 && state().protect) {
        apply_protection();
    }
}

OpenMemory::~OpenMemory() {
    if (--state().open == 0 && state().protect) {
        apply_protection();
    }
}

namespace {

// The bytes of the accessible pages that are not the caller's must be as they were.
void check_guards(CUdeviceptr address, Plain& plain) {
    if (plain.overrun) {
        return;
    }
    const OpenMemory open;
    const auto* const begin = plain.pages;
    const auto* const first = reinterpret_cast<const unsigned char*>(address);
    for (const unsigned char* byte = begin; byte < begin + plain.pages_bytes; ++byte) {
        if (byte == first) {
            byte += plain.bytes;
            if (byte == begin + plain.pages_bytes) {
                break;
            }
        }
        if (*byte != guard_byte) {
            plain.overrun = true;
            state().violations.push_back(
                "device memory of " + std::to_string(plain.bytes) + " bytes: byte " +
                std::to_string(byte - first) + " outside of it was overwritten");
            return;
        }
    }
}

CUresult allocate(CUdeviceptr* address, std::size_t bytes) {
    const CUcontext context = current_context();
    Device& device = state().devices[context->device];
    if (bytes == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (bytes > device.total_bytes || device.used_bytes > device.total_bytes - bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const std::size_t page = page_bytes();
    const std::size_t pages_bytes = round_up(bytes + alignment_bytes, page);
    void* const mapped = mmap(nullptr, pages_bytes + 2 * page, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    auto* const pages = static_cast<unsigned char*>(mapped) + page;
    mprotect(pages, pages_bytes, PROT_READ | PROT_WRITE);
    unsigned char* const first = pages + alignment_bytes;
    std::memset(pages, guard_byte, alignment_bytes);
    std::memset(first, fresh_byte, bytes);
    std::memset(first + bytes, guard_byte, pages_bytes - alignment_bytes - bytes);
    mprotect(pages, pages_bytes, host_protection());
    *address = reinterpret_cast<CUdeviceptr>(first);
    state().plain.emplace(*address, Plain{bytes, context, pages, pages_bytes});
    device.used_bytes += bytes;
    return CUDA_SUCCESS;
}

// The addresses stay reserved, so that whoever uses them later faults.
CUresult release(CUdeviceptr address) {
    const auto found = state().plain.find(address);
    if (found == state().plain.end()) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    check_guards(address, found->second);
    const Plain plain = found->second;
    mmap(plain.pages, plain.pages_bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    state().devices[plain.context->device].used_bytes -= plain.bytes;
    state().plain.erase(found);
    return CUDA_SUCCESS;
}

struct Range {
    CUdeviceptr start;
    std::size_t bytes;
    CUcontext context;  // null for virtual memory
    int device;
    unsigned type;
};

bool find_range(CUdeviceptr address, Range* range) {
    auto& all = state();
    const auto plain = at_or_before(all.plain, address);
    if (plain != all.plain.end() && lies_within(address, 1, plain->first, plain->second.bytes)) {
        const Plain& found = plain->second;
        *range = {plain->first, found.bytes, found.context, found.context->device,
                  CU_MEMORYTYPE_DEVICE};
        return true;
    }
    const auto pinned = at_or_before(all.pinned, address);
    if (pinned != all.pinned.end() &&
        lies_within(address, 1, pinned->first, pinned->second.bytes)) {
        const Pinned& found = pinned->second;
        *range = {pinned->first, found.bytes, found.context, found.context->device,
                  CU_MEMORYTYPE_HOST};
        return true;
    }
    const auto mapping = at_or_before(all.mappings, address);
    if (mapping != all.mappings.end() &&
        lies_within(address, 1, mapping->first, mapping->second.bytes)) {
        const Mapping& found = mapping->second;
        *range = {mapping->first, found.bytes, nullptr,
                  all.physical.at(found.physical).properties.location.id, CU_MEMORYTYPE_DEVICE};
        return true;
    }
    return false;
}

template <typename T>
CUresult give(void* to, T value) {
    std::memcpy(to, &value, sizeof(value));
    return CUDA_SUCCESS;
}

CUresult pointer_attribute(void* value, int attribute, CUdeviceptr address) {
    Range range = {};
    if (!find_range(address, &range)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (attribute) {
        case CU_POINTER_ATTRIBUTE_CONTEXT:
            return give(value, range.context);
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
            return give(value, range.type);
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
            return give(value, address);
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            return range.type == CU_MEMORYTYPE_HOST ? give(value, address)
                                                    : CUDA_ERROR_INVALID_VALUE;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            return give(value, range.device);
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
            return give(value, range.start);
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
            return give(value, range.bytes);
        default:
            return CUDA_ERROR_INVALID_VALUE;
    }
}

}  // namespace

void check_all_guards() {
    for (auto& [address, plain] : state().plain) {
        check_guards(address, plain);
    }
}

void release_all_memory() {
    while (!state().plain.empty()) {
        release(state().plain.begin()->first);
    }
    for (const auto& [address, pinned] : state().pinned) {
        std::free(reinterpret_cast<void*>(address));
    }
    state().pinned.clear();
}

}  // namespace standin

using namespace standin;

DRIVER_FUNCTION(cuMemGetInfo_v2, std::size_t* free_bytes, std::size_t* total_bytes) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        const Device& device = state().devices[current_context()->device];
        *free_bytes = device.total_bytes - device.used_bytes;
        *total_bytes = device.total_bytes;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuMemAlloc_v2, CUdeviceptr* address, std::size_t bytes) {
    return driver_call(__func__, NEEDS_CONTEXT | UNSAFE_IN_CAPTURE,
                       [&] { return allocate(address, bytes); });
}

// Waits for all work of the device, as drivers do.
DRIVER_FUNCTION(cuMemFree_v2, CUdeviceptr address) {
    return driver_call(__func__, NEEDS_CONTEXT | GIVES_BACK | UNSAFE_IN_CAPTURE, [&] {
        if (address == 0) {
            return CUDA_SUCCESS;
        }
        const auto found = state().plain.find(address);
        if (found == state().plain.end()) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        finish_device(found->second.context->device);
        return release(address);
    });
}

DRIVER_FUNCTION(cuMemGetAddressRange_v2, CUdeviceptr* base, std::size_t* bytes,
                CUdeviceptr address) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        Range range = {};
        if (!find_range(address, &range)) {
            return CUDA_ERROR_NOT_FOUND;
        }
        if (base != nullptr) {
            *base = range.start;
        }
        if (bytes != nullptr) {
            *bytes = range.bytes;
        }
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuMemHostAlloc, void** address, std::size_t bytes, unsigned flags) {
    return driver_call(__func__, NEEDS_CONTEXT | UNSAFE_IN_CAPTURE, [&] {
        constexpr unsigned known_flags = 7;  // portable, device map, write-combined
        if (bytes == 0 || (flags & ~known_flags) != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (bytes > SIZE_MAX / 2) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *address = std::aligned_alloc(page_bytes(), round_up(bytes, page_bytes()));
        if (*address == nullptr) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        std::memset(*address, fresh_byte, bytes);
        state().pinned.emplace(reinterpret_cast<CUdeviceptr>(*address),
                               Pinned{bytes, current_context()});
        return CUDA_SUCCESS;
    });
}

// Does not wait: work that still needs the memory finds it gone.
DRIVER_FUNCTION(cuMemFreeHost, void* address) {
    return driver_call(__func__, NEEDS_CONTEXT | GIVES_BACK | UNSAFE_IN_CAPTURE, [&] {
        if (state().pinned.erase(reinterpret_cast<CUdeviceptr>(address)) == 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        std::free(address);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuMemHostGetDevicePointer_v2, CUdeviceptr* device, void* host, unsigned flags) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        if (flags != 0 || !is_pinned(host, 1)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        *device = reinterpret_cast<CUdeviceptr>(host);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuPointerGetAttribute, void* value, int attribute, CUdeviceptr address) {
    return driver_call(__func__, NEEDS_INIT,
                       [&] { return pointer_attribute(value, attribute, address); });
}

// Unlike the above, leaves zeroes for what a pointer does not have.
DRIVER_FUNCTION(cuPointerGetAttributes, unsigned count, int* attributes, void** values,
                CUdeviceptr address) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        for (unsigned i = 0; i < count; ++i) {
            if (pointer_attribute(values[i], attributes[i], address) == CUDA_SUCCESS) {
                continue;
            }
            const bool is_int = attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ||
                                attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
            std::memset(values[i], 0, is_int ? sizeof(int) : sizeof(void*));
        }
        return CUDA_SUCCESS;
    });
}
