/* kvpages.h, and then the real dlpack.h. scripts/test dlpack compiles it, as C and as C++. */
#include <kvpages/kvpages.h>

#include <dlpack/dlpack.h>

#include "layout.h"

int main(void) {
    DLManagedTensorVersioned* tensor = NULL;
    const kvpages_status status = kvpages_cache_export_dlpack(NULL, 0, 0, 0, &tensor);
    return status == KVPAGES_STATUS_OK && tensor->dl_tensor.ndim == 0 ? 1 : 0;
}
