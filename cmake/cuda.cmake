# The CUDA toolkit and what of NVIDIA's libraries the backend uses. Included where UPIPE_WITH_CUDA is ON; a build
# without it needs none of this. Headers of cudnn-frontend are fetched here, once, and only here.

set(UPIPE_CUDA_ARCHITECTURES "90a-real;90-virtual" CACHE STRING
  "What kernels are compiled for: code of sm_90a, and compute_90 PTX that later devices translate")
set(UPIPE_CUDNN_FRONTEND_INCLUDE "" CACHE PATH
  "Folder with cudnn_frontend.h; empty: fetched from the package index into the build folder")

# upipe_cuda_library(VARIABLE PART NAME..): the library of those names, beside the toolkit's others or in a folder of
# CMAKE_PREFIX_PATH, or an error that says what to install.
function(upipe_cuda_library variable part)
  find_library(${variable} NAMES ${ARGN} HINTS ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_ROOT}/lib
    PATH_SUFFIXES lib lib64)
  if(NOT ${variable})
    list(GET ARGN 0 name)
    message(FATAL_ERROR "UPIPE_WITH_CUDA: ${part} (${name}) is neither in ${CUDAToolkit_LIBRARY_DIR} nor in "
      "CMAKE_PREFIX_PATH; install it beside the toolkit, name its folder with -DCMAKE_PREFIX_PATH=FOLDER, or build "
      "with -DUPIPE_WITH_CUDA=OFF")
  endif()
endfunction()

# upipe_cuda_header(VARIABLE PART HEADER): the folder of a header, or the same error.
function(upipe_cuda_header variable part header)
  find_path(${variable} ${header} HINTS ${CUDAToolkit_INCLUDE_DIRS} PATH_SUFFIXES include)
  if(NOT ${variable})
    message(FATAL_ERROR "UPIPE_WITH_CUDA: ${header} of ${part} is neither in ${CUDAToolkit_INCLUDE_DIRS} nor in "
      "CMAKE_PREFIX_PATH; install its headers, or build with -DUPIPE_WITH_CUDA=OFF")
  endif()
endfunction()

# upipe_fetch_cudnn_frontend(VARIABLE): the include folder of the pinned cudnn-frontend, from its wheel.
function(upipe_fetch_cudnn_frontend variable)
  set(version 1.19.0)  # made for cuDNN 9.19, takes later ones of 9
  set(wheel nvidia_cudnn_frontend-${version}-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl)
  set(sha256 735c62e35b88943b83bbf03e364aa62d1cfa36f204a28b206163008a89cecbf6)
  set(folder ${CMAKE_BINARY_DIR}/cudnn-frontend-${version})
  if(NOT EXISTS ${folder}/include/cudnn_frontend.h)
    set(remedy "put the include folder of cudnn-frontend ${version} on this machine and name it with "
      "-DUPIPE_CUDNN_FRONTEND_INCLUDE=FOLDER, or build with -DUPIPE_WITH_CUDA=OFF")
    list(JOIN remedy "" remedy)
    find_package(Python3 COMPONENTS Interpreter)
    if(NOT Python3_FOUND)
      message(FATAL_ERROR "UPIPE_WITH_CUDA: no Python 3 whose pip could fetch cudnn-frontend's headers; ${remedy}")
    endif()
    file(MAKE_DIRECTORY ${folder})
    execute_process(
      COMMAND ${Python3_EXECUTABLE} -m pip download --quiet --disable-pip-version-check --no-deps
        --only-binary :all: --python-version 3.11 --implementation cp --abi cp311
        --platform manylinux_2_28_x86_64 --dest ${folder} nvidia-cudnn-frontend==${version}
      RESULT_VARIABLE failed ERROR_VARIABLE why OUTPUT_QUIET)
    if(failed)
      string(REGEX REPLACE "[\n ]+" " " why "${why}")
      message(FATAL_ERROR "UPIPE_WITH_CUDA: cudnn-frontend ${version} could not be fetched (${why}); ${remedy}")
    endif()
    file(SHA256 ${folder}/${wheel} found)
    if(NOT found STREQUAL sha256)
      file(REMOVE ${folder}/${wheel})
      message(FATAL_ERROR "UPIPE_WITH_CUDA: ${wheel} has SHA-256 ${found}, not ${sha256}; ${remedy}")
    endif()
    file(ARCHIVE_EXTRACT INPUT ${folder}/${wheel} DESTINATION ${folder} PATTERNS "include/*")
    file(REMOVE ${folder}/${wheel})
  endif()
  set(${variable} ${folder}/include PARENT_SCOPE)
endfunction()

