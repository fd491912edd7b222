// Includes kvpages.hpp a second time in one program: a function that is not inline fails to link.
#include <kvpages/kvpages.hpp>

bool unit_b_has_version();
bool unit_b_has_version() { return kvpages_version() != nullptr; }
