// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>

#include "conformance/machine.hpp"

namespace marrow::conformance {
namespace {

class CpuMachine : public Machine {
 public:
  Place place(int, int) override { return Place::cpu(); }
  void* allocate(std::size_t bytes, bool) override {
    return std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  }
  void release(void* pointer, bool) override { std::free(pointer); }
};

}  // namespace

int gpu_count() { return 0; }

std::unique_ptr<Machine> make_machine() { return std::make_unique<CpuMachine>(); }

}  // namespace marrow::conformance
