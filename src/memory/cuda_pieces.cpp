// SPDX-License-Identifier: Apache-2.0
#include "memory/cuda_pieces.hpp"

#include <unistd.h>

#include "base/text.hpp"
#include "marrow/error.hpp"
#include "memory/host_backing.hpp"
#include "memory/host_pages.hpp"

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

/// Of the process, as registrations are: for all its GPUs (portable).
HostPages& host_pages() {
  static HostPages pages;
  return pages;
}

void unregister(std::uintptr_t first) {
  cuda::check_quietly(driver().host_unregister(reinterpret_cast<void*>(first)),
                      "unregistering host memory");
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
  const std::uintptr_t end = round_up(address + bytes, page_size());
  const cuda::Current current(*context_);
  // Also what came from cudaMallocHost.
  const auto known = [](std::uintptr_t page) {
    return pointer_attribute<unsigned>(cuda::PointerAttribute::memory_type,
                                       reinterpret_cast<void*>(page)) == cuda::kMemoryTypeHost;
  };
  // Page by page: the driver does not tell where host registrations begin and end.
  const auto all_known = [&](std::uintptr_t from, std::uintptr_t to) {
    for (std::uintptr_t page = from; page < to; page += page_size()) {
      if (!known(page)) return false;
    }
    return true;
  };
  const auto enroll = [&](std::uintptr_t from, std::uintptr_t to) {
    auto* const pages = reinterpret_cast<void*>(from);
    if (known(from)) return false;
    const Result result = driver().host_register(
        pages, to - from, cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap);
    if (result == Result::host_memory_already_registered) return false;
    check(result, base::cat("registering ", to - from, " bytes of host memory with CUDA"),
          "raise the limit of locked memory (ulimit -l) or use less");
    return true;
  };
  switch (host_pages().hold(first, end, enroll, unregister, all_known)) {
    case HostPages::Outcome::held:
      first_ = first;
      end_ = end;
      return;
    case HostPages::Outcome::foreign: return;  // the caller's: it stays theirs
    case HostPages::Outcome::mixed:
      throw Error(
          Code::unsupported,
          base::cat("the program has registered a part of these ", bytes,
                    " bytes of host memory with CUDA (cudaHostRegister), and not the rest."),
          "register all of it or nothing of it");
  }
}

HostRegistration::~HostRegistration() {
  if (!context_ || end_ == 0) return;
  try {
    const cuda::Current current(*context_);
    host_pages().drop(first_, end_, unregister);
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
    HostBacking backing = host_backing(pointer, bytes);
    facts.file = std::move(backing.fd);
    facts.file_offset = backing.offset;
    return facts;
  }
  facts.kind = Memory::device;
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
