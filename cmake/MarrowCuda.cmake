# SPDX-License-Identifier: Apache-2.0
# Decides MARROW_WITH_CUDA. The library reaches the driver through dlopen, so one binary starts with
# or without a driver; nvcc is only needed to compile kernels.
set(MARROW_WITH_CUDA OFF)
if(NOT MARROW_CUDA STREQUAL "OFF" AND MARROW_SANITIZE STREQUAL "")
  # CMake looks on PATH only; the toolkit's usual place is /usr/local/cuda.
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(MARROW_NVCC nvcc PATHS /usr/local/cuda/bin ENV CUDA_PATH PATH_SUFFIXES bin)
    mark_as_advanced(MARROW_NVCC)
    if(MARROW_NVCC)
      set(ENV{CUDACXX} "${MARROW_NVCC}")
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
      message(STATUS "Marrow: nvcc ${CMAKE_CUDA_COMPILER_VERSION} is older than 12.4, CUDA code is left out")
    else()
      set(MARROW_WITH_CUDA ON)
      if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
        # A CMake older than this nvcc does not know that it speaks C++20.
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      endif()
    endif()
  endif()
  if(MARROW_WITH_CUDA)
    find_package(CUDAToolkit REQUIRED)  # here, so that every folder sees its imported targets
  endif()
  if(MARROW_CUDA STREQUAL "ON" AND NOT MARROW_WITH_CUDA)
    message(FATAL_ERROR
      "MARROW_CUDA=ON, but there is no working nvcc >= 12.4. Next: put nvcc on PATH or set CUDACXX, or use MARROW_CUDA=AUTO.")
  endif()
endif()
