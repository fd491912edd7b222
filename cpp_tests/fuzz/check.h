// What every fuzz target checks: a call that fails says why and leaves nothing behind.
#ifndef KVPAGES_CPP_TESTS_FUZZ_CHECK_H
#define KVPAGES_CPP_TESTS_FUZZ_CHECK_H

#include <kvpages/kvpages.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define FUZZ_CHECK(condition)                                                               \
    do {                                                                                    \
        if (!(condition)) {                                                                 \
            std::fprintf(stderr, "%s:%d: %s does not hold; the last error is %s: %s\n",     \
                         __FILE__, __LINE__, #condition, kvpages_last_error_kind(),         \
                         kvpages_last_error_message());                                     \
            std::abort();                                                                   \
        }                                                                                   \
    } while (false)

namespace fuzz {

// Whether a call did what it was asked. A panic of the library is a fault whatever was asked.
inline bool ok(std::int32_t status) {
    FUZZ_CHECK(status == KVPAGES_STATUS_OK || status > KVPAGES_STATUS_POISONED);
    FUZZ_CHECK(status == KVPAGES_STATUS_OK || kvpages_last_error_message()[0] != '\0');
    FUZZ_CHECK(status == KVPAGES_STATUS_OK || kvpages_last_error_kind()[0] != '\0');
    return status == KVPAGES_STATUS_OK;
}

}  // namespace fuzz

#endif
