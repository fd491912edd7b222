/// @file kvpages.hpp
/// @brief The C++17 interface of kvpages: kvpages.h with handles that destroy themselves.
///
/// Header-only; it has no binary interface of its own. Handles are move-only. A call that fails
/// throws kvpages::Error. With KVPAGES_NO_EXCEPTIONS defined before the first include it calls
/// KVPAGES_ON_ERROR(status, message) instead, which aborts unless the engine defines it to
/// something else that does not return.
///
/// Everything kvpages.h says of ownership, threads and units holds here too.
#ifndef KVPAGES_HPP
#define KVPAGES_HPP

#include <kvpages/kvpages.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef KVPAGES_NO_EXCEPTIONS
#ifndef KVPAGES_ON_ERROR
#define KVPAGES_ON_ERROR(status, message) \
    (static_cast<void>(status), static_cast<void>(message), ::std::abort())
#endif
#else
#include <exception>
#include <stdexcept>
#endif

namespace kvpages {

/// Type of one element.
enum class Dtype : std::uint32_t {
    f64 = KVPAGES_DTYPE_F64,
    f32 = KVPAGES_DTYPE_F32,
    f16 = KVPAGES_DTYPE_F16,
    bf16 = KVPAGES_DTYPE_BF16,
    i8 = KVPAGES_DTYPE_I8,
    u8 = KVPAGES_DTYPE_U8,
    i16 = KVPAGES_DTYPE_I16,
    i32 = KVPAGES_DTYPE_I32,
    i64 = KVPAGES_DTYPE_I64,
    boolean = KVPAGES_DTYPE_BOOL,
    f8_e4m3fn = KVPAGES_DTYPE_F8_E4M3FN,
    f8_e5m2 = KVPAGES_DTYPE_F8_E5M2,
    f8_e4m3fnuz = KVPAGES_DTYPE_F8_E4M3FNUZ,
    f8_e5m2fnuz = KVPAGES_DTYPE_F8_E5M2FNUZ,
    f4_e2m1x2 = KVPAGES_DTYPE_F4_E2M1X2,
};

/// How keys and values are quantised.
enum class QuantMode : std::uint32_t {
    none = KVPAGES_QUANT_MODE_NONE,
    fp8_per_tensor = KVPAGES_QUANT_MODE_FP8_PER_TENSOR,
    int8_per_token_head = KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD,
    fp8_per_token_head = KVPAGES_QUANT_MODE_FP8_PER_TOKEN_HEAD,
    int4_per_token_head = KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD,
    nvfp4 = KVPAGES_QUANT_MODE_NVFP4,
};

/// What kind of attention a layer computes.
enum class AttentionKind : std::uint32_t {
    full = KVPAGES_SPEC_KIND_FULL_ATTENTION,
    sink = KVPAGES_SPEC_KIND_SINK_ATTENTION,
    rswa = KVPAGES_SPEC_KIND_RSWA,
    turbo_quant = KVPAGES_SPEC_KIND_TURBO_QUANT,
    mla = KVPAGES_SPEC_KIND_MLA,
    hidden_state = KVPAGES_SPEC_KIND_HIDDEN_STATE,
    sliding_window = KVPAGES_SPEC_KIND_SLIDING_WINDOW,
    sliding_window_mla = KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA,
    chunked_local = KVPAGES_SPEC_KIND_CHUNKED_LOCAL,
    cross = KVPAGES_SPEC_KIND_CROSS_ATTENTION,
    encoder_only = KVPAGES_SPEC_KIND_ENCODER_ONLY,
};

/// What computes a state.
enum class StateKind : std::uint32_t {
    mamba1 = KVPAGES_STATE_KIND_MAMBA1,
    mamba2 = KVPAGES_STATE_KIND_MAMBA2,
    short_conv = KVPAGES_STATE_KIND_SHORT_CONV,
    linear = KVPAGES_STATE_KIND_LINEAR,
    gated_delta_net = KVPAGES_STATE_KIND_GATED_DELTA_NET,
    custom = KVPAGES_STATE_KIND_CUSTOM,
};

/// When a state layer keeps the state of an earlier position.
enum class StateCacheMode : std::uint32_t {
    none = KVPAGES_STATE_CACHE_MODE_NONE,
    align = KVPAGES_STATE_CACHE_MODE_ALIGN,
    all = KVPAGES_STATE_CACHE_MODE_ALL,
};

/// Which rules group layers and unify pages.
enum class Policy : std::uint32_t {
    best = KVPAGES_POLICY_DEFAULT,
    reference = KVPAGES_POLICY_REFERENCE,
    compact = KVPAGES_POLICY_COMPACT,
};

/// A known backend contract.
enum class Preset : std::uint32_t {
    flash_attention_nhd = KVPAGES_PRESET_FLASH_ATTENTION_NHD,
    flash_attention_hnd = KVPAGES_PRESET_FLASH_ATTENTION_HND,
    triton_nhd = KVPAGES_PRESET_TRITON_NHD,
    triton_hnd = KVPAGES_PRESET_TRITON_HND,
    flash_infer_nhd = KVPAGES_PRESET_FLASH_INFER_NHD,
    flash_infer_hnd = KVPAGES_PRESET_FLASH_INFER_HND,
    flash_attention_diff_kv_nhd = KVPAGES_PRESET_FLASH_ATTENTION_DIFF_KV_NHD,
    flash_attention_diff_kv_hnd = KVPAGES_PRESET_FLASH_ATTENTION_DIFF_KV_HND,
    flex_attention = KVPAGES_PRESET_FLEX_ATTENTION,
    cpu_attention = KVPAGES_PRESET_CPU_ATTENTION,
    rocm_attention = KVPAGES_PRESET_ROCM_ATTENTION,
    rocm_aiter_flash_attention = KVPAGES_PRESET_ROCM_AITER_FLASH_ATTENTION,
    rocm_aiter_unified_attention = KVPAGES_PRESET_ROCM_AITER_UNIFIED_ATTENTION,
    hpc_attention = KVPAGES_PRESET_HPC_ATTENTION,
    turbo_quant = KVPAGES_PRESET_TURBO_QUANT,
    sliding_convolution = KVPAGES_PRESET_SLIDING_CONVOLUTION,
    hidden_state = KVPAGES_PRESET_HIDDEN_STATE,
    triton_mla = KVPAGES_PRESET_TRITON_MLA,
    flash_mla = KVPAGES_PRESET_FLASH_MLA,
    flash_mla_sparse = KVPAGES_PRESET_FLASH_MLA_SPARSE,
    flash_infer_mla = KVPAGES_PRESET_FLASH_INFER_MLA,
    flash_infer_mla_sparse = KVPAGES_PRESET_FLASH_INFER_MLA_SPARSE,
    rocm_aiter_mla = KVPAGES_PRESET_ROCM_AITER_MLA,
    rocm_aiter_mla_sparse = KVPAGES_PRESET_ROCM_AITER_MLA_SPARSE,
    deepseek_v32_indexer = KVPAGES_PRESET_DEEPSEEK_V32_INDEXER,
    deepseek_v4_mla = KVPAGES_PRESET_DEEPSEEK_V4_MLA,
    deepseek_v4_indexer = KVPAGES_PRESET_DEEPSEEK_V4_INDEXER,
    deepseek_v4_sliding_window = KVPAGES_PRESET_DEEPSEEK_V4_SLIDING_WINDOW,
    deepseek_v4_compressor = KVPAGES_PRESET_DEEPSEEK_V4_COMPRESSOR,
    mamba1 = KVPAGES_PRESET_MAMBA1,
    mamba2 = KVPAGES_PRESET_MAMBA2,
    short_convolution = KVPAGES_PRESET_SHORT_CONVOLUTION,
    linear_attention = KVPAGES_PRESET_LINEAR_ATTENTION,
    gated_delta_net = KVPAGES_PRESET_GATED_DELTA_NET,
};

#ifndef KVPAGES_NO_EXCEPTIONS
/// A failed call.
class Error : public std::runtime_error {
public:
    /// The calling thread's last error.
    explicit Error(std::int32_t status)
        : std::runtime_error(kvpages_last_error_message()),
          status_(status),
          kind_(kvpages_last_error_kind()) {}
    /// What this header itself refuses.
    Error(std::int32_t status, const std::string& kind, const std::string& message)
        : std::runtime_error(message), status_(status), kind_(kind) {}

    /// One of KVPAGES_STATUS_*.
    std::int32_t status() const noexcept { return status_; }
    /// The precise kind, such as "not_enough_memory".
    const std::string& kind() const noexcept { return kind_; }

private:
    std::int32_t status_;
    std::string kind_;
};
#endif

/// Returns when `status` is OK; otherwise throws the calling thread's last error.
inline void check(std::int32_t status) {
    if (status == KVPAGES_STATUS_OK) return;
#ifdef KVPAGES_NO_EXCEPTIONS
    KVPAGES_ON_ERROR(status, kvpages_last_error_message());
#else
    throw Error(status);
#endif
}

namespace detail {

template <typename Handle, void (*destroy)(Handle*)>
struct Destroy {
    void operator()(Handle* handle) const noexcept { destroy(handle); }
};

template <typename Handle, void (*destroy)(Handle*)>
using Owned = std::unique_ptr<Handle, Destroy<Handle, destroy>>;

/// Refuses an array of another length than the call needs, which C could not see.
inline void check_length(const char* name, std::size_t size, std::size_t needed) {
    if (size == needed) return;
    const std::string message = std::string(name) + " has " + std::to_string(size) +
                                " entries, " + std::to_string(needed) + " are needed";
#ifdef KVPAGES_NO_EXCEPTIONS
    KVPAGES_ON_ERROR(KVPAGES_STATUS_INVALID_ARGUMENT, message.c_str());
#else
    throw Error(KVPAGES_STATUS_INVALID_ARGUMENT, "per_group_array_length", message);
#endif
}

/// A text of the library's: asked for its length, then copied.
template <typename Copy>
std::string text(Copy copy) {
    std::size_t length = 0;
    const std::int32_t asked = copy(nullptr, 0, &length);
    if (asked != KVPAGES_STATUS_BUFFER_TOO_SMALL) check(asked);
    std::string text(length + 1, '\0');
    check(copy(&text[0], text.size(), &length));
    text.resize(length);
    return text;
}

inline const char* c_str_or_null(const std::string& text) {
    return text.empty() ? nullptr : text.c_str();
}

inline std::vector<const char*> c_strs(const std::vector<std::string>& texts) {
    std::vector<const char*> pointers;
    pointers.reserve(texts.size());
    for (const std::string& text : texts) pointers.push_back(text.c_str());
    return pointers;
}

}  // namespace detail

/// A run of values that somebody else owns.
template <typename T>
class Span {
public:
    Span() noexcept = default;
    Span(T* data, std::size_t size) noexcept : data_(data), size_(size) {}
    template <std::size_t size>
    Span(T (&array)[size]) noexcept : Span(array, size) {}
    /// All of a vector, or what else has data() and size(). Not the contents: they must outlive the
    /// span. A temporary lives as long as the call that it is an argument of.
    template <typename Container,
              typename Element = std::remove_pointer_t<decltype(std::declval<Container&>().data())>,
              typename = std::enable_if_t<std::is_convertible_v<Element (*)[], T (*)[]> &&
                                          (std::is_const_v<T> ||
                                           std::is_lvalue_reference_v<Container>)>>
    Span(Container&& container) noexcept : Span(container.data(), container.size()) {}

