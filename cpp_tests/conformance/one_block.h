// Plans of one block, for cases that say which layers are in which group and nothing of memory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "json.h"
#include "library.h"

namespace conformance {

// A layer of such a plan.
struct OneBlockLayer {
    std::string name;
    const Json* spec = nullptr;     // of a layer that shares: its owner's
    std::string backend_name;       // the identity of the backend; empty: none
    const Json* sizes = nullptr;    // kernel blocks that the backend takes; null: all
    std::uint32_t num_heads = 0;
    std::string shares_with;        // empty: has pages of its own
    bool follows_block_stride = false;
};

// A plan and what it is made of.
struct OneBlockPlan {
    std::vector<BackendHandle> backends;
    ModelHandle model;
    PlanHandle plan;
};

BackendHandle one_block_backend(const OneBlockLayer& layer);

// Each owner gets a tensor of one page. Groups are lists of layer names.
OneBlockPlan one_block_plan(const std::vector<OneBlockLayer>& layers,
                            const std::vector<std::vector<std::string>>& groups);

// The group's kernel block size as case files say it.
Json kernel_block_size(const kvpages_plan* plan, std::size_t group);

}  // namespace conformance
