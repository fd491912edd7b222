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
    /// @param status  What the call returned.
    explicit Error(std::int32_t status)
        : std::runtime_error(kvpages_last_error_message()),
          status_(status),
          kind_(kvpages_last_error_kind()) {}
    /// What this header itself refuses.
    /// @param status   One of KVPAGES_STATUS_*.
    /// @param kind     The precise kind.
    /// @param message  The text.
    Error(std::int32_t status, const std::string& kind, const std::string& message)
        : std::runtime_error(message), status_(status), kind_(kind) {}

    /// One of KVPAGES_STATUS_*.
    /// @return The number; kvpages_status_name() has its name.
    std::int32_t status() const noexcept { return status_; }
    /// The precise kind, such as "not_enough_memory".
    /// @return A name that stays the same from version to version.
    const std::string& kind() const noexcept { return kind_; }

private:
    std::int32_t status_;
    std::string kind_;
};
#endif

/// Returns when `status` is OK; otherwise throws the calling thread's last error.
/// @param status  What a call of kvpages.h returned on this thread, with no other call since.
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
    /// Some values.
    /// @param data  The first one; not used when there are none.
    /// @param size  How many there are.
    Span(T* data, std::size_t size) noexcept : data_(data), size_(size) {}
    /// All of an array.
    /// @param array  It must outlive the span.
    template <std::size_t size>
    Span(T (&array)[size]) noexcept : Span(array, size) {}
    /// All of a vector, or what else has data() and size(). Not the contents: they must outlive the
    /// span. A temporary lives as long as the call that it is an argument of.
    /// @param container  It must outlive the span.
    template <typename Container,
              typename Element = std::remove_pointer_t<decltype(std::declval<Container&>().data())>,
              typename = std::enable_if_t<std::is_convertible_v<Element (*)[], T (*)[]> &&
                                          (std::is_const_v<T> ||
                                           std::is_lvalue_reference_v<Container>)>>
    Span(Container&& container) noexcept : Span(container.data(), container.size()) {}

    /// @return The first value; NULL of an empty span that was made of nothing.
    T* data() const noexcept { return data_; }
    /// @return How many values there are.
    std::size_t size() const noexcept { return size_; }
    /// @return Whether there are none.
    bool empty() const noexcept { return size_ == 0; }
    /// A value.
    /// @param i  Less than size(). Not checked.
    /// @return The value; it is not this object's.
    T& operator[](std::size_t i) const noexcept { return data_[i]; }
    /// The first `count` values, or all when there are fewer.
    /// @param count  How many at most.
    /// @return A span of the same values.
    Span first(std::size_t count) const noexcept { return {data_, count < size_ ? count : size_}; }
    /// @return The first value, for loops.
    T* begin() const noexcept { return data_; }
    /// @return Behind the last value, for loops.
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
    /// @param level    How much it matters.
    /// @param message  One line, or several of an explanation, NUL-terminated, during the call only.
    virtual void log(LogLevel level, const char* message) = 0;

protected:
    Logger() = default;
    /// A copy is another logger, which nobody has set.
    Logger(const Logger&) = default;
    /// Changes nothing of which logger is set.
    /// @return This logger.
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
/// @param logger     Borrowed until another one is set, also by what is destroyed when the process ends:
///                   one that is static has to be taken away first. May be NULL.
/// @param max_level  Messages of this level and those that matter more are sent.
/// @throws Error  INVALID_ARGUMENT: called from a logger.
inline void set_logger(Logger* logger, LogLevel max_level = LogLevel::info) {
    check(kvpages_set_log_callback(static_cast<std::uint32_t>(max_level),
                                   logger == nullptr ? nullptr : detail::log, logger));
}

/// An attention layer: what it stores for every token.
struct AttentionSpec {
    AttentionKind kind = AttentionKind::full;  ///< what it attends to, and what it stores
    Dtype dtype = Dtype::bf16;  ///< of what is stored
    QuantMode quant_mode = QuantMode::none;  ///< how that is quantised
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
    bool non_causal = false;  ///< tokens attend to later ones; without effect on the memory
    bool indexes_kv_by_block_stride = false;   ///< a layer with a backend takes it from there

    /// The same for C. Its strings are this struct's.
    /// @return A struct whose pointers are valid as long as this one is and stays as it is.
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
    StateKind kind = StateKind::mamba2;                ///< what computes the states
    StateCacheMode cache_mode = StateCacheMode::none;  ///< when those of earlier positions are kept
    std::uint64_t block_size = 16;                     ///< tokens
    std::uint64_t page_size_padded_bytes = 0;          ///< 0: no padding
    /// Further states of a request, for speculative tokens.
    std::uint64_t num_speculative_blocks = 0;

    /// Adds a state behind the others.
    /// @param dtype  Type of its elements.
    /// @param shape  Sizes of its dimensions, outermost first. They lie without gaps.
    /// @return This object, so that calls can be chained.
    StateSpec& add(Dtype dtype, const std::vector<std::uint64_t>& shape) {
        dtypes_.push_back(static_cast<std::uint32_t>(dtype));
        ndims_.push_back(static_cast<std::uint32_t>(shape.size()));
        dims_.insert(dims_.end(), shape.begin(), shape.end());
        return *this;
    }

    /// The same for C. Its arrays are this object's.
    /// @return A struct whose pointers are valid as long as this object is and stays as it is.
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
/// @param spec  An AttentionSpec or a StateSpec.
/// @return Bytes of a page with and without padding, elements of a key and a value.
/// @throws Error  INVALID_ARGUMENT: a field is wrong; the text names it.
template <typename Spec>
kvpages_spec_info describe(const Spec& spec) {
    const kvpages_spec c_spec = spec.c_spec();
    kvpages_spec_info info = KVPAGES_SPEC_INFO_INIT;
    check(kvpages_spec_describe(&c_spec, &info));
    return info;
}

/// Key-value heads that one tensor-parallel rank stores.
struct RankHeads {
    std::uint64_t heads = 0;     ///< on one rank
    std::uint64_t replicas = 0;  ///< ranks that store the same head
};

/// Shares key-value heads out over ranks; with fewer heads than ranks each is stored several times.
/// @param total_kv_heads  Heads of the model, at least 1.
/// @param num_ranks       Tensor-parallel ranks. They divide the heads, or the heads divide them.
/// @return Heads on a rank, and how many ranks store each.
inline RankHeads kv_heads_per_rank(std::uint64_t total_kv_heads, std::uint64_t num_ranks) {
    RankHeads out;
    check(kvpages_kv_heads_per_rank(total_kv_heads, num_ranks, &out.heads, &out.replicas));
    return out;
}

/// How much one request can need of a layer.
/// @param spec    An AttentionSpec or a StateSpec.
/// @param limits  The longest request, and what is in flight beside it.
/// @return Blocks and bytes.
template <typename Spec>
kvpages_demand demand(const Spec& spec, const kvpages_limits& limits) {
    const kvpages_spec c_spec = spec.c_spec();
    kvpages_demand out = KVPAGES_DEMAND_INIT;
    check(kvpages_spec_demand(&c_spec, &limits, &out));
    return out;
}

/// The smallest block size whose attention page holds a state page.
/// @param config  Bytes of both, and what the kernels take.
/// @return The block size in tokens, and the bytes that state pages are to be padded to.
inline kvpages_hybrid_block hybrid_block_size(const kvpages_hybrid_config& config) {
    kvpages_hybrid_block out = KVPAGES_HYBRID_BLOCK_INIT;
    check(kvpages_hybrid_block_size(&config, &out));
    return out;
}

/// Bytes of one element.
/// @param dtype  The type.
/// @return Bytes; of two fp4, which share a byte, 1.
inline std::uint64_t bytes(Dtype dtype) noexcept {
    return kvpages_dtype_bytes(static_cast<std::uint32_t>(dtype));
}

/// Name of an element type, such as "bfloat16".
/// @param dtype  The type.
/// @return A static string.
inline const char* name(Dtype dtype) noexcept {
    return kvpages_dtype_name(static_cast<std::uint32_t>(dtype));
}

/// Proves a view of the engine's own.
/// @param view  Shape, strides and the allocation that it is in.
/// @return What is proven: its bytes and its largest offset.
/// @throws Error  INVALID_ARGUMENT: it leaves its allocation, is not aligned, or two of its indices
///         may mean one element.
inline kvpages_view_report audit(const kvpages_view& view) {
    kvpages_view_report out = KVPAGES_VIEW_REPORT_INIT;
    check(kvpages_view_audit(&view, &out));
    return out;
}

/// The index of a layer by the numbers in its name.
/// @param layer_name             Such as "model.layers.7.self_attn", whose index is 7.
/// @param num_attention_modules  Attention modules of one layer.
/// @return The index.
inline std::uint64_t layer_index(const std::string& layer_name,
                                 std::uint64_t num_attention_modules = 1) {
    std::uint64_t index = 0;
    check(kvpages_layer_index(layer_name.c_str(), num_attention_modules, &index));
    return index;
}

/// What a backend is: kvpages_backend_config with C++ types.
struct BackendConfig {
    std::string name;  ///< what errors and explanations call it; not empty
    std::string layout;        ///< such as "block | head | token | kv*content"; empty: state layers only
    std::string memory_order;  ///< the same dimensions as they lie in memory; empty: as listed
    /// The layout of layers of one quantisation mode, where it is another one.
    struct Quantised {
        QuantMode quant_mode = QuantMode::none;  ///< of these layers
        std::string layout;                      ///< as BackendConfig::layout
        std::string memory_order;                ///< as BackendConfig::memory_order
    };
    std::vector<Quantised> quantised_layouts;  ///< no mode twice
    std::vector<std::uint64_t> kernel_block_sizes;      ///< tokens
    std::vector<std::uint64_t> kernel_block_multiples;  ///< tokens
    std::uint64_t num_kv_heads = 0;                     ///< 0: any
    std::uint64_t alignment_bytes = 0;                  ///< 0: 1
    std::uint32_t index_bits = 64;  ///< of the offsets kernels compute in elements: 32 or 64
    /// Kernels are given the step from block to block, so pages may be padded and packed.
    bool follows_block_stride = false;
    bool needs_equal_kv_widths = false;  ///< keys and values are equally wide
    bool scales_at_page_end = false;     ///< scales lie behind all rows of a page, outside the view
    /// Which batches can be captured: one of KVPAGES_GRAPH_SUPPORT_*.
    std::uint32_t graph_support = KVPAGES_GRAPH_SUPPORT_NEVER;
};

/// An attention backend.
/// Immutable: all calls on it may run concurrently.
class Backend {
public:
    /// Makes a backend of the engine's own. Models that use it keep it alive.
    /// @param config  Copied.
    /// @throws Error  INVALID_ARGUMENT: the layout cannot be read, or a number is out of range.
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
    /// @param preset  Which one; docs/backends.md has their layouts and demands.
    /// @return The backend.
    static Backend preset(Preset preset) {
        kvpages_backend* raw = nullptr;
        check(kvpages_backend_create_preset(static_cast<std::uint32_t>(preset), &raw));
        return Backend(raw);
    }

