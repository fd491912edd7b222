// Attention groups and their builders: which layers are together, in which order builders are made
// and destroyed, and what a failing callback leaves behind.
#include <gtest/gtest.h>
#include <kvpages/kvpages.hpp>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "support/api.h"
#include "support/failure.h"

using namespace support;

namespace {

using Names = std::vector<std::string>;

struct AttentionHandle {
    using Owned =
        std::unique_ptr<kvpages_attention, Destroy<kvpages_attention, kvpages_attention_destroy>>;
};

// Builders that write down every call, and fail where they are told to.
class Engine {
public:
    kvpages_builder_callbacks callbacks() {
        kvpages_builder_callbacks made = KVPAGES_BUILDER_CALLBACKS_INIT;
        made.user = this;
        made.create = [](void* user, const kvpages_builder_info* info, void** out) {
            return static_cast<Engine*>(user)->create(*info, out);
        };
        made.graph_support = [](void* user, void* builder, std::uint32_t* out) {
            auto* engine = static_cast<Engine*>(user);
            if (engine->support_of.count(name_of(builder)) != 0) {
                *out = engine->support_of[name_of(builder)];
            }
            return engine->call("support", builder);
        };
        made.get_workspace = [](void* user, void* builder, void** out) {
            auto* engine = static_cast<Engine*>(user);
            if (engine->gives_workspace(name_of(builder))) *out = builder;
            return engine->call("get", builder);
        };
        made.set_workspace = [](void* user, void* builder, void* workspace) {
            auto* engine = static_cast<Engine*>(user);
            return engine->call("set " + name_of(workspace) + " to", builder);
        };
        made.build = [](void*, void*, const kvpages_common_metadata*, void*, void**) { return 0; };
        made.destroy = [](void* user, void* builder) {
            auto* engine = static_cast<Engine*>(user);
            engine->log.push_back("destroy " + name_of(builder));
            delete static_cast<std::string*>(builder);
            --engine->alive;
        };
        return made;
    }

    Names calls_of(const std::string& verb) const {
        Names found;
        for (const std::string& line : log) {
            if (line.rfind(verb + " ", 0) == 0) found.push_back(line.substr(verb.size() + 1));
        }
        return found;
    }

    Names log;
    int alive = 0;
    int fail_at = -1;  // the call that fails, counted from 0
    int calls = 0;
    Names givers;
    std::map<std::string, std::uint32_t> support_of;

private:
    static std::string name_of(void* builder) { return *static_cast<std::string*>(builder); }

    bool gives_workspace(const std::string& name) const {
        return std::find(givers.begin(), givers.end(), name) != givers.end();
    }

    std::int32_t create(const kvpages_builder_info& info, void** out) {
        const std::string name = std::to_string(info.cache_group) + "." +
                                 std::to_string(info.group) + "." + std::to_string(info.builder);
        log.push_back("create " + name);
        if (calls++ == fail_at) return -77;
        EXPECT_EQ(info.struct_size, sizeof(kvpages_builder_info));
        EXPECT_EQ(info.spec->block_size, info.kernel_block_size == 0 ? info.spec->block_size
                                                                     : info.kernel_block_size);
        *out = new std::string(name);
        ++alive;
        return 0;
    }

