// Calls that must fail: the status, the kind, what the message says, what the outputs hold, and
// that nothing else has changed.
#include "support/api.h"
#include "support/bytes.h"
#include "support/failure.h"
#include "support/garbage.h"
#include "support/world.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

using namespace support;
using Words = std::vector<std::string>;

namespace {

// What came of a call: its status, and whether all its outputs are zero.
struct Outcome {
    std::int32_t status = 0;
    bool is_zero = true;
};

struct Bad {
    std::string name;
    std::function<Outcome()> call;
};

void expect_all(const World& world, const std::vector<Bad>& table, std::int32_t status,
                const std::string& kind) {
    for (const Bad& bad : table) {
        SCOPED_TRACE(bad.name);
        const Outcome outcome = bad.call();
        EXPECT_TRUE(fails(outcome.status, status, kind));
        EXPECT_TRUE(outcome.is_zero) << "an output is not zero";
        world.expect_unchanged();
    }
}

std::int32_t noop_allocate(void*, std::size_t, std::size_t, void**) { return 1; }
void noop_release(void*, void*, std::size_t) {}

}  // namespace

TEST(HostileNull, Specs) {
    const World w;
    const kvpages_spec* const specs[]{&w.of_full};
    const kvpages_spec* const none[]{nullptr};
    const kvpages_spec* const second[]{&w.of_full, nullptr};
    kvpages_limits limits = KVPAGES_LIMITS_INIT;
    limits.max_model_len = 16;
    std::uint64_t sizes[4]{};
    const std::vector<Bad> table{
        {"describe: spec", [&] {
             Info<kvpages_spec_info> out;
             return Outcome{kvpages_spec_describe(nullptr, &out), out.is_zero()};
         }},
        {"describe: out", [&] { return Outcome{kvpages_spec_describe(&w.of_full, nullptr)}; }},
        {"demand: spec", [&] {
             Info<kvpages_demand> out;
             return Outcome{kvpages_spec_demand(nullptr, &limits, &out), out.is_zero()};
         }},
        {"demand: limits", [&] {
             Info<kvpages_demand> out;
             return Outcome{kvpages_spec_demand(&w.of_full, nullptr, &out), out.is_zero()};
         }},
        {"demand: out",
         [&] { return Outcome{kvpages_spec_demand(&w.of_full, &limits, nullptr)}; }},
        {"merge: specs", [&] {
             Info<kvpages_spec> out;
             return Outcome{kvpages_spec_merge(nullptr, 1, &out), out.is_zero()};
         }},
        {"merge: specs[0]", [&] {
             Info<kvpages_spec> out;
             return Outcome{kvpages_spec_merge(none, 1, &out), out.is_zero()};
         }},
        {"merge: specs[1]", [&] {
             Info<kvpages_spec> out;
             return Outcome{kvpages_spec_merge(second, 2, &out), out.is_zero()};
         }},
        {"merge: out", [&] { return Outcome{kvpages_spec_merge(specs, 1, nullptr)}; }},
        {"uniformity: specs", [&] {
             Info<kvpages_uniformity> out;
             return Outcome{kvpages_spec_uniformity(nullptr, 2, &out), out.is_zero()};
         }},
        {"uniformity: specs[1]", [&] {
             Info<kvpages_uniformity> out;
             return Outcome{kvpages_spec_uniformity(second, 2, &out), out.is_zero()};
         }},
        {"uniformity: out", [&] { return Outcome{kvpages_spec_uniformity(specs, 1, nullptr)}; }},
        {"set_describe: specs", [&] {
             Info<kvpages_spec_set_info> out;
             return Outcome{kvpages_spec_set_describe(nullptr, 1, &out), out.is_zero()};
         }},
        {"set_describe: specs[0]", [&] {
             Info<kvpages_spec_set_info> out;
             return Outcome{kvpages_spec_set_describe(none, 1, &out), out.is_zero()};
         }},
        {"set_describe: out",
         [&] { return Outcome{kvpages_spec_set_describe(specs, 1, nullptr)}; }},
        {"set_copy_page_sizes: specs", [&] {
             Out<std::size_t> count;
             return Outcome{kvpages_spec_set_copy_page_sizes(nullptr, 1, sizes, 4, &count),
                            count.is_zero()};
         }},
        {"set_copy_page_sizes: page_sizes_bytes", [&] {
             Out<std::size_t> count;
             return Outcome{kvpages_spec_set_copy_page_sizes(specs, 1, nullptr, 4, &count)};
         }},
        {"set_copy_page_sizes: out_count", [&] {
             return Outcome{kvpages_spec_set_copy_page_sizes(specs, 1, sizes, 4, nullptr)};
         }},
        {"set_demand: specs", [&] {
             Info<kvpages_demand> out;
             return Outcome{kvpages_spec_set_demand(nullptr, 1, &limits, &out), out.is_zero()};
         }},
        {"set_demand: limits", [&] {
             Info<kvpages_demand> out;
             return Outcome{kvpages_spec_set_demand(specs, 1, nullptr, &out), out.is_zero()};
         }},
        {"set_demand: out",
         [&] { return Outcome{kvpages_spec_set_demand(specs, 1, &limits, nullptr)}; }},
        {"quant_mode: cache_dtype", [&] {
             Out<std::uint32_t> out;
             return Outcome{kvpages_quant_mode_from_cache_dtype(nullptr, &out), out.is_zero()};
         }},
        {"quant_mode: out",
         [&] { return Outcome{kvpages_quant_mode_from_cache_dtype("fp8", nullptr)}; }},
        {"kv_heads: out_heads", [&] {
             Out<std::uint64_t> out;
             return Outcome{kvpages_kv_heads_per_rank(8, 2, nullptr, &out), out.is_zero()};
         }},
        {"kv_heads: out_replicas", [&] {
             Out<std::uint64_t> out;
             return Outcome{kvpages_kv_heads_per_rank(8, 2, &out, nullptr), out.is_zero()};
         }},
        {"state arrays", [&] {
             kvpages_spec spec = KVPAGES_SPEC_INIT;
             spec.kind = KVPAGES_SPEC_KIND_STATE;
             spec.block_size = 16;
             spec.state_kind = KVPAGES_STATE_KIND_CUSTOM;
             spec.num_state_dtypes = spec.num_state_shapes = spec.num_state_dims = 1;
             Info<kvpages_spec_info> out;
             return Outcome{kvpages_spec_describe(&spec, &out), out.is_zero()};
         }},
    };
    expect_all(w, table, KVPAGES_STATUS_NULL_ARGUMENT, "null_argument");
}

TEST(HostileNull, BackendsAndModels) {
    const World w;
    const auto config = [] {
        kvpages_backend_config good = KVPAGES_BACKEND_CONFIG_INIT;
        static const std::uint64_t sizes[]{16};
        good.name = "B";
        good.layout = packed_nhd;
        good.kernel_block_sizes = sizes;
        good.num_kernel_block_sizes = 1;
        return good;
    };
    const auto refused = [](const kvpages_backend_config& given) {
        Out<kvpages_backend*> out;
        return Outcome{kvpages_backend_create(&given, &out), out.is_zero()};
    };
    const kvpages_backend* const none[]{w.kernels.get(), nullptr};
    const auto layer = [&w] {
        kvpages_layer good = KVPAGES_LAYER_INIT;
        good.name = "new";
        good.spec = &w.of_full;
        return good;
    };
    const std::vector<Bad> table{
        {"backend: config", [&] {
             Out<kvpages_backend*> out;
             return Outcome{kvpages_backend_create(nullptr, &out), out.is_zero()};
         }},
        {"backend: out", [&] {
             const kvpages_backend_config given = config();
             return Outcome{kvpages_backend_create(&given, nullptr)};
         }},
        {"backend: name", [&] {
             kvpages_backend_config given = config();
             given.name = nullptr;
             return refused(given);
         }},
        {"backend: kernel_block_sizes", [&] {
             kvpages_backend_config given = config();
             given.kernel_block_sizes = nullptr;
             return refused(given);
         }},
        {"backend: kernel_block_multiples", [&] {
             kvpages_backend_config given = config();
             given.num_kernel_block_multiples = 1;
             return refused(given);
         }},
        {"backend: quantised_layouts", [&] {
             kvpages_backend_config given = config();
             given.num_quantised_layouts = 1;
             return refused(given);
         }},
        {"backend: quantised_layouts[0].layout", [&] {
             kvpages_backend_config given = config();
             const kvpages_quantised_layout entry{KVPAGES_QUANT_MODE_NVFP4, 0, nullptr, nullptr};
             given.quantised_layouts = &entry;
             given.num_quantised_layouts = 1;
             return refused(given);
         }},
        {"preset: out", [&] { return Outcome{kvpages_backend_create_preset(1, nullptr)}; }},
        {"select: backends", [&] {
             Out<std::uint64_t> out;
             return Outcome{kvpages_select_kernel_block_size(16, nullptr, 1, &out), out.is_zero()};
         }},
        {"select: backends[1]", [&] {
             Out<std::uint64_t> out;
             return Outcome{kvpages_select_kernel_block_size(16, none, 2, &out), out.is_zero()};
         }},
        {"select: out",
         [&] { return Outcome{kvpages_select_kernel_block_size(16, none, 1, nullptr)}; }},
        {"model: out", [&] { return Outcome{kvpages_model_create(nullptr)}; }},
        {"add_layer: model", [&] {
             const kvpages_layer given = layer();
             return Outcome{kvpages_model_add_layer(nullptr, &given)};
         }},
        {"add_layer: layer",
         [&] { return Outcome{kvpages_model_add_layer(w.layers.get(), nullptr)}; }},
        {"add_layer: name", [&] {
             kvpages_layer given = layer();
             given.name = nullptr;
             return Outcome{kvpages_model_add_layer(w.layers.get(), &given)};
         }},
        {"add_layer: neither spec nor target", [&] {
             kvpages_layer given = layer();
             given.spec = nullptr;
             return Outcome{kvpages_model_add_layer(w.layers.get(), &given)};
         }},
        {"find_layer: model", [&] {
             Out<std::size_t> out;
             return Outcome{kvpages_model_find_layer(nullptr, "layers.0.attn", &out),
                            out.is_zero()};
         }},
        {"find_layer: name", [&] {
             Out<std::size_t> out;
             return Outcome{kvpages_model_find_layer(w.layers.get(), nullptr, &out),
                            out.is_zero()};
         }},
        {"find_layer: out", [&] {
             return Outcome{kvpages_model_find_layer(w.layers.get(), "layers.0.attn", nullptr)};
         }},
    };
    expect_all(w, table, KVPAGES_STATUS_NULL_ARGUMENT, "null_argument");
}

