/**
 * @file kvpages.h
 * @brief Paged KV cache memory for LLM inference engines.
 *
 * An engine describes its layers (kvpages_model), lets kvpages plan how they
 * share memory (kvpages_plan), allocates it (kvpages_memory, kvpages_cache) and
 * receives for every layer a view: a data pointer, a shape and strides.
 *
 *     layers -> model -> plan -> cache(memory) -> views -> bound layers
 *
 * kvpages.hpp is the same for C++17, with handles that destroy themselves.
 *
 * Words
 * -----
 * - token: one position of a request's sequence.
 * - slot: one token's place in a group: block id * block size + offset in the
 *   block. Pad slot: slot -1, which stands for no token and is never written.
 * - block: the unit of allocation, block_size tokens long. Block ids are one
 *   space for all groups. Null block: id 0, which is never handed out.
 * - kernel block: the unit that an attention kernel indexes. Its length divides
 *   the length of a block.
 * - page: the bytes of one block in one layer.
 * - group: layers that share one block table.
 * - pool tensor: one allocation, shared by one layer of each group.
 * - view: how one layer sees its pool tensor: data, element type, shape, strides.
 * - state: the memory of a Mamba or linear-attention layer, which has one entry
 *   for a request instead of one for each token.
 * - descriptor: a cache as plain data, for another process.
 * - run: a piece of a page; a page is one run, or several when keys and values of
 *   all blocks lie apart.
 * - row: one key or one value of one slot and head, or one latent.
 *
 * Errors
 * ------
 * A call that can fail returns a kvpages_status: KVPAGES_STATUS_OK (0) or a
 * negative value. After a failure kvpages_last_error_message() is its text, which
 * names the layer, the argument and the numbers, and kvpages_last_error_kind() is
 * its precise kind. Both stay until the next failure on the same thread, so they
 * mean something only right after one. A failed call changes nothing; an output
 * that it would have filled is zero or NULL, but for those whose documentation says
 * what they are then; an array keeps what it held, and so does a struct whose
 * struct_size is wrong. No call aborts or throws: a bug in the library is
 * KVPAGES_STATUS_INTERNAL, and from then on the handle involved can only be
 * destroyed.
 *
 * Ownership
 * ---------
 * A parameter's documentation uses four words:
 * - Borrowed: used during the call only.
 * - Copied: used during the call only; the library keeps a copy.
 * - Owned by the caller: an output, to be given to the destroy function named
 *   with it.
 * - Kept until X: a parameter is used by the library after the call, and no longer
 *   than X; a pointer in an output may be used by the caller until X.
 *
 * A pointer that a call writes to must not be NULL, unless its documentation says
 * that it may be.
 *
 * A handle keeps alive whatever it needs, so handles may be destroyed in any
 * order. A destroy function accepts NULL and cannot fail.
 *
 * Threads
 * -------
 * Calls that take a handle as pointer to const may run concurrently on that
 * handle. Any other call needs the handle for itself: the caller excludes all
 * other calls on it. Distinct handles are independent, but for
 * kvpages_cache_resize(), which needs the cache's operations for itself too, and for
 * the bytes of blocks: two calls at once that write the same ones are a race.
 *
 * No call waits for another, but for those that take a lock: creating or destroying
 * a cache in an adopted buffer, and the first explanation of a plan. Changing the log
 * callback waits for calls of the former one to end, and meanwhile whatever has
 * something to log, which no call of a step has, waits for the change.
 *
 * Structs that grow
 * -----------------
 * A struct whose first field is struct_size may get more fields, at its end, in
 * later versions. Start from its _INIT macro, which sets struct_size to the size
 * that the caller was compiled with, and every other field to zero:
 *
 *     kvpages_foo_config config = KVPAGES_FOO_CONFIG_INIT;
 *
 * Zero in a field that was added later means what the library did before it had
 * that field. A field that the library is too old to know must be zero, else
 * the call fails.
 */


#ifndef KVPAGES_H
#define KVPAGES_H

/* Generated from src/ffi. Do not edit: KVPAGES_BLESS=1 cargo test header */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/** Major version of this header; kvpages_version() is that of the library. */
#define KVPAGES_VERSION_MAJOR 0
/** Minor version of this header. */
#define KVPAGES_VERSION_MINOR 1
/** Patch version of this header. */
#define KVPAGES_VERSION_PATCH 0

/* Of dlpack.h, which this header does not need: it may be included before or after. */
struct DLManagedTensorVersioned;
struct DLManagedTensor;

/** Marks what the library exports. */
#ifndef KVPAGES_API
#  if defined(__GNUC__)
#    define KVPAGES_API __attribute__((visibility("default")))
#  else
#    define KVPAGES_API
#  endif
#endif

/** Marks a result that must not be ignored. */
#ifndef KVPAGES_MUST_USE
#  if defined(__GNUC__)
#    define KVPAGES_MUST_USE __attribute__((warn_unused_result))
#  else
#    define KVPAGES_MUST_USE
#  endif
#endif


/**
 * Flag of kvpages_spec: tokens attend to later ones. Does not change the memory.
 */
#define KVPAGES_SPEC_NON_CAUSAL 1

/**
 * Flag of kvpages_spec: the layer's kernels step from block to block by a stride
 * they are given, so its pages may be padded. A layer with a backend takes this
 * from the backend.
 */
#define KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE 2

/**
 * kvpages_spec.head_size_v of a layer that stores keys and no values.
 */
#define KVPAGES_HEAD_SIZE_NONE UINT64_MAX

/**
 * Flag of kvpages_backend_config: the kernels step from block to block by a
 * stride they are given, so pages may be padded or packed. Without it a page
 * must be dense.
 */
#define KVPAGES_BACKEND_FOLLOWS_BLOCK_STRIDE 1

/**
 * Flag of kvpages_backend_config: keys and values must be equally wide, even
 * where the layout could hold others.
 */
#define KVPAGES_BACKEND_NEEDS_EQUAL_KV_WIDTHS 2

/**
 * Flag of kvpages_backend_config: per-token-head scales lie behind the data of a
 * page, outside the view. Without it they lie behind each key and each value, as
 * part of the content axis.
 */
#define KVPAGES_BACKEND_SCALES_AT_PAGE_END 4

/**
 * Flag of kvpages_plan_config: lower max_model_len to what fits.
 */
#define KVPAGES_PLAN_AUTO_FIT 1

/**
 * Flag of kvpages_plan_config: store windowed layers in full, so that one block
 * table serves all layers.
 */
#define KVPAGES_PLAN_HYBRID_MANAGER_OFF 2

/**
 * Flag of kvpages_plan_config: pack the pages of all layers of a block together
 * when there are several groups.
 */
#define KVPAGES_PLAN_CROSS_LAYER_BLOCKS 4

/**
 * Flag of kvpages_plan_config: num_blocks_override replaces the memory.
 */
#define KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS 8

/**
 * Flag of kvpages_plan_config: the last layer belongs to a speculative draft.
 */
#define KVPAGES_PLAN_DRAFT_LAYERS 16

/**
 * Flag of kvpages_part_group: it holds layers of a speculative draft.
 */
#define KVPAGES_PART_GROUP_DRAFT 1

/**
 * Flag of kvpages_cuda_memory_config: addresses are reserved first, and memory is
 * put behind them. Only such memory can grow: kvpages_cache_resize().
 */
#define KVPAGES_CUDA_MEMORY_VIRTUAL 1

/**
 * Flag of kvpages_cuda_memory_config, with KVPAGES_CUDA_MEMORY_VIRTUAL: network
 * cards can be given the memory (GPUDirect RDMA). Plain memory needs no flag.
 */
#define KVPAGES_CUDA_MEMORY_RDMA 2

/**
 * Flag of kvpages_cuda_memory_config, with KVPAGES_CUDA_MEMORY_VIRTUAL: the memory
 * can be exported to other processes as a file descriptor. Plain memory needs no
 * flag, and is shared in another way (cuIpcGetMemHandle).
 */
#define KVPAGES_CUDA_MEMORY_SHAREABLE 4

/**
 * Flag of kvpages_cache_config: blocks that were never written hold bytes of 0xFF
 * instead of zeros, so that reading them is loud, as kvpages_ops_poison_blocks()
 * says. Blocks that come with kvpages_cache_resize() too; block 0 stays zero. For
 * debugging: host memory is then all touched when it is taken. What the engine must
 * clear before it is used (kvpages_worker_info.needs_zeroing, states) it must clear
 * as ever.
 */
#define KVPAGES_CACHE_POISON 1

/**
 * Flag of kvpages_cache_export_dlpack(): sets DLPACK_FLAG_BITMASK_READ_ONLY, by
 * which a consumer must not write.
 */
#define KVPAGES_DLPACK_READ_ONLY 1

/**
 * No window: every range is kept.
 */
#define KVPAGES_NO_WINDOW UINT64_MAX

/**
 * Flag of kvpages_tables_config: rows are as wide as kvpages_table_row_width()
 * says, for kernels that read whole runs of 128 tokens. They hold no more blocks
 * than without it.
 */
#define KVPAGES_TABLES_ALIGNED_ROWS 1

/**
 * Dimensions of a strided copy at most.
 */
#define KVPAGES_STRIDED_COPY_MAX_DIMS 6

/**
 * Result of every call that can fail. Zero is success, every failure is
 * negative. Values are never renumbered or used again.
 *
 * Any call may return NULL_ARGUMENT, INVALID_ARGUMENT, POISONED or INTERNAL;
 * the functions list only what else a caller can act on.
 */
enum kvpages_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The call did all that it was asked to.
     */
    KVPAGES_STATUS_OK = 0,
    /**
     * A pointer that is required is NULL.
     */
    KVPAGES_STATUS_NULL_ARGUMENT = -1,
    /**
     * An argument is out of range, or arguments contradict each other.
     */
    KVPAGES_STATUS_INVALID_ARGUMENT = -2,
    /**
     * There is nothing of that name or number.
     */
    KVPAGES_STATUS_NOT_FOUND = -3,
    /**
     * The caller's array is too small; the size that is needed was written.
     */
    KVPAGES_STATUS_BUFFER_TOO_SMALL = -4,
    /**
     * A backend cannot read its layers as they were planned.
     */
    KVPAGES_STATUS_CONTRACT_BROKEN = -5,
    /**
     * The library does not do this.
     */
    KVPAGES_STATUS_UNSUPPORTED = -6,
    /**
     * A callback asked to stop.
     */
    KVPAGES_STATUS_STOPPED = -7,
    /**
     * The model does not fit in the memory it was planned for.
     */
    KVPAGES_STATUS_DOES_NOT_FIT = -20,
    /**
     * The host, or the engine's allocator, has not enough memory.
     */
    KVPAGES_STATUS_OUT_OF_HOST_MEMORY = -21,
    /**
     * The device has not enough memory.
     */
    KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY = -22,
    /**
     * There is no device, no driver for it, or the driver failed.
     */
    KVPAGES_STATUS_DEVICE_UNAVAILABLE = -40,
    /**
     * An earlier call on this handle met a bug; it can only be destroyed.
     */
    KVPAGES_STATUS_POISONED = -99,
    /**
     * A bug in the library; the message says where.
     */
    KVPAGES_STATUS_INTERNAL = -100,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_status kvpages_status;
#else
typedef int32_t kvpages_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How much a message matters. There is none for errors: a call that fails returns
 * its error.
 */
enum kvpages_log_level
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Nothing is said.
     */
    KVPAGES_LOG_LEVEL_OFF = 0,
    /**
     * Something works worse than it could: kernels that cannot reach all blocks that
     * there is memory for, a driver that fails when memory is given back.
     */
    KVPAGES_LOG_LEVEL_WARN = 1,
    /**
     * What was decided and taken: a plan, a cache that is made, grown or shrunk,
     * tables, a device that is opened, poison. A few messages for each.
     */
    KVPAGES_LOG_LEVEL_INFO = 2,
    /**
     * Details: kernels that are loaded, what is destroyed, the whole explanation of
     * a plan.
     */
    KVPAGES_LOG_LEVEL_DEBUG = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_log_level kvpages_log_level;
#else
typedef uint32_t kvpages_log_level;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Type of one element. fp4 is stored two to a byte.
 */
enum kvpages_dtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    KVPAGES_DTYPE_F64 = 1,
    KVPAGES_DTYPE_F32 = 2,
    KVPAGES_DTYPE_F16 = 3,
    KVPAGES_DTYPE_BF16 = 4,
    KVPAGES_DTYPE_I8 = 5,
    KVPAGES_DTYPE_U8 = 6,
    KVPAGES_DTYPE_I16 = 7,
    KVPAGES_DTYPE_I32 = 8,
    KVPAGES_DTYPE_I64 = 9,
    KVPAGES_DTYPE_BOOL = 10,
    KVPAGES_DTYPE_F8_E4M3FN = 11,
    KVPAGES_DTYPE_F8_E5M2 = 12,
    KVPAGES_DTYPE_F8_E4M3FNUZ = 13,
    KVPAGES_DTYPE_F8_E5M2FNUZ = 14,
    KVPAGES_DTYPE_F4_E2M1X2 = 15,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_dtype kvpages_dtype;
#else
typedef uint32_t kvpages_dtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How keys and values are quantised.
 */
enum kvpages_quant_mode
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Stored as they are.
     */
    KVPAGES_QUANT_MODE_NONE = 0,
    /**
     * fp8, one scale for the whole tensor, kept by the engine.
     */
    KVPAGES_QUANT_MODE_FP8_PER_TENSOR = 1,
    /**
     * int8, one f32 scale for each token and head, stored in the page.
     */
    KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD = 2,
    /**
     * fp8, one f32 scale for each token and head, stored in the page.
     */
    KVPAGES_QUANT_MODE_FP8_PER_TOKEN_HEAD = 3,
    /**
     * Two int4 in one byte, one f32 scale for each token and head, stored in
     * the page.
     */
    KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD = 4,
    /**
     * Two fp4 in one byte, one fp8 scale for each 16 elements, stored behind
     * the data.
     */
    KVPAGES_QUANT_MODE_NVFP4 = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_quant_mode kvpages_quant_mode;
#else
typedef uint32_t kvpages_quant_mode;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What kind of layer it is, as far as its memory is concerned.
 */
enum kvpages_spec_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Every token attends to every earlier one.
     */
    KVPAGES_SPEC_KIND_FULL_ATTENTION = 1,
    /**
     * Full, with tokens at the start that are always attended to.
     */
    KVPAGES_SPEC_KIND_SINK_ATTENTION = 2,
    /**
     * Full over the prompt, a window over what was generated.
     */
    KVPAGES_SPEC_KIND_RSWA = 3,
    /**
     * Full, with key and value of a token and head packed into one slot.
     */
    KVPAGES_SPEC_KIND_TURBO_QUANT = 4,
    /**
     * Full, storing one latent instead of keys and values.
     */
    KVPAGES_SPEC_KIND_MLA = 5,
    /**
     * Full, storing hidden states instead of keys and values.
     */
    KVPAGES_SPEC_KIND_HIDDEN_STATE = 6,
    /**
     * The last tokens only.
     */
    KVPAGES_SPEC_KIND_SLIDING_WINDOW = 7,
    /**
     * The last tokens only, storing one latent.
     */
    KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA = 8,
    /**
     * Tokens of the same chunk only.
     */
    KVPAGES_SPEC_KIND_CHUNKED_LOCAL = 9,
    /**
     * Keys and values of an encoder's output.
     */
    KVPAGES_SPEC_KIND_CROSS_ATTENTION = 10,
    /**
     * An encoder's own attention: it stores nothing between steps.
     */
    KVPAGES_SPEC_KIND_ENCODER_ONLY = 11,
    /**
     * Mamba, linear attention, convolutions: a state that does not grow.
     */
    KVPAGES_SPEC_KIND_STATE = 12,
    /**
     * Only reported, for sets of layers of different kinds.
     */
    KVPAGES_SPEC_KIND_MIXED = 100,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_spec_kind kvpages_spec_kind;
#else
typedef uint32_t kvpages_spec_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What computes a state.
 */
enum kvpages_state_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Selective state space, first version.
     */
    KVPAGES_STATE_KIND_MAMBA1 = 1,
    /**
     * Selective state space, second version.
     */
    KVPAGES_STATE_KIND_MAMBA2 = 2,
    /**
     * A short convolution.
     */
    KVPAGES_STATE_KIND_SHORT_CONV = 3,
    /**
     * Linear attention.
     */
    KVPAGES_STATE_KIND_LINEAR = 4,
    /**
     * Gated delta net.
     */
    KVPAGES_STATE_KIND_GATED_DELTA_NET = 5,
    /**
     * Anything else.
     */
    KVPAGES_STATE_KIND_CUSTOM = 6,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_state_kind kvpages_state_kind;
#else
typedef uint32_t kvpages_state_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * When a state layer keeps the state of an earlier position.
 */
enum kvpages_state_cache_mode
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Only the current state.
     */
    KVPAGES_STATE_CACHE_MODE_NONE = 0,
    /**
     * The current state and the one at the last block boundary.
     */
    KVPAGES_STATE_CACHE_MODE_ALIGN = 1,
    /**
     * The state at every block boundary.
     */
    KVPAGES_STATE_CACHE_MODE_ALL = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_state_cache_mode kvpages_state_cache_mode;
#else
typedef uint32_t kvpages_state_cache_mode;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How far a backend's kernels can be captured into a CUDA graph.
 */
enum kvpages_graph_support
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Not at all.
     */
    KVPAGES_GRAPH_SUPPORT_NEVER = 0,
    /**
     * Batches in which every request decodes one token.
     */
    KVPAGES_GRAPH_SUPPORT_UNIFORM_SINGLE_TOKEN_DECODE = 1,
    /**
     * Batches in which every request has the same number of tokens.
     */
    KVPAGES_GRAPH_SUPPORT_UNIFORM_BATCH = 2,
    /**
     * Any batch.
     */
    KVPAGES_GRAPH_SUPPORT_ALWAYS = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_graph_support kvpages_graph_support;
#else
typedef uint32_t kvpages_graph_support;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Contracts of known kernels, as vLLM 0.26 drives them. docs/backends.md lists
 * their layouts.
 */
enum kvpages_preset
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    KVPAGES_PRESET_FLASH_ATTENTION_NHD = 1,
    KVPAGES_PRESET_FLASH_ATTENTION_HND = 2,
    KVPAGES_PRESET_TRITON_NHD = 3,
    KVPAGES_PRESET_TRITON_HND = 4,
    KVPAGES_PRESET_FLASH_INFER_NHD = 5,
    KVPAGES_PRESET_FLASH_INFER_HND = 6,
    KVPAGES_PRESET_FLASH_ATTENTION_DIFF_KV_NHD = 7,
    KVPAGES_PRESET_FLASH_ATTENTION_DIFF_KV_HND = 8,
    KVPAGES_PRESET_FLEX_ATTENTION = 9,
    KVPAGES_PRESET_CPU_ATTENTION = 10,
    KVPAGES_PRESET_ROCM_ATTENTION = 11,
    KVPAGES_PRESET_ROCM_AITER_FLASH_ATTENTION = 12,
    KVPAGES_PRESET_ROCM_AITER_UNIFIED_ATTENTION = 13,
    KVPAGES_PRESET_HPC_ATTENTION = 14,
    KVPAGES_PRESET_TURBO_QUANT = 15,
    KVPAGES_PRESET_SLIDING_CONVOLUTION = 16,
    KVPAGES_PRESET_HIDDEN_STATE = 17,
    KVPAGES_PRESET_TRITON_MLA = 18,
    KVPAGES_PRESET_FLASH_MLA = 19,
    KVPAGES_PRESET_FLASH_MLA_SPARSE = 20,
    KVPAGES_PRESET_FLASH_INFER_MLA = 21,
    KVPAGES_PRESET_FLASH_INFER_MLA_SPARSE = 22,
    KVPAGES_PRESET_ROCM_AITER_MLA = 23,
    KVPAGES_PRESET_ROCM_AITER_MLA_SPARSE = 24,
    KVPAGES_PRESET_DEEPSEEK_V32_INDEXER = 25,
    KVPAGES_PRESET_DEEPSEEK_V4_MLA = 26,
    KVPAGES_PRESET_DEEPSEEK_V4_INDEXER = 27,
    KVPAGES_PRESET_DEEPSEEK_V4_SLIDING_WINDOW = 28,
    KVPAGES_PRESET_DEEPSEEK_V4_COMPRESSOR = 29,
    KVPAGES_PRESET_MAMBA1 = 30,
    KVPAGES_PRESET_MAMBA2 = 31,
    KVPAGES_PRESET_SHORT_CONVOLUTION = 32,
    KVPAGES_PRESET_LINEAR_ATTENTION = 33,
    KVPAGES_PRESET_GATED_DELTA_NET = 34,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_preset kvpages_preset;
#else
typedef uint32_t kvpages_preset;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Which rules group layers and unify pages.
 */
enum kvpages_policy
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The best rules this library has: those of Compact.
     */
    KVPAGES_POLICY_DEFAULT = 0,
    /**
     * Exactly the rules of vLLM 0.26.
     */
    KVPAGES_POLICY_REFERENCE = 1,
    /**
     * The most tokens in the same memory: at the usual and at the longest length no
     * plan of this policy holds fewer requests than the reference's (but for models
     * that the reference splits into more than 32 groups, where a few tokens go for
     * far fewer groups). Block 0 is counted as reserved, also where reserved_blocks
     * is 0.
     */
    KVPAGES_POLICY_COMPACT = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_policy kvpages_policy;
#else
typedef uint32_t kvpages_policy;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * How an explanation is written.
 */
enum kvpages_text_format
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * For people.
     */
    KVPAGES_TEXT_FORMAT_TEXT = 0,
    /**
     * For programs.
     */
    KVPAGES_TEXT_FORMAT_JSON = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_text_format kvpages_text_format;
#else
typedef uint32_t kvpages_text_format;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What kind of device memory is on.
 */
enum kvpages_device_kind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The host reads and writes it; so it does pinned memory.
     */
    KVPAGES_DEVICE_KIND_HOST = 0,
    /**
     * A CUDA device does. To the host its addresses are numbers.
     */
    KVPAGES_DEVICE_KIND_CUDA = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_device_kind kvpages_device_kind;
#else
typedef uint32_t kvpages_device_kind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Which tokens a token attends to.
 */
enum kvpages_causality
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Those before it.
     */
    KVPAGES_CAUSALITY_CAUSAL = 0,
    /**
     * All of its request.
     */
    KVPAGES_CAUSALITY_NON_CAUSAL = 1,
    /**
     * Each request has a flag of its own.
     */
    KVPAGES_CAUSALITY_PER_REQUEST = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_causality kvpages_causality;
#else
typedef uint32_t kvpages_causality;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What an item of a prompt is.
 */
enum kvpages_modality
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * A picture.
     */
    KVPAGES_MODALITY_IMAGE = 1,
    /**
     * A series of pictures.
     */
    KVPAGES_MODALITY_VIDEO = 2,
    /**
     * Sound.
     */
    KVPAGES_MODALITY_AUDIO = 3,
    /**
     * Anything else.
     */
    KVPAGES_MODALITY_OTHER = 4,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_modality kvpages_modality;
#else
typedef uint32_t kvpages_modality;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * What the rows of a layer are made of. A row is one key or one value of one slot
 * and head, or what is stored instead of both.
 */
enum kvpages_row_format
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * It has no rows: it keeps states, or no backend says how its pages are read.
     */
    KVPAGES_ROW_FORMAT_NONE = 0,
    /**
     * Elements, each a number.
     */
    KVPAGES_ROW_FORMAT_PLAIN = 1,
    /**
     * fp8; the one scale of the layer is the engine's.
     */
    KVPAGES_ROW_FORMAT_FP8_PER_TENSOR = 2,
    /**
     * int8 and a scale for each row.
     */
    KVPAGES_ROW_FORMAT_INT8_PER_TOKEN_HEAD = 3,
    /**
     * fp8 and a scale for each row.
     */
    KVPAGES_ROW_FORMAT_FP8_PER_TOKEN_HEAD = 4,
    /**
     * Two int4 in a byte, and a scale for each row.
     */
    KVPAGES_ROW_FORMAT_INT4_PER_TOKEN_HEAD = 5,
    /**
     * Two fp4 in a byte, and a scale for each 16; a kernel's own order in a page.
     */
    KVPAGES_ROW_FORMAT_NVFP4 = 6,
    /**
     * A key and a value packed into one row.
     */
    KVPAGES_ROW_FORMAT_TURBO_QUANT = 7,
    /**
     * DeepSeek V3.2's packed latent.
     */
    KVPAGES_ROW_FORMAT_FP8_DS_MLA = 8,
    /**
     * DeepSeek V4's packed latent; a kernel's own order in a page.
     */
    KVPAGES_ROW_FORMAT_FP8_DS_MLA_V4 = 9,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_row_format kvpages_row_format;
