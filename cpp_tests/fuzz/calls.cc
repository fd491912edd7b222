// Random sequences of calls of the C interface. Handles live as long as the bytes say and die in any
// order; arguments are mostly right. Whatever is asked, a call does it or says why not, and memory that
// is nobody's is not touched, which the sanitizer watches.
#include <cstring>

#include "support/dlpack_structs.h"
#include "world.h"

namespace {

using fuzz::Bytes;
using fuzz::number;
using fuzz::ok;

template <typename Handle, void (*destroy)(Handle*)>
using Owned = std::unique_ptr<Handle, support::Destroy<Handle, destroy>>;
using Tables = Owned<kvpages_tables, kvpages_tables_destroy>;
using Attention = Owned<kvpages_attention, kvpages_attention_destroy>;
using Descriptor = Owned<kvpages_descriptor, kvpages_descriptor_destroy>;
using Reshard = Owned<kvpages_reshard, kvpages_reshard_destroy>;

void call_deleter(DLManagedTensorVersioned* tensor) { tensor->deleter(tensor); }

// A cache and the buffer that it may lie in, which must outlive it.
struct Cache {
    std::shared_ptr<std::vector<unsigned char>> buffer;
    support::Cache handle;
    bool can_grow = false;
};
struct Ops {
    std::shared_ptr<Cache> cache;
    support::Ops handle;
};

// A view that is handed out, in either form. It keeps the cache's memory, and not the cache.
struct Exported {
    std::shared_ptr<std::vector<unsigned char>> buffer;
    bool can_grow = false;
    Owned<DLManagedTensorVersioned, call_deleter> versioned;
    Owned<DLManagedTensor, kvpages_dlpack_destroy_unversioned> unversioned;