if(NOT UPIPE_NVCC)
  message(FATAL_ERROR "UPIPE_WITH_CUDA: no nvcc in PATH, CUDA_HOME/bin or /usr/local/cuda/bin; install the CUDA "
    "toolkit 13, name its compiler with -DUPIPE_NVCC=PATH, or build with -DUPIPE_WITH_CUDA=OFF")
endif()
set(CMAKE_CUDA_COMPILER ${UPIPE_NVCC})
set(CMAKE_CUDA_ARCHITECTURES ${UPIPE_CUDA_ARCHITECTURES})
enable_language(CUDA)
if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)  # CMake 3.25 does not know that nvcc has it
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
cmake_path(GET UPIPE_NVCC PARENT_PATH CUDAToolkit_ROOT)
cmake_path(GET CUDAToolkit_ROOT PARENT_PATH CUDAToolkit_ROOT)
if(NOT TARGET CUDA::nvToolsExt)
  # CMake 3.25.1 marks it as deprecated without asking whether it is there, and CUDA 13 has none.
  add_library(CUDA::nvToolsExt INTERFACE IMPORTED)
endif()
find_package(CUDAToolkit 13 REQUIRED)

upipe_cuda_library(UPIPE_CUDART "the static CUDA runtime" cudart_static)
upipe_cuda_library(UPIPE_CUBLASLT cuBLASLt cublasLt libcublasLt.so.13)
upipe_cuda_library(UPIPE_NCCL NCCL nccl libnccl.so.2)
upipe_cuda_header(UPIPE_CUBLASLT_INCLUDE cuBLASLt cublasLt.h)
upipe_cuda_header(UPIPE_NCCL_INCLUDE NCCL nccl.h)
upipe_cuda_header(UPIPE_CUDNN_INCLUDE cuDNN cudnn_version.h)
file(STRINGS ${UPIPE_CUDNN_INCLUDE}/cudnn_version.h version_lines REGEX "#define CUDNN_(MAJOR|MINOR) ")
string(REGEX MATCHALL "[0-9]+" UPIPE_CUDNN_VERSION "${version_lines}")
list(JOIN UPIPE_CUDNN_VERSION "." UPIPE_CUDNN_VERSION)
if(UPIPE_CUDNN_VERSION VERSION_LESS 9.19 OR UPIPE_CUDNN_VERSION VERSION_GREATER_EQUAL 10)
  message(FATAL_ERROR "UPIPE_WITH_CUDA: ${UPIPE_CUDNN_INCLUDE} has cuDNN ${UPIPE_CUDNN_VERSION}; attention needs "
    "9.19 or a later 9: install it beside the toolkit, or build with -DUPIPE_WITH_CUDA=OFF")
endif()
if(NOT UPIPE_CUDNN_FRONTEND_INCLUDE)
  upipe_fetch_cudnn_frontend(UPIPE_CUDNN_FRONTEND_INCLUDE)
endif()
message(STATUS "CUDA ${CUDAToolkit_VERSION} for ${UPIPE_CUDA_ARCHITECTURES}, cuDNN ${UPIPE_CUDNN_VERSION}, "
  "NCCL of ${UPIPE_NCCL}")

# Headers as SYSTEM, so that warnings in them are nobody's. cuDNN's library is loaded at run time, when a job asks for
# its attention; so is the driver.
add_library(upipe_cudart INTERFACE)
target_include_directories(upipe_cudart SYSTEM INTERFACE ${CUDAToolkit_INCLUDE_DIRS})
target_link_libraries(upipe_cudart INTERFACE ${UPIPE_CUDART} Threads::Threads ${CMAKE_DL_LIBS} rt)
add_library(upipe_cublaslt INTERFACE)
target_include_directories(upipe_cublaslt SYSTEM INTERFACE ${UPIPE_CUBLASLT_INCLUDE})
target_link_libraries(upipe_cublaslt INTERFACE ${UPIPE_CUBLASLT} upipe_cudart)
add_library(upipe_cudnn INTERFACE)
target_include_directories(upipe_cudnn SYSTEM INTERFACE ${UPIPE_CUDNN_FRONTEND_INCLUDE} ${UPIPE_CUDNN_INCLUDE})
target_compile_definitions(upipe_cudnn INTERFACE NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING CUDNN_FRONTEND_SKIP_JSON_LIB)
target_link_libraries(upipe_cudnn INTERFACE upipe_cudart)
add_library(upipe_nccl INTERFACE)
target_include_directories(upipe_nccl SYSTEM INTERFACE ${UPIPE_NCCL_INCLUDE})
target_link_libraries(upipe_nccl INTERFACE ${UPIPE_NCCL} upipe_cudart)