    T* data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    bool empty() const noexcept { return size_ == 0; }
    T& operator[](std::size_t i) const noexcept { return data_[i]; }
    /// The first `count` values, or all when there are fewer.
    Span first(std::size_t count) const noexcept { return {data_, count < size_ ? count : size_}; }
    T* begin() const noexcept { return data_; }
    T* end() const noexcept { return data_ + size_; }

private:
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

/// How much a message matters.
enum class LogLevel : std::uint32_t {
    off = KVPAGES_LOG_LEVEL_OFF,
    warn = KVPAGES_LOG_LEVEL_WARN,
    info = KVPAGES_LOG_LEVEL_INFO,
    debug = KVPAGES_LOG_LEVEL_DEBUG,
};

/// Takes the messages of the process: set_logger().
class Logger {
public:
    virtual ~Logger() = default;

    /// Takes a message, from any thread that is in a call of kvpages, and from several at once. What
    /// it throws is dropped. It must not wait for another thread that calls kvpages.
    virtual void log(LogLevel level, const char* message) = 0;

protected:
    Logger() = default;
    Logger(const Logger&) = default;
    Logger& operator=(const Logger&) = default;
};

namespace detail {

inline void log(void* user, std::uint32_t level, const char* message) {
    const auto call = [&] {
        static_cast<Logger*>(user)->log(static_cast<LogLevel>(level), message);
    };
#ifdef KVPAGES_NO_EXCEPTIONS
    call();
#else
    try {
        call();
    } catch (...) {
        // An exception cannot pass through the library, and a message is no reason to fail a call.
    }
#endif
}

}  // namespace detail

/// Sends the messages of the process to `logger`, which is kept until another is set; to nobody with
/// NULL. When it returns, the logger that was set before is not called any more, and may go.
inline void set_logger(Logger* logger, LogLevel max_level = LogLevel::info) {
    check(kvpages_set_log_callback(static_cast<std::uint32_t>(max_level),
                                   logger == nullptr ? nullptr : detail::log, logger));
}

/// An attention layer: what it stores for every token.
struct AttentionSpec {
    AttentionKind kind = AttentionKind::full;
    Dtype dtype = Dtype::bf16;
    QuantMode quant_mode = QuantMode::none;
    std::uint64_t block_size = 16;             ///< tokens
    std::uint64_t num_kv_heads = 1;            ///< on one rank
    std::uint64_t head_size = 0;               ///< elements of a key, or of the latent
    std::uint64_t head_size_v = 0;             ///< 0: as head_size; KVPAGES_HEAD_SIZE_NONE: no values
    std::uint64_t page_size_padded_bytes = 0;  ///< 0: no padding
    std::uint64_t sliding_window = 0;          ///< tokens; 0: none
    std::uint64_t attention_chunk_size = 0;    ///< tokens; 0: none
    std::uint64_t tq_slot_bytes = 0;           ///< TurboQuant
    std::uint64_t sink_len = 0;                ///< sink
    std::uint64_t rswa_window = 0;             ///< R-SWA
    std::uint64_t alignment_bytes = 0;         ///< latents; 0: none
    std::uint64_t compress_ratio = 1;          ///< latents: tokens that share one slot
    std::string cache_dtype;                   ///< latents; empty: unset
    std::string model_version;                 ///< latents; empty: unset
    bool non_causal = false;
    bool indexes_kv_by_block_stride = false;   ///< a layer with a backend takes it from there

    /// The same for C. Its strings are this struct's.
    kvpages_spec c_spec() const {
        kvpages_spec spec = KVPAGES_SPEC_INIT;
        spec.kind = static_cast<std::uint32_t>(kind);
        spec.dtype = static_cast<std::uint32_t>(dtype);
        spec.quant_mode = static_cast<std::uint32_t>(quant_mode);
        spec.flags = (non_causal ? KVPAGES_SPEC_NON_CAUSAL : 0u) |
                     (indexes_kv_by_block_stride ? KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE : 0u);
        spec.block_size = block_size;
        spec.num_kv_heads = num_kv_heads;
        spec.head_size = head_size;
        spec.head_size_v = head_size_v;
        spec.page_size_padded_bytes = page_size_padded_bytes;
        spec.sliding_window = sliding_window;
        spec.attention_chunk_size = attention_chunk_size;
        spec.tq_slot_bytes = tq_slot_bytes;
        spec.sink_len = sink_len;
        spec.rswa_window = rswa_window;
        spec.alignment_bytes = alignment_bytes;
        spec.compress_ratio = compress_ratio;
        spec.cache_dtype = detail::c_str_or_null(cache_dtype);
        spec.model_version = detail::c_str_or_null(model_version);
        return spec;
    }
};

/// A state layer: states that do not grow with the sequence.
class StateSpec {
public:
    StateKind kind = StateKind::mamba2;
    StateCacheMode cache_mode = StateCacheMode::none;
    std::uint64_t block_size = 16;             ///< tokens
    std::uint64_t page_size_padded_bytes = 0;  ///< 0: no padding
    std::uint64_t num_speculative_blocks = 0;

    /// Adds a state behind the others.
    StateSpec& add(Dtype dtype, const std::vector<std::uint64_t>& shape) {
        dtypes_.push_back(static_cast<std::uint32_t>(dtype));
        ndims_.push_back(static_cast<std::uint32_t>(shape.size()));
        dims_.insert(dims_.end(), shape.begin(), shape.end());
        return *this;
    }

    /// The same for C. Its arrays are this object's.
    kvpages_spec c_spec() const {
        kvpages_spec spec = KVPAGES_SPEC_INIT;
        spec.kind = KVPAGES_SPEC_KIND_STATE;
        spec.block_size = block_size;
        spec.page_size_padded_bytes = page_size_padded_bytes;
        spec.state_dtypes = dtypes_.data();
        spec.num_state_dtypes = dtypes_.size();
        spec.state_ndims = ndims_.data();
        spec.num_state_shapes = ndims_.size();
        spec.state_dims = dims_.data();
        spec.num_state_dims = dims_.size();
        spec.state_kind = static_cast<std::uint32_t>(kind);
        spec.state_cache_mode = static_cast<std::uint32_t>(cache_mode);
        spec.num_speculative_blocks = num_speculative_blocks;
        return spec;
    }

private:
    std::vector<std::uint32_t> dtypes_;
    std::vector<std::uint32_t> ndims_;
    std::vector<std::uint64_t> dims_;
};

/// What a layer's page looks like.
template <typename Spec>
kvpages_spec_info describe(const Spec& spec) {
    const kvpages_spec c_spec = spec.c_spec();
    kvpages_spec_info info = KVPAGES_SPEC_INFO_INIT;
    check(kvpages_spec_describe(&c_spec, &info));
    return info;
}

/// Key-value heads that one tensor-parallel rank stores.
struct RankHeads {
    std::uint64_t heads = 0;
    std::uint64_t replicas = 0;  ///< ranks that store the same head
};

/// Shares key-value heads out over ranks; with fewer heads than ranks each is stored several times.
inline RankHeads kv_heads_per_rank(std::uint64_t total_kv_heads, std::uint64_t num_ranks) {
    RankHeads out;
    check(kvpages_kv_heads_per_rank(total_kv_heads, num_ranks, &out.heads, &out.replicas));
    return out;
}

/// How much one request can need of a layer.
template <typename Spec>
kvpages_demand demand(const Spec& spec, const kvpages_limits& limits) {
    const kvpages_spec c_spec = spec.c_spec();
    kvpages_demand out = KVPAGES_DEMAND_INIT;
    check(kvpages_spec_demand(&c_spec, &limits, &out));
    return out;
}

/// The smallest block size whose attention page holds a state page.
inline kvpages_hybrid_block hybrid_block_size(const kvpages_hybrid_config& config) {
    kvpages_hybrid_block out = KVPAGES_HYBRID_BLOCK_INIT;
    check(kvpages_hybrid_block_size(&config, &out));
    return out;
}

/// Bytes of one element.
inline std::uint64_t bytes(Dtype dtype) noexcept {
    return kvpages_dtype_bytes(static_cast<std::uint32_t>(dtype));
}

/// Name of an element type, such as "bfloat16".
inline const char* name(Dtype dtype) noexcept {
    return kvpages_dtype_name(static_cast<std::uint32_t>(dtype));
}

/// Proves a view of the engine's own.
inline kvpages_view_report audit(const kvpages_view& view) {
    kvpages_view_report out = KVPAGES_VIEW_REPORT_INIT;
    check(kvpages_view_audit(&view, &out));
    return out;
}

/// The index of a layer by the numbers in its name.
inline std::uint64_t layer_index(const std::string& layer_name,
                                 std::uint64_t num_attention_modules = 1) {
    std::uint64_t index = 0;
    check(kvpages_layer_index(layer_name.c_str(), num_attention_modules, &index));
    return index;
}

/// What a backend is: kvpages_backend_config with C++ types.
struct BackendConfig {
    std::string name;
    std::string layout;        ///< such as "block | head | token | kv*content"; empty: state layers only
    std::string memory_order;  ///< the same dimensions as they lie in memory; empty: as listed
    struct Quantised {
        QuantMode quant_mode = QuantMode::none;
        std::string layout;
        std::string memory_order;
    };
    std::vector<Quantised> quantised_layouts;
    std::vector<std::uint64_t> kernel_block_sizes;      ///< tokens
    std::vector<std::uint64_t> kernel_block_multiples;  ///< tokens
    std::uint64_t num_kv_heads = 0;                     ///< 0: any
    std::uint64_t alignment_bytes = 0;                  ///< 0: 1
    std::uint32_t index_bits = 64;
    bool follows_block_stride = false;
    bool needs_equal_kv_widths = false;
    bool scales_at_page_end = false;
    std::uint32_t graph_support = KVPAGES_GRAPH_SUPPORT_NEVER;
};

/// An attention backend.
class Backend {
public:
    explicit Backend(const BackendConfig& config) {
        std::vector<kvpages_quantised_layout> quantised;
        for (const BackendConfig::Quantised& entry : config.quantised_layouts) {
            quantised.push_back({static_cast<std::uint32_t>(entry.quant_mode), 0,
                                 entry.layout.c_str(), detail::c_str_or_null(entry.memory_order)});
        }
        kvpages_backend_config c_config = KVPAGES_BACKEND_CONFIG_INIT;
        c_config.name = config.name.c_str();
        c_config.layout = detail::c_str_or_null(config.layout);
        c_config.memory_order = detail::c_str_or_null(config.memory_order);
        c_config.quantised_layouts = quantised.data();
        c_config.num_quantised_layouts = quantised.size();
        c_config.kernel_block_sizes = config.kernel_block_sizes.data();
        c_config.num_kernel_block_sizes = config.kernel_block_sizes.size();
        c_config.kernel_block_multiples = config.kernel_block_multiples.data();
        c_config.num_kernel_block_multiples = config.kernel_block_multiples.size();
        c_config.num_kv_heads = config.num_kv_heads;
        c_config.alignment_bytes = config.alignment_bytes;
        c_config.index_bits = config.index_bits;
        c_config.flags =
            (config.follows_block_stride ? KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE : 0u) |
            (config.needs_equal_kv_widths ? KVPAGES_BACKEND_NEEDS_EQUAL_KV_WIDTHS : 0u) |
            (config.scales_at_page_end ? KVPAGES_BACKEND_SCALES_AT_PAGE_END : 0u);
        c_config.graph_support = config.graph_support;
        kvpages_backend* raw = nullptr;
        check(kvpages_backend_create(&c_config, &raw));
        handle_.reset(raw);
    }