    std::int32_t call(const std::string& verb, void* builder) {
        log.push_back(verb + " " + name_of(builder));
        return calls++ == fail_at ? -77 : 0;
    }
};

AttentionHandle::Owned attention(const Plan& plan, kvpages_attention_config config) {
    kvpages_attention* raw = nullptr;
    must(kvpages_attention_create(plan.get(), &config, &raw));
    return AttentionHandle::Owned(raw);
}

AttentionHandle::Owned attention(const Plan& plan) {
    return attention(plan, KVPAGES_ATTENTION_CONFIG_INIT);
}

std::vector<std::vector<Names>> layers_of(const AttentionHandle::Owned& attention) {
    std::vector<std::vector<Names>> all;
    for (std::size_t c = 0; c < kvpages_attention_num_cache_groups(attention.get()); ++c) {
        all.emplace_back();
        for (std::size_t g = 0; g < kvpages_attention_num_groups(attention.get(), c); ++g) {
            all.back().emplace_back();
            Names& names = all.back().back();
            while (const char* name =
                       kvpages_attention_group_layer_name(attention.get(), c, g, names.size())) {
                names.push_back(name);
            }
        }
    }
    return all;
}

Backend named(const std::string& name, const std::vector<std::uint64_t>& sizes = {}) {
    BackendOptions options;
    options.name = name;
    options.layout = packed_nhd;
    options.sizes = sizes;
    if (!sizes.empty()) options.multiples.clear();
    return backend(options);
}

// Two cache groups (full and sliding), three attention groups, a layer that shares.
struct Two {
    Backend a = named("A");
    Backend b = named("B");
    Model model = support::model();
    Plan plan;

