// SPDX-License-Identifier: Apache-2.0
#include "core/stream.hpp"

#include <string>

#include "base/text.hpp"
#include "marrow/device.cuh"

namespace marrow::core {
namespace {

MARROW_KERNEL put_kernel(DeviceCommunicator comm, int peer, WindowHandle window, std::uint64_t offset,
                         LocalBufferHandle source, std::uint64_t source_offset, std::uint64_t bytes, Status* out) {
  const Gin gin(comm, 0);
  *out = gin.put(peer, window, offset, source, source_offset, bytes);
}

MARROW_KERNEL signal_kernel(DeviceCommunicator comm, int peer, int signal, std::uint64_t n, Status* out) {
  const Gin gin(comm, 0);
  *out = gin.signal(peer, SignalAdd{signal, n});
}

MARROW_KERNEL wait_kernel(DeviceCommunicator comm, int signal, std::uint64_t at_least, Status* out) {
  const Gin gin(comm, 0);
  *out = gin.wait_signal(signal, at_least);
}

Code code_of(Status status) {
  switch (status) {
    case Status::ok: return Code::ok;
    case Status::timeout: return Code::timeout;
    case Status::peer_failed: return Code::peer_failed;
    case Status::aborted: return Code::aborted;
    case Status::invalid: return Code::invalid_argument;
  }
  return Code::internal;
}

template <class... Parameters, class... Args>
void run(const Place& place, const std::string& what, void (*kernel)(Parameters...), const Args&... args) {
  if (place.on_gpu()) {
    throw Error(Code::unsupported, base::cat(what, " on a GPU stream is not built in"),
                "call Gin from a kernel of yours on that stream");
  }
  Status status = Status::invalid;
  launch(place, 1, 1, 0, kernel, args..., &status);
  if (status != Status::ok) {
    throw Error(code_of(status), base::cat(what, " returned ", name(status)),
                "Communicator::check() has the reason; MARROW_WAIT_TIMEOUT bounds the wait");
  }
}

}  // namespace

void put_on_stream(const Place& place, const DeviceCommunicator& comm, int peer, const WindowHandle& window,
                   std::uint64_t offset, const LocalBufferHandle& source, std::uint64_t source_offset,
                   std::uint64_t bytes) {
  run(place, base::cat("put of ", bytes, " bytes to rank ", peer), put_kernel, comm, peer, window, offset, source,
      source_offset, bytes);
}

void signal_on_stream(const Place& place, const DeviceCommunicator& comm, int peer, int signal, std::uint64_t n) {
  run(place, base::cat("signal ", signal, " to rank ", peer), signal_kernel, comm, peer, signal, n);
}

void wait_on_stream(const Place& place, const DeviceCommunicator& comm, int signal, std::uint64_t at_least) {
  run(place, base::cat("wait for signal ", signal, " to reach ", at_least), wait_kernel, comm, signal, at_least);
}

}  // namespace marrow::core