    /// @return What errors and explanations call it; a string of the backend's.
    const char* name() const noexcept { return kvpages_backend_name(get()); }

    /// What the backend takes and demands.
    /// @return Kernel block sizes, alignment, index width and the like.
    kvpages_backend_info info() const {
        kvpages_backend_info out = KVPAGES_BACKEND_INFO_INIT;
        check(kvpages_backend_get(get(), &out));
        return out;
    }

    /// @return The C handle, for calls of kvpages.h. It stays this object's.
    const kvpages_backend* get() const noexcept { return handle_.get(); }

private:
    explicit Backend(kvpages_backend* raw) : handle_(raw) {}

    detail::Owned<kvpages_backend, kvpages_backend_destroy> handle_;
};

/// The kernel block size that several backends agree on for a block of `block_size` tokens.
/// @param block_size  Tokens of a block.
/// @param backends    Borrowed; none NULL.
/// @return Tokens of a kernel block: the block itself when all take it, else the largest that all
///         take.
/// @throws Error  INVALID_ARGUMENT, kind "no_common_block_size": there is none.
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
/// @param attention  The layers whose blocks grow.
/// @param state      The layers whose pages they have to hold.
/// @param backend    What reads `attention`: its kernel blocks divide the block.
/// @param base_chunk  Tokens between two states that the state kernels can keep; only, and at least 1,
///                    for StateCacheMode::all.
/// @return The block size in tokens, and the bytes that state pages are to be padded to.
inline kvpages_hybrid_block hybrid_block_size(const AttentionSpec& attention,
                                              const StateSpec& state, const Backend& backend,
                                              std::uint64_t base_chunk = 0) {
    kvpages_hybrid_config config = KVPAGES_HYBRID_CONFIG_INIT;
    config.block_size = attention.block_size;
    config.smallest_kernel_block = backend.info().smallest_kernel_block;
    config.attention_bytes_per_token =
        describe(attention).page_size_bytes / attention.block_size;
    config.state_page_bytes = describe(state).page_size_bytes;
    config.state_cache_mode = static_cast<std::uint32_t>(state.cache_mode);
    config.base_chunk = base_chunk;
    return hybrid_block_size(config);
}

/// A model: its layers, in order.
///
/// Adding a layer changes it and needs it for itself; all other calls may run concurrently. A plan
/// keeps the layers as they were when it was made.
class Model {
public:
    Model() {
        kvpages_model* raw = nullptr;
        check(kvpages_model_create(&raw));
        handle_.reset(raw);
    }

    /// Adds a layer with pages of its own.
    /// @param name             Unique, such as "model.layers.7.self_attn".
    /// @param spec             An AttentionSpec or a StateSpec; copied.
    /// @param backend          What reads the pages. The model keeps it alive.
    /// @param num_query_heads  On this rank; 0 when it is of no interest. Only attention groups
    ///                         look at it.
    /// @throws Error  INVALID_ARGUMENT: the name is taken, or a field of the spec is wrong.
    template <typename Spec>
    void add(const std::string& name, const Spec& spec, const Backend& backend,
             std::uint32_t num_query_heads = 0) {
        add_layer(name, &spec, &backend, std::string(), num_query_heads);
    }

    /// Adds a layer without a backend: it can be planned, but has no view.
    /// @param name  Unique.
    /// @param spec  An AttentionSpec or a StateSpec; copied.
    template <typename Spec>
    void add(const std::string& name, const Spec& spec) {
        add_layer(name, &spec, nullptr, std::string(), 0);
    }

    /// Adds a layer that reads the pages of `target`, which may be added later.
    /// @param name             Unique.
    /// @param target           A layer with pages of its own, or one that shares in turn.
    /// @param backend          What reads the pages; NULL: the layer has no view.
    /// @param num_query_heads  On this rank; 0 when it is of no interest.
    void share(const std::string& name, const std::string& target,
               const Backend* backend = nullptr, std::uint32_t num_query_heads = 0) {
        add_layer(name, static_cast<const AttentionSpec*>(nullptr), backend, target,
                  num_query_heads);
    }

    /// As above, and `spec` is checked against what `target` stores.
    /// @param name             Unique.
    /// @param target           A layer with pages of its own, or one that shares in turn.
    /// @param spec             What this layer takes `target` to store.
    /// @param backend          What reads the pages.
    /// @param num_query_heads  On this rank; 0 when it is of no interest.
    template <typename Spec>
    void share(const std::string& name, const std::string& target, const Spec& spec,
               const Backend& backend, std::uint32_t num_query_heads = 0) {
        add_layer(name, &spec, &backend, target, num_query_heads);
    }

    /// @return Layers that were added.
    std::size_t num_layers() const noexcept { return kvpages_model_num_layers(get()); }
    /// @return The C handle, for calls of kvpages.h. It stays this object's.
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
    std::int64_t memory_bytes = 0;    ///< of the worker; only where one worker is planned
    std::uint64_t max_model_len = 0;  ///< tokens of the longest sequence, the answer included
    /// Tokens scheduled and not yet settled, of all batches that run at once.
    std::uint64_t max_tokens_in_flight = 0;
    /// Tokens of an encoder's output that cross attention caches.
    std::uint64_t max_encoder_tokens = 0;
    std::uint64_t context_parallel_size = 1;  ///< ranks that share the tokens of a sequence
    /// Blocks of every group that no request gets, such as block 0.
    std::uint64_t reserved_blocks = 0;
    std::optional<std::uint64_t> num_blocks_override;  ///< blocks to have, whatever the memory
    StateCacheMode state_cache_mode = StateCacheMode::none;  ///< which states of a request are kept
    Policy policy = Policy::best;  ///< docs/plans.md says what each promises
    bool auto_fit = false;  ///< a longest sequence that does not fit is lowered to what fits
    /// Windowed layers are stored in full, so that one table serves all.
    bool hybrid_manager_off = false;
    /// Pages of all layers of a block lie together, where there are several groups.
    bool cross_layer_blocks = false;
    bool draft_layers = false;      ///< the last layer is a speculative draft's
    std::uint64_t typical_len = 0;  ///< tokens of a usual request; 0 for max_model_len
    /// The layers' block sizes are nobody's wish; others may be taken.
    bool choose_block_sizes = false;

    /// The same for C.
    /// @return A struct without pointers. The memory is not in it: that is the workers'.
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
    const Model* model = nullptr;   ///< not NULL; copied when a plan is made
    std::int64_t memory_bytes = 0;  ///< for caches; not what weights and activations take
};

/// Layers that share a block table, as an engine states them.
struct PartGroup {
    std::vector<std::string> layers;  ///< their names
    bool is_draft = false;            ///< they are a speculative draft's
};

/// One allocation, or one slot of the packed one, as an engine states it.
struct PartTensor {
    std::uint64_t size_bytes = 0;          ///< of the allocation
    std::uint64_t offset_bytes = 0;        ///< of block 0 in it; 0 when not packed
    std::uint64_t block_stride_bytes = 0;  ///< 0: not packed
    std::vector<std::string> layers;       ///< names of those that have their pages in it
};

/// A plan as an engine made it itself.
struct PlanParts {
    std::uint64_t num_blocks = 0;                   ///< of every group
    std::vector<PartGroup> groups;                  ///< in the order of their numbers
    std::vector<PartTensor> tensors;                ///< every layer with pages of its own is in one
    std::vector<std::uint64_t> kernel_block_sizes;  ///< by group; empty: chosen from the backends
};

/// Tokens that a scheduler rounds to, and tokens of one hash of a prefix.
struct BlockSizes {
    std::uint64_t scheduler = 0;  ///< tokens that a scheduler rounds to
    std::uint64_t hash = 0;       ///< tokens of one hash
};

/// How all workers share out their memory.
/// Immutable: all calls on it may run concurrently.
class Plan {
public:
    /// Plans one worker with config.memory_bytes.
    /// @param model   Copied: the layers as they are now.
    /// @param config  What to plan for.
    /// @return The plan. It takes no memory yet.
    /// @throws Error  DOES_NOT_FIT: too little memory for one request; try_make() has the numbers.
    /// @throws Error  CONTRACT_BROKEN: a backend could not read its layers; the text names layer
    ///         and number.
    static Plan make(const Model& model, const PlanConfig& config) {
        return make({Worker{&model, config.memory_bytes}}, config);
    }

