// SPDX-License-Identifier: Apache-2.0
// Copies on a private non-blocking stream. Each is followed by an event from a ring of events, so
// that done() never waits; an event that was recorded again stands for a later copy, which finishes
// after the one asked about, so the answer is then late but never wrong.
#include "proxy/cuda_copy_engine.hpp"

#include <array>
#include <cstring>
#include <map>
#include <vector>

#include "base/mapping.hpp"
#include "base/text.hpp"
#include "cuda/driver.hpp"
#include "memory/cuda_pieces.hpp"

namespace marrow::proxy {
namespace {

class CudaCopyEngine final : public CopyEngine {
 public:
  explicit CudaCopyEngine(int device)
      : context_(cuda::Context::of(device)),
        stream_(context_),
        slots_(base::Mapping::anonymous(kSlots * kSmall)),
        registration_(context_, slots_.data(), slots_.size()) {
    events_.reserve(kEvents);
    for (std::size_t i = 0; i < kEvents; ++i) events_.emplace_back(context_);
  }

  /// Every call names its context, so a thread needs nothing of its own.
  void attach_thread() override {}

  std::uint64_t copy(void* to, const void* from, std::size_t bytes) override {
    const std::uint64_t ticket = ++last_;
    if (bytes != 0) {
      const cuda::Current current(*context_);
      if (bytes <= kSmall && !on_device(from)) from = take(ticket, from, bytes);
      cuda::check(cuda::driver().copy_async(reinterpret_cast<cuda::DevicePointer>(to),
                                            reinterpret_cast<cuda::DevicePointer>(from), bytes,
                                            stream_.handle()),
                  base::cat("a copy of ", bytes, " bytes on GPU ", context_->device()),
                  "the memory must be GPU memory or registered host memory");
    }
    const std::size_t at = ticket % kEvents;
    events_[at].record(stream_);
    recorded_[at] = ticket;
    return ticket;
  }

  bool done(std::uint64_t ticket) override {
    while (finished_ < ticket) {
      const std::size_t at = (finished_ + 1) % kEvents;
      if (!events_[at].done()) return false;
      finished_ = recorded_[at];
    }
    return true;
  }

  void* map(int fd, std::uint64_t fd_offset, std::size_t bytes) override {
    memory::VmmMapping mapping = memory::VmmMapping::import(context_, fd, fd_offset + bytes);
    auto* address = reinterpret_cast<std::byte*>(mapping.address()) + fd_offset;
    mapped_.emplace(address, std::move(mapping));
    return address;
  }

  void unmap(void* address, std::size_t) override {
    mapped_.erase(static_cast<std::byte*>(address));
  }

 private:
  static constexpr std::size_t kEvents = 64;
  static constexpr std::size_t kSlots = 1024;
  static constexpr std::size_t kSmall = 64;

  /// GPU memory is read by the copy itself: the CPU cannot, and the operation keeps it until it is complete.
  static bool on_device(const void* from) {
    unsigned type = 0;
    return cuda::driver().pointer_attribute(&type, cuda::PointerAttribute::memory_type,
                                            reinterpret_cast<cuda::DevicePointer>(from)) ==
               cuda::Result::success &&
           type == cuda::kMemoryTypeDevice;
  }

  /// Keeps a small source until its copy has read it: its variable may be gone by then.
  const void* take(std::uint64_t ticket, const void* from, std::size_t bytes) {
    if (ticket > kSlots) {
      while (!done(ticket - kSlots)) {  // the slot's last copy; bounded: copies wait for no kernel
      }
    }
    auto* slot = slots_.as<std::byte>(ticket % kSlots * kSmall);
    std::memcpy(slot, from, bytes);
    return slot;
  }

  std::shared_ptr<cuda::Context> context_;
  cuda::Stream stream_;
  base::Mapping slots_;
  memory::HostRegistration registration_;
  std::vector<cuda::Event> events_;
  std::array<std::uint64_t, kEvents> recorded_{};
  std::uint64_t last_ = 0;
  std::uint64_t finished_ = 0;
  std::map<std::byte*, memory::VmmMapping> mapped_;
};

}  // namespace

std::unique_ptr<CopyEngine> create_cuda_copy_engine(int device) {
  return std::make_unique<CudaCopyEngine>(device);
}

}  // namespace marrow::proxy
