#include "vector_file.h"

#include <algorithm>
#include <fstream>
#include <map>
#include <set>

#include "schema.h"

namespace conformance {
namespace {

constexpr const char* kExceptionsName = "exceptions.json";

const Schema& cases_schema() {
    static const Schema schema(
        R"([{"id": "string", "note": "string", "input": "any", "expect": "any"}])");
    return schema;
}

const Schema& exceptions_schema() {
    static const Schema schema(R"([{"category": "string", "id": "string", "reason": "string",
                                    "expect": "any", "class": "string"}])");
    return schema;
}

Json read_json(const std::filesystem::path& path) {
    std::ifstream stream(path);
    if (!stream) {
        throw Inexpressible(path.string() + ": cannot be opened");
    }
    try {
        return Json::parse(stream);
    } catch (const Json::parse_error& error) {
        throw Inexpressible(path.string() + ": " + error.what());
    }
}

// What the folder's list of exceptions says about one category, by case id.
std::map<std::string, Json> read_exceptions(const std::filesystem::path& folder,
                                            const std::string& category) {
    std::map<std::string, Json> by_id;
    const std::filesystem::path path = folder / kExceptionsName;
    if (!std::filesystem::exists(path)) {
        return by_id;
    }
    const Json entries = read_json(path);
    exceptions_schema().check(entries, path.string());
    for (const Json& entry : entries) {
        if (entry.at("category") != category) {
            continue;
        }
        const std::string id = entry.at("id");
        if (!by_id.emplace(id, entry.at("expect")).second) {
            throw Inexpressible(path.string() + ": two exceptions for " + category + "/" + id);
        }
    }
    return by_id;
}

std::vector<Json> outcomes(const Json& expect, const std::string& path) {
    if (!expect.is_object() || !expect.contains("either")) {
        return {expect};
    }
    static const Schema schema(R"({"either": ["any"]})");
    schema.check(expect, path);
    if (expect.at("either").empty()) {
        throw Inexpressible(path + ".either: has no outcome");
    }
    return expect.at("either");
}

}  // namespace

std::vector<std::filesystem::path> case_files(const std::filesystem::path& path) {
    if (!std::filesystem::is_directory(path)) {
        return {path};
    }
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
        const std::filesystem::path& file = entry.path();
        if (file.extension() == ".json" && file.filename() != kExceptionsName) {
            files.push_back(file);
        }
    }
    if (files.empty()) {
        throw Inexpressible(path.string() + ": holds no case file");
    }
    std::sort(files.begin(), files.end());
    return files;
}

VectorFile read_vector_file(const std::filesystem::path& path) {
    VectorFile file{path.filename().string(), path.stem().string(), {}};
    const Json cases = read_json(path);
    cases_schema().check(cases, file.name);
    const auto exceptions = read_exceptions(path.parent_path(), file.category);

    std::set<std::string> ids;
    for (const Json& entry : cases) {
        const std::string id = entry.at("id");
        if (!ids.insert(id).second) {
            throw Inexpressible(file.name + ": two cases have the id " + id);
        }
        const auto exception = exceptions.find(id);
        const Json& expect = exception == exceptions.end() ? entry.at("expect") : exception->second;
        file.cases.push_back({id, entry.at("input"), outcomes(expect, id + ".expect")});
    }
    return file;
}

}  // namespace conformance