#else
typedef uint32_t kvpages_row_format;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Which row of a slot and head.
 */
enum kvpages_row_part
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : uint32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The key, or what is stored instead of keys and values.
     */
    KVPAGES_ROW_PART_KEY = 0,
    /**
     * The value.
     */
    KVPAGES_ROW_PART_VALUE = 1,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum kvpages_row_part kvpages_row_part;
#else
typedef uint32_t kvpages_row_part;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * The attention groups of one worker, their metadata builders, and what these
 * made of the last step.
 *
 * Thread-safety: kvpages_attention_build() and
 * kvpages_attention_limit_graph_support() change it, all other calls read it.
 * Builder callbacks run on the thread of the call, one at a time.
 */
typedef struct kvpages_attention kvpages_attention;

/**
 * An attention backend: how its kernels read a layer's pages, and what they
 * demand of them. Immutable: all calls on it may run concurrently.
 */
typedef struct kvpages_backend kvpages_backend;

/**
 * The memory of one worker's layers, and a view of it for each layer.
 *
 * Immutable but for kvpages_cache_resize(): all other calls on it may run
 * concurrently. Addresses stay as they are until it is destroyed. What is done
 * with the bytes is up to the engine.
 */
typedef struct kvpages_cache kvpages_cache;

/**
 * All that a transfer engine, or another process, needs to find any block of any
 * layer in the allocations of a cache. It has no addresses, only offsets from the
 * start of each allocation, which whoever has the memory knows.
 *
 * Immutable: all calls on it may run concurrently. docs/descriptor.md is the manual
 * of the JSON.
 */
typedef struct kvpages_descriptor kvpages_descriptor;

/**
 * Where a cache's bytes come from. Immutable: all calls on it may run
 * concurrently.
 */
typedef struct kvpages_memory kvpages_memory;

/**
 * A model: its layers, in order.
 *
 * Thread-safety: adding a layer changes it, all other calls read it. A plan keeps
 * the layers as they were when it was made.
 */
typedef struct kvpages_model kvpages_model;

/**
 * Operations on the blocks of one cache: zero and copy blocks, store rows of
 * tokens and read them. It keeps the cache's memory.
 *
 * What calls need is taken when it is made: a call that succeeds allocates
 * nothing and takes no lock. Calls that take it as const may run concurrently,
 * also with those of another kvpages_ops, as long as they do not touch the same
 * slots; the others must have it for themselves. What a call refuses it refuses
 * before it touches anything.
 *
 * In host memory a call returns when its work is done. In a device's it puts the
 * work on the caller's stream and returns: it waits for nothing, allocates nothing
 * on the device, and may be captured into a graph, which then holds the blocks and
 * addresses of the call. Rows, slots and block ids to gather are the device's then
 * and must stay until the stream is done; slots are not looked at by the host, and
 * rows of slots that are out of range are skipped. Ids to zero and pairs to copy
 * are always the host's, and are not needed after the call. When a device fails
 * half way, what it did stays.
 */
typedef struct kvpages_ops kvpages_ops;

/**
 * How all workers share out their memory: groups of layers, allocations, a number
 * of blocks. Immutable: all calls on it may run concurrently.
 */
typedef struct kvpages_plan kvpages_plan;

/**
 * How blocks of some ranks' caches become blocks of others': which bytes go where
 * when keys and values move between tensor-parallel sizes, or between layouts.
 *
 * Immutable: all calls on it may run concurrently. It keeps nothing of the
 * descriptors.
 */
typedef struct kvpages_reshard kvpages_reshard;

/**
 * Which blocks hold each request, and where each token of a step goes, in the
 * memory of the host or of a device. For each group there are
 *
 * - a table: a row of kernel block ids for each request;
 * - an input table: a row for each request of the batch;
 * - slots: one for each token of the batch.
 *
 * Their addresses stay as they are until the tables are destroyed, so captured
 * graphs may hold them. They are read, not written, by the engine. Past the
 * entries of a row there are null blocks (0), past the tokens of a batch pad
 * slots (-1), always.
 *
 * Writes to rows are staged: kvpages_tables_num_entries() and the checks of later
 * writes count them at once, while the tables, kvpages_tables_gather() and
 * kvpages_tables_map_slots() see them after kvpages_tables_apply(). Any number of
 * them may be staged. A request is the number of a row, less than max_requests.
 *
 * In a device's memory, rows are staged on the host just so; calls with a stream
 * check what they are given, put their work on the stream and return. They copy
 * what they are given first, so arrays may change as soon as a call returns. They
 * wait for nothing, but when the device is eight such calls behind, of which a call
 * counts once more for each 64 KiB of entries that changed. Whatever streams they
 * are put on, calls take effect one after another; they do not wait for kernels
 * that read what an earlier call left, on other streams than their own. A stream
 * that is being captured is refused (KVPAGES_STATUS_UNSUPPORTED, kind
 * "stream_is_capturing"), and so is the default stream while one that waits for it
 * is: a graph holds the addresses, and finds there what was put on its stream
 * before it is launched. When the driver fails a call
 * (KVPAGES_STATUS_DEVICE_UNAVAILABLE), the call waits until nothing of it is under
 * way, if the driver still can; what was staged stays staged, and the next call with
 * a stream sends all rows again, as kvpages_tables_apply() does.
 *
 * No call but those that create and destroy allocates or takes a lock when it
 * succeeds.
 */
typedef struct kvpages_tables kvpages_tables;

/**
 * Takes a message. It may be called from any thread that is in a call of kvpages,
 * and by several at once. It must not throw: an exception cannot pass through the
 * library, and is undefined behaviour (kvpages.hpp catches them).
 *
 * It may call kvpages, but not on a handle that the call around it uses; what those
 * calls would say is dropped. It must not wait for another thread that calls
 * kvpages.
 *
 * @param user     As it was set.
 * @param level    One of KVPAGES_LOG_LEVEL_*.
 * @param message  One line, or several of an explanation, without a line end behind
 *                 the last one. Valid until the callback returns.
 */
typedef void (*kvpages_log_fn)(void *user, uint32_t level, const char *message);

/**
 * What one layer stores. Start from KVPAGES_SPEC_INIT; fields of other kinds
 * stay 0. Strings and arrays are Copied by whoever keeps a spec.
 */
typedef struct kvpages_spec {
    /**
     * sizeof(kvpages_spec) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * One of KVPAGES_SPEC_KIND_*.
     */
    uint32_t kind;
    /**
     * Attention kinds: one of KVPAGES_DTYPE_*.
     */
    uint32_t dtype;
    /**
     * Attention kinds: one of KVPAGES_QUANT_MODE_*. It says what the elements are,
     * not of which type: all but KVPAGES_QUANT_MODE_NONE need a dtype of 1 byte.
     */
    uint32_t quant_mode;
    /**
     * KVPAGES_SPEC_* flags.
     */
    uint32_t flags;
    /**
     * Tokens of one block. Of a state that is kept once
     * (KVPAGES_STATE_CACHE_MODE_NONE) it has no effect on memory; engines set the
     * longest sequence.
     */
    uint64_t block_size;
    /**
     * Key-value heads on one rank; see kvpages_kv_heads_per_rank().
     */
    uint64_t num_kv_heads;
    /**
     * Elements of one key, or of the latent.
     */
    uint64_t head_size;
    /**
     * Elements of one value; 0 for as many as head_size, KVPAGES_HEAD_SIZE_NONE
     * for none.
     */
    uint64_t head_size_v;
    /**
     * Bytes of one page, padding included; 0 for no padding. At least what the
     * page needs.
     */
    uint64_t page_size_padded_bytes;
    /**
     * Tokens of the window. Sliding kinds need it, full kinds may remember one;
     * 0 for none.
     */
    uint64_t sliding_window;
    /**
     * Tokens of a chunk. Chunked local needs it, full kinds may remember one;
     * 0 for none.
     */
    uint64_t attention_chunk_size;
    /**
     * TurboQuant: bytes of one token and head; 0 for the page of full attention.
     */
    uint64_t tq_slot_bytes;
    /**
     * Sink: tokens at the start that are always attended to.
     */
    uint64_t sink_len;
    /**
     * R-SWA: generated tokens that stay stored.
     */
    uint64_t rswa_window;
    /**
     * Latent kinds: bytes that a page is made a multiple of; 0 for none.
     */
    uint64_t alignment_bytes;
    /**
     * Latent kinds: tokens that share one stored slot; 0 and 1 for one each. It
     * divides block_size.
     */
    uint64_t compress_ratio;
    /**
     * Latent kinds: the cache-dtype string; "fp8_ds_mla" is a packed format of
     * 656 bytes a token, or of 584 bytes a slot for "deepseek_v4". May be NULL.
     */
    const char *cache_dtype;
    /**
     * Latent kinds: the model version that fixes the format. May be NULL.
     */
    const char *model_version;
    /**
     * State: one of KVPAGES_DTYPE_* for each state.
     */
    const uint32_t *state_dtypes;
    /**
     * Number of state_dtypes.
     */
    size_t num_state_dtypes;
    /**
     * State: the number of dimensions of each state.
     */
    const uint32_t *state_ndims;
    /**
     * Number of state_ndims; as many as state_dtypes.
     */
    size_t num_state_shapes;
    /**
     * State: the sizes of all states' dimensions, one state after another.
     */
    const uint64_t *state_dims;
    /**
     * Number of state_dims; the sum of state_ndims.
     */
    size_t num_state_dims;
    /**
     * State: one of KVPAGES_STATE_KIND_*.
     */
    uint32_t state_kind;
    /**
     * State: one of KVPAGES_STATE_CACHE_MODE_*. It tells layers apart; how many
     * blocks a request needs follows from the mode of the limits or the plan.
     */
    uint32_t state_cache_mode;
    /**
     * State: further states that a request holds for speculative tokens.
     */
    uint64_t num_speculative_blocks;
} kvpages_spec;

/** kvpages_spec with struct_size set and all else zero. */
#define KVPAGES_SPEC_INIT {sizeof(kvpages_spec), 0, 0, 0, 0, 0, 0, 0, 0, 0, \
    0, 0, 0, 0, 0, 0, 0, NULL, NULL, NULL, 0, NULL, 0, NULL, 0, 0, 0, 0}

/**
 * What a layer's page looks like.
 */
typedef struct kvpages_spec_info {
    /**
     * sizeof(kvpages_spec_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Bytes of one block in this layer.
     */
    uint64_t page_size_bytes;
    /**
     * Bytes of data alone.
     */
    uint64_t real_page_size_bytes;
    /**
     * Bytes of data and of the scales in the page.
     */
    uint64_t unpadded_page_size_bytes;
    /**
     * Slots of one block: its tokens, but for compressed layers.
     */
    uint64_t storage_block_size;
    /**
     * Stored elements of one key of a token and head, or of whatever is stored
     * instead of a key and a value. 0 for a state.
     */
    uint64_t key_elements;
    /**
     * Stored elements of one value; 0 when there is none of its own.
     */
    uint64_t value_elements;
    /**
     * Bytes of the scales beside each key and each value, or beside each latent.
     */
    uint64_t scale_bytes;
} kvpages_spec_info;

/** kvpages_spec_info with struct_size set and all else zero. */
#define KVPAGES_SPEC_INFO_INIT {sizeof(kvpages_spec_info), 0, 0, 0, 0, 0, 0, \
    0}

/**
 * What bounds one request.
 */
typedef struct kvpages_limits {
    /**
     * sizeof(kvpages_limits) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Tokens of the longest sequence.
     */
    uint64_t max_model_len;
    /**
     * Ranks that share the tokens of a sequence while decoding; 0 for 1.
     */
    uint64_t context_parallel_size;
    /**
     * Tokens scheduled and not yet settled, over all concurrent batches.
     */
    uint64_t max_tokens_in_flight;
    /**
     * Tokens of an encoder's output that cross attention caches.
     */
    uint64_t max_encoder_tokens;
    /**
     * One of KVPAGES_STATE_CACHE_MODE_*.
     */
    uint32_t state_cache_mode;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_limits;

/** kvpages_limits with struct_size set and all else zero. */
#define KVPAGES_LIMITS_INIT {sizeof(kvpages_limits), 0, 0, 0, 0, 0, 0}

/**
 * How much one request can need of a layer.
 */
typedef struct kvpages_demand {
    /**
     * sizeof(kvpages_demand) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * The most blocks.
     */
    uint64_t blocks_per_request;
    /**
     * The most bytes.
     */
    uint64_t bytes_per_request;
    /**
     * Entries of a block-table row for the longest sequence.
     */
    uint64_t row_blocks;
    /**
     * The most blocks a windowed layer may hold; 0 for other kinds.
     */
    uint64_t admission_blocks;
} kvpages_demand;

/** kvpages_demand with struct_size set and all else zero. */
#define KVPAGES_DEMAND_INIT {sizeof(kvpages_demand), 0, 0, 0, 0}

/**
 * How alike layers are. The order of the layers does not matter.
 */
typedef struct kvpages_uniformity {
    /**
     * sizeof(kvpages_uniformity) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * 1 when they need the same number of blocks: one block size, one family.
     */
    uint32_t is_uniform_type;
    /**
     * 1 when they merge into one spec.
     */
    uint32_t is_uniform_spec;
    /**
     * 1 when their pages have the same number of bytes.
     */
    uint32_t is_page_size_uniform;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_uniformity;

/** kvpages_uniformity with struct_size set and all else zero. */
#define KVPAGES_UNIFORMITY_INIT {sizeof(kvpages_uniformity), 0, 0, 0, 0}

/**
 * Layers taken together, as a group of layers that store different things has
 * them.
 */
typedef struct kvpages_spec_set_info {
    /**
     * sizeof(kvpages_spec_set_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Bytes of one block in all layers.
     */
    uint64_t page_size_bytes;
    /**
     * Tokens of one block of the first layer.
     */
    uint64_t block_size;
    /**
     * Tokens of the window, when all layers slide over the same; else 0.
     */
    uint64_t sliding_window;
    /**
     * How many layers have the commonest page.
     */
    uint64_t num_layer_tuples;
    /**
     * How many different pages there are.
     */
    uint64_t num_distinct_page_sizes;
    /**
     * One of KVPAGES_SPEC_KIND_*; MIXED when the layers' kinds differ.
     */
    uint32_t kind;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_spec_set_info;

/** kvpages_spec_set_info with struct_size set and all else zero. */
#define KVPAGES_SPEC_SET_INFO_INIT {sizeof(kvpages_spec_set_info), 0, 0, 0, \
    0, 0, 0, 0}

/**
 * What decides the block size of a model that mixes attention and state.
 */
typedef struct kvpages_hybrid_config {
    /**
     * sizeof(kvpages_hybrid_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Tokens of a block as the engine was configured. At least 1.
     */
    uint64_t block_size;
    /**
     * Tokens of the smallest kernel block that the attention backend takes. At
     * least 1.
     */
    uint64_t smallest_kernel_block;
    /**
     * Bytes of one token in one attention layer. At least 1.
     */
    uint64_t attention_bytes_per_token;
    /**
     * Bytes of the largest state page.
     */
    uint64_t state_page_bytes;
    /**
     * Tokens between two states that the state kernels can keep; only for
     * KVPAGES_STATE_CACHE_MODE_ALL.
     */
    uint64_t base_chunk;
    /**
     * One of KVPAGES_STATE_CACHE_MODE_*.
     */
    uint32_t state_cache_mode;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_hybrid_config;

/** kvpages_hybrid_config with struct_size set and all else zero. */
#define KVPAGES_HYBRID_CONFIG_INIT {sizeof(kvpages_hybrid_config), 0, 0, 0, \
    0, 0, 0, 0}

/**
 * A block size with which an attention page holds a state.
 */
typedef struct kvpages_hybrid_block {
    /**
     * sizeof(kvpages_hybrid_block) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Tokens of an attention block.
     */
    uint64_t block_size;
    /**
     * Bytes of an attention page, and what state pages are to be padded to.
     */
    uint64_t page_size_bytes;
    /**
     * Tokens of a state block; 0 where the state keeps its own.
     */
    uint64_t state_block_size;
} kvpages_hybrid_block;

/** kvpages_hybrid_block with struct_size set and all else zero. */
#define KVPAGES_HYBRID_BLOCK_INIT {sizeof(kvpages_hybrid_block), 0, 0, 0}

/**
 * A layout for layers of one quantisation mode. Frozen.
 */
typedef struct kvpages_quantised_layout {
    /**
     * One of KVPAGES_QUANT_MODE_*.
     */
    uint32_t quant_mode;
    /**
     * Zero.
     */
    uint32_t reserved0;
    /**
     * As kvpages_backend_config.layout.
     */
    const char *layout;
    /**
     * As kvpages_backend_config.memory_order.
     */
    const char *memory_order;
} kvpages_quantised_layout;

/**
 * What a backend is. Everything is Copied.
 *
 * A layout names the view's dimensions, outermost first: axes between bars,
 * fused axes joined by a star. The axes are block (kernel blocks), kv (key, then
 * value), head (kv heads), token (slots of a kernel block) and content (elements
 * of one key or value of one token and head, as the quantisation mode packs
 * them). Their sizes follow from the layer; nothing is guessed from a number.
 * Examples: "block | head | token | kv*content" with the memory order
 * "block | token | head | kv*content" is the packed NHD layout;
 * "kv | block | token | head | content" keeps all keys before all values.
 */
typedef struct kvpages_backend_config {
    /**
     * sizeof(kvpages_backend_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * The backend's name: its identity, and what messages call it. Not empty.
     */
    const char *name;
    /**
     * The dimensions of a view. NULL for a backend of state layers only.
     */
    const char *layout;
    /**
     * The same dimensions in the order in which they lie in memory. NULL when
     * they lie as they are listed.
     */
    const char *memory_order;
    /**
     * Layouts that replace it for layers of a quantisation mode.
     */
    const struct kvpages_quantised_layout *quantised_layouts;
    /**
     * Number of quantised_layouts.
     */
    size_t num_quantised_layouts;
    /**
     * Kernel block sizes, in tokens, that the kernels take.
     */
    const uint64_t *kernel_block_sizes;
    /**
     * Number of kernel_block_sizes.
     */
    size_t num_kernel_block_sizes;
    /**
     * The kernels take any multiple of one of these, in tokens.
     */
    const uint64_t *kernel_block_multiples;
    /**
     * Number of kernel_block_multiples. Together with kernel_block_sizes at
     * least one.
     */
    size_t num_kernel_block_multiples;
    /**
     * Key-value heads that the kernels are made for; 0 for any number.
     */
    uint64_t num_kv_heads;
    /**
     * Bytes that the first element of every block must be a multiple of: a power
     * of two up to 4096; 0 for 1.
     */
    uint64_t alignment_bytes;
    /**
     * Bits of the integers that the kernels compute element offsets with: 32 or
     * 64; 0 for 64.
     */
    uint32_t index_bits;
    /**
     * KVPAGES_BACKEND_* flags.
     */
    uint32_t flags;
    /**
     * One of KVPAGES_GRAPH_SUPPORT_*.
     */
    uint32_t graph_support;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_backend_config;

/** kvpages_backend_config with struct_size set and all else zero. */
#define KVPAGES_BACKEND_CONFIG_INIT {sizeof(kvpages_backend_config), NULL, \
    NULL, NULL, NULL, 0, NULL, 0, NULL, 0, 0, 0, 0, 0, 0, 0}

/**
 * What a backend takes and demands.
 */
typedef struct kvpages_backend_info {
    /**
     * sizeof(kvpages_backend_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Tokens of the smallest kernel block that the kernels take.
     */
    uint64_t smallest_kernel_block;
    /**
     * Key-value heads that the kernels are made for; 0 for any number.
     */
    uint64_t num_kv_heads;
    /**
     * Bytes that the first element of every block is a multiple of.
     */
    uint64_t alignment_bytes;
    /**
     * Bits of the integers that the kernels compute element offsets with.
     */
    uint32_t index_bits;
    /**
     * KVPAGES_BACKEND_* flags.
     */
    uint32_t flags;
    /**
     * One of KVPAGES_GRAPH_SUPPORT_*.
     */
    uint32_t graph_support;
    /**
     * 1 when the backend has a layout for attention layers.
     */
    uint32_t has_layout;
} kvpages_backend_info;

/** kvpages_backend_info with struct_size set and all else zero. */
#define KVPAGES_BACKEND_INFO_INIT {sizeof(kvpages_backend_info), 0, 0, 0, 0, \
    0, 0, 0}

/**
 * One layer. Everything is Copied.
 */
typedef struct kvpages_layer {
    /**
     * sizeof(kvpages_layer) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Its name: UTF-8, not empty, unique in the model.
     */
    const char *name;
    /**
     * What it stores. Needed unless shares_with is set; then it is checked
     * against what the other layer stores.
     */
    const struct kvpages_spec *spec;
    /**
     * What reads it. May be NULL: such a layer can be planned, but has no view.
     */
    const struct kvpages_backend *backend;
    /**
     * Name of the layer whose pages this one reads, added before or after it,
     * which may itself share. NULL for pages of its own.
     */
    const char *shares_with;
    /**
     * Query heads on one rank; 0 when it has none.
     */
    uint32_t num_query_heads;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_layer;

/** kvpages_layer with struct_size set and all else zero. */
#define KVPAGES_LAYER_INIT {sizeof(kvpages_layer), NULL, NULL, NULL, NULL, \
    0, 0}

/**
 * What a plan is made for.
 */
typedef struct kvpages_plan_config {
    /**
     * sizeof(kvpages_plan_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * One of KVPAGES_POLICY_*.
     */
    uint32_t policy;
    /**
     * KVPAGES_PLAN_* flags.
     */
    uint32_t flags;
    /**
     * Tokens of the longest sequence. At least 1.
     */
    uint64_t max_model_len;
    /**
     * Ranks that share the tokens of a sequence while decoding; 0 for 1.
     */
    uint64_t context_parallel_size;
    /**
     * Tokens scheduled and not yet settled, over all concurrent batches.
     */
    uint64_t max_tokens_in_flight;
    /**
     * Tokens of an encoder's output that cross attention caches.
     */
    uint64_t max_encoder_tokens;
    /**
     * Blocks of every group, with KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS.
     */
    uint64_t num_blocks_override;
    /**
     * Blocks that the engine keeps from requests, such as 1 for the null block.
     */
    uint64_t reserved_blocks;
    /**
     * One of KVPAGES_STATE_CACHE_MODE_*.
     */
    uint32_t state_cache_mode;
    /**
     * Zero.
     */
    uint32_t reserved0;
    /**
     * Tokens of a usual request, which the compact policy saves memory for besides
     * the longest; 0 for max_model_len.
     */
    uint64_t typical_len;
    /**
     * 1 when the layers' block sizes are no one's wish: the compact policy chooses
     * sizes that their kernels take, also smaller ones, of at least 16 tokens
     * unless the layer's own are smaller, and padding that was given is dropped. A
     * state keeps its block size.
     */
    uint32_t choose_block_sizes;
    /**
     * Zero.
     */
    uint32_t reserved1;
} kvpages_plan_config;

/** kvpages_plan_config with struct_size set and all else zero. */
#define KVPAGES_PLAN_CONFIG_INIT {sizeof(kvpages_plan_config), 0, 0, 0, 0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * One rank: the layers it holds and the memory it has for them. Frozen.
 */
typedef struct kvpages_worker {
    /**
     * Its layers. Workers that hold the same layers may name the same model.
     */
    const struct kvpages_model *model;
    /**
     * Bytes for caches. A number that is not positive is refused, unless the
     * worker has no layers or the number of blocks is overridden.
     */
    int64_t memory_bytes;
} kvpages_worker;

/**
 * By how much a plan does not fit.
 */
typedef struct kvpages_shortfall {
    /**
     * sizeof(kvpages_shortfall) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * The worker that has too little.
     */
    uint64_t worker;
    /**
     * Bytes that one request of the longest sequence needs.
     */
    uint64_t needed_bytes;
    /**
     * Bytes available.
     */
    uint64_t available_bytes;
    /**
     * Tokens of the longest sequence that would fit; 0 when none does.
     */
    uint64_t longest_model_len;
} kvpages_shortfall;

/** kvpages_shortfall with struct_size set and all else zero. */
#define KVPAGES_SHORTFALL_INIT {sizeof(kvpages_shortfall), 0, 0, 0, 0}

/**
 * Layers that share a block table, as an engine states them. Frozen.
 */
typedef struct kvpages_part_group {
    /**
     * Names of the layers, those that share another layer's pages included.
     */
    const char *const *layer_names;
    /**
     * Number of layer_names.
     */
    size_t num_layers;
    /**
     * KVPAGES_PART_GROUP_* flags.
     */
    uint64_t flags;
} kvpages_part_group;

/**
 * One allocation, or one slot of the packed one, as an engine states it. Frozen.
 */
typedef struct kvpages_part_tensor {
    /**
     * Bytes; of a packed tensor, those of the one backing that all packed tensors
     * share.
     */
    uint64_t size_bytes;
    /**
     * Packed: where the layer's page starts in a block.
     */
    uint64_t offset_bytes;
    /**
     * Packed: bytes from block to block. 0 when not packed.
     */
    uint64_t block_stride_bytes;
    /**
     * Names of the layers that have their pages in it.
     */
    const char *const *layer_names;
    /**
     * Number of layer_names.
     */
    size_t num_layers;
} kvpages_part_tensor;

/**
 * A plan of one worker as an engine made it itself.
 */
typedef struct kvpages_plan_parts {
    /**
     * sizeof(kvpages_plan_parts) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Blocks of every group.
     */
    uint64_t num_blocks;
    /**
     * Every layer with a cache is in one of them.
     */
    const struct kvpages_part_group *groups;
    /**
     * Number of groups.
     */
    size_t num_groups;
    /**
     * Every layer with pages of its own is in one of them.
     */
    const struct kvpages_part_tensor *tensors;
    /**
     * Number of tensors.
     */
    size_t num_tensors;
    /**
     * Tokens of a kernel block of each group, 0 where it has none. NULL to have
     * them chosen from the layers' backends.
     */
    const uint64_t *kernel_block_sizes;
    /**
     * Number of kernel_block_sizes: that of groups, or 0 with NULL.
     */
    size_t num_kernel_block_sizes;
} kvpages_plan_parts;

/** kvpages_plan_parts with struct_size set and all else zero. */
#define KVPAGES_PLAN_PARTS_INIT {sizeof(kvpages_plan_parts), 0, NULL, 0, \
    NULL, 0, NULL, 0}

