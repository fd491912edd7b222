// Tables of calls that must fail and change nothing.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_REFUSAL_H
#define KVPAGES_CPP_TESTS_SUPPORT_REFUSAL_H

#include "failure.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace support {

using Words = std::vector<std::string>;
using Bytes = std::vector<unsigned char>;

// An address that no `T` can have.
template <typename T>
T* odd(T* pointer) {
    return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(pointer) + 1);
}

template <typename T>
void append_bytes(Bytes& all, const T* data, std::size_t count) {
    const auto* first = reinterpret_cast<const unsigned char*>(data);
    all.insert(all.end(), first, first + count * sizeof(T));
}

// A call that must fail, on something of type `On`.
template <typename On>
struct Case {
    std::string name;
    std::int32_t status;
    std::string kind;
    Words words;
    std::function<std::int32_t(On&)> call;
};

// Makes every call, each of which must leave what `bytes` shows as it is.
template <typename On>
void expect_refused(On& on, const std::vector<Case<On>>& cases,
                    const std::function<Bytes(const On&)>& bytes) {
    const Bytes before = bytes(on);
    for (const Case<On>& c : cases) {
        SCOPED_TRACE(c.name);
        EXPECT_TRUE(fails(c.call(on), c.status, c.kind, c.words));
        EXPECT_TRUE(bytes(on) == before) << "something has changed";
    }
}

}  // namespace support

#endif