    /// A known contract.
    static Backend preset(Preset preset) {
        kvpages_backend* raw = nullptr;
        check(kvpages_backend_create_preset(static_cast<std::uint32_t>(preset), &raw));
        return Backend(raw);
    }

    const char* name() const noexcept { return kvpages_backend_name(get()); }

    /// What the backend takes and demands.
    kvpages_backend_info info() const {
        kvpages_backend_info out = KVPAGES_BACKEND_INFO_INIT;
        check(kvpages_backend_get(get(), &out));
        return out;
    }

    const kvpages_backend* get() const noexcept { return handle_.get(); }

private:
    explicit Backend(kvpages_backend* raw) : handle_(raw) {}

    detail::Owned<kvpages_backend, kvpages_backend_destroy> handle_;
};

/// The kernel block size that several backends agree on for a block of `block_size` tokens.
inline std::uint64_t select_kernel_block_size(std::uint64_t block_size,
                                              const std::vector<const Backend*>& backends) {
    std::vector<const kvpages_backend*> raw;
    raw.reserve(backends.size());
    for (const Backend* backend : backends) raw.push_back(backend ? backend->get() : nullptr);
    std::uint64_t size = 0;
    check(kvpages_select_kernel_block_size(block_size, raw.data(), raw.size(), &size));
    return size;
}

/// The smallest block size with which a page of `attention`, read by `backend`, holds `state`.
inline kvpages_hybrid_block hybrid_block_size(const AttentionSpec& attention,
                                              const StateSpec& state, const Backend& backend) {
    kvpages_hybrid_config config = KVPAGES_HYBRID_CONFIG_INIT;
    config.block_size = attention.block_size;
    config.smallest_kernel_block = backend.info().smallest_kernel_block;
    config.attention_bytes_per_token =
        describe(attention).page_size_bytes / attention.block_size;
    config.state_page_bytes = describe(state).page_size_bytes;
    config.state_cache_mode = static_cast<std::uint32_t>(state.cache_mode);
    return hybrid_block_size(config);
}

/// A model: its layers, in order.
class Model {
public:
    Model() {
        kvpages_model* raw = nullptr;
        check(kvpages_model_create(&raw));
        handle_.reset(raw);
    }

    /// Adds a layer with pages of its own.
    template <typename Spec>
    void add(const std::string& name, const Spec& spec, const Backend& backend,
             std::uint32_t num_query_heads = 0) {
        add_layer(name, &spec, &backend, std::string(), num_query_heads);
    }

    /// Adds a layer without a backend: it can be planned, but has no view.
    template <typename Spec>
    void add(const std::string& name, const Spec& spec) {
        add_layer(name, &spec, nullptr, std::string(), 0);
    }

    /// Adds a layer that reads the pages of `target`, which may be added later.
    void share(const std::string& name, const std::string& target,
               const Backend* backend = nullptr, std::uint32_t num_query_heads = 0) {
        add_layer(name, static_cast<const AttentionSpec*>(nullptr), backend, target,
                  num_query_heads);
    }

    /// As above, and `spec` is checked against what `target` stores.
    template <typename Spec>
    void share(const std::string& name, const std::string& target, const Spec& spec,
               const Backend& backend, std::uint32_t num_query_heads = 0) {
        add_layer(name, &spec, &backend, target, num_query_heads);
    }

    std::size_t num_layers() const noexcept { return kvpages_model_num_layers(get()); }
    kvpages_model* get() const noexcept { return handle_.get(); }

private:
    template <typename Spec>
    void add_layer(const std::string& name, const Spec* spec, const Backend* backend,
                   const std::string& target, std::uint32_t num_query_heads) {
        kvpages_spec c_spec = KVPAGES_SPEC_INIT;
        if (spec != nullptr) c_spec = spec->c_spec();
        kvpages_layer layer = KVPAGES_LAYER_INIT;
        layer.name = name.c_str();
        layer.spec = spec != nullptr ? &c_spec : nullptr;
        layer.backend = backend != nullptr ? backend->get() : nullptr;
        layer.shares_with = detail::c_str_or_null(target);
        layer.num_query_heads = num_query_heads;
        check(kvpages_model_add_layer(get(), &layer));
    }

    detail::Owned<kvpages_model, kvpages_model_destroy> handle_;
};

/// What a plan is made for.
struct PlanConfig {
    std::int64_t memory_bytes = 0;  ///< of the worker; only where one worker is planned
    std::uint64_t max_model_len = 0;
    std::uint64_t max_tokens_in_flight = 0;
    std::uint64_t max_encoder_tokens = 0;
    std::uint64_t context_parallel_size = 1;
    std::uint64_t reserved_blocks = 0;
    std::optional<std::uint64_t> num_blocks_override;
    StateCacheMode state_cache_mode = StateCacheMode::none;
    Policy policy = Policy::best;
    bool auto_fit = false;
    bool hybrid_manager_off = false;
    bool cross_layer_blocks = false;
    bool draft_layers = false;
    std::uint64_t typical_len = 0;  ///< tokens of a usual request; 0 for max_model_len
    bool choose_block_sizes = false;

    /// The same for C.
    kvpages_plan_config c_config() const {
        kvpages_plan_config config = KVPAGES_PLAN_CONFIG_INIT;
        config.policy = static_cast<std::uint32_t>(policy);
        config.flags = (auto_fit ? KVPAGES_PLAN_AUTO_FIT : 0u) |
                       (hybrid_manager_off ? KVPAGES_PLAN_HYBRID_MANAGER_OFF : 0u) |
                       (cross_layer_blocks ? KVPAGES_PLAN_CROSS_LAYER_BLOCKS : 0u) |
                       (num_blocks_override ? KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS : 0u) |
                       (draft_layers ? KVPAGES_PLAN_DRAFT_LAYERS : 0u);
        config.max_model_len = max_model_len;
        config.context_parallel_size = context_parallel_size;
        config.max_tokens_in_flight = max_tokens_in_flight;
        config.max_encoder_tokens = max_encoder_tokens;
        config.num_blocks_override = num_blocks_override.value_or(0);
        config.reserved_blocks = reserved_blocks;
        config.state_cache_mode = static_cast<std::uint32_t>(state_cache_mode);
        config.typical_len = typical_len;
        config.choose_block_sizes = choose_block_sizes ? 1u : 0u;
        return config;
    }
};

/// One rank: the layers it holds and the memory it has for them.
struct Worker {
    const Model* model = nullptr;
    std::int64_t memory_bytes = 0;
};

/// Layers that share a block table, as an engine states them.
struct PartGroup {
    std::vector<std::string> layers;
    bool is_draft = false;
};

/// One allocation, or one slot of the packed one, as an engine states it.
struct PartTensor {
    std::uint64_t size_bytes = 0;
    std::uint64_t offset_bytes = 0;
    std::uint64_t block_stride_bytes = 0;  ///< 0: not packed
    std::vector<std::string> layers;
};

/// A plan as an engine made it itself.
struct PlanParts {
    std::uint64_t num_blocks = 0;
    std::vector<PartGroup> groups;
    std::vector<PartTensor> tensors;
    std::vector<std::uint64_t> kernel_block_sizes;  ///< by group; empty: chosen from the backends
};

/// Tokens that a scheduler rounds to, and tokens of one hash of a prefix.
struct BlockSizes {
    std::uint64_t scheduler = 0;
    std::uint64_t hash = 0;
};

/// How all workers share out their memory.
class Plan {
public:
    /// Plans one worker with config.memory_bytes.
    static Plan make(const Model& model, const PlanConfig& config) {
        return make({Worker{&model, config.memory_bytes}}, config);
    }

    /// Plans all workers.
    static Plan make(const std::vector<Worker>& workers, const PlanConfig& config) {
        kvpages_plan* raw = nullptr;
        check(create(workers, config, &raw, nullptr));
        return Plan(raw);
    }

