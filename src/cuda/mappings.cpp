// SPDX-License-Identifier: Apache-2.0
#include "cuda/mappings.hpp"

#include <unistd.h>

#include <mutex>

#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::cuda {
namespace {

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}

AllocationProperties properties_of(int device) {
  AllocationProperties properties;
  properties.location.id = device;
  // A NIC can then register the memory; refused where the platform cannot, so it is only asked for
  // when the GPU says yes.
  int rdma = 0;
  if (driver().device_attribute(&rdma, DeviceAttribute::gpu_direct_rdma_with_vmm, device) ==
      Result::success) {
    properties.flags.gpu_direct_rdma = rdma != 0;
  }
  return properties;
}

std::uint64_t granularity_of(const AllocationProperties& properties) {
  std::size_t granularity = 0;
  check(driver().memory_granularity(&granularity, &properties, kGranularityMinimum),
        "asking for the granularity of GPU memory");
  return granularity;
}

template <class T>
T pointer_attribute(PointerAttribute which, void* pointer) {
  T value{};
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  if (driver().pointer_attribute(&value, which, address) != Result::success) return T{};
  return value;
}

}  // namespace

VmmMapping VmmMapping::create(std::shared_ptr<Context> context, std::uint64_t bytes) {
  VmmMapping out;
  const AllocationProperties properties = properties_of(context->device());
  const std::uint64_t granularity = granularity_of(properties);
  out.context_ = std::move(context);
  out.bytes_ = round_up(bytes, granularity);
  const Current current(*out.context_);
  check(driver().memory_create(&out.handle_, out.bytes_, &properties, 0),
        base::cat("allocating ", out.bytes_, " bytes on GPU ", out.context_->device()));
  int fd = -1;
  check(driver().memory_export(&fd, out.handle_, kHandlePosixFd, 0),
        "exporting GPU memory as a descriptor", "check the limit of open files (ulimit -n)");
  out.fd_.reset(fd);
  out.map_at_new_address(granularity);
  return out;
}

VmmMapping VmmMapping::import(std::shared_ptr<Context> context, int fd, std::uint64_t bytes) {
  VmmMapping out;
  const std::uint64_t granularity = granularity_of(properties_of(context->device()));
  out.context_ = std::move(context);
  out.bytes_ = round_up(bytes, granularity);
  out.fd_ = base::Fd::dup_of(fd);
  const Current current(*out.context_);
  // The driver takes the descriptor as a pointer-sized value.
  check(driver().memory_import(
            &out.handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)), kHandlePosixFd),
        base::cat("importing a peer's GPU memory on GPU ", out.context_->device()),
        "the peer's GPU must be visible to this process and have peer access: see `marrow info`");
  out.map_at_new_address(granularity);
  return out;
}

void VmmMapping::map_at_new_address(std::uint64_t granularity) {
  check(driver().memory_reserve(&address_, bytes_, granularity, 0, 0),
        base::cat("reserving ", bytes_, " bytes of address space"));
  check(driver().memory_map(address_, bytes_, 0, handle_, 0),
        base::cat("mapping ", bytes_, " bytes of GPU memory"));
  mapped_ = true;
  AccessDescriptor access;
  access.location.id = context_->device();
  check(driver().memory_set_access(address_, bytes_, &access, 1),
        base::cat("giving GPU ", context_->device(), " access to ", bytes_, " bytes"),
        "the two GPUs need peer access: see `marrow info`");
}

VmmMapping::~VmmMapping() {
  if (!context_) return;
  try {
    const Current current(*context_);
    if (mapped_) check_quietly(driver().memory_unmap(address_, bytes_), "unmapping GPU memory");
    if (address_)
      check_quietly(driver().memory_unreserve(address_, bytes_), "freeing address space");
    if (handle_) check_quietly(driver().memory_release(handle_), "releasing GPU memory");
  } catch (const Error&) {  // the driver has shut down and freed everything
  }
}

IpcMapping::IpcMapping(std::shared_ptr<Context> context, const std::uint8_t (&handle)[64])
    : context_(std::move(context)) {
  IpcHandle opaque;
  for (int i = 0; i < 64; ++i) opaque.bytes[i] = handle[i];
  const Current current(*context_);
  check(driver().ipc_open(&address_, opaque, kIpcLazyEnablePeerAccess),
        base::cat("opening a peer's memory on GPU ", context_->device()),
        "both processes must see both GPUs, share an IPC namespace, and have peer access: see "
        "`marrow info`");
}