    const DLTensor& tensor() const {
        return versioned != nullptr ? versioned->dl_tensor : unversioned->dl_tensor;
    }
};

struct World {
    std::vector<support::Backend> backends;
    std::vector<support::Model> models;
    std::vector<support::Plan> plans;
    std::vector<std::shared_ptr<Cache>> caches;
    std::vector<Ops> ops;
    std::vector<Tables> tables;
    std::vector<Attention> attentions;
    std::vector<Descriptor> descriptors;
    std::vector<Reshard> reshards;
    std::vector<Exported> exports;
    // What the log callback that is set counts into.
    std::unique_ptr<std::uint64_t> messages;
    int live_callbacks = 0;
};

constexpr std::size_t kMostHandles = 6;

// One of the handles there are, or nothing.
template <typename T>
T* pick(Bytes& bytes, std::vector<T>& from) {
    if (from.empty()) {
        return nullptr;
    }
    return &from[bytes.ConsumeIntegralInRange<std::size_t>(0, from.size() - 1)];
}

// Keeps a new handle, in the place of another one where there are many.
template <typename T>
void keep(Bytes& bytes, std::vector<T>& in, T made) {
    if (in.size() >= kMostHandles) {
        in.erase(in.begin() +
                 static_cast<std::ptrdiff_t>(bytes.ConsumeIntegralInRange<std::size_t>(0, in.size() - 1)));
    }
    in.push_back(std::move(made));
}

template <typename T>
void drop(Bytes& bytes, std::vector<T>& from) {
    if (!from.empty()) {
        from.erase(from.begin() + static_cast<std::ptrdiff_t>(
                                      bytes.ConsumeIntegralInRange<std::size_t>(0, from.size() - 1)));
    }
}

std::int32_t id(Bytes& bytes) { return static_cast<std::int32_t>(number(bytes, 6)); }

std::vector<std::int32_t> ids(Bytes& bytes, std::size_t most) {
    std::vector<std::int32_t> list(bytes.ConsumeIntegralInRange<std::size_t>(0, most));
    for (std::int32_t& each : list) {
        each = id(bytes);
    }
    return list;
}

// --- what is made ----------------------------------------------------------------------------------

void make_plan(Bytes& bytes, World& world) {
    const support::Model* const model = pick(bytes, world.models);
    if (model == nullptr) {
        return;
    }
    const kvpages_plan_config config = fuzz::make_config(bytes);
    const kvpages_worker worker{model->get(), fuzz::make_memory(bytes)};
    kvpages_plan* raw = nullptr;
    const std::size_t workers = bytes.ConsumeIntegral<std::uint8_t>() < 8 ? 0 : 1;
    FUZZ_CHECK(ok(kvpages_plan_create(&config, &worker, workers, &raw, nullptr)) == (raw != nullptr));
    if (raw != nullptr) {
        keep(bytes, world.plans, support::Plan(raw));
    }
}

// A plan of layers that fit each other, so that what is made of it is there to be mistreated.
void make_sound_plan(Bytes& bytes, World& world) {
    const support::Model layers = support::model();
    const support::Backend kernels = support::backend(bytes.ConsumeBool() ? support::kv_first
                                                                          : support::packed_nhd);
    support::add(layers, "layers.0", support::full(16, 2, 8), kernels);
    support::State state;
    state.add(KVPAGES_DTYPE_F32, {5, 3}).add(KVPAGES_DTYPE_BF16, {7}).padded(1024);
    switch (bytes.ConsumeIntegralInRange<int>(0, 3)) {
        case 0: support::add(layers, "layers.1", support::sliding(32, 16, 2, 8), kernels); break;
        case 1: support::add(layers, "layers.1", state.spec(), support::state_backend()); break;
        case 2: support::add(layers, "layers.1", support::full(16, 2, 8)); break;
        default: support::share(layers, "layers.1", "layers.0", kernels); break;
    }
    kvpages_plan_config config = KVPAGES_PLAN_CONFIG_INIT;
    config.policy = bytes.ConsumeBool() ? KVPAGES_POLICY_COMPACT : KVPAGES_POLICY_REFERENCE;
    config.max_model_len = 1;
    config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    config.flags |= bytes.ConsumeBool() ? KVPAGES_PLAN_CROSS_LAYER_BLOCKS + 0u : 0u;
    config.num_blocks_override = bytes.ConsumeIntegralInRange<std::uint64_t>(1, 6);
    const kvpages_worker worker{layers.get(), 0};
    kvpages_plan* raw = nullptr;
    FUZZ_CHECK(ok(kvpages_plan_create(&config, &worker, 1, &raw, nullptr)) == (raw != nullptr));
    if (raw != nullptr) {
        keep(bytes, world.plans, support::Plan(raw));
    }
}

void make_plan_from_parts(Bytes& bytes, World& world) {
    const support::Model* const model = pick(bytes, world.models);
    if (model == nullptr) {
        return;
    }
    const std::size_t layers = kvpages_model_num_layers(model->get());
    const auto names = [&] {
        std::vector<std::string> list(bytes.ConsumeIntegralInRange<std::size_t>(0, 3));
        for (std::string& name : list) {
            name = "layers." + std::to_string(bytes.ConsumeIntegralInRange<std::size_t>(0, layers));
        }
        return list;
    };
    support::Parts parts;
    parts.num_blocks = number(bytes, 4);
    parts.groups.resize(bytes.ConsumeIntegralInRange<std::size_t>(0, 3));
    for (support::Parts::Group& group : parts.groups) {
        group = {names(), bytes.ConsumeIntegralInRange<std::uint64_t>(0, 2)};
    }
    parts.tensors.resize(bytes.ConsumeIntegralInRange<std::size_t>(0, 3));
    for (support::Parts::Tensor& tensor : parts.tensors) {
        tensor = {number(bytes, 1 << 14), names(), bytes.ConsumeBool() ? 0 : number(bytes, 4096),
                  bytes.ConsumeBool() ? 0 : number(bytes, 4096)};
    }
    kvpages_plan* raw = nullptr;
    FUZZ_CHECK(ok(support::try_parts(*model, parts, &raw)) == (raw != nullptr));
    if (raw != nullptr) {
        keep(bytes, world.plans, support::Plan(raw));
    }
}

std::int32_t allocate(void* user, std::size_t bytes, std::size_t alignment, void** out) {
    auto* const live = static_cast<int*>(user);
    if (bytes > 1 << 20 || alignment > 4096) {
        return -7;
    }
    ++*live;
    const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    *out = std::aligned_alloc(alignment, rounded);
    std::memset(*out, 0x5a, bytes);
    return 0;
}

void release(void* user, void* data, std::size_t) {
    --*static_cast<int*>(user);
    std::free(data);
}

support::Memory make_memory(Bytes& bytes, World& world, Cache& cache) {
    kvpages_memory* raw = nullptr;
    switch (bytes.ConsumeIntegralInRange<int>(0, 2)) {
        case 0: ok(kvpages_memory_create_host(&raw)); break;
        case 1: {
            kvpages_memory_callbacks callbacks = KVPAGES_MEMORY_CALLBACKS_INIT;
            callbacks.user = &world.live_callbacks;
            callbacks.allocate = allocate;
            callbacks.release = release;
            callbacks.is_zeroed = 0;
            ok(kvpages_memory_create_external(&callbacks, &raw));
            break;
        }
        default: {
            cache.buffer = std::make_shared<std::vector<unsigned char>>(
                bytes.ConsumeIntegralInRange<std::size_t>(0, 1 << 16));
            ok(kvpages_memory_create_adopted(cache.buffer->data(), cache.buffer->size(), &raw));
            break;
        }
    }
    return support::Memory(raw);
}

void make_cache(Bytes& bytes, World& world) {
    const support::Plan* const plan = pick(bytes, world.plans);
    if (plan == nullptr || support::worker_info(*plan).total_bytes > 1 << 18) {
        return;
    }
    auto cache = std::make_shared<Cache>();
    const support::Memory memory = make_memory(bytes, world, *cache);
    kvpages_cache_config config = KVPAGES_CACHE_CONFIG_INIT;
    config.memory = memory.get();
    config.worker = bytes.ConsumeIntegral<std::uint8_t>() < 8 ? 1 : 0;
    config.num_blocks = bytes.ConsumeBool() ? 0 : number(bytes, 6);
    config.flags = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 2);
    kvpages_cache* raw = nullptr;
    std::uint64_t needed = 0;
    FUZZ_CHECK(ok(kvpages_cache_create(plan->get(), &config, &raw, &needed)) == (raw != nullptr));
    cache->handle.reset(raw);
    cache->can_grow = config.num_blocks != 0;
    if (raw != nullptr) {
        keep(bytes, world.caches, std::move(cache));
    }
}