    /// As make(), but an empty result when the model does not fit; then `shortfall` says by how
    /// much. Any other failure throws.
    [[nodiscard]] static std::optional<Plan> try_make(const std::vector<Worker>& workers,
                                                      const PlanConfig& config,
                                                      kvpages_shortfall& shortfall) {
        kvpages_plan* raw = nullptr;
        const std::int32_t status = create(workers, config, &raw, &shortfall);
        if (status == KVPAGES_STATUS_DOES_NOT_FIT) return std::nullopt;
        check(status);
        return Plan(raw);
    }

    /// As try_make() above, for one worker with config.memory_bytes.
    [[nodiscard]] static std::optional<Plan> try_make(const Model& model, const PlanConfig& config,
                                                      kvpages_shortfall& shortfall) {
        return try_make({Worker{&model, config.memory_bytes}}, config, shortfall);
    }

    /// Takes a plan that the engine made itself.
    static Plan from_parts(const Model& model, const PlanParts& parts) {
        std::vector<std::vector<const char*>> names;
        names.reserve(parts.groups.size() + parts.tensors.size());
        std::vector<kvpages_part_group> groups;
        for (const PartGroup& group : parts.groups) {
            names.push_back(detail::c_strs(group.layers));
            groups.push_back({names.back().data(), names.back().size(),
                              group.is_draft ? KVPAGES_PART_GROUP_DRAFT : 0u});
        }
        std::vector<kvpages_part_tensor> tensors;
        for (const PartTensor& tensor : parts.tensors) {
            names.push_back(detail::c_strs(tensor.layers));
            tensors.push_back({tensor.size_bytes, tensor.offset_bytes, tensor.block_stride_bytes,
                               names.back().data(), names.back().size()});
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
        kvpages_plan* raw = nullptr;
        check(kvpages_plan_create_from_parts(model.get(), &c_parts, &raw));
        return Plan(raw);
    }

    std::size_t num_workers() const noexcept { return kvpages_plan_num_workers(get()); }
    /// Tokens of the longest sequence, as they were fitted.
    std::uint64_t max_model_len() const noexcept { return kvpages_plan_max_model_len(get()); }

    kvpages_worker_info worker(std::size_t worker = 0) const {
        kvpages_worker_info info = KVPAGES_WORKER_INFO_INIT;
        check(kvpages_plan_get_worker(get(), worker, &info));
        return info;
    }

    kvpages_group_info group(std::size_t group, std::size_t worker = 0) const {
        kvpages_group_info info = KVPAGES_GROUP_INFO_INIT;
        check(kvpages_plan_get_group(get(), worker, group, &info));
        return info;
    }

    /// A spec of a group as it was planned; its pointers are the plan's. `index` is less than the
    /// group's num_specs.
    kvpages_spec group_spec(std::size_t group, std::size_t index = 0,
                            std::size_t worker = 0) const {
        kvpages_spec spec = KVPAGES_SPEC_INIT;
        check(kvpages_plan_get_group_spec(get(), worker, group, index, &spec, nullptr));
        return spec;
    }

    /// Names of the layers of a group that this worker has: those with pages of their own, then
    /// those that share.
    std::vector<std::string> group_layers(std::size_t group, std::size_t worker = 0) const {
        std::vector<std::string> names;
        while (const char* name =
                   kvpages_plan_group_layer_name(get(), worker, group, names.size())) {
            names.emplace_back(name);
        }
        return names;
    }

    kvpages_tensor_info tensor(std::size_t tensor, std::size_t worker = 0) const {
        kvpages_tensor_info info = KVPAGES_TENSOR_INFO_INIT;
        check(kvpages_plan_get_tensor(get(), worker, tensor, &info));
        return info;
    }

    /// The steps in which a scheduler counts tokens and a prefix cache hashes them.
    BlockSizes block_sizes(const kvpages_block_size_config& config) const {
        BlockSizes out;
        check(kvpages_plan_resolve_block_sizes(get(), &config, &out.scheduler, &out.hash));
        return out;
    }

    /// Why the plan is as it is, for people.
    std::string explain() const { return explain(KVPAGES_TEXT_FORMAT_TEXT); }
    /// Why the plan is as it is, for programs.
    std::string explain_json() const { return explain(KVPAGES_TEXT_FORMAT_JSON); }

    const kvpages_plan* get() const noexcept { return handle_.get(); }

private:
    explicit Plan(kvpages_plan* raw) : handle_(raw) {}

    static std::int32_t create(const std::vector<Worker>& workers, const PlanConfig& config,
                               kvpages_plan** out, kvpages_shortfall* shortfall) {
        std::vector<kvpages_worker> c_workers;
        c_workers.reserve(workers.size());
        for (const Worker& worker : workers) {
            c_workers.push_back(
                {worker.model != nullptr ? worker.model->get() : nullptr, worker.memory_bytes});
        }
        const kvpages_plan_config c_config = config.c_config();
        return kvpages_plan_create(&c_config, c_workers.data(), c_workers.size(), out, shortfall);
    }

    std::string explain(std::uint32_t format) const {
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            return kvpages_plan_copy_explanation(get(), format, buffer, capacity, length);
        });
    }

    detail::Owned<kvpages_plan, kvpages_plan_destroy> handle_;
};

/// CUDA devices that the driver shows. Throws when there is no driver: the error's kind says why.
inline std::uint32_t device_count() {
    std::uint32_t count = 0;
    check(kvpages_device_count(&count));
    return count;
}

/// What a CUDA device is.
struct DeviceInfo : kvpages_device_info {
    DeviceInfo() noexcept : kvpages_device_info(KVPAGES_DEVICE_INFO_INIT) {}

    /// What device `ordinal` is; its primary context is retained meanwhile.
    static DeviceInfo of(std::uint32_t ordinal) {
        DeviceInfo out;
        check(kvpages_device_get_info(ordinal, &out));
        return out;
    }
};

/// Memory of a CUDA device, or host memory pinned for it.
struct CudaMemory {
    std::uint32_t ordinal = 0;  ///< without effect when there is a context
    void* context = nullptr;    ///< a CUcontext that is kept; NULL: the primary one
    bool is_virtual = false;    ///< addresses first, so that caches can grow
    bool rdma = false;          ///< virtual memory that network cards can be given
    bool shareable = false;     ///< virtual memory that can be exported as a file descriptor

    /// The same for C.
    kvpages_cuda_memory_config c_config() const noexcept {
        kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
        config.ordinal = ordinal;
        config.context = context;
        config.flags = (is_virtual ? KVPAGES_CUDA_MEMORY_VIRTUAL : 0u) |
                       (rdma ? KVPAGES_CUDA_MEMORY_RDMA : 0u) |
                       (shareable ? KVPAGES_CUDA_MEMORY_SHAREABLE : 0u);
        return config;
    }
};

/// Where a cache's bytes come from.
class Memory {
public:
    /// The host's memory.
    static Memory host() {
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_host(&raw));
        return Memory(raw);
    }

    /// The engine's own allocator.
    static Memory external(const kvpages_memory_callbacks& callbacks) {
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_external(&callbacks, &raw));
        return Memory(raw);
    }

    /// A buffer of the engine's, which must live longer than all caches in it.
    static Memory adopted(void* data, std::size_t bytes) {
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_adopted(data, bytes, &raw));
        return Memory(raw);
    }

    /// A buffer of the engine's in a device's memory.
    static Memory adopted(const kvpages_device& device, void* data, std::size_t bytes) {
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_adopted_device(&device, data, bytes, &raw));
        return Memory(raw);
    }

    /// Memory of a CUDA device.
    static Memory cuda(const CudaMemory& config = {}) {
        const kvpages_cuda_memory_config c_config = config.c_config();
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_cuda(&c_config, &raw));
        return Memory(raw);
    }

    /// Memory of the host, pinned for a CUDA device. No flags.
    static Memory pinned(const CudaMemory& config = {}) {
        const kvpages_cuda_memory_config c_config = config.c_config();
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_pinned(&c_config, &raw));
        return Memory(raw);
    }

    const kvpages_memory* get() const noexcept { return handle_.get(); }

private:
    explicit Memory(kvpages_memory* raw) : handle_(raw) {}

    detail::Owned<kvpages_memory, kvpages_memory_destroy> handle_;
};

/// A view, a block table or a slot mapping: what a kernel is given. Its arrays are those of what
/// it came from.
struct Tensor {
    void* data = nullptr;
    Dtype dtype = Dtype::u8;
    Span<const std::int64_t> shape;
    Span<const std::int64_t> strides;  ///< in elements

    Tensor() noexcept = default;
    Tensor(const kvpages_tensor& tensor) noexcept
        : data(tensor.data),
          dtype(static_cast<Dtype>(tensor.dtype)),
          shape(tensor.shape, tensor.ndim),
          strides(tensor.strides, tensor.ndim) {}

    /// The same for C.
    kvpages_tensor c_tensor() const noexcept {
        return {data, shape.data(), strides.data(), static_cast<std::uint32_t>(dtype),
                static_cast<std::uint32_t>(shape.size())};
    }

    /// Elements of the view.
    std::int64_t num_elements() const noexcept {
        std::int64_t count = 1;
        for (const std::int64_t size : shape) count *= size;
        return count;
    }

    /// All elements of a tensor of one dimension, such as a slot mapping. Empty when there are more
    /// dimensions or when the elements do not follow each other. `T` has the bytes of one element.
    template <typename T>
    Span<T> span() const noexcept {
        if (shape.size() != 1 || strides[0] != 1) return {};
        return {static_cast<T*>(data), static_cast<std::size_t>(shape[0])};
    }

    /// The element at an index, one number for each dimension. Host memory only; `T` has the bytes
    /// of one element. The index is not checked.
    template <typename T, typename... Index>
    T& at(Index... index) const noexcept {
        static_assert((std::is_integral_v<Index> && ...), "indices are integers");
        const std::array<std::int64_t, sizeof...(Index)> indices{
            static_cast<std::int64_t>(index)...};
        std::int64_t offset = 0;
        for (std::size_t dim = 0; dim < indices.size(); ++dim) offset += indices[dim] * strides[dim];
        return static_cast<T*>(data)[offset];
    }
};

