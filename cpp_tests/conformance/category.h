// The categories of case files: what their cases look like, and how one is run.
#pragma once

#include <map>
#include <string>

#include "json.h"
#include "schema.h"

namespace conformance {

struct Operation {
    Schema input;
    Schema expect;
    // What the library makes of a case's input, in the schema of `expect`. A LibraryError thrown
    // on the way is the outcome of the whole case.
    Json (*run)(const Json& input);
    // Brings an outcome, expected or ours, into the form in which outcomes are compared.
    void (*normalise)(Json& outcome);
};

// By the value of the input's "op"; a category whose cases have none has one, under "".
using Category = std::map<std::string, Operation>;

Category specs_category();
Category plan_category();
Category views_category();
Category bind_category();
Category slots_category();
Category zeroing_category();
Category copying_category();
Category groups_category();
Category metadata_category();

// Of a case file's stem.
const Category& category(const std::string& name);

const Operation& operation(const Category& category, const Json& input);

inline void as_it_is(Json&) {}

}  // namespace conformance
