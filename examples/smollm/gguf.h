// Reads GGUF, the file format of llama.cpp's models: metadata first, then tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace smollm {

/// How the numbers of a tensor are stored. The values are those of the file.
enum class TensorType : std::uint32_t { f32 = 0, f16 = 1, q4_1 = 3, q8_0 = 8, q6_k = 14 };

const char* name_of(TensorType type);

/// Text of a file in quotes, made fit for an error: short and printable.
std::string quoted(std::string_view text);

/// A matrix whose rows lie one after the other, each a whole number of blocks of its type.
struct GgufTensor {
    std::string name;
    TensorType type;
    std::vector<std::uint64_t> shape;  ///< innermost first, as in the file; none is zero
    const std::uint8_t* data;          ///< in the file's mapping, aligned to at least 8 bytes
    std::uint64_t size_bytes;

    std::uint64_t num_columns() const { return shape[0]; }
    std::uint64_t num_rows() const;
};

/// A GGUF file, mapped into memory. What it hands out is valid as long as it lives.
///
/// Nothing in the file is trusted: whatever is wrong with it is a std::runtime_error that names
/// the file, the place and the fault. Only a file that shrinks while it is mapped is beyond help.
class GgufFile {
public:
    explicit GgufFile(const std::string& path);

    const std::string& path() const { return path_; }

    // Metadata. A key that is missing or holds another type is an error that says so.

    bool has(std::string_view key) const { return values_.count(key) != 0; }
    std::uint64_t uint(std::string_view key) const;  ///< of any integer type, not negative
    double number(std::string_view key) const;       ///< of any number type
    bool flag(std::string_view key) const;
    std::string_view string(std::string_view key) const;
    std::vector<std::string_view> strings(std::string_view key) const;
    std::vector<std::int64_t> integers(std::string_view key) const;

    bool has_tensor(std::string_view name) const { return tensors_.count(name) != 0; }
    const GgufTensor& tensor(std::string_view name) const;

private:
    class Reader;

    struct Unmap {
        std::size_t size_bytes;
        void operator()(const std::uint8_t* data) const;
    };

    /// Where a value lies in the file, and what it is.
    struct Value {
        std::uint32_t type = 0;
        std::uint32_t element_type = 0;  ///< of an array
        std::uint64_t count = 0;         ///< of an array
        std::uint64_t at = 0;            ///< of the value, or of an array's first element
    };

    /// A tensor as the header describes it. Where offsets count from is known after the last one.
    struct TensorAndOffset {
        GgufTensor tensor;
        std::uint64_t offset = 0;
    };

    void map();
    void read_metadata(Reader& reader, std::uint64_t count);
    Value read_value(Reader& reader) const;
    void read_tensors(Reader& reader, std::uint64_t count);
    TensorAndOffset read_tensor(Reader& reader) const;

    const Value& value(std::string_view key) const;
    Reader reader_at(std::uint64_t at) const;
    [[noreturn]] void fail(const std::string& fault) const;
    [[noreturn]] void fail_type(std::string_view key, const char* wanted) const;

    std::string path_;
    std::unique_ptr<const std::uint8_t[], Unmap> data_;
    std::map<std::string_view, Value> values_;
    std::map<std::string, GgufTensor, std::less<>> tensors_;
};

}  // namespace smollm