void make_export(Bytes& bytes, World& world) {
    const std::shared_ptr<Cache>* const cache = pick(bytes, world.caches);
    if (cache == nullptr) {
        return;
    }
    const kvpages_cache* const handle = (*cache)->handle.get();
    const std::size_t layer = number(bytes, kvpages_cache_num_layers(handle));
    const std::size_t view = number(bytes, 1);
    Exported made;
    made.buffer = (*cache)->buffer;
    made.can_grow = (*cache)->can_grow;
    if (bytes.ConsumeBool()) {
        DLManagedTensor* raw = nullptr;
        FUZZ_CHECK(ok(kvpages_cache_export_dlpack_unversioned(handle, layer, view, &raw)) ==
                   (raw != nullptr));
        made.unversioned.reset(raw);
    } else {
        DLManagedTensorVersioned* raw = nullptr;
        const auto flags = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 2);
        FUZZ_CHECK(ok(kvpages_cache_export_dlpack(handle, layer, view, flags, &raw)) ==
                   (raw != nullptr));
        FUZZ_CHECK(raw == nullptr || raw->flags == flags);
        made.versioned.reset(raw);
    }
    if (made.versioned == nullptr && made.unversioned == nullptr) {
        return;
    }
    kvpages_tensor seen{};
    FUZZ_CHECK(ok(kvpages_cache_get_view(handle, layer, view, &seen)));
    FUZZ_CHECK(made.tensor().data == seen.data || made.tensor().data == nullptr);
    FUZZ_CHECK(made.tensor().ndim == static_cast<std::int32_t>(seen.ndim));
    keep(bytes, world.exports, std::move(made));
}

void make_ops(Bytes& bytes, World& world) {
    const std::shared_ptr<Cache>* const cache = pick(bytes, world.caches);
    if (cache == nullptr) {
        return;
    }
    kvpages_ops_config config = KVPAGES_OPS_CONFIG_INIT;
    config.max_block_ids = bytes.ConsumeBool() ? 0 : bytes.ConsumeIntegralInRange<std::uint64_t>(0, 64);
    config.max_concurrency = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 2);
    kvpages_ops* raw = nullptr;
    FUZZ_CHECK(ok(kvpages_ops_create((*cache)->handle.get(), &config, &raw)) == (raw != nullptr));
    if (raw != nullptr) {
        keep(bytes, world.ops, Ops{*cache, support::Ops(raw)});
    }
}

