// The recorded cases with changed inputs: a case is chosen, some of its values are replaced, left out,
// doubled or taken from another place, and the library is asked as the conformance program asks it.
// What comes out is nobody's to say; that it is an answer or an error is.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "conformance/category.h"
#include "conformance/library.h"
#include "conformance/vector_file.h"
#include "world.h"

namespace {

using conformance::Json;
using fuzz::Bytes;

struct Recorded {
    const conformance::Category* category;
    Json input;
    bool allocates;
};

bool is_asked(const std::string& category);

const std::vector<Recorded>& recorded() {
    static const std::vector<Recorded> all = [] {
        std::vector<Recorded> cases;
        for (const auto& path : conformance::case_files(KVPAGES_TEST_VECTORS)) {
            conformance::VectorFile file = conformance::read_vector_file(path);
            const conformance::Category& category = conformance::category(file.category);
            const bool allocates = file.category == "views" || file.category == "zeroing";
            for (conformance::Case& each : file.cases) {
                // Those of whole servers take long, and say nothing that smaller ones do not.
                if (is_asked(file.category) && each.input.dump().size() < 20000) {
                    cases.push_back({&category, std::move(each.input), allocates});
                }
            }
        }
        return cases;
    }();
    return all;
}

// A value somewhere in a tree, as far down as the bytes lead.
Json& somewhere(Bytes& bytes, Json& root) {
    Json* at = &root;
    while (at->is_structured() && !at->empty() && bytes.ConsumeIntegral<std::uint8_t>() >= 24) {
        const auto place = bytes.ConsumeIntegralInRange<std::size_t>(0, at->size() - 1);
        at = &*std::next(at->begin(), static_cast<std::ptrdiff_t>(place));
    }
    return *at;
}

void change(Bytes& bytes, Json& input) {
    Json& at = somewhere(bytes, input);
    switch (bytes.ConsumeIntegralInRange<int>(0, 6)) {
        case 0: at = fuzz::number(bytes, 100); break;
        case 1: at = bytes.ConsumeIntegralInRange<std::int64_t>(-4, 4); break;
        case 2: at = Json(somewhere(bytes, input)); break;
        case 3: at = bytes.ConsumeBool(); break;
        case 4: at = nullptr; break;
        case 5:
            if (at.is_structured() && !at.empty()) {
                at.erase(std::prev(at.end()));
            }
            break;
        default:
            if (at.is_array() && !at.empty()) {
                at.push_back(Json(at.front()));
            }
            break;
    }
}

// Categories that allocate what an input says fill and hash it too, so there numbers stay small; and
// where arrays go together by their lengths, a changed one is the asking program's fault.
bool is_asked(const std::string& category) {
    return category != "metadata" && category != "slots" && category != "copying";
}

bool is_small(const Json& value) {
    if (value.is_number_unsigned()) {
        return value.get<std::uint64_t>() <= 1u << 22;
    }
    return !value.is_structured() || std::all_of(value.begin(), value.end(), is_small);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes bytes(data, size);
    const auto which = bytes.ConsumeIntegralInRange<std::size_t>(0, recorded().size() - 1);
    const Recorded& chosen = recorded()[which];
    Json input = chosen.input;
    const auto changes = bytes.ConsumeIntegralInRange<int>(0, 4);
    for (int i = 0; i < changes; ++i) {
        change(bytes, input);
    }
    if (chosen.allocates && !is_small(input)) {
        return 0;
    }
    try {
        const conformance::Operation& operation = conformance::operation(*chosen.category, input);
        operation.input.check(input, "input");
        operation.run(input);
    } catch (const conformance::LibraryError&) {
        fuzz::ok(KVPAGES_STATUS_INVALID_ARGUMENT);
    } catch (const std::exception&) {
        // Not understood by the program that asks.
    }
    return 0;
}
