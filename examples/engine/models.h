// Three published models as an engine would describe them, with the numbers of their config.json
// files, and a small one for each way of storing keys and values.
#pragma once

#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace engine {

/// How a cache stores keys and values.
struct CacheFormat {
    std::string name;
    kvpages::Dtype dtype = kvpages::Dtype::bf16;
    kvpages::QuantMode quant_mode = kvpages::QuantMode::none;
    float scale = 1;            ///< a stored fp8 number times this is the number meant
    /// Of numbers from -1 to 1 that are stored and read. 0: they are rounded to dtype before, so
    /// that there is none.
    float largest_error = 0;
};

/// What the engine itself remembers of a layer. A state layer has no heads.
struct Layer {
    std::string name;
    std::string kind;
    std::uint64_t num_query_heads = 0;
    std::uint64_t num_kv_heads = 0;
    std::uint64_t head_size = 0;
    std::uint64_t sliding_window = 0;  ///< 0: all earlier tokens

    bool is_state() const { return num_query_heads == 0; }
};

struct EngineModel {
    std::string name;
    kvpages::Model model;
    std::vector<Layer> layers;
    kvpages::PlanConfig plan_config;
    CacheFormat format;
};

/// The published models cache bf16, and compare with memory that holds the same bf16 numbers: then
/// there is no error to allow for.
inline CacheFormat bf16_on_both_sides() { return {"bf16", kvpages::Dtype::bf16, {}, 1, 0}; }

inline kvpages::AttentionSpec attention_spec(const Layer& layer, std::uint64_t block_size,
                                             const CacheFormat& format = bf16_on_both_sides()) {
    kvpages::AttentionSpec spec;
    if (layer.sliding_window != 0) spec.kind = kvpages::AttentionKind::sliding_window;
    spec.dtype = format.dtype;
    spec.quant_mode = format.quant_mode;
    spec.block_size = block_size;
    spec.num_kv_heads = layer.num_kv_heads;
    spec.head_size = layer.head_size;
    spec.sliding_window = layer.sliding_window;
    return spec;
}

inline void add_attention(EngineModel& to, Layer layer, int index, std::uint64_t block_size,
                          const kvpages::Backend& backend) {
    layer.name = "model.layers." + std::to_string(index) + ".self_attn";
    to.model.add(layer.name, attention_spec(layer, block_size, to.format), backend,
                 static_cast<std::uint32_t>(layer.num_query_heads));
    to.layers.push_back(layer);
}

inline void add_state(EngineModel& to, int index, const kvpages::StateSpec& spec,
                      const kvpages::Backend& backend) {
    Layer layer;
    layer.name = "model.layers." + std::to_string(index) + ".linear_attn";
    layer.kind = "state";
    to.model.add(layer.name, spec, backend);
    to.layers.push_back(layer);
}

/// A budget that any laptop has. Host memory is taken from the system only where it is touched.
inline kvpages::PlanConfig laptop(std::uint64_t max_model_len) {
    kvpages::PlanConfig config;
    config.memory_bytes = std::int64_t{512} << 20;
    config.max_model_len = max_model_len;
    config.auto_fit = true;           // lower max_model_len to what fits
    config.max_tokens_in_flight = 256;
    config.reserved_blocks = 1;       // the null block is not for requests
    return config;
}

/// Kernels of the engine's own.
inline kvpages::Backend own_kernels() {
    kvpages::BackendConfig config;
    config.name = "EXAMPLE_ENGINE";
    config.layout = "kv | block | token | head | content";
    config.kernel_block_multiples = {16};
    config.alignment_bytes = 4;
    return kvpages::Backend(config);
}

/// Llama 3.1 8B: 32 layers that are all alike, read by kernels of the engine's own.
inline EngineModel llama_3_1_8b() {
    const kvpages::Backend backend = own_kernels();

    const Layer full{"", "full", 32, 8, 128, 0};
    EngineModel llama{"Llama 3.1 8B", {}, {}, laptop(131072), bf16_on_both_sides()};
    for (int i = 0; i < 32; ++i) add_attention(llama, full, i, 16, backend);
    return llama;
}

