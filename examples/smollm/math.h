// The arithmetic of a transformer, in float32.
//
// What is computed for a token has the same bits whatever else is in its batch and however many
// threads there are: every sum has one order, which is a matter of its length only.
#pragma once

#include "gguf.h"
#include "threads.h"

#include <cstddef>
#include <cstdint>
#include <new>
#include <vector>

namespace smollm {

/// Allocates on cache lines: vector registers load about half as fast across two of them.
template <class T>
struct CacheLineAllocator {
    using value_type = T;
    static constexpr std::align_val_t kAlignment{64};

    CacheLineAllocator() = default;
    template <class U>
    CacheLineAllocator(const CacheLineAllocator<U>&) {}

    T* allocate(std::size_t count) {
        return static_cast<T*>(::operator new(count * sizeof(T), kAlignment));
    }
    void deallocate(T* memory, std::size_t) { ::operator delete(memory, kAlignment); }

    bool operator==(const CacheLineAllocator&) const { return true; }
    bool operator!=(const CacheLineAllocator&) const { return false; }
};

/// What is multiplied may lie anywhere, but is best kept in this.
using AlignedFloats = std::vector<float, CacheLineAllocator<float>>;

/// Sums have as many parts that do not wait for each other; sizes must be multiples of it.
constexpr std::size_t kNumLanes = 16;

/// Element i is added to lane i % kNumLanes, and in the end halves of the lanes to each other.
float dot(const float* a, const float* b, std::size_t size);

/// `output[token][row] = dot(weights[row], input[token])`. `input` has `num_columns()` numbers for
/// each token, `output` gets `num_rows()`. Weights stay quantised but for a few rows at a time.
void matmul(const GgufTensor& weights, const float* input, std::size_t num_tokens, float* output,
            ThreadPool& threads);

/// Scales `input` to a mean square of 1, then by `weights`.
void rms_norm(const float* input, const std::vector<float>& weights, float eps, float* output);

/// `gate = silu(gate) * up`
void swiglu(float* gate, const float* up, std::size_t size);

/// `output += input`
void add(float* output, const float* input, std::size_t size);

/// Rotary position embedding of the pairs (0, 1), (2, 3) ... of a head: the order of elements that
/// GGUF files of the llama architecture have.
class Rope {
public:
    Rope(std::size_t head_size, float base);

    /// Has the cosine and the sine of each pair follow each other in `rotation[head_size]`.
    void make_rotation(std::int64_t position, float* rotation) const;

    /// Rotates heads that follow each other.
    void rotate(const float* rotation, std::size_t num_heads, float* heads) const;

private:
    std::vector<float> frequencies_;  ///< radians from one position to the next
};

}  // namespace smollm