TEST(HostileNull, Plans) {
    const World w;
    const kvpages_worker worker{w.layers.get(), 100000};
    const kvpages_worker nobody{nullptr, 100000};
    const kvpages_plan* p = w.planned.get();
    kvpages_block_size_config sizes = KVPAGES_BLOCK_SIZE_CONFIG_INIT;
    sizes.cache_block_size = 16;
    kvpages_hybrid_config hybrid = KVPAGES_HYBRID_CONFIG_INIT;
    hybrid.block_size = hybrid.smallest_kernel_block = hybrid.attention_bytes_per_token = 1;
    const char* const name[]{"layers.0.attn"};
    const char* const no_name[]{nullptr};
    const auto parts_fail = [&w](const std::function<void(kvpages_plan_parts&)>& spoil) {
        kvpages_plan_parts parts = KVPAGES_PLAN_PARTS_INIT;
        parts.num_blocks = 1;
        spoil(parts);
        Out<kvpages_plan*> out;
        return Outcome{kvpages_plan_create_from_parts(w.layers.get(), &parts, &out),
                       out.is_zero()};
    };
    const kvpages_part_group group_without_names{nullptr, 1, 0};
    const kvpages_part_group group_of_null{no_name, 1, 0};
    const kvpages_part_group group{name, 1, 0};
    const kvpages_part_tensor tensor_without_names{1024, 0, 0, nullptr, 1};
    const kvpages_part_tensor tensor_of_null{1024, 0, 0, no_name, 1};
    char text[8];
    const std::vector<Bad> table{
        {"create: config", [&] {
             Out<kvpages_plan*> out;
             Info<kvpages_shortfall> shortfall;
             return Outcome{kvpages_plan_create(nullptr, &worker, 1, &out, &shortfall),
                            out.is_zero() && shortfall.is_zero()};
         }},
        {"create: workers", [&] {
             Out<kvpages_plan*> out;
             Info<kvpages_shortfall> shortfall;
             return Outcome{kvpages_plan_create(&w.config, nullptr, 1, &out, &shortfall),
                            out.is_zero() && shortfall.is_zero()};
         }},
        {"create: model", [&] {
             Out<kvpages_plan*> out;
             return Outcome{kvpages_plan_create(&w.config, &nobody, 1, &out, nullptr),
                            out.is_zero()};
         }},
        {"create: out", [&] {
             Info<kvpages_shortfall> shortfall;
             return Outcome{kvpages_plan_create(&w.config, &worker, 1, nullptr, &shortfall),
                            shortfall.is_zero()};
         }},
        {"parts: model", [&] {
             const kvpages_plan_parts parts = KVPAGES_PLAN_PARTS_INIT;
             Out<kvpages_plan*> out;
             return Outcome{kvpages_plan_create_from_parts(nullptr, &parts, &out), out.is_zero()};
         }},
        {"parts: parts", [&] {
             Out<kvpages_plan*> out;
             return Outcome{kvpages_plan_create_from_parts(w.layers.get(), nullptr, &out),
                            out.is_zero()};
         }},
        {"parts: out", [&] {
             const kvpages_plan_parts parts = KVPAGES_PLAN_PARTS_INIT;
             return Outcome{kvpages_plan_create_from_parts(w.layers.get(), &parts, nullptr)};
         }},
        {"parts: groups",
         [&] { return parts_fail([](kvpages_plan_parts& parts) { parts.num_groups = 1; }); }},
        {"parts: tensors",
         [&] { return parts_fail([](kvpages_plan_parts& parts) { parts.num_tensors = 1; }); }},
        {"parts: group's layer_names", [&] {
             return parts_fail([&](kvpages_plan_parts& parts) {
                 parts.groups = &group_without_names;
                 parts.num_groups = 1;
             });
         }},
        {"parts: group's layer_names[0]", [&] {
             return parts_fail([&](kvpages_plan_parts& parts) {
                 parts.groups = &group_of_null;
                 parts.num_groups = 1;
             });
         }},
        {"parts: tensor's layer_names", [&] {
             return parts_fail([&](kvpages_plan_parts& parts) {
                 parts.tensors = &tensor_without_names;
                 parts.num_tensors = 1;
             });
         }},
        {"parts: tensor's layer_names[0]", [&] {
             return parts_fail([&](kvpages_plan_parts& parts) {
                 parts.tensors = &tensor_of_null;
                 parts.num_tensors = 1;
             });
         }},
        {"parts: kernel_block_sizes", [&] {
             return parts_fail([&](kvpages_plan_parts& parts) {
                 parts.groups = &group;
                 parts.num_groups = 1;
                 parts.num_kernel_block_sizes = 1;
             });
         }},
        {"get_worker: plan", [&] {
             Info<kvpages_worker_info> out;
             return Outcome{kvpages_plan_get_worker(nullptr, 0, &out), out.is_zero()};
         }},
        {"get_worker: out", [&] { return Outcome{kvpages_plan_get_worker(p, 0, nullptr)}; }},
        {"get_group: plan", [&] {
             Info<kvpages_group_info> out;
             return Outcome{kvpages_plan_get_group(nullptr, 0, 0, &out), out.is_zero()};
         }},
        {"get_group: out", [&] { return Outcome{kvpages_plan_get_group(p, 0, 0, nullptr)}; }},
        {"get_group_spec: plan", [&] {
             Info<kvpages_spec> out;
             Out<const char*> layer;
             return Outcome{
                 kvpages_plan_get_group_spec(nullptr, 0, 0, 0, &out, &layer),
                 out.is_zero() && layer.is_zero()};
         }},
        {"get_group_spec: out", [&] {
             Out<const char*> layer;
             return Outcome{kvpages_plan_get_group_spec(p, 0, 0, 0, nullptr, &layer),
                            layer.is_zero()};
         }},
        {"get_tensor: plan", [&] {
             Info<kvpages_tensor_info> out;
             return Outcome{kvpages_plan_get_tensor(nullptr, 0, 0, &out), out.is_zero()};
         }},
        {"get_tensor: out", [&] { return Outcome{kvpages_plan_get_tensor(p, 0, 0, nullptr)}; }},
        {"resolve: plan", [&] {
             Out<std::uint64_t> a;
             Out<std::uint64_t> b;
             return Outcome{kvpages_plan_resolve_block_sizes(nullptr, &sizes, &a, &b),
                            a.is_zero() && b.is_zero()};
         }},
        {"resolve: config", [&] {
             Out<std::uint64_t> a;
             Out<std::uint64_t> b;
             return Outcome{kvpages_plan_resolve_block_sizes(p, nullptr, &a, &b),
                            a.is_zero() && b.is_zero()};
         }},
        {"resolve: out_scheduler_block_size", [&] {
             Out<std::uint64_t> b;
             return Outcome{kvpages_plan_resolve_block_sizes(p, &sizes, nullptr, &b),
                            b.is_zero()};
         }},
        {"resolve: out_hash_block_size", [&] {
             Out<std::uint64_t> a;
             return Outcome{kvpages_plan_resolve_block_sizes(p, &sizes, &a, nullptr),
                            a.is_zero()};
         }},
        {"explanation: plan", [&] {
             Out<std::size_t> length;
             return Outcome{kvpages_plan_copy_explanation(nullptr, 0, text, 8, &length),
                            length.is_zero()};
         }},
        {"explanation: buffer", [&] {
             Out<std::size_t> length;
             return Outcome{kvpages_plan_copy_explanation(p, 0, nullptr, 1 << 20, &length)};
         }},
        {"explanation: out_length",
         [&] { return Outcome{kvpages_plan_copy_explanation(p, 0, text, 8, nullptr)}; }},
        {"tuple_count: values", [&] {
             Out<std::uint64_t> out;
             return Outcome{kvpages_layer_tuple_count(nullptr, 2, 0, &out), out.is_zero()};
         }},
        {"tuple_count: out", [&] {
             const std::uint64_t values[]{1};
             return Outcome{kvpages_layer_tuple_count(values, 1, 0, nullptr)};
         }},
        {"hybrid: config", [&] {
             Info<kvpages_hybrid_block> out;
             return Outcome{kvpages_hybrid_block_size(nullptr, &out), out.is_zero()};
         }},
        {"hybrid: out", [&] { return Outcome{kvpages_hybrid_block_size(&hybrid, nullptr)}; }},
    };
    expect_all(w, table, KVPAGES_STATUS_NULL_ARGUMENT, "null_argument");
}

TEST(HostileNull, MemoryCachesAndBinding) {
    const World w;
    const kvpages_cache* c = w.allocated.get();
    kvpages_cache_config good = KVPAGES_CACHE_CONFIG_INIT;
    good.memory = w.memory.get();
    kvpages_cache_config without_memory = KVPAGES_CACHE_CONFIG_INIT;
    kvpages_memory_callbacks callbacks = KVPAGES_MEMORY_CALLBACKS_INIT;
    callbacks.allocate = noop_allocate;
    callbacks.release = noop_release;
    const std::int64_t ones[]{1};
    std::vector<std::size_t> numbers(8);
    const char* const names[]{"layers.0"};
    const char* const no_name[]{nullptr};
    const auto bind_fails = [&](const std::function<void(kvpages_bind_config&)>& spoil,
                                std::size_t* order, std::size_t* bound) {
        kvpages_bind_config config = KVPAGES_BIND_CONFIG_INIT;
        config.layer_names = config.context_names = names;
        config.num_layers = config.num_context_names = 1;
        spoil(config);
        return Outcome{kvpages_bind_layers(&config, order, bound)};
    };
    const auto as_it_is = [](kvpages_bind_config&) {};
    std::size_t* some = numbers.data();
    const std::vector<Bad> table{
        {"host: out", [&] { return Outcome{kvpages_memory_create_host(nullptr)}; }},
        {"external: callbacks", [&] {
             Out<kvpages_memory*> out;
             return Outcome{kvpages_memory_create_external(nullptr, &out), out.is_zero()};
         }},
        {"external: out",
         [&] { return Outcome{kvpages_memory_create_external(&callbacks, nullptr)}; }},
        {"external: allocate", [&] {
             kvpages_memory_callbacks given = callbacks;
             given.allocate = nullptr;
             Out<kvpages_memory*> out;
             return Outcome{kvpages_memory_create_external(&given, &out), out.is_zero()};
         }},
        {"external: release", [&] {
             kvpages_memory_callbacks given = callbacks;
             given.release = nullptr;
             Out<kvpages_memory*> out;
             return Outcome{kvpages_memory_create_external(&given, &out), out.is_zero()};
         }},
        {"adopted: data", [&] {
             Out<kvpages_memory*> out;
             return Outcome{kvpages_memory_create_adopted(nullptr, 16, &out), out.is_zero()};
         }},
        {"adopted: out",
         [&] { return Outcome{kvpages_memory_create_adopted(numbers.data(), 8, nullptr)}; }},
        {"cache: plan", [&] {
             Out<kvpages_cache*> out;
             Out<std::uint64_t> needed;
             return Outcome{kvpages_cache_create(nullptr, &good, &out, &needed),
                            out.is_zero() && needed.is_zero()};
         }},
        {"cache: config", [&] {
             Out<kvpages_cache*> out;
             Out<std::uint64_t> needed;
             return Outcome{kvpages_cache_create(w.planned.get(), nullptr, &out, &needed),
                            out.is_zero() && needed.is_zero()};
         }},
        {"cache: out", [&] {
             return Outcome{kvpages_cache_create(w.planned.get(), &good, nullptr, nullptr)};
         }},
        {"cache: memory", [&] {
             Out<kvpages_cache*> out;
             return Outcome{kvpages_cache_create(w.planned.get(), &without_memory, &out, nullptr),
                            out.is_zero()};
         }},
        {"find_layer: cache", [&] {
             Out<std::size_t> out;
             return Outcome{kvpages_cache_find_layer(nullptr, "layers.0.attn", &out),
                            out.is_zero()};
         }},
        {"find_layer: name", [&] {
             Out<std::size_t> out;
             return Outcome{kvpages_cache_find_layer(c, nullptr, &out), out.is_zero()};
         }},
        {"find_layer: out",
         [&] { return Outcome{kvpages_cache_find_layer(c, "layers.0.attn", nullptr)}; }},
        {"get_view: cache", [&] {
             Out<kvpages_tensor> out;
             return Outcome{kvpages_cache_get_view(nullptr, 0, 0, &out), out.is_zero()};
         }},
        {"get_view: out", [&] { return Outcome{kvpages_cache_get_view(c, 0, 0, nullptr)}; }},
        {"export_dlpack: cache", [&] {
             Out<DLManagedTensorVersioned*> out;
             return Outcome{kvpages_cache_export_dlpack(nullptr, 0, 0, 0, &out), out.is_zero()};
         }},
        {"export_dlpack: out",
         [&] { return Outcome{kvpages_cache_export_dlpack(c, 0, 0, 0, nullptr)}; }},
        {"export_dlpack_unversioned: cache", [&] {
             Out<DLManagedTensor*> out;
             return Outcome{kvpages_cache_export_dlpack_unversioned(nullptr, 0, 0, &out),
                            out.is_zero()};
         }},
        {"export_dlpack_unversioned: out",
         [&] { return Outcome{kvpages_cache_export_dlpack_unversioned(c, 0, 0, nullptr)}; }},
        {"get_report: cache", [&] {
             Info<kvpages_view_report> out;
             return Outcome{kvpages_cache_get_report(nullptr, 0, 0, &out), out.is_zero()};
         }},
        {"get_report: out", [&] { return Outcome{kvpages_cache_get_report(c, 0, 0, nullptr)}; }},
        {"get_layer: cache", [&] {
             Info<kvpages_layer_info> out;
             return Outcome{kvpages_cache_get_layer(nullptr, 0, &out), out.is_zero()};
         }},
        {"get_layer: out", [&] { return Outcome{kvpages_cache_get_layer(c, 0, nullptr)}; }},
        {"get_axes: cache", [&] {
             Info<kvpages_view_axes> out;
             return Outcome{kvpages_cache_get_axes(nullptr, 0, &out), out.is_zero()};
         }},
        {"get_axes: out", [&] { return Outcome{kvpages_cache_get_axes(c, 0, nullptr)}; }},
        {"get_allocation: cache", [&] {
             Out<kvpages_allocation> out;
             return Outcome{kvpages_cache_get_allocation(nullptr, 0, &out), out.is_zero()};
         }},
        {"get_allocation: out",
         [&] { return Outcome{kvpages_cache_get_allocation(c, 0, nullptr)}; }},
        {"get_region: cache", [&] {
             Out<kvpages_region> out;
             return Outcome{kvpages_cache_get_region(nullptr, 0, &out), out.is_zero()};
         }},
        {"get_region: out", [&] { return Outcome{kvpages_cache_get_region(c, 0, nullptr)}; }},
        {"bound: cache", [&] {
             Out<std::size_t> count;
             return Outcome{
                 kvpages_cache_copy_bound_layers(nullptr, 1, some, numbers.size(), &count),
                 count.is_zero()};
         }},
        {"bound: layers", [&] {
             Out<std::size_t> count;
             return Outcome{kvpages_cache_copy_bound_layers(c, 1, nullptr, 8, &count)};
         }},
        {"bound: out_count", [&] {
             return Outcome{
                 kvpages_cache_copy_bound_layers(c, 1, some, numbers.size(), nullptr)};
         }},
        {"audit: view", [&] {
             Info<kvpages_view_report> out;
             return Outcome{kvpages_view_audit(nullptr, &out), out.is_zero()};
         }},
        {"audit: shape", [&] {
             const kvpages_view given{nullptr, ones, 1, 0, 1, 8};
             Info<kvpages_view_report> out;
             return Outcome{kvpages_view_audit(&given, &out), out.is_zero()};
         }},
        {"audit: strides", [&] {
             const kvpages_view given{ones, nullptr, 1, 0, 1, 8};
             Info<kvpages_view_report> out;
             return Outcome{kvpages_view_audit(&given, &out), out.is_zero()};
         }},
        {"audit: out", [&] {
             const kvpages_view given{ones, ones, 1, 0, 1, 8};
             return Outcome{kvpages_view_audit(&given, nullptr)};
         }},
        {"layer_index: name", [&] {
             Out<std::uint64_t> out;
             return Outcome{kvpages_layer_index(nullptr, 1, &out), out.is_zero()};
         }},
        {"layer_index: out", [&] { return Outcome{kvpages_layer_index("a.1", 1, nullptr)}; }},
        {"bind: config", [&] { return Outcome{kvpages_bind_layers(nullptr, some, some)}; }},
        {"bind: layer_names", [&] {
             return bind_fails([](kvpages_bind_config& b) { b.layer_names = nullptr; }, some,
                               some);
         }},
        {"bind: layer_names[0]", [&] {
             return bind_fails([&](kvpages_bind_config& b) { b.layer_names = no_name; }, some,
                               some);
         }},
        {"bind: context_names", [&] {
             return bind_fails([](kvpages_bind_config& b) { b.context_names = nullptr; }, some,
                               some);
         }},
        {"bind: context_names[0]", [&] {
             return bind_fails([&](kvpages_bind_config& b) { b.context_names = no_name; }, some,
                               some);
         }},
        {"bind: out_order", [&] { return bind_fails(as_it_is, nullptr, some); }},
        {"bind: out_bound", [&] { return bind_fails(as_it_is, some, nullptr); }},
    };
    expect_all(w, table, KVPAGES_STATUS_NULL_ARGUMENT, "null_argument");
}

