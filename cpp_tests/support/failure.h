// What a call that fails must leave behind.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_FAILURE_H
#define KVPAGES_CPP_TESTS_SUPPORT_FAILURE_H

#include <gtest/gtest.h>
#include <kvpages/kvpages.h>

#include <cstdint>
#include <string>
#include <vector>

namespace support {

struct Failure {
    std::int32_t status = 0;
    std::string kind;
    std::string message;
};

// The call just made; nothing else of kvpages may come between.
inline Failure failure_of(std::int32_t status) {
    Failure failure;
    failure.status = status;
    failure.message = kvpages_last_error_message();
    failure.kind = kvpages_last_error_kind();
    return failure;
}

// Whether the call just made failed with this status and kind, and a message that holds all words.
inline ::testing::AssertionResult fails(std::int32_t got, std::int32_t status,
                                        const std::string& kind,
                                        const std::vector<std::string>& words = {}) {
    const Failure failure = failure_of(got);
    const auto wrong = [&failure](const std::string& what) {
        return ::testing::AssertionFailure()
               << what << "; status " << kvpages_status_name(failure.status) << ", kind \""
               << failure.kind << "\", message \"" << failure.message << "\"";
    };
    if (failure.status != status) {
        return wrong(std::string("wanted ") + kvpages_status_name(status));
    }
    if (failure.kind != kind) {
        return wrong("wanted kind \"" + kind + "\"");
    }
    if (failure.message.empty()) {
        return wrong("there is no message");
    }
    for (const std::string& word : words) {
        if (failure.message.find(word) == std::string::npos) {
            return wrong("the message does not say \"" + word + "\"");
        }
    }
    return ::testing::AssertionSuccess();
}

}  // namespace support

#endif
