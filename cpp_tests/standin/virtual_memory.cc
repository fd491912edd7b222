// Virtual memory: reserved addresses, physical memory in files, and mappings of one into the other.
#include "work.h"

#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

namespace standin {

namespace {

bool is_granular(std::size_t bytes) {
    return bytes != 0 && bytes % state().granularity_bytes == 0;
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

bool fill_fresh(int file, std::size_t bytes) {
    if (ftruncate(file, static_cast<off_t>(bytes)) != 0) {
        return false;
    }
    void* const mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        return false;
    }
    std::memset(mapped, fresh_byte, bytes);
    munmap(mapped, bytes);
    return true;
}

void release_if_unused(CUmemGenericAllocationHandle handle) {
    const auto found = state().physical.find(handle);
    const Physical& physical = found->second;
    if (physical.handles > 0 || physical.mappings > 0) {
        return;
    }
    close(physical.file);
    state().devices[physical.properties.location.id].used_bytes -= physical.bytes;
    state().physical.erase(found);
}

// Whether mappings fill the range, each of them wholly inside.
bool is_whole_mappings(CUdeviceptr address, std::size_t bytes) {
    while (bytes > 0) {
        const auto found = state().mappings.find(address);
        if (found == state().mappings.end() || found->second.bytes > bytes) {
            return false;
        }
        address += found->second.bytes;
        bytes -= found->second.bytes;
    }
    return true;
}

bool overlaps_a_mapping(CUdeviceptr address, std::size_t bytes) {
    auto& mappings = state().mappings;
    const auto last = at_or_before(mappings, address + bytes - 1);
    return last != mappings.end() && last->first + last->second.bytes > address;
}

void unmap(CUdeviceptr address) {
    const auto found = state().mappings.find(address);
    const CUmemGenericAllocationHandle handle = found->second.physical;
    mmap(pointer(address), found->second.bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    state().mappings.erase(found);
    --state().physical.at(handle).mappings;
    release_if_unused(handle);
}

// A place for `bytes` at a multiple of `alignment`; what is mapped around it is given back.
void* reserve(std::size_t bytes, std::size_t alignment) {
    void* const mapped = mmap(nullptr, bytes + alignment, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        return nullptr;
    }
    auto* const begin = static_cast<unsigned char*>(mapped);
    const std::size_t before =
        round_up(reinterpret_cast<std::uintptr_t>(begin), alignment) -
        reinterpret_cast<std::uintptr_t>(begin);
    if (before > 0) {
        munmap(begin, before);
    }
    munmap(begin + before + bytes, alignment - before);
    return begin + before;
}

CUresult check_properties(const CUmemAllocationProp* properties) {
    if (properties == nullptr || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (properties->location.id < 0 || properties->location.id >= state().num_devices) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    const bool known = properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE ||
                       properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return known ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                const CUmemAllocationProp* properties) {
    const CUresult checked = check_properties(properties);
    if (checked != CUDA_SUCCESS) {
        return checked;
    }
    if (!is_granular(bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    Device& device = state().devices[properties->location.id];
    if (bytes > device.total_bytes || device.used_bytes > device.total_bytes - bytes) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const int file = memfd_create("standin", MFD_CLOEXEC);
    if (file < 0 || !fill_fresh(file, bytes)) {
        if (file >= 0) {
            close(file);
        }
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = state().next_physical++;
    state().physical.emplace(*handle, Physical{file, bytes, *properties});
    device.used_bytes += bytes;
    return CUDA_SUCCESS;
}

CUresult map(CUdeviceptr address, std::size_t bytes, CUmemGenericAllocationHandle handle) {
    const auto found = state().physical.find(handle);
    if (found == state().physical.end() || found->second.handles == 0 ||
        found->second.bytes != bytes || address % state().granularity_bytes != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto& reservations = state().reservations;
    const auto reservation = at_or_before(reservations, address);
    if (reservation == reservations.end() ||
        !lies_within(address, bytes, reservation->first, reservation->second) ||
        overlaps_a_mapping(address, bytes)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (mmap(pointer(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.file, 0) ==
        MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    ++found->second.mappings;
    state().mappings.emplace(address, Mapping{bytes, handle, {}});
    return CUDA_SUCCESS;
}

CUresult set_access(CUdeviceptr address, std::size_t bytes, const CUmemAccessDesc& access) {
    const int device = access.location.id;
    if (access.location.type != CU_MEM_LOCATION_TYPE_DEVICE || device < 0 ||
        device >= state().num_devices) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    if (access.flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
        access.flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    auto mapping = state().mappings.find(address);
    for (std::size_t done = 0; done < bytes; done += mapping->second.bytes, ++mapping) {
        auto& devices = mapping->second.devices;
        if (access.flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
            devices.erase(device);
        } else {
            devices.insert(device);
        }
        mprotect(pointer(mapping->first), mapping->second.bytes,
                 devices.empty() ? PROT_NONE : host_protection());
        if (done + mapping->second.bytes >= bytes) {
            break;
        }
    }
    return CUDA_SUCCESS;
}

}  // namespace

void release_all_virtual_memory() {
    auto& all = state();
    while (!all.mappings.empty()) {
        unmap(all.mappings.begin()->first);
    }
    while (!all.physical.empty()) {
        const auto first = all.physical.begin();
        first->second.handles = 0;
        release_if_unused(first->first);
    }
    all.reservations.clear();  // their addresses stay inaccessible
}

}  // namespace standin

using namespace standin;

DRIVER_FUNCTION(cuMemGetAllocationGranularity, std::size_t* bytes,
                const CUmemAllocationProp* properties, int option) {
    static_cast<void>(option);
    return driver_call(__func__, NEEDS_INIT, [&] {
        *bytes = state().granularity_bytes;
        return check_properties(properties);
    });
}

DRIVER_FUNCTION(cuMemAddressReserve, CUdeviceptr* address, std::size_t bytes,
                std::size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    static_cast<void>(wanted);  // a hint
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_granular(bytes) || (alignment & (alignment - 1)) != 0 || flags != 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        const std::size_t least = state().granularity_bytes;
        const std::size_t multiple = alignment > least ? alignment : least;
        void* const place = bytes > SIZE_MAX / 4 ? nullptr : reserve(bytes, multiple);
        if (place == nullptr) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *address = reinterpret_cast<CUdeviceptr>(place);
        state().reservations.emplace(*address, bytes);
        return CUDA_SUCCESS;
    });
}

// The addresses stay inaccessible: they are never given out again.
DRIVER_FUNCTION(cuMemAddressFree, CUdeviceptr address, std::size_t bytes) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        const auto found = state().reservations.find(address);
        if (found == state().reservations.end() || found->second != bytes ||
            overlaps_a_mapping(address, bytes)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        state().reservations.erase(found);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuMemCreate, CUmemGenericAllocationHandle* handle, std::size_t bytes,
                const CUmemAllocationProp* properties, unsigned long long flags) {
    return driver_call(__func__, NEEDS_INIT | UNSAFE_IN_CAPTURE, [&] {
        return flags != 0 ? CUDA_ERROR_INVALID_VALUE : create(handle, bytes, properties);
    });
}

DRIVER_FUNCTION(cuMemRelease, CUmemGenericAllocationHandle handle) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK, [&] {
        const auto found = state().physical.find(handle);
        if (found == state().physical.end() || found->second.handles == 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        --found->second.handles;
        release_if_unused(handle);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuMemMap, CUdeviceptr address, std::size_t bytes, std::size_t offset,
                CUmemGenericAllocationHandle handle, unsigned long long flags) {
    return driver_call(__func__, NEEDS_INIT | UNSAFE_IN_CAPTURE, [&] {
        return flags != 0 || offset != 0 ? CUDA_ERROR_INVALID_VALUE : map(address, bytes, handle);
    });
}

// Does not wait: work that still needs the memory finds it gone.
DRIVER_FUNCTION(cuMemUnmap, CUdeviceptr address, std::size_t bytes) {
    return driver_call(__func__, NEEDS_INIT | GIVES_BACK | UNSAFE_IN_CAPTURE, [&] {
        if (!is_granular(bytes) || !is_whole_mappings(address, bytes)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        for (std::size_t done = 0; done < bytes;) {
            const std::size_t step = state().mappings.at(address + done).bytes;
            unmap(address + done);
            done += step;
        }
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuMemSetAccess, CUdeviceptr address, std::size_t bytes,
                const CUmemAccessDesc* access, std::size_t count) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_granular(bytes) || access == nullptr || count == 0 ||
            !is_whole_mappings(address, bytes)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        for (std::size_t i = 0; i < count; ++i) {
            const CUresult result = set_access(address, bytes, access[i]);
            if (result != CUDA_SUCCESS) {
                return result;
            }
        }
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuMemRetainAllocationHandle, CUmemGenericAllocationHandle* handle, void* address) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        const auto value = reinterpret_cast<CUdeviceptr>(address);
        auto& mappings = state().mappings;
        const auto found = at_or_before(mappings, value);
        if (found == mappings.end() || !lies_within(value, 1, found->first, found->second.bytes)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        *handle = found->second.physical;
        ++state().physical.at(*handle).handles;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuMemGetAllocationPropertiesFromHandle, CUmemAllocationProp* properties,
                CUmemGenericAllocationHandle handle) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        const auto found = state().physical.find(handle);
        if (found == state().physical.end() || found->second.handles == 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        *properties = found->second.properties;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuMemExportToShareableHandle, void* exported, CUmemGenericAllocationHandle handle,
                int handle_type, unsigned long long flags) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        const auto found = state().physical.find(handle);
        if (found == state().physical.end() || flags != 0 ||
            handle_type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
            found->second.properties.requestedHandleTypes != handle_type) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        const int file = dup(found->second.file);
        std::memcpy(exported, &file, sizeof(file));
        return file < 0 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
    });
}