TEST(HostileNull, AccessorsAndDestroyFunctions) {
    EXPECT_STREQ(kvpages_backend_name(nullptr), "");
    EXPECT_EQ(kvpages_model_num_layers(nullptr), 0u);
    EXPECT_EQ(kvpages_plan_num_workers(nullptr), 0u);
    EXPECT_EQ(kvpages_plan_max_model_len(nullptr), 0u);
    EXPECT_EQ(kvpages_plan_group_layer_name(nullptr, 0, 0, 0), nullptr);
    EXPECT_EQ(kvpages_plan_tensor_layer_name(nullptr, 0, 0, 0), nullptr);
    EXPECT_EQ(kvpages_cache_num_blocks(nullptr), 0u);
    EXPECT_EQ(kvpages_cache_num_layers(nullptr), 0u);
    EXPECT_EQ(kvpages_cache_layer_name(nullptr, 0), nullptr);
    EXPECT_EQ(kvpages_cache_num_views(nullptr, 0), 0u);
    EXPECT_EQ(kvpages_cache_num_allocations(nullptr), 0u);
    EXPECT_EQ(kvpages_cache_num_regions(nullptr), 0u);
    kvpages_backend_destroy(nullptr);
    kvpages_model_destroy(nullptr);
    kvpages_plan_destroy(nullptr);
    kvpages_memory_destroy(nullptr);
    kvpages_cache_destroy(nullptr);
}

// --- structs that grow -------------------------------------------------------

namespace {

// A struct in a larger one, so that a caller of another version can be played.
template <typename T>
struct Versioned {
    T known;
    unsigned char tail[64];

    explicit Versioned(const T& value, unsigned char fill = 0) {
        std::memcpy(&known, &value, sizeof known);
        std::memset(tail, fill, sizeof tail);
    }
};

template <typename T>
void expect_sizes(const World& world, const char* name, const T& good, bool is_input,
                  const std::function<std::int32_t(T*)>& call) {
    SCOPED_TRACE(name);
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{8}, sizeof(T) - 1,
                                   sizeof(T) / 2, std::size_t{1} << 20, SIZE_MAX, SIZE_MAX - 7}) {
        if (size == sizeof(T)) {
            continue;
        }
        Versioned<T> given(good);
        given.known.struct_size = size;
        EXPECT_TRUE(fails(call(&given.known), KVPAGES_STATUS_INVALID_ARGUMENT, "struct_size",
                          {name, std::to_string(size)}));
    }
    // A newer caller that uses nothing new.
    Versioned<T> newer(good);
    newer.known.struct_size = sizeof(T) + 64;
    EXPECT_EQ(call(&newer.known), KVPAGES_STATUS_OK) << kvpages_last_error_message();
    if (is_input) {
        // One that sets what the library cannot know, in any byte.
        for (const std::size_t byte : {std::size_t{0}, std::size_t{63}}) {
            Versioned<T> unknown(good);
            unknown.known.struct_size = sizeof(T) + 64;
            unknown.tail[byte] = 1;
            EXPECT_TRUE(fails(call(&unknown.known), KVPAGES_STATUS_INVALID_ARGUMENT,
                              "struct_size", {name, std::to_string(sizeof(T))}));
        }
        // What lies behind the stated size is not read.
        Versioned<T> beyond(good, 0xFF);
        EXPECT_EQ(call(&beyond.known), KVPAGES_STATUS_OK) << kvpages_last_error_message();
    } else {
        Versioned<T> dirty(good, 0x77);
        dirty.known.struct_size = sizeof(T) + 32;
        EXPECT_EQ(call(&dirty.known), KVPAGES_STATUS_OK) << kvpages_last_error_message();
        EXPECT_EQ(dirty.known.struct_size, sizeof(T) + 32);
        for (std::size_t byte = 0; byte < 64; ++byte) {
            EXPECT_EQ(dirty.tail[byte], byte < 32 ? 0 : 0x77) << byte;
        }
    }
    // A misaligned one.
    std::vector<unsigned char> bytes(sizeof(T) + 8);
    std::memcpy(bytes.data() + 1, &good, sizeof(T));
    EXPECT_TRUE(fails(call(reinterpret_cast<T*>(bytes.data() + 1)),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "misaligned_pointer", {name}));
    world.expect_unchanged();
}

}  // namespace

TEST(HostileStructSize, Inputs) {
    const World w;
    expect_sizes<kvpages_spec>(w, "kvpages_spec", w.of_full, true, [](kvpages_spec* spec) {
        kvpages_spec_info out = KVPAGES_SPEC_INFO_INIT;
        return kvpages_spec_describe(spec, &out);
    });
    kvpages_limits limits = KVPAGES_LIMITS_INIT;
    limits.max_model_len = 8;
    expect_sizes<kvpages_limits>(w, "kvpages_limits", limits, true, [&w](kvpages_limits* given) {
        kvpages_demand out = KVPAGES_DEMAND_INIT;
        return kvpages_spec_demand(&w.of_full, given, &out);
    });
    kvpages_backend_config backend_config = KVPAGES_BACKEND_CONFIG_INIT;
    const std::uint64_t kernel_sizes[]{16};
    backend_config.name = "B";
    backend_config.layout = packed_nhd;
    backend_config.kernel_block_sizes = kernel_sizes;
    backend_config.num_kernel_block_sizes = 1;
    expect_sizes<kvpages_backend_config>(
        w, "kvpages_backend_config", backend_config, true, [](kvpages_backend_config* given) {
            kvpages_backend* raw = nullptr;
            const std::int32_t status = kvpages_backend_create(given, &raw);
            kvpages_backend_destroy(raw);
            return status;
        });
    kvpages_layer layer = KVPAGES_LAYER_INIT;
    layer.name = "layer";
    layer.spec = &w.of_full;
    const Model scratch = model();
    std::size_t added = 0;
    expect_sizes<kvpages_layer>(w, "kvpages_layer", layer, true, [&](kvpages_layer* given) {
        EXPECT_EQ(kvpages_model_num_layers(scratch.get()), added);
        const std::string name = "layer." + std::to_string(added);
        if (reinterpret_cast<std::uintptr_t>(given) % alignof(kvpages_layer) == 0) {
            given->name = name.c_str();
        }
        const std::int32_t status = kvpages_model_add_layer(scratch.get(), given);
        added += status == KVPAGES_STATUS_OK ? 1 : 0;
        return status;
    });
    EXPECT_EQ(added, 2u);
    const kvpages_worker worker{w.layers.get(), 100000};
    expect_sizes<kvpages_plan_config>(
        w, "kvpages_plan_config", w.config, true, [&worker](kvpages_plan_config* given) {
            kvpages_plan* raw = nullptr;
            const std::int32_t status = kvpages_plan_create(given, &worker, 1, &raw, nullptr);
            if (raw != nullptr) {
                kvpages_plan_destroy(raw);
            }
            return status;
        });
    const Model empty = model();
    const kvpages_plan_parts parts = [] {
        kvpages_plan_parts given = KVPAGES_PLAN_PARTS_INIT;
        given.num_blocks = 1;
        return given;
    }();
    expect_sizes<kvpages_plan_parts>(
        w, "kvpages_plan_parts", parts, true, [&empty](kvpages_plan_parts* given) {
            kvpages_plan* raw = nullptr;
            const std::int32_t status =
                kvpages_plan_create_from_parts(empty.get(), given, &raw);
            if (raw != nullptr) {
                kvpages_plan_destroy(raw);
            }
            return status;
        });
    kvpages_block_size_config sizes = KVPAGES_BLOCK_SIZE_CONFIG_INIT;
    sizes.cache_block_size = 16;
    expect_sizes<kvpages_block_size_config>(
        w, "kvpages_block_size_config", sizes, true, [&w](kvpages_block_size_config* given) {
            std::uint64_t a = 0;
            std::uint64_t b = 0;
            return kvpages_plan_resolve_block_sizes(w.planned.get(), given, &a, &b);
        });
    kvpages_hybrid_config hybrid = KVPAGES_HYBRID_CONFIG_INIT;
    hybrid.block_size = hybrid.smallest_kernel_block = hybrid.attention_bytes_per_token = 1;
    expect_sizes<kvpages_hybrid_config>(w, "kvpages_hybrid_config", hybrid, true,
                                        [](kvpages_hybrid_config* given) {
                                            kvpages_hybrid_block out = KVPAGES_HYBRID_BLOCK_INIT;
                                            return kvpages_hybrid_block_size(given, &out);
                                        });
    kvpages_memory_callbacks callbacks = KVPAGES_MEMORY_CALLBACKS_INIT;
    callbacks.allocate = noop_allocate;
    callbacks.release = noop_release;
    expect_sizes<kvpages_memory_callbacks>(
        w, "kvpages_memory_callbacks", callbacks, true, [](kvpages_memory_callbacks* given) {
            kvpages_memory* raw = nullptr;
            const std::int32_t status = kvpages_memory_create_external(given, &raw);
            if (raw != nullptr) {
                kvpages_memory_destroy(raw);
            }
            return status;
        });
    kvpages_cache_config cache_config = KVPAGES_CACHE_CONFIG_INIT;
    cache_config.memory = w.memory.get();
    expect_sizes<kvpages_cache_config>(
        w, "kvpages_cache_config", cache_config, true, [&w](kvpages_cache_config* given) {
            kvpages_cache* raw = nullptr;
            const std::int32_t status =
                kvpages_cache_create(w.planned.get(), given, &raw, nullptr);
            if (raw != nullptr) {
                kvpages_cache_destroy(raw);
            }
            return status;
        });
    const std::uint64_t blocks_in_use = 7;
    kvpages_cache_usage usage = KVPAGES_CACHE_USAGE_INIT;
    usage.blocks_in_use = &blocks_in_use;
    usage.num_counts = 1;
    expect_sizes<kvpages_cache_usage>(
        w, "kvpages_cache_usage", usage, true, [&w](kvpages_cache_usage* given) {
            kvpages_cache_snapshot out = KVPAGES_CACHE_SNAPSHOT_INIT;
            return kvpages_cache_get_snapshot(w.allocated.get(), given, &out);
        });
    const kvpages_bind_config bind = KVPAGES_BIND_CONFIG_INIT;
    expect_sizes<kvpages_bind_config>(w, "kvpages_bind_config", bind, true,
                                      [](kvpages_bind_config* given) {
                                          return kvpages_bind_layers(given, nullptr, nullptr);
                                      });
}

