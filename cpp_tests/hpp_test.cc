// The C++ interface.
#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

template <typename T>
constexpr bool moves_only =
    std::is_nothrow_move_constructible_v<T> && std::is_nothrow_move_assignable_v<T> &&
    !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;

static_assert(moves_only<kvpages::Backend>);
static_assert(moves_only<kvpages::Model>);
static_assert(moves_only<kvpages::Plan>);
static_assert(moves_only<kvpages::Memory>);
static_assert(moves_only<kvpages::Cache>);
static_assert(moves_only<kvpages::Descriptor>);
static_assert(moves_only<kvpages::Reshard>);

kvpages::AttentionSpec spec(std::uint64_t window = 0) {
    kvpages::AttentionSpec made;
    made.kind = window == 0 ? kvpages::AttentionKind::full : kvpages::AttentionKind::sliding_window;
    made.block_size = 16;
    made.num_kv_heads = 2;
    made.head_size = 8;
    made.sliding_window = window;
    return made;
}

kvpages::Model two_layers(const kvpages::Backend& backend) {
    kvpages::Model model;
    model.add("layers.0.attn", spec(), backend);
    model.add("layers.1.attn", spec(32), backend);
    return model;
}

kvpages::PlanConfig config(std::int64_t memory = 100000) {
    kvpages::PlanConfig made;
    made.memory_bytes = memory;
    made.max_model_len = 64;
    made.max_tokens_in_flight = 16;
    return made;
}

// The error that a call throws.
template <typename Call>
std::optional<kvpages::Error> thrown(Call&& call) {
    try {
        call();
    } catch (const kvpages::Error& error) {
        return error;
    }
    return std::nullopt;
}

}  // namespace

TEST(Hpp, FromLayersToViews) {
    const auto backend = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
    kvpages::Model model = two_layers(backend);
    model.share("layers.2.attn", "layers.0.attn", &backend);
    EXPECT_EQ(model.num_layers(), 3u);
    const auto plan = kvpages::Plan::make(model, config());
    EXPECT_EQ(plan.num_workers(), 1u);
    EXPECT_EQ(plan.worker().num_blocks, 97u);
    EXPECT_EQ(plan.group(0).block_size, 16u);
    EXPECT_EQ(plan.group_layers(0), (std::vector<std::string>{"layers.0.attn", "layers.2.attn"}));
    EXPECT_EQ(plan.tensor(0).size_bytes, 97u * 1024);
    EXPECT_EQ(plan.max_model_len(), 64u);
    EXPECT_NE(plan.explain().find("layers.1.attn"), std::string::npos);
    EXPECT_EQ(plan.explain_json().front(), '{');
    EXPECT_EQ(plan.explain_json().back(), '}');

    const auto cache = kvpages::Cache::allocate(plan, kvpages::Memory::host());
    EXPECT_EQ(cache.num_layers(), 3u);
    EXPECT_EQ(cache.num_blocks(), 97u);
    EXPECT_EQ(cache.find("layers.2.attn"), 2u);
    EXPECT_STREQ(cache.layer_name(1), "layers.1.attn");
    EXPECT_EQ(cache.layer_name(3), nullptr);
    EXPECT_EQ(cache.num_views(0), 1u);
    EXPECT_EQ(cache.bound_layers(), (std::vector<std::size_t>{0, 1, 2}));
    EXPECT_EQ(cache.report(2).owner_layer, 0u);
    ASSERT_EQ(cache.regions().size(), 1u);
    EXPECT_EQ(cache.regions()[0].block_step_bytes, 1024u);

    const kvpages::Tensor kv = cache.view("layers.0.attn");
    EXPECT_EQ(kv.dtype, kvpages::Dtype::bf16);
    EXPECT_EQ(std::vector<std::int64_t>(kv.shape.begin(), kv.shape.end()),
              (std::vector<std::int64_t>{97, 2, 16, 16}));
    EXPECT_EQ(std::vector<std::int64_t>(kv.strides.begin(), kv.strides.end()),
              (std::vector<std::int64_t>{512, 16, 32, 1}));
    kv.at<std::uint16_t>(3, 1, 5, 7) = 0xBEEF;
    EXPECT_EQ(static_cast<std::uint16_t*>(kv.data)[3 * 512 + 16 + 5 * 32 + 7], 0xBEEF);
    EXPECT_EQ(cache.view("layers.2.attn").at<std::uint16_t>(3u, 1u, 5, std::int64_t{7}), 0xBEEF);
}

