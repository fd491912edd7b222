// The smallest user of the C++ API.
#include <kvpages/kvpages.hpp>

#include <cstdio>

int main() {
    std::printf("kvpages %s from C++\n", kvpages_version());
    return 0;
}
