/* kvpages.h is C11 and may be included twice. */
#include <kvpages/kvpages.h>
#include <kvpages/kvpages.h>

int main(void) { return kvpages_last_error_message() == NULL; }
