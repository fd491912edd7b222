/* A plan of 4,000 blocks, host memory, and one block in use. */
#include <kvpages/kvpages.h>

#include <stdio.h>
#include <stdlib.h>

static void must(int32_t status) {
    if (status == KVPAGES_STATUS_OK) return;
    fprintf(stderr, "%s\n", kvpages_last_error_message());
    exit(1);
}

static kvpages_plan* plan_of_4000_blocks(void) {
    kvpages_spec spec = KVPAGES_SPEC_INIT;
    spec.kind = KVPAGES_SPEC_KIND_FULL_ATTENTION;
    spec.dtype = KVPAGES_DTYPE_F16;
    spec.block_size = 16;
    spec.num_kv_heads = 2;
    spec.head_size = 64;
    kvpages_backend* backend = NULL;
    must(kvpages_backend_create_preset(KVPAGES_PRESET_FLASH_ATTENTION_NHD, &backend));
    kvpages_layer layer = KVPAGES_LAYER_INIT;
    layer.name = "layers.0.attn";
    layer.spec = &spec;
    layer.backend = backend;
    kvpages_model* model = NULL;
    must(kvpages_model_create(&model));
    must(kvpages_model_add_layer(model, &layer));
    kvpages_plan_config config = KVPAGES_PLAN_CONFIG_INIT;
    config.flags = KVPAGES_PLAN_OVERRIDE_NUM_BLOCKS;
    config.num_blocks_override = 4000;
    config.max_model_len = 4096;
    const kvpages_worker worker = {model, (int64_t)1 << 30};
    kvpages_plan* plan = NULL;
    must(kvpages_plan_create(&config, &worker, 1, &plan, NULL));
    kvpages_model_destroy(model);
    kvpages_backend_destroy(backend);
    return plan;
}

int main(void) {
    kvpages_plan* plan = plan_of_4000_blocks();
    kvpages_memory* memory = NULL;
    must(kvpages_memory_create_host(&memory));
    kvpages_cache* cache = NULL;
    const int32_t blocks_in_use[] = {7};
    const size_t num_blocks_in_use = 1;

    /* SAMPLE */

    const int as_asked =
        kvpages_cache_num_blocks(cache) == 500 && kvpages_cache_max_blocks(cache) == 4000;
    kvpages_cache_destroy(cache);
    kvpages_memory_destroy(memory);
    kvpages_plan_destroy(plan);
    return as_asked ? 0 : 1;
}