void make_tables(Bytes& bytes, World& world) {
    kvpages_table_group groups[3];
    for (kvpages_table_group& group : groups) {
        group = {fuzz::power(bytes, 4), fuzz::power(bytes, 4), number(bytes, 8),
                 bytes.ConsumeIntegralInRange<std::uint32_t>(0, 1), 0};
    }
    kvpages_tables_config config = KVPAGES_TABLES_CONFIG_INIT;
    config.groups = groups;
    config.num_groups = bytes.ConsumeIntegralInRange<std::size_t>(0, 3);
    config.max_requests = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 5);
    config.max_tokens = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 32);
    config.num_blocks = number(bytes, 8);
    config.context_parallel_size = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 3);
    config.context_parallel_rank = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 2);
    config.context_parallel_interleave = number(bytes, 4);
    config.flags = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 1);
    config.max_model_len = bytes.ConsumeBool() ? 0 : number(bytes, 64);
    kvpages_tables* raw = nullptr;
    const support::Plan* const plan = pick(bytes, world.plans);
    if (plan != nullptr && bytes.ConsumeBool()) {
        config.groups = nullptr;
        config.num_groups = 0;
        config.max_model_len = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 64);
        FUZZ_CHECK(ok(kvpages_tables_create_for_plan(plan->get(), 0, &config, &raw)) ==
                   (raw != nullptr));
    } else {
        FUZZ_CHECK(ok(kvpages_tables_create(&config, &raw)) == (raw != nullptr));
    }
    if (raw != nullptr) {
        keep(bytes, world.tables, Tables(raw));
    }
}

std::int32_t create_builder(void* user, const kvpages_builder_info*, void** out) {
    *out = user;
    return 0;
}
std::int32_t build(void*, void*, const kvpages_common_metadata* metadata, void*, void** out) {
    // Everything that is said to be there is read.
    std::int64_t sum = 0;
    for (std::uint64_t i = 0; i < metadata->num_requests; ++i) {
        sum += metadata->query_start_host != nullptr ? metadata->query_start_host[i + 1] : 0;
    }
    static std::int64_t kept;
    kept = sum;
    *out = &kept;
    return 0;
}
void destroy_builder(void*, void*) {}

void make_attention(Bytes& bytes, World& world) {
    const support::Plan* const plan = pick(bytes, world.plans);
    if (plan == nullptr) {
        return;
    }
    static int user;
    kvpages_builder_callbacks callbacks = KVPAGES_BUILDER_CALLBACKS_INIT;
    callbacks.user = &user;
    callbacks.create = create_builder;
    callbacks.build = build;
    callbacks.destroy = destroy_builder;
    kvpages_attention_config config = KVPAGES_ATTENTION_CONFIG_INIT;
    config.callbacks = bytes.ConsumeIntegral<std::uint8_t>() < 20 ? nullptr : &callbacks;
    config.num_builders = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 3);
    kvpages_attention* raw = nullptr;
    FUZZ_CHECK(ok(kvpages_attention_create(plan->get(), &config, &raw)) == (raw != nullptr));
    if (raw != nullptr) {
        keep(bytes, world.attentions, Attention(raw));
    }
}

void make_descriptor(Bytes& bytes, World& world) {
    const std::shared_ptr<Cache>* const cache = pick(bytes, world.caches);
    if (cache == nullptr) {
        return;
    }
    kvpages_descriptor_config config = KVPAGES_DESCRIPTOR_CONFIG_INIT;
    config.tensor_parallel_size = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 4);
    config.tensor_parallel_rank = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 3);
    std::vector<char> text(1 << 16);
    std::size_t length = 0;
    const std::size_t capacity = bytes.ConsumeBool() ? text.size() : number(bytes, 100) % text.size();
    if (!ok(kvpages_cache_copy_descriptor((*cache)->handle.get(), &config, text.data(), capacity,
                                          &length))) {
        return;
    }
    kvpages_descriptor* raw = nullptr;
    FUZZ_CHECK(ok(kvpages_descriptor_create(text.data(), length, &raw)));
    keep(bytes, world.descriptors, Descriptor(raw));
}

void make_reshard(Bytes& bytes, World& world) {
    const kvpages_descriptor* all[4];
    for (const kvpages_descriptor*& each : all) {
        const Descriptor* const descriptor = pick(bytes, world.descriptors);
        if (descriptor == nullptr) {
            return;
        }
        each = descriptor->get();
    }
    kvpages_reshard_config config = KVPAGES_RESHARD_CONFIG_INIT;
    config.sources = all;
    config.targets = all + 2;
    config.num_sources = bytes.ConsumeIntegralInRange<std::size_t>(0, 2);
    config.num_targets = bytes.ConsumeIntegralInRange<std::size_t>(0, 2);
    kvpages_reshard* raw = nullptr;
    FUZZ_CHECK(ok(kvpages_reshard_create(&config, &raw)) == (raw != nullptr));
    if (raw != nullptr) {
        keep(bytes, world.reshards, Reshard(raw));
    }
}

// --- what is done ----------------------------------------------------------------------------------