TEST(Hpp, HandlesMove) {
    auto backend = kvpages::Backend::preset(kvpages::Preset::triton_hnd);
    const auto* raw_backend = backend.get();
    kvpages::Backend moved = std::move(backend);
    EXPECT_EQ(moved.get(), raw_backend);
    EXPECT_EQ(backend.get(), nullptr);  // NOLINT: what is left after a move

    kvpages::Model model = two_layers(moved);
    kvpages::Model other;
    other.add("dropped", spec());
    other = std::move(model);
    EXPECT_EQ(other.num_layers(), 2u);
    auto plan = kvpages::Plan::make(other, config());
    auto second = kvpages::Plan::make(other, config(50000));
    second = std::move(plan);
    EXPECT_EQ(second.worker().num_blocks, 97u);
    auto memory = kvpages::Memory::host();
    auto cache = kvpages::Cache::allocate(second, memory);
    const void* data = cache.view(0).data;
    kvpages::Cache kept = std::move(cache);
    // Nothing but the cache is left.
    second = kvpages::Plan::make(other, config());
    other = kvpages::Model();
    memory = kvpages::Memory::host();
    EXPECT_EQ(kept.view(0).data, data);
    kept.view(0).at<std::uint16_t>(96, 1, 15, 15) = 1;
}

