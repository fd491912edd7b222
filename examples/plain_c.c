/* A plan, a cache and a step in C11, with every call checked.
 *
 *   plain_c        prints what it does, and ends with 0 when all of it was as it should be
 *
 * Three layers: full attention, a sliding window, and one that reads the first one's pages. Their
 * rows are written with one call and gathered with another, and looked at through a view. Three
 * calls are made to fail, as an engine's would: the program reads the numbers and goes on. */
#include <kvpages/kvpages.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADS = 2, HEAD_SIZE = 64, BLOCK_SIZE = 16, TOKENS = 5, ROW = HEADS * HEAD_SIZE };

/* What an engine that cannot go on does. */
static void must(kvpages_status status, const char* what) {
    if (status == KVPAGES_STATUS_OK) return;
    fprintf(stderr, "%s failed: %s (%s)\n%s\n", what, kvpages_status_name(status),
            kvpages_last_error_kind(), kvpages_last_error_message());
    exit(1);
}

static void require(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "not as it should be: %s\n", what);
    exit(1);
}

/* --- layers ------------------------------------------------------------------------------------
 */

static void add_layer(kvpages_model* model, const char* name, const kvpages_spec* spec,
                      const char* shares_with, const kvpages_backend* backend) {
    kvpages_layer layer = KVPAGES_LAYER_INIT;
    layer.name = name;
    layer.spec = spec;
    layer.shares_with = shares_with;
    layer.backend = backend;
    must(kvpages_model_add_layer(model, &layer), name);
}

/* The model keeps the backend, so nobody else has to. */
static kvpages_model* make_model(void) {
    kvpages_backend* backend = NULL;
    must(kvpages_backend_create_preset(KVPAGES_PRESET_FLASH_ATTENTION_NHD, &backend), "backend");

    kvpages_spec full = KVPAGES_SPEC_INIT;
    full.kind = KVPAGES_SPEC_KIND_FULL_ATTENTION;
    full.dtype = KVPAGES_DTYPE_F32;
    full.block_size = BLOCK_SIZE;
    full.num_kv_heads = HEADS;
    full.head_size = HEAD_SIZE;
    kvpages_spec sliding = full;
    sliding.kind = KVPAGES_SPEC_KIND_SLIDING_WINDOW;
    sliding.sliding_window = 32;

    kvpages_model* model = NULL;
    must(kvpages_model_create(&model), "model");
    add_layer(model, "layers.0.attn", &full, NULL, backend);
    add_layer(model, "layers.1.attn", &sliding, NULL, backend);
    add_layer(model, "layers.2.attn", NULL, "layers.0.attn", backend);
    kvpages_backend_destroy(backend);
    return model;
}

/* --- a plan ------------------------------------------------------------------------------------
 */

/* Asks for longer sequences than fit, and then for what does. */
static kvpages_plan* make_plan(const kvpages_model* model) {
    kvpages_plan_config config = KVPAGES_PLAN_CONFIG_INIT;
    config.max_model_len = 4096;
    config.max_tokens_in_flight = 64;
    config.reserved_blocks = 1; /* block 0 is never handed out */
    const kvpages_worker worker = {model, 1 << 20};
    kvpages_shortfall shortfall = KVPAGES_SHORTFALL_INIT;
    kvpages_plan* plan = NULL;

    kvpages_status status = kvpages_plan_create(&config, &worker, 1, &plan, &shortfall);
    require(status == KVPAGES_STATUS_DOES_NOT_FIT && plan == NULL,
            "4096 tokens do not fit in 1 MiB");
    printf("4096 tokens need %llu KiB, there are %llu; taking %llu tokens\n",
           (unsigned long long)(shortfall.needed_bytes >> 10),
           (unsigned long long)(shortfall.available_bytes >> 10),
           (unsigned long long)shortfall.longest_model_len);

    config.max_model_len = shortfall.longest_model_len;
    status = kvpages_plan_create(&config, &worker, 1, &plan, NULL);
    must(status, "plan of what fits");
    return plan;
}

