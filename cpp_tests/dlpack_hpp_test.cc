// Tensors of DLPack in the C++ interface.
#include "support/dlpack.h"

#include <kvpages/kvpages.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <type_traits>
#include <utility>

namespace {

static_assert(std::is_nothrow_move_constructible_v<kvpages::DlpackTensor>);
static_assert(!std::is_copy_constructible_v<kvpages::DlpackTensor>);
static_assert(sizeof(kvpages::DlpackTensor) == sizeof(void*));

kvpages::Cache two_layers() {
    kvpages::AttentionSpec spec;
    spec.block_size = 16;
    spec.num_kv_heads = 2;
    spec.head_size = 8;
    const auto backend = kvpages::Backend::preset(kvpages::Preset::flash_attention_nhd);
    kvpages::Model model;
    model.add("layers.0.attn", spec, backend);
    model.add("layers.1.attn", spec, backend);
    kvpages::PlanConfig config;
    config.memory_bytes = 100000;
    config.max_model_len = 64;
    return kvpages::Cache::allocate(kvpages::Plan::make(model, config), kvpages::Memory::host());
}

}  // namespace

TEST(DlpackHpp, ATensorIsTheViewAndOutlivesTheCache) {
    kvpages::DlpackTensor tensor;
    EXPECT_FALSE(tensor);
    kvpages::DlpackTensor read_only;
    kvpages::UnversionedDlpackTensor unversioned;
    {
        const kvpages::Cache cache = two_layers();
        const kvpages::Tensor view = cache.view("layers.1.attn");
        tensor = cache.to_dlpack("layers.1.attn");
        read_only = cache.to_dlpack(cache.find("layers.1.attn"), 0, kvpages::Access::read_only);
        unversioned = cache.to_unversioned_dlpack("layers.1.attn");
        EXPECT_EQ(tensor->dl_tensor.data, view.data);
        EXPECT_EQ(static_cast<std::size_t>(tensor->dl_tensor.ndim), view.shape.size());
        for (std::size_t dim = 0; dim < view.shape.size(); ++dim) {
            EXPECT_EQ(tensor->dl_tensor.shape[dim], view.shape[dim]);
            EXPECT_EQ(tensor->dl_tensor.strides[dim], view.strides[dim]);
        }
    }
    EXPECT_EQ(tensor->flags, 0u);
    EXPECT_EQ(read_only->flags, DLPACK_FLAG_BITMASK_READ_ONLY);
    *support::element(tensor->dl_tensor, {0, 1, 15, 15}) = 3;
    EXPECT_EQ(*support::element(read_only->dl_tensor, {0, 1, 15, 15}), 3);
    EXPECT_EQ(*support::element(unversioned->dl_tensor, {0, 1, 15, 15}), 3);
    DLManagedTensorVersioned* const given_away = std::move(tensor).release();
    given_away->deleter(given_away);
}

TEST(DlpackHpp, WhatIsNotThereThrows) {
    const kvpages::Cache cache = two_layers();
    EXPECT_THROW(static_cast<void>(cache.to_dlpack("layers.2.attn")), kvpages::Error);
    EXPECT_THROW(static_cast<void>(cache.to_dlpack(0, 1)), kvpages::Error);
    EXPECT_THROW(static_cast<void>(cache.to_unversioned_dlpack(2)), kvpages::Error);
}
