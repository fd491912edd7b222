// How much of the memory's speed operations reach, beside what the driver's own copy and memset
// reach with the same bytes in the same run.
#include "bench.h"
#include "pool.h"
#include "timing.h"

#include <cstdio>
#include <cstring>

namespace {

using support::Bytes;
using support::DeviceArray;
using support::Stream;

constexpr std::uint64_t kMib = std::uint64_t{1} << 20;
constexpr std::uint64_t kJudgedFrom = 256 * kMib;  // below, launches and caches count for more
constexpr double kPlainTarget = 0.9;
constexpr double kConvertingTarget = 0.8;

/// A line of the table.
struct Measured {
    std::string operation;
    std::uint64_t moved_bytes;  // read and written
    std::uint64_t drivers_moved_bytes;
    Pair time;
    double target;  // 0: none

    double gb_per_s() const { return static_cast<double>(moved_bytes) / time.ours_s / 1e9; }
    double drivers_gb_per_s() const {
        return static_cast<double>(drivers_moved_bytes) / time.drivers_s / 1e9;
    }
    double ratio() const { return gb_per_s() / drivers_gb_per_s(); }
};

std::string size_name(std::uint64_t bytes) {
    return bytes >= 1024 * kMib ? std::to_string(bytes / kMib / 1024) + " GiB"
                                : std::to_string(bytes / kMib) + " MiB";
}

/// Two buffers of the size, the pool in turn, and what is measured with them.
class Size {
public:
    Size(std::uint64_t bytes, const Options& options)
        : bytes_(bytes), options_(options), first_(bytes), second_(bytes) {
        fill_first();
    }

    /// Device memory that all of it takes at most.
    static std::uint64_t needed_bytes(std::uint64_t bytes) { return 4 * bytes + 64 * kMib; }

    bool print() {
        bool reached = true;
        with_plain_rows(reached);
        with_fp8(reached);
        with_latents(reached);
        return reached;
    }

private:
    void with_plain_rows(bool& reached) {
        Pool pool(kBf16, Pool::blocks_of(kBf16, bytes_));
        const std::uint64_t rows = pool.row_bytes();
        print(reached,
              {"zero", rows, rows, beside_memset(rows, [&] { zero(pool); }), kPlainTarget});
        expect_zero(pool);
        print(reached, write_of(pool, "write bf16 to bf16", kPlainTarget));
        print(reached, gather_of(pool, "gather bf16", kPlainTarget));
        expect_same_rows(pool);
        print(reached,
              {"copy", 2 * rows, 2 * rows, beside_copy(rows, [&] { copy(pool); }), kPlainTarget});
        expect_copied(pool);
    }

    void with_fp8(bool& reached) {
        Pool pool(kFp8, Pool::blocks_of(kFp8, bytes_));
        print(reached, write_of(pool, "write bf16 to fp8 e4m3", kConvertingTarget));
        print(reached, gather_of(pool, "gather fp8 e4m3 to bf16", kConvertingTarget));
    }

    void with_latents(bool& reached) {
        Pool pool(kMla, Pool::blocks_of(kMla, bytes_));
        print(reached, write_of(pool, "write MLA latents, bf16", kPlainTarget));
        print(reached, gather_of(pool, "gather MLA latents, bf16", kPlainTarget));
        expect_same_rows(pool);
    }

    // --- operations ------------------------------------------------------------

    void zero(Pool& pool) { pool.ops().zero_blocks(pool.ids(), stream_.get()); }
    void copy(Pool& pool) { pool.ops().copy_blocks(pool.copies(), stream_.get()); }
    void write(Pool& pool) {
        pool.ops().write(pool.rows(first_.get()), pool.slots(), kvpages::Dtype::bf16, std::nullopt,
                         stream_.get());
    }
    void gather(Pool& pool) {
        pool.ops().gather(pool.room(second_.get()), pool.slots(), kvpages::Dtype::bf16,
                          std::nullopt, stream_.get());
    }

