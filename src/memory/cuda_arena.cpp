// SPDX-License-Identifier: Apache-2.0
// Arena of one GPU. Device blocks are CUDA VMM allocations with a POSIX descriptor, host blocks are
// memfds that are mapped and registered, so that the GPU, CPU threads and other processes share
// them. No call here waits for a kernel: memory is created and mapped without cudaMalloc's implicit
// synchronisation, and copies run on a private non-blocking stream from registered memory, because a
// pageable or default-stream copy would wait for a spinning kernel.
#include "memory/cuda_arena.hpp"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "base/fd.hpp"
#include "base/mapping.hpp"
#include "base/memfd.hpp"
#include "base/text.hpp"
#include "cuda/driver.hpp"
#include "marrow/error.hpp"
#include "memory/cuda_pieces.hpp"

namespace marrow::memory {
namespace {

using cuda::check;
using cuda::driver;

class CudaArena final : public Arena {
 public:
  explicit CudaArena(int device) : context_(cuda::Context::of(device)), stream_(context_) {
    need(cuda::DeviceAttribute::vmm_supported, "virtual memory management");
    need(cuda::DeviceAttribute::posix_fd_supported, "POSIX descriptors of memory");
  }

  Block allocate(std::uint64_t bytes, Memory kind) override {
    if (bytes == 0)
      throw Error(Code::invalid_argument, "an allocation of 0 bytes", "ask for at least 1 byte");
    std::lock_guard lock(mutex_);
    if (kind == Memory::host) {
      base::Fd fd = base::memfd("marrow-host", round_up(bytes, page_size()));
      return keep_host(std::move(fd), bytes, 0);
    }
    VmmMapping mapping = VmmMapping::create(context_, bytes);
    zero(mapping.address(), mapping.bytes());
    return keep_device(std::move(mapping), bytes);
  }

  void release(const Block& block) override {
    std::lock_guard lock(mutex_);
    owned_.erase(block.device);
  }

  Block map(int fd, std::uint64_t bytes, Memory kind, std::uint64_t fd_offset) override {
    std::lock_guard lock(mutex_);
    if (kind == Memory::host) return keep_host(base::Fd::dup_of(fd), bytes, fd_offset);
    Block block = keep_device(VmmMapping::import(context_, fd, fd_offset + bytes), bytes);
    const auto node = owned_.extract(block.device);
    block.device += fd_offset;  // the block's own address is the key it is released by
    auto& owned = owned_[block.device];
    owned = std::move(node.mapped());
    return block;
  }

  ExportRecord export_record(const Block& block) override {
    ExportRecord record = Arena::export_record(block);
    if (block.fd >= 0) return record;
    if (block.kind != Memory::device) {
      throw Error(Code::unsupported,
                  "this host memory cannot be shared with other processes: it has no descriptor.",
                  "allocate it with Communicator::allocate(bytes, Memory::host)");
    }
    const auto address = reinterpret_cast<cuda::DevicePointer>(block.device);
    const cuda::Current current(*context_);
    cuda::DevicePointer begin = 0;
    std::size_t bytes = 0;
    check(driver().memory_range(&begin, &bytes, address), "finding the allocation of a window");
    cuda::IpcHandle handle;
    const cuda::Result result = driver().ipc_get(&handle, begin);
    if (result != cuda::Result::success) {
      throw Error(Code::unsupported,
                  base::cat("this GPU memory cannot be shared with other processes: ",
                            cuda::text(result), "."),
                  "allocate it with cudaMalloc, with cuMemCreate and a POSIX descriptor, or with "
                  "Communicator::allocate");
    }
    record.has_ipc = 1;
    record.ipc_offset = address - begin;
    std::memcpy(record.ipc, handle.bytes, sizeof(record.ipc));
    return record;
  }

