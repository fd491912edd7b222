// Spec objects of the case files, as the library's specs and back.
#pragma once

#include <kvpages/kvpages.h>

#include <string>
#include <vector>

#include "json.h"

namespace conformance {

// A spec with the strings and arrays that the library's struct points to. A uniform type becomes
// a spec of the kind that only sets report, which the library refuses as a layer.
class Spec {
public:
    explicit Spec(const Json& spec);

    void set_block_size(std::uint64_t block_size) { fields_.block_size = block_size; }

    // Points into this object.
    kvpages_spec c() const;

private:
    kvpages_spec fields_;
    std::string cache_dtype_;
    std::string model_version_;
    bool has_cache_dtype_ = false;
    bool has_model_version_ = false;
    std::vector<std::uint32_t> state_dtypes_;
    std::vector<std::uint32_t> state_ndims_;
    std::vector<std::uint64_t> state_dims_;
};

// Several specs, as the library takes them.
class SpecList {
public:
    void add(const Json& spec) { specs_.emplace_back(spec); }

    // Calls `function(pointers, count)`.
    template <typename Function>
    auto with_pointers(Function function) const {
        std::vector<kvpages_spec> structs;
        for (const Spec& spec : specs_) {
            structs.push_back(spec.c());
        }
        std::vector<const kvpages_spec*> pointers;
        for (const kvpages_spec& spec : structs) {
            pointers.push_back(&spec);
        }
        return function(pointers.data(), pointers.size());
    }

private:
    std::vector<Spec> specs_;
};

// The stored fields of a library spec.
Json spec_object(const kvpages_spec& spec);

// What case files call the kind of a single spec or of a set.
const char* reported_kind(std::uint32_t kind);

bool is_uniform_type(const Json& spec);
bool is_state(const Json& spec);
// One latent or hidden state instead of keys and values.
bool is_latent(const Json& spec);
// Only a window or a chunk of tokens stays stored.
bool is_windowed(const Json& spec);
// The window that the scheduler hears of: that of a sliding kind.
Json reported_window(const Json& spec);

std::uint32_t quant_mode(const std::string& name);
const char* quant_mode_name(std::uint32_t mode);
std::uint32_t state_cache_mode(const std::string& name);

// Of every spec object in an outcome: makes a null head_size_v the head_size, and for latents
// replaces the padding, which may come from a caller or an alignment, by the page it results in.
void normalise_specs(Json& outcome);

}  // namespace conformance
