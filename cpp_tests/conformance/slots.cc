// slots.json: block tables, gathered batches and slot mappings.
#include "category.h"
#include "library.h"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace conformance {
namespace {

using Handle = std::unique_ptr<kvpages_tables, Destroy<kvpages_tables_destroy>>;

template <typename T>
std::vector<T> list(const Json& values) {
    return values.get<std::vector<T>>();
}

// What differs between the groups, given as arrays.
std::vector<kvpages_table_group> table_groups(const Json& input) {
    const auto blocks = list<std::uint64_t>(input.at("block_sizes"));
    const auto kernel_blocks = list<std::uint64_t>(input.at("kernel_block_sizes"));
    const auto rows = list<std::uint64_t>(input.at("max_num_blocks_per_group"));
    if (kernel_blocks.size() != blocks.size() || rows.size() != blocks.size()) {
        throw Inexpressible("input: arrays by group differ in length");
    }
    std::vector<kvpages_table_group> groups;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        if (kernel_blocks[i] == 0) {
            throw Inexpressible("a kernel block size of 0 stands for none");
        }
        groups.push_back({blocks[i], kernel_blocks[i], rows[i], 0, 0});
    }
    return groups;
}

Handle create(const Json& input) {
    const std::vector<kvpages_table_group> groups = table_groups(input);
    auto config = sized<kvpages_tables_config>();
    config.groups = groups.data();
    config.num_groups = groups.size();
    config.max_requests = input.at("max_num_reqs");
    config.max_tokens = input.at("max_num_batched_tokens");
    config.context_parallel_size = input.at("cp_size");
    config.context_parallel_rank = input.at("cp_rank");
    config.context_parallel_interleave = input.at("cp_interleave");
    if (config.context_parallel_size == 0 || config.context_parallel_interleave == 0) {
        throw Inexpressible("a context-parallel size or interleave of 0 stands for 1");
    }
    kvpages_tables* raw = nullptr;
    check(kvpages_tables_create(&config, &raw));
    return Handle(raw);
}

// Runs the operations of a case, and watches that no address changes.
class Runner {
public:
    explicit Runner(Handle tables)
        : tables_(std::move(tables)), num_groups_(kvpages_tables_num_groups(tables_.get())) {
        addresses_ = addresses();
    }

    Json info() const {
        Json ratios = Json::array();
        Json widths = Json::array();
        for (std::size_t group = 0; group < num_groups_; ++group) {
            auto info = sized<kvpages_table_info>();
            check(kvpages_tables_get_info(tables_.get(), group, &info));
            ratios.push_back(info.kernel_blocks_per_block);
            widths.push_back(info.row_width);
        }
        return {{"blocks_per_kv_block", ratios}, {"row_lengths", widths}};
    }

    Json run(const Json& op) {
        const std::string name = op.at("op");
        Json result = run_named(name, op);
        if (addresses() != addresses_) {
            throw Contradiction("op " + name + ": an address changed");
        }
        return result;
    }

private:
    using Get = kvpages_status (*)(const kvpages_tables*, std::size_t, kvpages_tensor*);

    Json run_named(const std::string& name, const Json& op) {
        if (name == "append") return append(op);
        if (name == "apply") {
            check(kvpages_tables_apply(tables_.get(), nullptr));
            const bool dump = op.value("dump", false);
            return {{"tables", dump ? all_rows() : Json()}};
        }
        if (name == "gather") {
            const auto requests = list<std::int32_t>(op.at("idx_mapping"));
            const std::size_t num_rows = op.at("num_reqs_padded");
            check(kvpages_tables_gather(tables_.get(), requests.data(), requests.size(), num_rows,
                                        nullptr));
            return {{"tables", rows(kvpages_tables_get_input_table, num_rows)}};
        }
        if (name == "dummy_tables") {
            const std::size_t num_rows = op.at("num_reqs");
            check(kvpages_tables_gather_dummies(tables_.get(), num_rows, nullptr));
            return {{"tables", rows(kvpages_tables_get_input_table, num_rows)}};
        }
        if (name == "slots") return slots(op);
        if (name == "dummy_slots") {
            check(kvpages_tables_map_dummies(tables_.get(), nullptr));
            return {{"slot_mappings", slot_mappings(op.at("num_tokens"))}};
        }
        throw Inexpressible("input.ops: unknown op \"" + name + "\"");
    }

    Json append(const Json& op) {
        const auto blocks = list<std::vector<std::int32_t>>(op.at("block_ids"));
        if (blocks.size() != num_groups_) {
            throw Inexpressible("append: block ids of another number of groups");
        }
        const std::int32_t request = op.at("req");
        const std::uint8_t overwrite = op.at("overwrite").get<bool>() ? 1 : 0;
        std::vector<std::size_t> starts{0};
        std::vector<std::int32_t> all;
        for (const auto& of_group : blocks) {
            all.insert(all.end(), of_group.begin(), of_group.end());
            starts.push_back(all.size());
        }
        auto writes = sized<kvpages_row_writes>();
        writes.requests = &request;
        writes.num_writes = 1;
        writes.overwrite = &overwrite;
        writes.starts = starts.data();
        writes.block_ids = all.data();
        writes.num_block_ids = all.size();
        check(kvpages_tables_write(tables_.get(), &writes));
        Json counts = Json::array();
        for (std::size_t group = 0; group < num_groups_; ++group) {
            std::size_t count = 0;
            check(kvpages_tables_num_entries(tables_.get(), static_cast<std::size_t>(request),
                                             group, &count));
            counts.push_back(count);
        }
        return {{"num_blocks", counts}};
    }