/**
 * What one worker allocates.
 */
typedef struct kvpages_worker_info {
    /**
     * sizeof(kvpages_worker_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Blocks of every group, the same for all workers.
     */
    uint64_t num_blocks;
    /**
     * Groups of the whole model.
     */
    uint64_t num_groups;
    /**
     * Tensors of this worker.
     */
    uint64_t num_tensors;
    /**
     * Tokens that fit.
     */
    uint64_t capacity_tokens;
    /**
     * Requests of the longest sequence that fit at once.
     */
    double max_concurrency;
    /**
     * Bytes that one request of the longest sequence needs here.
     */
    uint64_t bytes_per_request;
    /**
     * Bytes of one block here.
     */
    uint64_t bytes_per_block;
    /**
     * Bytes of all allocations here.
     */
    uint64_t total_bytes;
    /**
     * 1 when layers of different types share memory, so that a block must be
     * zeroed when it gets another owner.
     */
    uint32_t needs_zeroing;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_worker_info;

/** kvpages_worker_info with struct_size set and all else zero. */
#define KVPAGES_WORKER_INFO_INIT {sizeof(kvpages_worker_info), 0, 0, 0, 0, \
    0.0, 0, 0, 0, 0, 0}

/**
 * Layers that share a block table.
 */
typedef struct kvpages_group_info {
    /**
     * sizeof(kvpages_group_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Layers of this worker with pages of their own.
     */
    uint64_t num_layers;
    /**
     * Layers of this worker that share another layer's pages.
     */
    uint64_t num_sharing_layers;
    /**
     * Tokens of one block.
     */
    uint64_t block_size;
    /**
     * Tokens of a kernel block; 0 when no layer has a backend.
     */
    uint64_t kernel_block_size;
    /**
     * Bytes of one layer's page; of a set, of all layers' pages.
     */
    uint64_t page_size_bytes;
    /**
     * Entries of a block-table row for a sequence of max_model_len tokens.
     */
    uint64_t row_blocks;
    /**
     * Entries that a block-table row must have for any request: row_blocks; more
     * where cross attention caches more encoder tokens than that and where a request
     * holds more states than that, and fewer where the layers of a set share their
     * tokens over context-parallel ranks.
     */
    uint64_t table_width_blocks;
    /**
     * The most blocks that one request can hold.
     */
    uint64_t blocks_per_request;
    /**
     * Specs of the group: 1 when its layers store the same; of a set one for each
     * layer (on a worker without layers of it: of the whole model).
     */
    uint64_t num_specs;
    /**
     * 1 when the layers are a set: the same number of blocks, but different
     * things stored.
     */
    uint32_t is_set;
    /**
     * 1 when it holds layers of a speculative draft.
     */
    uint32_t is_draft;
} kvpages_group_info;

/** kvpages_group_info with struct_size set and all else zero. */
#define KVPAGES_GROUP_INFO_INIT {sizeof(kvpages_group_info), 0, 0, 0, 0, 0, \
    0, 0, 0, 0, 0, 0}

/**
 * Memory that one layer of each group shares.
 */
typedef struct kvpages_tensor_info {
    /**
     * sizeof(kvpages_tensor_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Bytes; of a packed tensor, those of the one backing that all packed tensors
     * share.
     */
    uint64_t size_bytes;
    /**
     * Packed: where the layers' page starts in a block.
     */
    uint64_t offset_bytes;
    /**
     * Packed: bytes from block to block. 0 when not packed.
     */
    uint64_t block_stride_bytes;
    /**
     * Layers that have their pages in it.
     */
    uint64_t num_layers;
} kvpages_tensor_info;

/** kvpages_tensor_info with struct_size set and all else zero. */
#define KVPAGES_TENSOR_INFO_INIT {sizeof(kvpages_tensor_info), 0, 0, 0, 0}

/**
 * What decides the steps of a scheduler and of a prefix cache.
 */
typedef struct kvpages_block_size_config {
    /**
     * sizeof(kvpages_block_size_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Tokens of a block as the engine was configured. At least 1.
     */
    uint64_t cache_block_size;
    /**
     * Tokens of one hash as the engine wants them; 0 to have it chosen.
     */
    uint64_t prefix_match_unit;
    /**
     * 1 when block hashes are used: prefix caching is on, or blocks are
     * transferred.
     */
    uint32_t hashes_blocks;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_block_size_config;

/** kvpages_block_size_config with struct_size set and all else zero. */
#define KVPAGES_BLOCK_SIZE_CONFIG_INIT {sizeof(kvpages_block_size_config), \
    0, 0, 0, 0}

/**
 * What a CUDA device is.
 */
typedef struct kvpages_device_info {
    /**
     * sizeof(kvpages_device_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Bytes of its memory.
     */
    uint64_t total_bytes;
    /**
     * Bytes that are free now.
     */
    uint64_t free_bytes;
    /**
     * Compute capability, the number before the point.
     */
    uint32_t compute_capability_major;
    /**
     * Compute capability, the number behind the point.
     */
    uint32_t compute_capability_minor;
    /**
     * Multiprocessors.
     */
    uint32_t num_multiprocessors;
    /**
     * 1 when it has virtual memory: KVPAGES_CUDA_MEMORY_VIRTUAL.
     */
    uint32_t has_virtual_memory;
    /**
     * 1 when it has KVPAGES_CUDA_MEMORY_RDMA.
     */
    uint32_t has_rdma;
    /**
     * 1 when it has KVPAGES_CUDA_MEMORY_SHAREABLE.
     */
    uint32_t has_shareable;
    /**
     * Its name. A longer one is cut.
     */
    char name[256];
} kvpages_device_info;

/** kvpages_device_info with struct_size set and all else zero. */
#define KVPAGES_DEVICE_INFO_INIT {sizeof(kvpages_device_info), 0, 0, 0, 0, \
    0, 0, 0, 0, {0}}

/**
 * Takes memory for a cache.
 *
 * @param user             As in kvpages_memory_callbacks.
 * @param bytes            Bytes wanted; may be 0.
 * @param alignment_bytes  What the address must be a multiple of: a power of two,
 *                         at least 256.
 * @param[out] out_data    The memory, on the device that the callbacks state.
 * @return 0 when out_data was set to something else than NULL. Anything else is
 *         a refusal: the cache is not made.
 */
typedef int32_t (*kvpages_allocate_fn)(void *user,
                                       size_t bytes,
                                       size_t alignment_bytes,
                                       void **out_data);

/**
 * Gives memory back.
 *
 * @param user   As in kvpages_memory_callbacks.
 * @param data   What the allocation set.
 * @param bytes  Bytes that were wanted.
 */
typedef void (*kvpages_release_fn)(void *user, void *data, size_t bytes);

/**
 * Where memory is. All zero is the host. Frozen.
 */
typedef struct kvpages_device {
    /**
     * One of KVPAGES_DEVICE_KIND_*.
     */
    uint32_t kind;
    /**
     * The CUDA device's number among those that the driver shows. Without effect
     * when a context is given.
     */
    uint32_t ordinal;
    /**
     * A CUcontext. NULL: the device's primary context, which the CUDA runtime and
     * PyTorch use too.
     */
    void *context;
} kvpages_device;

/**
 * An engine's allocator. The functions are called on the threads that create and
 * destroy caches and what was made from them (kvpages_ops, tensors of DLPack), so
 * by several at once when several do. They must not throw, and must not call
 * kvpages with the same memory or cache.
 */
typedef struct kvpages_memory_callbacks {
    /**
     * sizeof(kvpages_memory_callbacks) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Handed to both functions. Kept until the memory, all caches in it and what was
     * made from them are destroyed.
     */
    void *user;
    /**
     * Takes memory. Not NULL.
     */
    kvpages_allocate_fn allocate;
    /**
     * Gives memory back. Not NULL.
     */
    kvpages_release_fn release;
    /**
     * 1 when allocate returns memory that is zero; with 0 the library zeroes it.
     */
    uint32_t is_zeroed;
    /**
     * Zero.
     */
    uint32_t reserved0;
    /**
     * Where the memory is; all zero for the host. The library zeroes memory of a
     * device on the device. A context is Kept until the memory and all that is made
     * from it are destroyed.
     */
    struct kvpages_device device;
} kvpages_memory_callbacks;

/** kvpages_memory_callbacks with struct_size set and all else zero. */
#define KVPAGES_MEMORY_CALLBACKS_INIT {sizeof(kvpages_memory_callbacks), \
    NULL, NULL, NULL, 0, 0, {0, 0, NULL}}

/**
 * Memory of a CUDA device, or host memory pinned for it.
 */
typedef struct kvpages_cuda_memory_config {
    /**
     * sizeof(kvpages_cuda_memory_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * A CUcontext, Kept until the memory and all that is made from it are destroyed.
     * NULL: the primary context of the device, which is retained.
     */
    void *context;
    /**
     * The device's number, less than kvpages_device_count(). Without effect when a
     * context is given.
     */
    uint32_t ordinal;
    /**
     * KVPAGES_CUDA_MEMORY_* flags.
     */
    uint32_t flags;
} kvpages_cuda_memory_config;

/** kvpages_cuda_memory_config with struct_size set and all else zero. */
#define KVPAGES_CUDA_MEMORY_CONFIG_INIT {sizeof(kvpages_cuda_memory_config), \
    NULL, 0, 0}

/**
 * What a cache is made of.
 */
typedef struct kvpages_cache_config {
    /**
     * sizeof(kvpages_cache_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Number of the worker in the plan.
     */
    size_t worker;
    /**
     * Where the bytes come from. Not NULL.
     */
    const struct kvpages_memory *memory;
    /**
     * Blocks that get memory. 0: all blocks of the plan, for good. Any other
     * number, up to those of the plan, makes a cache that can be resized: addresses
     * are reserved for all blocks of the plan, and memory comes and goes with
     * kvpages_cache_resize().
     */
    uint64_t num_blocks;
    /**
     * KVPAGES_CACHE_* flags.
     */
    uint32_t flags;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_cache_config;

/** kvpages_cache_config with struct_size set and all else zero. */
#define KVPAGES_CACHE_CONFIG_INIT {sizeof(kvpages_cache_config), 0, NULL, 0, \
    0, 0}

/**
 * A view: what a kernel is given. Frozen; it never gets more fields.
 *
 * Element [i, j, ...] lies at data + (i * strides[0] + j * strides[1] + ...) *
 * kvpages_dtype_bytes(dtype).
 */
typedef struct kvpages_tensor {
    /**
     * The first element: a host or device pointer, as the cache's memory is.
     */
    void *data;
    /**
     * Sizes of the dimensions, ndim of them. Kept until the cache is destroyed.
     */
    const int64_t *shape;
    /**
     * Elements from one index of a dimension to the next, ndim of them. Kept
     * until the cache is destroyed.
     */
    const int64_t *strides;
    /**
     * One of KVPAGES_DTYPE_*.
     */
    uint32_t dtype;
    /**
     * Number of dimensions.
     */
    uint32_t ndim;
} kvpages_tensor;

/**
 * What is proven of a view: it stays inside its allocation, its elements are
 * aligned, and no two indices mean one element. Of the views of a cache also: no
 * byte belongs to different blocks of layers that share an allocation.
 */
typedef struct kvpages_view_report {
    /**
     * sizeof(kvpages_view_report) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Number of the allocation that holds it.
     */
    uint64_t allocation;
    /**
     * Where the first element lies in the allocation.
     */
    uint64_t offset_bytes;
    /**
     * Bytes of all elements.
     */
    uint64_t logical_bytes;
    /**
     * One past the last byte that the view reaches, counted from the
     * allocation's start; 0 when the view is empty.
     */
    uint64_t end_bytes;
    /**
     * The furthest element, in elements from the first.
     */
    uint64_t largest_element_offset;
    /**
     * The largest power of two, up to 256, that the first element of every block
     * is aligned to.
     */
    uint64_t alignment_bytes;
    /**
     * Bytes from kernel block to kernel block; 0 for an engine's own view.
     */
    uint64_t kernel_block_step_bytes;
    /**
     * Bytes from block to block. Block b owns bytes offset_bytes + b *
     * block_step_bytes to + block_span_bytes of each run. 0 for an engine's own
     * view.
     */
    uint64_t block_step_bytes;
    /**
     * Bytes that a block owns in one run: its page, or a state's part of it.
     */
    uint64_t block_span_bytes;
    /**
     * Runs that a block is spread over: 1 when it is in one piece, 2 when keys
     * and values are apart.
     */
    uint64_t num_runs;
    /**
     * Bytes from run to run.
     */
    uint64_t run_step_bytes;
    /**
     * The layer whose pages these are: another one when the layer shares.
     */
    uint64_t owner_layer;
    /**
     * 1 when all element offsets fit signed 32-bit integers.
     */
    uint32_t fits_int32;
    /**
     * The dimension that counts kernel blocks, or a state's blocks.
     */
    uint32_t block_dim;
} kvpages_view_report;

/** kvpages_view_report with struct_size set and all else zero. */
#define KVPAGES_VIEW_REPORT_INIT {sizeof(kvpages_view_report), 0, 0, 0, 0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * What a layer of a cache is.
 */
typedef struct kvpages_layer_info {
    /**
     * sizeof(kvpages_layer_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * The group whose block table it follows.
     */
    uint64_t group;
    /**
     * Number of the allocation that holds its pages.
     */
    uint64_t allocation;
    /**
     * The layer of this cache whose pages it reads: another one when it shares.
     */
    uint64_t owner_layer;
    /**
     * Views: 1 of an attention layer, one for each state of a state layer.
     */
    uint64_t num_views;
    /**
     * Tokens of one block, as it was planned.
     */
    uint64_t block_size;
    /**
     * Tokens of one kernel block of the group: what its block table counts.
     */
    uint64_t kernel_block_size;
    /**
     * Slots that one block stores.
     */
    uint64_t storage_block_size;
    /**
     * Bytes of one block in this layer, padding included.
     */
    uint64_t page_size_bytes;
    /**
     * One of KVPAGES_SPEC_KIND_*.
     */
    uint32_t spec_kind;
    /**
     * Query heads on one rank.
     */
    uint32_t num_query_heads;
} kvpages_layer_info;

/** kvpages_layer_info with struct_size set and all else zero. */
#define KVPAGES_LAYER_INFO_INIT {sizeof(kvpages_layer_info), 0, 0, 0, 0, 0, \
    0, 0, 0, 0, 0}

/**
 * How the axes of an attention layer's view lie, whatever dimensions its backend
 * fuses them to. Key element e of a token in slot s of kernel block b and of head
 * h is element b * kernel_block_stride + s * token_stride + h * head_stride + e *
 * content_stride of the view; its value lies value_offset elements behind.
 */
typedef struct kvpages_view_axes {
    /**
     * sizeof(kvpages_view_axes) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Elements from kernel block to kernel block.
     */
    uint64_t kernel_block_stride;
    /**
     * Elements from slot to slot.
     */
    uint64_t token_stride;
    /**
     * Elements from head to head; 0 when the layout has no heads.
     */
    uint64_t head_stride;
    /**
     * Elements from one element of a key or value to the next.
     */
    uint64_t content_stride;
    /**
     * Elements from a key to its value; 0 when there is no value of its own.
     */
    uint64_t value_offset;
    /**
     * Stored elements of a key, or of what is stored instead of keys and values.
     */
    uint64_t key_elements;
    /**
     * Stored elements of a value; 0 when there is none of its own.
     */
    uint64_t value_elements;
    /**
     * Elements that the scale behind each key and value takes; 0 when there is
     * none, or when it lies at the end of the page.
     */
    uint64_t scale_elements;
    /**
     * Slots of one kernel block.
     */
    uint64_t kernel_block_slots;
    /**
     * Heads.
     */
    uint64_t num_heads;
} kvpages_view_axes;

/** kvpages_view_axes with struct_size set and all else zero. */
#define KVPAGES_VIEW_AXES_INIT {sizeof(kvpages_view_axes), 0, 0, 0, 0, 0, 0, \
    0, 0, 0, 0}

/**
 * One allocation. Frozen.
 */
typedef struct kvpages_allocation {
    /**
     * Its first byte, at a multiple of at least 256.
     */
    void *data;
    /**
     * Its bytes, those of blocks without memory included.
     */
    uint64_t size_bytes;
} kvpages_allocation;

/**
 * One piece of memory in which blocks lie at a constant distance: block b is the
 * block_step_bytes bytes at data + b * block_step_bytes. Together the regions
 * hold every byte of every block, so they are what a transfer engine registers,
 * and what is cleared to clear a block. Frozen.
 */
typedef struct kvpages_region {
    /**
     * Its first byte.
     */
    void *data;
    /**
     * Its bytes.
     */
    uint64_t size_bytes;
    /**
     * Bytes from block to block.
     */
    uint64_t block_step_bytes;
    /**
     * Blocks.
     */
    uint64_t num_blocks;
    /**
     * Number of the allocation it is part of.
     */
    uint64_t allocation;
} kvpages_region;

/**
 * A strided view of an engine's own. Frozen.
 */
typedef struct kvpages_view {
    /**
     * Sizes of the dimensions, ndim of them.
     */
    const int64_t *shape;
    /**
     * Elements from one index of a dimension to the next, ndim of them.
     */
    const int64_t *strides;
    /**
     * Number of dimensions.
     */
    uint64_t ndim;
    /**
     * Where the first element lies in the allocation.
     */
    uint64_t offset_bytes;
    /**
     * Bytes of one element.
     */
    uint64_t element_bytes;
    /**
     * Bytes of the allocation.
     */
    uint64_t allocation_bytes;
} kvpages_view;

/**
 * Layers with a cache, and the engine's layers.
 */
typedef struct kvpages_bind_config {
    /**
     * sizeof(kvpages_bind_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Names of the layers with a cache, in the order of their declaration.
     */
    const char *const *layer_names;
    /**
     * Number of layer_names.
     */
    size_t num_layers;
    /**
     * Names of the engine's layers; every layer with a cache is among them.
     */
    const char *const *context_names;
    /**
     * Number of context_names.
     */
    size_t num_context_names;
    /**
     * Attention modules of one layer; 0 for 1.
     */
    uint64_t num_attention_modules;
    /**
     * Caches that the engine's list holds before; it must be 0.
     */
    uint64_t num_already_bound;
} kvpages_bind_config;

/** kvpages_bind_config with struct_size set and all else zero. */
#define KVPAGES_BIND_CONFIG_INIT {sizeof(kvpages_bind_config), NULL, 0, \
    NULL, 0, 0, 0}

/**
 * What a builder is made for. Valid during the call that it is handed to.
 */
typedef struct kvpages_builder_info {
    /**
     * sizeof(kvpages_builder_info) as the library was compiled.
     */
    size_t struct_size;
    /**
     * Name of the backend that reads the layers.
     */
    const char *backend_name;
    /**
     * What the layers store, its block size that of the kernel blocks where there
     * are any. Compressed layers keep their own block size when the ratio of one of
     * their cache group does not divide the kernel block. Their views are not split
     * in either case: storage_block_size of kvpages_layer_info.
     */
    const struct kvpages_spec *spec;
    /**
     * The layers, by their number in the worker's model, which is not that in a
     * cache: kvpages_cache_find_model_layer().
     */
    const size_t *layers;
    /**
     * Number of layers.
     */
    size_t num_layers;
    /**
     * The KV-cache group, as the plan numbers it.
     */
    uint64_t cache_group;
    /**
     * The attention group in the cache group.
     */
    uint64_t group;
    /**
     * Which of the group's builders.
     */
    uint64_t builder;
    /**
     * Tokens of a kernel block; 0 for a group without cache.
     */
    uint64_t kernel_block_size;
    /**
     * Query heads on one rank; 0 when the layers have none.
     */
    uint32_t num_query_heads;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_builder_info;

/** kvpages_builder_info with struct_size set and all else zero. */
#define KVPAGES_BUILDER_INFO_INIT {sizeof(kvpages_builder_info), NULL, NULL, \
    NULL, 0, 0, 0, 0, 0, 0, 0}

/**
 * Makes a builder.
 *
 * @param user              As in kvpages_builder_callbacks.
 * @param info              What it is made for.
 * @param[out] out_builder  The builder, handed to the other callbacks. NULL
 *                          before; may stay so.
 * @return 0 when it was made; anything else stops the call.
 */
typedef int32_t (*kvpages_create_builder_fn)(void *user,
                                             const struct kvpages_builder_info *info,
                                             void **out_builder);

/**
 * How far a builder's metadata can be captured into a graph.
 *
 * @param user             As in kvpages_builder_callbacks.
 * @param builder          What create made.
 * @param[out] out_support One of KVPAGES_GRAPH_SUPPORT_*. What the backend's
 *                         contract says before.
 * @return 0, or anything else to stop the call.
 */
typedef int32_t (*kvpages_builder_graph_support_fn)(void *user,
                                                    void *builder,
                                                    uint32_t *out_support);

/**
 * The workspace that a builder lets others use.
 *
 * @param user               As in kvpages_builder_callbacks.
 * @param builder            What create made.
 * @param[out] out_workspace The workspace. NULL before; stays so when the builder
 *                           has none to give.
 * @return 0, or anything else to stop the call.
 */
typedef int32_t (*kvpages_builder_get_workspace_fn)(void *user,
                                                    void *builder,
                                                    void **out_workspace);

/**
 * Hands a builder the workspace of one made before it.
 *
 * @param user       As in kvpages_builder_callbacks.
 * @param builder    What create made.
 * @param workspace  The workspace.
 * @return 0, or anything else to stop the call.
 */
typedef int32_t (*kvpages_builder_set_workspace_fn)(void *user,
                                                    void *builder,
                                                    void *workspace);

/**
 * Tokens of a request, by their positions, both ends included. Frozen.
 */
typedef struct kvpages_range {
    /**
     * The first token.
     */
    int64_t first;
    /**
     * The last token.
     */
    int64_t last;
} kvpages_range;

/**
 * Ranges of one request. Frozen.
 */
typedef struct kvpages_request_ranges {
    /**
     * The ranges; may be NULL when there are none.
     */
    const struct kvpages_range *ranges;
    /**
     * Number of ranges.
     */
    size_t num_ranges;
} kvpages_request_ranges;

