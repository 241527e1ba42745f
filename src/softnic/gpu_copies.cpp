// SPDX-License-Identifier: Apache-2.0
// GPU memory as FarMemory: one stream that waits for no other, one pinned page that everything passes
// through (copies from pageable memory would wait for kernels that spin).
#include <cstring>
#include <mutex>

#include "base/log.hpp"
#include "base/mapping.hpp"
#include "cuda/driver.hpp"
#include "cuda/mappings.hpp"
#include "marrow/error.hpp"
#include "softnic/far_memory.hpp"

namespace marrow::softnic {
namespace {

class GpuCopies final : public FarMemory {
 public:
  GpuCopies()
      : context_(cuda::Context::of(0)),
        stream_(context_),
        bounce_(base::Mapping::anonymous(kBounceBytes)) {
    const cuda::Current current(*context_);
    cuda::check(cuda::driver().host_register(bounce_.data(), kBounceBytes, kPortable),
                "pinning the copy buffer of softnic's engine");
    activate(this);
  }
  ~GpuCopies() override {
    activate(nullptr);
    const cuda::Current current(*context_);
    cuda::check_quietly(cuda::driver().host_unregister(bounce_.data()), "unpinning a copy buffer");
  }

  bool is_far(const void* base) const override { return cuda::is_gpu_memory(base); }

  void copy(void* to, const void* from, std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    const cuda::Current current(*context_);
    const bool to_far = covers(to);
    const bool from_far = covers(from);
    if (to_far && from_far) {
      move(to, from, bytes);
      return;
    }
    auto* target = static_cast<std::byte*>(to);
    const auto* source = static_cast<const std::byte*>(from);
    while (bytes > 0) {
      const std::size_t piece = bytes < kBounceBytes ? bytes : kBounceBytes;
      if (to_far) {
        std::memcpy(bounce_.data(), source, piece);
        move(target, bounce_.data(), piece);
      } else {
        move(bounce_.data(), source, piece);
        std::memcpy(target, bounce_.data(), piece);
      }
      target += piece;
      source += piece;
      bytes -= piece;
    }
  }

 private:
  static constexpr std::size_t kBounceBytes = std::size_t{256} << 10;
  static constexpr unsigned kPortable = 1;

  void move(void* to, const void* from, std::size_t bytes) {
    const auto address = [](const void* p) {
      return static_cast<cuda::DevicePointer>(reinterpret_cast<std::uintptr_t>(p));
    };
    const cuda::Result result =
        cuda::driver().copy_async(address(to), address(from), bytes, stream_.handle());
    try {
      cuda::check(result, "copying to or from GPU memory for softnic");
      stream_.synchronize();
    } catch (const Error& error) {
      // The queue that waits times out; nothing else can be done for it here.
      MARROW_WARN(softnic, error.what());
    }
  }

  std::shared_ptr<cuda::Context> context_;
  cuda::Stream stream_;
  base::Mapping bounce_;
  std::mutex mutex_;
};

}  // namespace

std::shared_ptr<FarMemory> gpu_copies() {
  static std::mutex mutex;
  static std::weak_ptr<GpuCopies> kept;
  const std::lock_guard lock(mutex);
  std::shared_ptr<GpuCopies> copies = kept.lock();
  if (!copies) {
    copies = std::make_shared<GpuCopies>();
    kept = copies;
  }
  return copies;
}

}  // namespace marrow::softnic
