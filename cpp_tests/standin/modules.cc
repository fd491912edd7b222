// Modules and kernels. Any image loads; its functions are the host's kvhost_<name> of this program.
#include "work.h"

#include <cstring>

#include <dlfcn.h>

namespace standin {

namespace {

constexpr std::size_t max_parameter_bytes = 4096;
constexpr unsigned max_shared_bytes = 48 << 10;

// Kernels of the program (tests bring their own) or of this library.
void* find_symbol(const std::string& name) {
    if (void* const found = dlsym(RTLD_DEFAULT, name.c_str())) {
        return found;
    }
    static void* const self = [] {
        Dl_info info = {};
        dladdr(reinterpret_cast<void*>(&cuInit), &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    return self == nullptr ? nullptr : dlsym(self, name.c_str());
}

bool find_function(CUfunc_st* function) {
    void* const run = find_symbol("kvhost_" + function->name);
    // {count, bytes of parameter 0, ...}
    const auto* const sizes =
        static_cast<const unsigned*>(find_symbol("kvsizes_" + function->name));
    if (run == nullptr || sizes == nullptr) {
        return false;
    }
    function->run = reinterpret_cast<CUfunc_st::Run>(run);
    function->parameter_bytes.assign(sizes + 1, sizes + 1 + sizes[0]);
    return true;
}

CUresult load(CUmodule* module, const void* image) {
    if (image == nullptr) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    auto made = std::make_shared<CUmod_st>();
    made->context = current_context();
    *module = state().modules.add(std::move(made));
    return CUDA_SUCCESS;
}

CUresult get_function(CUfunction* function, CUmodule module, const char* name) {
    const auto found = state().modules.find(module);
    if (found == nullptr) {
        return CUDA_ERROR_INVALID_HANDLE;
    }
    CUfunc_st wanted;
    wanted.module = module;
    wanted.name = name;
    if (!find_function(&wanted)) {
        return CUDA_ERROR_NOT_FOUND;
    }
    *function = &found->functions.emplace(name, std::move(wanted)).first->second;
    return CUDA_SUCCESS;
}

bool is_function(CUfunction function) {
    for (const auto& [module, kept] : state().modules.all()) {
        for (const auto& [name, candidate] : kept->functions) {
            if (&candidate == function) {
                return true;
            }
        }
    }
    return false;
}

struct Shape {
    unsigned grid[3];
    unsigned block[3];
};

bool is_launchable(const Shape& shape) {
    const auto& [grid, block] = shape;
    const auto threads = std::uint64_t{block[0]} * block[1] * block[2];
    return grid[0] >= 1 && grid[0] <= 2147483647u && grid[1] >= 1 && grid[1] <= 65535 &&
           grid[2] >= 1 && grid[2] <= 65535 && threads >= 1 && threads <= 1024 &&
           block[2] <= 64;
}

using Parameters = std::vector<std::vector<unsigned char>>;

// A device's kernel sees parameters as they were at the launch.
bool copy_parameters(const CUfunc_st& function, void** from, Parameters* to) {
    std::size_t total = 0;
    for (std::size_t i = 0; i < function.parameter_bytes.size(); ++i) {
        if (from == nullptr || from[i] == nullptr) {
            return false;
        }
        const auto* const bytes = static_cast<const unsigned char*>(from[i]);
        to->emplace_back(bytes, bytes + function.parameter_bytes[i]);
        total += function.parameter_bytes[i];
    }
    return total <= max_parameter_bytes;
}

Operation kernel(const CUfunc_st& function, const Shape& shape, Parameters parameters) {
    const CUcontext context = current_context();
    return [=, run = function.run, name = function.name]() mutable {
        std::vector<void*> pointers;
        for (auto& parameter : parameters) {
            pointers.push_back(parameter.data());
        }
        const void* fault = nullptr;
        if (!run_guarded([&] { run(shape.grid, shape.block, pointers.data()); }, &fault)) {
            break_context(context, "kernel " + name + ": touched memory that is not there, at " +
                                       std::to_string(reinterpret_cast<std::uintptr_t>(fault)));
        }
    };
}

}  // namespace

}  // namespace standin

using namespace standin;

DRIVER_FUNCTION(cuModuleLoadData, CUmodule* module, const void* image) {
    return driver_call(__func__, NEEDS_CONTEXT | UNSAFE_IN_CAPTURE,
                       [&] { return load(module, image); });
}

DRIVER_FUNCTION(cuModuleLoadDataEx, CUmodule* module, const void* image, unsigned num_options,
                int* options, void** values) {
    static_cast<void>(num_options), static_cast<void>(options), static_cast<void>(values);
    return driver_call(__func__, NEEDS_CONTEXT | UNSAFE_IN_CAPTURE,
                       [&] { return load(module, image); });
}

DRIVER_FUNCTION(cuModuleUnload, CUmodule module) {
    return driver_call(__func__, NEEDS_CONTEXT | GIVES_BACK | UNSAFE_IN_CAPTURE, [&] {
        const auto found = state().modules.find(module);
        if (found == nullptr) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        finish_context(found->context);
        state().modules.remove(module);
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuModuleGetFunction, CUfunction* function, CUmodule module, const char* name) {
    return driver_call(__func__, NEEDS_CONTEXT,
                       [&] { return get_function(function, module, name); });
}

DRIVER_FUNCTION(cuFuncGetAttribute, int* value, int attribute, CUfunction function) {
    return driver_call(__func__, NEEDS_INIT, [&] {
        if (!is_function(function)) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        constexpr int max_threads_per_block = 0;
        *value = attribute == max_threads_per_block ? 1024 : 0;
        return CUDA_SUCCESS;
    });
}

DRIVER_FUNCTION(cuLaunchKernel, CUfunction function, unsigned grid_x, unsigned grid_y,
                unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                unsigned shared_bytes, CUstream stream, void** parameters, void** extra) {
    return driver_call(__func__, NEEDS_CONTEXT, [&] {
        if (!is_function(function) || function->module->context != current_context()) {
            return CUDA_ERROR_INVALID_HANDLE;
        }
        const Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}};
        Parameters copied;
        if (!is_launchable(shape) || shared_bytes > max_shared_bytes || extra != nullptr ||
            !copy_parameters(*function, parameters, &copied)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        return submit(stream, kernel(*function, shape, std::move(copied)));
    });
}