/**
 * A step as the layers of one cache group see it: what a builder is given. Its
 * pointers are those of kvpages_step.
 */
typedef struct kvpages_common_metadata {
    /**
     * sizeof(kvpages_common_metadata) as the library was compiled.
     */
    size_t struct_size;
    /**
     * The cache group.
     */
    uint64_t cache_group;
    /**
     * Requests of the step.
     */
    uint64_t num_requests;
    /**
     * Tokens of all requests, padding not counted.
     */
    uint64_t num_tokens;
    /**
     * Most tokens of one request.
     */
    uint64_t max_query_len;
    /**
     * Longest sequence.
     */
    uint64_t max_seq_len;
    /**
     * Where each request's tokens start, and where the last one's end:
     * num_requests + 1 entries, for the device.
     */
    const int32_t *query_start;
    /**
     * The same for the host.
     */
    const int32_t *query_start_host;
    /**
     * Tokens of each request's sequence: num_requests entries, for the device.
     */
    const int32_t *seq_lens;
    /**
     * Numbers that are at least those, for the host. May be NULL.
     */
    const int32_t *seq_lens_host_bound;
    /**
     * Tokens of each sequence that this rank holds, in context parallelism. May
     * be NULL.
     */
    const int32_t *local_seq_lens;
    /**
     * Position of each token. May be NULL.
     */
    const int64_t *positions;
    /**
     * 1 for each request that still works on its prompt, else 0. May be NULL.
     */
    const uint8_t *is_prefilling;
    /**
     * For each request the tokens that attend in both directions. May be NULL.
     */
    const struct kvpages_request_ranges *multimodal_ranges;
    /**
     * Number of multimodal_ranges: num_requests, or 0.
     */
    size_t num_multimodal_requests;
    /**
     * Tokens of each request's prefix that R-SWA layers keep. May be NULL.
     */
    const int32_t *rswa_prefix_lens;
    /**
     * 1 for each causal request, else 0; NULL unless causality is
     * KVPAGES_CAUSALITY_PER_REQUEST.
     */
    const uint8_t *causal_by_request;
    /**
     * Kernel blocks of each request: i32 [requests, blocks].
     */
    struct kvpages_tensor block_table;
    /**
     * Slot of each token: i64 [tokens].
     */
    struct kvpages_tensor slot_mapping;
    /**
     * What the model adds for this cache group. May be NULL.
     */
    void *group_extra;
    /**
     * Tokens that all sequences begin with and that are computed once: 0.
     */
    uint64_t common_prefix_len;
    /**
     * One of KVPAGES_CAUSALITY_*.
     */
    uint32_t causality;
    /**
     * 1 when the step is captured into a graph.
     */
    uint32_t for_capture;
} kvpages_common_metadata;

/** kvpages_common_metadata with struct_size set and all else zero. */
#define KVPAGES_COMMON_METADATA_INIT {sizeof(kvpages_common_metadata), 0, 0, \
    0, 0, 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, \
    {NULL, NULL, NULL, 0, 0}, {NULL, NULL, NULL, 0, 0}, NULL, 0, 0, 0}

/**
 * Builds the metadata of a step for the layers of a builder.
 *
 * @param user              As in kvpages_builder_callbacks.
 * @param builder           What create made.
 * @param common            The step, as the layers' cache group sees it. Valid
 *                          during the call; what its pointers lead to is as valid
 *                          as the engine made it.
 * @param extra             The entry of builder_extra for the attention group;
 *                          NULL when there is none, and for a capture.
 * @param[out] out_metadata The metadata. NULL before.
 * @return 0, or anything else to stop the call.
 */
typedef int32_t (*kvpages_builder_build_fn)(void *user,
                                            void *builder,
                                            const struct kvpages_common_metadata *common,
                                            void *extra,
                                            void **out_metadata);

/**
 * Ends a builder.
 *
 * @param user     As in kvpages_builder_callbacks.
 * @param builder  What create made.
 */
typedef void (*kvpages_destroy_builder_fn)(void *user, void *builder);

/**
 * An engine's metadata builders. The functions must not throw or jump out, and
 * must not use the attention handle that calls them. One that returns anything
 * but 0 stops the call: it returns KVPAGES_STATUS_STOPPED, and
 * kvpages_last_callback_code() is what the function returned.
 */
typedef struct kvpages_builder_callbacks {
    /**
     * sizeof(kvpages_builder_callbacks) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Handed to all functions. Kept until the attention handle is destroyed.
     */
    void *user;
    /**
     * Makes a builder. Not NULL.
     */
    kvpages_create_builder_fn create;
    /**
     * NULL: what the backend's contract says.
     */
    kvpages_builder_graph_support_fn graph_support;
    /**
     * Asked of every builder until one gives a workspace. NULL: none does.
     */
    kvpages_builder_get_workspace_fn get_workspace;
    /**
     * Called for every builder made after the one that gave a workspace. NULL:
     * builders need none.
     */
    kvpages_builder_set_workspace_fn set_workspace;
    /**
     * Builds metadata. Not NULL.
     */
    kvpages_builder_build_fn build;
    /**
     * Builds the metadata of a step that is captured. NULL: build does.
     */
    kvpages_builder_build_fn build_for_capture;
    /**
     * Called once for each builder that create made. Not NULL.
     */
    kvpages_destroy_builder_fn destroy;
} kvpages_builder_callbacks;

/** kvpages_builder_callbacks with struct_size set and all else zero. */
#define KVPAGES_BUILDER_CALLBACKS_INIT {sizeof(kvpages_builder_callbacks), \
    NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL}

/**
 * The builders of one backend. Frozen.
 */
typedef struct kvpages_backend_callbacks {
    /**
     * Borrowed. Any backend of that name is meant.
     */
    const struct kvpages_backend *backend;
    /**
     * Copied.
     */
    const struct kvpages_builder_callbacks *callbacks;
} kvpages_backend_callbacks;

/**
 * What attention groups are made of.
 */
typedef struct kvpages_attention_config {
    /**
     * sizeof(kvpages_attention_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Less than kvpages_plan_num_workers().
     */
    size_t worker;
    /**
     * Names of the worker's layers that take part. NULL: all do.
     */
    const char *const *active_layers;
    /**
     * Number of active_layers.
     */
    size_t num_active_layers;
    /**
     * Builders of all backends that backend_callbacks does not list. Copied. When
     * both are left out there are groups, but no builders.
     */
    const struct kvpages_builder_callbacks *callbacks;
    /**
     * Builders of single backends.
     */
    const struct kvpages_backend_callbacks *backend_callbacks;
    /**
     * Number of backend_callbacks.
     */
    size_t num_backend_callbacks;
    /**
     * Builders of each attention group, one for each micro-batch; 0 for 1. At most
     * 256.
     */
    uint64_t num_builders;
} kvpages_attention_config;

/** kvpages_attention_config with struct_size set and all else zero. */
#define KVPAGES_ATTENTION_CONFIG_INIT {sizeof(kvpages_attention_config), 0, \
    NULL, 0, NULL, NULL, 0, 0}

/**
 * What an attention group is.
 */
typedef struct kvpages_attention_group_info {
    /**
     * sizeof(kvpages_attention_group_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Its number among the attention groups of all cache groups.
     */
    uint64_t index;
    /**
     * Its layers.
     */
    uint64_t num_layers;
    /**
     * Tokens of a kernel block; 0 for a group without cache.
     */
    uint64_t kernel_block_size;
    /**
     * Query heads on one rank; 0 when the layers have none.
     */
    uint32_t num_query_heads;
    /**
     * What the backend's contract says: one of KVPAGES_GRAPH_SUPPORT_*.
     */
    uint32_t graph_support;
} kvpages_attention_group_info;

/** kvpages_attention_group_info with struct_size set and all else zero. */
#define KVPAGES_ATTENTION_GROUP_INFO_INIT { \
    sizeof(kvpages_attention_group_info), 0, 0, 0, 0, 0}

/**
 * A step. Arrays by cache group are in the plan's order, groups without cache and
 * groups without active layers included. What the pointers for the device lead to
 * is not looked at.
 */
typedef struct kvpages_step {
    /**
     * sizeof(kvpages_step) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Requests of the step.
     */
    uint64_t num_requests;
    /**
     * Tokens of all requests, padding not counted.
     */
    uint64_t num_tokens;
    /**
     * Most tokens of one request: no less than query_start_host tells.
     */
    uint64_t max_query_len;
    /**
     * Longest sequence.
     */
    uint64_t max_seq_len;
    /**
     * Where each request's tokens start, and where the last one's end:
     * num_requests + 1 entries, for the device. Not NULL.
     */
    const int32_t *query_start;
    /**
     * The same for the host. Not NULL. The first is 0, none is less than the one
     * before, and the last is at most num_tokens. Padded requests have no tokens.
     */
    const int32_t *query_start_host;
    /**
     * Tokens of each request's sequence: num_requests entries, for the device.
     * NULL only when there are no requests.
     */
    const int32_t *seq_lens;
    /**
     * Numbers that are at least those, for the host, and so no less than the
     * request's tokens in the step. May be NULL.
     */
    const int32_t *seq_lens_host_bound;
    /**
     * Tokens of each sequence that this rank holds, in context parallelism. May
     * be NULL.
     */
    const int32_t *local_seq_lens;
    /**
     * Position of each token. May be NULL.
     */
    const int64_t *positions;
    /**
     * 1 for each request that still works on its prompt, else 0. May be NULL.
     */
    const uint8_t *is_prefilling;
    /**
     * For each request the tokens that attend in both directions:
     * kvpages_multimodal_ranges(). May be NULL.
     */
    const struct kvpages_request_ranges *multimodal_ranges;
    /**
     * Number of multimodal_ranges: num_requests, or 0.
     */
    size_t num_multimodal_requests;
    /**
     * Tokens of each request's prefix that R-SWA layers keep. May be NULL.
     */
    const int32_t *rswa_prefix_lens;
    /**
     * 1 for each causal request, else 0. Needed where causality is
     * KVPAGES_CAUSALITY_PER_REQUEST.
     */
    const uint8_t *causal_by_request;
    /**
     * By cache group, kernel blocks of each request: i32 [at least num_requests,
     * blocks]. The stride of blocks is 1; rows do not overlap, so theirs is at
     * least the number of blocks. All zero for a group without cache.
     */
    const struct kvpages_tensor *block_tables;
    /**
     * Number of block_tables: that of cache groups.
     */
    size_t num_block_tables;
    /**
     * By cache group, slot of each token: i64 [at least num_tokens], stride 1. All
     * zero for a group without cache. Shapes and strides are Kept until the next
     * build of the same builder.
     */
    const struct kvpages_tensor *slot_mappings;
    /**
     * Number of slot_mappings: that of cache groups.
     */
    size_t num_slot_mappings;
    /**
     * By cache group, what replaces causality. May be NULL.
     */
    const uint32_t *causality_by_group;
    /**
     * Number of causality_by_group: that of cache groups, or 0.
     */
    size_t num_causality_by_group;
    /**
     * By cache group, what the model adds to the common metadata. May be NULL.
     */
    void *const *group_extra;
    /**
     * Number of group_extra: that of cache groups, or 0.
     */
    size_t num_group_extra;
    /**
     * By attention group, counted over all cache groups, what the model hands to
     * a builder. May be NULL.
     */
    void *const *builder_extra;
    /**
     * Number of builder_extra: that of attention groups, or 0.
     */
    size_t num_builder_extra;
    /**
     * Number of cache groups that the engine has: that of the plan.
     */
    size_t num_cache_groups;
    /**
     * Which of the builders of each group: less than num_builders of
     * kvpages_attention_config.
     */
    uint64_t builder;
    /**
     * One of KVPAGES_CAUSALITY_*.
     */
    uint32_t causality;
    /**
     * 1 when the step is captured into a graph: build_for_capture is called, and
     * builder_extra is not used.
     */
    uint32_t for_capture;
} kvpages_step;

/** kvpages_step with struct_size set and all else zero. */
#define KVPAGES_STEP_INIT {sizeof(kvpages_step), 0, 0, 0, 0, NULL, NULL, \
    NULL, NULL, NULL, NULL, NULL, NULL, 0, NULL, NULL, NULL, 0, NULL, 0, \
    NULL, 0, NULL, 0, NULL, 0, 0, 0, 0, 0}

/**
 * An item of a prompt: a run of placeholder tokens. Frozen.
 */
typedef struct kvpages_multimodal_item {
    /**
     * One of KVPAGES_MODALITY_*.
     */
    uint32_t modality;
    /**
     * Zero.
     */
    uint32_t reserved0;
    /**
     * Position of its first token.
     */
    int64_t offset;
    /**
     * Its tokens.
     */
    int64_t length;
    /**
     * For each of its tokens 1 when an embedding replaces it, else 0: length
     * entries. NULL: all of them.
     */
    const uint8_t *is_embedded;
} kvpages_multimodal_item;

/**
 * What the table of a group is made for. Frozen.
 */
typedef struct kvpages_table_group {
    /**
     * Tokens of a block.
     */
    uint64_t block_size;
    /**
     * Tokens of a kernel block, which divide a block. 0: those of a block.
     */
    uint64_t kernel_block_size;
    /**
     * Blocks that a row holds.
     */
    uint64_t row_blocks;
    /**
     * 1 when every context-parallel rank holds all of it, as of state.
     */
    uint32_t is_replicated;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_table_group;

/**
 * What tables are made for.
 */
typedef struct kvpages_tables_config {
    /**
     * sizeof(kvpages_tables_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * The groups, by number. NULL where they are a plan's.
     */
    const struct kvpages_table_group *groups;
    /**
     * How many.
     */
    size_t num_groups;
    /**
     * Rows: requests that there may be at once. Not 0.
     */
    uint64_t max_requests;
    /**
     * Tokens that a step may have. Not 0.
     */
    uint64_t max_tokens;
    /**
     * Block ids are 0 to this number minus 1. 0: the plan's number; without a plan
     * as many as 32-bit ids of kernel blocks can tell apart.
     */
    uint64_t num_blocks;
    /**
     * Ranks that share the tokens. 0: the plan's number; without a plan 1.
     */
    uint64_t context_parallel_size;
    /**
     * Which of the ranks this is.
     */
    uint64_t context_parallel_rank;
    /**
     * Tokens that a rank gets before the next one does; it divides the block sizes
     * of the groups that are shared out. 0: 1.
     */
    uint64_t context_parallel_interleave;
    /**
     * KVPAGES_TABLES_* flags.
     */
    uint32_t flags;
    /**
     * Zero.
     */
    uint32_t reserved0;
    /**
     * Tokens of the longest request, its encoder's too: rows of a plan's groups hold
     * them. 0: the plan's number. A plan from parts has none, so it must be set for
     * one. Not used without a plan.
     */
    uint64_t max_model_len;
    /**
     * Where the tables, the input tables and the slots are; all zero for the host.
     * A context is Kept until the tables are destroyed.
     */
    struct kvpages_device device;
} kvpages_tables_config;

/** kvpages_tables_config with struct_size set and all else zero. */
#define KVPAGES_TABLES_CONFIG_INIT {sizeof(kvpages_tables_config), NULL, 0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0, {0, 0, NULL}}

/**
 * What the table of a group is.
 */
typedef struct kvpages_table_info {
    /**
     * sizeof(kvpages_table_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Tokens of a block.
     */
    uint64_t block_size;
    /**
     * Tokens of a kernel block.
     */
    uint64_t kernel_block_size;
    /**
     * Kernel blocks of a block.
     */
    uint64_t kernel_blocks_per_block;
    /**
     * Blocks that a row holds.
     */
    uint64_t row_blocks;
    /**
     * Entries of a row: kernel blocks.
     */
    uint64_t row_width;
    /**
     * 1 when every context-parallel rank holds all of it.
     */
    uint32_t is_replicated;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_table_info;

/** kvpages_table_info with struct_size set and all else zero. */
#define KVPAGES_TABLE_INFO_INIT {sizeof(kvpages_table_info), 0, 0, 0, 0, 0, \
    0, 0}

/**
 * Writes to many rows, in all groups, in order.
 */
typedef struct kvpages_row_writes {
    /**
     * sizeof(kvpages_row_writes) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * The request of each write, num_writes of them.
     */
    const int32_t *requests;
    /**
     * How many.
     */
    size_t num_writes;
    /**
     * Of each write not 0 when its blocks replace those of the row. NULL: all are
     * added.
     */
    const uint8_t *overwrite;
    /**
     * num_writes * number of groups + 1 places in block_ids, going up from 0: the
     * blocks of write w for group g are those from starts[w * groups + g] to the
     * next place.
     */
    const size_t *starts;
    /**
     * Block ids, not of kernel blocks.
     */
    const int32_t *block_ids;
    /**
     * How many.
     */
    size_t num_block_ids;
} kvpages_row_writes;

/** kvpages_row_writes with struct_size set and all else zero. */
#define KVPAGES_ROW_WRITES_INIT {sizeof(kvpages_row_writes), NULL, 0, NULL, \
    NULL, NULL, 0}

/**
 * The requests that run together in one step.
 */
typedef struct kvpages_batch {
    /**
     * sizeof(kvpages_batch) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * For each request the number of its row in the tables, or -1 for a dummy. NULL
     * only when there are none.
     */
    const int32_t *requests;
    /**
     * How many. A batch that is padded to the requests that a graph was captured
     * for ends with dummies without tokens.
     */
    size_t num_requests;
    /**
     * num_requests + 1 numbers going up from 0: request i has the tokens from
     * query_start[i] to query_start[i + 1]. Not NULL.
     */
    const int32_t *query_start;
    /**
     * Tokens of each request's sequence, those of the step included. NULL only when
     * there are no requests.
     */
    const int32_t *seq_lens;
    /**
     * Where each token stands in its request's sequence. NULL only when there are
     * none.
     */
    const int64_t *positions;
    /**
     * How many: as many as there are tokens, or more, which get no slots.
     */
    size_t num_positions;
    /**
     * The CUstream on which it is prepared; NULL for the default stream. Not used
     * for tables in host memory.
     */
    void *stream;
} kvpages_batch;

/** kvpages_batch with struct_size set and all else zero. */
#define KVPAGES_BATCH_INIT {sizeof(kvpages_batch), NULL, 0, NULL, NULL, \
    NULL, 0, NULL}

/**
 * What operations are made for.
 */
typedef struct kvpages_ops_config {
    /**
     * sizeof(kvpages_ops_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Most block ids, or pairs of them, in one call; 0 for all blocks of the
     * cache.
     */
    uint64_t max_block_ids;
    /**
     * Calls that may be under way at once. At least 1; nothing needs more yet.
     */
    uint64_t max_concurrency;
} kvpages_ops_config;

/** kvpages_ops_config with struct_size set and all else zero. */
#define KVPAGES_OPS_CONFIG_INIT {sizeof(kvpages_ops_config), 0, 0}

/**
 * The layers that a call on blocks means: those of the groups listed and those
 * listed themselves. With both lists empty it means none; a NULL selection means
 * all layers.
 */
typedef struct kvpages_block_selection {
    /**
     * sizeof(kvpages_block_selection) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Numbers of groups. May be NULL when num_groups is 0.
     */
    const uint64_t *groups;
    /**
     * Groups listed.
     */
    size_t num_groups;
    /**
     * Numbers of layers in the cache, which leaves out those without views. May be
     * NULL when num_layers is 0.
     */
    const size_t *layers;
    /**
     * Layers listed.
     */
    size_t num_layers;
} kvpages_block_selection;

/** kvpages_block_selection with struct_size set and all else zero. */
#define KVPAGES_BLOCK_SELECTION_INIT {sizeof(kvpages_block_selection), NULL, \
    0, NULL, 0}

/**
 * A block to copy over another one. Frozen.
 */
typedef struct kvpages_block_copy {
    /**
     * The block that is read.
     */
    int32_t source;
    /**
     * The block that is written.
     */
    int32_t target;
} kvpages_block_copy;

/**
 * Rows of tokens to store in one layer. A row is what the layer stores of one
 * token: for each head a key and a value, each a run of elements without gaps.
 * Row i starts i token strides behind the first. A latent has one head; it comes
 * as keys alone, or in two parts, the second one as values. Frozen.
 */
typedef struct kvpages_kv_rows {
    /**
     * Number of the layer in the cache, which leaves out those without views: not
     * the number in the model.
     */
    size_t layer;
    /**
     * The first token's keys, or latent. Not NULL, unless there are no slots.
     */
    const void *keys;
    /**
     * The first token's values, or the second part of its latent. NULL when the
     * layer stores none, and else only when there are no slots.
     */
    const void *values;
    /**
     * Elements from one token's keys to the next one's; 0 when there are no gaps.
     */
    uint64_t key_token_stride;
    /**
     * Elements from one head's key to the next one's; 0 when there are no gaps.
     */
    uint64_t key_head_stride;
    /**
     * As key_token_stride, for values.
     */
    uint64_t value_token_stride;
    /**
     * As key_head_stride, for values.
     */
    uint64_t value_head_stride;
    /**
     * Of a latent in two parts: elements of the first. 0: in one piece.
     */
    uint64_t latent_elements;
    /**
     * fp8 with one scale for the tensor: a stored number times this is the number
     * meant. 0 is 1. Without effect otherwise.
     */
    float key_scale;
    /**
     * As key_scale, for values, or for the second part of a latent.
     */
    float value_scale;
} kvpages_kv_rows;

/**
 * Rows to store.
 */
typedef struct kvpages_kv_write {
    /**
     * sizeof(kvpages_kv_write) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * The layers, all of one group. May be NULL when num_layers is 0.
     */
    const struct kvpages_kv_rows *layers;
    /**
     * Layers listed.
     */
    size_t num_layers;
    /**
     * The slot of each row in the layers' group. A layer that is compressed stores
     * fewer slots than a block has tokens: its slot is the token's divided by
     * compress_ratio, and all layers of a call store as many of each block. Rows of
     * slot -1 are skipped. Two rows of one slot leave either. May be NULL when
     * num_slots is 0.
     */
    const int64_t *slots;
    /**
     * Rows.
     */
    size_t num_slots;
    /**
     * Element type of the rows: one of KVPAGES_DTYPE_*.
     */
    uint32_t dtype;
    /**
     * Which fp8 layers of plain bytes hold: KVPAGES_DTYPE_F8_E4M3FN or
     * KVPAGES_DTYPE_F8_E5M2. 0 is the former.
     */
    uint32_t fp8_format;
    /**
     * The CUstream on which it is done; NULL for the default stream. Not used for
     * host memory.
     */
    void *stream;
} kvpages_kv_write;

/** kvpages_kv_write with struct_size set and all else zero. */
#define KVPAGES_KV_WRITE_INIT {sizeof(kvpages_kv_write), NULL, 0, NULL, 0, \
    0, 0, NULL}

/**
 * Room for rows that are read. As kvpages_kv_rows. Frozen.
 */
typedef struct kvpages_kv_rows_out {
    /**
     * Number of the layer in the cache, which leaves out those without views: not
     * the number in the model.
     */
    size_t layer;
    /**
     * Room for the first token's keys, or latent. Not NULL, unless there are no
     * slots.
     */
    void *keys;
    /**
     * Room for the first token's values, or the second part of its latent. NULL
     * when the layer stores none, and else only when there are no slots.
     */
    void *values;
    /**
     * Elements from one token's keys to the next one's; 0 when there are no gaps.
     */
    uint64_t key_token_stride;
    /**
     * Elements from one head's key to the next one's; 0 when there are no gaps.
     */
    uint64_t key_head_stride;
    /**
     * As key_token_stride, for values.
     */
    uint64_t value_token_stride;
    /**
     * As key_head_stride, for values.
     */
    uint64_t value_head_stride;
    /**
     * Of a latent in two parts: elements of the first. 0: in one piece.
     */
    uint64_t latent_elements;
    /**
     * fp8 with one scale for the tensor: a stored number times this is the number
     * meant. 0 is 1. Without effect otherwise.
     */
    float key_scale;
    /**
     * As key_scale, for values, or for the second part of a latent.
     */
    float value_scale;
} kvpages_kv_rows_out;

/**
 * Rows to read.
 */