    /// Plans all workers.
    /// @param workers  One for each rank that plans its own memory; their layers are copied.
    /// @param config   What to plan for; its memory_bytes are not used.
    /// @return The plan: the same number of blocks on all workers.
    /// @throws Error  As above.
    static Plan make(const std::vector<Worker>& workers, const PlanConfig& config) {
        kvpages_plan* raw = nullptr;
        check(create(workers, config, &raw, nullptr));
        return Plan(raw);
    }

    /// As make(), but an empty result when the model does not fit; then `shortfall` says by how
    /// much. Any other failure throws.
    /// @param workers        As make().
    /// @param config         As make().
    /// @param[out] shortfall  Bytes needed and available, and the longest sequence that fits;
    ///                        filled only when the model does not fit. Start from
    ///                        KVPAGES_SHORTFALL_INIT.
    /// @return The plan, or nothing.
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
    /// @param model          As make().
    /// @param config         As make().
    /// @param[out] shortfall  As above.
    /// @return The plan, or nothing.
    [[nodiscard]] static std::optional<Plan> try_make(const Model& model, const PlanConfig& config,
                                                      kvpages_shortfall& shortfall) {
        return try_make({Worker{&model, config.memory_bytes}}, config, shortfall);
    }

    /// Takes a plan that the engine made itself.
    /// @param model  Copied: the layers as they are now.
    /// @param parts  Groups, tensors and the number of blocks.
    /// @return The plan, of one worker, completed and proven. It does not know how long a request
    ///         gets.
    /// @throws Error  INVALID_ARGUMENT: parts contradict each other or the layers; the text says
    ///         which.
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

    /// @return Workers that were planned.
    std::size_t num_workers() const noexcept { return kvpages_plan_num_workers(get()); }
    /// Tokens of the longest sequence, as they were fitted.
    /// @return Tokens; 0 of a plan from parts.
    std::uint64_t max_model_len() const noexcept { return kvpages_plan_max_model_len(get()); }

    /// What a worker got.
    /// @param worker  Less than num_workers().
    /// @return Blocks, groups, tensors, capacity in tokens.
    kvpages_worker_info worker(std::size_t worker = 0) const {
        kvpages_worker_info info = KVPAGES_WORKER_INFO_INIT;
        check(kvpages_plan_get_worker(get(), worker, &info));
        return info;
    }

    /// A group of layers that share a block table.
    /// @param group   Less than the worker's num_groups.
    /// @param worker  Less than num_workers().
    /// @return Block sizes in tokens, page bytes, entries of a row, how many layers.
    kvpages_group_info group(std::size_t group, std::size_t worker = 0) const {
        kvpages_group_info info = KVPAGES_GROUP_INFO_INIT;
        check(kvpages_plan_get_group(get(), worker, group, &info));
        return info;
    }

    /// A spec of a group as it was planned; its pointers are the plan's. `index` is less than the
    /// group's num_specs.
    /// @param group   Less than the worker's num_groups.
    /// @param index   Which of its specs.
    /// @param worker  Less than num_workers().
    /// @return The spec, with the block size and the padding that were planned.
    kvpages_spec group_spec(std::size_t group, std::size_t index = 0,
                            std::size_t worker = 0) const {
        kvpages_spec spec = KVPAGES_SPEC_INIT;
        check(kvpages_plan_get_group_spec(get(), worker, group, index, &spec, nullptr));
        return spec;
    }

    /// Names of the layers of a group that this worker has: those with pages of their own, then
    /// those that share.
    /// @param group   Less than the worker's num_groups; else there are no names.
    /// @param worker  Less than num_workers().
    /// @return The names.
    std::vector<std::string> group_layers(std::size_t group, std::size_t worker = 0) const {
        std::vector<std::string> names;
        while (const char* name =
                   kvpages_plan_group_layer_name(get(), worker, group, names.size())) {
            names.emplace_back(name);
        }
        return names;
    }

    /// An allocation, or a slot of the packed one.
    /// @param tensor  Less than the worker's num_tensors.
    /// @param worker  Less than num_workers().
    /// @return Its bytes, and where its blocks lie.
    kvpages_tensor_info tensor(std::size_t tensor, std::size_t worker = 0) const {
        kvpages_tensor_info info = KVPAGES_TENSOR_INFO_INIT;
        check(kvpages_plan_get_tensor(get(), worker, tensor, &info));
        return info;
    }

    /// The steps in which a scheduler counts tokens and a prefix cache hashes them.
    /// @param config  What the engine's prefix cache does.
    /// @return Both, in tokens.
    BlockSizes block_sizes(const kvpages_block_size_config& config) const {
        BlockSizes out;
        check(kvpages_plan_resolve_block_sizes(get(), &config, &out.scheduler, &out.hash));
        return out;
    }

    /// Why the plan is as it is, for people.
    /// @return Lines of text. Their wording may change; programs read explain_json().
    std::string explain() const { return explain(KVPAGES_TEXT_FORMAT_TEXT); }
    /// Why the plan is as it is, for programs.
    /// @return JSON, whose keys stay; docs/explanation.md lists them.
    std::string explain_json() const { return explain(KVPAGES_TEXT_FORMAT_JSON); }

    /// @return The C handle, for calls of kvpages.h. It stays this object's.
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
/// @return How many there are.
inline std::uint32_t device_count() {
    std::uint32_t count = 0;
    check(kvpages_device_count(&count));
    return count;
}

/// What a CUDA device is.
struct DeviceInfo : kvpages_device_info {
    DeviceInfo() noexcept : kvpages_device_info(KVPAGES_DEVICE_INFO_INIT) {}

    /// What device `ordinal` is; its primary context is retained meanwhile.
    /// @param ordinal  Less than device_count().
    /// @return Its name, memory and abilities.
    /// @throws Error  DEVICE_UNAVAILABLE: no driver, or no such device.
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
    /// @return A struct whose context is this one's.
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
/// Immutable: all calls on it may run concurrently. Caches in it keep it alive.
class Memory {
public:
    /// The host's memory.
    /// @return A memory; a cache takes bytes of it when it is made, zeroed by the system when
    ///         touched.
    static Memory host() {
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_host(&raw));
        return Memory(raw);
    }

    /// The engine's own allocator.
    /// @param callbacks  Copied; kept until the last cache in it, its Ops and its tensors are gone.
    ///                   Functions of C: none may throw.
    /// @return A memory.
    static Memory external(const kvpages_memory_callbacks& callbacks) {
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_external(&callbacks, &raw));
        return Memory(raw);
    }

    /// A buffer of the engine's, which must live longer than all caches in it, their Ops and tensors.
    /// @param data   Not NULL; the host can read and write it, and nothing else uses it.
    /// @param bytes  Its bytes.
    /// @return A memory; caches lie one behind another in the buffer.
    static Memory adopted(void* data, std::size_t bytes) {
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_adopted(data, bytes, &raw));
        return Memory(raw);
    }

    /// A buffer of the engine's in a device's memory.
    /// @param device  Where it is; a context in it is kept.
    /// @param data    A device pointer.
    /// @param bytes   Its bytes.
    /// @return A memory.
    static Memory adopted(const kvpages_device& device, void* data, std::size_t bytes) {
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_adopted_device(&device, data, bytes, &raw));
        return Memory(raw);
    }

    /// Memory of a CUDA device.
    /// @param config  Which device, and what the memory has to be able to do.
    /// @return A memory.
    /// @throws Error  DEVICE_UNAVAILABLE: no driver or no such device. UNSUPPORTED: it lacks what
    ///         was asked for.
    static Memory cuda(const CudaMemory& config = {}) {
        const kvpages_cuda_memory_config c_config = config.c_config();
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_cuda(&c_config, &raw));
        return Memory(raw);
    }

    /// Memory of the host, pinned for a CUDA device. No flags.
    /// @param config  Which device.
    /// @return A memory. Caches in it cannot grow.
    static Memory pinned(const CudaMemory& config = {}) {
        const kvpages_cuda_memory_config c_config = config.c_config();
        kvpages_memory* raw = nullptr;
        check(kvpages_memory_create_pinned(&c_config, &raw));
        return Memory(raw);
    }

    /// @return The C handle, for calls of kvpages.h. It stays this object's.
    const kvpages_memory* get() const noexcept { return handle_.get(); }

private:
    explicit Memory(kvpages_memory* raw) : handle_(raw) {}

    detail::Owned<kvpages_memory, kvpages_memory_destroy> handle_;
};

/// A view, a block table or a slot mapping: what a kernel is given. Its arrays are those of what
/// it came from.
struct Tensor {
    void* data = nullptr;  ///< first element; a device pointer when the memory is a device's
    Dtype dtype = Dtype::u8;  ///< of its elements
    Span<const std::int64_t> shape;  ///< sizes, outermost dimension first
    Span<const std::int64_t> strides;  ///< in elements

