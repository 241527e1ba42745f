# SPDX-License-Identifier: Apache-2.0
# Every switch of the build, in one place, all named MARROW_*.
set(MARROW_CUDA AUTO CACHE STRING "CUDA code: AUTO (when nvcc works), ON (required) or OFF")
set_property(CACHE MARROW_CUDA PROPERTY STRINGS AUTO ON OFF)
set(MARROW_CUDA_ARCH 90a-real CACHE STRING
    "CUDA architectures, as CMake spells them; a release takes '80-real;90a-real;100-real;100-virtual'")
set(MARROW_SANITIZE "" CACHE STRING "Empty, address (with UBSan) or thread")
set_property(CACHE MARROW_SANITIZE PROPERTY STRINGS "" address thread)
option(MARROW_SANITIZE_ALL "In a sanitizer build, also the tests marked asan-all or tsan-all" OFF)
option(MARROW_CHECKED "Check bounds, alignment, peers and contexts on the device, with file and line" OFF)
option(MARROW_WERROR "Warnings are errors" ${MARROW_TOP_LEVEL})
option(MARROW_TESTS "Build the tests" ${MARROW_TOP_LEVEL})
option(MARROW_INSTALL "Generate install rules" ON)
option(MARROW_SHARED "Build libmarrow as a shared library (OFF: static)" ON)
option(MARROW_COVERAGE "Instrument for gcov" OFF)
option(MARROW_FUZZ "Build the fuzz targets (needs clang)" OFF)
option(MARROW_CCACHE "Use ccache when it is there" ${MARROW_TOP_LEVEL})

if(NOT MARROW_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "MARROW_CUDA is '${MARROW_CUDA}'. Next: set it to AUTO, ON or OFF.")
endif()
if(NOT MARROW_SANITIZE MATCHES "^(|address|thread)$")
  message(FATAL_ERROR "MARROW_SANITIZE is '${MARROW_SANITIZE}'. Next: set it to address or thread, or leave it empty.")
endif()

if(MARROW_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(MARROW_CCACHE_PROGRAM ccache)
  mark_as_advanced(MARROW_CCACHE_PROGRAM)
endif()
