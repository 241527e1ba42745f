// SPDX-License-Identifier: Apache-2.0
// Takes the build of a kernel that fits the place.
#include "cli/kernels/builds.hpp"
#include "marrow/error.hpp"

namespace marrow::cli {

#if MARROW_WITH_CUDA
#define MARROW_CLI_ON_GPU(function) by_nvcc::function(place, shape, arguments)
#else
#define MARROW_CLI_ON_GPU(function)                                                \
  throw Error(Code::unsupported,                                                   \
              "this marrow was built without CUDA, so it has no kernels for GPUs", \
              "build with nvcc >= 12.4 (-DMARROW_CUDA=ON), or use --place cpu")
#endif

#define MARROW_CLI_CHOOSE(function, kernel, Arguments)                         \
  void function(const Place& place, Shape shape, const Arguments& arguments) { \
    if (place.on_gpu()) {                                                      \
      MARROW_CLI_ON_GPU(function);                                             \
    } else {                                                                   \
      by_gxx::function(place, shape, arguments);                               \
    }                                                                          \
  }
MARROW_CLI_KERNELS(MARROW_CLI_CHOOSE)

}  // namespace marrow::cli