/// How the axes of an attention layer's view lie, whatever dimensions its backend fuses them to,
/// and where in it an element is. Indices are not checked.
struct ViewAxes : kvpages_view_axes {
    ViewAxes() noexcept : kvpages_view_axes(KVPAGES_VIEW_AXES_INIT) {}

    /// The first element of the key in a slot of a kernel block; the next ones are content_stride
    /// apart.
    std::uint64_t key(std::uint64_t kernel_block, std::uint64_t slot,
                      std::uint64_t head) const noexcept {
        return kernel_block * kernel_block_stride + slot * token_stride + head * head_stride;
    }
    /// As key(), of the value.
    std::uint64_t value(std::uint64_t kernel_block, std::uint64_t slot,
                        std::uint64_t head) const noexcept {
        return key(kernel_block, slot, head) + value_offset;
    }
    /// The first element of the float32 scale behind a key, where scale_elements is not 0. It takes
    /// scale_elements of them and need not be aligned.
    std::uint64_t key_scale(std::uint64_t kernel_block, std::uint64_t slot,
                            std::uint64_t head) const noexcept {
        return key(kernel_block, slot, head) + key_elements * content_stride;
    }
    /// As key_scale(), of the value.
    std::uint64_t value_scale(std::uint64_t kernel_block, std::uint64_t slot,
                              std::uint64_t head) const noexcept {
        return value(kernel_block, slot, head) + value_elements * content_stride;
    }
};

/// What a cache cannot know of its rank, for its descriptor.
struct DescriptorConfig {
    std::uint64_t tensor_parallel_size = 0;  ///< 0: not told
    std::uint64_t tensor_parallel_rank = 0;
    std::uint64_t context_parallel_size = 0;  ///< 0: not told
    std::uint64_t context_parallel_rank = 0;
    std::uint64_t context_parallel_interleave = 0;  ///< 0: 1
    /// The model's kv heads of each layer of the cache, 0 for those of all ranks together; empty
    /// when that is so of all. It takes a number where heads are copied to several ranks.
    std::vector<std::uint64_t> model_kv_heads;

    /// The same for C. Its array is this object's.
    kvpages_descriptor_config c_config() const noexcept {
        kvpages_descriptor_config config = KVPAGES_DESCRIPTOR_CONFIG_INIT;
        config.tensor_parallel_size = tensor_parallel_size;
        config.tensor_parallel_rank = tensor_parallel_rank;
        config.context_parallel_size = context_parallel_size;
        config.context_parallel_rank = context_parallel_rank;
        config.context_parallel_interleave = context_parallel_interleave;
        config.model_kv_heads = model_kv_heads.data();
        config.num_model_kv_heads = model_kv_heads.size();
        return config;
    }
};

/// The memory of one worker's layers, and a view of it for each layer.
class Cache {
public:
    /// Allocates a worker's part of a plan. With `num_blocks`, only the first ones get memory, and
    /// resize() changes how many. With KVPAGES_CACHE_POISON among the flags, blocks that were never
    /// written are loud when they are read.
    static Cache allocate(const Plan& plan, const Memory& memory, std::size_t worker = 0,
                          std::uint64_t num_blocks = 0, std::uint32_t flags = 0) {
        kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
        config.num_blocks = num_blocks;
        config.flags = flags;
        config.worker = worker;
        config.memory = memory.get();
        kvpages_cache* raw = nullptr;
        check(kvpages_cache_create(plan.get(), &config, &raw, nullptr));
        return Cache(raw);
    }

    /// Changes how many blocks have memory, between steps. No address changes; none of the blocks
    /// in use may go.
    void resize(std::uint64_t num_blocks, Span<const std::int32_t> blocks_in_use) {
        check(kvpages_cache_resize(handle_.get(), num_blocks, blocks_in_use.data(),
                                   blocks_in_use.size()));
    }

    /// Blocks that have memory.
    std::uint64_t num_blocks() const noexcept { return kvpages_cache_num_blocks(get()); }
    /// Blocks that have addresses: those of the plan.
    std::uint64_t max_blocks() const noexcept { return kvpages_cache_max_blocks(get()); }

    /// Where the bytes are.
    kvpages_device device() const {
        kvpages_device out{};
        check(kvpages_cache_get_device(get(), &out));
        return out;
    }

    /// Layers that have views, in the model's order.
    std::size_t num_layers() const noexcept { return kvpages_cache_num_layers(get()); }
    /// Name of a layer; NULL when there is no such layer.
    const char* layer_name(std::size_t layer) const noexcept {
        return kvpages_cache_layer_name(get(), layer);
    }
    /// Views of a layer: 1, or one for each state.
    std::size_t num_views(std::size_t layer) const noexcept {
        return kvpages_cache_num_views(get(), layer);
    }

    /// The number of a layer. Look it up once, and ask for views by number.
    std::size_t find(const std::string& name) const {
        std::size_t layer = 0;
        check(kvpages_cache_find_layer(get(), name.c_str(), &layer));
        return layer;
    }
    /// The number in this cache of a layer that is known by its number in the worker's
    /// model, as builders are told it.
    std::size_t find_model_layer(std::size_t model_layer) const {
        std::size_t layer = 0;
        check(kvpages_cache_find_model_layer(get(), model_layer, &layer));
        return layer;
    }

    Tensor view(std::size_t layer, std::size_t state = 0) const {
        kvpages_tensor tensor{};
        check(kvpages_cache_get_view(get(), layer, state, &tensor));
        return tensor;
    }

    Tensor view(const std::string& name, std::size_t state = 0) const {
        return view(find(name), state);
    }

    /// What a layer is: its group, its sizes, whose pages it reads.
    kvpages_layer_info layer(std::size_t layer) const {
        kvpages_layer_info out = KVPAGES_LAYER_INFO_INIT;
        check(kvpages_cache_get_layer(get(), layer, &out));
        return out;
    }

    /// How the axes of an attention layer's view lie.
    ViewAxes axes(std::size_t layer) const {
        ViewAxes out;
        check(kvpages_cache_get_axes(get(), layer, &out));
        return out;
    }

    std::size_t num_allocations() const noexcept { return kvpages_cache_num_allocations(get()); }

    /// Bytes of all allocations.
    std::uint64_t size_bytes() const {
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < num_allocations(); ++i) sum += allocation(i).size_bytes;
        return sum;
    }

    kvpages_allocation allocation(std::size_t allocation) const {
        kvpages_allocation out{};
        check(kvpages_cache_get_allocation(get(), allocation, &out));
        return out;
    }

    /// What is proven of a view.
    kvpages_view_report report(std::size_t layer, std::size_t state = 0) const {
        kvpages_view_report out = KVPAGES_VIEW_REPORT_INIT;
        check(kvpages_cache_get_report(get(), layer, state, &out));
        return out;
    }

    /// The pieces of memory in which blocks lie at a constant distance. They do not change: ask
    /// once.
    std::vector<kvpages_region> regions() const {
        std::vector<kvpages_region> all(kvpages_cache_num_regions(get()));
        for (std::size_t i = 0; i < all.size(); ++i) {
            check(kvpages_cache_get_region(get(), i, &all[i]));
        }
        return all;
    }

    /// The cache in numbers. The engine may tell how many blocks are in use: one number for all groups
    /// together, or one for each.
    kvpages_cache_snapshot snapshot(Span<const std::uint64_t> blocks_in_use = {}) const {
        const kvpages_cache_usage usage = usage_of(blocks_in_use);
        kvpages_cache_snapshot out = KVPAGES_CACHE_SNAPSHOT_INIT;
        check(kvpages_cache_get_snapshot(get(), &usage, &out));
        return out;
    }

    /// The same as JSON, with groups, allocations and regions.
    std::string snapshot_json(Span<const std::uint64_t> blocks_in_use = {}) const {
        const kvpages_cache_usage usage = usage_of(blocks_in_use);
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            return kvpages_cache_copy_snapshot(get(), &usage, buffer, capacity, length);
        });
    }

    /// What a block of a group is.
    kvpages_cache_group group(std::size_t group) const {
        kvpages_cache_group out = KVPAGES_CACHE_GROUP_INIT;
        check(kvpages_cache_get_group(get(), group, &out));
        return out;
    }

    /// The cache as JSON for another process, which reads it with Descriptor::parse().
    std::string descriptor(const DescriptorConfig& config = {}) const {
        const kvpages_descriptor_config c_config = config.c_config();
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            return kvpages_cache_copy_descriptor(get(), &c_config, buffer, capacity, length);
        });
    }

    /// The layers in binding order.
    std::vector<std::size_t> bound_layers(std::uint64_t num_attention_modules = 1) const {
        std::vector<std::size_t> layers(num_layers());
        std::size_t count = 0;
        check(kvpages_cache_copy_bound_layers(get(), num_attention_modules, layers.data(),
                                              layers.size(), &count));
        return layers;
    }

    const kvpages_cache* get() const noexcept { return handle_.get(); }

private:
    explicit Cache(kvpages_cache* raw) : handle_(raw) {}

    static kvpages_cache_usage usage_of(Span<const std::uint64_t> blocks_in_use) {
        kvpages_cache_usage usage = KVPAGES_CACHE_USAGE_INIT;
        usage.blocks_in_use = blocks_in_use.data();
        usage.num_counts = blocks_in_use.size();
        return usage;
    }

    detail::Owned<kvpages_cache, kvpages_cache_destroy> handle_;
};

/// The descriptor of a cache: where blocks and rows lie in its allocations, for who has only the
/// memory.
class Descriptor {
public:
    /// Reads and proves what Cache::descriptor() wrote, here or elsewhere.
    static Descriptor parse(const std::string& json) {
        kvpages_descriptor* raw = nullptr;
        check(kvpages_descriptor_create(json.data(), json.size(), &raw));
        return Descriptor(raw);
    }

