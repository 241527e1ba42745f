// SPDX-License-Identifier: Apache-2.0
// libcuda and NVML, found at run time: one binary starts with or without a driver. Nothing here
// links CUDA's runtime; kernels are launched by the caller's own runtime, in the same primary
// context.
#pragma once

#include <memory>
#include <string>

#include "cuda/driver_abi.hpp"

namespace marrow::cuda {

/// The driver's functions; all set.
struct Driver {
#define MARROW_CUDA_MEMBER(member, symbol, arguments) Result(*member) arguments = nullptr;
  MARROW_CUDA_DRIVER_FUNCTIONS(MARROW_CUDA_MEMBER)
#undef MARROW_CUDA_MEMBER
};

/// NVML's functions; all set.
struct Nvml {
#define MARROW_NVML_MEMBER(member, symbol, arguments) int(*member) arguments = nullptr;
  MARROW_NVML_FUNCTIONS(MARROW_NVML_MEMBER)
#undef MARROW_NVML_MEMBER
};

/// The driver, loaded and initialised once per process.
/// @throws Error(unsupported) with what is missing: library, symbol, or device
const Driver& driver();

/// Whether driver() works and there is at least one GPU.
/// @param reason  if not null and the answer is no: one sentence
bool available(std::string* reason = nullptr);

/// NVML, or null: it only adds detail, nothing needs it.
const Nvml* nvml();

/// CUDA's name and text of a result, e.g. "CUDA_ERROR_OUT_OF_MEMORY: out of memory".
std::string text(Result result);

/// Throws when the call failed. Out of memory gets its own code.
/// @param what       what was attempted, with its values
/// @param next_step  what the user can do about it
void check(Result result, const std::string& what, const std::string& next_step = {});

/// Logs a failure instead of throwing: for teardown. After the driver's own shutdown it is silent.
void check_quietly(Result result, const char* what) noexcept;

/// GPUs this process sees; 0 without a driver.
int device_count();

/// One device's primary context (the one CUDA's runtime uses), retained while held.
class Context {
 public:
  /// @throws Error(invalid_argument) when there is no such GPU, Error(unsupported) without a driver
  static std::shared_ptr<Context> of(int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int device() const { return device_; }
  ContextHandle handle() const { return handle_; }

 private:
  Context(int device, ContextHandle handle) : device_(device), handle_(handle) {}
  int device_;
  ContextHandle handle_;
};

/// Makes a context current for a scope; the thread's own choice comes back after it.
class Current {
 public:
  explicit Current(const Context& context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
};

/// A private stream that neither waits for nor holds up the legacy default stream, so its work runs
/// beside spinning kernels.
class Stream {
 public:
  /// @param priority  0 normal; below: its blocks are placed first (clamped to what the GPU has)
  explicit Stream(std::shared_ptr<Context> context, int priority = 0);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  StreamHandle handle() const { return handle_; }
  const Context& context() const { return *context_; }
  /// Waits for everything enqueued. @throws Error(cuda)
  void synchronize() const;

 private:
  std::shared_ptr<Context> context_;
  StreamHandle handle_ = nullptr;
};

/// A point in a stream.
class Event {
 public:
  explicit Event(std::shared_ptr<Context> context);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&&) = delete;
  void record(const Stream& stream);
  /// Whether everything before it is done. @throws Error(cuda) when the work failed
  bool done() const;

 private:
  std::shared_ptr<Context> context_;
  EventHandle handle_ = nullptr;
};

}  // namespace marrow::cuda
