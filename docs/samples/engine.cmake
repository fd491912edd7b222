# An engine's CMakeLists.txt, but for what it says of kvpages.
cmake_minimum_required(VERSION 3.22)
project(engine LANGUAGES C CXX)
add_executable(engine engine.cc)
# SAMPLE
