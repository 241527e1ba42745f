// SPDX-License-Identifier: Apache-2.0
// Owners of the three ways GPU-visible memory comes about: a VMM mapping, an opened legacy IPC
// handle, a registration of host pages. Each frees itself with its context current.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "base/fd.hpp"
#include "cuda/driver.hpp"
#include "marrow/marrow.hpp"

namespace marrow::memory {

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}
std::uint64_t page_size();

/// Physical GPU memory mapped at an address of this process, readable and writable by one GPU.
class VmmMapping {
 public:
  VmmMapping() = default;
  /// New memory on the context's GPU, with a descriptor. Size rounded up to the GPU's granularity.
  static VmmMapping create(std::shared_ptr<cuda::Context> context, std::uint64_t bytes);
  /// Another process's memory by its descriptor (of whatever GPU); at least `bytes` of it.
  static VmmMapping import(std::shared_ptr<cuda::Context> context, int fd, std::uint64_t bytes);
  VmmMapping(VmmMapping&& other) noexcept { swap(other); }
  VmmMapping& operator=(VmmMapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~VmmMapping();

  cuda::DevicePointer address() const { return address_; }
  std::uint64_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

 private:
  void swap(VmmMapping& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(fd_, other.fd_);
    std::swap(handle_, other.handle_);
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    std::swap(mapped_, other.mapped_);
  }
  void map_at_new_address(std::uint64_t granularity);

  std::shared_ptr<cuda::Context> context_;
  base::Fd fd_;
  cuda::AllocationHandle handle_ = 0;
  cuda::DevicePointer address_ = 0;
  std::uint64_t bytes_ = 0;
  bool mapped_ = false;
};

/// Another process's cudaMalloc memory.
class IpcMapping {
 public:
  IpcMapping() = default;
  IpcMapping(std::shared_ptr<cuda::Context> context, const std::uint8_t (&handle)[64]);
  IpcMapping(IpcMapping&& other) noexcept
      : context_(std::move(other.context_)), address_(std::exchange(other.address_, 0)) {}
  IpcMapping& operator=(IpcMapping&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(address_, other.address_);
    return *this;
  }
  ~IpcMapping();
  cuda::DevicePointer address() const { return address_; }

 private:
  std::shared_ptr<cuda::Context> context_;
  cuda::DevicePointer address_ = 0;
};

/// Host pages the GPUs of this process may reach. Whole pages around [pointer, pointer + bytes).
class HostRegistration {
 public:
  HostRegistration() = default;
  HostRegistration(std::shared_ptr<cuda::Context> context, void* pointer, std::uint64_t bytes);
  HostRegistration(HostRegistration&& other) noexcept
      : context_(std::move(other.context_)), pages_(std::exchange(other.pages_, nullptr)) {}
  HostRegistration& operator=(HostRegistration&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(pages_, other.pages_);
    return *this;
  }
  ~HostRegistration();

 private:
  std::shared_ptr<cuda::Context> context_;
  void* pages_ = nullptr;
};

/// Where kernels see registered host memory.
std::byte* device_address(const cuda::Context& context, void* host);

/// What is known of memory that somebody else allocated.
struct PointerFacts {
  Memory kind = Memory::host;
  bool known_to_cuda = false;              ///< device memory, or registered host memory
  bool vmm_exportable = false;             ///< VMM memory made with a POSIX descriptor in mind
  std::uint64_t offset_in_allocation = 0;  ///< of the pointer, device memory only
  base::Fd file;                           ///< of shared host memory, when it is still open here
  std::uint64_t file_offset = 0;
};
/// @throws Error(unsupported) for managed memory, another GPU's memory, a range past its allocation
PointerFacts pointer_facts(const cuda::Context& context, void* pointer, std::uint64_t bytes);

/// Descriptor of existing VMM memory.
base::Fd export_existing(const cuda::Context& context, void* pointer);

/// Lets kernels of `context` reach memory of GPU `owner` in this process.
/// @throws Error(unsupported) naming both GPUs when they have no peer access
void enable_peer(const cuda::Context& context, int owner, cuda::DevicePointer address);

}  // namespace marrow::memory
