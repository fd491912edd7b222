#include "model.h"

#include "quant.h"

#include <stdexcept>
#include <string>

namespace smollm {
namespace {

[[noreturn]] void fail(const GgufFile& file, const std::string& fault) {
    throw std::runtime_error(file.path() + ": " + fault);
}

std::size_t read_size(const GgufFile& file, const std::string& key) {
    const std::uint64_t value = file.uint(key);
    // Far beyond any model, and small enough for products of a few to be exact.
    if (value == 0 || value >= 1u << 20) {
        fail(file, key + " is " + std::to_string(value) + ", not a size this engine believes");
    }
    return static_cast<std::size_t>(value);
}

std::size_t read_size_or(const GgufFile& file, const std::string& key, std::size_t otherwise) {
    return file.has(key) ? read_size(file, key) : otherwise;
}

ModelConfig read_config(const GgufFile& file) {
    const std::string_view architecture = file.string("general.architecture");
    if (architecture != "llama") {
        fail(file, "its architecture is " + std::string(architecture) + ", not llama");
    }
    // These change what is computed, and without them the file would seem to work.
    for (const char* key : {"llama.rope.scaling.type", "llama.expert_count"}) {
        if (file.has(key)) fail(file, std::string("has ") + key + ", which is not supported");
    }

    ModelConfig config{};
    config.num_layers = read_size(file, "llama.block_count");
    config.num_heads = read_size(file, "llama.attention.head_count");
    config.num_kv_heads =
        read_size_or(file, "llama.attention.head_count_kv", config.num_heads);
    config.hidden_size = read_size(file, "llama.embedding_length");
    config.ffn_size = read_size(file, "llama.feed_forward_length");
    config.context_length = read_size(file, "llama.context_length");
    config.head_size = read_size_or(file, "llama.attention.key_length",
                                    config.hidden_size / config.num_heads);
    config.vocab_size = static_cast<std::size_t>(file.tensor("token_embd.weight").num_rows());
    config.rope_base = file.has("llama.rope.freq_base")
                           ? static_cast<float>(file.number("llama.rope.freq_base"))
                           : 10000.0f;
    config.rms_eps = static_cast<float>(file.number("llama.attention.layer_norm_rms_epsilon"));

    if (config.num_heads % config.num_kv_heads != 0) {
        fail(file, std::to_string(config.num_heads) + " query heads cannot share " +
                       std::to_string(config.num_kv_heads) + " key-value heads");
    }
    // Attention multiplies whole lanes, and would read past the end of other heads.
    if (config.head_size == 0 || config.head_size % kNumLanes != 0) {
        fail(file, "heads of " + std::to_string(config.head_size) + ", not of a multiple of " +
                       std::to_string(kNumLanes));
    }
    for (const char* key : {"llama.attention.value_length", "llama.rope.dimension_count"}) {
        const std::size_t size = read_size_or(file, key, config.head_size);
        if (size != config.head_size) {
            fail(file, std::string(key) + " is " + std::to_string(size) + ", but heads have " +
                           std::to_string(config.head_size));
        }
    }
    return config;
}

/// A matrix that makes `num_rows` numbers of `num_columns`.
const GgufTensor& find_weights(const GgufFile& file, const std::string& name,
                               std::size_t num_rows, std::size_t num_columns) {
    const GgufTensor& tensor = file.tensor(name);
    if (tensor.num_rows() != num_rows || tensor.num_columns() != num_columns) {
        fail(file, "tensor " + name + " is " + std::to_string(tensor.num_rows()) + " x " +
                       std::to_string(tensor.num_columns()) + ", not " +
                       std::to_string(num_rows) + " x " + std::to_string(num_columns));
    }
    if (num_columns % kNumLanes != 0) {
        fail(file, "tensor " + name + " has " + std::to_string(num_columns) +
                       " columns, not a multiple of " + std::to_string(kNumLanes));
    }
    return tensor;
}

std::vector<float> load_vector(const GgufFile& file, const std::string& name, std::size_t size) {
    const GgufTensor& tensor = find_weights(file, name, 1, size);
    std::vector<float> vector(size);
    dequantise_row(tensor, 0, vector.data());
    return vector;
}

}  // namespace

Model::Model(const GgufFile& file, ThreadPool& threads)
    : config_(read_config(file)),
      threads_(threads),
      rope_(config_.head_size, config_.rope_base),
      embedding_(&find_weights(file, "token_embd.weight", config_.vocab_size, config_.hidden_size)),
      output_norm_(load_vector(file, "output_norm.weight", config_.hidden_size)),
      output_(embedding_) {
    for (std::size_t layer = 0; layer < config_.num_layers; ++layer) {
        layers_.push_back(load_layer(file, layer));
    }
    if (file.has_tensor("output.weight")) {
        output_ = &find_weights(file, "output.weight", config_.vocab_size, config_.hidden_size);
    }
    if (file.has_tensor("rope_freqs.weight")) {
        fail(file, "has the tensor rope_freqs.weight, which is not supported");
    }
}

Model::Layer Model::load_layer(const GgufFile& file, std::size_t number) const {
    const std::string prefix = "blk." + std::to_string(number) + ".";
    const std::size_t hidden_size = config_.hidden_size;
    const std::size_t query_size = config_.num_heads * config_.head_size;
    const std::size_t kv_size = config_.num_kv_heads * config_.head_size;
    const auto weights = [&](const char* name, std::size_t num_rows, std::size_t num_columns) {
        return &find_weights(file, prefix + name, num_rows, num_columns);
    };
    Layer layer;
    layer.attention_norm = load_vector(file, prefix + "attn_norm.weight", hidden_size);
    layer.query = weights("attn_q.weight", query_size, hidden_size);
    layer.key = weights("attn_k.weight", kv_size, hidden_size);
    layer.value = weights("attn_v.weight", kv_size, hidden_size);
    layer.attention_output = weights("attn_output.weight", hidden_size, query_size);
    layer.ffn_norm = load_vector(file, prefix + "ffn_norm.weight", hidden_size);
    layer.gate = weights("ffn_gate.weight", config_.ffn_size, hidden_size);
    layer.up = weights("ffn_up.weight", config_.ffn_size, hidden_size);
    layer.down = weights("ffn_down.weight", hidden_size, config_.ffn_size);
    return layer;
}

void Model::forward(const std::vector<std::int32_t>& tokens,
                    const std::vector<std::int64_t>& positions,
                    const std::vector<std::size_t>& wanted, AttentionLayers& attention,
                    std::vector<float>& logits) {
    require_valid(tokens, positions, wanted);
    embed(tokens, positions);
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
        run_attention(layer, attention);
        run_ffn(layers_[layer]);
    }
    predict(wanted, logits);
}

