// Explanations: what they say is what the accessors say.
#include "support/api.h"
#include "support/failure.h"
#include "support/world.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <string>
#include <utility>
#include <vector>

using namespace support;
using Json = nlohmann::json;

namespace {

void expect_equal_to_accessors(const Plan& plan) {
    const Json json = Json::parse(explanation(plan, KVPAGES_TEXT_FORMAT_JSON));
    const kvpages_worker_info first = worker_info(plan);
    EXPECT_EQ(json.at("num_blocks"), first.num_blocks);
    EXPECT_EQ(json.at("max_model_len"), kvpages_plan_max_model_len(plan.get()));
    std::vector<std::size_t> explained;
    for (const Json& same : json.at("workers")) {
        for (const Json& number : same.at("workers")) {
            const auto worker = number.get<std::size_t>();
            SCOPED_TRACE("worker " + std::to_string(worker));
            explained.push_back(worker);
            const kvpages_worker_info info = worker_info(plan, worker);
            EXPECT_EQ(same.at("num_tensors"), info.num_tensors);
            EXPECT_EQ(same.at("tensor_bytes"), info.total_bytes);
            EXPECT_EQ(same.at("bytes_per_block"), info.bytes_per_block);
            if (kvpages_plan_max_model_len(plan.get()) == 0) {
                // What is not known is null here and 0 there.
                for (const char* key : {"bytes_per_request", "capacity_tokens", "max_concurrency"}) {
                    EXPECT_TRUE(same.at(key).is_null()) << key;
                }
            } else {
                EXPECT_EQ(same.at("bytes_per_request"), info.bytes_per_request);
                EXPECT_EQ(same.at("capacity_tokens"), info.capacity_tokens);
                EXPECT_EQ(same.at("max_concurrency").get<double>(), info.max_concurrency);
            }
            EXPECT_EQ(same.at("needs_zeroing"), info.needs_zeroing != 0);
            const Json& wasted = same.at("wasted_bytes");
            EXPECT_EQ(wasted.at("total").get<std::uint64_t>(),
                      wasted.at("padding").get<std::uint64_t>() +
                          wasted.at("unused_slots").get<std::uint64_t>() +
                          wasted.at("left_over").get<std::uint64_t>());
            ASSERT_EQ(same.at("groups").size(), info.num_groups);
            std::uint64_t request = 0;
            for (std::size_t number_of_group = 0; number_of_group < info.num_groups;
                 ++number_of_group) {
                const Json& group = same.at("groups").at(number_of_group);
                const kvpages_group_info of_group = group_info(plan, number_of_group, worker);
                EXPECT_EQ(group.at("block_size"), of_group.block_size);
                if (of_group.kernel_block_size == 0) {
                    EXPECT_TRUE(group.at("kernel_block_size").is_null());
                } else {
                    EXPECT_EQ(group.at("kernel_block_size"), of_group.kernel_block_size);
                }
                EXPECT_EQ(group.at("blocks_per_request"), of_group.blocks_per_request);
                EXPECT_EQ(group.at("is_draft"), of_group.is_draft != 0);
                if (of_group.is_set == 0 && of_group.num_layers > 0) {
                    EXPECT_EQ(group.at("smallest_page_bytes"), of_group.page_size_bytes);
                    EXPECT_EQ(group.at("largest_page_bytes"), of_group.page_size_bytes);
                }
                std::vector<std::string> layers = group.at("layers");
                EXPECT_EQ(layers.size(), of_group.num_layers);
                const std::vector<std::string> sharing = group.at("sharing_layers");
                EXPECT_EQ(sharing.size(), of_group.num_sharing_layers);
                layers.insert(layers.end(), sharing.begin(), sharing.end());
                EXPECT_EQ(layers, group_layers(plan, number_of_group, worker));
                request += of_group.blocks_per_request;
            }
            if (same.at("blocks_per_request").is_null()) {
                EXPECT_EQ(request, 0u);
            } else {
                EXPECT_EQ(same.at("blocks_per_request"), request);
            }
        }
    }
    EXPECT_EQ(explained.size(), kvpages_plan_num_workers(plan.get()));
}

}  // namespace