TEST(HostileStructSize, Outputs) {
    const World w;
    const kvpages_spec* const specs[]{&w.of_full};
    kvpages_limits limits = KVPAGES_LIMITS_INIT;
    limits.max_model_len = 8;
    const kvpages_plan* p = w.planned.get();
    const kvpages_cache* c = w.allocated.get();
    expect_sizes<kvpages_spec_info>(
        w, "kvpages_spec_info", KVPAGES_SPEC_INFO_INIT, false,
        [&](kvpages_spec_info* out) { return kvpages_spec_describe(&w.of_full, out); });
    expect_sizes<kvpages_demand>(
        w, "kvpages_demand", KVPAGES_DEMAND_INIT, false,
        [&](kvpages_demand* out) { return kvpages_spec_demand(&w.of_full, &limits, out); });
    expect_sizes<kvpages_demand>(
        w, "kvpages_demand", KVPAGES_DEMAND_INIT, false,
        [&](kvpages_demand* out) { return kvpages_spec_set_demand(specs, 1, &limits, out); });
    expect_sizes<kvpages_spec>(
        w, "kvpages_spec", KVPAGES_SPEC_INIT, false,
        [&](kvpages_spec* out) { return kvpages_spec_merge(specs, 1, out); });
    expect_sizes<kvpages_uniformity>(
        w, "kvpages_uniformity", KVPAGES_UNIFORMITY_INIT, false,
        [&](kvpages_uniformity* out) { return kvpages_spec_uniformity(specs, 1, out); });
    expect_sizes<kvpages_spec_set_info>(
        w, "kvpages_spec_set_info", KVPAGES_SPEC_SET_INFO_INIT, false,
        [&](kvpages_spec_set_info* out) { return kvpages_spec_set_describe(specs, 1, out); });
    expect_sizes<kvpages_worker_info>(
        w, "kvpages_worker_info", KVPAGES_WORKER_INFO_INIT, false,
        [&](kvpages_worker_info* out) { return kvpages_plan_get_worker(p, 0, out); });
    expect_sizes<kvpages_group_info>(
        w, "kvpages_group_info", KVPAGES_GROUP_INFO_INIT, false,
        [&](kvpages_group_info* out) { return kvpages_plan_get_group(p, 0, 0, out); });
    expect_sizes<kvpages_spec>(
        w, "kvpages_spec", KVPAGES_SPEC_INIT, false, [&](kvpages_spec* out) {
            return kvpages_plan_get_group_spec(p, 0, 0, 0, out, nullptr);
        });
    expect_sizes<kvpages_tensor_info>(
        w, "kvpages_tensor_info", KVPAGES_TENSOR_INFO_INIT, false,
        [&](kvpages_tensor_info* out) { return kvpages_plan_get_tensor(p, 0, 0, out); });
    expect_sizes<kvpages_cache_snapshot>(
        w, "kvpages_cache_snapshot", KVPAGES_CACHE_SNAPSHOT_INIT, false,
        [&](kvpages_cache_snapshot* out) { return kvpages_cache_get_snapshot(c, nullptr, out); });
    expect_sizes<kvpages_cache_group>(
        w, "kvpages_cache_group", KVPAGES_CACHE_GROUP_INIT, false,
        [&](kvpages_cache_group* out) { return kvpages_cache_get_group(c, 1, out); });
    kvpages_tables_config rows = KVPAGES_TABLES_CONFIG_INIT;
    rows.max_requests = rows.max_tokens = 1;
    kvpages_tables* tables = nullptr;
    must(kvpages_tables_create_for_plan(p, 0, &rows, &tables));
    expect_sizes<kvpages_tables_snapshot>(
        w, "kvpages_tables_snapshot", KVPAGES_TABLES_SNAPSHOT_INIT, false,
        [&](kvpages_tables_snapshot* out) { return kvpages_tables_get_snapshot(tables, out); });
    kvpages_tables_destroy(tables);
    kvpages_hybrid_config hybrid = KVPAGES_HYBRID_CONFIG_INIT;
    hybrid.block_size = hybrid.smallest_kernel_block = hybrid.attention_bytes_per_token = 1;
    expect_sizes<kvpages_hybrid_block>(
        w, "kvpages_hybrid_block", KVPAGES_HYBRID_BLOCK_INIT, false,
        [&](kvpages_hybrid_block* out) { return kvpages_hybrid_block_size(&hybrid, out); });
    expect_sizes<kvpages_view_report>(
        w, "kvpages_view_report", KVPAGES_VIEW_REPORT_INIT, false,
        [&](kvpages_view_report* out) { return kvpages_cache_get_report(c, 0, 0, out); });
    expect_sizes<kvpages_layer_info>(
        w, "kvpages_layer_info", KVPAGES_LAYER_INFO_INIT, false,
        [&](kvpages_layer_info* out) { return kvpages_cache_get_layer(c, 0, out); });
    expect_sizes<kvpages_view_axes>(
        w, "kvpages_view_axes", KVPAGES_VIEW_AXES_INIT, false,
        [&](kvpages_view_axes* out) { return kvpages_cache_get_axes(c, 0, out); });
    const std::int64_t ones[]{1};
    const kvpages_view audited{ones, ones, 1, 0, 1, 8};
    expect_sizes<kvpages_view_report>(
        w, "kvpages_view_report", KVPAGES_VIEW_REPORT_INIT, false,
        [&](kvpages_view_report* out) { return kvpages_view_audit(&audited, out); });
    const kvpages_worker worker{w.layers.get(), 100000};
    expect_sizes<kvpages_shortfall>(
        w, "kvpages_shortfall", KVPAGES_SHORTFALL_INIT, false, [&](kvpages_shortfall* out) {
            kvpages_plan* raw = nullptr;
            const std::int32_t status = kvpages_plan_create(&w.config, &worker, 1, &raw, out);
            if (raw != nullptr) {
                kvpages_plan_destroy(raw);
            }
            return status;
        });
}

// --- numbers that stand for nothing ------------------------------------------

namespace {

struct Unknown {
    std::string name;
    std::string number;
    std::function<std::int32_t()> call;
};

}  // namespace

// Each piece is a region: a layout with the heads outside must not make a list as long as a caller's number.
TEST(HostileValues, ALayoutThatCutsBlocksIntoMillions) {
    const Backend kernels = backend("head | block | token | kv*content");
    for (const auto& [heads, is_made] : {std::pair{1u << 20, true}, std::pair{1u << 21, false}}) {
        Model layers = model();
        add(layers, "layers.7", full(16, heads, 8), kernels);
        kvpages_plan_config config = plan_config();
        config.policy = KVPAGES_POLICY_REFERENCE;
        config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
        config.num_blocks_override = 1;
        kvpages_plan* raw = nullptr;
        const std::int32_t status = try_plan({{layers.get(), 1}}, config, &raw);
        const Plan planned(raw);
        EXPECT_EQ(status == KVPAGES_STATUS_OK, is_made) << kvpages_last_error_message();
        if (!is_made) {
            EXPECT_EQ(status, KVPAGES_STATUS_CONTRACT_BROKEN);
            EXPECT_STREQ(kvpages_last_error_kind(), "too_many_runs");
            EXPECT_NE(std::string(kvpages_last_error_message()).find("layers.7"), std::string::npos);
        }
    }
}

TEST(HostileValues, UnknownNumbersFlagsAndReservedFields) {
    const World w;
    std::vector<Unknown> table;
    const auto add_spec = [&](const std::string& name, const std::string& number,
                              const kvpages_spec& spec) {
        table.push_back({"spec " + name, number, [&w, spec] {
                             static_cast<void>(w);
                             Info<kvpages_spec_info> out;
                             const std::int32_t status = kvpages_spec_describe(&spec, &out);
                             EXPECT_TRUE(out.is_zero());
                             return status;
                         }});
    };
    for (const std::uint32_t kind : {0u, 13u, 99u, 101u, UINT32_MAX}) {
        kvpages_spec spec = w.of_full;
        spec.kind = kind;
        add_spec("kind", std::to_string(kind), spec);
    }
    for (const std::uint32_t dtype : {0u, 16u, UINT32_MAX}) {
        kvpages_spec spec = w.of_full;
        spec.dtype = dtype;
        add_spec("dtype", std::to_string(dtype), spec);
    }
    for (const std::uint32_t mode : {6u, UINT32_MAX}) {
        kvpages_spec spec = w.of_full;
        spec.quant_mode = mode;
        add_spec("quant_mode", std::to_string(mode), spec);
    }
    for (const std::uint32_t flags : {4u, 0x80000000u}) {
        kvpages_spec spec = w.of_full;
        spec.flags = flags;
        add_spec("flags", flags == 4 ? "0x4" : "0x80000000", spec);
    }
    State state;
    state.add(KVPAGES_DTYPE_F32, {4});
    for (const std::uint32_t kind : {0u, 7u, UINT32_MAX}) {
        kvpages_spec spec = state.spec();
        spec.state_kind = kind;
        add_spec("state_kind", std::to_string(kind), spec);
    }
    for (const std::uint32_t mode : {3u, UINT32_MAX}) {
        kvpages_spec spec = state.spec();
        spec.state_cache_mode = mode;
        add_spec("state_cache_mode", std::to_string(mode), spec);
    }
    State odd;
    odd.add(77, {4});
    add_spec("state dtype", "77", odd.spec());

    const auto of_limits = [&](const std::string& number, kvpages_limits limits) {
        limits.max_model_len = 8;
        table.push_back({"limits", number, [&w, limits] {
                             Info<kvpages_demand> out;
                             const std::int32_t status =
                                 kvpages_spec_demand(&w.of_full, &limits, &out);
                             EXPECT_TRUE(out.is_zero());
                             return status;
                         }});
    };
    kvpages_limits limits = KVPAGES_LIMITS_INIT;
    limits.state_cache_mode = 3;
    of_limits("3", limits);
    limits = KVPAGES_LIMITS_INIT;
    limits.reserved0 = 9;
    of_limits("9", limits);

    const std::uint64_t sizes[]{16};
    kvpages_backend_config good = KVPAGES_BACKEND_CONFIG_INIT;
    good.name = "B";
    good.layout = packed_nhd;
    good.kernel_block_sizes = sizes;
    good.num_kernel_block_sizes = 1;
    const auto of_backend = [&](const std::string& number,
                                const std::function<void(kvpages_backend_config&)>& spoil) {
        kvpages_backend_config config = good;
        spoil(config);
        table.push_back({"backend", number, [config] {
                             Out<kvpages_backend*> out;
                             const std::int32_t status = kvpages_backend_create(&config, &out);
                             EXPECT_TRUE(out.is_zero());
                             return status;
                         }});
    };
    of_backend("0x8", [](kvpages_backend_config& b) { b.flags = 8; });
    of_backend("4", [](kvpages_backend_config& b) { b.graph_support = 4; });
    for (const std::uint32_t bits : {1u, 16u, 33u, 128u}) {
        of_backend(std::to_string(bits),
                   [bits](kvpages_backend_config& b) { b.index_bits = bits; });
    }
    of_backend("7", [](kvpages_backend_config& b) { b.reserved0 = 7; });
    const kvpages_quantised_layout bad_mode{6, 0, packed_nhd, nullptr};
    const kvpages_quantised_layout bad_reserved{KVPAGES_QUANT_MODE_NVFP4, 5, packed_nhd, nullptr};
    of_backend("6", [&](kvpages_backend_config& b) {
        b.quantised_layouts = &bad_mode;
        b.num_quantised_layouts = 1;
    });
    of_backend("5", [&](kvpages_backend_config& b) {
        b.quantised_layouts = &bad_reserved;
        b.num_quantised_layouts = 1;
    });
    for (const std::uint32_t number : {0u, 35u, UINT32_MAX}) {
        table.push_back({"preset", std::to_string(number), [number] {
                             Out<kvpages_backend*> out;
                             const std::int32_t status =
                                 kvpages_backend_create_preset(number, &out);
                             EXPECT_TRUE(out.is_zero());
                             return status;
                         }});
    }
    table.push_back({"layer", "3", [&w] {
                         kvpages_layer layer = KVPAGES_LAYER_INIT;
                         layer.name = "new";
                         layer.spec = &w.of_full;
                         layer.reserved0 = 3;
                         return kvpages_model_add_layer(w.layers.get(), &layer);
                     }});
    const auto of_plan = [&](const std::string& number,
                             const std::function<void(kvpages_plan_config&)>& spoil) {
        kvpages_plan_config config = w.config;
        spoil(config);
        table.push_back({"plan", number, [&w, config] {
                             const kvpages_worker worker{w.layers.get(), 100000};
                             Out<kvpages_plan*> out;
                             const std::int32_t status =
                                 kvpages_plan_create(&config, &worker, 1, &out, nullptr);
                             EXPECT_TRUE(out.is_zero());
                             return status;
                         }});
    };
    of_plan("99", [](kvpages_plan_config& p) { p.policy = 99; });
    of_plan("0x20", [](kvpages_plan_config& p) { p.flags = 32; });
    of_plan("0x80000000", [](kvpages_plan_config& p) { p.flags = 0x80000000u; });
    of_plan("3", [](kvpages_plan_config& p) { p.state_cache_mode = 3; });
    of_plan("5", [](kvpages_plan_config& p) { p.reserved0 = 5; });
    of_plan("2", [](kvpages_plan_config& p) { p.choose_block_sizes = 2; });
    of_plan("7", [](kvpages_plan_config& p) { p.reserved1 = 7; });
    for (const std::uint64_t flags : {std::uint64_t{2}, std::uint64_t{1} << 63}) {
        table.push_back({"part group", "", [&w, flags] {
                             const char* const names[]{"layers.0.attn"};
                             const kvpages_part_group group{names, 1, flags};
                             kvpages_plan_parts parts = KVPAGES_PLAN_PARTS_INIT;
                             parts.num_blocks = 1;
                             parts.groups = &group;
                             parts.num_groups = 1;
                             Out<kvpages_plan*> out;
                             const std::int32_t status =
                                 kvpages_plan_create_from_parts(w.layers.get(), &parts, &out);
                             EXPECT_TRUE(out.is_zero());
                             return status;
                         }});
    }
    const auto of_sizes = [&](const std::string& number,
                              const std::function<void(kvpages_block_size_config&)>& spoil) {
        kvpages_block_size_config config = KVPAGES_BLOCK_SIZE_CONFIG_INIT;
        config.cache_block_size = 16;
        spoil(config);
        table.push_back({"block sizes", number, [&w, config] {
                             Out<std::uint64_t> a;
                             Out<std::uint64_t> b;
                             const std::int32_t status = kvpages_plan_resolve_block_sizes(
                                 w.planned.get(), &config, &a, &b);
                             EXPECT_TRUE(a.is_zero() && b.is_zero());
                             return status;
                         }});
    };
    of_sizes("2", [](kvpages_block_size_config& s) { s.hashes_blocks = 2; });
    of_sizes("4", [](kvpages_block_size_config& s) { s.reserved0 = 4; });
    const auto of_hybrid = [&](const std::string& number,
                               const std::function<void(kvpages_hybrid_config&)>& spoil) {
        kvpages_hybrid_config config = KVPAGES_HYBRID_CONFIG_INIT;
        config.block_size = config.smallest_kernel_block = config.attention_bytes_per_token = 1;
        spoil(config);
        table.push_back({"hybrid", number, [config] {
                             Info<kvpages_hybrid_block> out;
                             const std::int32_t status = kvpages_hybrid_block_size(&config, &out);
                             EXPECT_TRUE(out.is_zero());
                             return status;
                         }});
    };
    of_hybrid("3", [](kvpages_hybrid_config& h) { h.state_cache_mode = 3; });
    of_hybrid("4", [](kvpages_hybrid_config& h) { h.reserved0 = 4; });
    const auto of_memory = [&](const std::string& number,
                               const std::function<void(kvpages_memory_callbacks&)>& spoil) {
        kvpages_memory_callbacks callbacks = KVPAGES_MEMORY_CALLBACKS_INIT;
        callbacks.allocate = noop_allocate;
        callbacks.release = noop_release;
        spoil(callbacks);
        table.push_back({"memory", number, [callbacks] {
                             Out<kvpages_memory*> out;
                             const std::int32_t status =
                                 kvpages_memory_create_external(&callbacks, &out);
                             EXPECT_TRUE(out.is_zero());
                             return status;
                         }});
    };
    of_memory("2", [](kvpages_memory_callbacks& m) { m.is_zeroed = 2; });
    of_memory("6", [](kvpages_memory_callbacks& m) { m.reserved0 = 6; });
    for (const std::uint32_t format : {2u, UINT32_MAX}) {
        table.push_back({"explanation", std::to_string(format), [&w, format] {
                             char text[4096];
                             Out<std::size_t> length;
                             const std::int32_t status = kvpages_plan_copy_explanation(
                                 w.planned.get(), format, text, sizeof text, &length);
                             EXPECT_TRUE(length.is_zero());
                             return status;
                         }});
    }
    for (const Unknown& unknown : table) {
        SCOPED_TRACE(unknown.name + " " + unknown.number);
        EXPECT_TRUE(fails(unknown.call(), KVPAGES_STATUS_INVALID_ARGUMENT, "unknown_value",
                          {unknown.number}));
        w.expect_unchanged();
    }

    // MIXED is only reported.
    kvpages_spec mixed = w.of_full;
    mixed.kind = KVPAGES_SPEC_KIND_MIXED;
    Info<kvpages_spec_info> out;
    EXPECT_TRUE(fails(kvpages_spec_describe(&mixed, &out), KVPAGES_STATUS_UNSUPPORTED,
                      "unsupported_spec"));
    for (const std::uint32_t dtype : {0u, 16u, UINT32_MAX}) {
        EXPECT_EQ(kvpages_dtype_bytes(dtype), 0u);
        EXPECT_STREQ(kvpages_dtype_name(dtype), "");
    }
}