typedef struct kvpages_kv_gather {
    /**
     * sizeof(kvpages_kv_gather) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * The layers, all of one group. May be NULL when num_layers is 0.
     */
    const struct kvpages_kv_rows_out *layers;
    /**
     * Layers listed.
     */
    size_t num_layers;
    /**
     * The slot of each row, as in kvpages_kv_write. The room of a row of slot -1
     * stays as it is. May be NULL when num_slots is 0.
     */
    const int64_t *slots;
    /**
     * Rows. 0 when block_ids are given.
     */
    size_t num_slots;
    /**
     * Blocks whose slots are read one after another, instead of slots. May be
     * NULL when num_block_ids is 0.
     */
    const int32_t *block_ids;
    /**
     * Blocks. 0 when slots are given.
     */
    size_t num_block_ids;
    /**
     * Element type of the rows: one of KVPAGES_DTYPE_*.
     */
    uint32_t dtype;
    /**
     * Which fp8 layers of plain bytes hold: KVPAGES_DTYPE_F8_E4M3FN or
     * KVPAGES_DTYPE_F8_E5M2. 0 is the former.
     */
    uint32_t fp8_format;
    /**
     * The CUstream on which it is done; NULL for the default stream. Not used for
     * host memory.
     */
    void *stream;
} kvpages_kv_gather;

/** kvpages_kv_gather with struct_size set and all else zero. */
#define KVPAGES_KV_GATHER_INIT {sizeof(kvpages_kv_gather), NULL, 0, NULL, 0, \
    NULL, 0, 0, 0, NULL}

/**
 * What an engine tells of the blocks of a cache, whose pool is its own.
 */
typedef struct kvpages_cache_usage {
    /**
     * sizeof(kvpages_cache_usage) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * How many blocks are in use: one number for all groups together, or one for
     * each group. May be NULL when num_counts is 0.
     */
    const uint64_t *blocks_in_use;
    /**
     * 0: it is not told. 1: all groups together. Groups of the cache: by group.
     */
    size_t num_counts;
} kvpages_cache_usage;

/** kvpages_cache_usage with struct_size set and all else zero. */
#define KVPAGES_CACHE_USAGE_INIT {sizeof(kvpages_cache_usage), NULL, 0}

/**
 * A cache in numbers, as it is now.
 */
typedef struct kvpages_cache_snapshot {
    /**
     * sizeof(kvpages_cache_snapshot) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * 1 at first, and one more with each change of the number of blocks. It never
     * goes down: another number than before says that what was read may be stale.
     */
    uint64_t generation;
    /**
     * Blocks that have memory.
     */
    uint64_t num_blocks;
    /**
     * Blocks that have addresses: those of the plan.
     */
    uint64_t max_blocks;
    /**
     * Bytes of a block in all allocations, whichever group has it.
     */
    uint64_t bytes_per_block;
    /**
     * Bytes of all blocks that have memory.
     */
    uint64_t block_bytes;
    /**
     * Bytes of memory that the cache holds. More than block_bytes where memory comes
     * in pieces, or where the plan left bytes over.
     */
    uint64_t held_bytes;
    /**
     * Bytes of all allocations, those of blocks without memory included.
     */
    uint64_t allocation_bytes;
    /**
     * Groups of the plan.
     */
    uint64_t num_groups;
    /**
     * Layers with views.
     */
    uint64_t num_layers;
    /**
     * Allocations.
     */
    uint64_t num_allocations;
    /**
     * Memory regions.
     */
    uint64_t num_regions;
    /**
     * Blocks in use, of all groups; 0 when it was not told.
     */
    uint64_t blocks_in_use;
    /**
     * bytes_per_block for each of them.
     */
    uint64_t bytes_in_use;
    /**
     * Of the bytes in use those that hold keys, values, scales and states when every
     * slot is filled. 0 unless has_group_usage is 1.
     */
    uint64_t content_bytes_in_use;
    /**
     * Of the bytes in use those that pages are padded with. 0 unless
     * has_group_usage is 1.
     */
    uint64_t padding_bytes_in_use;
    /**
     * Of the bytes in use those that the groups whose blocks these are do not use:
     * other groups do, or nobody. 0 unless has_group_usage is 1.
     */
    uint64_t unused_bytes_in_use;
    /**
     * blocks_in_use / num_blocks, 0 to 1.
     */
    double utilisation;
    /**
     * 1 when it was told how many blocks are in use.
     */
    uint32_t has_usage;
    /**
     * 1 when it was told of each group, or of the only one.
     */
    uint32_t has_group_usage;
    /**
     * 1 when blocks that were never written are poisoned (KVPAGES_CACHE_POISON).
     */
    uint32_t is_poisoned;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_cache_snapshot;

/** kvpages_cache_snapshot with struct_size set and all else zero. */
#define KVPAGES_CACHE_SNAPSHOT_INIT {sizeof(kvpages_cache_snapshot), 0, 0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0, 0}

/**
 * What a block of a group is. It never changes. The three parts add up to the
 * bytes of a block, but where pages of layers of one group lie over each other.
 */
typedef struct kvpages_cache_group {
    /**
     * sizeof(kvpages_cache_group) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Tokens of a block.
     */
    uint64_t block_size;
    /**
     * Tokens of a kernel block; 0 when no layer of the group has a backend.
     */
    uint64_t kernel_block_size;
    /**
     * Layers with pages of their own, those that no backend reads included.
     */
    uint64_t num_layers;
    /**
     * Bytes of a block that hold keys, values, scales and states.
     */
    uint64_t content_bytes_per_block;
    /**
     * Bytes of a block that pages are padded with.
     */
    uint64_t padding_bytes_per_block;
    /**
     * Bytes of a block that this group does not use: other groups do, or nobody.
     */
    uint64_t unused_bytes_per_block;
} kvpages_cache_group;

/** kvpages_cache_group with struct_size set and all else zero. */
#define KVPAGES_CACHE_GROUP_INIT {sizeof(kvpages_cache_group), 0, 0, 0, 0, \
    0, 0}

/**
 * Tables in numbers, as they are now.
 */
typedef struct kvpages_tables_snapshot {
    /**
     * sizeof(kvpages_tables_snapshot) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * 1 at first, and one more with each call that changes tables, input tables or
     * slots: kvpages_tables_apply(), _gather(), _map_slots(), _prepare(), _reset()
     * and those for dummies, also when a device fails them. It never goes down:
     * another number than before says that what was read may be stale. Writes that
     * are only staged do not count.
     */
    uint64_t generation;
    /**
     * Groups.
     */
    uint64_t num_groups;
    /**
     * Rows of each table.
     */
    uint64_t max_requests;
    /**
     * Slots of each group.
     */
    uint64_t max_tokens;
    /**
     * Requests that have blocks in some group, those staged included.
     */
    uint64_t rows_in_use;
    /**
     * Entries (kernel blocks) in the rows of all groups, those staged included.
     */
    uint64_t num_entries;
    /**
     * Entries that there is room for.
     */
    uint64_t max_entries;
    /**
     * Rows, of all groups, with writes that were staged and not applied yet.
     */
    uint64_t pending_rows;
    /**
     * Entries of the batch that the input tables hold now, those of dummies (-1)
     * included; rows of NULL blocks behind them do not count. 0 when is_lost is 1.
     */
    uint64_t batch_requests;
    /**
     * Tokens of the batch that have slots now. 0 when is_lost is 1.
     */
    uint64_t batch_tokens;
    /**
     * Bytes of host memory, without those that are pinned.
     */
    uint64_t host_bytes;
    /**
     * Bytes of the device's memory; 0 for tables in host memory.
     */
    uint64_t device_bytes;
    /**
     * Bytes of pinned host memory; 0 for tables in host memory.
     */
    uint64_t pinned_bytes;
    /**
     * Pages of the pinned memory: how many calls the host may be ahead of the device
     * before it waits. 0 for tables in host memory.
     */
    uint64_t pinned_pages;
    /**
     * Pages that were sent and not waited for since; the device may be done with
     * them.
     */
    uint64_t pinned_pages_in_use;
    /**
     * 1 when a device failed a call midway, so that the next one sends all rows
     * again.
     */
    uint32_t is_lost;
    /**
     * Zero.
     */
    uint32_t reserved0;
} kvpages_tables_snapshot;

/** kvpages_tables_snapshot with struct_size set and all else zero. */
#define KVPAGES_TABLES_SNAPSHOT_INIT {sizeof(kvpages_tables_snapshot), 0, 0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * What a cache cannot know of its rank, for its descriptor. Zero everywhere is: not
 * told. Blocks can be found without it; kvpages_reshard_create() needs the heads.
 */
typedef struct kvpages_descriptor_config {
    /**
     * sizeof(kvpages_descriptor_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Ranks that divide the kv heads, this one included. 0: not told.
     */
    uint64_t tensor_parallel_size;
    /**
     * Which of them this one is.
     */
    uint64_t tensor_parallel_rank;
    /**
     * Ranks that divide the tokens, this one included. 0: not told.
     */
    uint64_t context_parallel_size;
    /**
     * Which of them this one is.
     */
    uint64_t context_parallel_rank;
    /**
     * Tokens that go to one rank before the next one's turn; 0 for 1.
     */
    uint64_t context_parallel_interleave;
    /**
     * Kv heads of the whole model, for each layer of the cache in its order; 0 for
     * those of all ranks together. Borrowed. NULL: that is so of all layers. It
     * takes a number where each head is on several ranks: 8 heads on 16 ranks are
     * 1 on each, as 16 heads are.
     */
    const uint64_t *model_kv_heads;
    /**
     * Entries of model_kv_heads: 0, or the layers of the cache.
     */
    size_t num_model_kv_heads;
} kvpages_descriptor_config;

/** kvpages_descriptor_config with struct_size set and all else zero. */
#define KVPAGES_DESCRIPTOR_CONFIG_INIT {sizeof(kvpages_descriptor_config), \
    0, 0, 0, 0, 0, NULL, 0}

/**
 * What a descriptor is about.
 */
typedef struct kvpages_descriptor_info {
    /**
     * sizeof(kvpages_descriptor_info) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Blocks that had memory when the descriptor was made.
     */
    uint64_t num_blocks;
    /**
     * Blocks that have addresses.
     */
    uint64_t max_blocks;
    /**
     * What each allocation's start is a multiple of.
     */
    uint64_t alignment_bytes;
    /**
     * Allocations.
     */
    uint64_t num_allocations;
    /**
     * Groups.
     */
    uint64_t num_groups;
    /**
     * Layers: those of the cache, then those whose pages no backend reads.
     */
    uint64_t num_layers;
    /**
     * Ranks that divide the kv heads; 0 when it was not told.
     */
    uint64_t tensor_parallel_size;
    /**
     * Which of them this one is.
     */
    uint64_t tensor_parallel_rank;
    /**
     * Ranks that divide the tokens; 0 when it was not told.
     */
    uint64_t context_parallel_size;
    /**
     * Which of them this one is.
     */
    uint64_t context_parallel_rank;
    /**
     * Tokens that go to one rank before the next one's turn.
     */
    uint64_t context_parallel_interleave;
} kvpages_descriptor_info;

/** kvpages_descriptor_info with struct_size set and all else zero. */
#define KVPAGES_DESCRIPTOR_INFO_INIT {sizeof(kvpages_descriptor_info), 0, 0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0}

/**
 * Layers that share a block table, in a descriptor.
 */
typedef struct kvpages_described_group {
    /**
     * sizeof(kvpages_described_group) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Tokens of one block.
     */
    uint64_t block_size;
    /**
     * Tokens of one kernel block; 0 when no layer has a backend.
     */
    uint64_t kernel_block_size;
} kvpages_described_group;

/** kvpages_described_group with struct_size set and all else zero. */
#define KVPAGES_DESCRIBED_GROUP_INIT {sizeof(kvpages_described_group), 0, 0}

/**
 * A layer in a descriptor. Slot s of block b is in kernel block k = b * (block_slots /
 * kernel_block_slots) + s / kernel_block_slots, in whole numbers. Element e of the key
 * of head h is there k * kernel_block_stride + (s % kernel_block_slots) * slot_stride +
 * h * head_stride + e * content_stride elements behind offset_bytes, and its value
 * value_offset elements further. kvpages_descriptor_get_row() computes it.
 */
typedef struct kvpages_described_layer {
    /**
     * sizeof(kvpages_described_layer) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * The group whose block table it follows.
     */
    uint64_t group;
    /**
     * The layer whose pages these are: another one when the layer shares.
     */
    uint64_t owner_layer;
    /**
     * The allocation that holds its pages.
     */
    uint64_t allocation;
    /**
     * Where the first run of block 0 starts in the allocation.
     */
    uint64_t offset_bytes;
    /**
     * Bytes from block to block.
     */
    uint64_t block_step_bytes;
    /**
     * Runs of a page: 1 when it is in one piece.
     */
    uint64_t num_runs;
    /**
     * Bytes of one run.
     */
    uint64_t run_bytes;
    /**
     * Bytes from run to run of a page; 0 for one run.
     */
    uint64_t run_step_bytes;
    /**
     * Bytes of all runs.
     */
    uint64_t page_size_bytes;
    /**
     * Those that hold something; the others are padding.
     */
    uint64_t content_bytes;
    /**
     * States in a page; 0 for a layer that keeps none.
     */
    uint64_t num_states;
    /**
     * Kv heads on this rank; this and all below are 0 for a layer without rows.
     */
    uint64_t num_kv_heads;
    /**
     * Kv heads of the whole model; 0 when that is not known.
     */
    uint64_t model_kv_heads;
    /**
     * The model's number of head 0, if model_kv_heads is known.
     */
    uint64_t first_model_kv_head;
    /**
     * Slots of a block: its tokens, or fewer where several share one.
     */
    uint64_t block_slots;
    /**
     * Slots of a kernel block.
     */
    uint64_t kernel_block_slots;
    /**
     * Elements from kernel block to kernel block.
     */
    uint64_t kernel_block_stride;
    /**
     * Elements from slot to slot of a kernel block.
     */
    uint64_t slot_stride;
    /**
     * Elements from head to head; 0 when the layout has no heads.
     */
    uint64_t head_stride;
    /**
     * Elements from one element of a row to the next.
     */
    uint64_t content_stride;
    /**
     * Elements from a key to its value; 0 when there is no value of its own.
     */
    uint64_t value_offset;
    /**
     * Stored elements of a key, or of what is stored instead of keys and values.
     */
    uint64_t key_elements;
    /**
     * Stored elements of a value; 0 when there is none of its own.
     */
    uint64_t value_elements;
    /**
     * Elements that the scale behind each key and value takes; 0 when it lies
     * elsewhere.
     */
    uint64_t inline_scale_elements;
    /**
     * Bytes of the scales behind all rows of a page; 0 when they lie elsewhere.
     */
    uint64_t page_end_scale_bytes;
    /**
     * One of KVPAGES_DTYPE_*: type of the rows' elements.
     */
    uint32_t dtype;
    /**
     * One of KVPAGES_DTYPE_*: type of the scales; 0 when none are stored.
     */
    uint32_t scale_dtype;
    /**
     * One of KVPAGES_ROW_FORMAT_*.
     */
    uint32_t row_format;
    /**
     * 0.
     */
    uint32_t reserved0;
} kvpages_described_layer;

/** kvpages_described_layer with struct_size set and all else zero. */
#define KVPAGES_DESCRIBED_LAYER_INIT {sizeof(kvpages_described_layer), 0, 0, \
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, \
    0, 0, 0}

/**
 * A state in a descriptor.
 */
typedef struct kvpages_described_state {
    /**
     * sizeof(kvpages_described_state) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Where it starts in the page.
     */
    uint64_t offset_bytes;
    /**
     * Its bytes; elements lie one after another.
     */
    uint64_t size_bytes;
    /**
     * Sizes of its dimensions, ndim of them. Kept until the descriptor is destroyed.
     */
    const uint64_t *shape;
    /**
     * Number of dimensions.
     */
    uint32_t ndim;
    /**
     * One of KVPAGES_DTYPE_*.
     */
    uint32_t dtype;
} kvpages_described_state;

/** kvpages_described_state with struct_size set and all else zero. */
#define KVPAGES_DESCRIBED_STATE_INIT {sizeof(kvpages_described_state), 0, 0, \
    NULL, 0, 0}

/**
 * A piece of an allocation. Frozen.
 */
typedef struct kvpages_run {
    /**
     * The allocation.
     */
    uint64_t allocation;
    /**
     * Where it starts there.
     */
    uint64_t offset_bytes;
    /**
     * Its bytes.
     */
    uint64_t size_bytes;
} kvpages_run;

/**
 * Where a row is. Frozen.
 */
typedef struct kvpages_row {
    /**
     * The allocation that holds it.
     */
    uint64_t allocation;
    /**
     * Where its first element starts there.
     */
    uint64_t offset_bytes;
    /**
     * Its elements.
     */
    uint64_t num_elements;
    /**
     * Elements from one to the next.
     */
    uint64_t stride_elements;
    /**
     * Further elements behind them, at the same distance, that are the row's scale;
     * 0 when it has none there.
     */
    uint64_t scale_elements;
} kvpages_row;

/**
 * From where to where blocks move.
 */
typedef struct kvpages_reshard_config {
    /**
     * sizeof(kvpages_reshard_config) as the caller compiled it.
     */
    size_t struct_size;
    /**
     * Descriptors of the ranks that have the blocks. Borrowed. Not NULL.
     */
    const struct kvpages_descriptor *const *sources;
    /**
     * Those of the ranks that get them. Borrowed. Not NULL.
     */
    const struct kvpages_descriptor *const *targets;
    /**
     * Entries of sources, at least 1.
     */
    size_t num_sources;
    /**
     * Entries of targets, at least 1.
     */
    size_t num_targets;
} kvpages_reshard_config;

/** kvpages_reshard_config with struct_size set and all else zero. */
#define KVPAGES_RESHARD_CONFIG_INIT {sizeof(kvpages_reshard_config), NULL, \
    NULL, 0, 0}

/**
 * A block that moves, with all layers of its group. Frozen.
 */
typedef struct kvpages_block_move {
    /**
     * The group, as the targets number it.
     */
    uint64_t group;
    /**
     * The block on the sources.
     */
    int32_t source;
    /**
     * The block on the targets.
     */
    int32_t target;
} kvpages_block_move;

/**
 * A dimension of a strided copy. Frozen.
 */
typedef struct kvpages_copy_step {
    /**
     * How many runs, or dimensions inside this one.
     */
    uint64_t count;
    /**
     * Bytes from one to the next where they come from.
     */
    uint64_t source_step_bytes;
    /**
     * Bytes from one to the next where they go.
     */
    uint64_t target_step_bytes;
} kvpages_copy_step;

/**
 * One copy: run_bytes bytes for each index of the dimensions. Frozen.
 */
typedef struct kvpages_strided_copy {
    /**
     * Which of the sources.
     */
    uint64_t source_rank;
    /**
     * Which of its allocations.
     */
    uint64_t source_allocation;
    /**
     * Where its first run starts there.
     */
    uint64_t source_offset_bytes;
    /**
     * Which of the targets.
     */
    uint64_t target_rank;
    /**
     * Which of its allocations.
     */
    uint64_t target_allocation;
    /**
     * Where its first run starts there.
     */
    uint64_t target_offset_bytes;
    /**
     * Bytes of one run.
     */
    uint64_t run_bytes;
    /**
     * Dimensions; 0 is one run.
     */
    uint64_t num_dims;
    /**
     * num_dims of them, the outermost first; the others are zero.
     */
    struct kvpages_copy_step dims[6];
} kvpages_strided_copy;

/**
 * The allocations of a rank, as kvpages_cache_get_allocation() tells them, or where
 * another process has mapped them. Frozen.
 */
typedef struct kvpages_rank_memory {
    /**
     * In the descriptor's order. Borrowed.
     */
    const struct kvpages_allocation *allocations;
    /**
     * How many they are.
     */
    size_t num_allocations;
} kvpages_rank_memory;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Version of the library, such as "0.1.0".
 *
 * @return A static string.
 */
KVPAGES_API const char *kvpages_version(void);

/**
 * Number of the binary interface. A program runs with any library of the same
 * number that is not older than the header it was compiled with.
 *
 * @return The number; the suffix of the shared library's SONAME.
 */
KVPAGES_API uint32_t kvpages_abi_version(void);

/**
 * Name of a status, such as "INVALID_ARGUMENT".
 *
 * @param status  A kvpages_status.
 * @return A static string; "UNKNOWN" for a number that is no status.
 */
KVPAGES_API const char *kvpages_status_name(int32_t status);

/**
 * Text of the last failed call on this thread, or an empty string.
 *
 * @return A string of the library's, never NULL. Valid until the next call on
 *         this thread that fails.
 */
KVPAGES_API const char *kvpages_last_error_message(void);

/**
 * Kind of the last failed call on this thread, such as "not_enough_memory": a
 * name that stays the same from version to version, finer than the status. An
 * empty string when no call failed.
 *
 * @return A string of the library's, never NULL. Valid until the next call on
 *         this thread that fails.
 */
KVPAGES_API const char *kvpages_last_error_kind(void);

/**
 * Says where the messages of this process go: to one callback for all handles. At
 * first there is none, and then no message is put together either. Calls on a step
 * (those on kvpages_tables and kvpages_ops but to create and destroy, and views)
 * say nothing, whatever is set.
 *
 * May be called at any time, also while other threads are in calls that say
 * something: when it returns, the callback that was set before is not called any
 * more, and not running, so what it uses may go. That means that it waits for calls
 * of the callback that are under way: the caller holds no lock that the callback
 * takes.
 *
 * @param max_level  The least important messages that are wanted: one of
 *                   KVPAGES_LOG_LEVEL_*.
 * @param callback   NULL for none.
 * @param user       Handed to the callback. Kept until another callback is set, also
 *                   by what is destroyed when the process ends.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The callback itself made this call (kind
 *         "log_callback_is_running"), or there is no such level.
 * @note A plan's message has numbers of its explanation. For the compact policy that
 *       takes the reference's plan of the same layers, too.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_set_log_callback(uint32_t max_level,
                                        kvpages_log_fn callback,
                                        void *user);

/**
 * Bytes of one element.
 *
 * @param dtype  One of KVPAGES_DTYPE_*.
 * @return 0 for a number that is no element type.
 */
KVPAGES_API uint64_t kvpages_dtype_bytes(uint32_t dtype);

/**
 * Name of an element type, such as "bfloat16".
 *
 * @param dtype  One of KVPAGES_DTYPE_*.
 * @return A static string; empty for a number that is no element type.
 */
KVPAGES_API const char *kvpages_dtype_name(uint32_t dtype);