    Measured write_of(Pool& pool, const char* name, double target) {
        const std::uint64_t rows = pool.row_bytes();
        return {name, rows + pool.stored_bytes(), 2 * rows, beside_copy(rows, [&] { write(pool); }),
                target};
    }
    Measured gather_of(Pool& pool, const char* name, double target) {
        const std::uint64_t rows = pool.row_bytes();
        return {name, rows + pool.stored_bytes(), 2 * rows,
                beside_copy(rows, [&] { gather(pool); }), target};
    }

    // --- times -----------------------------------------------------------------

    Effort effort(std::uint64_t bytes) const {
        if (options_.quick) return {3, 2};
        const std::uint64_t repeats = 512 * kMib / bytes;
        return {9, std::min<std::size_t>(std::max<std::size_t>(repeats, 1), 50)};
    }

    template <typename Call>
    Pair beside_memset(std::uint64_t bytes, const Call& call) {
        return time_in_turns(stream_.get(), effort(bytes), call, [&] {
            DRIVER(cuMemsetD8Async(second_.get(), 0, bytes, stream_.get()));
        });
    }
    template <typename Call>
    Pair beside_copy(std::uint64_t bytes, const Call& call) {
        return time_in_turns(stream_.get(), effort(bytes), call, [&] {
            DRIVER(cuMemcpyDtoDAsync_v2(second_.get(), first_.get(), bytes, stream_.get()));
        });
    }

    // --- whether it was right, of some places -------------------------------------
    // Tests compare all bytes of small caches; these see addresses beyond 4 GiB too.

    static constexpr std::uint64_t kSample = 4096;
    static constexpr std::uint64_t kSamples = 64;

    void expect_zero(Pool& pool) {
        zero(pool);
        const Bytes zeroes(kSample);
        for_some_places(pool, [&](std::uint64_t layer, std::uint64_t listed, std::uint64_t at) {
            expect("zero_blocks", bytes_at(place(pool, layer, pool.ids()[listed]) + at) == zeroes);
        });
    }

    void expect_copied(Pool& pool) {
        write(pool);
        copy(pool);
        for_some_places(pool, [&](std::uint64_t layer, std::uint64_t listed, std::uint64_t at) {
            const kvpages_block_copy copied = pool.copies()[listed];
            expect("copy_blocks", bytes_at(place(pool, layer, copied.source) + at) ==
                                      bytes_at(place(pool, layer, copied.target) + at));
        });
    }

    void expect_same_rows(Pool& pool) {
        DRIVER(cuMemsetD8Async(second_.get(), 0xEE, second_.size(), stream_.get()));
        write(pool);
        gather(pool);
        const std::uint64_t last = pool.row_bytes() - kSample;
        for (std::uint64_t i = 0; i < kSamples; ++i) {
            const std::uint64_t at = i + 1 == kSamples ? last : random_() % last;
            expect("write and gather", bytes_at(first_.get() + at) == bytes_at(second_.get() + at));
        }
    }

    template <typename Check>
    void for_some_places(const Pool& pool, const Check& check) {
        const std::uint64_t page = page_bytes(pool);
        for (std::uint64_t i = 0; i < kSamples; ++i) {
            check(random_() % Pool::kLayers, random_() % pool.ids().size(),
                  random_() % (page / kSample) * kSample);
        }
    }

    static std::uint64_t page_bytes(const Pool& pool) {
        return Pool::kBlockSize * pool.format().stored_bytes();
    }

    /// Each layer has an allocation of its own.
    static CUdeviceptr place(const Pool& pool, std::uint64_t layer, std::int32_t block) {
        return support::address(pool.cache().allocation(layer).data) +
               static_cast<std::uint64_t>(block) * page_bytes(pool);
    }

    Bytes bytes_at(CUdeviceptr from) const {
        Bytes bytes(kSample);
        DRIVER(cuStreamSynchronize(stream_.get()));
        DRIVER(cuMemcpyDtoH_v2(bytes.data(), from, kSample));
        return bytes;
    }

