// A call of a benchmark that fails ends it: its times would mean nothing.

#pragma once

#include <kvpages/kvpages.h>

#include <cstdio>
#include <cstdlib>

inline void must(kvpages_status status) {
    if (status == KVPAGES_STATUS_OK) return;
    std::fprintf(stderr, "bench: %s: %s\n", kvpages_status_name(status),
                 kvpages_last_error_message());
    std::abort();
}