/* A text of the library's is asked for its length, then copied. */
static char* explanation(const kvpages_plan* plan) {
    size_t length = 0;
    const kvpages_status asked =
        kvpages_plan_copy_explanation(plan, KVPAGES_TEXT_FORMAT_TEXT, NULL, 0, &length);
    require(asked == KVPAGES_STATUS_BUFFER_TOO_SMALL, "no room for the explanation");
    char* text = malloc(length + 1);
    require(text != NULL, "memory for the explanation");
    must(kvpages_plan_copy_explanation(plan, KVPAGES_TEXT_FORMAT_TEXT, text, length + 1, &length),
         "explanation");
    return text;
}

/* --- a step ------------------------------------------------------------------------------------
 */

/* Request 3 starts with five tokens: in group 0 in block 4, in group 1 in block 9. */
static kvpages_step prepare_step(kvpages_tables* tables, const kvpages_batch* batch) {
    const int32_t first[] = {4}, second[] = {9}, not_there[] = {1 << 30};
    must(kvpages_tables_append(tables, 3, 0, first, 1), "append to group 0");

    /* A scheduler's mistake is refused, named, and leaves the rows alone. */
    const kvpages_status status = kvpages_tables_append(tables, 3, 1, not_there, 1);
    require(status == KVPAGES_STATUS_INVALID_ARGUMENT &&
                strcmp(kvpages_last_error_kind(), "block_id_out_of_range") == 0,
            "a block that is not there is refused");
    printf("refused: %s\n", kvpages_last_error_message());

    must(kvpages_tables_append(tables, 3, 1, second, 1), "append to group 1");
    kvpages_step step = KVPAGES_STEP_INIT;
    must(kvpages_tables_prepare(tables, batch, &step), "prepare");
    return step;
}

static const int64_t* slots_of(const kvpages_step* step, size_t group) {
    return (const int64_t*)step->slot_mappings[group].data;
}

/* Rows of one layer, without gaps: [tokens, heads, head size]. */
static kvpages_kv_rows rows_of(size_t layer, const float* keys, const float* values) {
    kvpages_kv_rows rows;
    memset(&rows, 0, sizeof rows);
    rows.layer = layer;
    rows.keys = keys;
    rows.values = values;
    return rows;
}

static void write_rows(const kvpages_ops* ops, const kvpages_kv_rows* rows, const int64_t* slots) {
    kvpages_kv_write write = KVPAGES_KV_WRITE_INIT;
    write.layers = rows;
    write.num_layers = 1;
    write.slots = slots;
    write.num_slots = TOKENS;
    write.dtype = KVPAGES_DTYPE_F32;
    must(kvpages_ops_write_kv(ops, &write), "write");
}

static void gather_rows(const kvpages_ops* ops, size_t layer, const int64_t* slots, float* keys,
                        float* values) {
    kvpages_kv_rows_out rows;
    memset(&rows, 0, sizeof rows);
    rows.layer = layer;
    rows.keys = keys;
    rows.values = values;
    kvpages_kv_gather gather = KVPAGES_KV_GATHER_INIT;
    gather.layers = &rows;
    gather.num_layers = 1;
    gather.slots = slots;
    gather.num_slots = TOKENS;
    gather.dtype = KVPAGES_DTYPE_F32;
    must(kvpages_ops_gather_kv(ops, &gather), "gather");
}

/* The element of a view: block | head | token | kv*content. */
static float element(const kvpages_tensor* view, int64_t block, int64_t head, int64_t token,
                     int64_t content) {
    return ((const float*)view->data)[block * view->strides[0] + head * view->strides[1] +
                                      token * view->strides[2] + content * view->strides[3]];
}

static size_t layer_named(const kvpages_cache* cache, const char* name) {
    size_t layer = 0;
    must(kvpages_cache_find_layer(cache, name, &layer), name);
    return layer;
}