// --- sizes -------------------------------------------------------------------

TEST(HostileValues, SpecsThatCannotBe) {
    const World w;
    struct Case {
        std::string name;
        std::string kind;
        Words words;
        std::function<void(kvpages_spec&)> spoil;
    };
    constexpr std::uint64_t huge = std::uint64_t{1} << 63;
    const std::vector<Case> cases{
        {"block_size 0", "bad_values", {"block_size", "0"},
         [](kvpages_spec& s) { s.block_size = 0; }},
        {"num_kv_heads 0", "bad_values", {"num_kv_heads", "0"},
         [](kvpages_spec& s) { s.num_kv_heads = 0; }},
        {"head_size 0", "bad_values", {"head_size", "0"},
         [](kvpages_spec& s) { s.head_size = 0; }},
        {"block_size 2^63", "overflow", {}, [](kvpages_spec& s) { s.block_size = huge; }},
        {"heads 2^63", "overflow", {}, [](kvpages_spec& s) { s.num_kv_heads = huge; }},
        {"head_size 2^63", "overflow", {}, [](kvpages_spec& s) { s.head_size = huge; }},
        {"head_size max", "overflow", {}, [](kvpages_spec& s) { s.head_size = UINT64_MAX; }},
        {"head_size_v max - 1", "overflow", {},
         [](kvpages_spec& s) { s.head_size_v = UINT64_MAX - 1; }},
        {"product", "overflow", {},
         [](kvpages_spec& s) {
             s.block_size = std::uint64_t{1} << 32;
             s.num_kv_heads = std::uint64_t{1} << 32;
         }},
        {"state_kind", "field_not_of_kind", {"state_kind", "full attention"},
         [](kvpages_spec& s) { s.state_kind = KVPAGES_STATE_KIND_MAMBA1; }},
        {"state_cache_mode", "field_not_of_kind", {"state_cache_mode", "full attention"},
         [](kvpages_spec& s) { s.state_cache_mode = KVPAGES_STATE_CACHE_MODE_ALL; }},
        {"num_speculative_blocks", "field_not_of_kind", {"num_speculative_blocks"},
         [](kvpages_spec& s) { s.num_speculative_blocks = 1; }},
        {"fp8 in bf16", "quantised_dtype", {"fp8_per_tensor", "bfloat16", "2"},
         [](kvpages_spec& s) {
             s.dtype = KVPAGES_DTYPE_BF16;
             s.quant_mode = KVPAGES_QUANT_MODE_FP8_PER_TENSOR;
         }},
        {"alignment", "field_not_of_kind", {"alignment_bytes"},
         [](kvpages_spec& s) { s.alignment_bytes = 64; }},
        {"compress_ratio", "field_not_of_kind", {"compress_ratio"},
         [](kvpages_spec& s) { s.compress_ratio = 4; }},
        {"cache_dtype", "field_not_of_kind", {"cache_dtype"},
         [](kvpages_spec& s) { s.cache_dtype = "fp8"; }},
        {"model_version", "field_not_of_kind", {"model_version"},
         [](kvpages_spec& s) { s.model_version = "deepseek_v4"; }},
        {"tq_slot", "field_not_of_kind", {"tq_slot_bytes"},
         [](kvpages_spec& s) { s.tq_slot_bytes = 64; }},
        {"sink_len", "field_not_of_kind", {"sink_len"},
         [](kvpages_spec& s) { s.sink_len = 4; }},
        {"rswa_window", "field_not_of_kind", {"rswa_window"},
         [](kvpages_spec& s) { s.rswa_window = 4; }},
        {"states", "field_not_of_kind", {"states"},
         [](kvpages_spec& s) { s.num_state_dims = 1; }},
        {"padding below", "padded_below_page", {"1", "1024"},
         [](kvpages_spec& s) { s.page_size_padded_bytes = 1; }},
        {"padding odd", "view_dtype_misaligned", {"1025", "2"},
         [](kvpages_spec& s) { s.page_size_padded_bytes = 1025; }},
        {"window 0", "bad_values", {"sliding_window", "0"},
         [](kvpages_spec& s) { s.kind = KVPAGES_SPEC_KIND_SLIDING_WINDOW; }},
        {"windowed latent without window", "bad_values", {"sliding_window", "0"},
         [](kvpages_spec& s) { s.kind = KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA; }},
        {"chunk 0", "bad_values", {"attention_chunk_size", "0"},
         [](kvpages_spec& s) { s.kind = KVPAGES_SPEC_KIND_CHUNKED_LOCAL; }},
        {"R-SWA window 0", "bad_values", {"rswa_window", "0"},
         [](kvpages_spec& s) { s.kind = KVPAGES_SPEC_KIND_RSWA; }},
        {"ratio not dividing", "compress_ratio_not_dividing", {"3", "16"},
         [](kvpages_spec& s) {
             s.kind = KVPAGES_SPEC_KIND_MLA;
             s.compress_ratio = 3;
         }},
        {"ratio larger", "compress_ratio_not_dividing", {"32", "16"},
         [](kvpages_spec& s) {
             s.kind = KVPAGES_SPEC_KIND_MLA;
             s.compress_ratio = 32;
         }},
        {"model version", "unsupported_model_version", {"deepseek_v9"},
         [](kvpages_spec& s) {
             s.kind = KVPAGES_SPEC_KIND_SLIDING_WINDOW_MLA;
             s.sliding_window = 8;
             s.model_version = "deepseek_v9";
         }},
        {"alignment huge", "overflow", {},
         [](kvpages_spec& s) {
             s.kind = KVPAGES_SPEC_KIND_MLA;
             s.alignment_bytes = UINT64_MAX;
         }},
        {"odd width of int4", "packed_width_not_dividing", {"7", "2"},
         [](kvpages_spec& s) {
             s.dtype = KVPAGES_DTYPE_U8;
             s.quant_mode = KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD;
             s.head_size = 7;
         }},
        {"odd value of int4", "packed_width_not_dividing", {"head_size_v", "5", "2"},
         [](kvpages_spec& s) {
             s.dtype = KVPAGES_DTYPE_U8;
             s.quant_mode = KVPAGES_QUANT_MODE_INT4_PER_TOKEN_HEAD;
             s.head_size_v = 5;
         }},
        {"nvfp4 of 24", "packed_width_not_dividing", {"24", "16"},
         [](kvpages_spec& s) {
             s.dtype = KVPAGES_DTYPE_U8;
             s.quant_mode = KVPAGES_QUANT_MODE_NVFP4;
             s.head_size = 24;
         }},
        {"int8 in f64", "quantised_dtype", {"float64", "8", "int8_per_token_head"},
         [](kvpages_spec& s) {
             s.dtype = KVPAGES_DTYPE_F64;
             s.quant_mode = KVPAGES_QUANT_MODE_INT8_PER_TOKEN_HEAD;
         }},
        {"value width of chunked", "value_width_differs", {"4", "8"},
         [](kvpages_spec& s) {
             s.kind = KVPAGES_SPEC_KIND_CHUNKED_LOCAL;
             s.attention_chunk_size = 4;
             s.head_size_v = 4;
         }},
    };
    for (const Case& given : cases) {
        SCOPED_TRACE(given.name);
        kvpages_spec spec = w.of_full;
        given.spoil(spec);
        Info<kvpages_spec_info> out;
        EXPECT_TRUE(fails(kvpages_spec_describe(&spec, &out), KVPAGES_STATUS_INVALID_ARGUMENT,
                          given.kind, given.words));
        EXPECT_TRUE(out.is_zero());
        Words words = given.words;
        words.push_back("layer.7.bad");
        const Model m = model();
        EXPECT_TRUE(fails(try_add(m, "layer.7.bad", &spec, w.kernels.get()),
                          KVPAGES_STATUS_INVALID_ARGUMENT, given.kind, words));
        EXPECT_EQ(kvpages_model_num_layers(m.get()), 0u);
        EXPECT_EQ(try_add(m, "layer.7.bad", &w.of_full, w.kernels.get()), KVPAGES_STATUS_OK);
    }
}

