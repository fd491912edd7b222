// How long calls keep the host, and how many launches they make.
#include "bench.h"
#include "bench/tables.h"
#include "pool.h"
#include "standin.h"
#include "timing.h"

#include <cstdio>

namespace {

using support::DeviceArray;
using support::Stream;

/// What a call may take at most; 0: anything.
struct Limits {
    double us = 0;
    std::uint64_t launches = 0;
};

class HostTimes {
public:
    explicit HostTimes(const Options& options) : options_(options) {}

    /// Returns whether the call keeps the limits. A real driver does not count launches, and the
    /// stand-in's times are no driver's.
    template <typename Prepare, typename Call>
    bool print(const char* name, const Limits& limits, const Prepare& prepare,
               const Call& call) const {
        const double us = host_ns(stream_.get(), options_.quick ? 5 : 400, prepare, call) / 1e3;
        const bool judges_us = options_.judges && limits.us > 0;
        const bool judges_launches = on_standin() && limits.launches > 0;
        const std::uint64_t launches = on_standin() ? launches_of(prepare, call) : 0;
        const bool is_good =
            (!judges_us || us <= limits.us) && (!judges_launches || launches <= limits.launches);
        const std::string counted = on_standin() ? std::to_string(launches) : "";
        const std::string us_limit =
            limits.us > 0 ? at_most(std::to_string(static_cast<int>(limits.us))) : "";
        const std::string launches_limit =
            judges_launches ? at_most(std::to_string(limits.launches)) : "";
        std::printf("| %s | %.2f%s | %s%s | %s |\n", name, us, us_limit.c_str(), counted.c_str(),
                    launches_limit.c_str(),
                    !(judges_us || judges_launches) ? ""
                    : is_good                       ? "reached"
                                                    : "**misses**");
        return is_good;
    }
    template <typename Call>
    void print(const char* name, const Call& call) const {
        print(
            name, Limits{}, [] {}, call);
    }

    CUstream stream() const { return stream_.get(); }

private:
    static std::string at_most(const std::string& limit) { return " (at most " + limit + ")"; }

    template <typename Prepare, typename Call>
    std::uint64_t launches_of(const Prepare& prepare, const Call& call) const {
        prepare();
        const std::uint64_t before = standin_num_calls("cuLaunchKernel");
        call();
        const std::uint64_t launches = standin_num_calls("cuLaunchKernel") - before;
        DRIVER(cuStreamSynchronize(stream_.get()));
        return launches;
    }

    Options options_;
    Stream stream_;
};

/// 16 blocks, and 256 tokens of them.
void print_operations(const HostTimes& times) {
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
}

/// A decode step of 256 requests of 1,024 tokens in three groups. Of 256 requests with blocks of 16
/// tokens, 16 fill their last block in a step.
bool print_tables(const HostTimes& times) {
    kvpages::Tables of_requests =
        tables(16, 16, kvpages_device{KVPAGES_DEVICE_KIND_CUDA, 0, nullptr});
    of_requests.write(Writes(64).get());
    of_requests.apply(times.stream());
    const Decode decode;
    kvpages::Batch batch = decode.batch();
    batch.stream = times.stream();
    const Writes some(1, 16), all(1);
    const Limits step{10, 3};
    const auto prepare = [&] { of_requests.prepare(batch); };
    const auto write_and_prepare = [&](const Writes& writes) {
        of_requests.write(writes.get());
        of_requests.prepare(batch);
    };
    const bool same = times.print(
        "tables of a decode step, 256 requests in 3 groups: no row changes", step, [] {}, prepare);
    const bool usual = times.print(
        "the same, 16 requests get a block in each group", step, [] {},
        [&] { write_and_prepare(some); });
    const bool most = times.print(
        "the same, all 256 get a block in each group", Limits{0, step.launches}, [] {},
        [&] { write_and_prepare(all); });
    return same && usual && most;
}

}  // namespace

bool print_host_times(const Options& options) {
    std::printf("| call | us | launches | verdict |\n|---|---|---|---|\n");
    // Work that waits on the stand-in takes no time of the call, as with a device.
    if (on_standin()) standin_set_deferred(true);
    const HostTimes times(options);
    print_operations(times);
    const bool reached = print_tables(times);
    if (on_standin()) standin_set_deferred(false);
    return reached;
}
