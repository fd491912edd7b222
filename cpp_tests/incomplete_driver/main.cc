// Asks for devices where libcuda.so.1 lacks a function: incomplete_driver FUNCTION VERSION
#include <kvpages/kvpages.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

extern "C" int kvpages_test_driver();

namespace {

bool is_told(std::int32_t status, const char* function, const char* version) {
    const char* const kind = kvpages_last_error_kind();
    const char* const message = kvpages_last_error_message();
    std::printf("%s, %s: %s\n", kvpages_status_name(status), kind, message);
    return status == KVPAGES_STATUS_DEVICE_UNAVAILABLE &&
           std::strcmp(kind, "driver_incomplete") == 0 &&
           std::strstr(message, function) != nullptr && std::strstr(message, version) != nullptr;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3 || kvpages_test_driver() != 1) {
        return 2;
    }
    bool good = true;
    for (int round = 0; round < 2; ++round) {  // each call says so
        std::uint32_t count = 7;
        good = is_told(kvpages_device_count(&count), argv[1], argv[2]) && count == 0 && good;
        const kvpages_cuda_memory_config config = KVPAGES_CUDA_MEMORY_CONFIG_INIT;
        kvpages_memory* memory = nullptr;
        good = is_told(kvpages_memory_create_cuda(&config, &memory), argv[1], argv[2]) &&
               memory == nullptr && good;
    }
    return good ? 0 : 1;
}