    Json slots(const Json& op) {
        const auto requests = list<std::int32_t>(op.at("idx_mapping"));
        const auto query_start = list<std::int32_t>(op.at("query_start_loc"));
        const auto positions = list<std::int64_t>(op.at("positions"));
        if (query_start.size() != requests.size() + 1) {
            throw Inexpressible("slots: query_start_loc is not one longer than idx_mapping");
        }
        check(kvpages_tables_map_slots(tables_.get(), requests.data(), requests.size(),
                                       query_start.data(), positions.data(), positions.size(),
                                       nullptr));
        return {{"slot_mappings", slot_mappings(op.at("num_tokens_padded"))}};
    }

    kvpages_tensor tensor(Get get, std::size_t group) const {
        kvpages_tensor tensor{};
        check(get(tables_.get(), group, &tensor));
        return tensor;
    }

    Json all_rows() const {
        const std::size_t num_rows =
            num_groups_ == 0
                ? 0
                : static_cast<std::size_t>(tensor(kvpages_tables_get_table, 0).shape[0]);
        return rows(kvpages_tables_get_table, num_rows);
    }

    Json rows(Get get, std::size_t num_rows) const {
        Json groups = Json::array();
        for (std::size_t group = 0; group < num_groups_; ++group) {
            const kvpages_tensor table = tensor(get, group);
            if (table.ndim != 2 || table.dtype != KVPAGES_DTYPE_I32 || table.strides[1] != 1 ||
                static_cast<std::int64_t>(num_rows) > table.shape[0]) {
                throw Contradiction("a table is not int32 [requests, width]");
            }
            const auto* ids = static_cast<const std::int32_t*>(table.data);
            Json of_group = Json::array();
            for (std::size_t row = 0; row < num_rows; ++row) {
                const auto* begin = ids + static_cast<std::int64_t>(row) * table.strides[0];
                of_group.push_back(std::vector<std::int32_t>(begin, begin + table.shape[1]));
            }
            groups.push_back(of_group);
        }
        return groups;
    }

    // Slots are checked to the end of the buffer, also where no kernel would read them.
    Json slot_mappings(std::size_t num_tokens) const {
        Json groups = Json::array();
        for (std::size_t group = 0; group < num_groups_; ++group) {
            const kvpages_tensor slots = tensor(kvpages_tables_get_slots, group);
            if (slots.ndim != 1 || slots.dtype != KVPAGES_DTYPE_I64 || slots.strides[0] != 1 ||
                static_cast<std::int64_t>(num_tokens) > slots.shape[0]) {
                throw Contradiction("slots are not int64 [tokens]");
            }
            const auto* begin = static_cast<const std::int64_t*>(slots.data);
            const auto* end = begin + num_tokens;
            for (const auto* slot = end; slot != begin + slots.shape[0]; ++slot) {
                if (*slot != -1) {
                    throw Contradiction("a slot past the batch is no pad");
                }
            }
            groups.push_back(std::vector<std::int64_t>(begin, end));
        }
        return groups;
    }

    std::vector<const void*> addresses() const {
        std::vector<const void*> all;
        for (std::size_t group = 0; group < num_groups_; ++group) {
            for (const Get get : {Get{kvpages_tables_get_table}, Get{kvpages_tables_get_input_table},
                                  Get{kvpages_tables_get_slots}}) {
                all.push_back(tensor(get, group).data);
            }
        }
        return all;
    }

    Handle tables_;
    std::size_t num_groups_;
    std::vector<const void*> addresses_;
};

Json run_slots(const Json& input) {
    Runner runner(create(input));
    Json outcome = runner.info();
    Json results = Json::array();
    for (const Json& op : input.at("ops")) {
        results.push_back(runner.run(op));
    }
    outcome["results"] = results;
    return outcome;
}

}  // namespace

Category slots_category() {
    return {
        {"",
         {Schema(R"({
              "block_sizes": ["uint"], "kernel_block_sizes": ["uint"],
              "max_num_blocks_per_group": ["uint"], "max_num_reqs": "uint",
              "max_num_batched_tokens": "uint", "cp_size": "uint", "cp_rank": "uint",
              "cp_interleave": "uint",
              "ops": [{"op": "string", "req?": "uint", "block_ids?": [["int"]],
                       "overwrite?": "bool", "dump?": "bool", "idx_mapping?": ["int"],
                       "num_reqs_padded?": "uint", "query_start_loc?": ["uint"],
                       "positions?": ["int"], "num_tokens_padded?": "uint", "num_reqs?": "uint",
                       "num_tokens?": "uint"}]})"),
          Schema::of_expectation(R"({
              "blocks_per_kv_block": ["uint"], "row_lengths": ["uint"],
              "results": [{"num_blocks?": ["uint"], "tables?": "tables|null",
                           "slot_mappings?": [["int"]]}]})"),
          run_slots, as_it_is}},
    };
}

}  // namespace conformance
