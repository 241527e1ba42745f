# SPDX-License-Identifier: Apache-2.0
# marrow_build carries every private flag (warnings, sanitizers, visibility). Targets of this project
# link it inside BUILD_INTERFACE only: nothing of it reaches an installed target or a parent project.
find_package(Threads REQUIRED)

add_library(marrow_build INTERFACE)
target_compile_features(marrow_build INTERFACE cxx_std_20)
target_include_directories(marrow_build INTERFACE
  "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src")
target_link_libraries(marrow_build INTERFACE Threads::Threads ${CMAKE_DL_LIBS})
target_compile_definitions(marrow_build INTERFACE
  MARROW_VERSION_STRING="${PROJECT_VERSION}"
  MARROW_WITH_CUDA=$<BOOL:${MARROW_WITH_CUDA}>
  $<$<BOOL:${MARROW_CHECKED}>:MARROW_CHECKED=1>)

set(_warnings -Wall -Wextra)
if(MARROW_WERROR)
  list(APPEND _warnings -Werror)
endif()
target_compile_options(marrow_build INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${_warnings}>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # g++ 12 reports accesses inside its own std::string that do not happen (its bugs 105329, 105651); asan
  # watches the real ones.
  target_compile_options(marrow_build INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict;-Wno-array-bounds;-Wno-stringop-overflow;-Wno-stringop-overread>")
endif()
# -Wno-psabi: notes about passing vectors, no defect.
target_compile_options(marrow_build INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-psabi>)
if(MARROW_WITH_CUDA)
  target_compile_options(marrow_build INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>")
  if(MARROW_WERROR)
    target_compile_options(marrow_build INTERFACE "$<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>")
  endif()
endif()

if(MARROW_SANITIZE STREQUAL "address")
  set(_sanitize -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer)
elseif(MARROW_SANITIZE STREQUAL "thread")
  # g++ says at each atomic_thread_fence that TSan cannot see it; with -Werror that stops the build,
  # which is what we want: platform.cuh publishes through stores, never through a bare fence.
  set(_sanitize -fsanitize=thread -fno-omit-frame-pointer)
endif()
if(_sanitize)
  target_compile_options(marrow_build INTERFACE ${_sanitize})
  target_link_options(marrow_build INTERFACE ${_sanitize})
  target_compile_definitions(marrow_build INTERFACE MARROW_SANITIZED=1)
endif()
if(MARROW_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "MARROW_FUZZ needs clang (libFuzzer). Next: configure with -DCMAKE_CXX_COMPILER=clang++.")
  endif()
  set(_fuzz -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=all)
  target_compile_options(marrow_build INTERFACE ${_fuzz})
  target_link_options(marrow_build INTERFACE ${_fuzz})
endif()
if(MARROW_COVERAGE)
  target_compile_options(marrow_build INTERFACE --coverage -fprofile-update=atomic)
  target_link_options(marrow_build INTERFACE --coverage)
endif()

# Properties every target of ours gets.
function(marrow_target_defaults target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:marrow_build>)
  set_target_properties(${target} PROPERTIES
    CXX_STANDARD 20 CXX_STANDARD_REQUIRED ON CXX_EXTENSIONS OFF
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON)
  if(MARROW_CCACHE_PROGRAM)
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER "${MARROW_CCACHE_PROGRAM}")
  endif()
  if(MARROW_WITH_CUDA)
    set_target_properties(${target} PROPERTIES
      CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF
      CUDA_VISIBILITY_PRESET hidden
      CUDA_ARCHITECTURES "${MARROW_CUDA_ARCH}"
      CUDA_RUNTIME_LIBRARY Static)
    if(MARROW_CCACHE_PROGRAM)
      set_target_properties(${target} PROPERTIES CUDA_COMPILER_LAUNCHER "${MARROW_CCACHE_PROGRAM}")
    endif()
  endif()
endfunction()