/**
 * Checks a spec and describes its page.
 *
 * @param spec  Borrowed. Not NULL.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A field is out of range, is not one of this
 *         kind of layer, or contradicts another; the message names it.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_spec_describe(const struct kvpages_spec *spec,
                                     struct kvpages_spec_info *out);

/**
 * How much one request can need of a layer.
 *
 * @param spec    Borrowed. Not NULL.
 * @param limits  Borrowed. Not NULL.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The spec, as kvpages_spec_describe() says; or
 *         a window is shared out to context-parallel ranks (kind
 *         "dcp_sliding_window").
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_spec_demand(const struct kvpages_spec *spec,
                                   const struct kvpages_limits *limits,
                                   struct kvpages_demand *out);

/**
 * The one spec that several layers are: they agree on everything but, for full
 * kinds, the window, the chunk and the non-causal flag.
 *
 * @param specs      Borrowed. num_specs pointers, none NULL.
 * @param num_specs  At least 1.
 * @param[out] out   Filled; its pointers are those of specs[0]. None of specs. Not
 *                   NULL; struct_size set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  They are not one spec; the kind says
 *                   why, and the message names the field.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_spec_merge(const struct kvpages_spec *const *specs,
                                  size_t num_specs,
                                  struct kvpages_spec *out);

/**
 * How alike layers are.
 *
 * @param specs      Borrowed. num_specs pointers, none NULL.
 * @param num_specs  May be 0.
 * @param[out] out   Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_UNSUPPORTED  An encoder-only layer is among them; it
 *                   takes no cache.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_spec_uniformity(const struct kvpages_spec *const *specs,
                                       size_t num_specs,
                                       struct kvpages_uniformity *out);

/**
 * Describes layers taken together.
 *
 * @param specs      Borrowed. num_specs pointers, none NULL.
 * @param num_specs  At least 1.
 * @param[out] out   Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A spec, as kvpages_spec_describe() says; or
 *         there is none.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_spec_set_describe(const struct kvpages_spec *const *specs,
                                         size_t num_specs,
                                         struct kvpages_spec_set_info *out);

/**
 * The different pages of a set of layers, smallest first.
 *
 * @param specs      Borrowed. num_specs pointers, none NULL.
 * @param num_specs  At least 1.
 * @param[out] page_sizes_bytes  Room for capacity numbers. May be NULL when
 *                   capacity is 0.
 * @param capacity   Numbers that fit.
 * @param[out] out_count  How many there are, also when they do not fit.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  They do not fit.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_spec_set_copy_page_sizes(const struct kvpages_spec *const *specs,
                                                size_t num_specs,
                                                uint64_t *page_sizes_bytes,
                                                size_t capacity,
                                                size_t *out_count);

/**
 * How much one request can need of a set of layers.
 *
 * @param specs      Borrowed. num_specs pointers, none NULL.
 * @param num_specs  At least 1.
 * @param limits     Borrowed. Not NULL.
 * @param[out] out   Filled; bytes are those of all layers. Not NULL; struct_size
 *                   set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_spec_demand(); or there is no
 *         spec.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_spec_set_demand(const struct kvpages_spec *const *specs,
                                       size_t num_specs,
                                       const struct kvpages_limits *limits,
                                       struct kvpages_demand *out);

/**
 * The quantisation mode that a cache-dtype string such as "fp8_e4m3" or
 * "int4_per_token_head" asks for; KVPAGES_QUANT_MODE_NONE for "auto" and any
 * other.
 *
 * @param cache_dtype  Borrowed. Not NULL.
 * @param[out] out     One of KVPAGES_QUANT_MODE_*. Not NULL.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The string is not UTF-8.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_quant_mode_from_cache_dtype(const char *cache_dtype,
                                                   uint32_t *out);

/**
 * Key-value heads that one tensor-parallel rank stores. With fewer heads than
 * ranks each head is stored by several ranks.
 *
 * @param total_kv_heads  Heads of the model. At least 1.
 * @param num_ranks       Ranks. At least 1; it divides the heads, or the heads
 *                        divide it.
 * @param[out] out_heads     Heads on one rank. Not NULL.
 * @param[out] out_replicas  Ranks that store the same head. Not NULL.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A number is 0, or neither divides the other.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_kv_heads_per_rank(uint64_t total_kv_heads,
                                         uint64_t num_ranks,
                                         uint64_t *out_heads,
                                         uint64_t *out_replicas);

/**
 * How many layer tuples a model of latents is cut into: the number from the lower
 * bound to the largest value to which the values are rounded up with the least
 * padding, and of equal ones the largest.
 *
 * @param values       Borrowed. num_values numbers, each 1 to 2^20.
 * @param num_values   At least 1.
 * @param lower_bound  The smallest number allowed, and the answer when it is more
 *                     than every value; 0 for 1.
 * @param[out] out     The number. Not NULL.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  There is no value, or one is out of range.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_layer_tuple_count(const uint64_t *values,
                                         size_t num_values,
                                         uint64_t lower_bound,
                                         uint64_t *out);

/**
 * The smallest block size whose attention page holds a state page. To be asked
 * before the layers are described: attention layers get the block size, state
 * layers the page as their padding.
 *
 * @param config    Borrowed. Not NULL.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A number is 0 that must not be, or the block
 *         would be larger than 63 bits can say.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_hybrid_block_size(const struct kvpages_hybrid_config *config,
                                         struct kvpages_hybrid_block *out);

/**
 * Creates a backend.
 *
 * @param config    Copied. Not NULL.
 * @param[out] out  Owned by the caller: kvpages_backend_destroy(). NULL on
 *                  failure.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The layout cannot be read, or a number
 *         is out of range; the message has the part or the field.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_backend_create(const struct kvpages_backend_config *config,
                                      struct kvpages_backend **out);

/**
 * Creates a backend from a known contract.
 *
 * @param preset    One of KVPAGES_PRESET_*.
 * @param[out] out  Owned by the caller: kvpages_backend_destroy(). NULL on
 *                  failure.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  There is no preset of that number.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_backend_create_preset(uint32_t preset,
                                             struct kvpages_backend **out);

/**
 * Destroys a backend. NULL is a no-op. Models that use it keep it alive.
 *
 * @param backend  Not used any more.
 */
KVPAGES_API void kvpages_backend_destroy(struct kvpages_backend *backend);

/**
 * Name of a backend.
 *
 * @param backend  Borrowed.
 * @return A string of the backend's; empty for NULL.
 */
KVPAGES_API
const char *kvpages_backend_name(const struct kvpages_backend *backend);

/**
 * What a backend takes and demands.
 *
 * @param backend   Borrowed. Not NULL.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @return Fails only for NULL and for a struct_size that no version has.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_backend_get(const struct kvpages_backend *backend,
                                   struct kvpages_backend_info *out);

/**
 * The kernel block size that several backends agree on for a block: the block
 * itself when all take it, else the largest exact size of any of them that
 * divides it and that all take.
 *
 * @param block_size    Tokens of a block. At least 1.
 * @param backends      Borrowed. num_backends pointers, none NULL.
 * @param num_backends  May be 0.
 * @param[out] out      Tokens of a kernel block. Not NULL.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  There is no such size (kind
 *         "no_common_block_size"); the message names what the backends take.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_select_kernel_block_size(uint64_t block_size,
                                                const struct kvpages_backend *const *backends,
                                                size_t num_backends,
                                                uint64_t *out);

/**
 * Creates a model without layers.
 *
 * @param[out] out  Owned by the caller: kvpages_model_destroy(). NULL on failure.
 * @return Fails only for NULL.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_model_create(struct kvpages_model **out);

/**
 * Destroys a model. NULL is a no-op. Plans made from it live on.
 *
 * @param model  Not used any more.
 */
KVPAGES_API void kvpages_model_destroy(struct kvpages_model *model);

/**
 * Adds a layer behind the others.
 *
 * @param model  Changed. Not NULL.
 * @param layer  Copied. Not NULL.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The name is empty or taken, or the spec is
 *         wrong, as kvpages_spec_describe() says. The model is as it was.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_model_add_layer(struct kvpages_model *model,
                                       const struct kvpages_layer *layer);

/**
 * Number of layers.
 *
 * @param model  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API size_t kvpages_model_num_layers(const struct kvpages_model *model);

/**
 * The number of a layer.
 *
 * @param model     Borrowed. Not NULL.
 * @param name      Borrowed. Not NULL.
 * @param[out] out_index  Its number. Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no layer of that name.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_model_find_layer(const struct kvpages_model *model,
                                        const char *name,
                                        size_t *out_index);

/**
 * Name of a layer.
 *
 * @param model  Borrowed.
 * @param layer  Less than kvpages_model_num_layers().
 * @return A string of the model's, Kept until a layer is added or the model is
 *         destroyed; NULL when there is no such layer.
 */
KVPAGES_API
const char *kvpages_model_layer_name(const struct kvpages_model *model,
                                     size_t layer);

/**
 * Name of the layer whose pages a layer reads, which may itself share.
 *
 * @param model  Borrowed.
 * @param layer  Less than kvpages_model_num_layers().
 * @return A string of the model's, Kept until a layer is added or the model is
 *         destroyed; NULL when the layer has pages of its own, and when there is
 *         no such layer.
 */
KVPAGES_API
const char *kvpages_model_layer_shares_with(const struct kvpages_model *model,
                                            size_t layer);

/**
 * What a layer with pages of its own stores: as it was described, and what its
 * backend decides.
 *
 * @param model     Borrowed. Not NULL.
 * @param layer     Less than kvpages_model_num_layers().
 * @param[out] out  Filled; its pointers are Kept until the model is destroyed. Not
 *                  NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer, or it shares.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_model_get_layer_spec(const struct kvpages_model *model,
                                            size_t layer,
                                            struct kvpages_spec *out);

/**
 * Plans the caches of all workers of a model, and proves that every layer with a
 * backend has a view. Takes no memory.
 *
 * @param config       Borrowed. Not NULL.
 * @param workers      Copied: the layers as they are now. num_workers of them.
 * @param num_workers  At least 1.
 * @param[out] out     Owned by the caller: kvpages_plan_destroy(). NULL on
 *                     failure.
 * @param[out] out_shortfall  Filled when the model does not fit. May be NULL.
 * @retval KVPAGES_STATUS_DOES_NOT_FIT     Too little memory for one request.
 * @retval KVPAGES_STATUS_CONTRACT_BROKEN  A backend could not read its layers.
 * @note Cost: by the reference linear in the layers of distinct models. The compact
 *       policy searches: 2 ms for 1,000 layers of 12 kinds. Of hundreds of kinds of
 *       layers it looks at a part, and takes about 0.1 s for 1,000 kinds on 64
 *       pipeline stages.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_plan_create(const struct kvpages_plan_config *config,
                                   const struct kvpages_worker *workers,
                                   size_t num_workers,
                                   struct kvpages_plan **out,
                                   struct kvpages_shortfall *out_shortfall);

/**
 * Takes a plan that the engine made itself: checks it, completes it, and proves
 * that every layer with a backend has a view. The plan has one worker; the limits
 * of a request are not known, so its longest sequence, rows, capacity and
 * concurrency are 0.
 *
 * @param model     Copied: the layers as they are now. Not NULL.
 * @param parts     Borrowed. Not NULL.
 * @param[out] out  Owned by the caller: kvpages_plan_destroy(). NULL on failure.
 * @retval KVPAGES_STATUS_CONTRACT_BROKEN  A backend could not read its layers.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_plan_create_from_parts(const struct kvpages_model *model,
                                              const struct kvpages_plan_parts *parts,
                                              struct kvpages_plan **out);

/**
 * Destroys a plan. NULL is a no-op. Caches made from it live on.
 *
 * @param plan  Not used any more, and neither are its strings and specs.
 */
KVPAGES_API void kvpages_plan_destroy(struct kvpages_plan *plan);

/**
 * Number of workers.
 *
 * @param plan  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API size_t kvpages_plan_num_workers(const struct kvpages_plan *plan);

/**
 * Tokens of the longest sequence, as they were fitted.
 *
 * @param plan  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API
uint64_t kvpages_plan_max_model_len(const struct kvpages_plan *plan);

/**
 * What a worker allocates.
 *
 * @param plan      Borrowed. Not NULL.
 * @param worker    Less than kvpages_plan_num_workers().
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_plan_get_worker(const struct kvpages_plan *plan,
                                       size_t worker,
                                       struct kvpages_worker_info *out);

/**
 * A group as a worker has it.
 *
 * @param plan      Borrowed. Not NULL.
 * @param worker    Less than kvpages_plan_num_workers().
 * @param group     Less than the worker's num_groups.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker or group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_plan_get_group(const struct kvpages_plan *plan,
                                      size_t worker,
                                      size_t group,
                                      struct kvpages_group_info *out);

/**
 * A spec of a group as it was planned: block sizes scaled, pages padded.
 *
 * @param plan      Borrowed. Not NULL.
 * @param worker    Less than kvpages_plan_num_workers().
 * @param group     Less than the worker's num_groups.
 * @param index     Less than the group's num_specs.
 * @param[out] out  Filled; its pointers are Kept until the plan is destroyed. Not
 *                  NULL; struct_size set.
 * @param[out] out_layer_name  Of a set the layer that has this spec, else NULL. A
 *                  string of the plan's. May be NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker, group or spec.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_plan_get_group_spec(const struct kvpages_plan *plan,
                                           size_t worker,
                                           size_t group,
                                           size_t index,
                                           struct kvpages_spec *out,
                                           const char **out_layer_name);

/**
 * Name of a layer of a group: the layers with pages of their own, then those that
 * share.
 *
 * @param plan    Borrowed.
 * @param worker  Less than kvpages_plan_num_workers().
 * @param group   Less than the worker's num_groups.
 * @param index   Less than num_layers + num_sharing_layers of the group.
 * @return A string of the plan's; NULL when there is no such layer.
 */
KVPAGES_API
const char *kvpages_plan_group_layer_name(const struct kvpages_plan *plan,
                                          size_t worker,
                                          size_t group,
                                          size_t index);

/**
 * A tensor of a worker.
 *
 * @param plan      Borrowed. Not NULL.
 * @param worker    Less than kvpages_plan_num_workers().
 * @param tensor    Less than the worker's num_tensors.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker or tensor.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_plan_get_tensor(const struct kvpages_plan *plan,
                                       size_t worker,
                                       size_t tensor,
                                       struct kvpages_tensor_info *out);

/**
 * Name of a layer that has its pages in a tensor.
 *
 * @param plan    Borrowed.
 * @param worker  Less than kvpages_plan_num_workers().
 * @param tensor  Less than the worker's num_tensors.
 * @param index   Less than the tensor's num_layers.
 * @return A string of the plan's; NULL when there is no such layer.
 */
KVPAGES_API
const char *kvpages_plan_tensor_layer_name(const struct kvpages_plan *plan,
                                           size_t worker,
                                           size_t tensor,
                                           size_t index);

/**
 * The steps in which a scheduler counts tokens and a prefix cache hashes them.
 *
 * @param plan    Borrowed. Not NULL.
 * @param config  Borrowed. Not NULL.
 * @param[out] out_scheduler_block_size  Tokens that a scheduler rounds to. Not
 *                NULL.
 * @param[out] out_hash_block_size  Tokens of one hash. Not NULL.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  cache_block_size is 0, or
 *                prefix_match_unit does not divide the blocks of a group; the
 *                message names the group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_plan_resolve_block_sizes(const struct kvpages_plan *plan,
                                                const struct kvpages_block_size_config *config,
                                                uint64_t *out_scheduler_block_size,
                                                uint64_t *out_hash_block_size);

/**
 * Why a plan is as it is: for every group its layers, block and page sizes,
 * padding and the reason for it, in total blocks, tokens, concurrency and bytes
 * wasted; beside a compact plan the reference's plan of the same layers, and the
 * change of what was asked for that would win most tokens. docs/explanation.md has
 * the keys of the JSON.
 *
 * @param plan         Borrowed. Not NULL.
 * @param format       One of KVPAGES_TEXT_FORMAT_*.
 * @param[out] buffer  Room for capacity bytes: the text and a NUL. May be NULL
 *                     when capacity is 0.
 * @param capacity     Bytes that fit.
 * @param[out] out_length  Bytes of the text, the NUL not counted, also when it
 *                     does not fit. Not NULL.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  capacity is not more than the length.
 * @note Cost: the first call for a format makes up to 26 plans of the same layers;
 *       the text is kept for later ones.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_plan_copy_explanation(const struct kvpages_plan *plan,
                                             uint32_t format,
                                             char *buffer,
                                             size_t capacity,
                                             size_t *out_length);

/**
 * CUDA devices that the driver shows. The driver's library is opened when a
 * program first asks for a device; until then the library does not look for it.
 *
 * @param[out] out_count  How many there are; 0 on failure. Not NULL.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  There is no driver, or it cannot be
 *         used; the kind says which: "driver_missing", "driver_incomplete",
 *         "driver_too_old", "no_device" or "driver_failed", and the text why.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_device_count(uint32_t *out_count);

/**
 * What a CUDA device is. Its primary context is retained during the call, which
 * makes one when nobody has it, and takes time and memory then.
 *
 * @param ordinal   Its number, less than kvpages_device_count().
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
 *         there is no such device.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_device_get_info(uint32_t ordinal,
                                       struct kvpages_device_info *out);

/**
 * Memory of the host. The system zeroes each page of it when it is first
 * touched, so a large cache costs nothing until it is used. Large allocations
 * ask for huge pages.
 *
 * @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
 *                  failure.
 * @return Fails only for NULL: memory is asked for when a cache is made.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_memory_create_host(struct kvpages_memory **out);

/**
 * Memory from an engine's own allocator.
 *
 * @param callbacks  Copied. Not NULL.
 * @param[out] out   Owned by the caller: kvpages_memory_destroy(). NULL on
 *                   failure.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The callbacks state a device; as
 *         kvpages_device_count().
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_memory_create_external(const struct kvpages_memory_callbacks *callbacks,
                                              struct kvpages_memory **out);

/**
 * A buffer of the engine's, handed out piece by piece, each behind the last one
 * that is in use. The library zeroes what it takes. Creating and destroying caches
 * in it takes a lock.
 *
 * @param data      Kept until the memory, all caches in it and what was made from
 *                  them are destroyed; the host can read and write it, and nothing
 *                  else uses it. Not NULL.
 * @param bytes     Its bytes.
 * @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
 *                  failure.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The buffer leaves the address space.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_memory_create_adopted(void *data,
                                             size_t bytes,
                                             struct kvpages_memory **out);

/**
 * As kvpages_memory_create_adopted(), for a buffer in a device's memory: the
 * library zeroes what it takes on the device, and does not touch it from the host.
 *
 * @param device    Where the buffer is. Copied; its context is Kept as the buffer
 *                  is. Not NULL.
 * @param data      A device pointer. Kept until the memory, all caches in it and
 *                  what was made from them are destroyed; nothing else uses the
 *                  buffer. Not NULL.
 * @param bytes     Its bytes.
 * @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
 *                  failure.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count().
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_memory_create_adopted_device(const struct kvpages_device *device,
                                                    void *data,
                                                    size_t bytes,
                                                    struct kvpages_memory **out);

/**
 * Memory of a CUDA device. Fresh memory is zeroed on a stream of its own, and the
 * call that takes it waits for that; no other stream is waited for.
 *
 * @param config    Borrowed. Not NULL.
 * @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
 *                  failure.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
 *         there is no device of that number.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A flag is unknown, or goes with
 *         KVPAGES_CUDA_MEMORY_VIRTUAL and is given without it.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The device lacks what a flag asks for.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_memory_create_cuda(const struct kvpages_cuda_memory_config *config,
                                          struct kvpages_memory **out);

/**
 * Memory of the host that a CUDA device copies from and to on its own. The host
 * reads and writes it like any other. A cache in it cannot be resized.
 *
 * @param config    Borrowed; no flags. Not NULL.
 * @param[out] out  Owned by the caller: kvpages_memory_destroy(). NULL on
 *                  failure.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
 *         there is no device of that number.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A flag is set.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_memory_create_pinned(const struct kvpages_cuda_memory_config *config,
                                            struct kvpages_memory **out);

/**
 * Destroys a memory. NULL is a no-op. Caches in it live on.
 *
 * @param memory  Not used any more.
 */
KVPAGES_API void kvpages_memory_destroy(struct kvpages_memory *memory);

/**
 * Allocates a worker's part of a plan. Fresh memory is zero, but with
 * KVPAGES_CACHE_POISON. When the memory runs
 * out half-way, all of it is given back.
 *
 * @param plan      Borrowed; the cache keeps what it needs of it. Not NULL.
 * @param config    Borrowed. Not NULL.
 * @param[out] out  Owned by the caller: kvpages_cache_destroy(). NULL on failure.
 * @param[out] out_needed_bytes  Bytes that all blocks of the plan take, also when
 *                  the call fails for want of them or of another kind of memory.
 *                  May be NULL.
 * @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  The memory has not enough.
 * @retval KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY  The device has not enough.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed; the kind is
 *         "driver_failed", and the text names the driver's function.
 * @retval KVPAGES_STATUS_NOT_FOUND  The plan has no such worker.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  num_blocks is more than the plan has; the
 *         kind is "cache_num_blocks".
 * @retval KVPAGES_STATUS_UNSUPPORTED  num_blocks is set, and this kind of memory
 *         cannot grow: only host memory and virtual CUDA memory can.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_create(const struct kvpages_plan *plan,
                                    const struct kvpages_cache_config *config,
                                    struct kvpages_cache **out,
                                    uint64_t *out_needed_bytes);

/**
 * Destroys a cache and gives its memory back, or once what was made from it is
 * destroyed too (kvpages_ops, tensors of DLPack). NULL is a no-op.
 *
 * Nothing that runs on a device uses the memory any more. When the cache is in
 * virtual CUDA memory, no stream of its context is being captured into a graph: the
 * call waits for all work of the context, which would spoil the capture.
 *
 * @param cache  Not used any more, and neither are its views.
 */
KVPAGES_API
void kvpages_cache_destroy(struct kvpages_cache *cache);

/**
 * Changes how many blocks have memory, between steps. No address changes; views
 * and regions describe all blocks of the plan as before. New blocks are zero, or
 * poisoned with KVPAGES_CACHE_POISON. The operations of the cache know at once: a
 * block without memory is out of range. Tables do not: they take any id below the
 * number of blocks they were made for. Which blocks are handed out is the caller's
 * to decide, and a kernel that follows a table to a block without memory faults.
 *
 * Nothing that runs on a device uses the blocks that go, no other call uses the
 * cache or its operations, and nobody touches these blocks through a tensor of
 * DLPack, which describes them still. Shrinking on a device waits for all work of
 * the context, of which no stream may be in the course of a capture. Memory comes
 * and goes in pieces, for each run of blocks (keys and values may lie apart): whole
 * pages or device granules, and no more than about one 256th of an allocation. When
 * growing fails, all is as before. When a device fails while shrinking, the blocks
 * are gone, and some of their memory stays until the cache grows or is destroyed.
 *
 * @param cache          For itself. Not NULL.
 * @param num_blocks     1 to kvpages_cache_max_blocks().
 * @param blocks_in_use  Borrowed: the blocks that hold something; none of them may
 *                       go. May be NULL when num_blocks_in_use is 0.
 * @param num_blocks_in_use  How many they are.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A block in use would go ("block_in_use"),
 *         or has no memory now ("block_id_out_of_range"); the text names it. Or
 *         num_blocks is 0 or more than there are addresses for ("cache_num_blocks").
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
 * @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  The host has not enough.
 * @retval KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY  The device has not enough.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The cache was made with memory for all
 *         blocks: kvpages_cache_config.num_blocks was 0.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_resize(struct kvpages_cache *cache,
                                    uint64_t num_blocks,
                                    const int32_t *blocks_in_use,
                                    size_t num_blocks_in_use);

/**
 * Blocks of every group that have memory. Block ids are 0 to this number minus 1.
 *
 * @param cache  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API
uint64_t kvpages_cache_num_blocks(const struct kvpages_cache *cache);

/**
 * Blocks of every group that have addresses: those of the plan. Views and regions
 * describe them all.
 *
 * @param cache  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API
uint64_t kvpages_cache_max_blocks(const struct kvpages_cache *cache);

/**
 * Where a cache's bytes are.
 *
 * @param cache     Borrowed. Not NULL.
 * @param[out] out  Filled; its context is valid until the cache is destroyed. Not
 *                  NULL.
 * @return Fails only for NULL.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_get_device(const struct kvpages_cache *cache,
                                        struct kvpages_device *out);

/**
 * Layers that have views, in the model's order: layers with pages of their own
 * and layers that share. Layers without a backend and encoder-only ones are left
 * out.
 *
 * @param cache  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API
size_t kvpages_cache_num_layers(const struct kvpages_cache *cache);

/**
 * Name of a layer.
 *
 * @param cache  Borrowed.
 * @param layer  Less than kvpages_cache_num_layers().
 * @return A string of the cache's; NULL when there is no such layer.
 */
KVPAGES_API
const char *kvpages_cache_layer_name(const struct kvpages_cache *cache,
                                     size_t layer);

/**
 * The number of a layer in this cache, which counts only layers with views. Look
 * it up once, and ask for views by number. kvpages_block_selection and
 * kvpages_kv_rows take this number too.
 *
 * @param cache     Borrowed. Not NULL.
 * @param name      Borrowed. Not NULL.
 * @param[out] out_layer  Its number. Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no layer of that name with a view.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_find_layer(const struct kvpages_cache *cache,
                                        const char *name,
                                        size_t *out_layer);

/**
 * The number in this cache of a layer that is known by its number in the worker's
 * model: the one in kvpages_builder_info, and what the calls on kvpages_attention
 * take. The two differ when a layer before it has no view.
 *
 * @param cache        Borrowed. Not NULL.
 * @param model_layer  Its number in the worker's model.
 * @param[out] out_layer  Its number in the cache. Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  The model has no such layer, or it has no view.
 * @note Cost: one array read; no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_find_model_layer(const struct kvpages_cache *cache,
                                              size_t model_layer,
                                              size_t *out_layer);

/**
 * Views of a layer: 1 of an attention layer, one for each state of a state layer.
 *
 * @param cache  Borrowed.
 * @param layer  Less than kvpages_cache_num_layers().
 * @return 0 when there is no such layer.
 */
KVPAGES_API
size_t kvpages_cache_num_views(const struct kvpages_cache *cache,
                               size_t layer);