    Two() {
        const kvpages_spec of_full = full(16, 1, 8);
        const kvpages_spec of_sliding = sliding(32, 16, 1, 8);
        add(model, "full.0", of_full, a, 4);
        add(model, "sliding.0", of_sliding, a, 4);
        add(model, "full.1", of_full, b, 4);
        add(model, "sliding.1", of_sliding, a, 4);
        share(model, "shared", "sliding.0", b);
        plan = plan_of_blocks(model, 4);
    }
};

const std::vector<std::vector<Names>> all_of_two{{{"full.0"}, {"full.1"}},
                                                 {{"sliding.0", "sliding.1"}, {"shared"}}};

TEST(Attention, S12_QueryHeadsSplitGroups) {
    const Backend kernels = named("kernels");
    const Model m = model();
    const kvpages_spec spec = full(16, 2, 64);
    add(m, "t0", spec, kernels, 8);
    add(m, "d0", spec, kernels, 4);
    add(m, "t1", spec, kernels, 8);
    const auto made = attention(plan_of_blocks(m, 2));
    EXPECT_EQ(layers_of(made), (std::vector<std::vector<Names>>{{{"t0", "t1"}, {"d0"}}}));
    kvpages_attention_group_info info = KVPAGES_ATTENTION_GROUP_INFO_INIT;
    must(kvpages_attention_get_group(made.get(), 0, 1, &info));
    EXPECT_EQ(info.num_query_heads, 4u);
    EXPECT_EQ(info.index, 1u);
}

TEST(Attention, S14_AGroupWithoutCacheKeepsItsPlace) {
    const Model m = model();
    add(m, "encoder", support::attention(KVPAGES_SPEC_KIND_ENCODER_ONLY, 16, 2, 64), named("E"), 8);
    add(m, "full", full(48, 2, 64), named("F", {16, 32, 64}), 8);
    Parts parts;
    parts.num_blocks = 2;
    parts.groups = {{{"encoder"}}, {{"full"}}};
    parts.tensors = {{2 * page_bytes(full(48, 2, 64)), {"full"}}};
    const Plan plan = plan_from(m, parts);
    EXPECT_EQ(group_info(plan, 0).kernel_block_size, 0u);
    EXPECT_EQ(group_info(plan, 1).kernel_block_size, 16u);
    Engine engine;
    const auto callbacks = engine.callbacks();
    kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
    config.callbacks = &callbacks;
    const auto made = attention(plan, config);
    EXPECT_EQ(layers_of(made), (std::vector<std::vector<Names>>{{{"encoder"}}, {{"full"}}}));
    EXPECT_EQ(engine.calls_of("create"), (Names{"0.0.0", "1.0.0"}));
    kvpages_attention_group_info info = KVPAGES_ATTENTION_GROUP_INFO_INIT;
    must(kvpages_attention_get_group(made.get(), 0, 0, &info));
    EXPECT_EQ(info.kernel_block_size, 0u);
    must(kvpages_attention_get_group(made.get(), 1, 0, &info));
    EXPECT_EQ(info.kernel_block_size, 16u);
    kvpages_spec spec = KVPAGES_SPEC_INIT;
    must(kvpages_attention_get_group_spec(made.get(), 1, 0, &spec));
    EXPECT_EQ(spec.block_size, 48u);
}

TEST(Attention, S15_KernelBlocksDivideTheBlock) {
    struct Case {
        std::uint64_t block;
        std::vector<std::pair<std::vector<std::uint64_t>, std::vector<std::uint64_t>>> backends;
        std::uint64_t right;  // 0: an error
    };
    const std::vector<Case> cases{{528, {{{}, {16}}}, 528},
                                  {528, {{{16, 32, 64}, {}}}, 16},
                                  {4192, {{{16, 32, 64}, {}}}, 32},
                                  {2112, {{{16, 32, 64}, {}}}, 64},
                                  {64, {{{16, 32}, {}}, {{}, {16}}}, 32},
                                  {32, {{{64}, {}}}, 0},
                                  {96, {{{16, 32}, {}}, {{64}, {}}}, 0}};
    for (const Case& c : cases) {
        std::vector<Backend> backends;
        std::vector<const kvpages_backend*> raw;
        for (const auto& [sizes, multiples] : c.backends) {
            BackendOptions options;
            options.layout = packed_nhd;
            options.sizes = sizes;
            options.multiples = multiples;
            backends.push_back(backend(options));
            raw.push_back(backends.back().get());
        }
        std::uint64_t size = 7;
        const auto status =
            kvpages_select_kernel_block_size(c.block, raw.data(), raw.size(), &size);
        EXPECT_EQ(status == KVPAGES_STATUS_OK, c.right != 0) << c.block;
        EXPECT_EQ(size, c.right) << c.block;
    }
}

// Block sizes that the builders of one cache group of compressed layers are told.
std::vector<std::uint64_t> builder_blocks(const std::vector<std::uint64_t>& ratios,
                                          std::uint64_t kernel_block_size) {
    const Model m = model();
    BackendOptions options;
    options.layout = latent;
    Parts parts;
    parts.num_blocks = 2;
    parts.groups.emplace_back();
    for (const std::uint64_t ratio : ratios) {
        kvpages_spec spec = mla(256, 512, KVPAGES_DTYPE_U8);
        spec.cache_dtype = "fp8_ds_mla";
        spec.model_version = "deepseek_v4";
        spec.compress_ratio = ratio;
        spec.alignment_bytes = 576;
        const std::string name = std::to_string(ratio);
        add(m, name, spec, backend(options));
        parts.groups[0].layers.push_back(name);
        parts.tensors.push_back({2 * page_bytes(spec), {name}});
    }
    parts.kernel_block_sizes = {kernel_block_size};
    const Plan plan = plan_from(m, parts);
    std::vector<std::uint64_t> told;
    kvpages_builder_callbacks callbacks = KVPAGES_BUILDER_CALLBACKS_INIT;
    callbacks.user = &told;
    callbacks.create = [](void* user, const kvpages_builder_info* info, void**) {
        static_cast<std::vector<std::uint64_t>*>(user)->push_back(info->spec->block_size);
        return 0;
    };
    callbacks.build = [](void*, void*, const kvpages_common_metadata*, void*, void**) { return 0; };
    callbacks.destroy = [](void*, void*) {};
    kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
    config.callbacks = &callbacks;
    attention(plan, config);
    return told;
}

TEST(Attention, CompressedLayersKeepABlockThatCannotBeSplit) {
    using Blocks = std::vector<std::uint64_t>;
    EXPECT_EQ(builder_blocks({4}, 256), Blocks{256});
    EXPECT_EQ(builder_blocks({4, 128}, 256), (Blocks{256, 256}));
    // 128 does not divide 64, and layers of one group go by one block.
    EXPECT_EQ(builder_blocks({128}, 64), Blocks{256});
    EXPECT_EQ(builder_blocks({4, 128}, 64), (Blocks{256, 256}));
    // As recorded: compressed_split of groups.json.
    EXPECT_EQ(builder_blocks({4}, 64), Blocks{64});
}

TEST(Attention, GroupsComeInTheOrderOfThePlan) {
    const Two two;
    EXPECT_EQ(layers_of(attention(two.plan)), all_of_two);
}

TEST(Attention, BackendsOfOneNameAreOne) {
    const Backend first = named("same"), second = named("same");
    const Model m = model();
    add(m, "l.0", full(16, 1, 8), first);
    add(m, "l.1", full(16, 1, 8), second);
    EXPECT_EQ(layers_of(attention(plan_of_blocks(m, 1))),
              (std::vector<std::vector<Names>>{{{"l.0", "l.1"}}}));
}

TEST(Attention, AChainOfSharersIsWithItsOwnerAlsoInASet) {
    const Backend kernels = named("kernels");
    const Model m = model();
    share(m, "l.3", "l.2", kernels);
    add(m, "l.0", full(16, 1, 8), kernels);
    add(m, "l.1", full(16, 2, 8), kernels);
    share(m, "l.2", "l.1", kernels);
    const auto made = attention(plan_of_blocks(m, 1));
    EXPECT_EQ(layers_of(made), (std::vector<std::vector<Names>>{{{"l.0"}, {"l.1", "l.3", "l.2"}}}));
}

TEST(Attention, ActiveLayersOnly) {
    const Two two;
    const auto of = [&two](std::vector<const char*> names) {
        kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
        config.num_active_layers = names.size();
        names.push_back(nullptr);
        config.active_layers = names.data();
        return layers_of(attention(two.plan, config));
    };
    EXPECT_EQ(of({}), (std::vector<std::vector<Names>>{{}, {}}));
    EXPECT_EQ(of({"shared", "full.1", "shared"}),
              (std::vector<std::vector<Names>>{{{"full.1"}}, {{"shared"}}}));
    const char* unknown[] = {"full.0", "nobody"};
    kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
    config.active_layers = unknown;
    config.num_active_layers = 2;
    kvpages_attention* raw = nullptr;
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, &raw), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_STREQ(kvpages_last_error_kind(), "layer_missing");
    EXPECT_NE(std::string(kvpages_last_error_message()).find("nobody"), std::string::npos);
    EXPECT_EQ(raw, nullptr);
}

