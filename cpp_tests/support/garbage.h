// Outputs that hold garbage before a call, to see what the call leaves in them.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_GARBAGE_H
#define KVPAGES_CPP_TESTS_SUPPORT_GARBAGE_H

#include <cstddef>
#include <cstring>

namespace support {

// A place for a number or a handle.
template <typename T>
struct Out {
    T value;

    Out() { std::memset(static_cast<void*>(&value), 0x5A, sizeof value); }
    T* operator&() { return &value; }
    bool is_zero() const {
        const T zero{};
        return std::memcmp(&value, &zero, sizeof value) == 0;
    }
};

// A place for a struct that grows.
template <typename T>
struct Info {
    T value;

    Info() {
        std::memset(static_cast<void*>(&value), 0x5A, sizeof value);
        value.struct_size = sizeof value;
    }
    T* operator&() { return &value; }
    bool is_zero() const {
        T zero;
        std::memset(static_cast<void*>(&zero), 0, sizeof zero);
        zero.struct_size = sizeof zero;
        return std::memcmp(&value, &zero, sizeof value) == 0;
    }
};

}  // namespace support

#endif