/* Writes through the operations, reads with them and through a view. */
static void check_layer(const kvpages_cache* cache, const kvpages_ops* ops,
                        const kvpages_step* step, const char* name, const char* reader) {
    const size_t layer = layer_named(cache, name), read_from = layer_named(cache, reader);
    kvpages_layer_info info = KVPAGES_LAYER_INFO_INIT;
    must(kvpages_cache_get_layer(cache, layer, &info), "layer");
    const int64_t* slots = slots_of(step, info.group);

    float keys[TOKENS * ROW], values[TOKENS * ROW], read_keys[TOKENS * ROW],
        read_values[TOKENS * ROW];
    for (int i = 0; i < TOKENS * ROW; ++i) {
        keys[i] = (float)i;
        values[i] = (float)-i;
    }
    const kvpages_kv_rows rows = rows_of(layer, keys, values);
    write_rows(ops, &rows, slots);
    gather_rows(ops, read_from, slots, read_keys, read_values);
    require(memcmp(keys, read_keys, sizeof keys) == 0 &&
                memcmp(values, read_values, sizeof values) == 0,
            "what is gathered is what was written");

    kvpages_tensor view;
    must(kvpages_cache_get_view(cache, read_from, 0, &view), "view");
    const int64_t block = slots[TOKENS - 1] / BLOCK_SIZE, slot = slots[TOKENS - 1] % BLOCK_SIZE;
    const int last = TOKENS * ROW - 1; /* the last element of the last token's last head */
    require(element(&view, block, HEADS - 1, slot, HEAD_SIZE - 1) == keys[last] &&
                element(&view, block, HEADS - 1, slot, 2 * HEAD_SIZE - 1) == values[last],
            "the view shows what was written");
    printf("%s, group %llu, block %lld: %d tokens written, read as %s\n", name,
           (unsigned long long)info.group, (long long)block, TOKENS, reader);
}

int main(void) {
    printf("kvpages %s\n", kvpages_version());
    kvpages_model* model = make_model();
    kvpages_plan* plan = make_plan(model);
    kvpages_model_destroy(model); /* the plan has what it needs */
    char* text = explanation(plan);
    printf("%.*s\n", (int)strcspn(text, "\n"), text);
    free(text);

    kvpages_memory* memory = NULL;
    must(kvpages_memory_create_host(&memory), "memory");
    kvpages_cache_config cache_config = KVPAGES_CACHE_CONFIG_INIT;
    cache_config.memory = memory;
    kvpages_cache* cache = NULL;
    must(kvpages_cache_create(plan, &cache_config, &cache, NULL), "cache");
    kvpages_memory_destroy(memory);

    kvpages_tables_config tables_config = KVPAGES_TABLES_CONFIG_INIT;
    tables_config.max_requests = 8;
    tables_config.max_tokens = 64;
    kvpages_tables* tables = NULL;
    must(kvpages_tables_create_for_plan(plan, 0, &tables_config, &tables), "tables");
    kvpages_ops_config ops_config = KVPAGES_OPS_CONFIG_INIT;
    ops_config.max_concurrency = 1;
    kvpages_ops* ops = NULL;
    must(kvpages_ops_create(cache, &ops_config, &ops), "ops");
    kvpages_plan_destroy(plan);

    const int32_t requests[] = {3}, query_start[] = {0, TOKENS}, seq_lens[] = {TOKENS};
    const int64_t positions[TOKENS] = {0, 1, 2, 3, 4};
    kvpages_batch batch = KVPAGES_BATCH_INIT;
    batch.requests = requests;
    batch.num_requests = 1;
    batch.query_start = query_start;
    batch.seq_lens = seq_lens;
    batch.positions = positions;
    batch.num_positions = TOKENS;
    const kvpages_step step = prepare_step(tables, &batch);

    check_layer(cache, ops, &step, "layers.0.attn", "layers.0.attn");
    check_layer(cache, ops, &step, "layers.1.attn", "layers.1.attn");
    check_layer(cache, ops, &step, "layers.0.attn", "layers.2.attn"); /* it shares */

    size_t layer = 0;
    require(kvpages_cache_find_layer(cache, "layers.9.attn", &layer) == KVPAGES_STATUS_NOT_FOUND,
            "a layer that is not there is not found");
    printf("not found: %s\n", kvpages_last_error_message());

    /* In any order. */
    kvpages_cache_destroy(cache);
    kvpages_ops_destroy(ops);
    kvpages_tables_destroy(tables);
    puts("all as it should be");
    return 0;
}