TEST(Builders, AreMadeInOrderAndDestroyedInReverse) {
    const Two two;
    Engine engine;
    engine.givers = {"0.1.1", "1.0.1"};
    const auto callbacks = engine.callbacks();
    kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
    config.callbacks = &callbacks;
    config.num_builders = 2;
    auto made = attention(two.plan, config);
    const Names order{"0.0.0", "0.0.1", "0.1.0", "0.1.1", "1.0.0", "1.0.1", "1.1.0", "1.1.1"};
    EXPECT_EQ(engine.calls_of("create"), order);
    EXPECT_EQ(engine.calls_of("support"), order);
    EXPECT_EQ(engine.calls_of("get"), (Names{"0.0.0", "0.0.1", "0.1.0", "0.1.1"}));
    EXPECT_EQ(engine.calls_of("set 0.1.1 to"), (Names{"1.0.0", "1.0.1", "1.1.0", "1.1.1"}));
    EXPECT_EQ(engine.alive, 8);
    made.reset();
    EXPECT_EQ(engine.alive, 0);
    EXPECT_EQ(engine.calls_of("destroy"), Names(order.rbegin(), order.rend()));
}

TEST(Builders, AFailureAnywhereUndoesEverything) {
    const Two two;
    int points = 0;
    for (;; ++points) {
        Engine engine;
        engine.givers = {"0.0.1"};
        engine.fail_at = points;
        const auto callbacks = engine.callbacks();
        kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
        config.callbacks = &callbacks;
        config.num_builders = 2;
        kvpages_attention* raw = nullptr;
        const auto status = kvpages_attention_create(two.plan.get(), &config, &raw);
        if (status == KVPAGES_STATUS_OK) {
            kvpages_attention_destroy(raw);
            break;
        }
        EXPECT_EQ(status, KVPAGES_STATUS_STOPPED);
        EXPECT_EQ(kvpages_last_callback_code(), -77);
        EXPECT_STREQ(kvpages_last_error_kind(), "callback_failed");
        EXPECT_EQ(raw, nullptr);
        EXPECT_EQ(engine.alive, 0) << points;
        Names created = engine.calls_of("create");
        const bool failed_in_create = engine.log.size() > 0 && [&] {
            for (auto line = engine.log.rbegin(); line != engine.log.rend(); ++line) {
                if (line->rfind("destroy", 0) != 0) return line->rfind("create", 0) == 0;
            }
            return false;
        }();
        if (failed_in_create) created.pop_back();
        EXPECT_EQ(engine.calls_of("destroy"), Names(created.rbegin(), created.rend()));
    }
    EXPECT_EQ(points, 24);  // 8 builders: create, a workspace call, support
}

