// SPDX-License-Identifier: Apache-2.0
// Owners of GPU memory that another process or GPU can reach: a VMM mapping, an opened legacy IPC handle;
// and peer access between GPUs of one process. Each frees itself with its context current.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "base/fd.hpp"
#include "cuda/driver.hpp"

namespace marrow::cuda {

/// Physical GPU memory mapped at an address of this process, readable and writable by one GPU.
class VmmMapping {
 public:
  VmmMapping() = default;
  /// New memory on the context's GPU, with a descriptor. Size rounded up to the GPU's granularity.
  static VmmMapping create(std::shared_ptr<Context> context, std::uint64_t bytes);
  /// Another process's memory by its descriptor (of whatever GPU); at least `bytes` of it.
  static VmmMapping import(std::shared_ptr<Context> context, int fd, std::uint64_t bytes);
  VmmMapping(VmmMapping&& other) noexcept { swap(other); }
  VmmMapping& operator=(VmmMapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~VmmMapping();

  DevicePointer address() const { return address_; }
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

  std::shared_ptr<Context> context_;
  base::Fd fd_;
  AllocationHandle handle_ = 0;
  DevicePointer address_ = 0;
  std::uint64_t bytes_ = 0;
  bool mapped_ = false;
};

/// Another process's cudaMalloc memory.
class IpcMapping {
 public:
  IpcMapping() = default;
  IpcMapping(std::shared_ptr<Context> context, const std::uint8_t (&handle)[64]);
  IpcMapping(IpcMapping&& other) noexcept
      : context_(std::move(other.context_)), address_(std::exchange(other.address_, 0)) {}
  IpcMapping& operator=(IpcMapping&& other) noexcept {
    std::swap(context_, other.context_);
    std::swap(address_, other.address_);
    return *this;
  }
  ~IpcMapping();
  DevicePointer address() const { return address_; }

 private:
  std::shared_ptr<Context> context_;
  DevicePointer address_ = 0;
};

/// Lets kernels of `context` reach memory of GPU `owner` in this process.
/// @throws Error(unsupported) naming both GPUs when they have no peer access
void enable_peer(const Context& context, int owner, DevicePointer address);

/// Whether a pointer is to GPU memory that CUDA knows. False without a driver.
bool is_gpu_memory(const void* pointer);
/// The GPU that memory belongs to; -1 if it is none's.
int owner_of(const void* pointer);
/// Where a GPU sees registered host memory; null if it does not.
std::byte* seen_by_gpu(const Context& context, void* host);
/// Names memory of cudaMalloc for other processes. @return false for memory that has no such handle
bool ipc_handle_of(const void* pointer, IpcHandle& handle, std::uint64_t& offset);

/// GPU memory as a dma-buf, for a NIC's driver: the pages that hold [pointer, pointer + bytes).
/// @param offset  of `pointer` in them
/// @return an invalid Fd, with a sentence in `why`, for memory that cannot be exported so
base::Fd dma_buf_of(void* pointer, std::uint64_t bytes, std::uint64_t& offset, std::string& why);

}  // namespace marrow::cuda
