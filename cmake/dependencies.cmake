# Every third-party package, found once. Debian 12 names and versions: docs/traps.md.
find_package(Threads REQUIRED)
find_package(absl CONFIG REQUIRED)
find_package(Protobuf REQUIRED)
find_package(gRPC CONFIG REQUIRED)
find_package(prometheus-cpp CONFIG REQUIRED)
find_package(yaml-cpp CONFIG REQUIRED)
find_package(CLI11 CONFIG REQUIRED)
find_package(nlohmann_json CONFIG REQUIRED)
find_package(SQLite3 REQUIRED)
find_package(hwy CONFIG REQUIRED)
find_package(GTest CONFIG REQUIRED)
find_program(GRPC_CPP_PLUGIN grpc_cpp_plugin REQUIRED)
if(UPIPE_WITH_UCX)
  find_package(ucx CONFIG REQUIRED)
endif()

# OpenBLAS (pthread flavour): no CMake package in Debian 12.
find_path(OPENBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES x86_64-linux-gnu/openblas-pthread openblas-pthread REQUIRED)
find_library(OPENBLAS_LIBRARY NAMES openblas
  PATH_SUFFIXES x86_64-linux-gnu/openblas-pthread openblas-pthread REQUIRED)
add_library(upipe_openblas INTERFACE)
target_include_directories(upipe_openblas SYSTEM INTERFACE ${OPENBLAS_INCLUDE_DIR})
target_link_libraries(upipe_openblas INTERFACE ${OPENBLAS_LIBRARY})
