// What is called libcuda.so.1 and is no driver.
extern "C" {

// So that a program links to this library.
int kvpages_test_driver();
int kvpages_test_driver() { return 1; }

#ifdef KVPAGES_TEST_DRIVER_versioned
int cuDriverGetVersion(int* version);
int cuDriverGetVersion(int* version) {
    *version = 12040;
    return 0;
}
#endif
}
