// Tables, and all memory of theirs that a caller sees.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_TABLES_H
#define KVPAGES_CPP_TESTS_SUPPORT_TABLES_H

#include "api.h"
#include "refusal.h"

#include <cstddef>
#include <cstdint>
#include <memory>

namespace support {

using TablesHandle =
    std::unique_ptr<kvpages_tables, Destroy<kvpages_tables, kvpages_tables_destroy>>;

// Of each group the table, the input table, the slots, and how long rows are once staged.
inline Bytes bytes_of_tables(const TablesHandle& tables) {
    Bytes all;
    for (std::size_t g = 0; g < kvpages_tables_num_groups(tables.get()); ++g) {
        kvpages_tensor tensor{};
        must(kvpages_tables_get_table(tables.get(), g, &tensor));
        const auto rows = static_cast<std::size_t>(tensor.shape[0]);
        const std::size_t entries = rows * static_cast<std::size_t>(tensor.shape[1]);
        append_bytes(all, static_cast<const std::int32_t*>(tensor.data), entries);
        must(kvpages_tables_get_input_table(tables.get(), g, &tensor));
        append_bytes(all, static_cast<const std::int32_t*>(tensor.data), entries);
        must(kvpages_tables_get_slots(tables.get(), g, &tensor));
        append_bytes(all, static_cast<const std::int64_t*>(tensor.data),
                     static_cast<std::size_t>(tensor.shape[0]));
        for (std::size_t request = 0; request < rows; ++request) {
            std::size_t count = 0;
            must(kvpages_tables_num_entries(tables.get(), request, g, &count));
            append_bytes(all, &count, 1);
        }
    }
    return all;
}

}  // namespace support

#endif