    /// The same as JSON.
    std::string json() const {
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            return kvpages_descriptor_copy_json(get(), buffer, capacity, length);
        });
    }

    kvpages_descriptor_info info() const {
        kvpages_descriptor_info out = KVPAGES_DESCRIPTOR_INFO_INIT;
        check(kvpages_descriptor_get_info(get(), &out));
        return out;
    }
    /// Bytes of an allocation; 0 when there is no such one.
    std::uint64_t allocation_bytes(std::size_t allocation) const noexcept {
        return kvpages_descriptor_allocation_bytes(get(), allocation);
    }
    kvpages_described_group group(std::size_t group) const {
        kvpages_described_group out = KVPAGES_DESCRIBED_GROUP_INIT;
        check(kvpages_descriptor_get_group(get(), group, &out));
        return out;
    }

    /// Layers: those of the cache, then those whose pages no backend reads.
    std::size_t num_layers() const noexcept { return kvpages_descriptor_num_layers(get()); }
    /// Name of a layer; NULL when there is no such layer.
    const char* layer_name(std::size_t layer) const noexcept {
        return kvpages_descriptor_layer_name(get(), layer);
    }
    std::size_t find(const std::string& name) const {
        std::size_t layer = 0;
        check(kvpages_descriptor_find_layer(get(), name.c_str(), &layer));
        return layer;
    }
    kvpages_described_layer layer(std::size_t layer) const {
        kvpages_described_layer out = KVPAGES_DESCRIBED_LAYER_INIT;
        check(kvpages_descriptor_get_layer(get(), layer, &out));
        return out;
    }
    kvpages_described_state state(std::size_t layer, std::size_t state) const {
        kvpages_described_state out = KVPAGES_DESCRIBED_STATE_INIT;
        check(kvpages_descriptor_get_state(get(), layer, state, &out));
        return out;
    }

    /// Where a block of a layer is: the runs of its page.
    std::vector<kvpages_run> block_runs(std::size_t layer, std::uint64_t block) const {
        std::size_t count = 0;
        const std::int32_t asked =
            kvpages_descriptor_copy_block_runs(get(), layer, block, nullptr, 0, &count);
        if (asked != KVPAGES_STATUS_BUFFER_TOO_SMALL) check(asked);
        std::vector<kvpages_run> runs(count);
        check(kvpages_descriptor_copy_block_runs(get(), layer, block, runs.data(), runs.size(),
                                                 &count));
        return runs;
    }

    /// Where the key of a slot and head is, or what is stored instead of keys and values.
    kvpages_row key(std::size_t layer, std::uint64_t block, std::uint64_t slot,
                    std::uint64_t head) const {
        return row(layer, block, slot, head, KVPAGES_ROW_PART_KEY);
    }
    /// Where the value of a slot and head is.
    kvpages_row value(std::size_t layer, std::uint64_t block, std::uint64_t slot,
                      std::uint64_t head) const {
        return row(layer, block, slot, head, KVPAGES_ROW_PART_VALUE);
    }

    const kvpages_descriptor* get() const noexcept { return handle_.get(); }

private:
    explicit Descriptor(kvpages_descriptor* raw) : handle_(raw) {}

    kvpages_row row(std::size_t layer, std::uint64_t block, std::uint64_t slot,
                    std::uint64_t head, std::uint32_t part) const {
        kvpages_row out{};
        check(kvpages_descriptor_get_row(get(), layer, block, slot, head, part, &out));
        return out;
    }

    detail::Owned<kvpages_descriptor, kvpages_descriptor_destroy> handle_;
};

/// How blocks of some ranks' caches become blocks of others'.
class Reshard {
public:
    /// From the ranks that have blocks to those that get them.
    static Reshard make(Span<const Descriptor* const> sources,
                        Span<const Descriptor* const> targets) {
        const auto pointers = [](Span<const Descriptor* const> ranks) {
            std::vector<const kvpages_descriptor*> all;
            all.reserve(ranks.size());
            for (const Descriptor* rank : ranks) {
                all.push_back(rank != nullptr ? rank->get() : nullptr);
            }
            return all;
        };
        const std::vector<const kvpages_descriptor*> from = pointers(sources);
        const std::vector<const kvpages_descriptor*> to = pointers(targets);
        kvpages_reshard_config config = KVPAGES_RESHARD_CONFIG_INIT;
        config.sources = from.data();
        config.num_sources = from.size();
        config.targets = to.data();
        config.num_targets = to.size();
        kvpages_reshard* raw = nullptr;
        check(kvpages_reshard_create(&config, &raw));
        return Reshard(raw);
    }

    /// The copies that blocks take.
    std::vector<kvpages_strided_copy> copies(Span<const kvpages_block_move> moves) const {
        std::size_t count = 0;
        const std::int32_t asked = kvpages_reshard_copy_copies(get(), moves.data(), moves.size(),
                                                               nullptr, 0, &count);
        if (asked != KVPAGES_STATUS_BUFFER_TOO_SMALL) check(asked);
        std::vector<kvpages_strided_copy> all(count);
        check(kvpages_reshard_copy_copies(get(), moves.data(), moves.size(), all.data(),
                                          all.size(), &count));
        return all;
    }

    const kvpages_reshard* get() const noexcept { return handle_.get(); }

private:
    explicit Reshard(kvpages_reshard* raw) : handle_(raw) {}

    detail::Owned<kvpages_reshard, kvpages_reshard_destroy> handle_;
};

/// Makes strided copies in host memory, one after another, from the allocations of some ranks to
/// those of others. All are checked before the first byte moves.
inline void copy_strided(Span<const kvpages_strided_copy> copies,
                         Span<const kvpages_rank_memory> sources,
                         Span<const kvpages_rank_memory> targets) {
    check(kvpages_copy_strided(copies.data(), copies.size(), sources.data(), sources.size(),
                               targets.data(), targets.size()));
}

/// What tables are made for.
struct TablesConfig {
    std::uint64_t max_requests = 0;
    std::uint64_t max_tokens = 0;
    std::uint64_t num_blocks = 0;             ///< 0: the plan's, or as many as ids can tell apart
    std::uint64_t context_parallel_size = 0;  ///< 0: the plan's, or 1
    std::uint64_t context_parallel_rank = 0;
    std::uint64_t context_parallel_interleave = 1;
    bool aligned_rows = false;  ///< rows as wide as row_width() says
    /// Tokens of the longest request. 0: the plan's; a plan from parts has none.
    std::uint64_t max_model_len = 0;
    /// Where tables, input tables and slots are, such as Cache::device(); the host at first. A
    /// context must live as long as the tables.
    kvpages_device device{};

    /// The same for C, without groups.
    kvpages_tables_config c_config() const {
        kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
        config.max_requests = max_requests;
        config.max_tokens = max_tokens;
        config.num_blocks = num_blocks;
        config.context_parallel_size = context_parallel_size;
        config.context_parallel_rank = context_parallel_rank;
        config.context_parallel_interleave = context_parallel_interleave;
        config.flags = aligned_rows ? KVPAGES_TABLES_ALIGNED_ROWS : 0u;
        config.max_model_len = max_model_len;
        config.device = device;
        return config;
    }
};

/// The requests that run together in one step.
struct Batch {
    Span<const std::int32_t> requests;     ///< rows in the tables; -1 is a dummy
    Span<const std::int32_t> query_start;  ///< one more than requests, from 0
    Span<const std::int32_t> seq_lens;     ///< of each request, with the tokens of the step
    Span<const std::int64_t> positions;    ///< of each token
    void* stream = nullptr;                ///< CUstream; not used for tables in host memory
};

/// Which blocks hold each request, and where each token of a step goes. A `stream` is a CUstream,
/// and not used for tables in host memory.
class Tables {
public:
    /// Tables of a worker's groups.
    static Tables make(const Plan& plan, const TablesConfig& config, std::size_t worker = 0) {
        const kvpages_tables_config c_config = config.c_config();
        kvpages_tables* raw = nullptr;
        check(kvpages_tables_create_for_plan(plan.get(), worker, &c_config, &raw));
        return Tables(raw);
    }

    /// Tables of groups that the engine states.
    static Tables make(const std::vector<kvpages_table_group>& groups,
                       const TablesConfig& config) {
        kvpages_tables_config c_config = config.c_config();
        c_config.groups = groups.data();
        c_config.num_groups = groups.size();
        kvpages_tables* raw = nullptr;
        check(kvpages_tables_create(&c_config, &raw));
        return Tables(raw);
    }

    /// Entries of a row for kernels that read whole runs of 128 tokens.
    static std::uint64_t row_width(std::uint64_t row_blocks, std::uint64_t block_size,
                                   std::uint64_t kernel_block_size = 0) {
        std::uint64_t width = 0;
        check(kvpages_table_row_width(row_blocks, block_size, kernel_block_size, &width));
        return width;
    }

    std::size_t num_groups() const noexcept { return kvpages_tables_num_groups(get()); }

    /// Where tables, input tables and slots are.
    kvpages_device device() const {
        kvpages_device out{};
        check(kvpages_tables_get_device(get(), &out));
        return out;
    }

    kvpages_table_info info(std::size_t group) const {
        kvpages_table_info out = KVPAGES_TABLE_INFO_INIT;
        check(kvpages_tables_get_info(get(), group, &out));
        return out;
    }

    /// Kernel blocks of a request, those staged included.
    std::size_t num_entries(std::size_t request, std::size_t group) const {
        std::size_t count = 0;
        check(kvpages_tables_num_entries(get(), request, group, &count));
        return count;
    }

    /// Applied rows: int32 [max_requests, row width]. Ask once; it does not move.
    Tensor table(std::size_t group) const {
        kvpages_tensor out{};
        check(kvpages_tables_get_table(get(), group, &out));
        return out;
    }

    /// Rows of the batch: int32 [max_requests, row width]. Ask once; it does not move.
    Tensor input_table(std::size_t group) const {
        kvpages_tensor out{};
        check(kvpages_tables_get_input_table(get(), group, &out));
        return out;
    }

    /// Slots of the batch: int64 [max_tokens]. Ask once; they do not move.
    Tensor slots(std::size_t group) const {
        kvpages_tensor out{};
        check(kvpages_tables_get_slots(get(), group, &out));
        return out;
    }

