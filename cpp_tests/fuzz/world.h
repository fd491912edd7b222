// Specs, backends, models and configurations out of a fuzzer's bytes: mostly such as engines have, now
// and then with numbers that nobody has.
#ifndef KVPAGES_CPP_TESTS_FUZZ_WORLD_H
#define KVPAGES_CPP_TESTS_FUZZ_WORLD_H

#include <fuzzer/FuzzedDataProvider.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "support/api.h"

namespace fuzz {

using Bytes = FuzzedDataProvider;

// Mostly at most `most`, at times any number.
inline std::uint64_t number(Bytes& bytes, std::uint64_t most) {
    if (bytes.ConsumeIntegral<std::uint8_t>() >= 8) {
        return bytes.ConsumeIntegralInRange<std::uint64_t>(0, most);
    }
    constexpr std::array<std::uint64_t, 6> far{
        UINT64_MAX, UINT64_MAX - 1, std::uint64_t{1} << 63, INT64_MAX, std::uint64_t{1} << 32, 0};
    return bytes.ConsumeBool() ? bytes.PickValueInArray(far) : bytes.ConsumeIntegral<std::uint64_t>();
}

// A power of two up to 2^`most`, at times any number.
inline std::uint64_t power(Bytes& bytes, unsigned most) {
    if (bytes.ConsumeIntegral<std::uint8_t>() < 16) {
        return number(bytes, std::uint64_t{1} << most);
    }
    return std::uint64_t{1} << bytes.ConsumeIntegralInRange<unsigned>(0, most);
}

// The arrays that a spec points to.
struct Spec {
    kvpages_spec spec = KVPAGES_SPEC_INIT;
    std::vector<std::uint32_t> dtypes, ndims;
    std::vector<std::uint64_t> dims;

    Spec() = default;
    Spec(Spec&&) = default;
    Spec(const Spec&) = delete;
};

inline void make_state(Bytes& bytes, Spec& made) {
    const auto parts = bytes.ConsumeIntegralInRange<std::size_t>(0, 3);
    for (std::size_t part = 0; part < parts; ++part) {
        made.dtypes.push_back(bytes.ConsumeIntegralInRange<std::uint32_t>(0, 16));
        const auto ndim = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 3);
        made.ndims.push_back(ndim);
        for (std::uint32_t dim = 0; dim < ndim; ++dim) {
            made.dims.push_back(number(bytes, 40));
        }
    }
    made.spec.state_dtypes = made.dtypes.data();
    made.spec.num_state_dtypes = made.dtypes.size();
    made.spec.state_ndims = made.ndims.data();
    made.spec.num_state_shapes = made.ndims.size();
    made.spec.state_dims = made.dims.data();
    made.spec.num_state_dims = made.dims.size();
    made.spec.state_kind = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 7);
    made.spec.state_cache_mode = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 3);
    made.spec.num_speculative_blocks = bytes.ConsumeBool() ? 0 : number(bytes, 4);
}