/**
 * A view of a layer.
 *
 * @param cache     Borrowed. Not NULL.
 * @param layer     Less than kvpages_cache_num_layers().
 * @param view      Less than kvpages_cache_num_views(): 0, or which state.
 * @param[out] out  Filled; its pointers are Kept until the cache is destroyed.
 *                  Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or view.
 * @note Cost: two array reads; no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_get_view(const struct kvpages_cache *cache,
                                      size_t layer,
                                      size_t view,
                                      struct kvpages_tensor *out);

/**
 * What is proven of a view.
 *
 * @param cache     Borrowed. Not NULL.
 * @param layer     Less than kvpages_cache_num_layers().
 * @param view      Less than kvpages_cache_num_views(): 0, or which state.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or view.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_get_report(const struct kvpages_cache *cache,
                                        size_t layer,
                                        size_t view,
                                        struct kvpages_view_report *out);

/**
 * What a layer is.
 *
 * @param cache     Borrowed. Not NULL.
 * @param layer     Less than kvpages_cache_num_layers().
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_get_layer(const struct kvpages_cache *cache,
                                       size_t layer,
                                       struct kvpages_layer_info *out);

/**
 * How the axes of an attention layer's view lie.
 *
 * @param cache     Borrowed. Not NULL.
 * @param layer     Less than kvpages_cache_num_layers().
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND    There is no such layer.
 * @retval KVPAGES_STATUS_UNSUPPORTED  It is a state layer; a state's dimensions
 *                                     are those it was described with.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_get_axes(const struct kvpages_cache *cache,
                                      size_t layer,
                                      struct kvpages_view_axes *out);

/**
 * Number of allocations.
 *
 * @param cache  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API
size_t kvpages_cache_num_allocations(const struct kvpages_cache *cache);

/**
 * An allocation.
 *
 * @param cache       Borrowed. Not NULL.
 * @param allocation  Less than kvpages_cache_num_allocations().
 * @param[out] out    Filled; its pointer is Kept until the cache is destroyed.
 *                    Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such allocation.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_get_allocation(const struct kvpages_cache *cache,
                                            size_t allocation,
                                            struct kvpages_allocation *out);

/**
 * Number of memory regions.
 *
 * @param cache  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API size_t kvpages_cache_num_regions(const struct kvpages_cache *cache);

/**
 * A memory region.
 *
 * @param cache     Borrowed. Not NULL.
 * @param region    Less than kvpages_cache_num_regions().
 * @param[out] out  Filled; its pointer is Kept until the cache is destroyed. Not
 *                  NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such region.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_get_region(const struct kvpages_cache *cache,
                                        size_t region,
                                        struct kvpages_region *out);

/**
 * The layers in binding order: by the index in their names, see
 * kvpages_layer_index(), and layers of one index in the model's order.
 *
 * @param cache                  Borrowed. Not NULL.
 * @param num_attention_modules  Attention modules of one layer; 0 for 1.
 * @param[out] layers            Room for capacity numbers of layers. May be NULL
 *                               when capacity is 0.
 * @param capacity               Numbers that fit.
 * @param[out] out_count         How many there are, also when they do not fit.
 *                               Not NULL.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  They do not fit.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_copy_bound_layers(const struct kvpages_cache *cache,
                                               uint64_t num_attention_modules,
                                               size_t *layers,
                                               size_t capacity,
                                               size_t *out_count);

/**
 * Proves a view of an engine's own, or says why it cannot: it leaves its
 * allocation (kind "view_out_of_bounds"), it starts between two elements
 * ("view_dtype_misaligned"), or two indices may mean one element
 * ("view_overlaps_itself": each dimension must step over all that lies inside
 * it).
 *
 * @param view      Borrowed. Not NULL.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  It cannot be proven; see the kinds above.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_view_audit(const struct kvpages_view *view,
                                  struct kvpages_view_report *out);

/**
 * A view of a layer as a tensor of DLPack 1.1, whose structs dlpack.h of that
 * project defines; it may be included before or after this header. Nothing is
 * copied: the tensor has the view's bytes, shape and strides. Its data is the
 * first element and its byte_offset 0, since some consumers forget to add that. A
 * view without elements has NULL. The device is kDLCPU for memory of the host,
 * pinned or not, and kDLCUDA with the device's number. Types are those of the
 * same names, and KVPAGES_DTYPE_F4_E2M1X2 is kDLFloat4_e2m1fn with 4 bits and 2
 * lanes.
 *
 * The tensor keeps the cache's memory, also when the cache is destroyed first,
 * and does not keep blocks from going when the cache shrinks. Like the view, it
 * describes all blocks of the plan: those without memory must not be touched. It
 * does not wait for work on a stream, which the caller and the consumer agree on.
 *
 * @param cache     Borrowed. Not NULL.
 * @param layer     Less than kvpages_cache_num_layers().
 * @param view      Less than kvpages_cache_num_views(): 0, or which state.
 * @param flags     KVPAGES_DLPACK_* flags.
 * @param[out] out  Owned by the caller, or by the consumer that it is handed to:
 *                  its deleter, or kvpages_dlpack_destroy(), is called once, on any
 *                  thread. The last one of a destroyed cache gives the memory back,
 *                  with all that kvpages_cache_destroy() says of that. NULL on
 *                  failure.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or view.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A flag is unknown ("unknown_value").
 * @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for the description.
 * @note Cost: two allocations on the host; no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_export_dlpack(const struct kvpages_cache *cache,
                                           size_t layer,
                                           size_t view,
                                           uint32_t flags,
                                           struct DLManagedTensorVersioned **out);

/**
 * As kvpages_cache_export_dlpack(), for consumers that do not know the structs of
 * DLPack 1.0, such as PyTorch 2.7 and JAX 0.8. Such a tensor has no flags, so a
 * consumer may write to it.
 *
 * @param cache     Borrowed. Not NULL.
 * @param layer     Less than kvpages_cache_num_layers().
 * @param view      Less than kvpages_cache_num_views(): 0, or which state.
 * @param[out] out  Owned by the caller, or by the consumer that it is handed to:
 *                  its deleter, or kvpages_dlpack_destroy_unversioned(), is called
 *                  once, on any thread. NULL on failure.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or view.
 * @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for the description.
 * @note Cost: two allocations on the host; no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_export_dlpack_unversioned(const struct kvpages_cache *cache,
                                                       size_t layer,
                                                       size_t view,
                                                       struct DLManagedTensor **out);

/**
 * Calls a tensor's deleter, for who has no dlpack.h. NULL is a no-op.
 *
 * @param tensor  Not used any more. Whoever made it, its deleter must not throw.
 */
KVPAGES_API
void kvpages_dlpack_destroy(struct DLManagedTensorVersioned *tensor);

/**
 * As kvpages_dlpack_destroy().
 *
 * @param tensor  Not used any more. Whoever made it, its deleter must not throw.
 */
KVPAGES_API
void kvpages_dlpack_destroy_unversioned(struct DLManagedTensor *tensor);

/**
 * The index of a layer by the numbers in its dotted name: of
 * "model.layers.7.self_attn" it is 7. A number is a part of ASCII digits only.
 * With several attention modules in a layer, the name of an attention layer may
 * hold a second number, its module: of "layers.3.self_attn.1" and 2 modules it
 * is 3 * 2 + 1.
 *
 * @param layer_name             Borrowed. Not NULL.
 * @param num_attention_modules  Attention modules of one layer; 0 for 1.
 * @param[out] out_index         The index. Not NULL.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The name has no number or too many
 *         ("layer_index_not_one_integer", "layer_index_too_many_integers"), or
 *         its module is out of range ("module_index_out_of_range").
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_layer_index(const char *layer_name,
                                   uint64_t num_attention_modules,
                                   uint64_t *out_index);

/**
 * Binds caches to an engine's layers: in the order of the layers' indices, and
 * layers of one index as they were declared.
 *
 * @param config          Borrowed. Not NULL.
 * @param[out] out_order  Room for num_layers numbers: layer_names in binding
 *                        order. May be NULL when there are none.
 * @param[out] out_bound  Room for num_context_names numbers: for each of
 *                        context_names which of layer_names it is, SIZE_MAX for
 *                        a layer without a cache. May be NULL when there are
 *                        none.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A name has no index, as kvpages_layer_index()
 *         says; two layers get one index though their names say otherwise
 *         ("layer_index_collision"); or a layer is missing in context_names
 *         ("forward_context_missing").
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_bind_layers(const struct kvpages_bind_config *config,
                                   size_t *out_order,
                                   size_t *out_bound);

/**
 * Makes the attention groups of a worker, and the builders of each. Layers of one
 * cache group with the same backend (by name), spec and number of query heads are
 * one attention group; groups and the layers in them come in the order of the
 * plan. Layers that share a cache are in a group of their owner's cache group. A
 * layer without a backend is in none.
 *
 * Builders are made group after group. When a callback fails, all builders that
 * were made are destroyed, the last first.
 *
 * @param plan      Borrowed. Not NULL.
 * @param config    Borrowed. Not NULL.
 * @param[out] out  Owned by the caller: kvpages_attention_destroy(). NULL on
 *                  failure.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such worker or active layer.
 * @retval KVPAGES_STATUS_STOPPED    A callback failed:
 *                                   kvpages_last_callback_code().
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_attention_create(const struct kvpages_plan *plan,
                                        const struct kvpages_attention_config *config,
                                        struct kvpages_attention **out);

/**
 * Destroys attention groups and their builders, the last made first. NULL is a
 * no-op.
 *
 * @param attention  Not used any more.
 */
KVPAGES_API void kvpages_attention_destroy(struct kvpages_attention *attention);

/**
 * What the callback returned that stopped the last call on this thread which
 * returned KVPAGES_STATUS_STOPPED; 0 when there was none.
 *
 * @return The callback's own number, not a kvpages_status.
 */
KVPAGES_API int32_t kvpages_last_callback_code(void);

/**
 * Number of KV-cache groups: those of the plan, by their number there.
 *
 * @param attention  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API
size_t kvpages_attention_num_cache_groups(const struct kvpages_attention *attention);

/**
 * Number of attention groups of a cache group.
 *
 * @param attention    Borrowed.
 * @param cache_group  Less than kvpages_attention_num_cache_groups().
 * @return 0 for NULL, and when there is no such cache group.
 */
KVPAGES_API
size_t kvpages_attention_num_groups(const struct kvpages_attention *attention,
                                    size_t cache_group);

/**
 * An attention group.
 *
 * @param attention    Borrowed. Not NULL.
 * @param cache_group  Less than kvpages_attention_num_cache_groups().
 * @param group        Less than kvpages_attention_num_groups().
 * @param[out] out     Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_attention_get_group(const struct kvpages_attention *attention,
                                           size_t cache_group,
                                           size_t group,
                                           struct kvpages_attention_group_info *out);

/**
 * What the layers of an attention group store, as it was planned: the block size
 * is the plan's, not that of kernel blocks.
 *
 * @param attention    Borrowed. Not NULL.
 * @param cache_group  Less than kvpages_attention_num_cache_groups().
 * @param group        Less than kvpages_attention_num_groups().
 * @param[out] out     Filled; its pointers are Kept until the attention handle is
 *                     destroyed. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_attention_get_group_spec(const struct kvpages_attention *attention,
                                                size_t cache_group,
                                                size_t group,
                                                struct kvpages_spec *out);

/**
 * Name of the backend of an attention group.
 *
 * @param attention    Borrowed.
 * @param cache_group  Less than kvpages_attention_num_cache_groups().
 * @param group        Less than kvpages_attention_num_groups().
 * @return A string of the handle's; NULL when there is no such group.
 */
KVPAGES_API
const char *kvpages_attention_group_backend(const struct kvpages_attention *attention,
                                            size_t cache_group,
                                            size_t group);

/**
 * Name of a layer of an attention group.
 *
 * @param attention    Borrowed.
 * @param cache_group  Less than kvpages_attention_num_cache_groups().
 * @param group        Less than kvpages_attention_num_groups().
 * @param index        Less than the group's num_layers.
 * @return A string of the handle's; NULL when there is no such layer.
 */
KVPAGES_API
const char *kvpages_attention_group_layer_name(const struct kvpages_attention *attention,
                                               size_t cache_group,
                                               size_t group,
                                               size_t index);

/**
 * The lowest graph support over all builders; without builders, over the
 * backends' contracts.
 *
 * @param attention              Borrowed.
 * @param[out] out_backend_name  The first backend that has it: a string of the
 *                               handle's. NULL when it is always, and when the
 *                               engine's own limit is lower. May be NULL.
 * @return One of KVPAGES_GRAPH_SUPPORT_*; NEVER for NULL.
 */
KVPAGES_API
uint32_t kvpages_attention_graph_support(const struct kvpages_attention *attention,
                                         const char **out_backend_name);

/**
 * Lowers the graph support to what the engine itself can capture. A limit that is
 * not lower changes nothing.
 *
 * @param attention  Changed. Not NULL.
 * @param limit      One of KVPAGES_GRAPH_SUPPORT_*.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  There is no such limit.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_attention_limit_graph_support(struct kvpages_attention *attention,
                                                     uint32_t limit);

/**
 * Builds the metadata of a step: calls one builder of every attention group, in
 * order. When a callback fails, no other is called, and the metadata of the step
 * before stays. A call that succeeds takes no memory and no lock.
 *
 * @param attention  Changed. Not NULL.
 * @param step       Borrowed; pointers in it are handed on to the builders. Not
 *                   NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such builder.
 * @retval KVPAGES_STATUS_STOPPED    A callback failed:
 *                                   kvpages_last_callback_code().
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_attention_build(struct kvpages_attention *attention,
                                       const struct kvpages_step *step);

/**
 * The metadata of a layer in the last step of a builder.
 *
 * @param attention  Borrowed.
 * @param builder    As in kvpages_step.
 * @param layer      Its number in the worker's model, which is not that in a cache:
 *                   kvpages_cache_find_model_layer().
 * @return What the builder of its attention group made. NULL when the layer is in
 *         none, or there was no step.
 */
KVPAGES_API
void *kvpages_attention_layer_metadata(const struct kvpages_attention *attention,
                                       size_t builder,
                                       size_t layer);

/**
 * The slot mapping of a layer's cache group in the last step of a builder; also
 * of a layer that is not active.
 *
 * @param attention  Borrowed. Not NULL.
 * @param builder    As in kvpages_step.
 * @param layer      Its number in the worker's model, which is not that in a cache:
 *                   kvpages_cache_find_model_layer().
 * @param[out] out   The step's slot mapping; all zero before the first step. Not
 *                   NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such builder, or the layer is in
 *                                   no cache group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_attention_get_slot_mapping(const struct kvpages_attention *attention,
                                                  size_t builder,
                                                  size_t layer,
                                                  struct kvpages_tensor *out);

/**
 * The tokens of one request that attend to each other in both directions: the
 * runs of embedded tokens of its images and videos, in order. An item of no
 * tokens has none.
 *
 * @param items           Borrowed. num_items items.
 * @param num_items       May be 0.
 * @param sliding_window  Longer ranges are left out: their first tokens would
 *                        see past it. Tokens; KVPAGES_NO_WINDOW to keep all.
 * @param[out] ranges     Room for capacity ranges. May be NULL when capacity
 *                        is 0.
 * @param capacity        Ranges that fit.
 * @param[out] out_count  How many there are, also when they do not fit. Not NULL.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  capacity is less than the number.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_multimodal_ranges(const struct kvpages_multimodal_item *items,
                                         size_t num_items,
                                         uint64_t sliding_window,
                                         struct kvpages_range *ranges,
                                         size_t capacity,
                                         size_t *out_count);

/**
 * Entries of a row of row_blocks blocks for kernels that read whole runs of 128
 * tokens: blocks rounded up to a multiple of 128 / gcd(128, block_size), times the
 * kernel blocks of each.
 *
 * @param row_blocks         Blocks.
 * @param block_size         Tokens of a block.
 * @param kernel_block_size  Tokens of a kernel block, which divide it. 0: those
 *                           of a block.
 * @param[out] out           Entries; 0 on failure. Not NULL.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A size is 0, or kernel_block_size does not
 *         divide block_size.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_table_row_width(uint64_t row_blocks,
                                       uint64_t block_size,
                                       uint64_t kernel_block_size,
                                       uint64_t *out);

/**
 * Makes tables of groups that the engine states.
 *
 * @param config    Copied. Not NULL.
 * @param[out] out  Owned by the caller: kvpages_tables_destroy(). NULL on failure.
 * @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  The host has not enough memory.
 * @retval KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY  The device has not enough memory.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
 *         there is no such device.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_create(const struct kvpages_tables_config *config,
                                     struct kvpages_tables **out);

/**
 * Makes tables of a worker's groups. Rows are as long as the plan's
 * table_width_blocks; state is not shared out to the context-parallel ranks.
 *
 * A plan from parts knows neither how long a request gets nor how many ranks there
 * are: both are the config's, and the cache mode of state is its specs'.
 *
 * @param plan      Borrowed. Not NULL.
 * @param worker    Number of the worker in the plan.
 * @param config    Copied. Not NULL; without groups. What the plan knows, of
 *                  num_blocks, max_model_len and context_parallel_size, is 0 or
 *                  the plan's number.
 * @param[out] out  Owned by the caller: kvpages_tables_destroy(). NULL on failure.
 * @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  The host has not enough memory.
 * @retval KVPAGES_STATUS_OUT_OF_DEVICE_MEMORY  The device has not enough memory.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  As kvpages_device_count(), and when
 *         there is no such device.
 * @retval KVPAGES_STATUS_NOT_FOUND  The plan has no such worker.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  Neither the plan nor the config knows
 *         max_model_len (kind "max_model_len_unknown"), or the config contradicts
 *         the plan ("bad_values").
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_create_for_plan(const struct kvpages_plan *plan,
                                              size_t worker,
                                              const struct kvpages_tables_config *config,
                                              struct kvpages_tables **out);

/**
 * Destroys tables. NULL is a no-op.
 *
 * @param tables  Not used any more, and neither are its tensors.
 */
KVPAGES_API void kvpages_tables_destroy(struct kvpages_tables *tables);

/**
 * Number of groups.
 *
 * @param tables  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API
size_t kvpages_tables_num_groups(const struct kvpages_tables *tables);

/**
 * Where the tables are, the input tables and the slots.
 *
 * @param tables    Borrowed. Not NULL.
 * @param[out] out  The device; its context is the tables'. Not NULL.
 * @return Fails only for NULL.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_get_device(const struct kvpages_tables *tables,
                                         struct kvpages_device *out);

/**
 * What the table of a group is.
 *
 * @param tables    Borrowed. Not NULL.
 * @param group     Less than kvpages_tables_num_groups().
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_get_info(const struct kvpages_tables *tables,
                                       size_t group,
                                       struct kvpages_table_info *out);

/**
 * The table of a group: int32 [max_requests, row width], as it was last applied.
 *
 * @param tables    Borrowed. Not NULL.
 * @param group     Less than kvpages_tables_num_groups().
 * @param[out] out  Filled; its pointers are Kept until the tables are destroyed.
 *                  Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_get_table(const struct kvpages_tables *tables,
                                        size_t group,
                                        struct kvpages_tensor *out);

/**
 * The input table of a group: int32 [max_requests, row width], as it was last
 * gathered.
 *
 * @param tables    Borrowed. Not NULL.
 * @param group     Less than kvpages_tables_num_groups().
 * @param[out] out  Filled; its pointers are Kept until the tables are destroyed.
 *                  Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_get_input_table(const struct kvpages_tables *tables,
                                              size_t group,
                                              struct kvpages_tensor *out);

/**
 * The slots of a group: int64 [max_tokens], as they were last mapped.
 *
 * @param tables    Borrowed. Not NULL.
 * @param group     Less than kvpages_tables_num_groups().
 * @param[out] out  Filled; its pointers are Kept until the tables are destroyed.
 *                  Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_get_slots(const struct kvpages_tables *tables,
                                        size_t group,
                                        struct kvpages_tensor *out);

/**
 * Kernel blocks in the row of a request, those staged included.
 *
 * @param tables    Borrowed. Not NULL.
 * @param request   Number of its row.
 * @param group     Less than kvpages_tables_num_groups().
 * @param[out] out  How many; 0 on failure. Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request or group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_num_entries(const struct kvpages_tables *tables,
                                          size_t request,
                                          size_t group,
                                          size_t *out);

/**
 * Stages blocks to be added to a row, each as its kernel blocks.
 *
 * @param tables     Changed. Not NULL.
 * @param request    Number of its row.
 * @param group      Less than kvpages_tables_num_groups().
 * @param block_ids  Copied. NULL only when there are none.
 * @param count      How many.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request or group.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The row has no room for them (kind
 *         "table_row_overflow"), or one does not exist ("block_id_out_of_range").
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_append(struct kvpages_tables *tables,
                                     size_t request,
                                     size_t group,
                                     const int32_t *block_ids,
                                     size_t count);

/**
 * Stages blocks to take the place of those in a row.
 *
 * @param tables     Changed. Not NULL.
 * @param request    Number of its row.
 * @param group      Less than kvpages_tables_num_groups().
 * @param block_ids  Copied. NULL only when there are none.
 * @param count      How many.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request or group.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The row has no room for them (kind
 *         "table_row_overflow"), or one does not exist ("block_id_out_of_range").
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_overwrite(struct kvpages_tables *tables,
                                        size_t request,
                                        size_t group,
                                        const int32_t *block_ids,
                                        size_t count);

/**
 * Stages writes to many rows: all of them, or none when one is refused.
 *
 * @param tables  Changed. Not NULL.
 * @param writes  Copied. Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A row has no room for its blocks (kind
 *         "table_row_overflow"), a block does not exist
 *         ("block_id_out_of_range"), or starts do not go up from 0
 *         ("boundaries_not_ascending").
 * @note Cost: O(writes * groups + blocks); no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_write(struct kvpages_tables *tables,
                                    const struct kvpages_row_writes *writes);

/**
 * Stages that a row keeps its first blocks only.
 *
 * @param tables      Changed. Not NULL.
 * @param request     Number of its row.
 * @param group       Less than kvpages_tables_num_groups().
 * @param num_blocks  Blocks to keep, not of kernel blocks.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request or group.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  It has fewer (kind
 *         "table_row_too_short").
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_truncate(struct kvpages_tables *tables,
                                       size_t request,
                                       size_t group,
                                       size_t num_blocks);

/**
 * Stages that a request takes the place of another, in all groups. Its own row is
 * empty then.
 *
 * @param tables  Changed. Not NULL.
 * @param from    Number of its row.
 * @param to      Number of the row that gets its blocks, and loses those it had.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_move(struct kvpages_tables *tables,
                                   size_t from,
                                   size_t to);

/**
 * Stages that two requests change places, in all groups.
 *
 * @param tables  Changed. Not NULL.
 * @param a       Number of one row.
 * @param b       Number of the other.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_swap(struct kvpages_tables *tables,
                                   size_t a,
                                   size_t b);

/**
 * Stages that a request has no blocks, in any group.
 *
 * @param tables   Changed. Not NULL.
 * @param request  Number of its row.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_clear(struct kvpages_tables *tables,
                                    size_t request);

/**
 * Makes the tables what was staged, in the order in which it was.
 *
 * @param tables  Changed. Not NULL.
 * @param stream  The CUstream on which it is done; NULL for the default stream. Not
 *                used for host memory.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
 * @note Cost: O(entries that changed); no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_apply(struct kvpages_tables *tables,
                                    void *stream);

/**
 * Makes all tables null and all slots pads, and forgets what was staged, whatever
 * stands in their memory. Addresses stay as they are. For an engine that has
 * released its caches and has them again.
 *
 * @param tables  Changed. Not NULL.
 * @param stream  The CUstream on which it is done; NULL for the default stream. Not
 *                used for host memory.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_reset(struct kvpages_tables *tables,
                                    void *stream);

/**
 * All that a step asks of tables, in one call: kvpages_tables_apply(),
 * kvpages_tables_gather() and kvpages_tables_map_slots() for a batch, whose arrays
 * are in the host's memory, and which is also described as
 * kvpages_attention_build() takes it. What the engine alone knows of the step, such
 * as causality, stays zero and can be set before that call.
 *
 * @param tables    Changed. Not NULL.
 * @param batch     Borrowed. Not NULL. Its arrays are what out_step points to for
 *                  the host, so they must stay until that is not used any more.
 *                  They are not the tables' own.
 * @param[out] out_step  The step: its counts, the batch's arrays for the host, and
 *                  the input table and the slots of each group, which are Kept
 *                  until the tables are destroyed. For the device it has the
 *                  batch's arrays again; with tables in a device's memory, copies
 *                  of them there, which are Kept too, and always at the same
 *                  addresses: positions past the tokens are copied as well, to
 *                  max_tokens. Zero on failure. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_tables_map_slots() says, or a
 *         sequence is shorter than its tokens of the step, or ends before one of
 *         their positions (kind "seq_len_too_small"). Nothing is applied then.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
 * @note Cost: O(entries that changed + entries of the rows + tokens * groups); no
 *       allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_prepare(struct kvpages_tables *tables,
                                      const struct kvpages_batch *batch,
                                      struct kvpages_step *out_step);

/**
 * Fills the input tables of all groups with the rows of a batch. Rows past it are
 * null.
 *
 * @param tables        Changed. Not NULL.
 * @param requests      Borrowed: for each request of the batch the number of its
 *                      row, or -1 for a dummy, whose row is null. NULL only when
 *                      there are none.
 * @param num_requests  How many.
 * @param num_rows      Rows that kernels will read: num_requests or more, at most
 *                      max_requests.
 * @param stream        The CUstream on which it is done; NULL for the default
 *                      stream. Not used for host memory.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  num_rows is out of range (kind
 *         "batch_out_of_range").
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
 * @note Cost: O(entries of the rows); no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_gather(struct kvpages_tables *tables,
                                     const int32_t *requests,
                                     size_t num_requests,
                                     size_t num_rows,
                                     void *stream);

/**
 * Makes the input tables of all groups those of a batch of dummies: all null.
 *
 * @param tables    Changed. Not NULL.
 * @param num_rows  Rows that kernels will read, at most max_requests.
 * @param stream    The CUstream on which it is done; NULL for the default stream.
 *                  Not used for host memory.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  num_rows is out of range (kind
 *         "batch_out_of_range").
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_gather_dummies(struct kvpages_tables *tables,
                                             size_t num_rows,
                                             void *stream);

/**
 * Finds the slots of a batch in all groups. The slot of a token is -1 when its
 * position is negative or past the blocks of its request, when it is another
 * context-parallel rank's, and when its request is a dummy. Slots past the tokens
 * of the batch are -1, to max_tokens.
 *
 * @param tables         Changed. Not NULL.
 * @param requests       Borrowed: for each request of the batch the number of its
 *                       row, or -1 for a dummy. NULL only when there are none.
 * @param num_requests   How many.
 * @param query_start    Borrowed: num_requests + 1 numbers going up from 0.
 *                       Request i has the tokens from query_start[i] to
 *                       query_start[i + 1]. Not NULL.
 * @param positions      Borrowed: where each token stands in its request. NULL
 *                       only when there are none.
 * @param num_positions  How many: as many as there are tokens, or more, which are
 *                       left alone.
 * @param stream         The CUstream on which it is done; NULL for the default
 *                       stream. Not used for host memory.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such request.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  There are more requests or tokens than
 *         the tables are made for (kind "batch_out_of_range"), or query_start does
 *         not go up from 0 or leaves positions ("boundaries_not_ascending").
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
 * @note Cost: O(tokens * groups); no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_map_slots(struct kvpages_tables *tables,
                                        const int32_t *requests,
                                        size_t num_requests,
                                        const int32_t *query_start,
                                        const int64_t *positions,
                                        size_t num_positions,
                                        void *stream);

/**
 * Makes all slots of all groups those of a batch of dummies: -1.
 *
 * @param tables  Changed. Not NULL.
 * @param stream  The CUstream on which it is done; NULL for the default stream. Not
 *                used for host memory.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The stream is being captured.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_map_dummies(struct kvpages_tables *tables,
                                          void *stream);

/**
 * Prepares operations on a cache. They keep its memory, also when the cache is
 * destroyed first.
 *
 * When the cache is resized, its operations know: a block that has no memory is out
 * of range.
 *
 * @param cache     Borrowed. Not NULL. For one in a device's memory its kernels are
 *                  loaded now, which may compile them and take a second.
 * @param config    Borrowed. Not NULL.
 * @param[out] out  Owned by the caller: kvpages_ops_destroy(). NULL on failure.
 * @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for the scratch.
 * @retval KVPAGES_STATUS_DEVICE_UNAVAILABLE  The driver failed, or cannot load the
 *         kernels.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_ops_create(const struct kvpages_cache *cache,
                                  const struct kvpages_ops_config *config,
                                  struct kvpages_ops **out);

/**
 * Destroys operations. NULL is a no-op.
 *
 * @param ops  Not used any more.
 */