void Model::require_valid(const std::vector<std::int32_t>& tokens,
                          const std::vector<std::int64_t>& positions,
                          const std::vector<std::size_t>& wanted) const {
    const auto require = [](bool is_true, const char* fault, auto value) {
        if (!is_true) throw std::invalid_argument(fault + std::to_string(value));
    };
    require(positions.size() == tokens.size(), "positions are not as many as tokens: ",
            positions.size());
    for (const std::int32_t token : tokens) {
        require(token >= 0 && static_cast<std::size_t>(token) < config_.vocab_size,
                "no such token: ", token);
    }
    for (const std::int64_t position : positions) {
        require(position >= 0 && static_cast<std::size_t>(position) < config_.context_length,
                "not a position in the context of this model: ", position);
    }
    for (const std::size_t index : wanted) {
        require(index < tokens.size(), "logits are wanted of a token that is not there: ", index);
    }
}

void Model::embed(const std::vector<std::int32_t>& tokens,
                  const std::vector<std::int64_t>& positions) {
    num_tokens_ = tokens.size();
    residual_.resize(num_tokens_ * config_.hidden_size);
    rotations_.resize(num_tokens_ * config_.head_size);
    for_each_token([&](std::size_t token) {
        dequantise_row(*embedding_, static_cast<std::uint64_t>(tokens[token]),
                       &residual_[token * config_.hidden_size]);
        rope_.make_rotation(positions[token], &rotations_[token * config_.head_size]);
    });
}

void Model::run_attention(std::size_t number, AttentionLayers& attention) {
    const Layer& layer = layers_[number];
    const std::size_t query_size = config_.num_heads * config_.head_size;
    const std::size_t kv_size = config_.num_kv_heads * config_.head_size;
    queries_.resize(num_tokens_ * query_size);
    keys_.resize(num_tokens_ * kv_size);
    values_.resize(num_tokens_ * kv_size);
    attended_.resize(num_tokens_ * query_size);

    norm(layer.attention_norm);
    matmul(*layer.query, normed_.data(), num_tokens_, queries_.data(), threads_);
    matmul(*layer.key, normed_.data(), num_tokens_, keys_.data(), threads_);
    matmul(*layer.value, normed_.data(), num_tokens_, values_.data(), threads_);
    for_each_token([&](std::size_t token) {
        const float* rotation = &rotations_[token * config_.head_size];
        rope_.rotate(rotation, config_.num_heads, &queries_[token * query_size]);
        rope_.rotate(rotation, config_.num_kv_heads, &keys_[token * kv_size]);
    });
    attention.run(number, queries_.data(), keys_.data(), values_.data(), attended_.data());
    add_product(*layer.attention_output, attended_);
}

void Model::run_ffn(const Layer& layer) {
    const std::size_t ffn_size = config_.ffn_size;
    gate_.resize(num_tokens_ * ffn_size);
    up_.resize(num_tokens_ * ffn_size);

    norm(layer.ffn_norm);
    matmul(*layer.gate, normed_.data(), num_tokens_, gate_.data(), threads_);
    matmul(*layer.up, normed_.data(), num_tokens_, up_.data(), threads_);
    for_each_token([&](std::size_t token) {
        swiglu(&gate_[token * ffn_size], &up_[token * ffn_size], ffn_size);
    });
    add_product(*layer.down, gate_);
}

void Model::predict(const std::vector<std::size_t>& wanted, std::vector<float>& logits) {
    const std::size_t hidden_size = config_.hidden_size;
    normed_.resize(wanted.size() * hidden_size);
    for (std::size_t i = 0; i < wanted.size(); ++i) {
        rms_norm(&residual_[wanted[i] * hidden_size], output_norm_, config_.rms_eps,
                 &normed_[i * hidden_size]);
    }
    logits.resize(wanted.size() * config_.vocab_size);
    matmul(*output_, normed_.data(), wanted.size(), logits.data(), threads_);
}

void Model::add_product(const GgufTensor& weights, const AlignedFloats& input) {
    product_.resize(residual_.size());
    matmul(weights, input.data(), num_tokens_, product_.data(), threads_);
    add(residual_.data(), product_.data(), residual_.size());
}

void Model::norm(const std::vector<float>& weights) {
    normed_.resize(residual_.size());
    for_each_token([&](std::size_t token) {
        const std::size_t at = token * config_.hidden_size;
        rms_norm(&residual_[at], weights, config_.rms_eps, &normed_[at]);
    });
}

template <class F>
void Model::for_each_token(const F& body) {
    threads_.run(num_tokens_, [&](std::size_t begin, std::size_t end) {
        for (std::size_t token = begin; token < end; ++token) body(token);
    });
}

}  // namespace smollm
