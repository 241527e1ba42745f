// SPDX-License-Identifier: Apache-2.0
// The public classes: each forwards to the state behind it.
#include "base/log.hpp"
#include "base/text.hpp"
#include "bootstrap/environment.hpp"
#include "core/device_state.hpp"
#include "core/state.hpp"
#include "core/stream.hpp"
#include "core/window.hpp"

#ifndef MARROW_VERSION
#define MARROW_VERSION "0.1.0"
#endif

namespace marrow {
namespace {

template <class State>
State& open(const std::shared_ptr<State>& state, const char* what) {
  if (!state) {
    throw Error(Code::invalid_argument, base::cat("an empty ", what, " was used"),
                "use one that a Communicator made and that was not moved from");
  }
  return *state;
}

}  // namespace

const char* version() { return MARROW_VERSION; }

WindowHandle Window::handle() const { return open(state_, "Window").symmetric().handle(); }
void* Window::data() const { return open(state_, "Window").symmetric().block().device; }
void* Window::host() const { return open(state_, "Window").symmetric().block().host; }
std::uint64_t Window::bytes() const { return open(state_, "Window").symmetric().block().bytes; }
Path Window::atomic_path() const { return handle().atomic_path; }
std::string Window::why_no_atomics() const {
  return open(state_, "Window").symmetric().why_no_atomics();
}
void Window::close() {
  if (state_) state_->close();
  state_.reset();
}

LocalBufferHandle LocalBuffer::handle() const { return open(state_, "LocalBuffer").handle(); }

DeviceCommunicator DeviceCommunicatorOwner::handle() const {
  return open(state_, "device communicator").handle();
}
void DeviceCommunicatorOwner::close() {
  if (state_) state_->close();
  state_.reset();
}

Communicator::Communicator(const UniqueId& id, int nranks, int rank, Config config)
    : state_(std::make_shared<core::CommunicatorState>(id, nranks, rank, std::move(config))) {}

Communicator Communicator::from_environment(Config config) {
  base::Parameters parameters;
  for (const auto& [name, value] : config.parameters) parameters.set(name, value);
  const bootstrap::LaunchInfo launch = bootstrap::launch_info(parameters);
  const UniqueId id = bootstrap::rendezvous(launch, parameters);
  return Communicator(id, launch.nranks, launch.rank, std::move(config));
}

Communicator Communicator::rejoin(const UniqueId& id, int nranks, int rank, Config config) {
  return Communicator(
      std::make_shared<core::CommunicatorState>(id, nranks, rank, std::move(config), true));
}

namespace {

/// The state may live on in a LocalBuffer: peers must not wait for that.
void close_quietly(const std::shared_ptr<core::CommunicatorState>& state) noexcept {
  if (!state) return;
  try {
    state->close();
  } catch (const std::exception& error) {
    MARROW_WARN(core, "closing a communicator: ", error.what());
  }
}

}  // namespace

Communicator::Communicator(Communicator&&) noexcept = default;
Communicator& Communicator::operator=(Communicator&& other) noexcept {
  if (this != &other) {
    close_quietly(state_);
    state_ = std::move(other.state_);
  }
  return *this;
}
Communicator::~Communicator() { close_quietly(state_); }

UniqueId Communicator::id() const { return open(state_, "Communicator").id(); }
int Communicator::rank() const { return open(state_, "Communicator").rank(); }
int Communicator::nranks() const { return open(state_, "Communicator").nranks(); }
Place Communicator::place() const { return open(state_, "Communicator").place(); }

Window Communicator::allocate(std::uint64_t bytes, Memory memory) {
  return Window(open(state_, "Communicator").allocate(bytes, memory));
}
Window Communicator::register_window(void* pointer, std::uint64_t bytes) {
  return Window(open(state_, "Communicator").register_window(pointer, bytes));
}
LocalBuffer Communicator::register_local(void* pointer, std::uint64_t bytes) {
  return LocalBuffer(open(state_, "Communicator").register_local(pointer, bytes));
}
DeviceCommunicatorOwner Communicator::device_communicator(Requirements requirements) {
  return DeviceCommunicatorOwner(open(state_, "Communicator").device_communicator(requirements));
}

void Communicator::check() { open(state_, "Communicator").check(); }
void Communicator::revoke(const std::string& why) { open(state_, "Communicator").revoke(why); }
std::vector<bool> Communicator::agree_failures(std::chrono::milliseconds deadline) {
  return open(state_, "Communicator").agree_failures(deadline);
}
void Communicator::admit(int rank, std::chrono::milliseconds deadline) {
  open(state_, "Communicator").admit(rank, deadline);
}
void Communicator::reconnect() { open(state_, "Communicator").reconnect(); }
void Communicator::barrier() {
  core::CommunicatorState& state = open(state_, "Communicator");
  state.require_admitted("barrier()");
  state.bootstrap().barrier();
}
std::vector<std::vector<std::byte>> Communicator::allgather(const void* data, std::size_t bytes) {
  core::CommunicatorState& state = open(state_, "Communicator");
  state.require_admitted("allgather()");
  return state.bootstrap().allgather({static_cast<const std::byte*>(data), bytes});
}
std::vector<PeerInfo> Communicator::peers() const { return open(state_, "Communicator").peers(); }
PeerStatistics Communicator::statistics(int peer) const {
  return open(state_, "Communicator").statistics(peer);
}
void Communicator::synchronize() { open(state_, "Communicator").synchronize(); }
void Communicator::put_on_stream(const DeviceCommunicatorOwner& device, int peer,
                                 const Window& window, std::uint64_t offset,
                                 const LocalBuffer& source, std::uint64_t source_offset,
                                 std::uint64_t bytes) {
  core::stream_operations(place()).put(place(), device.handle(), peer, window.handle(), offset,
                                       source.handle(), source_offset, bytes);
  if (!place().on_gpu()) check();
}
void Communicator::signal_on_stream(const DeviceCommunicatorOwner& device, int peer, int signal,
                                    std::uint64_t n) {
  core::stream_operations(place()).signal(place(), device.handle(), peer, signal, n);
  if (!place().on_gpu()) check();
}
void Communicator::wait_on_stream(const DeviceCommunicatorOwner& device, int signal,
                                  std::uint64_t at_least) {
  core::stream_operations(place()).wait(place(), device.handle(), signal, at_least);
  if (!place().on_gpu()) check();
}
void Communicator::close() {
  if (state_) state_->close();
}

}  // namespace marrow
