# A program must succeed and print the same with the options --device host and --device cuda:0.
# PROGRAM: the program; DRIVER: a folder with a libcuda.so.1.
set(ENV{LD_LIBRARY_PATH} "${DRIVER}:$ENV{LD_LIBRARY_PATH}")
foreach(device host cuda:0)
  execute_process(COMMAND "${PROGRAM}" --device ${device}
    OUTPUT_VARIABLE printed_${device} ERROR_VARIABLE errors RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${device}: ${status}\n${printed_${device}}\n${errors}")
  endif()
endforeach()
if(NOT printed_host STREQUAL "${printed_cuda:0}")
  message("${printed_host}\n---- cuda:0 ----\n${printed_cuda:0}")
  message(FATAL_ERROR "a device gives another output than the host")
endif()