    /// Stages blocks to be added to a row.
    void append(std::size_t request, std::size_t group, Span<const std::int32_t> blocks) {
        check(kvpages_tables_append(get(), request, group, blocks.data(), blocks.size()));
    }
    /// Stages blocks to take the place of those in a row.
    void overwrite(std::size_t request, std::size_t group, Span<const std::int32_t> blocks) {
        check(kvpages_tables_overwrite(get(), request, group, blocks.data(), blocks.size()));
    }
    /// Stages writes to many rows, all or none.
    void write(const kvpages_row_writes& writes) { check(kvpages_tables_write(get(), &writes)); }
    /// Stages that a row keeps its first blocks only.
    void truncate(std::size_t request, std::size_t group, std::size_t num_blocks) {
        check(kvpages_tables_truncate(get(), request, group, num_blocks));
    }
    /// Stages that a request takes the place of another.
    void move(std::size_t from, std::size_t to) { check(kvpages_tables_move(get(), from, to)); }
    /// Stages that two requests change places.
    void swap(std::size_t a, std::size_t b) { check(kvpages_tables_swap(get(), a, b)); }
    /// Stages that a request has no blocks.
    void clear(std::size_t request) { check(kvpages_tables_clear(get(), request)); }
    /// Makes the tables what was staged.
    void apply(void* stream = nullptr) { check(kvpages_tables_apply(get(), stream)); }
    /// Empties everything in place.
    void reset(void* stream = nullptr) { check(kvpages_tables_reset(get(), stream)); }

    /// All that a step asks of tables: applies what was staged, gathers the rows of a batch and finds
    /// its slots. The result is for Attention::build(); it points to these tables, to the batch's
    /// arrays, and for a device to copies of them there.
    kvpages_step prepare(const Batch& batch) {
        const std::size_t num_requests = batch.requests.size();
        detail::check_length("query_start", batch.query_start.size(), num_requests + 1);
        detail::check_length("seq_lens", batch.seq_lens.size(), num_requests);
        kvpages_batch c_batch = KVPAGES_BATCH_INIT;
        c_batch.requests = batch.requests.data();
        c_batch.num_requests = batch.requests.size();
        c_batch.query_start = batch.query_start.data();
        c_batch.seq_lens = batch.seq_lens.data();
        c_batch.positions = batch.positions.data();
        c_batch.num_positions = batch.positions.size();
        c_batch.stream = batch.stream;
        kvpages_step step = KVPAGES_STEP_INIT;
        check(kvpages_tables_prepare(get(), &c_batch, &step));
        return step;
    }
    /// Fills the input tables with the rows of a batch; -1 is a dummy.
    void gather(Span<const std::int32_t> requests, std::size_t num_rows, void* stream = nullptr) {
        check(kvpages_tables_gather(get(), requests.data(), requests.size(), num_rows, stream));
    }
    /// Makes the input tables those of a batch of dummies.
    void gather_dummies(std::size_t num_rows, void* stream = nullptr) {
        check(kvpages_tables_gather_dummies(get(), num_rows, stream));
    }
    /// Finds the slots of a batch. `query_start` has an entry more than `requests`.
    void map_slots(Span<const std::int32_t> requests, Span<const std::int32_t> query_start,
                   Span<const std::int64_t> positions, void* stream = nullptr) {
        detail::check_length("query_start", query_start.size(), requests.size() + 1);
        check(kvpages_tables_map_slots(get(), requests.data(), requests.size(), query_start.data(),
                                       positions.data(), positions.size(), stream));
    }
    /// Makes all slots those of a batch of dummies.
    void map_dummies(void* stream = nullptr) { check(kvpages_tables_map_dummies(get(), stream)); }

    /// The tables in numbers.
    kvpages_tables_snapshot snapshot() const {
        kvpages_tables_snapshot out = KVPAGES_TABLES_SNAPSHOT_INIT;
        check(kvpages_tables_get_snapshot(get(), &out));
        return out;
    }

    /// The same as JSON, with groups.
    std::string snapshot_json() const {
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            return kvpages_tables_copy_snapshot(get(), buffer, capacity, length);
        });
    }

    kvpages_tables* get() const noexcept { return handle_.get(); }

private:
    explicit Tables(kvpages_tables* raw) : handle_(raw) {}

    detail::Owned<kvpages_tables, kvpages_tables_destroy> handle_;
};

/// Rows of keys and values without gaps, to store in a layer. The layer's number is that in the
/// cache. The scales are those of fp8 with one scale for the tensor.
inline kvpages_kv_rows kv_rows(std::size_t layer, const void* keys, const void* values,
                               float key_scale = 1, float value_scale = 1) noexcept {
    kvpages_kv_rows rows{};
    rows.layer = layer;
    rows.keys = keys;
    rows.values = values;
    rows.key_scale = key_scale;
    rows.value_scale = value_scale;
    return rows;
}

/// Operations on the blocks of one cache: zero and copy blocks, store rows of tokens and read them.
/// It keeps the cache's memory. What calls need is taken when it is made. `stream` is the CUstream
/// that does it in a device's memory, where rows and slots are the device's; see kvpages_ops.
class Ops {
public:
    /// `max_block_ids` bounds the ids of one call; 0 stands for all blocks.
    explicit Ops(const Cache& cache, std::uint64_t max_block_ids = 0,
                 std::uint64_t max_concurrency = 1) {
        kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
        config.max_block_ids = max_block_ids;
        config.max_concurrency = max_concurrency;
        kvpages_ops* raw = nullptr;
        check(kvpages_ops_create(cache.get(), &config, &raw));
        handle_.reset(raw);
    }

    /// Clears blocks in every layer.
    void zero_blocks(Span<const std::int32_t> ids, void* stream = nullptr) {
        check(kvpages_ops_zero_blocks(get(), ids.data(), ids.size(), nullptr, stream));
    }

    /// Clears blocks in the layers chosen.
    void zero_blocks(Span<const std::int32_t> ids, const kvpages_block_selection& selection,
                     void* stream = nullptr) {
        check(kvpages_ops_zero_blocks(get(), ids.data(), ids.size(), &selection, stream));
    }

    /// Clears blocks in the layers of some groups.
    void zero_blocks_of(Span<const std::uint64_t> groups, Span<const std::int32_t> ids,
                        void* stream = nullptr) {
        kvpages_block_selection selection = KVPAGES_BLOCK_SELECTION_INIT;
        selection.groups = groups.data();
        selection.num_groups = groups.size();
        zero_blocks(ids, selection, stream);
    }

    /// Fills freed blocks in every layer with bytes that are NaN as floats, so that a stale read is
    /// loud. Not block 0.
    void poison_blocks(Span<const std::int32_t> ids, void* stream = nullptr) {
        check(kvpages_ops_poison_blocks(get(), ids.data(), ids.size(), nullptr, stream));
    }

    /// The same in the layers chosen.
    void poison_blocks(Span<const std::int32_t> ids, const kvpages_block_selection& selection,
                       void* stream = nullptr) {
        check(kvpages_ops_poison_blocks(get(), ids.data(), ids.size(), &selection, stream));
    }

    /// The same in the layers of some groups.
    void poison_blocks_of(Span<const std::uint64_t> groups, Span<const std::int32_t> ids,
                          void* stream = nullptr) {
        kvpages_block_selection selection = KVPAGES_BLOCK_SELECTION_INIT;
        selection.groups = groups.data();
        selection.num_groups = groups.size();
        poison_blocks(ids, selection, stream);
    }

    /// Copies blocks in every layer, as if all were read before any is written.
    void copy_blocks(Span<const kvpages_block_copy> copies, void* stream = nullptr) {
        check(kvpages_ops_copy_blocks(get(), copies.data(), copies.size(), nullptr, 0, stream));
    }

    /// Copies blocks in the layers chosen.
    void copy_blocks(Span<const kvpages_block_copy> copies,
                     const kvpages_block_selection& selection, void* stream = nullptr) {
        check(kvpages_ops_copy_blocks(get(), copies.data(), copies.size(), &selection, 0, stream));
    }

    /// Stores rows of `dtype` in the slots of layers of one group; slot -1 is skipped. `fp8` says
    /// which fp8 layers of plain bytes hold, e4m3fn when it is not set.
    void write(Span<const kvpages_kv_rows> layers, Span<const std::int64_t> slots, Dtype dtype,
               std::optional<Dtype> fp8 = std::nullopt, void* stream = nullptr) const {
        kvpages_kv_write write = KVPAGES_KV_WRITE_INIT;
        write.layers = layers.data();
        write.num_layers = layers.size();
        write.slots = slots.data();
        write.num_slots = slots.size();
        write.dtype = static_cast<std::uint32_t>(dtype);
        write.fp8_format = fp8 ? static_cast<std::uint32_t>(*fp8) : 0;
        write.stream = stream;
        check(kvpages_ops_write_kv(get(), &write));
    }

    /// As above, for one layer, as models compute them.
    void write(const kvpages_kv_rows& layer, Span<const std::int64_t> slots, Dtype dtype,
               std::optional<Dtype> fp8 = std::nullopt, void* stream = nullptr) const {
        write({&layer, 1}, slots, dtype, fp8, stream);
    }

    /// Reads rows of `dtype` from the slots of layers of one group; slot -1 is skipped.
    void gather(Span<const kvpages_kv_rows_out> layers, Span<const std::int64_t> slots,
                Dtype dtype, std::optional<Dtype> fp8 = std::nullopt, void* stream = nullptr) const {
        kvpages_kv_gather gather = gather_of(layers, dtype, fp8);
        gather.slots = slots.data();
        gather.num_slots = slots.size();
        gather.stream = stream;
        check(kvpages_ops_gather_kv(get(), &gather));
    }

    /// Reads rows of `dtype` from all slots of some blocks, one block after another.
    void gather_blocks(Span<const kvpages_kv_rows_out> layers, Span<const std::int32_t> ids,
                       Dtype dtype, std::optional<Dtype> fp8 = std::nullopt, void* stream = nullptr) const {
        kvpages_kv_gather gather = gather_of(layers, dtype, fp8);
        gather.block_ids = ids.data();
        gather.num_block_ids = ids.size();
        gather.stream = stream;
        check(kvpages_ops_gather_kv(get(), &gather));
    }

    kvpages_ops* get() noexcept { return handle_.get(); }
    const kvpages_ops* get() const noexcept { return handle_.get(); }

private:
    static kvpages_kv_gather gather_of(Span<const kvpages_kv_rows_out> layers, Dtype dtype,
                                       std::optional<Dtype> fp8) {
        kvpages_kv_gather gather = KVPAGES_KV_GATHER_INIT;
        gather.layers = layers.data();
        gather.num_layers = layers.size();
        gather.dtype = static_cast<std::uint32_t>(dtype);
        gather.fp8_format = fp8 ? static_cast<std::uint32_t>(*fp8) : 0;
        return gather;
    }