// As engines have them, and small.
inline void make_plain(Bytes& bytes, kvpages_spec& spec) {
    constexpr std::array<std::uint32_t, 4> kinds{
        KVPAGES_SPEC_KIND_FULL_ATTENTION, KVPAGES_SPEC_KIND_SLIDING_WINDOW,
        KVPAGES_SPEC_KIND_CHUNKED_LOCAL, KVPAGES_SPEC_KIND_MLA};
    constexpr std::array<std::uint32_t, 4> dtypes{KVPAGES_DTYPE_F32, KVPAGES_DTYPE_F16,
                                                  KVPAGES_DTYPE_BF16, KVPAGES_DTYPE_U8};
    spec.kind = bytes.PickValueInArray(kinds);
    spec.dtype = bytes.PickValueInArray(dtypes);
    spec.block_size = std::uint64_t{4} << bytes.ConsumeIntegralInRange<unsigned>(0, 2);
    spec.num_kv_heads = spec.kind == KVPAGES_SPEC_KIND_MLA
                            ? 1
                            : bytes.ConsumeIntegralInRange<std::uint64_t>(1, 3);
    spec.head_size = std::uint64_t{8} << bytes.ConsumeIntegralInRange<unsigned>(0, 2);
    if (spec.kind == KVPAGES_SPEC_KIND_SLIDING_WINDOW) {
        spec.sliding_window = bytes.ConsumeIntegralInRange<std::uint64_t>(1, 40);
    }
    if (spec.kind == KVPAGES_SPEC_KIND_CHUNKED_LOCAL) {
        spec.attention_chunk_size = bytes.ConsumeIntegralInRange<std::uint64_t>(1, 40);
    }
    if (spec.dtype == KVPAGES_DTYPE_U8) {
        spec.quant_mode = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 5);
    }
    spec.flags = KVPAGES_SPEC_INDEXES_KV_BY_BLOCK_STRIDE;
}

inline std::unique_ptr<Spec> make_spec(Bytes& bytes) {
    auto made = std::make_unique<Spec>();
    kvpages_spec& spec = made->spec;
    if (bytes.ConsumeBool()) {
        make_plain(bytes, spec);
        return made;
    }
    spec.kind = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 13);
    spec.block_size = power(bytes, 6);
    if (spec.kind == KVPAGES_SPEC_KIND_STATE) {
        make_state(bytes, *made);
    } else {
        spec.dtype = bytes.ConsumeIntegralInRange<std::uint32_t>(1, 15);
        spec.quant_mode = bytes.ConsumeBool() ? 0 : bytes.ConsumeIntegralInRange<std::uint32_t>(0, 6);
        spec.num_kv_heads = number(bytes, 4);
        spec.head_size = power(bytes, 6);
        spec.head_size_v = bytes.ConsumeBool() ? 0 : power(bytes, 6);
        spec.sliding_window = number(bytes, 100);
        spec.attention_chunk_size = number(bytes, 100);
        spec.tq_slot_bytes = bytes.ConsumeBool() ? 0 : number(bytes, 100);
        spec.sink_len = bytes.ConsumeBool() ? 0 : number(bytes, 8);
        spec.rswa_window = bytes.ConsumeBool() ? 0 : number(bytes, 100);
        spec.alignment_bytes = bytes.ConsumeBool() ? 0 : power(bytes, 9);
        spec.compress_ratio = bytes.ConsumeBool() ? 0 : power(bytes, 4);
    }
    spec.page_size_padded_bytes = bytes.ConsumeBool() ? 0 : number(bytes, 1 << 14);
    spec.flags = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 4);
    return made;
}

inline support::Backend make_backend(Bytes& bytes) {
    if (bytes.ConsumeBool()) {
        kvpages_backend* raw = nullptr;
        const bool made =
            ok(kvpages_backend_create_preset(bytes.ConsumeIntegralInRange<std::uint32_t>(0, 35), &raw));
        FUZZ_CHECK(made == (raw != nullptr));
        return support::Backend(raw);
    }
    constexpr std::array<const char*, 8> layouts{
        "block | token | head | kv*content", "block | head | token | kv*content",
        "kv | block | token | head | content", "block | kv | token | head | content",
        "block | token | content", "block | kv*head | token | content",
        "block | kv*token*head*content", "head | kv | block | content | token"};
    support::BackendOptions options;
    if (bytes.ConsumeBool()) {
        options.layout = layouts[bytes.ConsumeIntegralInRange<std::size_t>(0, 4)];
        return support::backend(options);
    }
    options.layout = bytes.PickValueInArray(layouts);
    const auto sizes = bytes.ConsumeIntegralInRange<std::size_t>(0, 3);
    options.multiples.clear();
    for (std::size_t i = 0; i < sizes; ++i) {
        (bytes.ConsumeBool() ? options.sizes : options.multiples).push_back(power(bytes, 6));
    }
    options.num_kv_heads = bytes.ConsumeBool() ? 0 : number(bytes, 4);
    options.alignment = bytes.ConsumeBool() ? 0 : power(bytes, 9);
    options.index_bits = bytes.ConsumeBool() ? 0 : 32;
    options.flags = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 8);
    kvpages_backend* raw = nullptr;
    const bool made = ok(support::try_backend(options, &raw));
    FUZZ_CHECK(made == (raw != nullptr));
    return support::Backend(raw);
}

