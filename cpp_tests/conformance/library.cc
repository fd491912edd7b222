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

std::string text(const char* name) {
    if (name == nullptr) {
        throw Contradiction("the library has no name for a layer that it counts");
    }
    return name;
}

}  // namespace conformance