TEST(Explain, JsonHasTheNumbersOfTheAccessors) {
    expect_equal_to_accessors(World().planned);

    const Model hybrid = model();
    State state;
    state.add(KVPAGES_DTYPE_F32, {100});
    add(hybrid, "mamba", state.spec(), state_backend());
    add(hybrid, "attn", full(16, 2, 8), backend(packed_nhd));
    add(hybrid, "attn \"quoted\"\n\\ \t\x01 \xc3\xa4", full(16, 2, 8), backend(packed_nhd));
    expect_equal_to_accessors(plan(hybrid, 100001));

    kvpages_spec large = full(16, 4, 8);
    const Model set = model();
    add(set, "a", full(16, 2, 8));
    add(set, "b", large);
    expect_equal_to_accessors(plan(set, 50000));

    expect_equal_to_accessors(plan(model(), 0));
    const World w;
    const Model none = model();
    const Plan many = plan({{w.layers.get(), 100000},
                            {none.get(), 0},
                            {w.layers.get(), 100000},
                            {w.layers.get(), 90000}},
                           w.config);
    expect_equal_to_accessors(many);
}

// What is wasted adds up to what was given.
TEST(Explain, WasteAddsUp) {
    const Model hybrid = model();
    State state;
    state.add(KVPAGES_DTYPE_F32, {100});
    add(hybrid, "mamba.0", state.spec());
    add(hybrid, "mamba.1", state.spec());
    add(hybrid, "attn", full(16, 2, 8));
    const std::int64_t given = 100001;
    const Plan p = plan(hybrid, given);
    const Json json = Json::parse(explanation(p, KVPAGES_TEXT_FORMAT_JSON));
    const Json& wasted = json.at("workers").at(0).at("wasted_bytes");
    const kvpages_worker_info info = worker_info(p);
    EXPECT_EQ(wasted.at("left_over").get<std::uint64_t>(), 100001 - info.total_bytes);
    EXPECT_EQ(json.at("workers").at(0).at("memory_bytes"), given);
    // A state of 400 bytes in each page of 1024.
    const Json& group = json.at("workers").at(0).at("groups").at(0);
    EXPECT_EQ(group.at("padding_bytes_per_block"), (1024u - 400) * group.at("layers").size());
    EXPECT_FALSE(group.at("reasons").empty());
}

TEST(Explain, TextNamesEveryGroupsFirstLayer) {
    const World w;
    const Model none = model();
    for (const Plan& p : {plan({{w.layers.get(), 100000}}, w.config),
                          plan({{none.get(), 0}, {w.layers.get(), 100000}}, w.config)}) {
        const std::string text = explanation(p, KVPAGES_TEXT_FORMAT_TEXT);
        for (std::size_t group = 0; group < worker_info(p).num_groups; ++group) {
            const std::size_t worker = kvpages_plan_num_workers(p.get()) - 1;
            EXPECT_NE(text.find(group_layers(p, group, worker)[0]), std::string::npos) << text;
        }
        EXPECT_NE(text.find(std::to_string(worker_info(p).num_blocks)), std::string::npos) << text;
        EXPECT_NE(text.find("64 tokens"), std::string::npos) << text;
    }
}

