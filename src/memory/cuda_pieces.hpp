// SPDX-License-Identifier: Apache-2.0
// Host pages registered with CUDA, and what can be found out about memory of others. (VMM and IPC mappings:
// cuda/mappings.hpp.)
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/fd.hpp"
#include "cuda/driver.hpp"
#include "cuda/mappings.hpp"
#include "marrow/marrow.hpp"

namespace marrow::memory {

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}
std::uint64_t page_size();

using cuda::enable_peer;
using cuda::IpcMapping;
using cuda::VmmMapping;

/// Host pages the GPUs of this process may reach: the whole pages around [pointer, pointer + bytes).
/// Ranges may overlap: see HostPages.
class HostRegistration {
 public:
  HostRegistration() = default;
  /// @throws Error(unsupported) when the program has registered a part of the range itself
  HostRegistration(std::shared_ptr<cuda::Context> context, void* pointer, std::uint64_t bytes);
  HostRegistration(HostRegistration&& other) noexcept { swap(other); }
  HostRegistration& operator=(HostRegistration&& other) noexcept {
    swap(other);
    return *this;
  }
  ~HostRegistration();

 private:
  void swap(HostRegistration& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(first_, other.first_);
    std::swap(end_, other.end_);
  }

  std::shared_ptr<cuda::Context> context_;
  std::uintptr_t first_ = 0;
  std::uintptr_t end_ = 0;  ///< 0: the program's registration serves
};

/// Where kernels see registered host memory.
std::byte* device_address(const cuda::Context& context, void* host);

/// What is known of memory that somebody else allocated.
struct PointerFacts {
  Memory kind = Memory::host;
  bool vmm_exportable = false;             ///< VMM memory made with a POSIX descriptor in mind
  std::uint64_t offset_in_allocation = 0;  ///< of the pointer, device memory only
  base::Fd file;                           ///< of shared host memory, when it is still open here
  std::uint64_t file_offset = 0;
};
/// @throws Error(unsupported) for managed memory, another GPU's memory, a range past its allocation
PointerFacts pointer_facts(const cuda::Context& context, void* pointer, std::uint64_t bytes);

/// Descriptor of existing VMM memory.
base::Fd export_existing(const cuda::Context& context, void* pointer);

}  // namespace marrow::memory