// Writes the first element of a tensor, whose cache may be gone, and the last one where it has memory.
void write_export(Bytes& bytes, World& world) {
    const Exported* const exported = pick(bytes, world.exports);
    if (exported == nullptr) {
        return;
    }
    const DLTensor& tensor = exported->tensor();
    bool has_elements = true;
    std::int64_t last = 0;
    for (std::int32_t dim = 0; dim < tensor.ndim; ++dim) {
        has_elements = has_elements && tensor.shape[dim] > 0;
        last += (tensor.shape[dim] - 1) * tensor.strides[dim];
    }
    FUZZ_CHECK(has_elements == (tensor.data != nullptr));
    if (!has_elements) {
        return;
    }
    const std::int64_t element_bytes = tensor.dtype.bits * tensor.dtype.lanes / 8;
    auto* const data = static_cast<unsigned char*>(tensor.data);
    std::memset(data, 1, static_cast<std::size_t>(element_bytes));
    if (!exported->can_grow) {
        std::memset(data + last * element_bytes, 2, static_cast<std::size_t>(element_bytes));
    }
}

// Asks for a text of a length that is not known, in too little room or in enough.
template <typename Copy>
void copy_text(Bytes& bytes, const Copy& copy) {
    std::size_t length = 0;
    if (copy(nullptr, std::size_t{0}, &length) != KVPAGES_STATUS_BUFFER_TOO_SMALL) {
        return;
    }
    FUZZ_CHECK(length > 0);
    const std::size_t capacity = bytes.ConsumeBool() ? length + 1 : number(bytes, 100) % (length + 1);
    std::vector<char> text(capacity);
    FUZZ_CHECK(ok(copy(text.data(), capacity, &length)) == (capacity > length));
    FUZZ_CHECK(capacity <= length || std::strlen(text.data()) == length);
}

void look_at_cache(Bytes& bytes, const Cache& cache) {
    const kvpages_cache* const handle = cache.handle.get();
    std::uint64_t counts[3];
    for (std::uint64_t& count : counts) {
        count = number(bytes, 4);
    }
    kvpages_cache_usage usage = KVPAGES_CACHE_USAGE_INIT;
    usage.blocks_in_use = counts;
    usage.num_counts = bytes.ConsumeIntegralInRange<std::size_t>(0, 3);
    const kvpages_cache_usage* const told = bytes.ConsumeBool() ? nullptr : &usage;
    kvpages_cache_snapshot now = KVPAGES_CACHE_SNAPSHOT_INIT;
    if (!ok(kvpages_cache_get_snapshot(handle, told, &now))) {
        return;
    }
    FUZZ_CHECK(now.num_blocks == kvpages_cache_num_blocks(handle));
    FUZZ_CHECK(now.num_blocks <= now.max_blocks);
    FUZZ_CHECK(now.block_bytes <= now.held_bytes && now.held_bytes >= now.bytes_in_use);
    FUZZ_CHECK(now.blocks_in_use <= now.num_blocks);
    FUZZ_CHECK(now.utilisation >= 0.0 && now.utilisation <= 1.0);
    const std::uint64_t parts =
        now.content_bytes_in_use + now.padding_bytes_in_use + now.unused_bytes_in_use;
    FUZZ_CHECK(now.has_group_usage == 1 ? parts >= now.bytes_in_use : parts == 0);
    copy_text(bytes, [&](char* text, std::size_t capacity, std::size_t* length) {
        return kvpages_cache_copy_snapshot(handle, told, text, capacity, length);
    });
    const std::uint64_t number_of_group = number(bytes, 3);
    kvpages_cache_group group = KVPAGES_CACHE_GROUP_INIT;
    FUZZ_CHECK(ok(kvpages_cache_get_group(handle, number_of_group, &group)) ==
               (number_of_group < now.num_groups));
}

void look_at_tables(Bytes& bytes, const kvpages_tables* tables) {
    kvpages_tables_snapshot now = KVPAGES_TABLES_SNAPSHOT_INIT;
    FUZZ_CHECK(ok(kvpages_tables_get_snapshot(tables, &now)));
    FUZZ_CHECK(now.generation >= 1 && now.rows_in_use <= now.max_requests);
    FUZZ_CHECK(now.num_entries <= now.max_entries && now.batch_tokens <= now.max_tokens);
    FUZZ_CHECK(now.pending_rows <= now.max_requests * now.num_groups);
    copy_text(bytes, [&](char* text, std::size_t capacity, std::size_t* length) {
        return kvpages_tables_copy_snapshot(tables, text, capacity, length);
    });
}

void look(Bytes& bytes, World& world) {
    if (const std::shared_ptr<Cache>* const cache = pick(bytes, world.caches)) {
        look_at_cache(bytes, **cache);
    }
    if (const Tables* const tables = pick(bytes, world.tables)) {
        look_at_tables(bytes, tables->get());
    }
}

