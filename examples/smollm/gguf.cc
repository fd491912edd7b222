#include "gguf.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>

namespace smollm {
namespace {

enum ValueType : std::uint32_t {
    kUint8,
    kInt8,
    kUint16,
    kInt16,
    kUint32,
    kInt32,
    kFloat32,
    kBool,
    kString,
    kArray,
    kUint64,
    kInt64,
    kFloat64,
    kNumValueTypes
};

struct ValueTypeInfo {
    const char* name;
    std::uint64_t min_bytes;  // of one value; a string has at least its length
};

constexpr ValueTypeInfo kValueTypes[kNumValueTypes] = {
    {"uint8", 1},  {"int8", 1},    {"uint16", 2}, {"int16", 2},  {"uint32", 4},
    {"int32", 4},  {"float32", 4}, {"bool", 1},   {"string", 8}, {"array", 0},
    {"uint64", 8}, {"int64", 8},   {"float64", 8}};

/// Numbers of a quantised type come in blocks that share their scale.
struct Block {
    const char* name;
    std::uint64_t num_numbers;
    std::uint64_t num_bytes;
};

/// The block of a type; its name is null if this example does not read the type.
Block block_of(std::uint32_t type) {
    switch (static_cast<TensorType>(type)) {
        case TensorType::f32:
            return {"f32", 1, 4};
        case TensorType::f16:
            return {"f16", 1, 2};
        case TensorType::q4_1:
            return {"q4_1", 32, 20};
        case TensorType::q8_0:
            return {"q8_0", 32, 34};
        case TensorType::q6_k:
            return {"q6_k", 256, 210};
    }
    return {nullptr, 0, 0};
}

constexpr std::size_t kMaxNameBytes = 64;
constexpr std::uint32_t kMaxDimensions = 4;
constexpr std::uint64_t kDefaultAlignment = 32;
constexpr std::uint64_t kMaxAlignment = 1 << 20;
constexpr std::uint64_t kMaxNumbers = std::uint64_t{1} << 56;  // times 8 bytes does not overflow

}  // namespace

std::string quoted(std::string_view text) {
    constexpr std::size_t max_shown = 64;
    std::string out = "'";
    for (const char c : text.substr(0, max_shown)) out += c >= ' ' && c <= '~' ? c : '?';
    return out + (text.size() > max_shown ? "...'" : "'");
}

const char* name_of(TensorType type) {
    const char* name = block_of(static_cast<std::uint32_t>(type)).name;
    return name != nullptr ? name : "unknown";
}

std::uint64_t GgufTensor::num_rows() const {
    return std::accumulate(shape.begin() + 1, shape.end(), std::uint64_t{1},
                           std::multiplies<std::uint64_t>());
}

/// Reads forward through the file, and never past its end.
class GgufFile::Reader {
public:
    Reader(const GgufFile& file, std::uint64_t at) : file_(file), at_(at) {}

    std::uint64_t at() const { return at_; }
    std::uint64_t num_left() const { return file_.data_.get_deleter().size_bytes - at_; }

    template <typename T>
    T number(const char* what) {
        T out;
        std::memcpy(&out, take(sizeof out, what), sizeof out);
        return out;
    }

    std::string_view string(const char* what) {
        const auto size = number<std::uint64_t>(what);
        return {reinterpret_cast<const char*>(take(size, what)), static_cast<std::size_t>(size)};
    }

    void skip(std::uint64_t num_bytes, const char* what) { take(num_bytes, what); }

    /// An integer of any type, as long as it fits.
    std::int64_t integer(std::uint32_t type) {
        constexpr const char* what = "an integer";
        switch (type) {
            case kUint8:
                return number<std::uint8_t>(what);
            case kInt8:
                return number<std::int8_t>(what);
            case kUint16:
                return number<std::uint16_t>(what);
            case kInt16:
                return number<std::int16_t>(what);
            case kUint32:
                return number<std::uint32_t>(what);
            case kInt32:
                return number<std::int32_t>(what);
            case kInt64:
                return number<std::int64_t>(what);
            default:
                break;
        }
        const auto value = number<std::uint64_t>(what);
        constexpr auto max = std::numeric_limits<std::int64_t>::max();
        if (value > static_cast<std::uint64_t>(max)) fail("an integer above 2^63 - 1");
        return static_cast<std::int64_t>(value);
    }

    [[noreturn]] void fail(const std::string& fault) const {
        file_.fail("byte " + std::to_string(at_) + ": " + fault);
    }

private:
    const std::uint8_t* take(std::uint64_t num_bytes, const char* what) {
        if (num_bytes > num_left()) {
            fail(std::string(what) + " needs " + std::to_string(num_bytes) + " bytes, but only " +
                 std::to_string(num_left()) + " are left");
        }
        const std::uint8_t* out = file_.data_.get() + at_;
        at_ += num_bytes;
        return out;
    }