IpcMapping::~IpcMapping() {
  if (!context_ || address_ == 0) return;
  try {
    const Current current(*context_);
    check_quietly(driver().ipc_close(address_), "closing a peer's memory");
  } catch (const Error&) {
  }
}

void enable_peer(const Context& context, int owner, DevicePointer address) {
  int reachable = 0;
  check(driver().device_can_access_peer(&reachable, context.device(), owner),
        "asking for peer access");
  if (reachable == 0) {
    throw Error(Code::unsupported,
                base::cat("GPU ", context.device(), " has no peer access to GPU ", owner, "."),
                "let the path be chosen automatically (MARROW_PATH=auto)");
  }
  // One at a time in this process: two ranks of one GPU that give it access to the same memory at once
  // make each other fail.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const std::shared_ptr<Context> other = Context::of(owner);
  {
    const Current current(*other);
    void* const pointer = reinterpret_cast<void*>(address);
    const auto handles =
        pointer_attribute<std::uint64_t>(PointerAttribute::allowed_handle_types, pointer);
    const bool legacy =
        pointer_attribute<unsigned>(PointerAttribute::is_legacy_ipc_capable, pointer) != 0;
    if (handles != 0 || !legacy) {
      AccessDescriptor access;
      access.location.id = context.device();
      unsigned long long flags = 0;
      if (driver().memory_get_access(&flags, &access.location, address) == Result::success &&
          flags == static_cast<unsigned long long>(access.flags)) {
        return;  // another rank on our GPU has asked before
      }
      DevicePointer begin = 0;
      std::size_t size = 0;
      check(driver().memory_range(&begin, &size, address), "finding a peer's allocation");
      const Result result = driver().memory_set_access(begin, size, &access, 1);
      if (result == Result::success) return;
      if (handles != 0) {
        check(result,
              base::cat("giving GPU ", context.device(), " access to memory of GPU ", owner));
      }
    }
  }
  const Current current(context);
  const Result result = driver().context_enable_peer(other->handle(), 0);
  if (result == Result::peer_access_already_enabled) return;
  check(result, base::cat("enabling peer access from GPU ", context.device(), " to GPU ", owner));
}

bool is_gpu_memory(const void* pointer) { return owner_of(pointer) >= 0; }

int owner_of(const void* pointer) {
  if (!available()) return -1;
  unsigned type = 0;
  int owner = -1;
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  if (driver().pointer_attribute(&type, PointerAttribute::memory_type, address) !=
          Result::success ||
      type != kMemoryTypeDevice ||
      driver().pointer_attribute(&owner, PointerAttribute::device_ordinal, address) !=
          Result::success) {
    return -1;
  }
  return owner;
}

std::byte* seen_by_gpu(const Context& context, void* host) {
  const Current current(context);
  DevicePointer address = 0;
  if (driver().host_device_pointer(&address, host, 0) != Result::success) return nullptr;
  return reinterpret_cast<std::byte*>(address);
}

bool ipc_handle_of(const void* pointer, IpcHandle& handle, std::uint64_t& offset) {
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  const int owner = owner_of(pointer);
  if (owner < 0) return false;
  const std::shared_ptr<Context> context = Context::of(owner);
  const Current current(*context);
  DevicePointer begin = 0;
  std::size_t bytes = 0;
  if (driver().memory_range(&begin, &bytes, address) != Result::success ||
      driver().ipc_get(&handle, begin) != Result::success) {
    return false;
  }
  offset = address - begin;
  return true;
}

base::Fd dma_buf_of(void* pointer, std::uint64_t bytes, std::uint64_t& offset, std::string& why) {
  const int owner = owner_of(pointer);
  if (owner < 0) {
    why = "CUDA does not know this memory as a GPU's";
    return {};
  }
  const std::shared_ptr<Context> context = Context::of(owner);
  const Current current(*context);
  const auto page = static_cast<DevicePointer>(::sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<DevicePointer>(pointer);
  const DevicePointer begin = address / page * page;
  const DevicePointer end = (address + bytes + page - 1) / page * page;
  int fd = -1;
  const Result result =
      driver().memory_handle_for_range(&fd, begin, end - begin, kRangeHandleDmaBuf, 0);
  if (result != Result::success) {
    why = base::cat("cuMemGetHandleForAddressRange: ", text(result));
    return {};
  }
  offset = address - begin;
  return base::Fd(fd);
}

}  // namespace marrow::cuda
