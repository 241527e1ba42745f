// SPDX-License-Identifier: Apache-2.0
// The few CUDA calls the command line makes itself, so that everything else compiles without CUDA.
// gpu_cuda.cpp has them, gpu_none.cpp is the build without nvcc: no GPU, and a sentence why.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace marrow::cli::gpu {

/// GPUs this program can run its kernels on.
int count();
/// Why count() is 0, or empty.
std::string why_none();
std::string name(int device);
/// CUDA driver version, e.g. "13.0"; empty without one.
std::string driver();

/// A stream that does not wait for the legacy one. @throws Error(cuda | unsupported), as all below
void* create_stream(int device);
void destroy_stream(int device, void* stream) noexcept;
void synchronize(int device, void* stream);

/// Zeroed device memory, or pinned host memory that kernels reach at the same address.
void* allocate(int device, std::size_t bytes, bool host);
void release(int device, void* memory, bool host) noexcept;
/// Any direction; returns when done. Ordered after what the stream already has.
void copy(int device, void* stream, void* to, const void* from, std::size_t bytes);

/// Points in a stream's time.
class Events {
 public:
  Events(int device, std::size_t count);
  ~Events();
  Events(const Events&) = delete;
  Events& operator=(const Events&) = delete;
  void record(void* stream, std::size_t which);
  /// After the stream has passed both.
  double elapsed_us(std::size_t from, std::size_t to) const;

 private:
  int device_;
  std::vector<void*> events_;
};

/// What `record` enqueues on the stream, as one graph.
class Graph {
 public:
  Graph(int device, void* stream, const std::function<void()>& record);
  ~Graph();  // NOLINT(performance-trivially-destructible): with CUDA it frees the graph
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(void* stream);

 private:
  int device_;
  void* graph_ = nullptr;
};

}  // namespace marrow::cli::gpu
