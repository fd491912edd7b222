// SHA-256 (FIPS 180-4).
#pragma once

#include <cstddef>
#include <string>

namespace conformance {

// The digest in lower-case hexadecimal.
std::string sha256(const void* data, std::size_t bytes);

// Whether sha256() gives the digests of the standard's examples.
bool sha256_is_right();

}  // namespace conformance
