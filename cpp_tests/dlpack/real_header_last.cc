// kvpages.hpp, and then the real dlpack.h. scripts/test dlpack compiles it.
#include <kvpages/kvpages.hpp>

#include <dlpack/dlpack.h>

#include "layout.h"

DLManagedTensorVersioned* given_away(const kvpages::Cache& cache);
DLManagedTensorVersioned* given_away(const kvpages::Cache& cache) {
    DLManagedTensorVersioned* const tensor = cache.to_dlpack("layer").release();
    const kvpages::UnversionedDlpackTensor other = cache.to_unversioned_dlpack("layer");
    return other->dl_tensor.byte_offset == tensor->dl_tensor.byte_offset ? tensor : nullptr;
}
