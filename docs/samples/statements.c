/* Statements of a main(), and a model without layers. */
#include <kvpages/kvpages.h>

#include <stdio.h>

int main(void) {
    kvpages_model* model = NULL;
    if (kvpages_model_create(&model) != KVPAGES_STATUS_OK) return 1;

    /* SAMPLE */

    kvpages_model_destroy(model);
    return 0;
}
