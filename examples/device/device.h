// Where an example's cache and tables are: in host memory or on a CUDA device. On the host nothing
// of this copies anything, so an engine's code is the same for both.
//
// The examples compute on the host, also when their cache is on a device. What a kernel would read
// there is copied to the host and read through the same views; what it would write is copied back.
#pragma once

#include "cuda.h"

#include <kvpages/kvpages.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace device {

/// What the option --device says.
struct Place {
    std::optional<std::uint32_t> cuda;  ///< the number of a CUDA device; none: the host

    std::string name() const { return cuda ? "cuda:" + std::to_string(*cuda) : "host"; }
};

/// Throws std::invalid_argument that says what is allowed.
inline Place parse_place(const std::string& text) {
    const std::string cuda = "cuda:";
    if (text == "host") return {};
    const bool is_cuda = text.compare(0, cuda.size(), cuda) == 0;
    const std::string number = is_cuda ? text.substr(cuda.size()) : "";
    if (number.empty() || number.size() > 4 ||
        number.find_first_not_of("0123456789") != std::string::npos) {
        throw std::invalid_argument("is \"" + text + "\", not host or cuda:N, such as cuda:0");
    }
    return {static_cast<std::uint32_t>(std::stoul(number))};
}

/// The place, and on a device a stream that all of an example's work is on.
class Device {
public:
    /// Throws what kvpages says of a device that is not there.
    explicit Device(const Place& place = {}) : place_(place) {
        if (!place.cuda) return;
        static_cast<void>(kvpages::DeviceInfo::of(*place.cuda));
        cuda_ = std::make_unique<CudaStream>(*place.cuda);
    }

    /// NULL on the host.
    const CudaStream* cuda() const { return cuda_.get(); }
    /// What kvpages takes as a stream: a CUstream, or NULL on the host.
    void* stream() const { return cuda_ ? cuda_->get() : nullptr; }
    void wait() const {
        if (cuda_) cuda_->wait();
    }

    /// Where a cache is to be.
    kvpages::Memory memory() const {
        return cuda_ ? kvpages::Memory::cuda(cuda_memory()) : kvpages::Memory::host();
    }
    /// Host memory that copies from and to the device's are fast with, and do not block.
    kvpages::Memory host_memory() const {
        return cuda_ ? kvpages::Memory::pinned(cuda_memory()) : kvpages::Memory::host();
    }

private:
    kvpages::CudaMemory cuda_memory() const {
        kvpages::CudaMemory config;
        config.ordinal = *place_.cuda;
        return config;
    }

    Place place_;
    std::unique_ptr<CudaStream> cuda_;
};

/// Device memory, or pinned memory of the host, that grows.
class Room {
public:
    enum Side { on_device, on_host };

    Room(const CudaStream* cuda, Side side) : cuda_(cuda), side_(side) {}
    ~Room() { release(); }
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;

    /// At least so many bytes. What was there is gone when they are more than there ever were.
    void* of(std::size_t bytes) {
        if (bytes > bytes_) {
            release();
            data_ = side_ == on_device ? cuda_->allocate(bytes) : cuda_->allocate_pinned(bytes);
            bytes_ = bytes;
        }
        return data_;
    }

private:
    void release() {
        if (data_ == nullptr) return;
        if (side_ == on_device) cuda_->free(data_);
        else cuda_->free_pinned(data_);
        data_ = nullptr;
        bytes_ = 0;
    }

    const CudaStream* cuda_;
    Side side_;
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

/// Numbers of the host's for work on the device to read.
template <typename T>
class Upload {
public:
    explicit Upload(const Device& device)
        : cuda_(device.cuda()), there_(cuda_, Room::on_device), staged_(cuda_, Room::on_host) {}

    /// Where the work finds them. On a device the caller's are not needed any more.
    kvpages::Span<const T> operator()(kvpages::Span<const T> numbers) {
        if (cuda_ == nullptr) return numbers;
        if (numbers.empty()) return {};
        cuda_->wait();  // for work that may still read the last ones
        const std::size_t bytes = numbers.size() * sizeof(T);
        void* there = there_.of(bytes);
        void* staged = staged_.of(bytes);
        std::memcpy(staged, numbers.data(), bytes);
        cuda_->copy_to_device(there, staged, bytes);
        return {static_cast<const T*>(there), numbers.size()};
    }

private:
    const CudaStream* cuda_;
    Room there_, staged_;
};

/// Numbers that work on the device has written, for the host to read.
template <typename T>
class Download {
public:
    explicit Download(const Device& device)
        : cuda_(device.cuda()), here_(cuda_, Room::on_host) {}

    /// Waits for the work. On a device they are copied, and stay until the next call.
    kvpages::Span<const T> operator()(kvpages::Span<const T> numbers) {
        if (cuda_ == nullptr || numbers.empty()) return numbers;
        const std::size_t bytes = numbers.size() * sizeof(T);
        void* here = here_.of(bytes);
        cuda_->copy_to_host(here, numbers.data(), bytes);
        cuda_->wait();
        return {static_cast<const T*>(here), numbers.size()};
    }

private:
    const CudaStream* cuda_;
    Room here_;
};

/// A block table for the host to read.
inline kvpages::Tensor download_table(Download<std::int32_t>& download, kvpages::Tensor table) {
    const kvpages::Span<const std::int32_t> entries(
        static_cast<const std::int32_t*>(table.data),
        static_cast<std::size_t>(table.shape[0] * table.strides[0]));
    table.data = const_cast<std::int32_t*>(download(entries).data());
    return table;
}

/// Where work on the device puts its results.
template <typename T>
class Results {
public:
    explicit Results(const Device& device)
        : cuda_(device.cuda()), there_(cuda_, Room::on_device), download_(device) {}

