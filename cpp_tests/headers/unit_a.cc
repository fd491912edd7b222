// One of two translation units that include kvpages.hpp: see unit_b.cc.
#include <kvpages/kvpages.hpp>
#include <kvpages/kvpages.hpp>

bool unit_b_has_version();

int main() { return kvpages_last_error_message() != nullptr && unit_b_has_version() ? 0 : 1; }