  Block map_record(const ExportRecord& record, int fd) override {
    if (!record.has_ipc) return map(fd, record.bytes, record.kind, record.fd_offset);
    std::lock_guard lock(mutex_);
    IpcMapping mapping(context_, record.ipc);
    Block block;
    block.device = reinterpret_cast<std::byte*>(mapping.address() + record.ipc_offset);
    block.bytes = record.bytes;
    block.kind = Memory::device;
    Owned owned;
    owned.ipc = std::move(mapping);
    owned_[block.device] = std::move(owned);
    return block;
  }

  Block alias(const Block& block, const Place& owner) override {
    if (block.kind == Memory::host || owner.device == context_->device()) return block;
    const auto address = reinterpret_cast<cuda::DevicePointer>(block.device);
    enable_peer(*context_, owner.device, address);
    return block;
  }

  Block adopt(void* pointer, std::uint64_t bytes) override {
    std::lock_guard lock(mutex_);
    Block block;
    block.device = static_cast<std::byte*>(pointer);
    block.bytes = bytes;
    const PointerFacts facts = pointer_facts(*context_, pointer, bytes);
    block.kind = facts.kind;
    Owned owned;
    if (facts.kind == Memory::host) {
      block.host = static_cast<std::byte*>(pointer);
      // Also where CUDA knows the first byte: it may be another window's, and end before this one.
      owned.registration = HostRegistration(context_, pointer, bytes);
      block.device = device_address(*context_, block.host);
      if (facts.file) {
        owned.fd = base::Fd::dup_of(facts.file.get());
        block.fd = owned.fd.get();
        block.fd_offset = facts.file_offset;
      }
    } else if (facts.vmm_exportable) {
      owned.fd = export_existing(*context_, pointer);
      block.fd = owned.fd.get();
      block.fd_offset = facts.offset_in_allocation;
    }
    // Not among owned_: the same address may be there, or be adopted twice.
    adopted_.emplace(block.device, std::move(owned));
    return block;
  }

  void disown(const Block& block) override {
    std::lock_guard lock(mutex_);
    auto [at, end] = adopted_.equal_range(block.device);
    while (at != end && block.fd >= 0 && at->second.fd.get() != block.fd) ++at;
    if (at != end) adopted_.erase(at);
  }

  void* upload(const void* data, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    const std::size_t need = round_up(std::max<std::size_t>(bytes, 1), 256);
    if (const auto free = free_tables_.find(need); free != free_tables_.end()) {
      const cuda::DevicePointer at = free->second;
      write(at, data, bytes);
      free_tables_.erase(free);
      table_bytes_[at] = need;
      return reinterpret_cast<void*>(at);
    }
    if (tables_.empty() || table_used_ + need > tables_.back().bytes()) {
      tables_.push_back(VmmMapping::create(context_, need));
      table_used_ = 0;
    }
    const cuda::DevicePointer at = tables_.back().address() + table_used_;
    table_used_ += need;
    write(at, data, bytes);
    table_bytes_[at] = need;
    return reinterpret_cast<void*>(at);
  }

  /// Tables come in few sizes (of so many ranks), so a free one serves the next of its size.
  void drop(const void* table) override {
    std::lock_guard lock(mutex_);
    const auto found = table_bytes_.find(reinterpret_cast<cuda::DevicePointer>(table));
    if (found == table_bytes_.end()) return;
    free_tables_.emplace(found->second, found->first);
    table_bytes_.erase(found);
  }

  void download(void* to, const void* from, std::size_t offset, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    need_staging();
    const cuda::Current current(*context_);
    auto source = reinterpret_cast<cuda::DevicePointer>(from) + offset;
    for (std::size_t done = 0; done < bytes;) {
      const std::size_t part = std::min(kStaging, bytes - done);
      check(driver().copy_async(reinterpret_cast<cuda::DevicePointer>(staging_.device),
                                source + done, part, stream_.handle()),
            base::cat("copying ", part, " bytes from GPU ", context_->device()));
      check(driver().stream_synchronize(stream_.handle()),
            base::cat("copying from GPU ", context_->device()));
      std::memcpy(static_cast<std::byte*>(to) + done, staging_.host, part);
      done += part;
    }
  }