TEST(Hpp, ErrorsHaveStatusKindAndText) {
    kvpages::Model model;
    kvpages::AttentionSpec bad = spec();
    bad.head_size = 0;
    const auto error = thrown([&] { model.add("layers.7.attn", bad); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->status(), KVPAGES_STATUS_INVALID_ARGUMENT);
    EXPECT_EQ(error->kind(), "bad_values");
    EXPECT_NE(std::string(error->what()).find("layers.7.attn"), std::string::npos);
    EXPECT_EQ(model.num_layers(), 0u);
    model.add("layers.7.attn", spec());
    EXPECT_EQ(model.num_layers(), 1u);

    const auto lost = thrown([&] {
        const auto plan = kvpages::Plan::make(model, config());
        static_cast<void>(kvpages::Cache::allocate(plan, kvpages::Memory::host(), 1));
    });
    ASSERT_TRUE(lost);
    EXPECT_EQ(lost->status(), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(lost->kind(), "not_found");
    const auto poor = thrown([&] { static_cast<void>(kvpages::Plan::make(model, config(100))); });
    ASSERT_TRUE(poor);
    EXPECT_EQ(poor->status(), KVPAGES_STATUS_DOES_NOT_FIT);
    const auto nobody = thrown([] {
        static_cast<void>(
            kvpages::Plan::make({kvpages::Worker{nullptr, 1}}, kvpages::PlanConfig{}));
    });
    ASSERT_TRUE(nobody);
    EXPECT_EQ(nobody->status(), KVPAGES_STATUS_NULL_ARGUMENT);
}

TEST(Hpp, TryMakeSaysByHowMuchItDoesNotFit) {
    const auto backend = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
    const kvpages::Model model = two_layers(backend);
    kvpages_shortfall shortfall = KVPAGES_SHORTFALL_INIT;
    // 4 blocks of full and 4 of sliding attention, and block 0.
    EXPECT_FALSE(kvpages::Plan::try_make({{&model, 100000}, {&model, 9215}}, config(), shortfall));
    EXPECT_EQ(shortfall.worker, 1u);
    EXPECT_EQ(shortfall.needed_bytes, 9216u);
    EXPECT_EQ(shortfall.available_bytes, 9215u);
    EXPECT_EQ(shortfall.longest_model_len, 48u);
    const auto plan = kvpages::Plan::try_make({{&model, 9216}}, config(), shortfall);
    ASSERT_TRUE(plan);
    EXPECT_EQ(plan->worker().num_blocks, 9u);
    kvpages::PlanConfig reference = config();
    reference.policy = kvpages::Policy::reference;  // which hands out block 0, too
    EXPECT_TRUE(kvpages::Plan::try_make({{&model, 8192}}, reference, shortfall));
    kvpages::PlanConfig wrong = config();
    wrong.max_model_len = 0;
    const auto error = thrown([&] {
        static_cast<void>(kvpages::Plan::try_make({{&model, 8192}}, wrong, shortfall));
    });
    ASSERT_TRUE(error) << "only a lack of memory is an empty result";
    EXPECT_EQ(error->kind(), "bad_values");
}

TEST(Hpp, PlanConfigReachesThePlan) {
    const auto backend = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
    const kvpages::Model model = two_layers(backend);
    kvpages::PlanConfig overridden = config(0);
    overridden.num_blocks_override = 12;
    EXPECT_EQ(kvpages::Plan::make(model, overridden).worker().num_blocks, 12u);
    kvpages::PlanConfig fitted = config(8192);
    fitted.max_model_len = 100000;
    fitted.auto_fit = true;
    fitted.policy = kvpages::Policy::reference;
    EXPECT_EQ(kvpages::Plan::make(model, fitted).max_model_len(), 64u);
    fitted.reserved_blocks = 1;
    EXPECT_EQ(kvpages::Plan::make(model, fitted).max_model_len(), 48u);
    fitted.policy = kvpages::Policy::best;
    fitted.reserved_blocks = 0;
    EXPECT_EQ(kvpages::Plan::make(model, fitted).max_model_len(), 48u) << "block 0 is not handed out";
    kvpages::PlanConfig one_table = config();
    one_table.hybrid_manager_off = true;
    EXPECT_EQ(kvpages::Plan::make(model, one_table).worker().num_groups, 1u);
    kvpages::PlanConfig packed = config();
    packed.cross_layer_blocks = true;
    EXPECT_EQ(kvpages::Plan::make(model, packed).tensor(0).block_stride_bytes, 1024u);
}

TEST(Hpp, PoliciesAreChosen) {
    // 20 full layers and 30 sliding ones: 20, 15 and 15, or 10 in each group.
    const auto backend = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
    kvpages::AttentionSpec full;
    full.num_kv_heads = 1;
    full.head_size = 16;
    kvpages::AttentionSpec sliding = full;
    sliding.kind = kvpages::AttentionKind::sliding_window;
    sliding.sliding_window = 64;
    kvpages::Model model;
    for (int i = 0; i < 50; ++i) {
        model.add("layers." + std::to_string(i) + ".attn", i < 20 ? full : sliding, backend);
    }
    kvpages::PlanConfig config;
    config.memory_bytes = 1 << 26;
    config.max_model_len = 512;
    config.max_tokens_in_flight = 16;
    config.reserved_blocks = 1;
    config.policy = kvpages::Policy::reference;
    const auto reference = kvpages::Plan::make(model, config).worker();
    EXPECT_EQ(reference.num_groups, 3u);
    config.policy = kvpages::Policy::compact;
    config.typical_len = 300;
    const auto plan = kvpages::Plan::make(model, config);
    EXPECT_EQ(plan.worker().num_groups, 5u);
    EXPECT_EQ(plan.worker().num_tensors, 10u);
    EXPECT_GT(plan.worker().capacity_tokens, reference.capacity_tokens);
    const auto cache = kvpages::Cache::allocate(plan, kvpages::Memory::host());
    EXPECT_EQ(cache.view("layers.0.attn").data, cache.view("layers.20.attn").data);
    // Nothing may be counted twice: block 0 is kept although nobody says so.
    config.reserved_blocks = 0;
    EXPECT_EQ(kvpages::Plan::make(model, config).worker().capacity_tokens,
              plan.worker().capacity_tokens);
}

TEST(Hpp, SpecsAndBackendsOfOnesOwn) {
    kvpages::StateSpec state;
    state.add(kvpages::Dtype::bf16, {3, 8}).add(kvpages::Dtype::f32, {2, 4});
    EXPECT_EQ(kvpages::describe(state).page_size_bytes, 80u);
    kvpages::StateSpec copy = state;
    state = kvpages::StateSpec();
    EXPECT_EQ(kvpages::describe(copy).page_size_bytes, 80u);
    EXPECT_EQ(kvpages::describe(spec()).key_elements, 8u);
    EXPECT_EQ(kvpages::kv_heads_per_rank(2, 8).heads, 1u);
    EXPECT_EQ(kvpages::kv_heads_per_rank(2, 8).replicas, 4u);

    kvpages::BackendConfig own;
    own.name = "own";
    own.layout = "kv | block | token | head | content";
    own.kernel_block_sizes = {8};
    const kvpages::Backend backend(own);
    EXPECT_STREQ(kvpages_backend_name(backend.get()), "own");
    kvpages::Model model;
    model.add("layers.0", spec(), backend);
    kvpages::PlanParts parts;
    parts.num_blocks = 3;
    parts.groups.push_back({{"layers.0"}, false});
    parts.tensors.push_back({3 * 1024, 0, 0, {"layers.0"}});
    const auto plan = kvpages::Plan::from_parts(model, parts);
    EXPECT_EQ(plan.group(0).kernel_block_size, 8u);
    std::vector<unsigned char> buffer(4096, 0xEE);
    const auto cache = kvpages::Cache::allocate(
        plan, kvpages::Memory::adopted(buffer.data(), buffer.size()));
    EXPECT_EQ(cache.view(0).shape[1], 6);
    EXPECT_GE(cache.view(0).data, static_cast<void*>(buffer.data()));
    own.layout = "block | nonsense";
    const auto error = thrown([&] { static_cast<void>(kvpages::Backend(own)); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), "layout_unknown_axis");
}

TEST(Hpp, DescriptorsAndResharding) {
    const auto cache_of = [](std::uint64_t heads, kvpages::Preset preset) {
        kvpages::AttentionSpec of_rank = spec();
        of_rank.num_kv_heads = heads;
        kvpages::Model model;
        model.add("layers.0", of_rank, kvpages::Backend::preset(preset));
        kvpages::PlanConfig config;
        config.num_blocks_override = 4;
        config.max_model_len = 16;
        return kvpages::Cache::allocate(kvpages::Plan::make(model, config),
                                        kvpages::Memory::host());
    };
    const auto whole = cache_of(2, kvpages::Preset::flash_attention_nhd);
    const auto half = cache_of(1, kvpages::Preset::flash_attention_hnd);
    kvpages::DescriptorConfig of_whole;
    of_whole.tensor_parallel_size = 1;
    kvpages::DescriptorConfig of_half;
    of_half.tensor_parallel_size = 2;
    of_half.tensor_parallel_rank = 1;
    of_half.model_kv_heads = {2};
    const auto source = kvpages::Descriptor::parse(whole.descriptor(of_whole));
    const auto target = kvpages::Descriptor::parse(half.descriptor(of_half));
    EXPECT_EQ(source.json(), whole.descriptor(of_whole));
    EXPECT_EQ(source.info().num_blocks, 4u);
    EXPECT_EQ(source.num_layers(), 1u);
    EXPECT_STREQ(source.layer_name(0), "layers.0");
    EXPECT_EQ(source.find("layers.0"), 0u);
    EXPECT_EQ(source.group(0).block_size, 16u);
    EXPECT_EQ(source.allocation_bytes(0), whole.allocation(0).size_bytes);
    EXPECT_EQ(target.layer(0).first_model_kv_head, 1u);
    ASSERT_EQ(source.block_runs(0, 3).size(), 1u);

    // The value of head 1 of slot 5 goes from block 3 to block 2, where it is head 0.
    const kvpages_row from = source.value(0, 3, 5, 1);
    const kvpages_row to = target.value(0, 2, 5, 0);
    auto* bytes = static_cast<unsigned char*>(whole.allocation(0).data);
    bytes[from.offset_bytes] = 0x7A;
    EXPECT_NE(from.offset_bytes, source.key(0, 3, 5, 1).offset_bytes);
    const kvpages::Descriptor* const sources[] = {&source};
    const kvpages::Descriptor* const targets[] = {&target};
    const auto reshard = kvpages::Reshard::make(sources, targets);
    const kvpages_block_move moves[] = {{0, 3, 2}};
    const kvpages_allocation of_source = whole.allocation(0);
    const kvpages_allocation of_target = half.allocation(0);
    const kvpages_rank_memory source_memory[] = {{&of_source, 1}};
    const kvpages_rank_memory target_memory[] = {{&of_target, 1}};
    kvpages::copy_strided(reshard.copies(moves), source_memory, target_memory);
    EXPECT_EQ(static_cast<unsigned char*>(of_target.data)[to.offset_bytes], 0x7A);
    const auto error = thrown([&] { kvpages::Descriptor::parse("{}"); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind(), "descriptor_not_json");
}
