// The real dlpack.h, and then kvpages.hpp. scripts/test dlpack compiles it.
#include <dlpack/dlpack.h>

#include <kvpages/kvpages.hpp>

#include "layout.h"

std::int64_t first_size(const kvpages::Cache& cache);
std::int64_t first_size(const kvpages::Cache& cache) {
    const kvpages::DlpackTensor tensor = cache.to_dlpack(0, 0, kvpages::Access::read_only);
    return tensor->dl_tensor.shape[0];
}
