// Handles that destroy themselves, and calls that must succeed, for tests of the C interface.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_API_H
#define KVPAGES_CPP_TESTS_SUPPORT_API_H

#include <kvpages/kvpages.h>

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace support {

template <typename Handle, void (*destroy)(Handle*)>
struct Destroy {
    void operator()(Handle* handle) const { destroy(handle); }
};

using Backend = std::unique_ptr<kvpages_backend, Destroy<kvpages_backend, kvpages_backend_destroy>>;
using Model = std::unique_ptr<kvpages_model, Destroy<kvpages_model, kvpages_model_destroy>>;
using Plan = std::unique_ptr<kvpages_plan, Destroy<kvpages_plan, kvpages_plan_destroy>>;
using Memory = std::unique_ptr<kvpages_memory, Destroy<kvpages_memory, kvpages_memory_destroy>>;
using Cache = std::unique_ptr<kvpages_cache, Destroy<kvpages_cache, kvpages_cache_destroy>>;
using Ops = std::unique_ptr<kvpages_ops, Destroy<kvpages_ops, kvpages_ops_destroy>>;

// A call that the test needs to go on; a test that throws has failed.
inline void must(std::int32_t status) {
    if (status == KVPAGES_STATUS_OK) {
        return;
    }
    const std::string message = kvpages_last_error_message();
    const std::string kind = kvpages_last_error_kind();
    throw std::runtime_error(kvpages_status_name(status) + (" (" + kind + "): ") + message);
}

// --- specs -------------------------------------------------------------------

inline kvpages_spec attention(std::uint32_t kind, std::uint64_t block_size, std::uint64_t heads,
                              std::uint64_t head_size, std::uint32_t dtype = KVPAGES_DTYPE_F16) {
    kvpages_spec spec = KVPAGES_SPEC_INIT;
    spec.kind = kind;
    spec.dtype = dtype;
    spec.block_size = block_size;
    spec.num_kv_heads = heads;
    spec.head_size = head_size;
    return spec;
}

inline kvpages_spec full(std::uint64_t block_size, std::uint64_t heads, std::uint64_t head_size,
                         std::uint32_t dtype = KVPAGES_DTYPE_F16) {
    return attention(KVPAGES_SPEC_KIND_FULL_ATTENTION, block_size, heads, head_size, dtype);
}

inline kvpages_spec sliding(std::uint64_t window, std::uint64_t block_size, std::uint64_t heads,
                            std::uint64_t head_size, std::uint32_t dtype = KVPAGES_DTYPE_F16) {
    kvpages_spec spec =
        attention(KVPAGES_SPEC_KIND_SLIDING_WINDOW, block_size, heads, head_size, dtype);
    spec.sliding_window = window;
    return spec;
}

inline kvpages_spec mla(std::uint64_t block_size, std::uint64_t head_size,
                        std::uint32_t dtype = KVPAGES_DTYPE_F16) {
    return attention(KVPAGES_SPEC_KIND_MLA, block_size, 1, head_size, dtype);
}

// A page of one-byte elements in one head and one token, so that any even number of bytes can be
// had.
inline kvpages_spec page_of(std::uint64_t bytes, std::uint64_t block_size = 1) {
    return full(block_size, 1, bytes / (2 * block_size), KVPAGES_DTYPE_U8);
}

// A state layer; its arrays are this object's.
class State {
public:
    State& add(std::uint32_t dtype, const std::vector<std::uint64_t>& shape) {
        dtypes_.push_back(dtype);
        ndims_.push_back(static_cast<std::uint32_t>(shape.size()));
        dims_.insert(dims_.end(), shape.begin(), shape.end());
        return *this;
    }
    State& padded(std::uint64_t bytes) {
        padded_ = bytes;
        return *this;
    }
    State& block(std::uint64_t tokens) {
        block_size_ = tokens;
        return *this;
    }

    kvpages_spec spec() const {
        kvpages_spec spec = KVPAGES_SPEC_INIT;
        spec.kind = KVPAGES_SPEC_KIND_STATE;
        spec.block_size = block_size_;
        spec.page_size_padded_bytes = padded_;
        spec.state_dtypes = dtypes_.data();
        spec.num_state_dtypes = dtypes_.size();
        spec.state_ndims = ndims_.data();
        spec.num_state_shapes = ndims_.size();
        spec.state_dims = dims_.data();
        spec.num_state_dims = dims_.size();
        spec.state_kind = KVPAGES_STATE_KIND_MAMBA2;
        return spec;
    }

private:
    std::vector<std::uint32_t> dtypes_;
    std::vector<std::uint32_t> ndims_;
    std::vector<std::uint64_t> dims_;
    std::uint64_t padded_ = 0;
    std::uint64_t block_size_ = 16;
};

inline kvpages_spec_info describe(const kvpages_spec& spec) {
    kvpages_spec_info info = KVPAGES_SPEC_INFO_INIT;
    must(kvpages_spec_describe(&spec, &info));
    return info;
}

inline std::uint64_t page_bytes(const kvpages_spec& spec) { return describe(spec).page_size_bytes; }

// --- backends ----------------------------------------------------------------

// A backend of our own. By default it takes every kernel block size and any padding.
struct BackendOptions {
    std::string name = "kernels";
    std::string layout;        // empty: state layers only
    std::string memory_order;  // empty: as listed
    std::vector<std::uint64_t> sizes;
    std::vector<std::uint64_t> multiples{1};
    std::uint64_t num_kv_heads = 0;
    std::uint64_t alignment = 0;
    std::uint32_t index_bits = 0;
    std::uint32_t flags = KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE;
};

inline std::int32_t try_backend(const BackendOptions& options, kvpages_backend** out) {
    kvpages_backend_config config = KVPAGES_BACKEND_CONFIG_INIT;
    config.name = options.name.c_str();
    config.layout = options.layout.empty() ? nullptr : options.layout.c_str();
    config.memory_order = options.memory_order.empty() ? nullptr : options.memory_order.c_str();
    config.kernel_block_sizes = options.sizes.data();
    config.num_kernel_block_sizes = options.sizes.size();
    config.kernel_block_multiples = options.multiples.data();
    config.num_kernel_block_multiples = options.multiples.size();
    config.num_kv_heads = options.num_kv_heads;
    config.alignment_bytes = options.alignment;
    config.index_bits = options.index_bits;
    config.flags = options.flags;
    return kvpages_backend_create(&config, out);
}

inline Backend backend(const BackendOptions& options) {
    kvpages_backend* raw = nullptr;
    must(try_backend(options, &raw));
    return Backend(raw);
}

inline Backend backend(const std::string& layout, const std::string& memory_order = "") {
    BackendOptions options;
    options.layout = layout;
    options.memory_order = memory_order;
    return backend(options);
}

// A backend that takes only the kernel block sizes named.
inline Backend backend_of_sizes(const std::string& layout,
                                const std::vector<std::uint64_t>& sizes) {
    BackendOptions options;
    options.layout = layout;
    options.sizes = sizes;
    options.multiples.clear();
    return backend(options);
}

inline Backend preset(std::uint32_t number) {
    kvpages_backend* raw = nullptr;
    must(kvpages_backend_create_preset(number, &raw));
    return Backend(raw);
}

inline Backend state_backend() { return preset(KVPAGES_PRESET_MAMBA2); }

constexpr const char* kv_first = "kv | block | token | head | content";
constexpr const char* block_first = "block | kv | token | head | content";
constexpr const char* packed_nhd = "block | token | head | kv*content";
constexpr const char* latent = "block | token | content";

// --- models ------------------------------------------------------------------

inline Model model() {
    kvpages_model* raw = nullptr;
    must(kvpages_model_create(&raw));
    return Model(raw);
}

inline std::int32_t try_add(const Model& model, const std::string& name, const kvpages_spec* spec,
                            const kvpages_backend* backend, const char* target = nullptr,
                            std::uint32_t num_query_heads = 0) {
    kvpages_layer layer = KVPAGES_LAYER_INIT;
    layer.name = name.c_str();
    layer.spec = spec;
    layer.backend = backend;
    layer.shares_with = target;
    layer.num_query_heads = num_query_heads;
    return kvpages_model_add_layer(model.get(), &layer);
}

inline void add(const Model& model, const std::string& name, const kvpages_spec& spec,
                const Backend& backend, std::uint32_t num_query_heads = 0) {
    must(try_add(model, name, &spec, backend.get(), nullptr, num_query_heads));
}

inline void add(const Model& model, const std::string& name, const kvpages_spec& spec) {
    must(try_add(model, name, &spec, nullptr));
}

inline void share(const Model& model, const std::string& name, const std::string& target,
                  const Backend& backend) {
    must(try_add(model, name, nullptr, backend.get(), target.c_str()));
}

inline void share(const Model& model, const std::string& name, const std::string& target) {
    must(try_add(model, name, nullptr, nullptr, target.c_str()));
}

// --- plans -------------------------------------------------------------------

// The rules of the reference, whose numbers tests know. KVPAGES_TEST_POLICY=compact in the
// environment runs those that do not depend on them by the other policy.
inline std::uint32_t policy() {
    const char* const name = std::getenv("KVPAGES_TEST_POLICY");
    const bool is_compact = name != nullptr && std::string(name) == "compact";
    return is_compact ? KVPAGES_POLICY_COMPACT : KVPAGES_POLICY_REFERENCE;
}

inline kvpages_plan_config plan_config(std::uint64_t max_model_len = 1) {
    kvpages_plan_config config = KVPAGES_PLAN_CONFIG_INIT;
    config.policy = policy();
    config.max_model_len = max_model_len;
    return config;
}

inline std::int32_t try_plan(const std::vector<kvpages_worker>& workers,
                             const kvpages_plan_config& config, kvpages_plan** out,
                             kvpages_shortfall* shortfall = nullptr) {
    return kvpages_plan_create(&config, workers.data(), workers.size(), out, shortfall);
}

inline Plan plan(const std::vector<kvpages_worker>& workers, const kvpages_plan_config& config) {
    kvpages_plan* raw = nullptr;
    must(try_plan(workers, config, &raw));
    return Plan(raw);
}

inline Plan plan(const Model& model, std::int64_t memory_bytes,
                 const kvpages_plan_config& config = plan_config()) {
    return plan({{model.get(), memory_bytes}}, config);
}

// A plan of exactly that many blocks, whatever a request needs.
inline Plan plan_of_blocks(const Model& model, std::uint64_t num_blocks,
                           std::uint32_t flags = 0) {
    kvpages_plan_config config = plan_config();
    config.flags = flags | KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    config.num_blocks_override = num_blocks;
    return plan(model, 0, config);
}

// A plan as an engine makes it itself.
struct Parts {
    struct Group {
        std::vector<std::string> layers;
        std::uint64_t flags = 0;
    };
    struct Tensor {
        std::uint64_t size = 0;
        std::vector<std::string> layers;
        std::uint64_t offset = 0;
        std::uint64_t stride = 0;
    };
    std::uint64_t num_blocks = 0;
    std::vector<Group> groups;
    std::vector<Tensor> tensors;
    std::vector<std::uint64_t> kernel_block_sizes;  // empty: chosen
};

inline std::int32_t try_parts(const Model& model, const Parts& parts, kvpages_plan** out) {
    std::vector<std::vector<const char*>> names;
    names.reserve(parts.groups.size() + parts.tensors.size());
    const auto pointers = [&names](const std::vector<std::string>& layers) {
        names.emplace_back();
        for (const std::string& layer : layers) {
            names.back().push_back(layer.c_str());
        }
        return names.back().data();
    };
    std::vector<kvpages_part_group> groups;
    for (const Parts::Group& group : parts.groups) {
        groups.push_back({pointers(group.layers), group.layers.size(), group.flags});
    }
    std::vector<kvpages_part_tensor> tensors;
    for (const Parts::Tensor& tensor : parts.tensors) {
        tensors.push_back({tensor.size, tensor.offset, tensor.stride, pointers(tensor.layers),
                           tensor.layers.size()});
    }
    kvpages_plan_parts c_parts = KVPAGES_PLAN_PARTS_INIT;
    c_parts.num_blocks = parts.num_blocks;
    c_parts.groups = groups.data();
    c_parts.num_groups = groups.size();
    c_parts.tensors = tensors.data();
    c_parts.num_tensors = tensors.size();
    if (!parts.kernel_block_sizes.empty()) {
        c_parts.kernel_block_sizes = parts.kernel_block_sizes.data();
        c_parts.num_kernel_block_sizes = parts.kernel_block_sizes.size();
    }
    return kvpages_plan_create_from_parts(model.get(), &c_parts, out);
}

inline Plan plan_from(const Model& model, const Parts& parts) {
    kvpages_plan* raw = nullptr;
    must(try_parts(model, parts, &raw));
    return Plan(raw);
}

inline kvpages_worker_info worker_info(const Plan& plan, std::size_t worker = 0) {
    kvpages_worker_info info = KVPAGES_WORKER_INFO_INIT;
    must(kvpages_plan_get_worker(plan.get(), worker, &info));
    return info;
}

inline kvpages_group_info group_info(const Plan& plan, std::size_t group, std::size_t worker = 0) {
    kvpages_group_info info = KVPAGES_GROUP_INFO_INIT;
    must(kvpages_plan_get_group(plan.get(), worker, group, &info));
    return info;
}

inline kvpages_spec group_spec(const Plan& plan, std::size_t group, std::size_t index = 0,
                               std::size_t worker = 0) {
    kvpages_spec spec = KVPAGES_SPEC_INIT;
    must(kvpages_plan_get_group_spec(plan.get(), worker, group, index, &spec, nullptr));
    return spec;
}

inline kvpages_tensor_info tensor_info(const Plan& plan, std::size_t tensor,
                                       std::size_t worker = 0) {
    kvpages_tensor_info info = KVPAGES_TENSOR_INFO_INIT;
    must(kvpages_plan_get_tensor(plan.get(), worker, tensor, &info));
    return info;
}

inline std::vector<std::string> group_layers(const Plan& plan, std::size_t group,
                                             std::size_t worker = 0) {
    std::vector<std::string> names;
    while (const char* name =
               kvpages_plan_group_layer_name(plan.get(), worker, group, names.size())) {
        names.emplace_back(name);
    }
    return names;
}

inline std::vector<std::string> tensor_layers(const Plan& plan, std::size_t tensor,
                                              std::size_t worker = 0) {
    std::vector<std::string> names;
    while (const char* name =
               kvpages_plan_tensor_layer_name(plan.get(), worker, tensor, names.size())) {
        names.emplace_back(name);
    }
    return names;
}

inline std::string explanation(const Plan& plan, std::uint32_t format) {
    std::size_t length = 0;
    const std::int32_t asked =
        kvpages_plan_copy_explanation(plan.get(), format, nullptr, 0, &length);
    if (asked != KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        must(asked);
    }
    std::string text(length + 1, '\0');
    must(kvpages_plan_copy_explanation(plan.get(), format, &text[0], text.size(), &length));
    text.resize(length);
    return text;
}

// --- memory and caches -------------------------------------------------------

inline Memory host_memory() {
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_host(&raw));
    return Memory(raw);
}

