// SPDX-License-Identifier: Apache-2.0
// Memory of one rank that its kernels use: the same calls on the CPU device and on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "marrow/marrow.hpp"

namespace marrow::cli {

/// Copies between kernels' memory and ours, after everything the place's stream already has.
void copy_in(const Place& place, void* kernel_memory, const void* from, std::size_t bytes);
void copy_out(const Place& place, void* to, const void* kernel_memory, std::size_t bytes);

/// Zeroed, 4096-byte aligned, owned.
class Buffer {
 public:
  Buffer() = default;
  /// @param memory  Memory::host: pinned host memory on a GPU
  Buffer(const Place& place, std::size_t bytes, Memory memory = Memory::device);
  ~Buffer();
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    swap(other);
    return *this;
  }

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  template <class T>
  void upload(const std::vector<T>& values) {
    copy_in(place_, data_, values.data(), values.size() * sizeof(T));
  }
  template <class T>
  std::vector<T> download(std::size_t count, std::size_t first = 0) const {
    std::vector<T> values(count);
    copy_out(place_, values.data(), as<T>() + first, count * sizeof(T));
    return values;
  }

 private:
  void swap(Buffer& other) noexcept;

  Place place_;
  bool host_ = false;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace marrow::cli