    Tensor() noexcept = default;
    /// The same as in C.
    /// @param tensor  Its arrays are not copied.
    Tensor(const kvpages_tensor& tensor) noexcept
        : data(tensor.data),
          dtype(static_cast<Dtype>(tensor.dtype)),
          shape(tensor.shape, tensor.ndim),
          strides(tensor.strides, tensor.ndim) {}

    /// The same for C.
    /// @return A struct whose arrays are this one's.
    kvpages_tensor c_tensor() const noexcept {
        return {data, shape.data(), strides.data(), static_cast<std::uint32_t>(dtype),
                static_cast<std::uint32_t>(shape.size())};
    }

    /// Elements of the view.
    /// @return The product of its shape.
    std::int64_t num_elements() const noexcept {
        std::int64_t count = 1;
        for (const std::int64_t size : shape) count *= size;
        return count;
    }

    /// All elements of a tensor of one dimension, such as a slot mapping. Empty when there are more
    /// dimensions or when the elements do not follow each other. `T` has the bytes of one element.
    /// @return The elements; a device's must not be read by the host.
    template <typename T>
    Span<T> span() const noexcept {
        if (shape.size() != 1 || strides[0] != 1) return {};
        return {static_cast<T*>(data), static_cast<std::size_t>(shape[0])};
    }

    /// The element at an index, one number for each dimension. Host memory only; `T` has the bytes
    /// of one element. The index is not checked.
    /// @param index  One number for each dimension, outermost first.
    /// @return The element.
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
    /// @param kernel_block  Kernel block id: block id times the kernel blocks of a block, plus
    ///                      which of these.
    /// @param slot          Slot in the kernel block.
    /// @param head          Kv head of this rank.
    /// @return Elements from the start of the view.
    std::uint64_t key(std::uint64_t kernel_block, std::uint64_t slot,
                      std::uint64_t head) const noexcept {
        return kernel_block * kernel_block_stride + slot * token_stride + head * head_stride;
    }
    /// As key(), of the value.
    /// @param kernel_block  As key().
    /// @param slot          As key().
    /// @param head          As key().
    /// @return Elements from the start of the view.
    std::uint64_t value(std::uint64_t kernel_block, std::uint64_t slot,
                        std::uint64_t head) const noexcept {
        return key(kernel_block, slot, head) + value_offset;
    }
    /// The first element of the float32 scale behind a key, where scale_elements is not 0. It takes
    /// scale_elements of them and need not be aligned.
    /// @param kernel_block  As key().
    /// @param slot          As key().
    /// @param head          As key().
    /// @return Elements from the start of the view.
    std::uint64_t key_scale(std::uint64_t kernel_block, std::uint64_t slot,
                            std::uint64_t head) const noexcept {
        return key(kernel_block, slot, head) + key_elements * content_stride;
    }
    /// As key_scale(), of the value.
    /// @param kernel_block  As key().
    /// @param slot          As key().
    /// @param head          As key().
    /// @return Elements from the start of the view.
    std::uint64_t value_scale(std::uint64_t kernel_block, std::uint64_t slot,
                              std::uint64_t head) const noexcept {
        return value(kernel_block, slot, head) + value_elements * content_stride;
    }
};

/// What a cache cannot know of its rank, for its descriptor.
struct DescriptorConfig {
    std::uint64_t tensor_parallel_size = 0;         ///< 0: not told
    std::uint64_t tensor_parallel_rank = 0;         ///< which of them this is
    std::uint64_t context_parallel_size = 0;        ///< 0: not told
    std::uint64_t context_parallel_rank = 0;        ///< which of them this is
    std::uint64_t context_parallel_interleave = 0;  ///< 0: 1
    /// The model's kv heads of each layer of the cache, 0 for those of all ranks together; empty
    /// when that is so of all. It takes a number where heads are copied to several ranks.
    std::vector<std::uint64_t> model_kv_heads;

    /// The same for C. Its array is this object's.
    /// @return A struct whose array is this object's.
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

/// What a consumer of a tensor may do with it.
enum class Access { read_write, read_only };

/// A tensor of DLPack, whose deleter is called when this goes. release() hands it to a consumer. The
/// struct is that of dlpack.h, to be included before or after this header.
using DlpackTensor = detail::Owned<::DLManagedTensorVersioned, kvpages_dlpack_destroy>;
/// The same for consumers that do not know DLPack 1.0.
using UnversionedDlpackTensor =
    detail::Owned<::DLManagedTensor, kvpages_dlpack_destroy_unversioned>;

/// The memory of one worker's layers, and a view of it for each layer.
///
/// resize() needs it and its Ops for itself; all other calls may run concurrently. Addresses stay as they are
/// until it is destroyed, and views are valid until then.
class Cache {
public:
    /// Allocates a worker's part of a plan. With `num_blocks`, only the first ones get memory, and
    /// resize() changes how many.
    /// @param plan        The cache keeps what it needs of it.
    /// @param memory      Where the bytes come from; kept alive. Fresh memory is zero.
    /// @param worker      Less than the plan's num_workers().
    /// @param num_blocks  0: all blocks have memory, for good.
    /// @param flags       With KVPAGES_CACHE_POISON, blocks that were never written are loud when they
    ///                    are read.
    /// @return The cache.
    /// @throws Error  OUT_OF_HOST_MEMORY or OUT_OF_DEVICE_MEMORY: what was taken is given back.
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

    /// Changes how many blocks have memory, between steps: no other call uses the cache or its Ops.
    /// No address changes; none of the blocks in use may go.
    /// @param num_blocks     1 to max_blocks().
    /// @param blocks_in_use  Ids of blocks that hold something.
    /// @throws Error  INVALID_ARGUMENT, kind "block_in_use": one of them would go, and the text
    ///         names it.
    void resize(std::uint64_t num_blocks, Span<const std::int32_t> blocks_in_use) {
        check(kvpages_cache_resize(handle_.get(), num_blocks, blocks_in_use.data(),
                                   blocks_in_use.size()));
    }

    /// Blocks that have memory.
    /// @return Their number; ids are 0 to this minus 1.
    std::uint64_t num_blocks() const noexcept { return kvpages_cache_num_blocks(get()); }
    /// Blocks that have addresses: those of the plan.
    /// @return Their number. Shapes of views count them.
    std::uint64_t max_blocks() const noexcept { return kvpages_cache_max_blocks(get()); }

    /// Where the bytes are.
    /// @return The device; its context is the cache's.
    kvpages_device device() const {
        kvpages_device out{};
        check(kvpages_cache_get_device(get(), &out));
        return out;
    }

    /// Layers that have views, in the model's order.
    /// @return Their number; layers without a backend are not among them.
    std::size_t num_layers() const noexcept { return kvpages_cache_num_layers(get()); }
    /// Name of a layer; NULL when there is no such layer.
    /// @param layer  Less than num_layers().
    /// @return A string of the cache's.
    const char* layer_name(std::size_t layer) const noexcept {
        return kvpages_cache_layer_name(get(), layer);
    }
    /// Views of a layer: 1, or one for each state.
    /// @param layer  Less than num_layers().
    /// @return Their number; 0 when there is no such layer.
    std::size_t num_views(std::size_t layer) const noexcept {
        return kvpages_cache_num_views(get(), layer);
    }

    /// The number of a layer. Look it up once, and ask for views by number.
    /// @param name  As the model has it.
    /// @return The number, less than num_layers().
    /// @throws Error  NOT_FOUND: no layer of that name has a view.
    std::size_t find(const std::string& name) const {
        std::size_t layer = 0;
        check(kvpages_cache_find_layer(get(), name.c_str(), &layer));
        return layer;
    }
    /// The number in this cache of a layer that is known by its number in the worker's
    /// model, as builders are told it.
    /// @param model_layer  Its number in the model, from 0.
    /// @return The number, less than num_layers().
    std::size_t find_model_layer(std::size_t model_layer) const {
        std::size_t layer = 0;
        check(kvpages_cache_find_model_layer(get(), model_layer, &layer));
        return layer;
    }

    /// A view of a layer: of its keys and values, or of one of its states.
    /// @param layer  Less than num_layers().
    /// @param state  Which state; 0 of an attention layer.
    /// @return The view, whose arrays are the cache's. Copy it freely.
    Tensor view(std::size_t layer, std::size_t state = 0) const {
        kvpages_tensor tensor{};
        check(kvpages_cache_get_view(get(), layer, state, &tensor));
        return tensor;
    }

    /// As above, by the name. Looks the name up: for a loop, find() it once.
    /// @param name   As the model has it.
    /// @param state  Which state; 0 of an attention layer.
    /// @return The view.
    Tensor view(const std::string& name, std::size_t state = 0) const {
        return view(find(name), state);
    }

