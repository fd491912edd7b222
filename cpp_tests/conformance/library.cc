#include "library.h"

namespace conformance {

void check(kvpages_status status) {
    if (status == KVPAGES_STATUS_OK) {
        return;
    }
    const std::string kind = kvpages_last_error_kind();
    const std::string name = kvpages_status_name(status);
    throw LibraryError(kind.empty() ? name : kind, name + ": " + kvpages_last_error_message());
}

}  // namespace conformance
