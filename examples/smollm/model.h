// The transformer: from tokens to logits, but for what attention reads of earlier tokens.
#pragma once

#include "gguf.h"
#include "math.h"
#include "threads.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace smollm {

struct ModelConfig {
    std::size_t num_layers;
    std::size_t num_heads;
    std::size_t num_kv_heads;
    std::size_t head_size;
    std::size_t hidden_size;
    std::size_t ffn_size;
    std::size_t vocab_size;
    std::size_t context_length;
    float rope_base;
    float rms_eps;
};

/// Attention, which knows where keys and values of earlier tokens are kept.
class AttentionLayers {
public:
    virtual ~AttentionLayers() = default;

    /// Called for each layer in turn. All arrays have a row for each token of the step: those of
    /// `queries` and `out` have `num_heads * head_size` numbers, those of `keys` and `values`
    /// `num_kv_heads * head_size`. Queries and keys are rotated already.
    virtual void run(std::size_t layer, const float* queries, const float* keys,
                     const float* values, float* out) = 0;
};

/// A model of the llama architecture. Its weights stay in the file, which must outlive it.
class Model {
public:
    Model(const GgufFile& file, ThreadPool& threads);

    const ModelConfig& config() const { return config_; }

    /// Runs tokens of any sequences, each at its position. `logits` gets a row of `vocab_size`
    /// for each index into `tokens` that is in `wanted`. One call at a time.
    void forward(const std::vector<std::int32_t>& tokens,
                 const std::vector<std::int64_t>& positions,
                 const std::vector<std::size_t>& wanted, AttentionLayers& attention,
                 std::vector<float>& logits);

private:
    struct Layer {
        std::vector<float> attention_norm;
        const GgufTensor* query;
        const GgufTensor* key;
        const GgufTensor* value;
        const GgufTensor* attention_output;
        std::vector<float> ffn_norm;
        const GgufTensor* gate;
        const GgufTensor* up;
        const GgufTensor* down;
    };

    Layer load_layer(const GgufFile& file, std::size_t number) const;
    void require_valid(const std::vector<std::int32_t>& tokens,
                       const std::vector<std::int64_t>& positions,
                       const std::vector<std::size_t>& wanted) const;
    void embed(const std::vector<std::int32_t>& tokens, const std::vector<std::int64_t>& positions);
    void run_attention(std::size_t layer, AttentionLayers& attention);
    void run_ffn(const Layer& layer);
    void predict(const std::vector<std::size_t>& wanted, std::vector<float>& logits);

    /// Adds the product to the residual stream.
    void add_product(const GgufTensor& weights, const AlignedFloats& input);
    /// Norms the residual stream into `normed_`.
    void norm(const std::vector<float>& weights);
    template <class F>
    void for_each_token(const F& body);

    ModelConfig config_;
    ThreadPool& threads_;
    Rope rope_;
    const GgufTensor* embedding_;
    std::vector<Layer> layers_;
    std::vector<float> output_norm_;
    const GgufTensor* output_;

    // Of the tokens of a step; kept so that most steps allocate nothing.
    std::size_t num_tokens_ = 0;
    AlignedFloats residual_, normed_, product_, rotations_;
    AlignedFloats queries_, keys_, values_, attended_, gate_, up_;
};

}  // namespace smollm