// A compact plan is compared with the plan that the policy reference makes of the same layers.
TEST(Explain, TheReferencesPlanIsBesideACompactOne) {
    const Backend kernels = backend(packed_nhd);
    const Model layers = model();
    for (int number = 0; number < 5; ++number) {
        add(layers, "sliding." + std::to_string(number), sliding(1024, 16, 4, 64), kernels);
    }
    add(layers, "full", full(16, 4, 24), kernels);
    kvpages_plan_config config = plan_config(32768);
    config.reserved_blocks = 1;
    config.typical_len = 2048;
    const std::int64_t memory = std::int64_t{1} << 30;
    const Plan reference = plan({{layers.get(), memory}}, config);
    EXPECT_TRUE(Json::parse(explanation(reference, KVPAGES_TEXT_FORMAT_JSON))
                    .at("reference")
                    .is_null());
    config.policy = KVPAGES_POLICY_COMPACT;
    const Plan own = plan({{layers.get(), memory}}, config);
    expect_equal_to_accessors(own);
    const Json beside = Json::parse(explanation(own, KVPAGES_TEXT_FORMAT_JSON)).at("reference");
    EXPECT_TRUE(beside.at("error").is_null());
    EXPECT_EQ(beside.at("is_taken"), false);
    for (const auto& [which, of_plan] : {std::pair<const char*, const Plan&>{"plan", reference},
                                         std::pair<const char*, const Plan&>{"own_plan", own}}) {
        SCOPED_TRACE(which);
        const kvpages_worker_info info = worker_info(of_plan);
        EXPECT_EQ(beside.at(which).at("num_blocks"), info.num_blocks);
        EXPECT_EQ(beside.at(which).at("num_groups"), info.num_groups);
        EXPECT_EQ(beside.at(which).at("bytes_per_block"), info.bytes_per_block);
        EXPECT_EQ(beside.at(which).at("capacity_tokens"), info.capacity_tokens);
        EXPECT_EQ(beside.at(which).at("tensor_bytes"), info.total_bytes);
        const Json of_worker =
            Json::parse(explanation(of_plan, KVPAGES_TEXT_FORMAT_JSON)).at("workers").at(0);
        EXPECT_EQ(beside.at(which).at("wasted_bytes"), of_worker.at("wasted_bytes"));
    }
    ASSERT_EQ(beside.at("lengths").size(), 2u);
    EXPECT_EQ(beside.at("lengths").at(0).at("len"), 2048u);
    EXPECT_EQ(beside.at("lengths").at(1).at("len"), 32768u);
    for (const Json& held : beside.at("lengths")) {
        EXPECT_GT(held.at("ratio").get<double>(), 1.1);
        EXPECT_GT(held.at("tokens").get<std::uint64_t>(),
                  held.at("tokens_of_reference").get<std::uint64_t>());
    }
    const std::string text = explanation(own, KVPAGES_TEXT_FORMAT_TEXT);
    for (const Json& reason : beside.at("reasons")) {
        EXPECT_NE(text.find(reason.get<std::string>()), std::string::npos) << text;
    }
    EXPECT_NE(text.find("larger blocks instead of padding"), std::string::npos) << text;
}

// G03a: the reference gives up, and the explanation of the plan that there is says why.
TEST(Explain, WhyTheReferenceGivesNoPlan) {
    const Model layers = model();
    add(layers, "full", page_of(3072, 16));
    kvpages_spec window = page_of(4096, 16);
    window.kind = KVPAGES_SPEC_KIND_SLIDING_WINDOW;
    window.sliding_window = 64;
    add(layers, "window", window);
    kvpages_plan_config config = plan_config(4096);
    kvpages_plan* raw = nullptr;
    ASSERT_NE(try_plan({{layers.get(), 1 << 24}}, config, &raw), KVPAGES_STATUS_OK);
    const std::string why = kvpages_last_error_message();
    config.policy = KVPAGES_POLICY_COMPACT;
    const Plan own = plan({{layers.get(), 1 << 24}}, config);
    const Json beside = Json::parse(explanation(own, KVPAGES_TEXT_FORMAT_JSON)).at("reference");
    EXPECT_EQ(beside.at("error"), why);
    EXPECT_TRUE(beside.at("plan").is_null());
    const std::string text = explanation(own, KVPAGES_TEXT_FORMAT_TEXT);
    EXPECT_NE(text.find("the policy reference gives no plan: " + why), std::string::npos) << text;
}

// What is advised is done, and gives what it promised.
TEST(Explain, TheCheapestChangeKeepsItsPromise) {
    const auto planned = [](std::uint32_t policy, std::uint64_t block_size, bool is_open) {
        const Backend kernels = backend(packed_nhd);
        const Model layers = model();
        for (int number = 0; number < 4; ++number) {
            add(layers, "layers." + std::to_string(number), full(block_size, 2, 32), kernels);
        }
        kvpages_plan_config config = plan_config(150);
        config.policy = policy;
        config.reserved_blocks = 1;
        config.choose_block_sizes = is_open ? 1 : 0;
        return plan({{layers.get(), 1 << 24}}, config);
    };
    for (const std::uint32_t policy : {KVPAGES_POLICY_REFERENCE, KVPAGES_POLICY_COMPACT}) {
        const bool chooses = policy == KVPAGES_POLICY_COMPACT;
        const Plan now = planned(policy, 128, false);
        const Json change =
            Json::parse(explanation(now, KVPAGES_TEXT_FORMAT_JSON)).at("cheapest_change");
        EXPECT_EQ(change.at("change"), chooses ? "choose_block_sizes" : "block_size");
        std::uint64_t then_size = 128;
        if (!chooses) {
            EXPECT_EQ(change.at("kind"), "full attention");
            EXPECT_EQ(change.at("from"), 128u);
            then_size = change.at("to").get<std::uint64_t>();
        }
        EXPECT_EQ(change.at("tokens_now"), worker_info(now).capacity_tokens);
        const Plan then = planned(policy, then_size, chooses);
        EXPECT_EQ(change.at("tokens"), worker_info(then).capacity_tokens);
        EXPECT_GT(worker_info(then).capacity_tokens, worker_info(now).capacity_tokens);
        const std::string text = explanation(now, KVPAGES_TEXT_FORMAT_TEXT);
        EXPECT_NE(text.find("cheapest change: " + change.at("text").get<std::string>()),
                  std::string::npos)
            << text;
    }
}

