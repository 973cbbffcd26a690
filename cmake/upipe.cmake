# The few functions every room's CMakeLists.txt uses. Rooms link PRIVATE unless their headers need it.

# upipe_library(NAME SOURCES ... PUBLIC ... PRIVATE ...): one static library of a room.
function(upipe_library name)
  cmake_parse_arguments(arg "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  if(arg_SOURCES)
    add_library(${name} STATIC ${arg_SOURCES})
    target_link_libraries(${name} PUBLIC upipe_flags ${arg_PUBLIC} PRIVATE ${arg_PRIVATE})
  else()
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE upipe_flags ${arg_PUBLIC})
  endif()
endfunction()

# upipe_binary(NAME SOURCES ... LINK ...): an executable in build/bin.
function(upipe_binary name)
  cmake_parse_arguments(arg "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE upipe_flags ${arg_LINK})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
endfunction()

# upipe_test(NAME LABEL unit SOURCES ... LINK ... [TIMEOUT s] [SERIAL]): one GoogleTest binary, one ctest.
function(upipe_test name)
  cmake_parse_arguments(arg "SERIAL" "LABEL;TIMEOUT" "SOURCES;LINK;ENVIRONMENT;DEPENDS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE upipe_flags ${arg_LINK} GTest::gmock GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  if(arg_DEPENDS)
    add_dependencies(${name} ${arg_DEPENDS})
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS ${arg_LABEL} TIMEOUT ${arg_TIMEOUT}
    ENVIRONMENT "UPIPE_BIN_DIR=${CMAKE_BINARY_DIR}/bin;UPIPE_SOURCE_DIR=${CMAKE_SOURCE_DIR};${arg_ENVIRONMENT}")
  if(arg_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
endfunction()