    void expect(const char* what, bool right) const {
        if (!right) {
            fail(std::string(what) + " of " + size_name(bytes_) + " gave wrong bytes");
        }
    }

    /// No two places of it are alike within a megabyte, nor at a distance of a power of two.
    void fill_first() {
        Bytes pattern(std::min<std::uint64_t>(kMib - 4080, bytes_));
        std::generate(pattern.begin(), pattern.end(),
                      [this] { return static_cast<unsigned char>(random_()); });
        support::upload(first_.get(), pattern.data(), pattern.size());
        for (std::uint64_t done = pattern.size(); done < bytes_;) {
            const std::uint64_t more = std::min(done, bytes_ - done);
            DRIVER(cuMemcpyDtoDAsync_v2(first_.get() + done, first_.get(), more, stream_.get()));
            done += more;
        }
        DRIVER(cuStreamSynchronize(stream_.get()));
    }

    void print(bool& reached, const Measured& line) const {
        const bool judged = options_.judges && line.target > 0 && bytes_ >= kJudgedFrom;
        const bool is_good = line.ratio() >= line.target;
        reached = reached && (is_good || !judged);
        std::printf("| %s | %s | %.1f | %.1f | %.3f | %s | %s |\n", line.operation.c_str(),
                    size_name(bytes_).c_str(), line.gb_per_s(), line.drivers_gb_per_s(),
                    line.ratio(), judged ? number(line.target).c_str() : "",
                    !judged   ? ""
                    : is_good ? "reached"
                              : "**misses**");
        std::fflush(stdout);
    }

    static std::string number(double value) {
        char text[32];
        std::snprintf(text, sizeof(text), "%.1f", value);
        return text;
    }

    std::uint64_t bytes_;
    Options options_;
    std::mt19937_64 random_{1};
    Stream stream_;
    DeviceArray first_;   // rows, and what the driver copies
    DeviceArray second_;  // room for rows, and where the driver copies and clears
};

std::uint64_t free_bytes() {
    std::size_t free = 0, total = 0;
    DRIVER(cuMemGetInfo_v2(&free, &total));
    return free;
}

std::vector<std::uint64_t> sizes(std::uint64_t most) {
    std::vector<std::uint64_t> all;
    for (const std::uint64_t mib : {1u, 4u, 16u, 64u, 256u, 1024u, 4096u, 8192u}) {
        if (mib * kMib <= most) all.push_back(mib * kMib);
    }
    return all;
}

}  // namespace

bool print_bandwidth(const Options& options) {
    std::printf(
        "| operation | size | GB/s | driver's GB/s | ratio | target | verdict |\n"
        "|---|---|---|---|---|---|---|\n");
    bool reached = true;
    for (const std::uint64_t bytes : sizes(options.max_bytes)) {
        const std::uint64_t free = free_bytes(), needed = Size::needed_bytes(bytes);
        if (needed > free) {
            std::printf("| all | %s | skipped: %s needed, %s free | | | | |\n",
                        size_name(bytes).c_str(), size_name(needed).c_str(),
                        size_name(free).c_str());
            continue;
        }
        reached = Size(bytes, options).print() && reached;
    }
    std::printf(
        "\nSize is that of the rows, or of the blocks in all %d layers. Bytes count as read and as "
        "written: zero writes the size, copy reads and writes it, write and gather move the size "
        "once as rows and once as the cache stores it, which for fp8 is half. Slots and ids are "
        "not "
        "counted. The driver's is `cuMemsetD8Async` for zero, else `cuMemcpyDtoDAsync`, of the "
        "size "
        "in one piece, timed in turns with ours by events; medians. Blocks lie in no order. From "
        "%s on results are judged; smaller ones fit caches or are over before a launch is. After "
        "each of them %d places were compared, but for fp8.\n",
        static_cast<int>(Pool::kLayers), size_name(kJudgedFrom).c_str(), 64);
    return reached;
}
