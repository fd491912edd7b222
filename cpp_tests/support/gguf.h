// Small GGUF files for tests: written into a string, and from there into a temporary file.
#ifndef KVPAGES_CPP_TESTS_SUPPORT_GGUF_H
#define KVPAGES_CPP_TESTS_SUPPORT_GGUF_H

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

namespace support {

// Appends numbers as they lie in memory, and strings after their length.
class GgufBytes {
public:
    template <typename T>
    GgufBytes& number(T value) {
        text.append(reinterpret_cast<const char*>(&value), sizeof value);
        return *this;
    }

    GgufBytes& string(const std::string& value) {
        number<std::uint64_t>(value.size());
        text += value;
        return *this;
    }

    std::string text;
};

class GgufWriter {
public:
    GgufBytes metadata;
    std::uint32_t magic = 0x46554747;
    std::uint32_t version = 3;
    std::uint64_t more_values = 0;  // that the header counts, but that are not there
    std::uint64_t more_tensors = 0;

    void uint32(const std::string& key, std::uint32_t value) { begin(key, 4).number(value); }
    void int32(const std::string& key, std::int32_t value) { begin(key, 5).number(value); }
    void float32(const std::string& key, float value) { begin(key, 6).number(value); }
    void boolean(const std::string& key, bool value) {
        begin(key, 7).number<std::uint8_t>(value ? 1 : 0);
    }
    void string(const std::string& key, const std::string& value) { begin(key, 8).string(value); }
    void uint64(const std::string& key, std::uint64_t value) { begin(key, 10).number(value); }

    void strings(const std::string& key, const std::vector<std::string>& values) {
        GgufBytes& bytes = begin(key, 9);
        bytes.number<std::uint32_t>(8).number<std::uint64_t>(values.size());
        for (const std::string& value : values) bytes.string(value);
    }

    void int32s(const std::string& key, const std::vector<std::int32_t>& values) {
        GgufBytes& bytes = begin(key, 9);
        bytes.number<std::uint32_t>(5).number<std::uint64_t>(values.size());
        for (const std::int32_t value : values) bytes.number(value);
    }

    // A value of any type, for what the others cannot write; its bytes go after it.
    GgufBytes& begin(const std::string& key, std::uint32_t type) {
        ++num_values_;
        return metadata.string(key).number(type);
    }

    // A tensor at the next free offset.
    void tensor(const std::string& name, const std::vector<std::uint64_t>& shape,
                std::uint32_t type, const std::string& data) {
        tensor_at(name, shape, type, data_.size());
        data_ += data;
        pad(data_);
    }

    void tensor_at(const std::string& name, const std::vector<std::uint64_t>& shape,
                   std::uint32_t type, std::uint64_t offset) {
        ++num_tensors_;
        tensors_.string(name).number(static_cast<std::uint32_t>(shape.size()));
        for (const std::uint64_t size : shape) tensors_.number(size);
        tensors_.number(type).number(offset);
    }

    std::string bytes() const {
        GgufBytes out;
        out.number(magic).number(version);
        out.number(num_tensors_ + more_tensors).number(num_values_ + more_values);
        out.text += metadata.text + tensors_.text;
        if (!data_.empty()) pad(out.text);
        return out.text + data_;
    }

private:
    static void pad(std::string& text) { text.resize((text.size() + 31) / 32 * 32); }

    GgufBytes tensors_;
    std::string data_;
    std::uint64_t num_values_ = 0;
    std::uint64_t num_tensors_ = 0;
};

// A file that lives as long as this.
class TemporaryFile {
public:
    explicit TemporaryFile(const std::string& bytes) {
        static int number = 0;
        path_ = ::testing::TempDir() + "kvpages-" + std::to_string(::getpid()) + "-" +
                std::to_string(number++);
        std::ofstream(path_, std::ios::binary) << bytes;
    }
    ~TemporaryFile() { std::remove(path_.c_str()); }
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;

    const std::string& path() const { return path_; }

private:
    std::string path_;
};

}  // namespace support

#endif
