/* The real dlpack.h, and then kvpages.h. scripts/test dlpack compiles it, as C and as C++. */
#include <dlpack/dlpack.h>

#include <kvpages/kvpages.h>

#include "layout.h"

int main(void) {
    DLManagedTensorVersioned* versioned = NULL;
    DLManagedTensor* unversioned = NULL;
    if (kvpages_cache_export_dlpack(NULL, 0, 0, KVPAGES_DLPACK_READ_ONLY, &versioned) == 0 ||
        kvpages_cache_export_dlpack_unversioned(NULL, 0, 0, &unversioned) == 0) {
        return 1;
    }
    kvpages_dlpack_destroy(versioned);
    kvpages_dlpack_destroy_unversioned(unversioned);
    return 0;
}
