// The binary interface: sizes and places that must never change, names and numbers.
#include <kvpages/kvpages.h>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <string>

// Every struct: its size, and the place of its last field. A struct that grows gets a line for its
// new last field; the lines that are here stay.
#define KVPAGES_LAYOUT(type, last, offset, size)                            \
    static_assert(offsetof(type, last) == (offset), #type "." #last " moved"); \
    static_assert(sizeof(type) == (size), #type " has another size")
#define KVPAGES_GROWS(type) static_assert(offsetof(type, struct_size) == 0, #type)

static_assert(sizeof(void*) == 8 && sizeof(std::size_t) == 8, "the numbers below are of 64 bits");

KVPAGES_LAYOUT(kvpages_spec, num_speculative_blocks, 192, 200);
KVPAGES_LAYOUT(kvpages_spec_info, scale_bytes, 56, 64);
KVPAGES_LAYOUT(kvpages_limits, reserved0, 44, 48);
KVPAGES_LAYOUT(kvpages_demand, admission_blocks, 32, 40);
KVPAGES_LAYOUT(kvpages_uniformity, reserved0, 20, 24);
KVPAGES_LAYOUT(kvpages_spec_set_info, reserved0, 52, 56);
KVPAGES_LAYOUT(kvpages_quantised_layout, memory_order, 16, 24);
KVPAGES_LAYOUT(kvpages_backend_config, reserved0, 108, 112);
KVPAGES_LAYOUT(kvpages_backend_info, has_layout, 44, 48);
KVPAGES_LAYOUT(kvpages_layer, reserved0, 44, 48);
KVPAGES_LAYOUT(kvpages_plan_config, reserved1, 84, 88);
KVPAGES_LAYOUT(kvpages_worker, memory_bytes, 8, 16);
KVPAGES_LAYOUT(kvpages_shortfall, longest_model_len, 32, 40);
KVPAGES_LAYOUT(kvpages_part_group, flags, 16, 24);
KVPAGES_LAYOUT(kvpages_part_tensor, num_layers, 32, 40);
KVPAGES_LAYOUT(kvpages_plan_parts, num_kernel_block_sizes, 56, 64);
KVPAGES_LAYOUT(kvpages_worker_info, reserved0, 76, 80);
KVPAGES_LAYOUT(kvpages_group_info, is_draft, 84, 88);
KVPAGES_LAYOUT(kvpages_tensor_info, num_layers, 32, 40);
KVPAGES_LAYOUT(kvpages_block_size_config, reserved0, 28, 32);
KVPAGES_LAYOUT(kvpages_hybrid_config, reserved0, 52, 56);
KVPAGES_LAYOUT(kvpages_hybrid_block, state_block_size, 24, 32);
KVPAGES_LAYOUT(kvpages_device, context, 8, 16);
KVPAGES_LAYOUT(kvpages_device_info, name, 48, 304);
KVPAGES_LAYOUT(kvpages_memory_callbacks, device, 40, 56);
KVPAGES_LAYOUT(kvpages_cuda_memory_config, flags, 20, 24);
KVPAGES_LAYOUT(kvpages_cache_config, reserved0, 36, 40);
KVPAGES_LAYOUT(kvpages_tensor, ndim, 28, 32);
KVPAGES_LAYOUT(kvpages_view_report, block_dim, 108, 112);
KVPAGES_LAYOUT(kvpages_layer_info, num_query_heads, 76, 80);
KVPAGES_LAYOUT(kvpages_view_axes, num_heads, 80, 88);
KVPAGES_LAYOUT(kvpages_allocation, size_bytes, 8, 16);
KVPAGES_LAYOUT(kvpages_region, allocation, 32, 40);
KVPAGES_LAYOUT(kvpages_view, allocation_bytes, 40, 48);
KVPAGES_LAYOUT(kvpages_bind_config, num_already_bound, 48, 56);
KVPAGES_LAYOUT(kvpages_table_group, reserved0, 28, 32);
KVPAGES_LAYOUT(kvpages_tables_config, device, 88, 104);
KVPAGES_LAYOUT(kvpages_table_info, reserved0, 52, 56);
KVPAGES_LAYOUT(kvpages_row_writes, num_block_ids, 48, 56);
KVPAGES_LAYOUT(kvpages_batch, stream, 56, 64);
KVPAGES_LAYOUT(kvpages_ops_config, max_concurrency, 16, 24);
KVPAGES_LAYOUT(kvpages_block_selection, num_layers, 32, 40);
KVPAGES_LAYOUT(kvpages_block_copy, target, 4, 8);
KVPAGES_LAYOUT(kvpages_cache_usage, num_counts, 16, 24);
KVPAGES_LAYOUT(kvpages_cache_snapshot, reserved0, 156, 160);
KVPAGES_LAYOUT(kvpages_cache_group, unused_bytes_per_block, 48, 56);
KVPAGES_LAYOUT(kvpages_tables_snapshot, reserved0, 132, 136);
KVPAGES_LAYOUT(kvpages_kv_rows, value_scale, 68, 72);
KVPAGES_LAYOUT(kvpages_kv_rows_out, value_scale, 68, 72);
KVPAGES_LAYOUT(kvpages_kv_write, stream, 48, 56);
KVPAGES_LAYOUT(kvpages_kv_gather, stream, 64, 72);
KVPAGES_LAYOUT(kvpages_builder_info, reserved0, 76, 80);
KVPAGES_LAYOUT(kvpages_builder_callbacks, destroy, 64, 72);
KVPAGES_LAYOUT(kvpages_backend_callbacks, callbacks, 8, 16);
KVPAGES_LAYOUT(kvpages_attention_config, num_builders, 56, 64);
KVPAGES_LAYOUT(kvpages_attention_group_info, graph_support, 36, 40);
KVPAGES_LAYOUT(kvpages_range, last, 8, 16);
KVPAGES_LAYOUT(kvpages_request_ranges, num_ranges, 8, 16);
KVPAGES_LAYOUT(kvpages_common_metadata, for_capture, 220, 224);
KVPAGES_LAYOUT(kvpages_step, for_capture, 228, 232);
KVPAGES_LAYOUT(kvpages_multimodal_item, is_embedded, 24, 32);
KVPAGES_LAYOUT(kvpages_descriptor_config, num_model_kv_heads, 56, 64);
KVPAGES_LAYOUT(kvpages_descriptor_info, context_parallel_interleave, 88, 96);
KVPAGES_LAYOUT(kvpages_described_group, kernel_block_size, 16, 24);
KVPAGES_LAYOUT(kvpages_described_layer, reserved0, 220, 224);
KVPAGES_LAYOUT(kvpages_described_state, dtype, 36, 40);
KVPAGES_LAYOUT(kvpages_run, size_bytes, 16, 24);
KVPAGES_LAYOUT(kvpages_row, scale_elements, 32, 40);
KVPAGES_LAYOUT(kvpages_reshard_config, num_targets, 32, 40);
KVPAGES_LAYOUT(kvpages_block_move, target, 12, 16);
KVPAGES_LAYOUT(kvpages_copy_step, target_step_bytes, 16, 24);
KVPAGES_LAYOUT(kvpages_strided_copy, dims, 64, 208);
KVPAGES_LAYOUT(kvpages_rank_memory, num_allocations, 8, 16);

KVPAGES_GROWS(kvpages_descriptor_config);
KVPAGES_GROWS(kvpages_descriptor_info);
KVPAGES_GROWS(kvpages_described_group);
KVPAGES_GROWS(kvpages_described_layer);
KVPAGES_GROWS(kvpages_described_state);
KVPAGES_GROWS(kvpages_reshard_config);
KVPAGES_GROWS(kvpages_builder_info);
KVPAGES_GROWS(kvpages_builder_callbacks);
KVPAGES_GROWS(kvpages_attention_config);
KVPAGES_GROWS(kvpages_attention_group_info);
KVPAGES_GROWS(kvpages_common_metadata);
KVPAGES_GROWS(kvpages_step);
KVPAGES_GROWS(kvpages_spec);
KVPAGES_GROWS(kvpages_spec_info);
KVPAGES_GROWS(kvpages_limits);
KVPAGES_GROWS(kvpages_demand);
KVPAGES_GROWS(kvpages_uniformity);
KVPAGES_GROWS(kvpages_spec_set_info);
KVPAGES_GROWS(kvpages_backend_config);
KVPAGES_GROWS(kvpages_layer);
KVPAGES_GROWS(kvpages_plan_config);
KVPAGES_GROWS(kvpages_shortfall);
KVPAGES_GROWS(kvpages_plan_parts);
KVPAGES_GROWS(kvpages_worker_info);
KVPAGES_GROWS(kvpages_group_info);
KVPAGES_GROWS(kvpages_tensor_info);
KVPAGES_GROWS(kvpages_block_size_config);
KVPAGES_GROWS(kvpages_hybrid_config);
KVPAGES_GROWS(kvpages_hybrid_block);
KVPAGES_GROWS(kvpages_device_info);
KVPAGES_GROWS(kvpages_memory_callbacks);
KVPAGES_GROWS(kvpages_cuda_memory_config);
KVPAGES_GROWS(kvpages_cache_config);
KVPAGES_GROWS(kvpages_cache_usage);
KVPAGES_GROWS(kvpages_cache_snapshot);
KVPAGES_GROWS(kvpages_cache_group);
KVPAGES_GROWS(kvpages_tables_snapshot);
KVPAGES_GROWS(kvpages_view_report);
KVPAGES_GROWS(kvpages_layer_info);
KVPAGES_GROWS(kvpages_view_axes);
KVPAGES_GROWS(kvpages_bind_config);
KVPAGES_GROWS(kvpages_tables_config);
KVPAGES_GROWS(kvpages_table_info);
KVPAGES_GROWS(kvpages_row_writes);
KVPAGES_GROWS(kvpages_ops_config);
KVPAGES_GROWS(kvpages_block_selection);
KVPAGES_GROWS(kvpages_kv_write);
KVPAGES_GROWS(kvpages_kv_gather);

static_assert(sizeof(kvpages_status) == 4 && sizeof(kvpages_dtype) == 4 &&
              sizeof(kvpages_preset) == 4 && sizeof(kvpages_spec_kind) == 4);

// Numbers of names that files and engines keep.
static_assert(KVPAGES_DTYPE_BF16 == 4 && KVPAGES_DTYPE_F4_E2M1X2 == 15);
static_assert(KVPAGES_QUANT_MODE_NVFP4 == 5);
static_assert(KVPAGES_SPEC_KIND_STATE == 12 && KVPAGES_SPEC_KIND_MIXED == 100);
static_assert(KVPAGES_STATE_KIND_CUSTOM == 6 && KVPAGES_STATE_CACHE_MODE_ALL == 2);
static_assert(KVPAGES_PRESET_MAMBA1 == 30 && KVPAGES_PRESET_GATED_DELTA_NET == 34);
static_assert(KVPAGES_ROW_FORMAT_NONE == 0 && KVPAGES_ROW_FORMAT_FP8_DS_MLA_V4 == 9);
static_assert(KVPAGES_ROW_PART_KEY == 0 && KVPAGES_ROW_PART_VALUE == 1);
static_assert(KVPAGES_STRIDED_COPY_MAX_DIMS == 6);
static_assert(KVPAGES_LOG_LEVEL_OFF == 0 && KVPAGES_LOG_LEVEL_WARN == 1);
static_assert(KVPAGES_LOG_LEVEL_INFO == 2 && KVPAGES_LOG_LEVEL_DEBUG == 3);
static_assert(KVPAGES_CACHE_POISON == 1);
static_assert(KVPAGES_PLAN_DRAFT_LAYERS == 16 && KVPAGES_BACKEND_SCALES_AT_PAGE_END == 4);

namespace {

template <typename T>
void expect_init(const T& init) {
    EXPECT_EQ(init.struct_size, sizeof(T));
    const auto* bytes = reinterpret_cast<const unsigned char*>(&init);
    for (std::size_t i = sizeof(std::size_t); i < sizeof(T); ++i) {
        EXPECT_EQ(bytes[i], 0) << "byte " << i;
    }
}

}  // namespace

TEST(Abi, InitMacrosSetTheSizeAndNothingElse) {
    expect_init(kvpages_spec KVPAGES_SPEC_INIT);
    expect_init(kvpages_spec_info KVPAGES_SPEC_INFO_INIT);
    expect_init(kvpages_limits KVPAGES_LIMITS_INIT);
    expect_init(kvpages_demand KVPAGES_DEMAND_INIT);
    expect_init(kvpages_uniformity KVPAGES_UNIFORMITY_INIT);
    expect_init(kvpages_spec_set_info KVPAGES_SPEC_SET_INFO_INIT);
    expect_init(kvpages_backend_config KVPAGES_BACKEND_CONFIG_INIT);
    expect_init(kvpages_layer KVPAGES_LAYER_INIT);
    expect_init(kvpages_plan_config KVPAGES_PLAN_CONFIG_INIT);
    expect_init(kvpages_shortfall KVPAGES_SHORTFALL_INIT);
    expect_init(kvpages_plan_parts KVPAGES_PLAN_PARTS_INIT);
    expect_init(kvpages_worker_info KVPAGES_WORKER_INFO_INIT);
    expect_init(kvpages_group_info KVPAGES_GROUP_INFO_INIT);
    expect_init(kvpages_tensor_info KVPAGES_TENSOR_INFO_INIT);
    expect_init(kvpages_block_size_config KVPAGES_BLOCK_SIZE_CONFIG_INIT);
    expect_init(kvpages_hybrid_config KVPAGES_HYBRID_CONFIG_INIT);
    expect_init(kvpages_hybrid_block KVPAGES_HYBRID_BLOCK_INIT);
    expect_init(kvpages_device_info KVPAGES_DEVICE_INFO_INIT);
    expect_init(kvpages_cuda_memory_config KVPAGES_CUDA_MEMORY_CONFIG_INIT);
    expect_init(kvpages_memory_callbacks KVPAGES_MEMORY_CALLBACKS_INIT);
    expect_init(kvpages_cache_config KVPAGES_CACHE_CONFIG_INIT);
    expect_init(kvpages_cache_usage KVPAGES_CACHE_USAGE_INIT);
    expect_init(kvpages_cache_snapshot KVPAGES_CACHE_SNAPSHOT_INIT);
    expect_init(kvpages_cache_group KVPAGES_CACHE_GROUP_INIT);
    expect_init(kvpages_tables_snapshot KVPAGES_TABLES_SNAPSHOT_INIT);
    expect_init(kvpages_view_report KVPAGES_VIEW_REPORT_INIT);
    expect_init(kvpages_layer_info KVPAGES_LAYER_INFO_INIT);
    expect_init(kvpages_view_axes KVPAGES_VIEW_AXES_INIT);
    expect_init(kvpages_bind_config KVPAGES_BIND_CONFIG_INIT);
    expect_init(kvpages_tables_config KVPAGES_TABLES_CONFIG_INIT);
    expect_init(kvpages_table_info KVPAGES_TABLE_INFO_INIT);
    expect_init(kvpages_row_writes KVPAGES_ROW_WRITES_INIT);
    expect_init(kvpages_ops_config KVPAGES_OPS_CONFIG_INIT);
    expect_init(kvpages_block_selection KVPAGES_BLOCK_SELECTION_INIT);
    expect_init(kvpages_kv_write KVPAGES_KV_WRITE_INIT);
    expect_init(kvpages_kv_gather KVPAGES_KV_GATHER_INIT);
    expect_init(kvpages_descriptor_config KVPAGES_DESCRIPTOR_CONFIG_INIT);
    expect_init(kvpages_descriptor_info KVPAGES_DESCRIPTOR_INFO_INIT);
    expect_init(kvpages_described_group KVPAGES_DESCRIBED_GROUP_INIT);
    expect_init(kvpages_described_layer KVPAGES_DESCRIBED_LAYER_INIT);
    expect_init(kvpages_described_state KVPAGES_DESCRIBED_STATE_INIT);
    expect_init(kvpages_reshard_config KVPAGES_RESHARD_CONFIG_INIT);
}

TEST(Abi, StatusNames) {
    struct Name {
        std::int32_t number;
        const char* name;
    };
    for (const Name& given :
         {Name{0, "OK"}, Name{-1, "NULL_ARGUMENT"}, Name{-2, "INVALID_ARGUMENT"},
          Name{-3, "NOT_FOUND"}, Name{-4, "BUFFER_TOO_SMALL"}, Name{-5, "CONTRACT_BROKEN"},
          Name{-6, "UNSUPPORTED"}, Name{-7, "STOPPED"}, Name{-20, "DOES_NOT_FIT"},
          Name{-21, "OUT_OF_HOST_MEMORY"}, Name{-22, "OUT_OF_DEVICE_MEMORY"},
          Name{-40, "DEVICE_UNAVAILABLE"}, Name{-99, "POISONED"}, Name{-100, "INTERNAL"},
          Name{1, "UNKNOWN"}, Name{-8, "UNKNOWN"}, Name{INT32_MIN, "UNKNOWN"}}) {
        EXPECT_STREQ(kvpages_status_name(given.number), given.name);
    }
}

TEST(Abi, Versions) {
    const std::string version = std::to_string(KVPAGES_VERSION_MAJOR) + "." +
                                std::to_string(KVPAGES_VERSION_MINOR) + "." +
                                std::to_string(KVPAGES_VERSION_PATCH);
    EXPECT_EQ(kvpages_version(), version);
    EXPECT_EQ(kvpages_abi_version(), 0u);
}

TEST(Abi, ElementTypes) {
    const std::uint64_t bytes[]{0, 8, 4, 2, 2, 1, 1, 2, 4, 8, 1, 1, 1, 1, 1, 1};
    std::set<std::string> names;
    for (std::uint32_t dtype = 1; dtype <= 15; ++dtype) {
        EXPECT_EQ(kvpages_dtype_bytes(dtype), bytes[dtype]) << dtype;
        EXPECT_STRNE(kvpages_dtype_name(dtype), "");
        names.insert(kvpages_dtype_name(dtype));
    }
    EXPECT_EQ(names.size(), 15u);
    EXPECT_STREQ(kvpages_dtype_name(KVPAGES_DTYPE_BF16), "bfloat16");
}

TEST(Abi, CacheDtypeStrings) {
    struct Mode {
        const char* text;
        std::uint32_t mode;
    };
    for (const Mode& given :
         {Mode{"auto", KVPAGES_QUANT_MODE_NONE}, Mode{"bfloat16", KVPAGES_QUANT_MODE_NONE},
          Mode{"", KVPAGES_QUANT_MODE_NONE}, Mode{"fp8", KVPAGES_QUANT_MODE_FP8_PER_TENSOR},
          Mode{"fp8_e4m3", KVPAGES_QUANT_MODE_FP8_PER_TENSOR},
          Mode{"fp8_ds_mla", KVPAGES_QUANT_MODE_FP8_PER_TENSOR},
          Mode{"fp8_per_token_head", KVPAGES_QUANT_MODE_FP8_PER_TOKEN_HEAD},
          Mode{"int8_per_token_head", KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD},
          Mode{"int4_per_token_head", KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD},
          Mode{"nvfp4", KVPAGES_QUANT_MODE_NVFP4}, Mode{"FP8", KVPAGES_QUANT_MODE_NONE}}) {
        std::uint32_t mode = 77;
        EXPECT_EQ(kvpages_quant_mode_from_cache_dtype(given.text, &mode), KVPAGES_STATUS_OK);
        EXPECT_EQ(mode, given.mode) << given.text;
    }
}