// Calls the library as a callback may, and tries what it must not.
void listen(void* user, std::uint32_t level, const char* message) {
    FUZZ_CHECK(level >= KVPAGES_LOG_LEVEL_WARN && level <= KVPAGES_LOG_LEVEL_DEBUG);
    *static_cast<std::uint64_t*>(user) += std::strlen(message);
    kvpages_memory* memory = nullptr;
    FUZZ_CHECK(ok(kvpages_memory_create_host(&memory)));
    kvpages_memory_destroy(memory);
    FUZZ_CHECK(!ok(kvpages_set_log_callback(KVPAGES_LOG_LEVEL_OFF, nullptr, nullptr)));
}

// Another log callback, or none; what the one before counted into goes.
void set_log(Bytes& bytes, World& world) {
    auto messages = std::make_unique<std::uint64_t>(0);
    const auto level = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 4);
    const bool is_set = bytes.ConsumeBool();
    if (ok(kvpages_set_log_callback(level, is_set ? listen : nullptr, messages.get()))) {
        world.messages = std::move(messages);
    }
}

void resize(Bytes& bytes, World& world) {
    if (const std::shared_ptr<Cache>* const cache = pick(bytes, world.caches)) {
        const auto in_use = ids(bytes, 4);
        ok(kvpages_cache_resize((*cache)->handle.get(), number(bytes, 6), in_use.data(),
                                in_use.size()));
    }
}

void ask(Bytes& bytes, World& world) {
    if (const support::Plan* const plan = pick(bytes, world.plans)) {
        kvpages_group_info group = KVPAGES_GROUP_INFO_INIT;
        ok(kvpages_plan_get_group(plan->get(), number(bytes, 1), number(bytes, 3), &group));
        kvpages_block_size_config config = KVPAGES_BLOCK_SIZE_CONFIG_INIT;
        config.cache_block_size = number(bytes, 64);
        config.prefix_match_unit = bytes.ConsumeBool() ? 0 : number(bytes, 64);
        config.hashes_blocks = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 1);
        std::uint64_t step = 0, unit = 0;
        ok(kvpages_plan_resolve_block_sizes(plan->get(), &config, &step, &unit));
    }
    if (const std::shared_ptr<Cache>* const cache = pick(bytes, world.caches)) {
        const kvpages_cache* const handle = (*cache)->handle.get();
        kvpages_tensor view{};
        if (ok(kvpages_cache_get_view(handle, number(bytes, 5), number(bytes, 1), &view)) &&
            view.ndim > 0 && view.shape[0] > 0) {
            *static_cast<volatile unsigned char*>(view.data) = 1;
        }
        std::vector<std::size_t> layers(8);
        std::size_t count = 0;
        ok(kvpages_cache_copy_bound_layers(handle, number(bytes, 3), layers.data(),
                                           bytes.ConsumeIntegralInRange<std::size_t>(0, 8), &count));
        kvpages_region region{};
        ok(kvpages_cache_get_region(handle, number(bytes, 3), &region));
    }
    if (const Descriptor* const descriptor = pick(bytes, world.descriptors)) {
        kvpages_row row{};
        ok(kvpages_descriptor_get_row(descriptor->get(), number(bytes, 4), number(bytes, 4),
                                      number(bytes, 16), number(bytes, 4), number(bytes, 1) & 1, &row));
    }
}

void write_rows(Bytes& bytes, World& world) {
    const Tables* const tables = pick(bytes, world.tables);
    if (tables == nullptr) {
        return;
    }
    const auto blocks = ids(bytes, 6);
    const std::uint64_t request = number(bytes, 4), group = number(bytes, 2);
    switch (bytes.ConsumeIntegralInRange<int>(0, 6)) {
        case 0: ok(kvpages_tables_append(tables->get(), request, group, blocks.data(), blocks.size())); break;
        case 1: ok(kvpages_tables_overwrite(tables->get(), request, group, blocks.data(), blocks.size())); break;
        case 2: ok(kvpages_tables_truncate(tables->get(), request, group, number(bytes, 6))); break;
        case 3: ok(kvpages_tables_move(tables->get(), request, number(bytes, 4))); break;
        case 4: ok(kvpages_tables_swap(tables->get(), request, number(bytes, 4))); break;
        case 5: ok(kvpages_tables_clear(tables->get(), request)); break;
        default: ok(kvpages_tables_reset(tables->get(), nullptr)); break;
    }
}