TEST(HostileValues, StatesThatCannotBe) {
    const World w;
    struct Case {
        std::string name;
        std::string kind;
        std::function<void(kvpages_spec&)> spoil;
    };
    State state;
    state.add(KVPAGES_DTYPE_F32, {2, 3}).add(KVPAGES_DTYPE_F16, {4});
    static const std::uint64_t zero_dims[]{2, 0, 4};
    static const std::uint64_t huge_dims[]{std::uint64_t{1} << 40, std::uint64_t{1} << 40, 4};
    static const std::uint32_t huge_ndims[]{UINT32_MAX, UINT32_MAX};
    const std::vector<Case> cases{
        {"no states", "bad_values",
         [](kvpages_spec& s) {
             s.num_state_dtypes = s.num_state_shapes = s.num_state_dims = 0;
         }},
        {"fewer dtypes", "state_lists_differ", [](kvpages_spec& s) { s.num_state_dtypes = 1; }},
        {"fewer shapes", "state_lists_differ", [](kvpages_spec& s) { s.num_state_shapes = 1; }},
        {"fewer dims", "state_lists_differ", [](kvpages_spec& s) { s.num_state_dims = 2; }},
        {"huge ndims", "state_lists_differ", [](kvpages_spec& s) { s.state_ndims = huge_ndims; }},
        {"dimension 0", "bad_values", [](kvpages_spec& s) { s.state_dims = zero_dims; }},
        {"dimensions overflow", "overflow", [](kvpages_spec& s) { s.state_dims = huge_dims; }},
        {"block_size 0", "bad_values", [](kvpages_spec& s) { s.block_size = 0; }},
        {"heads", "field_not_of_kind", [](kvpages_spec& s) { s.num_kv_heads = 1; }},
        {"dtype", "field_not_of_kind", [](kvpages_spec& s) { s.dtype = KVPAGES_DTYPE_F16; }},
        {"window", "field_not_of_kind", [](kvpages_spec& s) { s.sliding_window = 1; }},
        {"alignment", "field_not_of_kind", [](kvpages_spec& s) { s.alignment_bytes = 64; }},
        {"compress_ratio", "field_not_of_kind", [](kvpages_spec& s) { s.compress_ratio = 2; }},
        {"cache_dtype", "field_not_of_kind", [](kvpages_spec& s) { s.cache_dtype = "fp8"; }},
        {"flags", "field_not_of_kind",
         [](kvpages_spec& s) { s.flags = KVPAGES_SPEC_NON_CAUSAL; }},
        {"sink", "field_not_of_kind", [](kvpages_spec& s) { s.sink_len = 2; }},
        {"padding", "padded_below_page",
         [](kvpages_spec& s) { s.page_size_padded_bytes = 30; }},
        {"padding odd", "view_dtype_misaligned",
         [](kvpages_spec& s) { s.page_size_padded_bytes = 34; }},
    };
    for (const Case& given : cases) {
        SCOPED_TRACE(given.name);
        kvpages_spec spec = state.spec();
        given.spoil(spec);
        Info<kvpages_spec_info> out;
        EXPECT_TRUE(fails(kvpages_spec_describe(&spec, &out), KVPAGES_STATUS_INVALID_ARGUMENT,
                          given.kind));
        EXPECT_TRUE(out.is_zero());
        const Model m = model();
        EXPECT_TRUE(fails(try_add(m, "layer.7.bad", &spec, nullptr),
                          KVPAGES_STATUS_INVALID_ARGUMENT, given.kind, {"layer.7.bad"}));
        EXPECT_EQ(kvpages_model_num_layers(m.get()), 0u);
        EXPECT_EQ(try_add(m, "layer.7.bad", &w.of_full, nullptr), KVPAGES_STATUS_OK);
    }
    // A list that could not be in memory.
    kvpages_spec spec = state.spec();
    spec.num_state_dims = SIZE_MAX / 4;
    EXPECT_TRUE(fails(try_add(w.layers, "layer.7.bad", &spec, nullptr),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "overflow", {"layer.7.bad"}));
    w.expect_unchanged();
}

TEST(HostileValues, Names) {
    const World w;
    const std::string not_utf8 = "layer.\xff\xfe";
    struct Case {
        std::string name;
        std::string kind;
        Words words;
    };
    for (const Case& given :
         {Case{"", "layer_name_empty", {}}, Case{not_utf8, "not_utf8", {"layer."}},
          Case{"layers.3.attn", "layer_name_twice", {"layers.3.attn"}}}) {
        SCOPED_TRACE(given.kind);
        EXPECT_TRUE(fails(try_add(w.layers, given.name, &w.of_full, w.kernels.get()),
                          KVPAGES_STATUS_INVALID_ARGUMENT, given.kind, given.words));
        EXPECT_TRUE(fails(
            try_add(w.layers, given.name, nullptr, w.kernels.get(), "layers.0.attn"),
            KVPAGES_STATUS_INVALID_ARGUMENT, given.kind, given.words));
        w.expect_unchanged();
    }
    EXPECT_TRUE(fails(try_add(w.layers, "new", nullptr, nullptr, not_utf8.c_str()),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "not_utf8", {"new"}));
    Out<std::size_t> found;
    EXPECT_TRUE(fails(kvpages_model_find_layer(w.layers.get(), "nobody", &found),
                      KVPAGES_STATUS_NOT_FOUND, "not_found", {"nobody"}));
    EXPECT_TRUE(found.is_zero());
    Out<std::size_t> in_cache;
    EXPECT_TRUE(fails(kvpages_cache_find_layer(w.allocated.get(), "nobody", &in_cache),
                      KVPAGES_STATUS_NOT_FOUND, "not_found", {"nobody"}));
    EXPECT_TRUE(in_cache.is_zero());
    Out<std::size_t> odd;
    EXPECT_TRUE(fails(kvpages_model_find_layer(w.layers.get(), not_utf8.c_str(), &odd),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "not_utf8"));
    EXPECT_TRUE(odd.is_zero());
    // A name of any length is a name.
    const Model m = model();
    const std::string long_name(100000, 'x');
    add(m, long_name, w.of_full);
    must(kvpages_model_find_layer(m.get(), long_name.c_str(), &found.value));
    w.expect_unchanged();
}

TEST(HostileValues, Backends) {
    const World w;
    struct Case {
        std::string name;
        std::string kind;
        Words words;
        std::function<void(BackendOptions&)> spoil;
    };
    const std::vector<Case> cases{
        {"no name", "backend_name_empty", {}, [](BackendOptions& b) { b.name = ""; }},
        {"name not UTF-8", "not_utf8", {}, [](BackendOptions& b) { b.name = "\xc3("; }},
        {"no sizes", "no_common_block_size", {"kernels"},
         [](BackendOptions& b) { b.multiples.clear(); }},
        {"size 0", "unknown_supported_size", {"kernels", "0"}, [](BackendOptions& b) { b.sizes = {16, 0}; }},
        {"multiple of 0", "unknown_supported_size", {"kernels", "0"},
         [](BackendOptions& b) { b.multiples = {0}; }},
        {"alignment 3", "backend_alignment", {"kernels", "3"},
         [](BackendOptions& b) { b.alignment = 3; }},
        {"alignment 8192", "backend_alignment", {"kernels", "8192"},
         [](BackendOptions& b) { b.alignment = 8192; }},
        {"axis unknown", "layout_unknown_axis", {"layer"},
         [](BackendOptions& b) { b.layout = "block | layer | token | content"; }},
        {"axis empty", "layout_unknown_axis", {},
         [](BackendOptions& b) { b.layout = "block | token | content |"; }},
        {"axis twice", "layout_axis_twice", {"token"},
         [](BackendOptions& b) { b.layout = "block | token | token*content"; }},
        {"no block", "layout_axis_missing", {"block"},
         [](BackendOptions& b) { b.layout = "token | content"; }},
        {"no content", "layout_axis_missing", {"content"},
         [](BackendOptions& b) { b.layout = "block | token"; }},
        {"order short", "stride_order_length", {"2", "3"},
         [](BackendOptions& b) {
             b.layout = latent;
             b.memory_order = "block | token";
         }},
        {"order names other dims", "layout_order", {"token*content"},
         [](BackendOptions& b) {
             b.layout = latent;
             b.memory_order = "block | token*content | token";
         }},
        {"layout not UTF-8", "not_utf8", {},
         [](BackendOptions& b) { b.layout = "block | \xff"; }},
    };
    for (const Case& given : cases) {
        SCOPED_TRACE(given.name);
        BackendOptions options;
        options.layout = packed_nhd;
        given.spoil(options);
        Out<kvpages_backend*> out;
        EXPECT_TRUE(fails(try_backend(options, &out), KVPAGES_STATUS_INVALID_ARGUMENT, given.kind,
                          given.words));
        EXPECT_TRUE(out.is_zero());
        w.expect_unchanged();
    }
    const kvpages_quantised_layout twice[]{{KVPAGES_QUANT_MODE_NVFP4, 0, packed_nhd, nullptr},
                                           {KVPAGES_QUANT_MODE_NVFP4, 0, packed_nhd, nullptr}};
    const std::uint64_t sizes[]{16};
    kvpages_backend_config config = KVPAGES_BACKEND_CONFIG_INIT;
    config.name = "B";
    config.kernel_block_sizes = sizes;
    config.num_kernel_block_sizes = 1;
    config.quantised_layouts = twice;
    config.num_quantised_layouts = 2;
    Out<kvpages_backend*> out;
    EXPECT_TRUE(fails(kvpages_backend_create(&config, &out), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "layout_twice", {"B"}));
    EXPECT_TRUE(out.is_zero());
    config.num_quantised_layouts = SIZE_MAX / 2;
    EXPECT_TRUE(fails(kvpages_backend_create(&config, &out), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "overflow"));
    // An order of a layout that is not there.
    config.quantised_layouts = nullptr;
    config.num_quantised_layouts = 0;
    config.memory_order = packed_nhd;
    const std::int32_t status = kvpages_backend_create(&config, &out);
    EXPECT_EQ(status, KVPAGES_STATUS_INVALID_ARGUMENT)
        << "a memory order without a layout has no effect";
    if (status == KVPAGES_STATUS_OK) {
        kvpages_backend_destroy(out.value);
    }
}

TEST(HostileValues, BackendContractsThatAPlanBreaks) {
    const World w;
    struct Case {
        std::string name;
        std::string kind;
        Words words;
        std::function<void(BackendOptions&, kvpages_spec&)> spoil;
    };
    const std::vector<Case> cases{
        {"kernel block", "no_common_block_size", {"16", "32"},
         [](BackendOptions& b, kvpages_spec&) {
             b.sizes = {32};
             b.multiples.clear();
         }},
        {"multiple", "no_common_block_size", {"16", "5"},
         [](BackendOptions& b, kvpages_spec&) { b.multiples = {5}; }},
        {"heads", "backend_num_kv_heads", {"2", "3"},
         [](BackendOptions& b, kvpages_spec&) { b.num_kv_heads = 3; }},
        {"alignment", "blocks_not_aligned", {"4096", "1024"},
         [](BackendOptions& b, kvpages_spec&) { b.alignment = 4096; }},
        {"padding", "page_not_dense", {"1024", "2048"},
         [](BackendOptions& b, kvpages_spec& s) {
             b.flags = 0;
             s.page_size_padded_bytes = 2048;
         }},
        {"no layout", "backend_without_layout", {},
         [](BackendOptions& b, kvpages_spec&) { b.layout = ""; }},
        {"no kv axis", "view_size_mismatch", {},
         [](BackendOptions& b, kvpages_spec&) { b.layout = "block | token | head | content"; }},
        {"no head axis", "view_size_mismatch", {"2"},
         [](BackendOptions& b, kvpages_spec&) { b.layout = "block | token | kv*content"; }},
        {"a kv axis too many", "view_size_mismatch", {},
         [](BackendOptions& b, kvpages_spec& s) {
             b.layout = kv_first;
             s.head_size_v = KVPAGES_HEAD_SIZE_NONE;
         }},
        {"widths", "view_size_mismatch", {"8", "4"},
         [](BackendOptions& b, kvpages_spec& s) {
             b.flags |= KVPAGES_BACKEND_NEEDS_EQUAL_KV_WIDTHS;
             s.head_size_v = 4;
         }},
        {"fused axes", "fused_axes_apart", {"block", "token"},
         [](BackendOptions& b, kvpages_spec& s) {
             b.layout = "block*token | head | kv*content";
             s.page_size_padded_bytes = 2048;
         }},
    };
    for (const Case& given : cases) {
        SCOPED_TRACE(given.name);
        BackendOptions options;
        options.name = "picky";
        options.layout = packed_nhd;
        kvpages_spec spec = w.of_full;
        given.spoil(options, spec);
        const Model m = model();
        add(m, "layer.7", spec, backend(options));
        kvpages_plan_config config = plan_config(16);
        config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
        config.num_blocks_override = 3;
        Words words = given.words;
        words.insert(words.end(), {"layer.7", "picky"});
        Out<kvpages_plan*> out;
        EXPECT_TRUE(fails(try_plan({{m.get(), 0}}, config, &out), KVPAGES_STATUS_CONTRACT_BROKEN,
                          given.kind, words));
        EXPECT_TRUE(out.is_zero());
        Parts parts;
        parts.num_blocks = 3;
        parts.groups = {{{"layer.7"}, 0}};
        parts.tensors = {{3 * page_bytes(spec), {"layer.7"}, 0, 0}};
        Out<kvpages_plan*> from_parts;
        EXPECT_TRUE(fails(try_parts(m, parts, &from_parts), KVPAGES_STATUS_CONTRACT_BROKEN,
                          given.kind, words));
        EXPECT_TRUE(from_parts.is_zero());
        w.expect_unchanged();
    }
}