    const GgufFile& file_;
    std::uint64_t at_;
};

namespace {

bool is_integer(std::uint32_t type) { return type <= kInt32 || type == kUint64 || type == kInt64; }

}  // namespace

GgufFile::GgufFile(const std::string& path) : path_(path) {
    map();
    Reader reader = reader_at(0);
    const auto magic = reader.number<std::uint32_t>("the magic number");
    if (magic != 0x46554747) fail("not a GGUF file: it does not start with 'GGUF'");
    const auto version = reader.number<std::uint32_t>("the version");
    if (version != 2 && version != 3) {
        fail("GGUF version " + std::to_string(version) + ", but only 2 and 3 can be read" +
             (version == 0x03000000 ? " (the file is big-endian)" : ""));
    }
    const auto num_tensors = reader.number<std::uint64_t>("the number of tensors");
    const auto num_values = reader.number<std::uint64_t>("the number of metadata values");
    read_metadata(reader, num_values);
    read_tensors(reader, num_tensors);
}

void GgufFile::map() {
    // Non-blocking: to open a pipe would else wait for somebody who writes to it.
    const int fd = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) fail(std::string("cannot open: ") + std::strerror(errno));
    struct stat info = {};
    const bool is_file = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    const auto size = static_cast<std::size_t>(info.st_size);
    void* mapped = MAP_FAILED;
    if (is_file && size > 0) mapped = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    const int error = errno;
    ::close(fd);
    if (!is_file) fail("not a regular file");
    if (size == 0) fail("the file is empty");
    if (mapped == MAP_FAILED) fail(std::string("cannot map: ") + std::strerror(error));
    data_ = {static_cast<const std::uint8_t*>(mapped), Unmap{size}};
}

void GgufFile::Unmap::operator()(const std::uint8_t* data) const {
    ::munmap(const_cast<std::uint8_t*>(data), size_bytes);
}

void GgufFile::read_metadata(Reader& reader, std::uint64_t count) {
    // The count is not trusted: it only ends the loop, and so does the end of the file.
    for (std::uint64_t i = 0; i < count; ++i) {
        const std::string_view key = reader.string("a metadata key");
        const Value value = read_value(reader);
        if (!values_.emplace(key, value).second) {
            reader.fail("metadata " + quoted(key) + " is there twice");
        }
    }
}

GgufFile::Value GgufFile::read_value(Reader& reader) const {
    const auto read_type = [&reader] {
        const auto type = reader.number<std::uint32_t>("a metadata type");
        if (type >= kNumValueTypes) {
            reader.fail("metadata of unknown type " + std::to_string(type));
        }
        return type;
    };
    Value value;
    value.type = read_type();
    value.element_type = value.type;
    value.count = 1;
    if (value.type == kArray) {
        value.element_type = read_type();
        if (value.element_type == kArray) reader.fail("arrays of arrays cannot be read");
        value.count = reader.number<std::uint64_t>("the length of an array");
    }
    value.at = reader.at();
    const std::uint64_t min_bytes = kValueTypes[value.element_type].min_bytes;
    if (value.count > reader.num_left() / min_bytes) {
        reader.fail(std::to_string(value.count) + " values of type " +
                    kValueTypes[value.element_type].name + ", but only " +
                    std::to_string(reader.num_left()) + " bytes are left");
    }
    if (value.element_type == kString) {
        for (std::uint64_t i = 0; i < value.count; ++i) reader.string("a string");
    } else {
        reader.skip(value.count * min_bytes, "a metadata value");
    }
    return value;
}

void GgufFile::read_tensors(Reader& reader, std::uint64_t count) {
    std::vector<TensorAndOffset> read;
    for (std::uint64_t i = 0; i < count; ++i) read.push_back(read_tensor(reader));

    std::uint64_t alignment = kDefaultAlignment;
    if (has("general.alignment")) alignment = uint("general.alignment");
    if (alignment == 0 || alignment % 8 != 0 || alignment > kMaxAlignment) {
        fail("an alignment of " + std::to_string(alignment) + " bytes; it must be a multiple of 8");
    }
    if (read.empty()) return;
    const std::uint64_t padding = (alignment - reader.at() % alignment) % alignment;
    reader.skip(padding, "the padding before the tensors");
    for (TensorAndOffset& next : read) {
        GgufTensor& tensor = next.tensor;
        const std::uint64_t num_left = reader.num_left();
        if (next.offset % alignment != 0 || next.offset > num_left ||
            tensor.size_bytes > num_left - next.offset) {
            fail("tensor " + quoted(tensor.name) + ": " + std::to_string(tensor.size_bytes) +
                 " bytes at offset " + std::to_string(next.offset) + ", but the offset must be a " +
                 "multiple of " + std::to_string(alignment) + " and there are " +
                 std::to_string(num_left) + " bytes of tensors");
        }
        tensor.data = data_.get() + reader.at() + next.offset;
        const std::string name = tensor.name;
        if (!tensors_.emplace(name, std::move(tensor)).second) {
            fail("tensor " + quoted(name) + " is there twice");
        }
    }
}

