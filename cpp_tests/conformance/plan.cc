// plan.json: layers and memory of all workers to groups, tensors and numbers of blocks.
#include "category.h"
#include "config.h"
#include "library.h"
#include "spec.h"

namespace conformance {
namespace {

kvpages_plan_config plan_config(const Json& config) {
    auto out = sized<kvpages_plan_config>();
    out.policy = KVPAGES_POLICY_REFERENCE;
    out.max_model_len = config.at("max_model_len");
    out.context_parallel_size = context_parallel_size(config);
    out.max_tokens_in_flight = tokens_in_flight(config);
    out.max_encoder_tokens = config.at("max_num_encoder_input_tokens");
    out.state_cache_mode = state_cache_mode(config.at("mamba_cache_mode"));
    const auto add_flag_if = [&](bool condition, std::uint32_t flag) {
        out.flags |= condition ? flag : 0u;
    };
    const Json& original_len = config.at("original_max_model_len");
    if (!original_len.is_null() && original_len != -1) {
        throw Inexpressible("config.original_max_model_len: is neither null nor -1");
    }
    add_flag_if(original_len == -1, KVPAGES_PLAN_AUTO_FIT);
    add_flag_if(config.at("disable_hybrid_kv_cache_manager"), KVPAGES_PLAN_HYBRID_MANAGER_OFF);
    add_flag_if(config.at("enable_cross_layers_blocks"), KVPAGES_PLAN_CROSS_LAYER_BLOCKS);
    add_flag_if(config.at("use_eagle"), KVPAGES_PLAN_DRAFT_LAYERS);
    const Json& override_blocks = config.at("num_gpu_blocks_override");
    add_flag_if(!override_blocks.is_null(), KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS);
    if (!override_blocks.is_null()) {
        out.num_blocks_override = override_blocks;
    }
    return out;
}

ModelHandle build_model(const Json& layers, const std::vector<Spec>& specs) {
    kvpages_model* raw = nullptr;
    check(kvpages_model_create(&raw));
    ModelHandle model(raw);
    for (const Json& pair : layers) {
        const std::string name = pair[0];
        const std::size_t index = pair[1];
        if (index >= specs.size()) {
            throw Inexpressible("workers: layer " + name + " has a spec beyond the table");
        }
        const kvpages_spec spec = specs[index].c();
        auto layer = sized<kvpages_layer>();
        layer.name = name.c_str();
        layer.spec = &spec;
        check(kvpages_model_add_layer(model.get(), &layer));
    }
    return model;
}

Json group_spec(const kvpages_plan* plan, std::size_t worker, std::size_t group) {
    auto spec = sized<kvpages_spec>();
    check(kvpages_plan_get_group_spec(plan, worker, group, 0, &spec, nullptr));
    return spec_object(spec);
}

Json set_spec(const kvpages_plan* plan, std::size_t worker, std::size_t group,
              const kvpages_group_info& info) {
    Json layers = Json::array();
    for (std::size_t i = 0; i < info.num_specs; ++i) {
        auto spec = sized<kvpages_spec>();
        const char* name = nullptr;
        check(kvpages_plan_get_group_spec(plan, worker, group, i, &spec, &name));
        layers.push_back({text(name), spec_object(spec)});
    }
    return {{"type", "uniform_type"}, {"block_size", info.block_size}, {"layers", layers}};
}

kvpages_group_info group_info(const kvpages_plan* plan, std::size_t worker, std::size_t group) {
    auto info = sized<kvpages_group_info>();
    check(kvpages_plan_get_group(plan, worker, group, &info));
    return info;
}

Json group_object(const kvpages_plan* plan, std::size_t worker, std::size_t group) {
    const kvpages_group_info info = group_info(plan, worker, group);
    Json names = Json::array();
    for (std::size_t i = 0; i < info.num_layers; ++i) {
        names.push_back(text(kvpages_plan_group_layer_name(plan, worker, group, i)));
    }
    return {{"layer_names", names},
            {"spec", info.is_set != 0 ? set_spec(plan, worker, group, info)
                                      : group_spec(plan, worker, group)},
            {"is_eagle_group", info.is_draft != 0}};
}

Json tensor_object(const kvpages_plan* plan, std::size_t worker, std::size_t tensor) {
    auto info = sized<kvpages_tensor_info>();
    check(kvpages_plan_get_tensor(plan, worker, tensor, &info));
    Json names = Json::array();
    for (std::size_t i = 0; i < info.num_layers; ++i) {
        names.push_back(text(kvpages_plan_tensor_layer_name(plan, worker, tensor, i)));
    }
    return {{"size", info.size_bytes},
            {"shared_by", names},
            {"offset", info.offset_bytes},
            {"block_stride", info.block_stride_bytes}};
}

kvpages_worker_info worker_info(const kvpages_plan* plan, std::size_t worker) {
    auto info = sized<kvpages_worker_info>();
    check(kvpages_plan_get_worker(plan, worker, &info));
    return info;
}

Json worker_object(const kvpages_plan* plan, std::size_t worker) {
    const kvpages_worker_info info = worker_info(plan, worker);
    Json tensors = Json::array();
    for (std::size_t i = 0; i < info.num_tensors; ++i) {
        tensors.push_back(tensor_object(plan, worker, i));
    }
    Json groups = Json::array();
    Json row_blocks = Json::array();
    for (std::size_t i = 0; i < info.num_groups; ++i) {
        groups.push_back(group_object(plan, worker, i));
        row_blocks.push_back(group_info(plan, worker, i).row_blocks);
    }
    Json object = {{"num_blocks", info.num_blocks}, {"tensors", tensors}, {"groups", groups}};
    if (info.num_groups > 0) {
        object["capacity_tokens"] = info.capacity_tokens;
        object["max_concurrency"] = info.max_concurrency;
        object["max_num_blocks_per_req"] = row_blocks;
        object["max_memory_usage_bytes"] = info.bytes_per_request;
        object["pool_bytes_per_block"] = info.bytes_per_block;
    }
    return object;
}

// What the scheduler plans with: the first worker's groups, each with one spec.
Json scheduler_object(const kvpages_plan* plan) {
    const kvpages_worker_info info = worker_info(plan, 0);
    Json specs = Json::array();
    for (std::size_t i = 0; i < info.num_groups; ++i) {
        specs.push_back(group_spec(plan, 0, i));
    }
    return {{"num_blocks", info.num_blocks}, {"group_specs", specs}};
}

Json block_sizes(const kvpages_plan* plan, const Json& config) {
    auto given = sized<kvpages_block_size_config>();
    given.cache_block_size = config.at("cache_block_size");
    const Json& unit = config.at("prefix_match_unit");
    if (!unit.is_null() && unit == 0) {
        throw Inexpressible("config.prefix_match_unit of 0 cannot be told from none");
    }
    given.prefix_match_unit = unit.is_null() ? 0 : unit.get<std::uint64_t>();
    // Cross-layer blocks come with a KV connector, which hashes blocks too.
    const bool hashes = config.at("enable_prefix_caching").get<bool>() ||
                        config.at("enable_cross_layers_blocks").get<bool>();
    given.hashes_blocks = hashes ? 1 : 0;
    std::uint64_t scheduler = 0;
    std::uint64_t hash = 0;
    try {
        check(kvpages_plan_resolve_block_sizes(plan, &given, &scheduler, &hash));
    } catch (const LibraryError& error) {
        return error.outcome();
    }
    return {{"scheduler_block_size", scheduler}, {"hash_block_size", hash}};
}

Json run_plan(const Json& input) {
    const kvpages_plan_config config = plan_config(input.at("config"));
    std::vector<Spec> specs;
    for (const Json& spec : input.at("specs")) {
        specs.emplace_back(spec);
    }
    std::vector<ModelHandle> models;
    std::vector<kvpages_worker> workers;
    for (const Json& worker : input.at("workers")) {
        models.push_back(build_model(worker.at("layers"), specs));
        workers.push_back({models.back().get(), worker.at("available_memory")});
    }
    kvpages_plan* raw = nullptr;
    check(kvpages_plan_create(&config, workers.data(), workers.size(), &raw, nullptr));
    const PlanHandle plan(raw);

    Json configs = Json::array();
    for (std::size_t i = 0; i < kvpages_plan_num_workers(plan.get()); ++i) {
        configs.push_back(worker_object(plan.get(), i));
    }
    return {{"fitted_max_model_len", kvpages_plan_max_model_len(plan.get())},
            {"configs", configs},
            {"scheduler", scheduler_object(plan.get())},
            {"block_sizes", block_sizes(plan.get(), input.at("config"))}};
}

}  // namespace

Category plan_category() {
    return {
        {"",
         {Schema(R"({
              "config": {
                  "max_model_len": "uint", "original_max_model_len": "int|null",
                  "dcp_size": "uint", "max_num_batched_tokens": "uint",
                  "max_concurrent_batches": "uint", "max_num_encoder_input_tokens": "uint",
                  "mamba_cache_mode": "string", "disable_hybrid_kv_cache_manager": "bool",
                  "num_gpu_blocks_override": "uint|null", "enable_cross_layers_blocks": "bool",
                  "use_eagle": "bool", "cache_block_size": "uint", "enable_prefix_caching": "bool",
                  "prefix_match_unit": "uint|null"},
              "specs": ["spec"],
              "workers": [{"layers": [["string", "uint"]], "available_memory": "int"}]})"),
          Schema::of_expectation(R"({
              "fitted_max_model_len": "uint",
              "configs": [{
                  "num_blocks": "uint",
                  "tensors": [{"size": "uint", "shared_by": ["string"], "offset": "uint",
                               "block_stride": "uint"}],
                  "groups": [{"layer_names": ["string"], "spec": "spec",
                              "is_eagle_group": "bool"}],
                  "capacity_tokens?": "uint", "max_concurrency?": "number",
                  "max_num_blocks_per_req?": ["uint"], "max_memory_usage_bytes?": "uint",
                  "pool_bytes_per_block?": "uint"}],
              "scheduler": {"num_blocks": "uint", "group_specs": ["spec"]},
              "block_sizes": {"scheduler_block_size": "uint", "hash_block_size": "uint"}})"),
          run_plan, normalise_specs}},
    };
}

}  // namespace conformance