// A step: rows are applied, a batch is prepared, metadata is built from it.
void step(Bytes& bytes, World& world) {
    const Tables* const tables = pick(bytes, world.tables);
    if (tables == nullptr) {
        return;
    }
    const auto requests = ids(bytes, 4);
    std::vector<std::int32_t> starts{0}, lens;
    for (std::size_t i = 0; i < requests.size(); ++i) {
        starts.push_back(starts.back() + bytes.ConsumeIntegralInRange<std::int32_t>(0, 5));
        lens.push_back(id(bytes));
    }
    if (bytes.ConsumeIntegral<std::uint8_t>() < 10) {
        starts.back() = id(bytes);
    }
    std::vector<std::int64_t> positions(24);
    for (std::int64_t& position : positions) {
        position = static_cast<std::int64_t>(number(bytes, 40));
    }
    if (bytes.ConsumeBool()) {
        ok(kvpages_tables_apply(tables->get(), nullptr));
        ok(kvpages_tables_gather(tables->get(), requests.data(), requests.size(), number(bytes, 5),
                                 nullptr));
        ok(kvpages_tables_map_slots(tables->get(), requests.data(), requests.size(), starts.data(),
                                    positions.data(), positions.size(), nullptr));
        return;
    }
    kvpages_batch batch = KVPAGES_BATCH_INIT;
    batch.requests = requests.data();
    batch.num_requests = requests.size();
    batch.query_start = starts.data();
    batch.seq_lens = lens.data();
    batch.positions = positions.data();
    batch.num_positions = positions.size();
    kvpages_step made = KVPAGES_STEP_INIT;
    if (!ok(kvpages_tables_prepare(tables->get(), &batch, &made))) {
        return;
    }
    if (const Attention* const attention = pick(bytes, world.attentions)) {
        made.builder = bytes.ConsumeIntegralInRange<std::uint64_t>(0, 2);
        made.causality = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 1);
        if (ok(kvpages_attention_build(attention->get(), &made))) {
            kvpages_attention_layer_metadata(attention->get(), 0, number(bytes, 4));
        }
    }
}

void operate(Bytes& bytes, World& world) {
    const Ops* const ops = pick(bytes, world.ops);
    if (ops == nullptr) {
        return;
    }
    std::uint64_t group = number(bytes, 2);
    std::size_t layer = number(bytes, 4);
    kvpages_block_selection selection = KVPAGES_BLOCK_SELECTION_INIT;
    selection.groups = &group;
    selection.num_groups = bytes.ConsumeIntegralInRange<std::size_t>(0, 1);
    selection.layers = &layer;
    selection.num_layers = bytes.ConsumeIntegralInRange<std::size_t>(0, 1);
    const kvpages_block_selection* const chosen = bytes.ConsumeBool() ? nullptr : &selection;
    if (bytes.ConsumeBool()) {
        const auto blocks = ids(bytes, 5);
        const auto fill = bytes.ConsumeBool() ? kvpages_ops_zero_blocks : kvpages_ops_poison_blocks;
        ok(fill(ops->handle.get(), blocks.data(), blocks.size(), chosen, nullptr));
        return;
    }
    std::vector<kvpages_block_copy> copies(bytes.ConsumeIntegralInRange<std::size_t>(0, 5));
    for (kvpages_block_copy& copy : copies) {
        copy = {id(bytes), id(bytes)};
    }
    ok(kvpages_ops_copy_blocks(ops->handle.get(), copies.data(), copies.size(), chosen,
                               bytes.ConsumeBool() ? 0 : number(bytes, 6), nullptr));
}

// Rows of one layer, in buffers as large as the layer's own numbers say.
void write_and_gather(Bytes& bytes, World& world) {
    const Ops* const ops = pick(bytes, world.ops);
    if (ops == nullptr) {
        return;
    }
    const kvpages_cache* const cache = ops->cache->handle.get();
    const std::size_t layer = number(bytes, 4);
    kvpages_view_axes axes = KVPAGES_VIEW_AXES_INIT;
    if (layer < kvpages_cache_num_layers(cache)) {
        ok(kvpages_cache_get_axes(cache, layer, &axes));
    }
    std::vector<std::int64_t> slots(bytes.ConsumeIntegralInRange<std::size_t>(0, 4));
    for (std::int64_t& slot : slots) {
        slot = bytes.ConsumeBool() ? -1 : static_cast<std::int64_t>(number(bytes, 64));
    }
    // Packed and compressed elements are written as more elements than are stored.
    const std::uint64_t row = 8 * (axes.num_heads + 1) *
                              (axes.key_elements + axes.value_elements + axes.scale_elements + 64);
    std::vector<double> room(static_cast<std::size_t>((slots.size() + 1) * row));
    kvpages_kv_rows_out out{};
    out.layer = layer;
    out.keys = room.data();
    out.values = room.data();
    out.key_scale = out.value_scale = 1.0f;
    kvpages_kv_rows in{};
    std::memcpy(&in, &out, sizeof in);
    kvpages_kv_write write = KVPAGES_KV_WRITE_INIT;
    kvpages_kv_gather gather = KVPAGES_KV_GATHER_INIT;
    write.layers = &in;
    gather.layers = &out;
    write.num_layers = gather.num_layers = 1;
    write.slots = gather.slots = slots.data();
    write.num_slots = gather.num_slots = slots.size();
    write.dtype = gather.dtype = bytes.ConsumeIntegralInRange<std::uint32_t>(0, 6);
    write.fp8_format = gather.fp8_format = bytes.ConsumeBool() ? 0 : 11;
    if (bytes.ConsumeBool()) {
        ok(kvpages_ops_write_kv(ops->handle.get(), &write));
    } else {
        ok(kvpages_ops_gather_kv(ops->handle.get(), &gather));
    }
}