TEST(Builders, TheLowestGraphSupportAndItsBackend) {
    const Two two;
    Engine engine;
    const auto callbacks = engine.callbacks();
    kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
    config.callbacks = &callbacks;
    engine.support_of = {{"0.0.0", 3}, {"0.1.0", 2}, {"1.0.0", 2}, {"1.1.0", 3}};
    const auto made = attention(two.plan, config);
    const char* name = nullptr;
    EXPECT_EQ(kvpages_attention_graph_support(made.get(), &name),
              static_cast<std::uint32_t>(KVPAGES_GRAPH_SUPPORT_UNIFORM_BATCH));
    EXPECT_STREQ(name, "B");
    must(kvpages_attention_limit_graph_support(made.get(), KVPAGES_GRAPH_SUPPORT_ALWAYS));
    must(kvpages_attention_limit_graph_support(made.get(), KVPAGES_GRAPH_SUPPORT_UNIFORM_BATCH));
    EXPECT_EQ(kvpages_attention_graph_support(made.get(), &name), 2u);
    EXPECT_STREQ(name, "B");
    must(kvpages_attention_limit_graph_support(made.get(), KVPAGES_GRAPH_SUPPORT_NEVER));
    EXPECT_EQ(kvpages_attention_graph_support(made.get(), &name), 0u);
    EXPECT_EQ(name, nullptr);
    EXPECT_EQ(kvpages_attention_limit_graph_support(made.get(), 4),
              KVPAGES_STATUS_INVALID_ARGUMENT);

    engine.support_of = {{"0.0.0", 3}, {"0.1.0", 3}, {"1.0.0", 3}, {"1.1.0", 3}};
    EXPECT_EQ(kvpages_attention_graph_support(attention(two.plan, config).get(), &name), 3u);
    EXPECT_EQ(name, nullptr);
    engine.support_of = {{"1.1.0", 9}};
    kvpages_attention* raw = nullptr;
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, &raw),
              KVPAGES_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(raw, nullptr);
    // What the contract says is what stands there before.
    engine.support_of.clear();
    const auto own = attention(two.plan, config);
    EXPECT_EQ(kvpages_attention_graph_support(own.get(), &name), 0u);
    EXPECT_STREQ(name, "A");
}

TEST(Builders, OfASingleBackend) {
    const Two two;
    Engine engine, other;
    const auto callbacks = engine.callbacks();
    const auto other_callbacks = other.callbacks();
    const kvpages_backend_callbacks of_b{two.b.get(), &other_callbacks};
    kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
    config.backend_callbacks = &of_b;
    config.num_backend_callbacks = 1;
    kvpages_attention* raw = nullptr;
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, &raw),
              KVPAGES_STATUS_NULL_ARGUMENT);
    config.callbacks = &callbacks;
    auto made = attention(two.plan, config);
    EXPECT_EQ(engine.calls_of("create"), (Names{"0.0.0", "1.0.0"}));
    EXPECT_EQ(other.calls_of("create"), (Names{"0.1.0", "1.1.0"}));
    made.reset();
    EXPECT_EQ(engine.alive + other.alive, 0);
    const kvpages_backend_callbacks twice[] = {of_b, of_b};
    config.backend_callbacks = twice;
    config.num_backend_callbacks = 2;
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, &raw),
              KVPAGES_STATUS_INVALID_ARGUMENT);
    EXPECT_STREQ(kvpages_last_error_kind(), "backend_twice");
}

