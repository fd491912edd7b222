// Statements of a main().
#include <kvpages/kvpages.hpp>

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

int main() {
    // SAMPLE
}
