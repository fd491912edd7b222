// The KV cache of the engine: all that it does with kvpages is here and in attention.cc.
#pragma once

#include "../device/device.h"
#include "attention.h"
#include "model.h"
#include "threads.h"

#include <kvpages/kvpages.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace smollm {

/// How keys and values are stored.
struct CacheType {
    const char* name;
    kvpages::Dtype dtype;
    kvpages::QuantMode quant_mode;
};

/// How the pages lie in memory.
struct CacheLayout {
    const char* name;
    const char* dimensions;  ///< as kvpages names them
};

const std::vector<CacheType>& cache_types();      ///< the first is the default
const std::vector<CacheLayout>& cache_layouts();  ///< the first is the default

/// What a cache is made for.
struct CacheOptions {
    device::Place place;
    CacheType type = cache_types().front();
    CacheLayout layout = cache_layouts().front();
    std::uint64_t block_size = 16;        ///< tokens
    std::uint64_t kernel_block_size = 0;  ///< tokens; 0: those of a block
    std::uint64_t num_blocks = 256;       ///< that requests can have
    std::uint64_t max_requests = 16;      ///< of a step
    std::uint64_t max_tokens = 256;       ///< of a step
};

/// Memory for the keys and values of all layers, and the attention that reads them.
///
/// On a device are the cache, the block tables and the slots, and the operations work there, on a
/// stream. Attention stays the host's: it is given the pages that a kernel would read.
class KvCache : public AttentionLayers {
public:
    KvCache(const ModelConfig& model, const CacheOptions& options, ThreadPool& threads);

    /// Why the memory is shared out as it is.
    std::string explain() const { return plan_.explain(); }
    /// The null block, which no request gets, included.
    std::uint64_t num_blocks() const { return cache_.num_blocks(); }
    std::uint64_t num_usable_blocks() const { return num_blocks() - 1; }
    std::uint64_t block_size() const { return options_.block_size; }
    /// Bytes of the blocks, in all layers.
    std::uint64_t size_bytes() const { return cache_.size_bytes(); }
    /// Time spent in calls to kvpages so far, in seconds.
    double seconds_in_kvpages() const { return in_kvpages_.count(); }

    // --- what the scheduler decides ---

    /// A request's row gets blocks behind those it has.
    void append_blocks(std::size_t row, kvpages::Span<const std::int32_t> ids);
    /// A request's row is somebody else's from now on.
    void clear_row(std::size_t row);
    void copy_blocks(kvpages::Span<const kvpages_block_copy> copies);
    /// What run() works on until the next call. The batch's arrays must stay.
    void begin_step(kvpages::Batch batch);

    // --- what the model asks for ---

    void run(std::size_t layer, const float* queries, const float* keys, const float* values,
             float* out) override;

private:
    /// Makes the one builder that there is: all layers are alike.
    class Builders : public kvpages::BuilderFactory {
    public:
        explicit Builders(const device::Device& device) : device_(device) {}
        std::unique_ptr<kvpages::Builder> create(const kvpages_builder_info& info) override;

    private:
        const device::Device& device_;
    };

    void touch_all_blocks();

    template <typename Call>
    void timed(Call call);

    CacheOptions options_;
    AttentionShape shape_;
    ThreadPool& threads_;
    device::Device device_;
    kvpages::Plan plan_;
    kvpages::Cache cache_;
    device::HostPages pages_;
    device::Upload<float> keys_, values_;
    kvpages::Tables tables_;
    kvpages::Ops ops_;
    Builders builders_;
    kvpages::Attention attention_;
    std::vector<KvView> views_;  ///< by layer, of pages_
    std::chrono::duration<double> in_kvpages_{0};
};

}  // namespace smollm
