// Which layers a views case has.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "json.h"

namespace conformance {

// What a case says about one layer, from wherever it says it. Points into the case.
struct Layer {
    std::string name;
    const Json* spec = nullptr;
    const Json* backend = nullptr;  // template
    const Json* shares_with = nullptr;
};

class Layers {
public:
    // Layers of the attention groups, then those that only a cache group or a share names.
    explicit Layers(const Json& input);

    const std::vector<Layer>& all() const { return layers_; }

    // Null when there is none.
    const Layer* find(const std::string& name) const;

private:
    void add_attention_group(const Json& input, const Json& group);
    void add_cache_group(const Json& group);
    void add_share(const Json& pair);
    Layer& get(const std::string& name);

    std::vector<Layer> layers_;
    std::map<std::string, std::size_t> index_;
};

}  // namespace conformance
