// SPDX-License-Identifier: Apache-2.0
#include "memory/cuda_pieces.hpp"

#include <unistd.h>

#include <mutex>

#include "base/text.hpp"
#include "marrow/error.hpp"
#include "memory/host_backing.hpp"

namespace marrow::memory {
namespace {

using cuda::check;
using cuda::driver;
using cuda::Result;

cuda::AllocationProperties properties_of(int device) {
  cuda::AllocationProperties properties;
  properties.location.id = device;
  // A NIC can then register the memory; refused where the platform cannot, so it is only asked for
  // when the GPU says yes.
  int rdma = 0;
  if (driver().device_attribute(&rdma, cuda::DeviceAttribute::gpu_direct_rdma_with_vmm, device) ==
      Result::success) {
    properties.flags.gpu_direct_rdma = rdma != 0;
  }
  return properties;
}

std::uint64_t granularity_of(const cuda::AllocationProperties& properties) {
  std::size_t granularity = 0;
  check(driver().memory_granularity(&granularity, &properties, cuda::kGranularityMinimum),
        "asking for the granularity of GPU memory");
  return granularity;
}

template <class T>
T pointer_attribute(cuda::PointerAttribute which, void* pointer) {
  T value{};
  const auto address = reinterpret_cast<cuda::DevicePointer>(pointer);
  if (driver().pointer_attribute(&value, which, address) != Result::success) return T{};
  return value;
}

}  // namespace

std::uint64_t page_size() {
  static const auto size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

VmmMapping VmmMapping::create(std::shared_ptr<cuda::Context> context, std::uint64_t bytes) {
  VmmMapping out;
  const cuda::AllocationProperties properties = properties_of(context->device());
  const std::uint64_t granularity = granularity_of(properties);
  out.context_ = std::move(context);
  out.bytes_ = round_up(bytes, granularity);
  const cuda::Current current(*out.context_);
  check(driver().memory_create(&out.handle_, out.bytes_, &properties, 0),
        base::cat("allocating ", out.bytes_, " bytes on GPU ", out.context_->device()));
  int fd = -1;
  check(driver().memory_export(&fd, out.handle_, cuda::kHandlePosixFd, 0),
        "exporting GPU memory as a descriptor", "check the limit of open files (ulimit -n)");
  out.fd_.reset(fd);
  out.map_at_new_address(granularity);
  return out;
}

VmmMapping VmmMapping::import(std::shared_ptr<cuda::Context> context, int fd, std::uint64_t bytes) {
  VmmMapping out;
  const std::uint64_t granularity = granularity_of(properties_of(context->device()));
  out.context_ = std::move(context);
  out.bytes_ = round_up(bytes, granularity);
  out.fd_ = base::Fd::dup_of(fd);
  const cuda::Current current(*out.context_);
  // The driver takes the descriptor as a pointer-sized value.
  check(
      driver().memory_import(&out.handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                             cuda::kHandlePosixFd),
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
  cuda::AccessDescriptor access;
  access.location.id = context_->device();
  check(driver().memory_set_access(address_, bytes_, &access, 1),
        base::cat("giving GPU ", context_->device(), " access to ", bytes_, " bytes"),
        "the two GPUs need peer access: see `marrow info`");
}

VmmMapping::~VmmMapping() {
  if (!context_) return;
  try {
    const cuda::Current current(*context_);
    if (mapped_)
      cuda::check_quietly(driver().memory_unmap(address_, bytes_), "unmapping GPU memory");
    if (address_)
      cuda::check_quietly(driver().memory_unreserve(address_, bytes_), "freeing address space");
    if (handle_) cuda::check_quietly(driver().memory_release(handle_), "releasing GPU memory");
  } catch (const Error&) {  // the driver has shut down and freed everything
  }
}

IpcMapping::IpcMapping(std::shared_ptr<cuda::Context> context, const std::uint8_t (&handle)[64])
    : context_(std::move(context)) {
  cuda::IpcHandle opaque;
  for (int i = 0; i < 64; ++i) opaque.bytes[i] = handle[i];
  const cuda::Current current(*context_);
  check(driver().ipc_open(&address_, opaque, cuda::kIpcLazyEnablePeerAccess),
        base::cat("opening a peer's memory on GPU ", context_->device()),
        "both processes must see both GPUs, share an IPC namespace, and have peer access: see "
        "`marrow info`");
}

IpcMapping::~IpcMapping() {
  if (!context_ || address_ == 0) return;
  try {
    const cuda::Current current(*context_);
    cuda::check_quietly(driver().ipc_close(address_), "closing a peer's memory");
  } catch (const Error&) {
  }
}

HostRegistration::HostRegistration(std::shared_ptr<cuda::Context> context, void* pointer,
                                   std::uint64_t bytes)
    : context_(std::move(context)) {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const std::uintptr_t first = address / page_size() * page_size();
  const std::uint64_t size = round_up(address + bytes, page_size()) - first;
  const cuda::Current current(*context_);
  const Result result =
      driver().host_register(reinterpret_cast<void*>(first), size,
                             cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap);
  if (result == Result::host_memory_already_registered) return;  // by the caller: it stays theirs
  check(result, base::cat("registering ", size, " bytes of host memory with CUDA"),
        "raise the limit of locked memory (ulimit -l) or use less");
  pages_ = reinterpret_cast<void*>(first);
}

HostRegistration::~HostRegistration() {
  if (!context_ || pages_ == nullptr) return;
  try {
    const cuda::Current current(*context_);
    cuda::check_quietly(driver().host_unregister(pages_), "unregistering host memory");
  } catch (const Error&) {
  }
}

std::byte* device_address(const cuda::Context& context, void* host) {
  const cuda::Current current(context);
  cuda::DevicePointer address = 0;
  check(driver().host_device_pointer(&address, host, 0),
        "asking where the GPU sees registered host memory");
  return reinterpret_cast<std::byte*>(address);
}

PointerFacts pointer_facts(const cuda::Context& context, void* pointer, std::uint64_t bytes) {
  const cuda::Current current(context);
  PointerFacts facts;
  const auto type = pointer_attribute<unsigned>(cuda::PointerAttribute::memory_type, pointer);
  if (pointer_attribute<unsigned>(cuda::PointerAttribute::is_managed, pointer) != 0) {
    throw Error(Code::unsupported, "managed memory cannot be registered: its pages move.",
                "use cudaMalloc");
  }
  if (type != cuda::kMemoryTypeDevice) {
    facts.known_to_cuda = type == cuda::kMemoryTypeHost;
    HostBacking backing = host_backing(pointer, bytes);
    facts.file = std::move(backing.fd);
    facts.file_offset = backing.offset;
    return facts;
  }
  facts.kind = Memory::device;
  facts.known_to_cuda = true;
  const auto device = pointer_attribute<int>(cuda::PointerAttribute::device_ordinal, pointer);
  if (device != context.device()) {
    throw Error(Code::unsupported,
                base::cat("the memory is on GPU ", device,
                          ", this communicator's kernels run on GPU ", context.device(), "."),
                "register memory of the communicator's own GPU");
  }
  cuda::DevicePointer begin = 0;
  std::size_t size = 0;
  const auto address = reinterpret_cast<cuda::DevicePointer>(pointer);
  check(driver().memory_range(&begin, &size, address), "finding the allocation of a pointer");
  facts.offset_in_allocation = address - begin;
  if (facts.offset_in_allocation + bytes > size) {
    throw Error(Code::unsupported,
                base::cat(bytes, " bytes from here reach past their allocation, which has ",
                          size - facts.offset_in_allocation, " left."),
                "register one allocation at a time (PyTorch: not expandable_segments)");
  }
  const auto handles =
      pointer_attribute<std::uint64_t>(cuda::PointerAttribute::allowed_handle_types, pointer);
  facts.vmm_exportable = (handles & cuda::kHandlePosixFd) != 0;
  return facts;
}

base::Fd export_existing(const cuda::Context& context, void* pointer) {
  const cuda::Current current(context);
  cuda::AllocationHandle handle = 0;
  check(driver().memory_retain(&handle, pointer), "finding the handle of GPU memory");
  int fd = -1;
  const Result result = driver().memory_export(&fd, handle, cuda::kHandlePosixFd, 0);
  cuda::check_quietly(driver().memory_release(handle), "releasing GPU memory");
  check(result, "exporting GPU memory as a descriptor",
        "check the limit of open files (ulimit -n)");
  return base::Fd(fd);
}

void enable_peer(const cuda::Context& context, int owner, cuda::DevicePointer address) {
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
  const std::shared_ptr<cuda::Context> other = cuda::Context::of(owner);
  {
    const cuda::Current current(*other);
    void* const pointer = reinterpret_cast<void*>(address);
    const auto handles =
        pointer_attribute<std::uint64_t>(cuda::PointerAttribute::allowed_handle_types, pointer);
    const bool legacy =
        pointer_attribute<unsigned>(cuda::PointerAttribute::is_legacy_ipc_capable, pointer) != 0;
    if (handles != 0 || !legacy) {
      cuda::AccessDescriptor access;
      access.location.id = context.device();
      unsigned long long flags = 0;
      if (driver().memory_get_access(&flags, &access.location, address) == Result::success &&
          flags == static_cast<unsigned long long>(access.flags)) {
        return;  // another rank on our GPU has asked before
      }
      cuda::DevicePointer begin = 0;
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
  const cuda::Current current(context);
  const Result result = driver().context_enable_peer(other->handle(), 0);
  if (result == Result::peer_access_already_enabled) return;
  check(result, base::cat("enabling peer access from GPU ", context.device(), " to GPU ", owner));
}

}  // namespace marrow::memory
