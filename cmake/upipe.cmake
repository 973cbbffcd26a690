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

# upipe_test(NAME LABEL unit SOURCES ... LINK ... [TIMEOUT s] [SERIAL] [TSAN]): one GoogleTest binary, one ctest; with
# TSAN another one, NAME_tsan, that runs it in the side build of the preset tsan.
function(upipe_test name)
  cmake_parse_arguments(arg "SERIAL;TSAN" "LABEL;TIMEOUT" "SOURCES;LINK;ENVIRONMENT;DEPENDS" ${ARGN})
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE upipe_flags ${arg_LINK} GTest::gmock GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  if(arg_DEPENDS)
    add_dependencies(${name} ${arg_DEPENDS})
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  set(environment
    "UPIPE_BIN_DIR=${CMAKE_BINARY_DIR}/bin;UPIPE_SOURCE_DIR=${CMAKE_SOURCE_DIR};${arg_ENVIRONMENT}")
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES LABELS ${arg_LABEL} TIMEOUT ${arg_TIMEOUT} ENVIRONMENT "${environment}")
  if(arg_SERIAL)
    set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
  endif()
  if(arg_TSAN AND UPIPE_SANITIZE STREQUAL thread)
    add_dependencies(side_programs ${name})
  elseif(arg_TSAN AND NOT UPIPE_SANITIZE)
    add_test(NAME ${name}_tsan COMMAND ${CMAKE_BINARY_DIR}/side/tsan/tests/${name})
    set_tests_properties(${name}_tsan PROPERTIES LABELS tsan TIMEOUT 300 ENVIRONMENT "${environment}"
      FIXTURES_REQUIRED tsan)
  endif()
endfunction()

# upipe_emulated_kernels(NAME SOURCES ../x.cu ...): CUDA sources built by the C++ compiler against the emulator.
function(upipe_emulated_kernels name)
  cmake_parse_arguments(arg "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  set_source_files_properties(${arg_SOURCES} PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-x;c++")
  upipe_library(${name} SOURCES ${arg_SOURCES} PUBLIC upipe_cuda_emulator ${arg_PUBLIC} PRIVATE ${arg_PRIVATE})
endfunction()

# upipe_side_build(PRESET): this tree built once more, as PRESET of CMakePresets.json says, in <build>/side/PRESET; only
# its target side_programs. The fixture of the tests that run programs of it, so it is built when one of them is run.
function(upipe_side_build preset)
  set(folder ${CMAKE_BINARY_DIR}/side/${preset})
  add_test(NAME ${preset}_build WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} COMMAND bash -c
    "cmake --preset ${preset} -B ${folder} && cmake --build ${folder} --target side_programs")
  set_tests_properties(${preset}_build PROPERTIES
    LABELS ${preset} TIMEOUT 2400 RUN_SERIAL TRUE FIXTURES_SETUP ${preset})
endfunction()

# upipe_fuzz(NAME SOURCES .. LINK .. BYTES n CORPUS folder.. [DICTIONARY file]): a libFuzzer program of the preset fuzz,
# for inputs of up to n bytes; elsewhere the ctest that runs it. Inputs in CORPUS are kept with the sources.
function(upipe_fuzz name)
  cmake_parse_arguments(arg "" "DICTIONARY;BYTES" "SOURCES;LINK;CORPUS" ${ARGN})
  if(UPIPE_SANITIZE MATCHES fuzzer)
    add_executable(${name} ${arg_SOURCES})
    target_link_libraries(${name} PRIVATE upipe_flags ${arg_LINK} -fsanitize=fuzzer)
    set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fuzz)
    add_dependencies(side_programs ${name})
  elseif(UPIPE_CLANG AND NOT UPIPE_SANITIZE)
    if(arg_DICTIONARY)
      set(dictionary -dict=${CMAKE_CURRENT_SOURCE_DIR}/${arg_DICTIONARY})
    endif()
    list(TRANSFORM arg_CORPUS PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/)
    add_test(NAME ${name} COMMAND ${CMAKE_SOURCE_DIR}/tests/fuzz/fuzz.sh
      ${CMAKE_BINARY_DIR}/side/fuzz/fuzz/${name} -max_len=${arg_BYTES} ${dictionary} ${arg_CORPUS})
    # Without TIMEOUT: it ends by itself, after as long as it was told to run.
    set_tests_properties(${name} PROPERTIES LABELS fuzz FIXTURES_REQUIRED fuzz)
  endif()
endfunction()
