// The JSON type of the runner, and the two ways in which a case can be beyond it.
#pragma once

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace conformance {

using Json = nlohmann::json;

// The runner does not understand a case, or cannot say it through the public API. Never a pass and
// never a plain failure: the whole run ends with exit code 2.
class Inexpressible : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// The library's answers contradict each other, so there is no outcome to compare.
class Contradiction : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

}  // namespace conformance