KVPAGES_API void kvpages_ops_destroy(struct kvpages_ops *ops);

/**
 * Clears blocks: in every layer chosen the whole page of each block, padding
 * included, of attention and of states alike. Layers that no backend reads are
 * cleared with their group. Memory that layers share is cleared as far as the
 * widest chosen page reaches, and nothing else.
 *
 * @param ops            Not NULL. The call has it for itself.
 * @param block_ids      Borrowed; of manager blocks, not of kernel blocks. May be
 *                       NULL when num_block_ids is 0.
 * @param num_block_ids  Blocks listed.
 * @param selection      Borrowed. NULL for all layers; struct_size set.
 * @param stream         The CUstream on which it is done; NULL for the default
 *                       stream. Not used for host memory.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  An id is out of range (kind
 *         "block_id_out_of_range") or listed twice ("duplicate_block_id"), or
 *         there are more than max_block_ids ("too_many_block_ids").
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group or layer.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_ops_zero_blocks(struct kvpages_ops *ops,
                                       const int32_t *block_ids,
                                       size_t num_block_ids,
                                       const struct kvpages_block_selection *selection,
                                       void *stream);

/**
 * Fills blocks with bytes of 0xFF, so that reading one that holds nothing is loud:
 * for debugging, when an engine frees blocks. The bytes are those that
 * kvpages_ops_zero_blocks() clears, and no others.
 *
 * Elements of such bytes are NaN as F64, F32, F16, BF16, F8_E4M3FN and F8_E5M2, and
 * so are the f32 scales behind keys and values of int8, int4 and fp8. Integers
 * without a scale of their own are -1, or 255; F8_E4M3FNUZ, F8_E5M2FNUZ and
 * F4_E2M1X2 have no NaN of these bits, and become their largest negative number.
 *
 * Block 0 is refused: kernels read it where a row has no block, and multiply what
 * they read by a weight of 0, which only of a number is 0. For the same reason
 * clear a block with kvpages_ops_zero_blocks() when it is handed out, if kernels
 * read slots of it behind the last token.
 *
 * @param ops            Not NULL. The call has it for itself.
 * @param block_ids      Borrowed; of manager blocks, not of kernel blocks. May be
 *                       NULL when num_block_ids is 0.
 * @param num_block_ids  Blocks listed.
 * @param selection      Borrowed. NULL for all layers; struct_size set.
 * @param stream         The CUstream on which it is done; NULL for the default
 *                       stream. Not used for host memory.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_ops_zero_blocks(); or a block
 *         is block 0 (kind "null_block").
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group or layer.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_ops_poison_blocks(struct kvpages_ops *ops,
                                         const int32_t *block_ids,
                                         size_t num_block_ids,
                                         const struct kvpages_block_selection *selection,
                                         void *stream);

/**
 * Copies blocks in the layers chosen, as if all were read before any is written:
 * chains, swaps and longer cycles come out right.
 *
 * @param ops         Not NULL. The call has it for itself.
 * @param copies      Borrowed. May be NULL when num_copies is 0.
 * @param num_copies  Pairs listed.
 * @param selection   Borrowed. NULL for all layers; struct_size set.
 * @param num_blocks  Blocks that the caller believes the cache to have; 0 to leave
 *                    that out.
 * @param stream      The CUstream on which it is done; NULL for the default
 *                    stream. Not used for host memory.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  An id is out of range (kind
 *         "block_id_out_of_range"), a block is the target of two copies
 *         ("duplicate_block_id"), there are more pairs than max_block_ids
 *         ("too_many_block_ids"), or the cache has another number of blocks
 *         ("num_blocks_mismatch", "copy_not_multiple_of_blocks").
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group or layer.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_ops_copy_blocks(struct kvpages_ops *ops,
                                       const struct kvpages_block_copy *copies,
                                       size_t num_copies,
                                       const struct kvpages_block_selection *selection,
                                       uint64_t num_blocks,
                                       void *stream);

/**
 * Stores rows of tokens in the slots of one or many layers.
 *
 * Rows of the cache's own type are copied. Rows of F32, F16 or BF16 are also
 * converted to each other, to fp8 with one scale for the tensor, and to int8, fp8
 * or int4 with an f32 scale for each token and head, which is the largest
 * magnitude divided by the largest number (127, 448 or 57344, 7) and is stored
 * behind its key or value. int4 are symmetric, two in a byte, the first in its
 * lower half. Latents of the form fp8_ds_mla with 656 bytes take 512 and 64
 * elements. Rounding is to nearest, ties to even; fp8 saturates, F16 and BF16
 * overflow to infinity. NaN stays NaN: with int8 and int4 it makes its token and
 * head NaN.
 *
 * @param ops    Not NULL.
 * @param write  Borrowed, with its arrays and rows. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A slot is out of range (kind
 *         "slot_out_of_range"), layers are of several groups
 *         ("layers_of_several_groups") or store different numbers of slots of each
 *         block ("block_slots_differ"), or rows do not fit a layer.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
 * @retval KVPAGES_STATUS_UNSUPPORTED  Rows of this type cannot be stored in a
 *         layer of this kind; the message says what can.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_ops_write_kv(const struct kvpages_ops *ops,
                                    const struct kvpages_kv_write *write);

/**
 * Reads rows of tokens from the slots, or from whole blocks, of one or many
 * layers: the inverse of kvpages_ops_write_kv(), with the same types.
 *
 * @param ops     Not NULL.
 * @param gather  Borrowed, with its arrays; the rooms for rows are filled. Not
 *                NULL; struct_size set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_ops_write_kv(); or a block id
 *         is out of range (kind "block_id_out_of_range"), or slots and block ids
 *         are both given ("slots_and_blocks").
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
 * @retval KVPAGES_STATUS_UNSUPPORTED  Rows of this type cannot be read from a layer
 *         of this kind; the message says what can.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_ops_gather_kv(const struct kvpages_ops *ops,
                                     const struct kvpages_kv_gather *gather);

/**
 * A cache in numbers.
 *
 * @param cache     Borrowed. Not NULL. May be called while other threads read the
 *                  cache or use its operations, but not during
 *                  kvpages_cache_resize().
 * @param usage     Borrowed. NULL when it is not told which blocks are in use;
 *                  struct_size set.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  num_counts is neither 0, 1 nor the number
 *         of groups (kind "counts_of_groups"), or more blocks are in use than have
 *         memory ("too_many_blocks_in_use").
 * @note Cost: a look at every layer; no allocation, no lock, no call of a driver.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_get_snapshot(const struct kvpages_cache *cache,
                                          const struct kvpages_cache_usage *usage,
                                          struct kvpages_cache_snapshot *out);

/**
 * A cache in numbers, with its groups, allocations and regions, as one JSON object:
 * docs/observability.md has its keys.
 *
 * @param cache       Borrowed. Not NULL. As kvpages_cache_get_snapshot().
 * @param usage       As kvpages_cache_get_snapshot().
 * @param[out] buffer Room for capacity bytes. May be NULL when capacity is 0.
 * @param capacity    Bytes that fit, with the NUL at the end.
 * @param[out] out_length  Bytes of the text without the NUL, also when it does not
 *                    fit. Not NULL.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  It does not fit.
 * @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for it on the host.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  As kvpages_cache_get_snapshot().
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_copy_snapshot(const struct kvpages_cache *cache,
                                           const struct kvpages_cache_usage *usage,
                                           char *buffer,
                                           size_t capacity,
                                           size_t *out_length);

/**
 * What a block of a group of the cache is.
 *
 * @param cache     Borrowed. Not NULL.
 * @param group     Less than the num_groups of a snapshot.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
 * @note Cost: a look at every layer; no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_get_group(const struct kvpages_cache *cache,
                                       size_t group,
                                       struct kvpages_cache_group *out);

/**
 * Tables in numbers.
 *
 * @param tables    Borrowed. Not NULL. May be called while other threads read the
 *                  tables, but not during a call that takes them as not const.
 * @param[out] out  Filled. Not NULL; struct_size set.
 * @return KVPAGES_STATUS_OK, or what is wrong with an argument.
 * @note Cost: a look at the length of every row; no allocation, no lock, no call of
 *       a driver.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_get_snapshot(const struct kvpages_tables *tables,
                                           struct kvpages_tables_snapshot *out);

/**
 * Tables in numbers, with their groups, as one JSON object: docs/observability.md
 * has its keys.
 *
 * @param tables      Borrowed. Not NULL. As kvpages_tables_get_snapshot().
 * @param[out] buffer Room for capacity bytes. May be NULL when capacity is 0.
 * @param capacity    Bytes that fit, with the NUL at the end.
 * @param[out] out_length  Bytes of the text without the NUL, also when it does not
 *                    fit. Not NULL.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  It does not fit.
 * @retval KVPAGES_STATUS_OUT_OF_HOST_MEMORY  There is no room for it on the host.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_tables_copy_snapshot(const struct kvpages_tables *tables,
                                            char *buffer,
                                            size_t capacity,
                                            size_t *out_length);

/**
 * The descriptor of a cache as JSON, of the blocks that have memory now. The same
 * cache and config give the same text. docs/descriptor.md says what it means.
 *
 * @param cache        Borrowed. Not NULL.
 * @param config       Borrowed. NULL: nothing is told of the rank.
 * @param[out] buffer  Room for capacity bytes: the text and a NUL. May be NULL when
 *                     capacity is 0.
 * @param capacity     Bytes that fit.
 * @param[out] out_length  Bytes of the text, the NUL not counted, also when it does
 *                     not fit. Not NULL.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  capacity is not more than the length.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The heads that are told do not make those
 *         of a layer ("kv_heads_differ", "heads_not_dividing"); the text names it.
 * @note Cost: the text is made by each call, also by one that asks for its length.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_cache_copy_descriptor(const struct kvpages_cache *cache,
                                             const struct kvpages_descriptor_config *config,
                                             char *buffer,
                                             size_t capacity,
                                             size_t *out_length);

/**
 * Reads a descriptor and proves what it says: every block of every layer lies inside
 * its allocation, no byte belongs to different blocks, and every row and state lies
 * in its block. Then no answer of the descriptor reaches outside an allocation of the
 * size it states.
 *
 * @param json      Borrowed: UTF-8; no NUL is needed behind it. Not NULL.
 * @param length    Its bytes.
 * @param[out] out  Owned by the caller: kvpages_descriptor_destroy(). NULL on
 *                  failure. Not NULL.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  It is no descriptor ("descriptor_not_json"),
 *         or its numbers contradict each other ("descriptor_invalid").
 * @retval KVPAGES_STATUS_UNSUPPORTED  Its version is another one than this library
 *         knows ("descriptor_version").
 * @note Cost: memory in proportion to the text.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_descriptor_create(const char *json,
                                         size_t length,
                                         struct kvpages_descriptor **out);

/**
 * Destroys a descriptor. NULL is a no-op.
 *
 * @param descriptor  Not used any more.
 */
KVPAGES_API
void kvpages_descriptor_destroy(struct kvpages_descriptor *descriptor);

/**
 * A descriptor as JSON: of one that was read from what this version of the library
 * wrote, the same bytes.
 *
 * @param descriptor   Borrowed. Not NULL.
 * @param[out] buffer  Room for capacity bytes: the text and a NUL. May be NULL when
 *                     capacity is 0.
 * @param capacity     Bytes that fit.
 * @param[out] out_length  Bytes of the text, the NUL not counted, also when it does
 *                     not fit. Not NULL.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  capacity is not more than the length.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_descriptor_copy_json(const struct kvpages_descriptor *descriptor,
                                            char *buffer,
                                            size_t capacity,
                                            size_t *out_length);

/**
 * What a descriptor is about.
 *
 * @param descriptor  Borrowed. Not NULL.
 * @param[out] out    Filled. Not NULL; struct_size set.
 * @return Fails only for NULL and for a struct_size that no version has.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_descriptor_get_info(const struct kvpages_descriptor *descriptor,
                                           struct kvpages_descriptor_info *out);

/**
 * Bytes of an allocation, those of blocks without memory included.
 *
 * @param descriptor  Borrowed.
 * @param allocation  Less than kvpages_descriptor_info.num_allocations.
 * @return 0 when there is no such allocation.
 */
KVPAGES_API
uint64_t kvpages_descriptor_allocation_bytes(const struct kvpages_descriptor *descriptor,
                                             size_t allocation);

/**
 * A group.
 *
 * @param descriptor  Borrowed. Not NULL.
 * @param group       Less than kvpages_descriptor_info.num_groups.
 * @param[out] out    Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such group.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_descriptor_get_group(const struct kvpages_descriptor *descriptor,
                                            size_t group,
                                            struct kvpages_described_group *out);

/**
 * Layers: those with views, numbered as in the cache; then those whose pages no
 * backend reads.
 *
 * @param descriptor  Borrowed.
 * @return 0 for NULL.
 */
KVPAGES_API
size_t kvpages_descriptor_num_layers(const struct kvpages_descriptor *descriptor);

/**
 * Name of a layer.
 *
 * @param descriptor  Borrowed.
 * @param layer       Less than kvpages_descriptor_num_layers().
 * @return A string of the descriptor's; NULL when there is no such layer.
 */
KVPAGES_API
const char *kvpages_descriptor_layer_name(const struct kvpages_descriptor *descriptor,
                                          size_t layer);

/**
 * The number of a layer.
 *
 * @param descriptor  Borrowed. Not NULL.
 * @param name        Borrowed. Not NULL.
 * @param[out] out_layer  Its number. Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no layer of that name.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_descriptor_find_layer(const struct kvpages_descriptor *descriptor,
                                             const char *name,
                                             size_t *out_layer);

/**
 * A layer.
 *
 * @param descriptor  Borrowed. Not NULL.
 * @param layer       Less than kvpages_descriptor_num_layers().
 * @param[out] out    Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_descriptor_get_layer(const struct kvpages_descriptor *descriptor,
                                            size_t layer,
                                            struct kvpages_described_layer *out);

/**
 * A state of a state layer.
 *
 * @param descriptor  Borrowed. Not NULL.
 * @param layer       Less than kvpages_descriptor_num_layers().
 * @param state       Less than kvpages_described_layer.num_states.
 * @param[out] out    Filled. Not NULL; struct_size set.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer or state.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_descriptor_get_state(const struct kvpages_descriptor *descriptor,
                                            size_t layer,
                                            size_t state,
                                            struct kvpages_described_state *out);

/**
 * Where a block of a layer is: the runs of its page.
 *
 * @param descriptor  Borrowed. Not NULL.
 * @param layer       Less than kvpages_descriptor_num_layers().
 * @param block       Less than kvpages_descriptor_info.num_blocks.
 * @param[out] runs   Room for capacity runs. May be NULL when capacity is 0.
 * @param capacity    Runs that fit.
 * @param[out] out_count  How many there are, also when they do not fit: the layer's
 *                    num_runs. Not NULL.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  They do not fit.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The block had no memory when the descriptor
 *         was made ("block_id_out_of_range").
 * @note Cost: no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_descriptor_copy_block_runs(const struct kvpages_descriptor *descriptor,
                                                  size_t layer,
                                                  uint64_t block,
                                                  struct kvpages_run *runs,
                                                  size_t capacity,
                                                  size_t *out_count);

/**
 * Where one row of an attention layer is.
 *
 * @param descriptor  Borrowed. Not NULL.
 * @param layer       Less than kvpages_descriptor_num_layers().
 * @param block       Less than kvpages_descriptor_info.num_blocks.
 * @param slot        Less than kvpages_described_layer.block_slots.
 * @param head        Less than kvpages_described_layer.num_kv_heads.
 * @param part        One of KVPAGES_ROW_PART_*.
 * @param[out] out    Filled. Not NULL.
 * @retval KVPAGES_STATUS_NOT_FOUND  There is no such layer.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  The block ("block_id_out_of_range"), slot
 *         or head ("row_out_of_range") is not there.
 * @retval KVPAGES_STATUS_UNSUPPORTED  The layer has no rows, or none of that part
 *         ("rows_not_supported").
 * @note Cost: no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_descriptor_get_row(const struct kvpages_descriptor *descriptor,
                                          size_t layer,
                                          uint64_t block,
                                          uint64_t slot,
                                          uint64_t head,
                                          uint32_t part,
                                          struct kvpages_row *out);

/**
 * Works out how blocks of the sources become blocks of the targets. Every layer of
 * every target gets its rows from sources that have a layer of that name and hold the
 * target's kv heads; a head that several sources hold is taken from one of them.
 * Layouts, strides, padding, kernel blocks, the order of layers and the numbers of
 * groups may differ. Layers that share pages must share them on both sides.
 *
 * What cannot be copied is refused, with the layer's name and the reason: another
 * element type, row format or width, another block size, scales at other places, a
 * share of the tokens that no source has. States, pages that no backend reads, nvfp4,
 * DeepSeek V4's latents and scales at the end of a page only move as a whole, between
 * ranks that hold the same. The scale of an fp8 cache is the engine's: it must be the
 * same on both sides.
 *
 * @param config    Borrowed. Not NULL.
 * @param[out] out  Owned by the caller: kvpages_reshard_destroy(). NULL on failure.
 *                  Not NULL.
 * @retval KVPAGES_STATUS_UNSUPPORTED  A layer cannot move ("layer_not_reshardable"), or
 *         layers of one group are of several on the other side
 *         ("groups_not_reshardable").
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_reshard_create(const struct kvpages_reshard_config *config,
                                      struct kvpages_reshard **out);

/**
 * Destroys a reshard. NULL is a no-op.
 *
 * @param reshard  Not used any more.
 */
KVPAGES_API void kvpages_reshard_destroy(struct kvpages_reshard *reshard);

/**
 * The copies that blocks take, those of one block after those of the one before. They
 * are as few and their runs as long as layouts allow: a page in one run when the order
 * is the same and the heads are, and several layers in one where they lie side by side
 * on both sides.
 *
 * @param reshard      Borrowed. Not NULL.
 * @param moves        Borrowed: blocks, no target twice. May be NULL when num_moves is 0.
 * @param num_moves    How many they are.
 * @param[out] copies  Room for capacity copies. May be NULL when capacity is 0.
 * @param capacity     Copies that fit.
 * @param[out] out_count  How many there are, also when they do not fit. Not NULL.
 * @retval KVPAGES_STATUS_BUFFER_TOO_SMALL  They do not fit.
 * @retval KVPAGES_STATUS_NOT_FOUND  The targets have no such group.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A block is not there on every rank
 *         ("block_id_out_of_range"), or a target is listed twice
 *         ("duplicate_block_id").
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_reshard_copy_copies(const struct kvpages_reshard *reshard,
                                           const struct kvpages_block_move *moves,
                                           size_t num_moves,
                                           struct kvpages_strided_copy *copies,
                                           size_t capacity,
                                           size_t *out_count);

/**
 * Makes strided copies in host memory, one after another. All are checked against the
 * sizes of the allocations before the first byte moves: none reads or writes outside,
 * and none writes a byte twice. Copies may also be an engine's own.
 *
 * @param copies       Borrowed. May be NULL when num_copies is 0.
 * @param num_copies   How many they are.
 * @param sources      Borrowed: memory of each rank that copies come from. May be NULL
 *                     when num_sources is 0.
 * @param num_sources  Ranks.
 * @param targets      Borrowed: memory of each rank that copies go to. May be NULL when
 *                     num_targets is 0.
 * @param num_targets  Ranks.
 * @retval KVPAGES_STATUS_NOT_FOUND  A copy names a rank or an allocation that is not
 *         given.
 * @retval KVPAGES_STATUS_INVALID_ARGUMENT  A copy leaves an allocation
 *         ("copy_out_of_bounds"), or its runs may overlap where they go
 *         ("copy_overlaps_itself").
 * @note Nothing else uses the bytes meanwhile. Where source and target are one memory,
 *       a copy may read what one before it has written.
 * @note Cost: no allocation, no lock.
 */
KVPAGES_API
KVPAGES_MUST_USE
kvpages_status kvpages_copy_strided(const struct kvpages_strided_copy *copies,
                                    size_t num_copies,
                                    const struct kvpages_rank_memory *sources,
                                    size_t num_sources,
                                    const struct kvpages_rank_memory *targets,
                                    size_t num_targets);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVPAGES_H */