    detail::Owned<kvpages_ops, kvpages_ops_destroy> handle_;
};

/// Builds the metadata of one attention group. What a function throws stops the call that made
/// kvpages ask, and comes out of that call.
class Builder {
public:
    virtual ~Builder() = default;

    /// The metadata of a step. `extra` is the entry of builder_extra for the attention group.
    virtual void* build(const kvpages_common_metadata& common, void* extra) = 0;
    /// The metadata of a step that is captured into a graph.
    virtual void* build_for_capture(const kvpages_common_metadata& common) {
        return build(common, nullptr);
    }
    /// How far the metadata can be captured: one of KVPAGES_GRAPH_SUPPORT_*. `own` is what the
    /// backend's contract says.
    virtual std::uint32_t graph_support(std::uint32_t own) { return own; }
    /// The workspace that it lets others use; NULL when it has none to give.
    virtual void* workspace() { return nullptr; }
    /// Takes the workspace of a builder made before it.
    virtual void set_workspace(void* workspace) { static_cast<void>(workspace); }

protected:
    Builder() = default;
    Builder(const Builder&) = default;
    Builder& operator=(const Builder&) = default;
};

/// Makes builders.
class BuilderFactory {
public:
    virtual ~BuilderFactory() = default;

    /// A builder. Called while the attention groups are made, never later.
    virtual std::unique_ptr<Builder> create(const kvpages_builder_info& info) = 0;

protected:
    BuilderFactory() = default;
    BuilderFactory(const BuilderFactory&) = default;
    BuilderFactory& operator=(const BuilderFactory&) = default;
};

/// What attention groups are made of.
struct AttentionConfig {
    std::size_t worker = 0;
    std::optional<std::vector<std::string>> active_layers;  ///< names; empty optional: all
    std::uint64_t num_builders = 1;                         ///< of each group, for micro-batches
};

/// The attention groups of one worker, their builders, and what these made of the last step.
class Attention {
public:
    /// Groups and builders. The builders are destroyed with the object, the last made first.
    static Attention make(const Plan& plan, BuilderFactory& factory,
                          const AttentionConfig& config = {}) {
        return make(plan, &factory, config);
    }

    /// Groups without builders.
    static Attention make(const Plan& plan, const AttentionConfig& config = {}) {
        return make(plan, nullptr, config);
    }

    std::size_t num_cache_groups() const noexcept {
        return kvpages_attention_num_cache_groups(get());
    }
    /// Attention groups of a cache group.
    std::size_t num_groups(std::size_t cache_group) const noexcept {
        return kvpages_attention_num_groups(get(), cache_group);
    }

    kvpages_attention_group_info group(std::size_t cache_group, std::size_t group) const {
        kvpages_attention_group_info out = KVPAGES_ATTENTION_GROUP_INFO_INIT;
        check(kvpages_attention_get_group(get(), cache_group, group, &out));
        return out;
    }

    /// What the layers of a group store; its pointers are this object's.
    kvpages_spec group_spec(std::size_t cache_group, std::size_t group) const {
        kvpages_spec out = KVPAGES_SPEC_INIT;
        check(kvpages_attention_get_group_spec(get(), cache_group, group, &out));
        return out;
    }

    /// Name of a group's backend; NULL when there is no such group.
    const char* group_backend(std::size_t cache_group, std::size_t group) const noexcept {
        return kvpages_attention_group_backend(get(), cache_group, group);
    }

    /// Names of the layers of a group.
    std::vector<std::string> group_layers(std::size_t cache_group, std::size_t group) const {
        std::vector<std::string> names;
        while (const char* name = kvpages_attention_group_layer_name(get(), cache_group, group,
                                                                     names.size())) {
            names.emplace_back(name);
        }
        return names;
    }

    /// The lowest graph support of all builders: one of KVPAGES_GRAPH_SUPPORT_*.
    std::uint32_t graph_support() const noexcept {
        return kvpages_attention_graph_support(get(), nullptr);
    }
    /// Name of the first backend that has it; NULL when none limits it.
    const char* graph_support_backend() const noexcept {
        const char* name = nullptr;
        static_cast<void>(kvpages_attention_graph_support(get(), &name));
        return name;
    }
    /// Lowers it to what the engine can capture.
    void limit_graph_support(std::uint32_t limit) {
        check(kvpages_attention_limit_graph_support(get(), limit));
    }

    /// Builds the metadata of a step. On failure the metadata of the step before stays.
    void build(const kvpages_step& step) { state_->check(kvpages_attention_build(get(), &step)); }

    /// Metadata of a layer by its number in the worker's model.
    void* layer_metadata(std::size_t layer, std::size_t builder = 0) const noexcept {
        return kvpages_attention_layer_metadata(get(), builder, layer);
    }

    /// As above, for an engine that knows what its builders return; NULL where there is none.
    template <typename Metadata>
    Metadata* metadata(std::size_t layer, std::size_t builder = 0) const noexcept {
        return static_cast<Metadata*>(layer_metadata(layer, builder));
    }

    /// Slot mapping of a layer by its number in the worker's model.
    Tensor slot_mapping(std::size_t layer, std::size_t builder = 0) const {
        kvpages_tensor out{};
        check(kvpages_attention_get_slot_mapping(get(), builder, layer, &out));
        return out;
    }

    kvpages_attention* get() const noexcept { return handle_.get(); }

private:
    /// What the callbacks share: where builders come from, and what one of them threw.
    struct State {
        BuilderFactory* factory = nullptr;
#ifndef KVPAGES_NO_EXCEPTIONS
        std::exception_ptr thrown;
#endif

        /// As kvpages::check(), but a builder's exception goes on as it was.
        void check(std::int32_t status) {
#ifndef KVPAGES_NO_EXCEPTIONS
            if (std::exception_ptr exception = std::exchange(thrown, nullptr)) {
                std::rethrow_exception(exception);
            }
#endif
            kvpages::check(status);
        }

        /// Runs the body of a callback.
        template <typename Body>
        std::int32_t run(Body body) noexcept {
#ifdef KVPAGES_NO_EXCEPTIONS
            body();
            return 0;
#else
            try {
                body();
                return 0;
            } catch (...) {
                thrown = std::current_exception();
                return 1;
            }
#endif
        }
    };

    Attention(std::unique_ptr<State> state, kvpages_attention* raw)
        : state_(std::move(state)), handle_(raw) {}

    static State* state_of(void* user) noexcept { return static_cast<State*>(user); }
    static Builder* builder_of(void* builder) noexcept { return static_cast<Builder*>(builder); }

    static std::int32_t create(void* user, const kvpages_builder_info* info, void** out) noexcept {
        State* state = state_of(user);
        return state->run([&] { *out = state->factory->create(*info).release(); });
    }
    static std::int32_t support(void* user, void* builder, std::uint32_t* out) noexcept {
        if (builder == nullptr) return 0;
        return state_of(user)->run([&] { *out = builder_of(builder)->graph_support(*out); });
    }
    static std::int32_t get_workspace(void* user, void* builder, void** out) noexcept {
        if (builder == nullptr) return 0;
        return state_of(user)->run([&] { *out = builder_of(builder)->workspace(); });
    }
    static std::int32_t set_workspace(void* user, void* builder, void* workspace) noexcept {
        if (builder == nullptr) return 0;
        return state_of(user)->run([&] { builder_of(builder)->set_workspace(workspace); });
    }
    static std::int32_t build(void* user, void* builder, const kvpages_common_metadata* common,
                              void* extra, void** out) noexcept {
        if (builder == nullptr) return 0;
        return state_of(user)->run([&] { *out = builder_of(builder)->build(*common, extra); });
    }
    static std::int32_t capture(void* user, void* builder, const kvpages_common_metadata* common,
                                void*, void** out) noexcept {
        if (builder == nullptr) return 0;
        return state_of(user)->run([&] { *out = builder_of(builder)->build_for_capture(*common); });
    }
    static void destroy(void*, void* builder) noexcept { delete builder_of(builder); }

    static Attention make(const Plan& plan, BuilderFactory* factory,
                          const AttentionConfig& config) {
        auto state = std::make_unique<State>();
        state->factory = factory;
        kvpages_builder_callbacks callbacks = KVPAGES_BUILDER_CALLBACKS_INIT;
        callbacks.user = state.get();
        callbacks.create = create;
        callbacks.graph_support = support;
        callbacks.get_workspace = get_workspace;
        callbacks.set_workspace = set_workspace;
        callbacks.build = build;
        callbacks.build_for_capture = capture;
        callbacks.destroy = destroy;
        kvpages_attention_config c_config = KVPAGES_ATTENTION_CONFIG_INIT;
        c_config.worker = config.worker;
        c_config.callbacks = factory != nullptr ? &callbacks : nullptr;
        c_config.num_builders = config.num_builders;
        std::vector<const char*> active;
        if (config.active_layers) {
            active = detail::c_strs(*config.active_layers);
            c_config.num_active_layers = active.size();
            active.push_back(nullptr);  // so that an empty list is not NULL, which means all
            c_config.active_layers = active.data();
        }
        kvpages_attention* raw = nullptr;
        state->check(kvpages_attention_create(plan.get(), &c_config, &raw));
        state->factory = nullptr;
        return Attention(std::move(state), raw);
    }

    std::unique_ptr<State> state_;  // outlives the handle, whose callbacks use it
    detail::Owned<kvpages_attention, kvpages_attention_destroy> handle_;
};

/// The tokens of one request that attend to each other in both directions: the runs of embedded
/// tokens of images and videos that are not longer than the window.
inline std::vector<kvpages_range> multimodal_ranges(
    const std::vector<kvpages_multimodal_item>& items,
    std::optional<std::uint64_t> sliding_window = std::nullopt) {
    const std::uint64_t window = sliding_window.value_or(KVPAGES_NO_WINDOW);
    std::vector<kvpages_range> ranges(items.size());
    std::size_t count = 0;
    std::int32_t status = kvpages_multimodal_ranges(items.data(), items.size(), window,
                                                    ranges.data(), ranges.size(), &count);
    if (status == KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        ranges.resize(count);
        status = kvpages_multimodal_ranges(items.data(), items.size(), window, ranges.data(),
                                           ranges.size(), &count);
    }
    check(status);
    ranges.resize(count);
    return ranges;
}

}  // namespace kvpages

#endif