inline Memory adopted_memory(void* data, std::size_t bytes) {
    kvpages_memory* raw = nullptr;
    must(kvpages_memory_create_adopted(data, bytes, &raw));
    return Memory(raw);
}

inline std::int32_t try_cache(const Plan& plan, const Memory& memory, kvpages_cache** out,
                              std::uint64_t* needed = nullptr, std::size_t worker = 0) {
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.worker = worker;
    config.memory = memory.get();
    return kvpages_cache_create(plan.get(), &config, out, needed);
}

inline Cache cache(const Plan& plan, const Memory& memory, std::size_t worker = 0) {
    kvpages_cache* raw = nullptr;
    must(try_cache(plan, memory, &raw, nullptr, worker));
    return Cache(raw);
}

inline Cache cache(const Plan& plan) { return cache(plan, host_memory()); }

inline std::size_t find(const Cache& cache, const std::string& name) {
    std::size_t layer = 0;
    must(kvpages_cache_find_layer(cache.get(), name.c_str(), &layer));
    return layer;
}

inline kvpages_tensor view(const Cache& cache, std::size_t layer, std::size_t view = 0) {
    kvpages_tensor tensor{};
    must(kvpages_cache_get_view(cache.get(), layer, view, &tensor));
    return tensor;
}

inline kvpages_tensor view(const Cache& cache, const std::string& name, std::size_t state = 0) {
    return view(cache, find(cache, name), state);
}

inline kvpages_view_report report(const Cache& cache, std::size_t layer, std::size_t view = 0) {
    kvpages_view_report out = KVPAGES_VIEW_REPORT_INIT;
    must(kvpages_cache_get_report(cache.get(), layer, view, &out));
    return out;
}

inline kvpages_view_report report(const Cache& cache, const std::string& name,
                                  std::size_t state = 0) {
    return report(cache, find(cache, name), state);
}

inline kvpages_allocation allocation(const Cache& cache, std::size_t number) {
    kvpages_allocation out{};
    must(kvpages_cache_get_allocation(cache.get(), number, &out));
    return out;
}

inline std::vector<std::int64_t> shape(const kvpages_tensor& tensor) {
    return {tensor.shape, tensor.shape + tensor.ndim};
}

inline std::vector<std::int64_t> strides(const kvpages_tensor& tensor) {
    return {tensor.strides, tensor.strides + tensor.ndim};
}

}  // namespace support

#endif
