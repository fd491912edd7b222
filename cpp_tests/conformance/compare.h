// Whether the library's outcome is an expected one.
#pragma once

#include <optional>
#include <string>

#include "json.h"

namespace conformance {

// The first place where they differ, in words; nothing when the outcome is the expected one.
std::optional<std::string> first_difference(const Json& expected, const Json& got);

}  // namespace conformance
