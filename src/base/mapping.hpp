// SPDX-License-Identifier: Apache-2.0
// A memory mapping with one owner. Sparse by default (MAP_NORESERVE): windows larger than memory
// are legal as long as they are not touched.
#pragma once

#include <cstddef>
#include <utility>

namespace marrow::base {

/// Owns one mmap; unmaps it at the end of its life. Movable, not copyable.
class Mapping {
 public:
  enum class Access { read_only, read_write };

  Mapping() = default;
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    if (this != &other) {
      reset();
      data_ = std::exchange(other.data_, nullptr);
      size_ = std::exchange(other.size_, 0);
    }
    return *this;
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { reset(); }

  /// Shared mapping of `size` bytes (> 0) of `fd` from `offset` (a multiple of the page size). The
  /// descriptor may be closed afterwards. Throws Error(system or out_of_memory).
  static Mapping of_fd(int fd, std::size_t size, std::size_t offset = 0,
                       Access access = Access::read_write);

  /// Zeroed memory of this process, not shared with children unless `shared_with_children`.
  static Mapping anonymous(std::size_t size, bool shared_with_children = false);

  void* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  bool valid() const noexcept { return data_ != nullptr; }

  /// The mapped bytes as T, from byte `offset`.
  template <class T>
  T* as(std::size_t offset = 0) const noexcept {
    return reinterpret_cast<T*>(static_cast<std::byte*>(data_) + offset);
  }

  void reset() noexcept;

 private:
  Mapping(void* data, std::size_t size) : data_(data), size_(size) {}
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

/// Whether all of [data, data + size) is mapped in this process, readable and if asked for writable: what a
/// driver finds out when it pins memory. Reads /proc/self/maps; true where that cannot be read.
bool is_mapped(const void* data, std::size_t size, Mapping::Access access);

}  // namespace marrow::base