/// Gemma 4 26B-A4B: five sliding layers to each full one, which has fewer and wider heads. The full
/// layers project keys and values with one matrix, but both are stored: only keys are rotated.
inline EngineModel gemma_4_26b() {
    const kvpages::Backend triton = kvpages::Backend::preset(kvpages::Preset::triton_nhd);

    const Layer sliding{"", "sliding", 16, 8, 256, 1024};
    const Layer full{"", "full", 16, 2, 512, 0};
    EngineModel gemma{"Gemma 4 26B-A4B", {}, {}, laptop(262144), bf16_on_both_sides()};
    for (int i = 0; i < 30; ++i) add_attention(gemma, i % 6 == 5 ? full : sliding, i, 16, triton);
    return gemma;
}

/// A state of a gated delta net: the last inputs of its convolution, and the recurrent matrix.
inline kvpages::StateSpec gated_delta_net_state() {
    const std::uint64_t key_heads = 16, value_heads = 32, key_size = 128, value_size = 128;
    const std::uint64_t conv_kernel = 4;
    const std::uint64_t conv_width = 2 * key_heads * key_size + value_heads * value_size;
    kvpages::StateSpec spec;
    spec.kind = kvpages::StateKind::gated_delta_net;
    spec.add(kvpages::Dtype::bf16, {conv_kernel - 1, conv_width});
    spec.add(kvpages::Dtype::f32, {value_heads, key_size, value_size});
    return spec;
}

/// Qwen3.5 35B-A3B: three gated delta nets to each full attention layer.
inline EngineModel qwen_3_5_35b() {
    const kvpages::Backend attention = kvpages::Backend::preset(kvpages::Preset::flash_infer_hnd);
    const kvpages::Backend delta_net = kvpages::Backend::preset(kvpages::Preset::gated_delta_net);

    const Layer full{"", "full", 16, 2, 256, 0};
    EngineModel qwen{"Qwen3.5 35B-A3B", {}, {}, laptop(262144), bf16_on_both_sides()};
    kvpages::StateSpec state = gated_delta_net_state();
    const kvpages_hybrid_block block =
        kvpages::hybrid_block_size(attention_spec(full, 16), state, attention);
    // A state that is kept for one request only is one block long, however long the request.
    state.block_size = qwen.plan_config.max_model_len;
    state.page_size_padded_bytes = block.page_size_bytes;
    for (int i = 0; i < 40; ++i) {
        if (i % 4 == 3) {
            add_attention(qwen, full, i, block.block_size, attention);
        } else {
            add_state(qwen, i, state, delta_net);
        }
    }
    return qwen;
}

/// The formats that small_llama() is tried with. The errors are half a step between neighbours:
/// bf16 has 8 significant bits and e4m3 has 4, both coarsest from 1/2 to 1, and int8 has 127 steps
/// from 0 to the largest number of a token and head.
inline std::vector<CacheFormat> cache_formats() {
    using kvpages::Dtype;
    using kvpages::QuantMode;
    return {
        {"f32", Dtype::f32, QuantMode::none, 1, 0},
        {"bf16", Dtype::bf16, QuantMode::none, 1, 1.0f / 512},
        {"fp8 per tensor", Dtype::f8_e4m3fn, QuantMode::fp8_per_tensor, 1.0f / 256, 1.0f / 32},
        {"int8 per token-head", Dtype::i8, QuantMode::int8_per_token_head, 1, 0.5f / 127},
    };
}

/// Two layers in the shape of Llama.
inline EngineModel small_llama(const CacheFormat& format) {
    const kvpages::Backend backend = own_kernels();
    const Layer full{"", "full", 8, 2, 64, 0};
    EngineModel llama{format.name, {}, {}, laptop(4096), format};
    llama.plan_config.memory_bytes = std::int64_t{8} << 20;
    for (int i = 0; i < 2; ++i) add_attention(llama, full, i, 16, backend);
    return llama;
}

}  // namespace engine
