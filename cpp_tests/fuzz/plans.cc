// Plans of random layers by both policies: what is planned is consistent and can be allocated, every
// element of every view is there, and what is refused is refused with a reason.
#include <nlohmann/json.hpp>

#include "world.h"

namespace {

using fuzz::Bytes;
using fuzz::ok;

// Caches larger than this are not made.
constexpr std::uint64_t kLargestCache = 1 << 18;

struct Planned {
    support::Plan plan;
    std::int32_t status = KVPAGES_STATUS_OK;
};

Planned make_plan(const std::vector<kvpages_worker>& workers, const kvpages_plan_config& config) {
    kvpages_plan* raw = nullptr;
    kvpages_shortfall shortfall = KVPAGES_SHORTFALL_INIT;
    Planned made;
    made.status = kvpages_plan_create(&config, workers.data(), workers.size(), &raw, &shortfall);
    FUZZ_CHECK(ok(made.status) == (raw != nullptr));
    if (made.status == KVPAGES_STATUS_DOES_NOT_FIT) {
        FUZZ_CHECK(shortfall.worker < workers.size());
    }
    made.plan.reset(raw);
    return made;
}

void check_tensor(const support::Plan& plan, std::size_t worker, std::size_t tensor,
                  std::uint64_t num_blocks) {
    kvpages_tensor_info info = KVPAGES_TENSOR_INFO_INIT;
    FUZZ_CHECK(ok(kvpages_plan_get_tensor(plan.get(), worker, tensor, &info)));
    FUZZ_CHECK(info.num_layers > 0);
    FUZZ_CHECK(info.block_stride_bytes == 0 ||
               info.size_bytes >= num_blocks * info.block_stride_bytes);
    for (std::size_t layer = 0; layer < info.num_layers; ++layer) {
        FUZZ_CHECK(kvpages_plan_tensor_layer_name(plan.get(), worker, tensor, layer) != nullptr);
    }
    FUZZ_CHECK(kvpages_plan_tensor_layer_name(plan.get(), worker, tensor, info.num_layers) == nullptr);
}

void check_worker(const support::Plan& plan, std::size_t worker, std::int64_t memory,
                  const kvpages_plan_config& config) {
    kvpages_worker_info info = KVPAGES_WORKER_INFO_INIT;
    FUZZ_CHECK(ok(kvpages_plan_get_worker(plan.get(), worker, &info)));
    if ((config.flags & KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS) == 0 && info.num_tensors > 0) {
        FUZZ_CHECK(info.total_bytes <= static_cast<std::uint64_t>(memory));
    }
    for (std::size_t tensor = 0; tensor < info.num_tensors; ++tensor) {
        check_tensor(plan, worker, tensor, info.num_blocks);
    }
    for (std::size_t group = 0; group < info.num_groups; ++group) {
        kvpages_group_info said = KVPAGES_GROUP_INFO_INIT;
        FUZZ_CHECK(ok(kvpages_plan_get_group(plan.get(), worker, group, &said)));
        FUZZ_CHECK(said.block_size > 0);
        for (std::size_t spec = 0; spec < said.num_specs; ++spec) {
            kvpages_spec of_group = KVPAGES_SPEC_INIT;
            FUZZ_CHECK(ok(kvpages_plan_get_group_spec(plan.get(), worker, group, spec, &of_group,
                                                      nullptr)));
            // A stage may have none of a group's layers, and then the group's spec is all there is.
            FUZZ_CHECK(said.is_set == 1 || of_group.block_size == said.block_size);
        }
    }
}

void check_explanation(const support::Plan& plan) {
    const std::string json = support::explanation(plan, KVPAGES_TEXT_FORMAT_JSON);
    FUZZ_CHECK(nlohmann::json::accept(json));
    FUZZ_CHECK(!support::explanation(plan, KVPAGES_TEXT_FORMAT_TEXT).empty());
}

// Writes every element of a view that is not too large.
void touch(const kvpages_tensor& view) {
    std::uint64_t elements = 1;
    for (std::uint32_t dim = 0; dim < view.ndim; ++dim) {
        elements *= static_cast<std::uint64_t>(view.shape[dim]);
    }
    const std::uint64_t bytes = kvpages_dtype_bytes(view.dtype);
    for (std::uint64_t element = 0; element < elements; ++element) {
        std::int64_t offset = 0;
        std::uint64_t rest = element;
        for (std::uint32_t dim = view.ndim; dim-- > 0;) {
            const auto size = static_cast<std::uint64_t>(view.shape[dim]);
            offset += static_cast<std::int64_t>(rest % size) * view.strides[dim];
            rest /= size;
        }
        auto* const at =
            static_cast<unsigned char*>(view.data) + offset * static_cast<std::int64_t>(bytes);
        for (std::uint64_t byte = 0; byte < bytes; ++byte) {
            at[byte] = static_cast<unsigned char>(at[byte] + 1);
        }
    }
}

void check_cache(const support::Cache& cache) {
    for (std::size_t layer = 0; layer < kvpages_cache_num_layers(cache.get()); ++layer) {
        for (std::size_t view = 0; view < kvpages_cache_num_views(cache.get(), layer); ++view) {
            kvpages_tensor tensor{};
            FUZZ_CHECK(ok(kvpages_cache_get_view(cache.get(), layer, view, &tensor)));
            kvpages_view_report report = KVPAGES_VIEW_REPORT_INIT;
            FUZZ_CHECK(ok(kvpages_cache_get_report(cache.get(), layer, view, &report)));
            kvpages_allocation allocation{};
            FUZZ_CHECK(ok(kvpages_cache_get_allocation(
                cache.get(), static_cast<std::size_t>(report.allocation), &allocation)));
            FUZZ_CHECK(report.end_bytes <= allocation.size_bytes);
            touch(tensor);
        }
        kvpages_view_axes axes = KVPAGES_VIEW_AXES_INIT;
        ok(kvpages_cache_get_axes(cache.get(), layer, &axes));
    }
}

// The text that describes a cache, read back, is that text.
void check_descriptor(const support::Cache& cache) {
    std::size_t length = 0;
    const std::int32_t asked =
        kvpages_cache_copy_descriptor(cache.get(), nullptr, nullptr, 0, &length);
    if (asked != KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        FUZZ_CHECK(!ok(asked));
        return;
    }
    std::string json(length + 1, '\0');
    FUZZ_CHECK(
        ok(kvpages_cache_copy_descriptor(cache.get(), nullptr, &json[0], json.size(), &length)));
    kvpages_descriptor* raw = nullptr;
    FUZZ_CHECK(ok(kvpages_descriptor_create(json.data(), length, &raw)));
    std::string again(length + 1, '\0');
    FUZZ_CHECK(ok(kvpages_descriptor_copy_json(raw, &again[0], again.size(), &length)));
    FUZZ_CHECK(again == json);
    kvpages_descriptor_destroy(raw);
}

// Whether a worker's cache, if it is small, can be made: nothing where it is not small.
enum class Made { yes, no, too_large };

Made make_cache(const support::Plan& plan, std::size_t worker) {
    const kvpages_worker_info info = support::worker_info(plan, worker);
    if (info.total_bytes > kLargestCache) {
        return Made::too_large;
    }
    static const support::Memory memory = support::host_memory();
    kvpages_cache* raw = nullptr;
    const bool made = ok(support::try_cache(plan, memory, &raw, nullptr, worker));
    FUZZ_CHECK(made == (raw != nullptr));
    const support::Cache cache(raw);
    if (!made) {
        return Made::no;
    }
    check_cache(cache);
    check_descriptor(cache);
    return Made::yes;
}

void check_tables(const support::Plan& plan, std::size_t worker) {
    kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
    config.max_requests = 2;
    config.max_tokens = 8;
    config.max_model_len = 64;
    kvpages_tables* raw = nullptr;
    FUZZ_CHECK(ok(kvpages_tables_create_for_plan(plan.get(), worker, &config, &raw)) ==
               (raw != nullptr));
    kvpages_tables_destroy(raw);
}

void check_plan(const support::Plan& plan, const std::vector<kvpages_worker>& workers,
                const kvpages_plan_config& config) {
    FUZZ_CHECK(kvpages_plan_num_workers(plan.get()) == workers.size());
    for (std::size_t worker = 0; worker < workers.size(); ++worker) {
        check_worker(plan, worker, workers[worker].memory_bytes, config);
        check_tables(plan, worker);
    }
    check_explanation(plan);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes bytes(data, size);
    kvpages_plan_config config = fuzz::make_config(bytes);
    std::vector<support::Model> models;
    std::vector<kvpages_worker> workers;
    const auto num_models = bytes.ConsumeIntegralInRange<std::size_t>(1, 2);
    for (std::size_t i = 0; i < num_models; ++i) {
        models.push_back(fuzz::make_model(bytes, 12));
        const auto ranks = bytes.ConsumeIntegralInRange<std::size_t>(1, 2);
        for (std::size_t rank = 0; rank < ranks; ++rank) {
            workers.push_back({models.back().get(), fuzz::make_memory(bytes)});
        }
    }

    config.policy = KVPAGES_POLICY_REFERENCE;
    const Planned reference = make_plan(workers, config);
    config.policy = KVPAGES_POLICY_COMPACT;
    const Planned compact = make_plan(workers, config);
    const bool is_out_of_reach = compact.status == KVPAGES_STATUS_CONTRACT_BROKEN &&
                                 kvpages_last_error_kind() == std::string("index_width_exceeded");
    if (reference.plan) {
        check_plan(reference.plan, workers, config);
        // Compact keeps block 0 and counts alike; that it holds no request may be found by it alone. And
        // that kernels do not reach the blocks of one: the reference finds it when views are made.
        FUZZ_CHECK(compact.plan || compact.status == KVPAGES_STATUS_DOES_NOT_FIT ||
                   compact.status == KVPAGES_STATUS_OUT_OF_HOST_MEMORY || is_out_of_reach);
    }
    if (!compact.plan) {
        return 0;
    }
    check_plan(compact.plan, workers, config);
    for (std::size_t worker = 0; worker < workers.size(); ++worker) {
        const Made own = make_cache(compact.plan, worker);
        const Made other = reference.plan ? make_cache(reference.plan, worker) : Made::no;
        FUZZ_CHECK(own != Made::no || other != Made::yes);
    }
    return 0;
}