TEST(HostileValues, PlanConfigs) {
    const World w;
    const auto refused = [&w](const std::function<void(kvpages_plan_config&)>& spoil,
                              std::int32_t status, const std::string& kind, const Words& words) {
        kvpages_plan_config config = w.config;
        spoil(config);
        Out<kvpages_plan*> out;
        EXPECT_TRUE(fails(try_plan({{w.layers.get(), 100000}}, config, &out), status, kind, words));
        EXPECT_TRUE(out.is_zero());
        w.expect_unchanged();
    };
    refused([](kvpages_plan_config& c) { c.max_model_len = 0; }, KVPAGES_STATUS_INVALID_ARGUMENT,
            "bad_values", {"max_model_len", "0"});
    refused([](kvpages_plan_config& c) { c.max_model_len = UINT64_MAX; },
            KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"max_model_len", "18446744073709551615"});
    refused([](kvpages_plan_config& c) { c.max_model_len = std::uint64_t{1} << 62; },
            KVPAGES_STATUS_INVALID_ARGUMENT, "overflow", {});
    refused([](kvpages_plan_config& c) { c.context_parallel_size = 2; },
            KVPAGES_STATUS_INVALID_ARGUMENT, "dcp_sliding_window", {"layers.1.attn", "2"});
    refused([](kvpages_plan_config& c) { c.reserved_blocks = UINT64_MAX; },
            KVPAGES_STATUS_INVALID_ARGUMENT, "overflow", {"worker 0"});
    refused([](kvpages_plan_config& c) { c.reserved_blocks = 1000; }, KVPAGES_STATUS_DOES_NOT_FIT,
            "not_enough_memory", {"worker 0", "64"});
    refused(
        [](kvpages_plan_config& c) {
            c.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
            c.num_blocks_override = 0;
        },
        KVPAGES_STATUS_DOES_NOT_FIT, "no_available_memory", {"worker 0", "0"});
    refused(
        [](kvpages_plan_config& c) {
            c.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
            c.num_blocks_override = UINT64_MAX;
        },
        KVPAGES_STATUS_INVALID_ARGUMENT, "overflow", {"worker 0"});
    refused(
        [](kvpages_plan_config& c) {
            c.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
            c.num_blocks_override = std::uint64_t{1} << 32;
        },
        KVPAGES_STATUS_INVALID_ARGUMENT, "too_many_blocks", {"4294967296"});
    // An override that is not asked for would be silently without effect.
    refused([](kvpages_plan_config& c) { c.num_blocks_override = 7; },
            KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"num_blocks_override", "7"});

    Out<kvpages_plan*> out;
    EXPECT_TRUE(fails(try_plan({}, w.config, &out), KVPAGES_STATUS_INVALID_ARGUMENT, "no_workers"));
    EXPECT_TRUE(out.is_zero());
    const kvpages_worker worker{w.layers.get(), 100000};
    EXPECT_TRUE(fails(kvpages_plan_create(&w.config, &worker, SIZE_MAX / 8, &out, nullptr),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "overflow"));
    EXPECT_TRUE(out.is_zero());
    // The largest context whose numbers still fit is only too long.
    kvpages_plan_config longest = w.config;
    longest.max_model_len = std::uint64_t{1} << 50;
    EXPECT_TRUE(fails(try_plan({{w.layers.get(), 100000}}, longest, &out),
                      KVPAGES_STATUS_DOES_NOT_FIT, "not_enough_memory",
                      {"1125899906842624", "100000"}));
    EXPECT_TRUE(out.is_zero());
}

TEST(HostileValues, PlanParts) {
    const Model m = model();
    const kvpages_spec spec = full(16, 2, 8);
    const std::uint64_t page = page_bytes(spec);
    const Backend kernels = backend(packed_nhd);
    add(m, "A", spec, kernels);
    add(m, "B", spec, kernels);
    add(m, "C", sliding(8, 16, 2, 8), kernels);
    share(m, "D", "A", kernels);
    Parts good;
    good.num_blocks = 2;
    good.groups = {{{"A", "B", "D"}, 0}, {{"C"}, 0}};
    good.tensors = {{2 * page, {"A", "C"}, 0, 0}, {2 * page, {"B"}, 0, 0}};
    EXPECT_EQ(worker_info(plan_from(m, good)).num_tensors, 2u);
    struct Case {
        std::string name;
        std::string kind;
        Words words;
        std::function<void(Parts&)> spoil;
        std::int32_t status = KVPAGES_STATUS_INVALID_ARGUMENT;
    };
    const std::vector<Case> cases{
        {"unknown in a group", "layer_missing", {"nobody", "group 0"},
         [](Parts& p) { p.groups[0].layers.push_back("nobody"); }},
        {"unknown in a tensor", "layers_not_initialized", {"nobody"},
         [](Parts& p) { p.tensors[0].layers.push_back("nobody"); }},
        {"sharer without a group", "layers_not_initialized", {"D"},
         [](Parts& p) { p.groups[0].layers.pop_back(); }},
        {"sharer in a tensor", "layers_not_initialized", {"D"},
         [page](Parts& p) { p.tensors.push_back({2 * page, {"D"}, 0, 0}); }},
        {"sharer in another group", "sharer_in_other_group", {"D", "A"},
         [](Parts& p) {
             p.groups[0].layers.pop_back();
             p.groups[1].layers.push_back("D");
         }},
        {"not one table", "group_not_uniform", {"A", "C"},
         [](Parts& p) {
             p.groups = {{{"A", "B", "C", "D"}, 0}};
         }},
        {"group of nobody", "empty_group", {"group 2"}, [](Parts& p) { p.groups.push_back({}); }},
        {"too small", "tensor_not_multiple_of_page", {"tensor 1", "B"},
         [page](Parts& p) { p.tensors[1].size = 2 * page - 1; }},
        {"too few blocks", "num_blocks_mismatch", {"tensor 1", "B"},
         [page](Parts& p) { p.tensors[1].size = page; }},
        {"too many blocks", "num_blocks_mismatch", {"tensor 1", "B"},
         [page](Parts& p) { p.tensors[1].size = 3 * page; }},
        {"size 0", "num_blocks_mismatch", {"tensor 1", "B"},
         [](Parts& p) { p.tensors[1].size = 0; }},
        {"num_blocks huge", "num_blocks_mismatch", {"A", "18446744073709551615"},
         [](Parts& p) { p.num_blocks = UINT64_MAX; }},
        {"offset alone", "offset_without_stride", {"tensor 1", "64"},
         [](Parts& p) { p.tensors[1].offset = 64; }},
        {"layers of one group overlap", "layers_overlap", {"A", "B"},
         [](Parts& p) {
             p.tensors[0].layers = {"A", "B", "C"};
             p.tensors.pop_back();
         }},
        {"slot leaves its block", "view_out_of_bounds", {"B", std::to_string(page)},
         [page](Parts& p) {
             for (Parts::Tensor& tensor : p.tensors) {
                 tensor.stride = 2 * page;
                 tensor.size = 4 * page;
             }
             p.tensors[1].offset = page + 2;
         }},
        {"slot overflows", "overflow", {"B"},
         [page](Parts& p) {
             for (Parts::Tensor& tensor : p.tensors) {
                 tensor.stride = 2 * page;
                 tensor.size = 4 * page;
             }
             p.tensors[1].offset = UINT64_MAX - 1;
         }},
        {"packed sizes", "packed_size_mismatch", {std::to_string(4 * page)},
         [page](Parts& p) {
             for (Parts::Tensor& tensor : p.tensors) {
                 tensor.stride = 2 * page;
                 tensor.size = 4 * page;
             }
             p.tensors[1].offset = page;
             p.tensors[1].size = 6 * page;
         }},
        {"packed strides", "packed_stride_mismatch", {std::to_string(2 * page)},
         [page](Parts& p) {
             for (Parts::Tensor& tensor : p.tensors) {
                 tensor.stride = 2 * page;
                 tensor.size = 4 * page;
             }
             p.tensors[1].offset = page;
             p.tensors[1].stride = 4 * page;
         }},
        {"slots of one group overlap", "layers_overlap", {"A", "B"},
         [page](Parts& p) {
             for (Parts::Tensor& tensor : p.tensors) {
                 tensor.stride = 2 * page;
                 tensor.size = 4 * page;
             }
             p.tensors[1].offset = page - 2;
         }},
        {"kernel block given", "view_size_mismatch", {"A", "5"},
         [](Parts& p) { p.kernel_block_sizes = {5, 16}; }, KVPAGES_STATUS_CONTRACT_BROKEN},
        {"kernel block 0", "view_size_mismatch", {"A"},
         [](Parts& p) { p.kernel_block_sizes = {0, 16}; }, KVPAGES_STATUS_CONTRACT_BROKEN},
    };
    for (const Case& given : cases) {
        SCOPED_TRACE(given.name);
        Parts parts = good;
        given.spoil(parts);
        Out<kvpages_plan*> out;
        EXPECT_TRUE(fails(try_parts(m, parts, &out), given.status, given.kind, given.words));
        EXPECT_TRUE(out.is_zero());
        EXPECT_EQ(worker_info(plan_from(m, good)).num_tensors, 2u);
    }
}

