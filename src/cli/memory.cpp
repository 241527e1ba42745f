// SPDX-License-Identifier: Apache-2.0
#include "cli/memory.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "cli/gpu.hpp"

namespace marrow::cli {

void copy_in(const Place& place, void* kernel_memory, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (place.on_gpu()) {
    gpu::copy(place.device, place.stream, kernel_memory, from, bytes);
  } else {
    std::memcpy(kernel_memory, from, bytes);
  }
}

void copy_out(const Place& place, void* to, const void* kernel_memory, std::size_t bytes) {
  copy_in(place, to, kernel_memory, bytes);
}

Buffer::Buffer(const Place& place, std::size_t bytes, Memory memory)
    : place_(place), host_(memory == Memory::host), bytes_(std::max<std::size_t>(bytes, 1)) {
  if (place.on_gpu()) {
    data_ = static_cast<std::byte*>(gpu::allocate(place.device, bytes_, host_));
    return;
  }
  data_ = static_cast<std::byte*>(std::aligned_alloc(4096, (bytes_ + 4095) / 4096 * 4096));
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0, bytes_);
}

Buffer::~Buffer() {
  if (data_ == nullptr) return;
  if (place_.on_gpu()) {
    gpu::release(place_.device, data_, host_);
  } else {
    std::free(data_);
  }
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(place_, other.place_);
  std::swap(host_, other.host_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
}

}  // namespace marrow::cli
