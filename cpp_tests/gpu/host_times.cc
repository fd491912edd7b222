// How long calls keep the host, and how many launches they make.
#include "bench.h"
#include "pool.h"
#include "standin.h"
#include "timing.h"

#include <cstdio>

namespace {

using support::DeviceArray;
using support::Stream;

/// Launches of one call, where the driver counts them: a real one does not.
template <typename Call>
std::string launches_of(const Call& call) {
    if (!on_standin()) return "";
    const std::uint64_t before = standin_num_calls("cuLaunchKernel");
    call();
    return std::to_string(standin_num_calls("cuLaunchKernel") - before);
}

class HostTimes {
public:
    explicit HostTimes(const Options& options) : options_(options) {}

    /// Returns whether the target was reached. `most_us` 0: none.
    template <typename Prepare, typename Call>
    bool print(const char* name, double most_us, const Prepare& prepare, const Call& call) const {
        const double us = host_ns(stream_.get(), options_.quick ? 5 : 400, prepare, call) / 1e3;
        prepare();
        const std::string launches = launches_of(call);
        DRIVER(cuStreamSynchronize(stream_.get()));
        const bool judged = options_.judges && most_us > 0;
        const bool is_good = us <= most_us;
        std::printf("| %s | %.2f | %s | %s |\n", name, us, launches.c_str(),
                    !judged ? "" : is_good ? "reached" : "**misses**");
        return !judged || is_good;
    }
    template <typename Call>
    bool print(const char* name, const Call& call) const {
        return print(name, 0, [] {}, call);
    }

    CUstream stream() const { return stream_.get(); }

private:
    Options options_;
    Stream stream_;
};

/// 16 blocks, and 256 tokens of them.
bool print_operations(const HostTimes& times) {
    Pool pool(kBf16, 16);
    Pool fp8(kFp8, 16);
    const DeviceArray data(pool.row_bytes());
    const CUstream stream = times.stream();
    const std::vector<kvpages_kv_rows> rows = pool.rows(data.get());
    const std::vector<kvpages_kv_rows_out> room = pool.room(data.get());
    const auto write = [&](Pool& to, std::size_t num_layers) {
        to.ops().write(kvpages::Span<const kvpages_kv_rows>(rows).first(num_layers), to.slots(),
                       kvpages::Dtype::bf16, std::nullopt, stream);
    };
    times.print("`cuMemsetD8Async` of 1 MiB, the driver's own",
                [&] { DRIVER(cuMemsetD8Async(data.get(), 0, 1 << 20, stream)); });
    times.print("zero_blocks, 16 blocks of 8 layers",
                [&] { pool.ops().zero_blocks(pool.ids(), stream); });
    times.print("copy_blocks, 16 pairs of 8 layers",
                [&] { pool.ops().copy_blocks(pool.copies(), stream); });
    times.print("write_kv, 256 tokens of 1 layer", [&] { write(pool, 1); });
    times.print("write_kv, 256 tokens of 8 layers", [&] { write(pool, Pool::kLayers); });
    times.print("write_kv to fp8, 256 tokens of 8 layers", [&] { write(fp8, Pool::kLayers); });
    times.print("gather_kv, 256 tokens of 8 layers", [&] {
        pool.ops().gather(room, pool.slots(), kvpages::Dtype::bf16, std::nullopt, stream);
    });
    return true;
}

}  // namespace

bool print_host_times(const Options& options) {
    std::printf("| call | us | launches | verdict |\n|---|---|---|---|\n");
    // Work that waits on the stand-in takes no time of the call, as with a device.
    if (on_standin()) standin_set_deferred(true);
    const HostTimes times(options);
    const bool reached = print_operations(times);
    if (on_standin()) standin_set_deferred(false);
    return reached;
}