    /// A view as a tensor of DLPack, which keeps the cache's memory, also when the cache goes first.
    /// @param layer   Less than num_layers().
    /// @param state   Which state; 0 of an attention layer.
    /// @param access  What the tensor says that its consumer may do.
    /// @return The tensor, to be released to a consumer. May end on any thread.
    DlpackTensor to_dlpack(std::size_t layer, std::size_t state = 0,
                           Access access = Access::read_write) const {
        const std::uint32_t flags = access == Access::read_only ? KVPAGES_DLPACK_READ_ONLY : 0;
        ::DLManagedTensorVersioned* raw = nullptr;
        check(kvpages_cache_export_dlpack(get(), layer, state, flags, &raw));
        return DlpackTensor(raw);
    }
    /// As above, by the name.
    /// @param name    As the model has it.
    /// @param state   Which state; 0 of an attention layer.
    /// @param access  What the tensor says that its consumer may do.
    /// @return The tensor.
    DlpackTensor to_dlpack(const std::string& name, std::size_t state = 0,
                           Access access = Access::read_write) const {
        return to_dlpack(find(name), state, access);
    }

    /// The same for consumers that do not know DLPack 1.0. They may write.
    /// @param layer  Less than num_layers().
    /// @param state  Which state; 0 of an attention layer.
    /// @return The tensor, to be released to a consumer. May end on any thread.
    UnversionedDlpackTensor to_unversioned_dlpack(std::size_t layer, std::size_t state = 0) const {
        ::DLManagedTensor* raw = nullptr;
        check(kvpages_cache_export_dlpack_unversioned(get(), layer, state, &raw));
        return UnversionedDlpackTensor(raw);
    }
    /// As above, by the name.
    /// @param name   As the model has it.
    /// @param state  Which state; 0 of an attention layer.
    /// @return The tensor.
    UnversionedDlpackTensor to_unversioned_dlpack(const std::string& name,
                                                  std::size_t state = 0) const {
        return to_unversioned_dlpack(find(name), state);
    }

    /// What a layer is: its group, its sizes, whose pages it reads.
    /// @param layer  Less than num_layers().
    /// @return The description.
    kvpages_layer_info layer(std::size_t layer) const {
        kvpages_layer_info out = KVPAGES_LAYER_INFO_INIT;
        check(kvpages_cache_get_layer(get(), layer, &out));
        return out;
    }

    /// How the axes of an attention layer's view lie.
    /// @param layer  Less than num_layers(); an attention layer.
    /// @return Strides by axis, in elements, and offsets.
    /// @throws Error  UNSUPPORTED: it is a state layer.
    ViewAxes axes(std::size_t layer) const {
        ViewAxes out;
        check(kvpages_cache_get_axes(get(), layer, &out));
        return out;
    }

    /// @return Pieces of memory that were taken.
    std::size_t num_allocations() const noexcept { return kvpages_cache_num_allocations(get()); }

    /// Bytes of all allocations.
    /// @return Their sum, those of blocks without memory included.
    std::uint64_t size_bytes() const {
        std::uint64_t sum = 0;
        for (std::size_t i = 0; i < num_allocations(); ++i) sum += allocation(i).size_bytes;
        return sum;
    }

    /// A piece of memory that was taken.
    /// @param allocation  Less than num_allocations().
    /// @return Its address and its bytes.
    kvpages_allocation allocation(std::size_t allocation) const {
        kvpages_allocation out{};
        check(kvpages_cache_get_allocation(get(), allocation, &out));
        return out;
    }

    /// What is proven of a view.
    /// @param layer  Less than num_layers().
    /// @param state  Which state; 0 of an attention layer.
    /// @return Its bytes, its largest offset and its alignment.
    kvpages_view_report report(std::size_t layer, std::size_t state = 0) const {
        kvpages_view_report out = KVPAGES_VIEW_REPORT_INIT;
        check(kvpages_cache_get_report(get(), layer, state, &out));
        return out;
    }

    /// The pieces of memory in which blocks lie at a constant distance. They do not change: ask
    /// once.
    /// @return The pieces: what a transfer engine registers.
    std::vector<kvpages_region> regions() const {
        std::vector<kvpages_region> all(kvpages_cache_num_regions(get()));
        for (std::size_t i = 0; i < all.size(); ++i) {
            check(kvpages_cache_get_region(get(), i, &all[i]));
        }
        return all;
    }

    /// The cache in numbers. The engine may tell how many blocks are in use: one number for all groups
    /// together, or one for each.
    /// @param blocks_in_use  Empty, one number, or one for each group.
    /// @return The numbers, as of now.
    kvpages_cache_snapshot snapshot(Span<const std::uint64_t> blocks_in_use = {}) const {
        const kvpages_cache_usage usage = usage_of(blocks_in_use);
        kvpages_cache_snapshot out = KVPAGES_CACHE_SNAPSHOT_INIT;
        check(kvpages_cache_get_snapshot(get(), &usage, &out));
        return out;
    }

    /// The same as JSON, with groups, allocations and regions.
    /// @param blocks_in_use  Empty, one number, or one for each group.
    /// @return JSON of one line; docs/observability.md has its keys.
    std::string snapshot_json(Span<const std::uint64_t> blocks_in_use = {}) const {
        const kvpages_cache_usage usage = usage_of(blocks_in_use);
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            return kvpages_cache_copy_snapshot(get(), &usage, buffer, capacity, length);
        });
    }

    /// What a block of a group is.
    /// @param group  Its number in the plan.
    /// @return Its bytes, padding and layers.
    kvpages_cache_group group(std::size_t group) const {
        kvpages_cache_group out = KVPAGES_CACHE_GROUP_INIT;
        check(kvpages_cache_get_group(get(), group, &out));
        return out;
    }

    /// The cache as JSON for another process, which reads it with Descriptor::parse().
    /// @param config  What the engine knows of this rank; by itself a cache does not.
    /// @return JSON, the same for the same cache; docs/descriptor.md says what it means.
    std::string descriptor(const DescriptorConfig& config = {}) const {
        const kvpages_descriptor_config c_config = config.c_config();
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            return kvpages_cache_copy_descriptor(get(), &c_config, buffer, capacity, length);
        });
    }

    /// The layers in binding order.
    /// @param num_attention_modules  Attention modules of one layer.
    /// @return Numbers of layers, by the index in their names.
    std::vector<std::size_t> bound_layers(std::uint64_t num_attention_modules = 1) const {
        std::vector<std::size_t> layers(num_layers());
        std::size_t count = 0;
        check(kvpages_cache_copy_bound_layers(get(), num_attention_modules, layers.data(),
                                              layers.size(), &count));
        return layers;
    }

    /// @return The C handle, for calls of kvpages.h. It stays this object's.
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
///
/// Immutable: all calls on it may run concurrently.
class Descriptor {
public:
    /// Reads and proves what Cache::descriptor() wrote, here or elsewhere.
    /// @param json  UTF-8; copied.
    /// @return The descriptor. No answer of it reaches outside an allocation of the size that it
    ///         states.
    /// @throws Error  INVALID_ARGUMENT: it is no descriptor, or its numbers contradict each other.
    /// @throws Error  UNSUPPORTED: it has a version that this library does not know.
    static Descriptor parse(const std::string& json) {
        kvpages_descriptor* raw = nullptr;
        check(kvpages_descriptor_create(json.data(), json.size(), &raw));
        return Descriptor(raw);
    }

    /// The same as JSON.
    /// @return The text, byte for byte what it was read from, when this version of the library
    ///         wrote that.
    std::string json() const {
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            return kvpages_descriptor_copy_json(get(), buffer, capacity, length);
        });
    }

    /// What it is about.
    /// @return Blocks, layers, groups, allocations, ranks.
    kvpages_descriptor_info info() const {
        kvpages_descriptor_info out = KVPAGES_DESCRIPTOR_INFO_INIT;
        check(kvpages_descriptor_get_info(get(), &out));
        return out;
    }
    /// Bytes of an allocation; 0 when there is no such one.
    /// @param allocation  Less than info().num_allocations.
    /// @return Bytes, those of blocks without memory included.
    std::uint64_t allocation_bytes(std::size_t allocation) const noexcept {
        return kvpages_descriptor_allocation_bytes(get(), allocation);
    }
    /// A group of layers that share a block table.
    /// @param group  Less than info().num_groups.
    /// @return Tokens of its blocks.
    kvpages_described_group group(std::size_t group) const {
        kvpages_described_group out = KVPAGES_DESCRIBED_GROUP_INIT;
        check(kvpages_descriptor_get_group(get(), group, &out));
        return out;
    }

    /// Layers: those of the cache, then those whose pages no backend reads.
    /// @return Their number.
    std::size_t num_layers() const noexcept { return kvpages_descriptor_num_layers(get()); }
    /// Name of a layer; NULL when there is no such layer.
    /// @param layer  Less than num_layers().
    /// @return A string of the descriptor's.
    const char* layer_name(std::size_t layer) const noexcept {
        return kvpages_descriptor_layer_name(get(), layer);
    }
    /// The number of a layer.
    /// @param name  As the cache's model had it.
    /// @return The number, less than num_layers().
    /// @throws Error  NOT_FOUND: there is no layer of that name.
    std::size_t find(const std::string& name) const {
        std::size_t layer = 0;
        check(kvpages_descriptor_find_layer(get(), name.c_str(), &layer));
        return layer;
    }
    /// How the pages, rows and states of a layer lie.
    /// @param layer  Less than num_layers().
    /// @return The description; offsets in bytes, strides in elements.
    kvpages_described_layer layer(std::size_t layer) const {
        kvpages_described_layer out = KVPAGES_DESCRIBED_LAYER_INIT;
        check(kvpages_descriptor_get_layer(get(), layer, &out));
        return out;
    }
    /// A state of a state layer.
    /// @param layer  Less than num_layers().
    /// @param state  Less than the layer's num_states.
    /// @return Its type, its shape, and where in the page it starts.
    kvpages_described_state state(std::size_t layer, std::size_t state) const {
        kvpages_described_state out = KVPAGES_DESCRIBED_STATE_INIT;
        check(kvpages_descriptor_get_state(get(), layer, state, &out));
        return out;
    }

    /// Where a block of a layer is: the runs of its page.
    /// @param layer  Less than num_layers().
    /// @param block  Less than info().num_blocks.
    /// @return One run, or several where keys and values of all blocks lie apart.
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
    /// @param layer  Less than num_layers().
    /// @param block  Less than info().num_blocks.
    /// @param slot   Less than the layer's block_slots.
    /// @param head   Less than the layer's num_kv_heads.
    /// @return Where its first element is, and how far the next ones are apart.
    kvpages_row key(std::size_t layer, std::uint64_t block, std::uint64_t slot,
                    std::uint64_t head) const {
        return row(layer, block, slot, head, KVPAGES_ROW_PART_KEY);
    }
    /// Where the value of a slot and head is.
    /// @param layer  As key().
    /// @param block  As key().
    /// @param slot   As key().
    /// @param head   As key().
    /// @return As key().
    /// @throws Error  UNSUPPORTED: the layer has no values of their own.
    kvpages_row value(std::size_t layer, std::uint64_t block, std::uint64_t slot,
                      std::uint64_t head) const {
        return row(layer, block, slot, head, KVPAGES_ROW_PART_VALUE);
    }

    /// @return The C handle, for calls of kvpages.h. It stays this object's.
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
///
/// Immutable: all calls on it may run concurrently.
class Reshard {
public:
    /// From the ranks that have blocks to those that get them.
    /// @param sources  Descriptors of the ranks that have blocks; none NULL.
    /// @param targets  Descriptors of the ranks that get them; none NULL.
    /// @return What copies() answers from; the descriptors are not needed any more.
    /// @throws Error  UNSUPPORTED: a layer cannot be copied; the text names it and says why.
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
    /// @param moves  Group, block of the sources, block of the targets; no target twice.
    /// @return The copies, independent of each other, as few as the layouts allow.
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