    T* room(std::size_t count) {
        count_ = count;
        if (cuda_ != nullptr) return static_cast<T*>(there_.of(count * sizeof(T)));
        here_.resize(count);
        return here_.data();
    }

    /// What the work put into the room.
    kvpages::Span<const T> read() {
        if (cuda_ == nullptr) return here_;
        return download_({room(count_), count_});
    }

private:
    const CudaStream* cuda_;
    std::size_t count_ = 0;
    std::vector<T> here_;
    Room there_;
    Download<T> download_;
};

/// A cache's pages, for the host to read and write. On a device they are a copy: a second cache of
/// the same plan, in host memory, whose views therefore have the same shapes, strides and offsets.
/// A kernel needs none of this: it is given the views of the cache.
class HostPages {
public:
    HostPages(const Device& device, const kvpages::Plan& plan, const kvpages::Cache& cache)
        : cuda_(device.cuda()), cache_(cache) {
        if (cuda_ == nullptr) return;
        copy_ = kvpages::Cache::allocate(plan, device.host_memory());
        here_ = copy_->regions();
        there_ = cache.regions();
    }

    /// The cache whose views the host may follow.
    const kvpages::Cache& cache() const { return copy_ ? *copy_ : cache_; }

    /// Makes blocks of a layer what they are on the device.
    void fetch(std::size_t layer, kvpages::Span<const std::int32_t> blocks) {
        if (cuda_ != nullptr) fetch_from(cache_.layer(layer).allocation, blocks);
    }

    /// The same of all blocks that a step's requests have, by its block table, which is the host's.
    void fetch(std::size_t layer, const kvpages::Tensor& block_table,
               kvpages::Span<const std::int32_t> seq_lens) {
        if (cuda_ == nullptr) return;
        const kvpages_layer_info info = cache_.layer(layer);
        list_blocks(info, block_table, seq_lens);
        fetch_from(info.allocation, blocks_);
    }

    /// Makes blocks of all layers what they are on the device.
    void fetch_all(kvpages::Span<const std::int32_t> blocks) {
        if (cuda_ == nullptr) return;
        for (std::size_t i = 0; i < cache_.num_allocations(); ++i) fetch_from(i, blocks);
    }

    /// Makes blocks of a layer on the device what they are here.
    void put(std::size_t layer, kvpages::Span<const std::int32_t> blocks) {
        if (cuda_ == nullptr) return;
        for_each_piece(cache_.layer(layer).allocation, blocks,
                       [&](void* here, void* there, std::size_t bytes) {
                           cuda_->copy_to_device(there, here, bytes);
                       });
        cuda_->wait();  // until then the host may not change them
    }

private:
    void list_blocks(const kvpages_layer_info& info, const kvpages::Tensor& block_table,
                     kvpages::Span<const std::int32_t> seq_lens) {
        const auto of_kernel = static_cast<std::int32_t>(info.block_size / info.kernel_block_size);
        blocks_.clear();
        for (std::size_t request = 0; request < seq_lens.size(); ++request) {
            const auto seq_len = static_cast<std::uint64_t>(seq_lens[request]);
            for (std::uint64_t token = 0; token < seq_len; token += info.block_size) {
                const auto entry = token / info.kernel_block_size;
                blocks_.push_back(block_table.at<std::int32_t>(request, entry) / of_kernel);
            }
        }
    }

    void fetch_from(std::uint64_t allocation, kvpages::Span<const std::int32_t> blocks) {
        for_each_piece(allocation, blocks, [&](void* here, void* there, std::size_t bytes) {
            cuda_->copy_to_host(here, there, bytes);
        });
        cuda_->wait();
    }

    /// Calls `body` with each piece of memory of the blocks. Blocks that follow each other are one.
    template <typename Body>
    void for_each_piece(std::uint64_t allocation, kvpages::Span<const std::int32_t> blocks,
                        const Body& body) const {
        for (std::size_t region = 0; region < there_.size(); ++region) {
            if (there_[region].allocation != allocation) continue;
            for (std::size_t i = 0, count = 1; i < blocks.size(); i += count, count = 1) {
                const auto follows = [&] { return blocks[i + count] == blocks[i + count - 1] + 1; };
                while (i + count < blocks.size() && follows()) ++count;
                const std::uint64_t step = there_[region].block_step_bytes;
                const std::uint64_t offset = static_cast<std::uint64_t>(blocks[i]) * step;
                body(static_cast<char*>(here_[region].data) + offset,
                     static_cast<char*>(there_[region].data) + offset, count * step);
            }
        }
    }

    const CudaStream* cuda_;
    const kvpages::Cache& cache_;
    std::optional<kvpages::Cache> copy_;
    std::vector<kvpages_region> here_, there_;
    std::vector<std::int32_t> blocks_;
};

}  // namespace device
