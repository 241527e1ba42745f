// SPDX-License-Identifier: Apache-2.0
#include "memory/cuda_pieces.hpp"

#include <unistd.h>

#include "base/text.hpp"
#include "marrow/error.hpp"
#include "memory/host_backing.hpp"

namespace marrow::memory {
namespace {

using cuda::check;
using cuda::driver;
using cuda::Result;

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

}  // namespace marrow::memory