TEST(Attention, OutlivesItsPlan) {
    AttentionHandle::Owned made;
    {
        const Two two;
        made = attention(two.plan);
    }
    EXPECT_EQ(layers_of(made), all_of_two);
    EXPECT_STREQ(kvpages_attention_group_backend(made.get(), 0, 1), "B");
}

TEST(Attention, HostileInput) {
    const Two two;
    kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
    kvpages_attention* raw = nullptr;
    EXPECT_EQ(kvpages_attention_create(nullptr, &config, &raw), KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), nullptr, &raw),
              KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, nullptr),
              KVPAGES_STATUS_NULL_ARGUMENT);
    config.struct_size = 8;
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, &raw),
              KVPAGES_STATUS_INVALID_ARGUMENT);
    config = KVPAGES_ATTENTION_CONFIG_INIT;
    config.worker = 1;
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, &raw), KVPAGES_STATUS_NOT_FOUND);
    config.worker = 0;
    config.num_active_layers = 1;
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, &raw),
              KVPAGES_STATUS_NULL_ARGUMENT);
    config.num_active_layers = 0;
    config.num_builders = UINT64_MAX;
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, &raw),
              KVPAGES_STATUS_INVALID_ARGUMENT);
    config.num_builders = 0;
    for (int missing = 0; missing < 4; ++missing) {
        Engine engine;
        auto callbacks = engine.callbacks();
        if (missing == 0) callbacks.create = nullptr;
        if (missing == 1) callbacks.build = nullptr;
        if (missing == 2) callbacks.destroy = nullptr;
        if (missing == 3) callbacks.struct_size = 16;
        config.callbacks = &callbacks;
        EXPECT_NE(kvpages_attention_create(two.plan.get(), &config, &raw), KVPAGES_STATUS_OK);
        EXPECT_EQ(engine.log, Names());
    }
    config.callbacks = nullptr;
    const kvpages_backend_callbacks nothing{nullptr, nullptr};
    config.backend_callbacks = &nothing;
    config.num_backend_callbacks = 1;
    EXPECT_EQ(kvpages_attention_create(two.plan.get(), &config, &raw),
              KVPAGES_STATUS_NULL_ARGUMENT);
    EXPECT_EQ(raw, nullptr);

    const auto made = attention(two.plan);
    kvpages_attention_group_info info = KVPAGES_ATTENTION_GROUP_INFO_INIT;
    EXPECT_EQ(kvpages_attention_get_group(made.get(), 2, 0, &info), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(kvpages_attention_get_group(made.get(), 0, 2, &info), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(kvpages_attention_get_group(made.get(), 0, 0, nullptr), KVPAGES_STATUS_NULL_ARGUMENT);
    kvpages_spec spec = KVPAGES_SPEC_INIT;
    EXPECT_EQ(kvpages_attention_get_group_spec(made.get(), 0, 9, &spec), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(kvpages_attention_group_backend(made.get(), 2, 0), nullptr);
    EXPECT_EQ(kvpages_attention_group_backend(made.get(), 0, SIZE_MAX), nullptr);
    EXPECT_EQ(kvpages_attention_group_layer_name(made.get(), 0, 0, 1), nullptr);
    EXPECT_EQ(kvpages_attention_num_groups(made.get(), SIZE_MAX), 0u);
    EXPECT_EQ(kvpages_attention_num_cache_groups(nullptr), 0u);
    const char* name = "x";
    EXPECT_EQ(kvpages_attention_graph_support(nullptr, &name), 0u);
    EXPECT_EQ(name, nullptr);
    EXPECT_EQ(kvpages_attention_limit_graph_support(nullptr, 0), KVPAGES_STATUS_NULL_ARGUMENT);
    kvpages_attention_destroy(nullptr);
}

TEST(Model, TellsOfItsLayers) {
    const Two two;
    EXPECT_STREQ(kvpages_model_layer_name(two.model.get(), 1), "sliding.0");
    EXPECT_EQ(kvpages_model_layer_shares_with(two.model.get(), 1), nullptr);
    EXPECT_STREQ(kvpages_model_layer_shares_with(two.model.get(), 4), "sliding.0");
    EXPECT_EQ(kvpages_model_layer_name(two.model.get(), 5), nullptr);
    EXPECT_EQ(kvpages_model_layer_name(nullptr, 0), nullptr);
    kvpages_spec spec = KVPAGES_SPEC_INIT;
    must(kvpages_model_get_layer_spec(two.model.get(), 1, &spec));
    EXPECT_EQ(spec.sliding_window, 32u);
    EXPECT_EQ(kvpages_model_get_layer_spec(two.model.get(), 4, &spec), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(kvpages_model_get_layer_spec(two.model.get(), 5, &spec), KVPAGES_STATUS_NOT_FOUND);
}

// --- the C++ interface -----------------------------------------------------------------------

struct Thrown {
    int number;
};

struct CountingBuilder : kvpages::Builder {
    explicit CountingBuilder(int& alive) : alive_(alive) { ++alive_; }
    ~CountingBuilder() override { --alive_; }
    CountingBuilder(const CountingBuilder&) = delete;
    CountingBuilder& operator=(const CountingBuilder&) = delete;
    void* build(const kvpages_common_metadata& common, void*) override {
        if (common.num_tokens == 13) throw Thrown{13};
        return &alive_;
    }
    int& alive_;
};

struct CountingFactory : kvpages::BuilderFactory {
    std::unique_ptr<kvpages::Builder> create(const kvpages_builder_info&) override {
        if (left-- == 0) throw Thrown{7};
        return std::make_unique<CountingBuilder>(alive);
    }
    int alive = 0;
    int left = 100;
};

TEST(Hpp, ABuildersExceptionComesOut) {
    kvpages::Model m;
    const auto flash = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
    kvpages::AttentionSpec spec;
    spec.head_size = 64;
    m.add("l.0", spec, flash, 8);
    m.add("l.1", spec, flash, 4);
    kvpages::PlanConfig config;
    config.max_model_len = 16;
    config.num_blocks_override = 4;
    const auto plan = kvpages::Plan::make(m, config);
    CountingFactory factory;
    {
        auto made = kvpages::Attention::make(plan, factory, {0, std::nullopt, 2});
        EXPECT_EQ(factory.alive, 4);
        auto moved = std::move(made);
        EXPECT_EQ(moved.group_layers(0, 1), Names{"l.1"});
        const std::int32_t start = 0;
        const std::int64_t table_shape[] = {0, 1}, slots_shape[] = {13}, slots_strides[] = {1};
        std::int64_t slots[13] = {};
        const kvpages_tensor table{nullptr, table_shape, table_shape, KVPAGES_DTYPE_I32, 2};
        const kvpages_tensor mapping{slots, slots_shape, slots_strides, KVPAGES_DTYPE_I64, 1};
        kvpages_step step = KVPAGES_STEP_INIT;
        step.query_start = step.query_start_host = &start;
        step.block_tables = &table;
        step.slot_mappings = &mapping;
        step.num_block_tables = step.num_slot_mappings = step.num_cache_groups = 1;
        step.builder = 1;
        moved.build(step);
        EXPECT_EQ(moved.layer_metadata(1, 1), &factory.alive);
        EXPECT_EQ(moved.layer_metadata(1, 0), nullptr);
        step.num_tokens = 13;
        EXPECT_THROW(moved.build(step), Thrown);
        EXPECT_EQ(moved.layer_metadata(1, 1), &factory.alive);
        step.num_tokens = 14;
        EXPECT_THROW(moved.build(step), kvpages::Error);
    }
    EXPECT_EQ(factory.alive, 0);
    factory.left = 1;
    EXPECT_THROW(kvpages::Attention::make(plan, factory), Thrown);
    EXPECT_EQ(factory.alive, 0);
    EXPECT_EQ(kvpages::Attention::make(plan).num_groups(0), 2u);
}

}  // namespace
