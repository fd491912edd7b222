// What a case may contain: every key and type, so that nothing is skipped because nobody knew it.
#pragma once

#include <string>

#include "json.h"

namespace conformance {

// A pattern written in JSON:
//   "uint|null"            one of these types: uint int number bool string null any, or one of the
//                          named patterns of schema.cc ("spec", "backend", ...)
//   [P]                    a list of P
//   [P, Q]                 a pair
//   {"a": P, "b?": Q}      an object with exactly these keys, b may be absent
//   {"*": P}               an object with any keys
class Schema {
public:
    // Of what a case gives to the library.
    explicit Schema(const char* pattern) : pattern_(Json::parse(pattern)) {}

    // Of what a case expects: an error may stand in place of any value.
    static Schema of_expectation(const char* pattern) {
        Schema schema(pattern);
        schema.errors_allowed_ = true;
        return schema;
    }

    // Throws Inexpressible with the path of the first value that does not fit.
    void check(const Json& value, const std::string& path) const;

private:
    Json pattern_;
    bool errors_allowed_ = false;
};

bool is_error(const Json& value);

}  // namespace conformance