    /// @return The C handle, for calls of kvpages.h. It stays this object's.
    const kvpages_reshard* get() const noexcept { return handle_.get(); }

private:
    explicit Reshard(kvpages_reshard* raw) : handle_(raw) {}

    detail::Owned<kvpages_reshard, kvpages_reshard_destroy> handle_;
};

/// Makes strided copies in host memory, one after another, from the allocations of some ranks to
/// those of others. All are checked before the first byte moves.
/// @param copies   What to copy, such as Reshard::copies() says.
/// @param sources  Allocations of each rank that copies come from.
/// @param targets  Allocations of each rank that copies go to.
/// @throws Error  INVALID_ARGUMENT: a copy leaves its allocation, or writes a byte twice.
inline void copy_strided(Span<const kvpages_strided_copy> copies,
                         Span<const kvpages_rank_memory> sources,
                         Span<const kvpages_rank_memory> targets) {
    check(kvpages_copy_strided(copies.data(), copies.size(), sources.data(), sources.size(),
                               targets.data(), targets.size()));
}

/// What tables are made for.
struct TablesConfig {
    std::uint64_t max_requests = 0;                 ///< rows of each table
    std::uint64_t max_tokens = 0;                   ///< of a step, of all requests together
    std::uint64_t num_blocks = 0;                   ///< 0: the plan's, or as many as ids can tell apart
    std::uint64_t context_parallel_size = 0;        ///< 0: the plan's, or 1
    std::uint64_t context_parallel_rank = 0;        ///< which of them this is
    std::uint64_t context_parallel_interleave = 1;  ///< tokens in a row on one rank
    bool aligned_rows = false;                      ///< rows as wide as row_width() says
    /// Tokens of the longest request. 0: the plan's; a plan from parts has none.
    std::uint64_t max_model_len = 0;
    /// Where tables, input tables and slots are, such as Cache::device(); the host at first. A
    /// context must live as long as the tables.
    kvpages_device device{};

    /// The same for C, without groups.
    /// @return A struct without pointers but that of the context.
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
///
/// Every call that changes them needs them for itself. None of those takes memory or a lock.
class Tables {
public:
    /// Tables of a worker's groups.
    /// @param plan    Its groups, and how long a row gets.
    /// @param config  The largest batch, and where tables are.
    /// @param worker  Less than the plan's num_workers().
    /// @return Tables whose rows are empty.
    /// @throws Error  OUT_OF_HOST_MEMORY or OUT_OF_DEVICE_MEMORY.
    static Tables make(const Plan& plan, const TablesConfig& config, std::size_t worker = 0) {
        const kvpages_tables_config c_config = config.c_config();
        kvpages_tables* raw = nullptr;
        check(kvpages_tables_create_for_plan(plan.get(), worker, &c_config, &raw));
        return Tables(raw);
    }

    /// Tables of groups that the engine states.
    /// @param groups  Copied.
    /// @param config  The largest batch, and where tables are.
    /// @return Tables whose rows are empty.
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
    /// @param row_blocks         Blocks of the longest request.
    /// @param block_size         Tokens of a block.
    /// @param kernel_block_size  Tokens of a kernel block, which divide it; 0: those of a block.
    /// @return Entries.
    static std::uint64_t row_width(std::uint64_t row_blocks, std::uint64_t block_size,
                                   std::uint64_t kernel_block_size = 0) {
        std::uint64_t width = 0;
        check(kvpages_table_row_width(row_blocks, block_size, kernel_block_size, &width));
        return width;
    }

    /// @return Tables, one for each group.
    std::size_t num_groups() const noexcept { return kvpages_tables_num_groups(get()); }

    /// Where tables, input tables and slots are.
    /// @return The device; its context is the tables'.
    kvpages_device device() const {
        kvpages_device out{};
        check(kvpages_tables_get_device(get(), &out));
        return out;
    }

    /// What the table of a group is.
    /// @param group  Less than num_groups().
    /// @return Its sizes in tokens, blocks and entries.
    kvpages_table_info info(std::size_t group) const {
        kvpages_table_info out = KVPAGES_TABLE_INFO_INIT;
        check(kvpages_tables_get_info(get(), group, &out));
        return out;
    }

    /// Kernel blocks of a request, those staged included.
    /// @param request  Number of its row.
    /// @param group    Less than num_groups().
    /// @return Entries of the row.
    std::size_t num_entries(std::size_t request, std::size_t group) const {
        std::size_t count = 0;
        check(kvpages_tables_num_entries(get(), request, group, &count));
        return count;
    }

    /// Applied rows: int32 [max_requests, row width]. Ask once; it does not move.
    /// @param group  Less than num_groups().
    /// @return A tensor of these tables'.
    Tensor table(std::size_t group) const {
        kvpages_tensor out{};
        check(kvpages_tables_get_table(get(), group, &out));
        return out;
    }

    /// Rows of the batch: int32 [max_requests, row width]. Ask once; it does not move.
    /// @param group  Less than num_groups().
    /// @return A tensor of these tables'.
    Tensor input_table(std::size_t group) const {
        kvpages_tensor out{};
        check(kvpages_tables_get_input_table(get(), group, &out));
        return out;
    }

    /// Slots of the batch: int64 [max_tokens]. Ask once; they do not move.
    /// @param group  Less than num_groups().
    /// @return A tensor of these tables'.
    Tensor slots(std::size_t group) const {
        kvpages_tensor out{};
        check(kvpages_tables_get_slots(get(), group, &out));
        return out;
    }

    /// Stages blocks to be added to a row.
    /// @param request  Number of its row, less than max_requests.
    /// @param group    Less than num_groups().
    /// @param blocks   Ids of whole blocks; copied.
    /// @throws Error  INVALID_ARGUMENT: the row is full, or there is no such block. Nothing is
    ///         staged then.
    void append(std::size_t request, std::size_t group, Span<const std::int32_t> blocks) {
        check(kvpages_tables_append(get(), request, group, blocks.data(), blocks.size()));
    }
    /// Stages blocks to take the place of those in a row.
    /// @param request  As append().
    /// @param group    As append().
    /// @param blocks   As append().
    /// @throws Error  As append().
    void overwrite(std::size_t request, std::size_t group, Span<const std::int32_t> blocks) {
        check(kvpages_tables_overwrite(get(), request, group, blocks.data(), blocks.size()));
    }
    /// Stages writes to many rows, all or none.
    /// @param writes  Copied.
    /// @throws Error  As append(); the text says which write.
    void write(const kvpages_row_writes& writes) { check(kvpages_tables_write(get(), &writes)); }
    /// Stages that a row keeps its first blocks only.
    /// @param request     As append().
    /// @param group       As append().
    /// @param num_blocks  Blocks to keep, no more than there are.
    void truncate(std::size_t request, std::size_t group, std::size_t num_blocks) {
        check(kvpages_tables_truncate(get(), request, group, num_blocks));
    }
    /// Stages that a request takes the place of another.
    /// @param from  Number of its row, which is empty then.
    /// @param to    Number of the row that it gets.
    void move(std::size_t from, std::size_t to) { check(kvpages_tables_move(get(), from, to)); }
    /// Stages that two requests change places.
    /// @param a  Number of one row.
    /// @param b  Number of the other.
    void swap(std::size_t a, std::size_t b) { check(kvpages_tables_swap(get(), a, b)); }
    /// Stages that a request has no blocks.
    /// @param request  Number of its row.
    void clear(std::size_t request) { check(kvpages_tables_clear(get(), request)); }
    /// Makes the tables what was staged.
    /// @param stream  CUstream.
    void apply(void* stream = nullptr) { check(kvpages_tables_apply(get(), stream)); }
    /// Empties everything in place.
    /// @param stream  CUstream.
    void reset(void* stream = nullptr) { check(kvpages_tables_reset(get(), stream)); }

