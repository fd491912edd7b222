// What the program can be asked for. Each prints a part of a report in Markdown, and returns
// whether all targets were reached, where it has any. The first device's primary context is
// current.
#pragma once

#include <cstdint>
#include <string>

struct Options {
    std::uint64_t max_bytes = std::uint64_t{8} << 30;
    bool quick = false;   // few rounds: whether it works, not how fast it is
    bool judges = false;  // on a real device, at full length
};

/// Ends the program: it says what went wrong, and numbers would mean nothing.
[[noreturn]] void fail(const std::string& what);

/// Whether the driver of this process is the stand-in.
bool on_standin();

void print_device();
/// `context_ms` is what making the context took.
void print_first_load(double context_ms);
bool print_bandwidth(const Options& options);
bool print_host_times(const Options& options);
