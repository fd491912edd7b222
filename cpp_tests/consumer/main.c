/* The smallest user of the C API. */
#include <kvpages/kvpages.h>

#include <stdio.h>

int main(void) {
    printf("kvpages %s from C\n", kvpages_version());
    return 0;
}