// L01, L02: kernels with 32-bit offsets get the most blocks that they reach, a cache can be made of
// them, and the explanation says what stands in the way of more.
TEST(Explain, L02_NarrowKernelsAreNamed) {
    const std::uint64_t step = 1039680;
    BackendOptions options;
    options.layout = packed_nhd;
    options.index_bits = 32;
    const Backend narrow = backend(options);
    const Model layers = model();
    add(layers, "layers.0", page_of(step), narrow);
    kvpages_plan_config config = plan_config(64);
    config.policy = KVPAGES_POLICY_COMPACT;
    const auto memory = static_cast<std::int64_t>(3000 * step);
    const Plan own = plan({{layers.get(), memory}}, config);
    EXPECT_EQ(worker_info(own).num_blocks, 2065u);
    const kvpages_view_report out = report(cache(own), "layers.0");
    EXPECT_EQ(out.largest_element_offset, 2065 * step - 1);
    EXPECT_EQ(out.fits_int32, 1u);
    const Json index = Json::parse(explanation(own, KVPAGES_TEXT_FORMAT_JSON))
                           .at("workers")
                           .at(0)
                           .at("narrow_index");
    EXPECT_EQ(index.at("layer"), "layers.0");
    EXPECT_EQ(index.at("backend"), "kernels");
    EXPECT_EQ(index.at("blocks_of_memory"), 3000u);
    const std::string text = explanation(own, KVPAGES_TEXT_FORMAT_TEXT);
    EXPECT_NE(text.find("reaches 2065 blocks; there is memory for 3000"), std::string::npos) << text;
    // The reference plans them all, and is refused.
    config.policy = KVPAGES_POLICY_REFERENCE;
    kvpages_plan* raw = nullptr;
    EXPECT_TRUE(fails(try_plan({{layers.get(), memory}}, config, &raw),
                      KVPAGES_STATUS_CONTRACT_BROKEN, "index_width_exceeded", {"layers.0"}));
    EXPECT_EQ(raw, nullptr);
}

TEST(Explain, APlanFromPartsSaysWhatIsNotKnown) {
    const Model m = model();
    add(m, "A", full(16, 2, 8), backend(packed_nhd));
    add(m, "B", sliding(32, 16, 2, 8), backend(packed_nhd));
    Parts parts;
    parts.num_blocks = 3;
    parts.groups = {{{"A"}, 0}, {{"B"}, 0}};
    parts.tensors = {{3 * 1024, {"A", "B"}, 0, 0}};
    const Plan p = plan_from(m, parts);
    expect_equal_to_accessors(p);
    for (std::size_t group = 0; group < 2; ++group) {
        const kvpages_group_info info = group_info(p, group);
        EXPECT_EQ(info.row_blocks, 0u);
        EXPECT_EQ(info.table_width_blocks, 0u);
        EXPECT_EQ(info.blocks_per_request, 0u);
    }
    const Json json = Json::parse(explanation(p, KVPAGES_TEXT_FORMAT_JSON));
    for (const char* key : {"reference", "cheapest_change", "one_more_request"}) {
        EXPECT_TRUE(json.at(key).is_null()) << key;
    }
    const std::string text = explanation(p, KVPAGES_TEXT_FORMAT_TEXT);
    EXPECT_NE(text.find("one request       unknown"), std::string::npos);
    EXPECT_NE(text.find("capacity          unknown"), std::string::npos);
}
