# A program must succeed and print the same on the host and on a device.
# PROGRAM: the program; DRIVER: a folder with a libcuda.so.1.
set(ENV{LD_LIBRARY_PATH} "${DRIVER}:$ENV{LD_LIBRARY_PATH}")

function(run device result)
  execute_process(COMMAND "${PROGRAM}" --device ${device}
    OUTPUT_VARIABLE output ERROR_VARIABLE errors RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${device}: ${status}\n${output}\n${errors}")
  endif()
  set(${result} "${output}" PARENT_SCOPE)
endfunction()

run(host on_host)
run(cuda:0 on_device)
if(NOT on_host STREQUAL on_device)
  message("${on_host}\n---- on a device ----\n${on_device}")
  message(FATAL_ERROR "a device gives another output than the host")
endif()