  void update(void* table, std::size_t offset, const void* data, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    write(reinterpret_cast<cuda::DevicePointer>(table) + offset, data, bytes);
  }

 private:
  /// Members are destroyed last to first: a registration ends before its mapping does.
  struct Owned {
    base::Fd fd;
    VmmMapping vmm;
    IpcMapping ipc;
    base::Mapping mapping;
    HostRegistration registration;
  };
  static constexpr std::size_t kStaging = 64 * 1024;

  void need(cuda::DeviceAttribute attribute, const char* what) const {
    int value = 0;
    check(driver().device_attribute(&value, attribute, context_->device()),
          "asking a GPU what it supports");
    if (value == 0) {
      throw Error(
          Code::unsupported, base::cat("GPU ", context_->device(), " has no ", what, "."),
          "use the CPU device, or a GPU and driver that have it (containers: share /dev and IPC)");
    }
  }

  void zero(cuda::DevicePointer address, std::size_t bytes) {
    const cuda::Current current(*context_);
    check(driver().memset_d8_async(address, 0, bytes, stream_.handle()),
          base::cat("zeroing ", bytes, " bytes of GPU memory"));
    check(driver().stream_synchronize(stream_.handle()), "zeroing GPU memory");
  }

  void need_staging() {
    if (staging_.host) return;
    Block block = keep_host(base::memfd("marrow-staging", kStaging), kStaging, 0);
    staging_ = block;
  }

  /// Through a registered page: a copy from pageable memory would wait for other streams.
  void write(cuda::DevicePointer to, const void* data, std::size_t bytes) {
    need_staging();
    const cuda::Current current(*context_);
    for (std::size_t done = 0; done < bytes;) {
      const std::size_t part = std::min(kStaging, bytes - done);
      std::memcpy(staging_.host, static_cast<const std::byte*>(data) + done, part);
      check(driver().copy_async(to + done, reinterpret_cast<cuda::DevicePointer>(staging_.device),
                                part, stream_.handle()),
            base::cat("copying ", part, " bytes to GPU ", context_->device()));
      check(driver().stream_synchronize(stream_.handle()),
            base::cat("copying to GPU ", context_->device()));
      done += part;
    }
  }

  Block keep_device(VmmMapping mapping, std::uint64_t bytes) {
    Block block;
    block.device = reinterpret_cast<std::byte*>(mapping.address());
    block.bytes = bytes;
    block.kind = Memory::device;
    block.fd = mapping.fd();
    Owned owned;
    owned.vmm = std::move(mapping);
    owned_[block.device] = std::move(owned);
    return block;
  }

  Block keep_host(base::Fd fd, std::uint64_t bytes, std::uint64_t offset) {
    Owned owned;
    const std::uint64_t first = offset / page_size() * page_size();  // mmap wants whole pages
    owned.mapping = base::Mapping::of_fd(fd.get(), offset - first + bytes, first);
    owned.registration = HostRegistration(context_, owned.mapping.data(), owned.mapping.size());
    owned.fd = std::move(fd);
    Block block;
    block.host = owned.mapping.as<std::byte>(offset - first);
    block.device = device_address(*context_, block.host);
    block.bytes = bytes;
    block.kind = Memory::host;
    block.fd = owned.fd.get();
    block.fd_offset = offset;
    owned_[block.device] = std::move(owned);
    return block;
  }

  std::shared_ptr<cuda::Context> context_;
  cuda::Stream stream_;
  std::mutex mutex_;
  std::map<std::byte*, Owned> owned_;
  std::multimap<std::byte*, Owned> adopted_;
  std::vector<VmmMapping> tables_;
  std::size_t table_used_ = 0;
  std::map<cuda::DevicePointer, std::size_t> table_bytes_;  ///< in use
  std::multimap<std::size_t, cuda::DevicePointer> free_tables_;
  Block staging_;
};

}  // namespace

std::unique_ptr<Arena> create_cuda_arena(int device) { return std::make_unique<CudaArena>(device); }

}  // namespace marrow::memory