GgufFile::TensorAndOffset GgufFile::read_tensor(Reader& reader) const {
    GgufTensor tensor = {};
    const std::string_view name = reader.string("a tensor's name");
    if (name.size() > kMaxNameBytes) {
        reader.fail("the name of a tensor has " + std::to_string(name.size()) +
                    " bytes, more than " + std::to_string(kMaxNameBytes));
    }
    tensor.name = name;
    const auto fail_tensor = [&](const std::string& fault) {
        reader.fail("tensor " + quoted(tensor.name) + fault);
    };

    const auto num_dimensions = reader.number<std::uint32_t>("a tensor's number of dimensions");
    if (num_dimensions < 1 || num_dimensions > kMaxDimensions) {
        fail_tensor(" has " + std::to_string(num_dimensions) + " dimensions, not 1 to 4");
    }
    std::uint64_t num_numbers = 1;
    for (std::uint32_t i = 0; i < num_dimensions; ++i) {
        const auto size = reader.number<std::uint64_t>("a tensor's shape");
        if (size == 0 || size > kMaxNumbers / num_numbers) {
            fail_tensor(" is empty or larger than any memory");
        }
        num_numbers *= size;
        tensor.shape.push_back(size);
    }

    const auto type = reader.number<std::uint32_t>("a tensor's type");
    const Block block = block_of(type);
    if (block.name == nullptr) {
        fail_tensor(" is of type " + std::to_string(type) +
                    " of ggml, but only f32, f16, q4_1, q8_0 and q6_k can be read");
    }
    if (tensor.num_columns() % block.num_numbers != 0) {
        fail_tensor(" has rows of " + std::to_string(tensor.num_columns()) + " numbers, but type " +
                    block.name + " has blocks of " + std::to_string(block.num_numbers));
    }
    tensor.type = static_cast<TensorType>(type);
    tensor.size_bytes = num_numbers / block.num_numbers * block.num_bytes;
    const auto offset = reader.number<std::uint64_t>("a tensor's offset");
    return {std::move(tensor), offset};
}

std::uint64_t GgufFile::uint(std::string_view key) const {
    const Value& found = value(key);
    if (!is_integer(found.type)) fail_type(key, "an integer");
    const std::int64_t out = reader_at(found.at).integer(found.type);
    if (out < 0) fail("metadata " + quoted(key) + " is negative: " + std::to_string(out));
    return static_cast<std::uint64_t>(out);
}

double GgufFile::number(std::string_view key) const {
    const Value& found = value(key);
    Reader reader = reader_at(found.at);
    if (found.type == kFloat32) return static_cast<double>(reader.number<float>("a number"));
    if (found.type == kFloat64) return reader.number<double>("a number");
    if (!is_integer(found.type)) fail_type(key, "a number");
    return static_cast<double>(reader.integer(found.type));
}

bool GgufFile::flag(std::string_view key) const {
    const Value& found = value(key);
    if (found.type != kBool) fail_type(key, "a bool");
    return reader_at(found.at).number<std::uint8_t>("a bool") != 0;
}

std::string_view GgufFile::string(std::string_view key) const {
    const Value& found = value(key);
    if (found.type != kString) fail_type(key, "a string");
    return reader_at(found.at).string("a string");
}

std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
    const Value& found = value(key);
    if (found.type != kArray || found.element_type != kString) {
        fail_type(key, "an array of strings");
    }
    std::vector<std::string_view> out;
    out.reserve(found.count);
    Reader reader = reader_at(found.at);
    for (std::uint64_t i = 0; i < found.count; ++i) out.push_back(reader.string("a string"));
    return out;
}

std::vector<std::int64_t> GgufFile::integers(std::string_view key) const {
    const Value& found = value(key);
    if (found.type != kArray || !is_integer(found.element_type)) {
        fail_type(key, "an array of integers");
    }
    std::vector<std::int64_t> out;
    out.reserve(found.count);
    Reader reader = reader_at(found.at);
    for (std::uint64_t i = 0; i < found.count; ++i) {
        out.push_back(reader.integer(found.element_type));
    }
    return out;
}

const GgufTensor& GgufFile::tensor(std::string_view name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail("there is no tensor " + quoted(name));
    return found->second;
}

const GgufFile::Value& GgufFile::value(std::string_view key) const {
    const auto found = values_.find(key);
    if (found == values_.end()) fail("there is no metadata " + quoted(key));
    return found->second;
}

GgufFile::Reader GgufFile::reader_at(std::uint64_t at) const { return {*this, at}; }

void GgufFile::fail(const std::string& fault) const {
    throw std::runtime_error(path_ + ": " + fault);
}

void GgufFile::fail_type(std::string_view key, const char* wanted) const {
    const Value& found = value(key);
    fail("metadata " + quoted(key) + " is " + (found.type == kArray ? "an array of " : "of type ") +
         kValueTypes[found.element_type].name + ", but " + wanted + " is needed");
}

}  // namespace smollm