void reshard(Bytes& bytes, World& world) {
    if (const Reshard* const made = pick(bytes, world.reshards)) {
        const kvpages_block_move move{number(bytes, 2), id(bytes), id(bytes)};
        std::vector<kvpages_strided_copy> copies(64);
        std::size_t count = 0;
        ok(kvpages_reshard_copy_copies(made->get(), &move, 1, copies.data(),
                                       bytes.ConsumeIntegralInRange<std::size_t>(0, 64), &count));
    }
}

void make(Bytes& bytes, World& world) {
    switch (bytes.ConsumeIntegralInRange<int>(0, 10)) {
        case 0: keep(bytes, world.models, fuzz::make_model(bytes, 6)); break;
        case 1:
        case 2: bytes.ConsumeBool() ? make_plan(bytes, world) : make_sound_plan(bytes, world); break;
        case 3: make_plan_from_parts(bytes, world); break;
        case 4:
        case 5: make_cache(bytes, world); break;
        case 6: make_ops(bytes, world); break;
        case 7: make_tables(bytes, world); break;
        case 8: make_attention(bytes, world); break;
        case 9: make_export(bytes, world); break;
        default:
            bytes.ConsumeBool() ? make_descriptor(bytes, world) : make_reshard(bytes, world);
            break;
    }
}

void destroy(Bytes& bytes, World& world) {
    switch (bytes.ConsumeIntegralInRange<int>(0, 8)) {
        case 0: drop(bytes, world.models); break;
        case 1: drop(bytes, world.plans); break;
        case 2: drop(bytes, world.caches); break;
        case 3: drop(bytes, world.ops); break;
        case 4: drop(bytes, world.tables); break;
        case 5: drop(bytes, world.attentions); break;
        case 6: drop(bytes, world.descriptors); break;
        case 7: drop(bytes, world.exports); break;
        default: drop(bytes, world.reshards); break;
    }
}

void call(Bytes& bytes, World& world) {
    switch (bytes.ConsumeIntegralInRange<int>(0, 14)) {
        case 0:
        case 1:
        case 2: make(bytes, world); break;
        case 3: destroy(bytes, world); break;
        case 4: resize(bytes, world); break;
        case 5: ask(bytes, world); break;
        case 6: write_rows(bytes, world); break;
        case 7:
        case 8: step(bytes, world); break;
        case 9: operate(bytes, world); break;
        case 10: write_and_gather(bytes, world); break;
        case 11: write_export(bytes, world); break;
        case 12: look(bytes, world); break;
        case 13: set_log(bytes, world); break;
        default: reshard(bytes, world); break;
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes bytes(data, size);
    int left = 0;
    {
        World world;
        keep(bytes, world.models, fuzz::make_model(bytes, 6));
        bytes.ConsumeBool() ? make_plan(bytes, world) : make_sound_plan(bytes, world);
        make_cache(bytes, world);
        make_ops(bytes, world);
        make_export(bytes, world);
        for (int i = 0; i < 200 && bytes.remaining_bytes() > 0; ++i) {
            call(bytes, world);
        }
        world.ops.clear();
        world.caches.clear();
        // What was handed out is there still.
        while (!world.exports.empty()) {
            write_export(bytes, world);
            world.exports.pop_back();
        }
        FUZZ_CHECK(ok(kvpages_set_log_callback(KVPAGES_LOG_LEVEL_OFF, nullptr, nullptr)));
        left = world.live_callbacks;
    }
    FUZZ_CHECK(left == 0);
    return 0;
}