TEST(HostileValues, ThingsThatAreNotThere) {
    const World w;
    const kvpages_plan* p = w.planned.get();
    const kvpages_cache* c = w.allocated.get();
    for (const std::size_t far : {std::size_t{5}, SIZE_MAX}) {
        const std::string number = std::to_string(far);
        Info<kvpages_worker_info> worker;
        EXPECT_TRUE(fails(kvpages_plan_get_worker(p, far, &worker), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        EXPECT_TRUE(worker.is_zero());
        Info<kvpages_group_info> group;
        EXPECT_TRUE(fails(kvpages_plan_get_group(p, 0, far, &group), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        EXPECT_TRUE(group.is_zero());
        EXPECT_TRUE(fails(kvpages_plan_get_group(p, far, 0, &group), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        Info<kvpages_spec> spec;
        Out<const char*> layer;
        EXPECT_TRUE(fails(kvpages_plan_get_group_spec(p, 0, 0, far, &spec, &layer),
                          KVPAGES_STATUS_NOT_FOUND, "not_found", {number}));
        EXPECT_TRUE(spec.is_zero());
        EXPECT_TRUE(layer.is_zero()) << "out_layer_name keeps garbage";
        Info<kvpages_tensor_info> tensor;
        EXPECT_TRUE(fails(kvpages_plan_get_tensor(p, 0, far, &tensor), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        EXPECT_TRUE(tensor.is_zero());
        EXPECT_EQ(kvpages_plan_group_layer_name(p, 0, 0, far), nullptr);
        EXPECT_EQ(kvpages_plan_group_layer_name(p, 0, far, 0), nullptr);
        EXPECT_EQ(kvpages_plan_group_layer_name(p, far, 0, 0), nullptr);
        EXPECT_EQ(kvpages_plan_tensor_layer_name(p, 0, 0, far), nullptr);
        EXPECT_EQ(kvpages_plan_tensor_layer_name(p, 0, far, 0), nullptr);
        Out<kvpages_tensor> view;
        EXPECT_TRUE(fails(kvpages_cache_get_view(c, far, 0, &view), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        EXPECT_TRUE(view.is_zero());
        EXPECT_TRUE(fails(kvpages_cache_get_view(c, 0, far, &view), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        Out<DLManagedTensorVersioned*> exported;
        EXPECT_TRUE(fails(kvpages_cache_export_dlpack(c, far, 0, 0, &exported),
                          KVPAGES_STATUS_NOT_FOUND, "not_found", {number}));
        EXPECT_TRUE(exported.is_zero());
        EXPECT_TRUE(fails(kvpages_cache_export_dlpack(c, 0, far, 0, &exported),
                          KVPAGES_STATUS_NOT_FOUND, "not_found", {number}));
        Info<kvpages_view_report> report;
        EXPECT_TRUE(fails(kvpages_cache_get_report(c, far, 0, &report), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        EXPECT_TRUE(report.is_zero());
        EXPECT_TRUE(fails(kvpages_cache_get_report(c, 0, far, &report), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        Info<kvpages_layer_info> layer_info;
        EXPECT_TRUE(fails(kvpages_cache_get_layer(c, far, &layer_info), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        EXPECT_TRUE(layer_info.is_zero());
        Info<kvpages_view_axes> axes;
        EXPECT_TRUE(fails(kvpages_cache_get_axes(c, far, &axes), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        EXPECT_TRUE(axes.is_zero());
        Out<kvpages_allocation> allocation;
        EXPECT_TRUE(fails(kvpages_cache_get_allocation(c, far, &allocation),
                          KVPAGES_STATUS_NOT_FOUND, "not_found", {number}));
        EXPECT_TRUE(allocation.is_zero());
        Out<kvpages_region> region;
        EXPECT_TRUE(fails(kvpages_cache_get_region(c, far, &region), KVPAGES_STATUS_NOT_FOUND,
                          "not_found", {number}));
        EXPECT_TRUE(region.is_zero());
        EXPECT_EQ(kvpages_cache_layer_name(c, far), nullptr);
        EXPECT_EQ(kvpages_cache_num_views(c, far), 0u);
        Out<kvpages_cache*> made;
        Out<std::uint64_t> needed;
        EXPECT_TRUE(fails(try_cache(w.planned, w.memory, &made, &needed, far),
                          KVPAGES_STATUS_NOT_FOUND, "not_found", {number}));
        EXPECT_TRUE(made.is_zero());
        EXPECT_TRUE(needed.is_zero());
        w.expect_unchanged();
    }
    // The next one after the last.
    Out<kvpages_tensor> view;
    EXPECT_EQ(kvpages_cache_get_view(c, 4, 1, &view), KVPAGES_STATUS_NOT_FOUND);
    EXPECT_EQ(kvpages_plan_group_layer_name(p, 0, 0, 3), nullptr);
    EXPECT_STREQ(kvpages_plan_group_layer_name(p, 0, 0, 2), "layers.4.attn");
}

TEST(HostileValues, BuffersThatAreTooSmall) {
    const World w;
    std::size_t length = 0;
    const std::string text = explanation(w.planned, KVPAGES_TEXT_FORMAT_TEXT);
    for (const std::size_t capacity : {std::size_t{0}, std::size_t{1}, text.size()}) {
        std::vector<char> buffer(text.size() + 1, '#');
        EXPECT_TRUE(fails(kvpages_plan_copy_explanation(w.planned.get(), 0, buffer.data(),
                                                        capacity, &length),
                          KVPAGES_STATUS_BUFFER_TOO_SMALL, "buffer_too_small",
                          {std::to_string(text.size() + 1), std::to_string(capacity)}));
        EXPECT_EQ(length, text.size());
        EXPECT_EQ(std::string(buffer.begin(), buffer.end()), std::string(text.size() + 1, '#'));
    }
    std::vector<char> exact(text.size() + 2, '#');
    must(kvpages_plan_copy_explanation(w.planned.get(), 0, exact.data(), text.size() + 1, &length));
    EXPECT_STREQ(exact.data(), text.c_str());
    EXPECT_EQ(exact[text.size() + 1], '#');

    std::vector<std::size_t> layers(6, 77);
    std::size_t count = 0;
    for (const std::size_t capacity : {0u, 4u}) {
        EXPECT_TRUE(fails(kvpages_cache_copy_bound_layers(w.allocated.get(), 1, layers.data(),
                                                          capacity, &count),
                          KVPAGES_STATUS_BUFFER_TOO_SMALL, "buffer_too_small", {"5"}));
        EXPECT_EQ(count, 5u);
        EXPECT_EQ(layers, std::vector<std::size_t>(6, 77));
    }
    must(kvpages_cache_copy_bound_layers(w.allocated.get(), 1, layers.data(), 6, &count));
    EXPECT_EQ(layers, (std::vector<std::size_t>{0, 1, 2, 3, 4, 77}));

    const kvpages_spec small = full(16, 1, 8);
    const kvpages_spec* const specs[]{&w.of_full, &small};
    std::uint64_t sizes[3]{7, 7, 7};
    EXPECT_TRUE(fails(kvpages_spec_set_copy_page_sizes(specs, 2, sizes, 1, &count),
                      KVPAGES_STATUS_BUFFER_TOO_SMALL, "buffer_too_small", {"2", "1"}));
    EXPECT_EQ(count, 2u);
    EXPECT_EQ(sizes[0], 7u);
    must(kvpages_spec_set_copy_page_sizes(specs, 2, sizes, 3, &count));
    EXPECT_EQ(sizes[0], 512u);
    EXPECT_EQ(sizes[1], 1024u);
    EXPECT_EQ(sizes[2], 7u);
    w.expect_unchanged();
}

TEST(HostileValues, HelperNumbers) {
    const World w;
    Out<std::uint64_t> heads;
    Out<std::uint64_t> replicas;
    struct Heads {
        std::uint64_t total;
        std::uint64_t ranks;
        const char* kind;
    };
    for (const Heads& given : {Heads{0, 4, "bad_values"}, Heads{4, 0, "bad_values"},
                               Heads{6, 4, "heads_not_dividing"}, Heads{4, 6, "heads_not_dividing"},
                               Heads{UINT64_MAX, 2, "heads_not_dividing"}}) {
        EXPECT_TRUE(fails(
            kvpages_kv_heads_per_rank(given.total, given.ranks, &heads, &replicas),
            KVPAGES_STATUS_INVALID_ARGUMENT, given.kind));
        EXPECT_TRUE(heads.is_zero() && replicas.is_zero());
    }
    Out<std::uint64_t> count;
    const std::uint64_t zero[]{3, 0};
    const std::uint64_t huge[]{3, std::uint64_t{1} << 21};
    const std::uint64_t fine[]{3, 4};
    EXPECT_TRUE(fails(kvpages_layer_tuple_count(zero, 2, 0, &count),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"0"}));
    EXPECT_TRUE(count.is_zero());
    EXPECT_TRUE(fails(kvpages_layer_tuple_count(huge, 2, 0, &count),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"2097152"}));
    EXPECT_TRUE(count.is_zero());
    EXPECT_TRUE(fails(kvpages_layer_tuple_count(fine, 0, 0, &count),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values"));
    EXPECT_TRUE(count.is_zero());
    // A lower bound above all values is the answer itself.
    must(kvpages_layer_tuple_count(fine, 2, 5, &count));
    EXPECT_EQ(count.value, 5u);
    EXPECT_TRUE(fails(kvpages_layer_tuple_count(fine, SIZE_MAX / 2, 0, &count),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "overflow"));

    struct Hybrid {
        const char* kind;
        std::function<void(kvpages_hybrid_config&)> spoil;
    };
    for (const Hybrid& given :
         {Hybrid{"bad_values", [](kvpages_hybrid_config& h) { h.block_size = 0; }},
          Hybrid{"bad_values", [](kvpages_hybrid_config& h) { h.smallest_kernel_block = 0; }},
          Hybrid{"bad_values", [](kvpages_hybrid_config& h) { h.attention_bytes_per_token = 0; }},
          Hybrid{"bad_values",
                 [](kvpages_hybrid_config& h) {
                     h.state_cache_mode = KVPAGES_STATE_CACHE_MODE_ALL;
                     h.base_chunk = 0;
                 }},
          Hybrid{"overflow",
                 [](kvpages_hybrid_config& h) {
                     h.block_size = std::uint64_t{1} << 40;
                     h.attention_bytes_per_token = std::uint64_t{1} << 40;
                 }}}) {
        kvpages_hybrid_config config = KVPAGES_HYBRID_CONFIG_INIT;
        config.block_size = config.smallest_kernel_block = 16;
        config.attention_bytes_per_token = 64;
        config.state_page_bytes = 5000;
        given.spoil(config);
        Info<kvpages_hybrid_block> out;
        EXPECT_TRUE(fails(kvpages_hybrid_block_size(&config, &out),
                          KVPAGES_STATUS_INVALID_ARGUMENT, given.kind));
        EXPECT_TRUE(out.is_zero());
    }
    Out<std::uint64_t> size;
    EXPECT_TRUE(fails(kvpages_select_kernel_block_size(0, nullptr, 0, &size),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"0"}));
    EXPECT_TRUE(size.is_zero());

    struct Index {
        const char* name;
        std::uint64_t modules;
        const char* kind;
    };
    for (const Index& given :
         {Index{"no.number", 1, "layer_index_not_one_integer"},
          Index{"a.1.2", 1, "layer_index_not_one_integer"},
          Index{"", 1, "layer_index_not_one_integer"},
          Index{"attn.1.2.3", 4, "layer_index_too_many_integers"},
          Index{"a.99999999999999999999", 1, "overflow"},
          Index{"a.+1", 1, "layer_index_not_one_integer"},
          Index{"a.-1", 1, "layer_index_not_one_integer"},
          // Digits of another script are digits to some languages' isdigit().
          Index{"a.\xd9\xa1", 1, "layer_index_not_one_integer"},
          Index{"layers.9223372036854775807.attn.1", 2, "overflow"}}) {
        Out<std::uint64_t> index;
        EXPECT_TRUE(fails(kvpages_layer_index(given.name, given.modules, &index),
                          KVPAGES_STATUS_INVALID_ARGUMENT, given.kind, {given.name}))
            << given.name;
        EXPECT_TRUE(index.is_zero());
    }
    const kvpages_spec encoder = attention(KVPAGES_SPEC_KIND_ENCODER_ONLY, 16, 2, 8);
    const kvpages_spec other = full(32, 2, 8);
    const kvpages_spec* const specs[]{&w.of_full, &encoder};
    const kvpages_spec* const unlike[]{&w.of_full, &other};
    Info<kvpages_uniformity> uniformity;
    EXPECT_TRUE(fails(kvpages_spec_uniformity(specs, 2, &uniformity), KVPAGES_STATUS_UNSUPPORTED,
                      "unsupported_spec"));
    EXPECT_TRUE(uniformity.is_zero());
    Info<kvpages_spec> merged;
    EXPECT_TRUE(fails(kvpages_spec_merge(unlike, 2, &merged), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "merge_spec_mismatch", {"block_size"}));
    EXPECT_TRUE(merged.is_zero());
    EXPECT_TRUE(fails(kvpages_spec_merge(unlike, 0, &merged), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "bad_values"));
    Info<kvpages_spec_set_info> set;
    EXPECT_TRUE(fails(kvpages_spec_set_describe(unlike, 0, &set), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "bad_values"));
    EXPECT_TRUE(set.is_zero());
    kvpages_limits limits = KVPAGES_LIMITS_INIT;
    limits.max_model_len = UINT64_MAX;
    Info<kvpages_demand> demand;
    EXPECT_TRUE(fails(kvpages_spec_demand(&w.of_full, &limits, &demand),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "overflow"));
    EXPECT_TRUE(demand.is_zero());
    w.expect_unchanged();
}

// Pointers that cannot point to what they are said to point to.
TEST(HostileValues, MisalignedPointers) {
    World w;
    alignas(16) unsigned char room[256] = {};
    const auto at = [&](auto type) { return reinterpret_cast<decltype(type)>(room + 1); };
    const std::vector<std::string> words{"multiple of"};
    const auto refused = [&](std::int32_t status) {
        EXPECT_TRUE(fails(status, KVPAGES_STATUS_INVALID_ARGUMENT, "misaligned_pointer", words));
        w.expect_unchanged();
    };
    refused(kvpages_layer_index("layers.1.attn", 1, at(static_cast<std::uint64_t*>(nullptr))));
    refused(kvpages_cache_get_view(w.allocated.get(), 0, 0,
                                   at(static_cast<kvpages_tensor*>(nullptr))));
    refused(kvpages_cache_get_axes(w.allocated.get(), 0,
                                   at(static_cast<kvpages_view_axes*>(nullptr))));
    refused(kvpages_cache_export_dlpack(w.allocated.get(), 0, 0, 0,
                                        at(static_cast<DLManagedTensorVersioned**>(nullptr))));
    refused(kvpages_cache_export_dlpack_unversioned(
        w.allocated.get(), 0, 0, at(static_cast<DLManagedTensor**>(nullptr))));
    refused(kvpages_model_create(at(static_cast<kvpages_model**>(nullptr))));
    Info<kvpages_view_report> report;
    refused(kvpages_view_audit(at(static_cast<kvpages_view*>(nullptr)), &report));
}

// A merge that would overwrite what it reads.
TEST(HostileValues, AMergeIntoItsOwnInput) {
    kvpages_spec a = full(16, 2, 64);
    const kvpages_spec before = a;
    const kvpages_spec b = full(16, 2, 64);
    const kvpages_spec* both[]{&a, &b};
    EXPECT_TRUE(fails(kvpages_spec_merge(both, 2, &a), KVPAGES_STATUS_INVALID_ARGUMENT,
                      "output_is_input", {"out"}));
    EXPECT_EQ(std::memcmp(&a, &before, sizeof a), 0);
}

TEST(HostileValues, ASchedulerIsGivenNoBlockOfNothing) {
    World w;
    kvpages_block_size_config config = KVPAGES_BLOCK_SIZE_CONFIG_INIT;
    std::uint64_t scheduler = 7, hash = 7;
    EXPECT_TRUE(fails(
        kvpages_plan_resolve_block_sizes(w.planned.get(), &config, &scheduler, &hash),
        KVPAGES_STATUS_INVALID_ARGUMENT, "bad_values", {"cache_block_size", "0"}));
    EXPECT_EQ(scheduler, 0u);
    EXPECT_EQ(hash, 0u);
}

// What cannot be asked of a plan is refused when it is made.
TEST(HostileValues, RowsOverTooManyRanks) {
    const Model m = model();
    add(m, "layers.0.attn", full(16, 2, 64), backend(packed_nhd));
    kvpages_plan_config config = plan_config(64);
    config.context_parallel_size = std::uint64_t{1} << 62;
    Out<kvpages_plan*> out;
    EXPECT_TRUE(fails(try_plan({{m.get(), 1 << 20}}, config, &out),
                      KVPAGES_STATUS_INVALID_ARGUMENT, "overflow", {"layers.0.attn"}));
    EXPECT_TRUE(out.is_zero());
}
