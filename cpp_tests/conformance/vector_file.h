// Case files, and the exceptions that replace what some of them expect.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "json.h"

namespace conformance {

struct Case {
    std::string id;
    Json input;
    std::vector<Json> outcomes;  // each of them is right
};

struct VectorFile {
    std::string name;      // "specs.json"
    std::string category;  // "specs"
    std::vector<Case> cases;
};

// The case files that `path` stands for: itself, or every .json file of a folder but the list of
// exceptions, sorted by name.
std::vector<std::filesystem::path> case_files(const std::filesystem::path& path);

// Reads a case file, with the exceptions of its folder in place.
VectorFile read_vector_file(const std::filesystem::path& path);

}  // namespace conformance