    /// All that a step asks of tables: applies what was staged, gathers the rows of a batch and finds
    /// its slots. The result is for Attention::build(); it points to these tables, to the batch's
    /// arrays, and for a device to copies of them there.
    /// @param batch  Its arrays must stay until the step is not used any more.
    /// @return The step. What only the engine knows, such as causality, is zero and can be set.
    /// @throws Error  INVALID_ARGUMENT: arrays do not fit each other, or a sequence ends before one
    ///         of its positions. Nothing is applied then.
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
    /// @param requests  Numbers of rows.
    /// @param num_rows  Rows that kernels will read; those past the batch are null.
    /// @param stream    CUstream.
    void gather(Span<const std::int32_t> requests, std::size_t num_rows, void* stream = nullptr) {
        check(kvpages_tables_gather(get(), requests.data(), requests.size(), num_rows, stream));
    }
    /// Makes the input tables those of a batch of dummies.
    /// @param num_rows  Rows that kernels will read.
    /// @param stream    CUstream.
    void gather_dummies(std::size_t num_rows, void* stream = nullptr) {
        check(kvpages_tables_gather_dummies(get(), num_rows, stream));
    }
    /// Finds the slots of a batch. `query_start` has an entry more than `requests`.
    /// @param requests     Numbers of rows; -1 is a dummy.
    /// @param query_start  Where the tokens of each request start; the last entry is how many there
    ///                     are.
    /// @param positions    Of each token in its sequence.
    /// @param stream       CUstream.
    void map_slots(Span<const std::int32_t> requests, Span<const std::int32_t> query_start,
                   Span<const std::int64_t> positions, void* stream = nullptr) {
        detail::check_length("query_start", query_start.size(), requests.size() + 1);
        check(kvpages_tables_map_slots(get(), requests.data(), requests.size(), query_start.data(),
                                       positions.data(), positions.size(), stream));
    }
    /// Makes all slots those of a batch of dummies.
    /// @param stream  CUstream.
    void map_dummies(void* stream = nullptr) { check(kvpages_tables_map_dummies(get(), stream)); }

    /// The tables in numbers.
    /// @return The numbers, as of now.
    kvpages_tables_snapshot snapshot() const {
        kvpages_tables_snapshot out = KVPAGES_TABLES_SNAPSHOT_INIT;
        check(kvpages_tables_get_snapshot(get(), &out));
        return out;
    }

    /// The same as JSON, with groups.
    /// @return JSON of one line; docs/observability.md has its keys.
    std::string snapshot_json() const {
        return detail::text([&](char* buffer, std::size_t capacity, std::size_t* length) {
            return kvpages_tables_copy_snapshot(get(), buffer, capacity, length);
        });
    }

    /// @return The C handle, for calls of kvpages.h. It stays this object's.
    kvpages_tables* get() const noexcept { return handle_.get(); }

private:
    explicit Tables(kvpages_tables* raw) : handle_(raw) {}

    detail::Owned<kvpages_tables, kvpages_tables_destroy> handle_;
};

/// Rows of keys and values without gaps, to store in a layer. The layer's number is that in the
/// cache. The scales are those of fp8 with one scale for the tensor.
/// @param layer        Its number in the cache.
/// @param keys         Rows of keys, or of what is stored instead: [tokens, heads, elements].
/// @param values       Rows of values; NULL of a layer without.
/// @param key_scale    What keys are divided by.
/// @param value_scale  What values are divided by.
/// @return A struct that points to the rows.
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
///
/// Calls that change blocks as a whole need it for themselves; write() and gather() may run
/// concurrently, on different slots.
class Ops {
public:
    /// `max_block_ids` bounds the ids of one call; 0 stands for all blocks.
    /// @param cache            Its memory is kept.
    /// @param max_block_ids    Ids of one call at most.
    /// @param max_concurrency  Calls that may be under way at once.
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
    /// @param ids     Block ids, in host memory.
    /// @param stream  CUstream.
    /// @throws Error  INVALID_ARGUMENT: an id is out of range; nothing is cleared then.
    void zero_blocks(Span<const std::int32_t> ids, void* stream = nullptr) {
        check(kvpages_ops_zero_blocks(get(), ids.data(), ids.size(), nullptr, stream));
    }

    /// Clears blocks in the layers chosen.
    /// @param ids        Block ids, in host memory.
    /// @param selection  Groups or layers.
    /// @param stream     CUstream.
    void zero_blocks(Span<const std::int32_t> ids, const kvpages_block_selection& selection,
                     void* stream = nullptr) {
        check(kvpages_ops_zero_blocks(get(), ids.data(), ids.size(), &selection, stream));
    }

    /// Clears blocks in the layers of some groups.
    /// @param groups  Numbers of groups.
    /// @param ids     Block ids, in host memory.
    /// @param stream  CUstream.
    void zero_blocks_of(Span<const std::uint64_t> groups, Span<const std::int32_t> ids,
                        void* stream = nullptr) {
        kvpages_block_selection selection = KVPAGES_BLOCK_SELECTION_INIT;
        selection.groups = groups.data();
        selection.num_groups = groups.size();
        zero_blocks(ids, selection, stream);
    }

    /// Fills freed blocks in every layer with bytes that are NaN as floats, so that a stale read is
    /// loud. Not block 0.
    /// @param ids     Block ids in host memory, each once and none of them 0.
    /// @param stream  CUstream.
    void poison_blocks(Span<const std::int32_t> ids, void* stream = nullptr) {
        check(kvpages_ops_poison_blocks(get(), ids.data(), ids.size(), nullptr, stream));
    }

    /// The same in the layers chosen.
    /// @param ids        Block ids in host memory, each once and none of them 0.
    /// @param selection  Layers and groups.
    /// @param stream     CUstream.
    void poison_blocks(Span<const std::int32_t> ids, const kvpages_block_selection& selection,
                       void* stream = nullptr) {
        check(kvpages_ops_poison_blocks(get(), ids.data(), ids.size(), &selection, stream));
    }

    /// The same in the layers of some groups.
    /// @param groups  Their numbers in the plan.
    /// @param ids     Block ids in host memory, each once and none of them 0.
    /// @param stream  CUstream.
    void poison_blocks_of(Span<const std::uint64_t> groups, Span<const std::int32_t> ids,
                          void* stream = nullptr) {
        kvpages_block_selection selection = KVPAGES_BLOCK_SELECTION_INIT;
        selection.groups = groups.data();
        selection.num_groups = groups.size();
        poison_blocks(ids, selection, stream);
    }

    /// Copies blocks in every layer, as if all were read before any is written.
    /// @param copies  From and to, in host memory; no target twice.
    /// @param stream  CUstream.
    /// @throws Error  INVALID_ARGUMENT: an id is out of range or a target is listed twice; nothing
    ///         is copied.
    void copy_blocks(Span<const kvpages_block_copy> copies, void* stream = nullptr) {
        check(kvpages_ops_copy_blocks(get(), copies.data(), copies.size(), nullptr, 0, stream));
    }

    /// Copies blocks in the layers chosen.
    /// @param copies     As above.
    /// @param selection  Groups or layers.
    /// @param stream     CUstream.
    void copy_blocks(Span<const kvpages_block_copy> copies,
                     const kvpages_block_selection& selection, void* stream = nullptr) {
        check(kvpages_ops_copy_blocks(get(), copies.data(), copies.size(), &selection, 0, stream));
    }

    /// Stores rows of `dtype` in the slots of layers of one group; slot -1 is skipped. `fp8` says
    /// which fp8 layers of plain bytes hold, e4m3fn when it is not set.
    /// @param layers  Rows of each, see kv_rows().
    /// @param slots   Of each token, such as Tables::slots() has them.
    /// @param dtype   Of the rows. They are converted and quantised to what the layer stores.
    /// @param fp8     Only for layers of bytes that are fp8.
    /// @param stream  CUstream.
    /// @throws Error  UNSUPPORTED: rows of this type cannot be stored in such a layer; the text
    ///         says what can.
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
    /// @param layer   Its rows.
    /// @param slots   As above.
    /// @param dtype   As above.
    /// @param fp8     As above.
    /// @param stream  CUstream.
    void write(const kvpages_kv_rows& layer, Span<const std::int64_t> slots, Dtype dtype,
               std::optional<Dtype> fp8 = std::nullopt, void* stream = nullptr) const {
        write({&layer, 1}, slots, dtype, fp8, stream);
    }

    /// Reads rows of `dtype` from the slots of layers of one group; slot -1 is skipped.
    /// @param layers  Room for the rows of each.
    /// @param slots   Of each row.
    /// @param dtype   Of the rows; what is stored is converted.
    /// @param fp8     As write().
    /// @param stream  CUstream.
    /// @throws Error  As write().
    void gather(Span<const kvpages_kv_rows_out> layers, Span<const std::int64_t> slots,
                Dtype dtype, std::optional<Dtype> fp8 = std::nullopt, void* stream = nullptr) const {
        kvpages_kv_gather gather = gather_of(layers, dtype, fp8);
        gather.slots = slots.data();
        gather.num_slots = slots.size();
        gather.stream = stream;
        check(kvpages_ops_gather_kv(get(), &gather));
    }

