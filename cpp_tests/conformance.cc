// Runs case files through the public API:  conformance PATH...  (files, or folders of them)
//
// Prints every case that fails with what it expected and got, a line per file, and a total. Exits
// with 1 when a case fails, with 2 when anything is not understood or cannot be said.
#include <cstdio>

#include "conformance/category.h"
#include "conformance/compare.h"
#include "conformance/library.h"
#include "conformance/sha256.h"
#include "conformance/vector_file.h"

namespace {

using conformance::Case;
using conformance::Category;
using conformance::Contradiction;
using conformance::Inexpressible;
using conformance::Json;

enum class Result { passed, failed, not_understood };

struct Totals {
    std::size_t passed = 0;
    std::size_t failed = 0;
    bool all_understood = true;

    void add(const Totals& other) {
        passed += other.passed;
        failed += other.failed;
        all_understood = all_understood && other.all_understood;
    }
};

Json run(const conformance::Operation& operation, const Json& input) {
    try {
        return operation.run(input);
    } catch (const conformance::LibraryError& error) {
        return error.outcome();
    }
}

// Prints why a case fails: one line, or one for each outcome that would have been right.
void report(const std::string& name, const std::vector<std::string>& differences) {
    if (differences.size() == 1) {
        std::printf("FAIL %s: %s\n", name.c_str(), differences[0].c_str());
        return;
    }
    std::printf("FAIL %s: none of %zu outcomes\n", name.c_str(), differences.size());
    for (std::size_t i = 0; i < differences.size(); ++i) {
        std::printf("  %zu. %s\n", i + 1, differences[i].c_str());
    }
}

Result run_case(const Category& category, const Case& test_case, const std::string& name) {
    try {
        const conformance::Operation& operation = conformance::operation(category, test_case.input);
        operation.input.check(test_case.input, "input");
        std::vector<Json> outcomes = test_case.outcomes;
        for (Json& outcome : outcomes) {
            operation.expect.check(outcome, "expect");
            operation.normalise(outcome);
        }
        Json got = run(operation, test_case.input);
        operation.normalise(got);

        std::vector<std::string> differences;
        for (const Json& outcome : outcomes) {
            const auto difference = conformance::first_difference(outcome, got);
            if (!difference) {
                return Result::passed;
            }
            differences.push_back(*difference);
        }
        report(name, differences);
        return Result::failed;
    } catch (const Contradiction& contradiction) {
        report(name, {contradiction.what()});
        return Result::failed;
    } catch (const std::exception& error) {
        std::printf("NOT UNDERSTOOD %s: %s\n", name.c_str(), error.what());
        return Result::not_understood;
    }
}

Totals run_file(const std::filesystem::path& path) {
    Totals totals;
    const conformance::VectorFile file = conformance::read_vector_file(path);
    const Category& category = conformance::category(file.category);
    for (const Case& test_case : file.cases) {
        const Result result = run_case(category, test_case, file.category + "/" + test_case.id);
        totals.passed += result == Result::passed ? 1 : 0;
        totals.failed += result == Result::passed ? 0 : 1;
        totals.all_understood = totals.all_understood && result != Result::not_understood;
    }
    std::printf("%s: %zu passed, %zu failed\n", file.name.c_str(), totals.passed, totals.failed);
    return totals;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: conformance PATH...\n");
        return 2;
    }
    if (!conformance::sha256_is_right()) {
        std::fprintf(stderr, "conformance: sha256 is wrong\n");
        return 2;
    }
    Totals totals;
    for (int i = 1; i < argc; ++i) {
        std::vector<std::filesystem::path> files;
        try {
            files = conformance::case_files(argv[i]);
        } catch (const std::exception& error) {
            std::printf("NOT UNDERSTOOD %s\n", error.what());
            totals.all_understood = false;
        }
        for (const std::filesystem::path& path : files) {
            try {
                totals.add(run_file(path));
            } catch (const std::exception& error) {
                std::printf("NOT UNDERSTOOD %s: %s\n", path.filename().c_str(), error.what());
                totals.all_understood = false;
            }
        }
    }
    std::printf("%zu passed, %zu failed\n", totals.passed, totals.failed);
    if (!totals.all_understood) {
        return 2;
    }
    return totals.failed == 0 ? 0 : 1;
}
