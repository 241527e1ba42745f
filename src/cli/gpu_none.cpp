// SPDX-License-Identifier: Apache-2.0
#include "cli/gpu.hpp"
#include "marrow/error.hpp"

namespace marrow::cli::gpu {
namespace {
[[noreturn]] void refuse() {
  throw Error(Code::unsupported, why_none(),
              "build with nvcc >= 12.4 (-DMARROW_CUDA=ON), or use --place cpu");
}
}  // namespace

int count() { return 0; }
std::string why_none() {
  return "this marrow was built without CUDA, so it has no kernels for GPUs";
}
std::string name(int) { refuse(); }
std::string driver() { return {}; }
void* create_stream(int) { refuse(); }
void destroy_stream(int, void*) noexcept {}
void synchronize(int, void*) { refuse(); }
void* allocate(int, std::size_t, bool) { refuse(); }
void release(int, void*, bool) noexcept {}
void copy(int, void*, void*, const void*, std::size_t) { refuse(); }

Events::Events(int device, std::size_t) : device_(device) { refuse(); }
Events::~Events() = default;
void Events::record(void*, std::size_t) { refuse(); }
double Events::elapsed_us(std::size_t, std::size_t) const { refuse(); }
Graph::Graph(int device, void*, const std::function<void()>&) : device_(device) { refuse(); }
Graph::~Graph() = default;
void Graph::launch(void*) { refuse(); }

}  // namespace marrow::cli::gpu