// Up to `most` layers, of few kinds, that read their pages with few backends.
inline support::Model make_model(Bytes& bytes, std::size_t most) {
    std::vector<std::unique_ptr<Spec>> specs;
    std::vector<support::Backend> backends;
    const auto kinds = bytes.ConsumeIntegralInRange<std::size_t>(1, 5);
    for (std::size_t kind = 0; kind < kinds; ++kind) {
        specs.push_back(make_spec(bytes));
        backends.push_back(make_backend(bytes));
    }
    support::Model model = support::model();
    const auto layers = bytes.ConsumeIntegralInRange<std::size_t>(0, most);
    for (std::size_t layer = 0; layer < layers; ++layer) {
        const auto kind = bytes.ConsumeIntegralInRange<std::size_t>(0, kinds - 1);
        const auto reader = bytes.ConsumeBool() ? kind
                                                : bytes.ConsumeIntegralInRange<std::size_t>(0, kinds - 1);
        const std::string name = "layers." + std::to_string(layer);
        std::string target;
        if (layer > 0 && bytes.ConsumeIntegral<std::uint8_t>() < 16) {
            target = "layers." + std::to_string(bytes.ConsumeIntegralInRange<std::size_t>(0, layer));
        }
        ok(support::try_add(model, name, target.empty() ? &specs[kind]->spec : nullptr,
                            backends[reader].get(), target.empty() ? nullptr : target.c_str(),
                            bytes.ConsumeIntegralInRange<std::uint32_t>(0, 8)));
    }
    return model;
}

inline kvpages_plan_config make_config(Bytes& bytes) {
    kvpages_plan_config config = KVPAGES_PLAN_CONFIG_INIT;
    config.policy = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 2);
    // Each of the flags seldom, but for a number of blocks, without which nothing small is planned.
    for (const int flag : {KVPAGES_PLAN_AUTO_FIT, KVPAGES_PLAN_HYBRID_MANAGER_OFF,
                           KVPAGES_PLAN_CROSS_LAYER_BLOCKS, KVPAGES_PLAN_DRAFT_LAYERS}) {
        const bool is_set = bytes.ConsumeIntegral<std::uint8_t>() < 40;
        config.flags |= is_set ? static_cast<std::uint32_t>(flag) : 0u;
    }
    if (bytes.ConsumeBool()) {
        config.flags |= KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
        config.num_blocks_override = number(bytes, 6);
    }
    config.max_model_len = number(bytes, 200);
    config.context_parallel_size = bytes.ConsumeBool() ? 0 : number(bytes, 3);
    config.max_tokens_in_flight = number(bytes, 64);
    config.max_encoder_tokens = number(bytes, 64);
    config.reserved_blocks = bytes.ConsumeBool() ? 1 : number(bytes, 2);
    config.state_cache_mode = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 3);
    config.typical_len = bytes.ConsumeBool() ? 0 : number(bytes, 200);
    config.choose_block_sizes = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 1);
    return config;
}

inline std::int64_t make_memory(Bytes& bytes) {
    if (bytes.ConsumeIntegral<std::uint8_t>() < 8) {
        return bytes.ConsumeIntegral<std::int64_t>();
    }
    return bytes.ConsumeIntegralInRange<std::int64_t>(0, 1 << 20);
}

}  // namespace fuzz

#endif