    /// Reads rows of `dtype` from all slots of some blocks, one block after another.
    /// @param layers  Room for the rows of each.
    /// @param ids     Block ids.
    /// @param dtype   Of the rows; what is stored is converted.
    /// @param fp8     As write().
    /// @param stream  CUstream.
    void gather_blocks(Span<const kvpages_kv_rows_out> layers, Span<const std::int32_t> ids,
                       Dtype dtype, std::optional<Dtype> fp8 = std::nullopt, void* stream = nullptr) const {
        kvpages_kv_gather gather = gather_of(layers, dtype, fp8);
        gather.block_ids = ids.data();
        gather.num_block_ids = ids.size();
        gather.stream = stream;
        check(kvpages_ops_gather_kv(get(), &gather));
    }

    /// @return The C handle, for calls of kvpages.h. It stays this object's.
    kvpages_ops* get() noexcept { return handle_.get(); }
    /// @return The C handle, for calls of kvpages.h. It stays this object's.
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
    /// @param common  Counts, tables and slots of the step; valid during the call, what it points
    ///                to longer.
    /// @param extra   The engine's own, handed on.
    /// @return The metadata, which stays the builder's. Attention::metadata() hands it out.
    virtual void* build(const kvpages_common_metadata& common, void* extra) = 0;
    /// The metadata of a step that is captured into a graph.
    /// @param common  As build().
    /// @return As build().
    virtual void* build_for_capture(const kvpages_common_metadata& common) {
        return build(common, nullptr);
    }
    /// How far the metadata can be captured: one of KVPAGES_GRAPH_SUPPORT_*. `own` is what the
    /// backend's contract says.
    /// @param own  One of KVPAGES_GRAPH_SUPPORT_*.
    /// @return The same, or less.
    virtual std::uint32_t graph_support(std::uint32_t own) { return own; }
    /// The workspace that it lets others use; NULL when it has none to give.
    /// @return The workspace; whose it is, is between the builders.
    virtual void* workspace() { return nullptr; }
    /// Takes the workspace of a builder made before it.
    /// @param workspace  What workspace() of that one returned.
    virtual void set_workspace(void* workspace) { static_cast<void>(workspace); }

protected:
    Builder() = default;
    /// A builder is copied as its own class says.
    Builder(const Builder&) = default;
    /// A builder is assigned as its own class says.
    /// @return This object.
    Builder& operator=(const Builder&) = default;
};

/// Makes builders.
class BuilderFactory {
public:
    virtual ~BuilderFactory() = default;

    /// A builder. Called while the attention groups are made, never later.
    /// @param info  The attention group that it is for. Pointers in it are valid during the call.
    /// @return The builder; empty: the group has none, and its layers no metadata.
    virtual std::unique_ptr<Builder> create(const kvpages_builder_info& info) = 0;

protected:
    BuilderFactory() = default;
    /// A factory is copied as its own class says.
    BuilderFactory(const BuilderFactory&) = default;
    /// A factory is assigned as its own class says.
    /// @return This object.
    BuilderFactory& operator=(const BuilderFactory&) = default;
};

/// What attention groups are made of.
struct AttentionConfig {
    std::size_t worker = 0;                                 ///< less than the plan's num_workers()
    std::optional<std::vector<std::string>> active_layers;  ///< names; empty optional: all
    std::uint64_t num_builders = 1;                         ///< of each group, for micro-batches
};

/// The attention groups of one worker, their builders, and what these made of the last step.
///
/// build() and limit_graph_support() need it for themselves; all other calls may run concurrently.
class Attention {
public:
    /// Groups and builders. The builders are destroyed with the object, the last made first.
    /// @param plan     Its groups and backends.
    /// @param factory  Asked for a builder of each attention group, and not needed afterwards.
    /// @param config   Which worker and layers.
    /// @return Groups with builders.
    /// @throws Error  NOT_FOUND: no such worker or active layer. What a builder throws comes out as
    ///         it is.
    static Attention make(const Plan& plan, BuilderFactory& factory,
                          const AttentionConfig& config = {}) {
        return make(plan, &factory, config);
    }

    /// Groups without builders.
    /// @param plan    Its groups and backends.
    /// @param config  Which worker and layers.
    /// @return Groups; their layers have slot mappings and no metadata.
    static Attention make(const Plan& plan, const AttentionConfig& config = {}) {
        return make(plan, nullptr, config);
    }

    /// @return Groups of the plan, by their numbers there.
    std::size_t num_cache_groups() const noexcept {
        return kvpages_attention_num_cache_groups(get());
    }
    /// Attention groups of a cache group.
    /// @param cache_group  Less than num_cache_groups().
    /// @return Their number.
    std::size_t num_groups(std::size_t cache_group) const noexcept {
        return kvpages_attention_num_groups(get(), cache_group);
    }

    /// An attention group.
    /// @param cache_group  Less than num_cache_groups().
    /// @param group        Less than num_groups().
    /// @return Layers, heads, kernel block size and graph support.
    kvpages_attention_group_info group(std::size_t cache_group, std::size_t group) const {
        kvpages_attention_group_info out = KVPAGES_ATTENTION_GROUP_INFO_INIT;
        check(kvpages_attention_get_group(get(), cache_group, group, &out));
        return out;
    }

    /// What the layers of a group store; its pointers are this object's.
    /// @param cache_group  Less than num_cache_groups().
    /// @param group        Less than num_groups().
    /// @return The spec as it was planned.
    kvpages_spec group_spec(std::size_t cache_group, std::size_t group) const {
        kvpages_spec out = KVPAGES_SPEC_INIT;
        check(kvpages_attention_get_group_spec(get(), cache_group, group, &out));
        return out;
    }

    /// Name of a group's backend; NULL when there is no such group.
    /// @param cache_group  Less than num_cache_groups().
    /// @param group        Less than num_groups().
    /// @return A string of this object's.
    const char* group_backend(std::size_t cache_group, std::size_t group) const noexcept {
        return kvpages_attention_group_backend(get(), cache_group, group);
    }

    /// Names of the layers of a group.
    /// @param cache_group  Less than num_cache_groups().
    /// @param group        Less than num_groups().
    /// @return The names.
    std::vector<std::string> group_layers(std::size_t cache_group, std::size_t group) const {
        std::vector<std::string> names;
        while (const char* name = kvpages_attention_group_layer_name(get(), cache_group, group,
                                                                     names.size())) {
            names.emplace_back(name);
        }
        return names;
    }

    /// The lowest graph support of all builders: one of KVPAGES_GRAPH_SUPPORT_*.
    /// @return The number; without builders that of the backends' contracts.
    std::uint32_t graph_support() const noexcept {
        return kvpages_attention_graph_support(get(), nullptr);
    }
    /// Name of the first backend that has it; NULL when none limits it.
    /// @return A string of this object's.
    const char* graph_support_backend() const noexcept {
        const char* name = nullptr;
        static_cast<void>(kvpages_attention_graph_support(get(), &name));
        return name;
    }
    /// Lowers it to what the engine can capture.
    /// @param limit  One of KVPAGES_GRAPH_SUPPORT_*; one that is not lower changes nothing.
    void limit_graph_support(std::uint32_t limit) {
        check(kvpages_attention_limit_graph_support(get(), limit));
    }

    /// Builds the metadata of a step. On failure the metadata of the step before stays.
    /// @param step  What Tables::prepare() returned; pointers in it are handed on to the builders.
    /// @throws Error  What a builder threw comes out as it is.
    void build(const kvpages_step& step) { state_->check(kvpages_attention_build(get(), &step)); }

    /// Metadata of a layer by its number in the worker's model.
    /// @param layer    Its number in the model, not in the cache.
    /// @param builder  Which of num_builders.
    /// @return What the builder of its group returned; NULL where there is none.
    void* layer_metadata(std::size_t layer, std::size_t builder = 0) const noexcept {
        return kvpages_attention_layer_metadata(get(), builder, layer);
    }

    /// As above, for an engine that knows what its builders return; NULL where there is none.
    /// @param layer    Its number in the model, not in the cache.
    /// @param builder  Which of num_builders.
    /// @return The same as layer_metadata(). Nothing checks that it is of this type.
    template <typename Metadata>
    Metadata* metadata(std::size_t layer, std::size_t builder = 0) const noexcept {
        return static_cast<Metadata*>(layer_metadata(layer, builder));
    }

    /// Slot mapping of a layer by its number in the worker's model.
    /// @param layer    Its number in the model, not in the cache.
    /// @param builder  Which of num_builders.
    /// @return int64 slots of the step, one for each token; empty before the first step.
    Tensor slot_mapping(std::size_t layer, std::size_t builder = 0) const {
        kvpages_tensor out{};
        check(kvpages_attention_get_slot_mapping(get(), builder, layer, &out));
        return out;
    }

    /// @return The C handle, for calls of kvpages.h. It stays this object's.
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
/// @param items           Of the request's prompt.
/// @param sliding_window  Tokens; longer runs are left out. Nothing: all are kept.
/// @return The first and the last token of each run, in order.
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
