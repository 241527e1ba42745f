// SPDX-License-Identifier: Apache-2.0
// Arena of the CPU device: every block is a shared memfd mapping, so another process can map it by
// descriptor; "device" memory is host memory. Memory nobody touched costs nothing, so windows larger
// than the machine work (offsets past 4 GiB are tested that way).

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

#include "base/fd.hpp"
#include "base/mapping.hpp"
#include "base/memfd.hpp"
#include "memory/arena.hpp"
#include "memory/cpu_arena.hpp"
#include "memory/host_backing.hpp"

namespace marrow::memory {
namespace {

class CpuArena final : public Arena {
 public:
  Block allocate(std::uint64_t bytes, Memory) override {
    base::Fd fd = base::memfd("marrow", bytes);
    return keep(std::move(fd), bytes, 0);
  }

  void release(const Block& block) override {
    std::lock_guard lock(mutex_);
    owned_.erase(block.host);
  }

  Block map(int fd, std::uint64_t bytes, Memory, std::uint64_t fd_offset) override {
    return keep(base::Fd::dup_of(fd), bytes, fd_offset);
  }

  Block alias(const Block& block, const Place&) override { return block; }

  Block adopt(void* pointer, std::uint64_t bytes) override {
    Block block;
    block.device = block.host = static_cast<std::byte*>(pointer);
    block.bytes = bytes;
    block.kind = Memory::host;
    HostBacking backing = host_backing(pointer, bytes);
    if (backing.fd) {
      block.fd = backing.fd.get();
      block.fd_offset = backing.offset;
      std::lock_guard lock(mutex_);
      adopted_.push_back(std::move(backing.fd));
    }
    return block;
  }

  void disown(const Block& block) override {
    std::lock_guard lock(mutex_);
    std::erase_if(adopted_,
                  [&](const base::Fd& fd) { return block.fd >= 0 && fd.get() == block.fd; });
  }

  void* upload(const void* data, std::size_t bytes) override {
    auto table = std::make_unique<Chunk[]>((bytes + sizeof(Chunk) - 1) / sizeof(Chunk) + 1);
    std::memcpy(table.get(), data, bytes);
    std::lock_guard lock(mutex_);
    void* const at = table.get();
    tables_.emplace(at, std::move(table));
    return at;
  }

  void drop(const void* table) override {
    std::lock_guard lock(mutex_);
    tables_.erase(table);
  }

  void download(void* to, const void* from, std::size_t offset, std::size_t bytes) override {
    std::memcpy(to, static_cast<const std::byte*>(from) + offset, bytes);
  }
  void update(void* table, std::size_t offset, const void* data, std::size_t bytes) override {
    // Kernels read these tables with relaxed byte or word loads while we write.
    auto* to = static_cast<unsigned char*>(table) + offset;
    auto* from = static_cast<const unsigned char*>(data);
    if (bytes == 8) {
      std::uint64_t word;
      std::memcpy(&word, from, 8);
      std::atomic_ref<std::uint64_t>(*reinterpret_cast<std::uint64_t*>(to))
          .store(word, std::memory_order_relaxed);
      return;
    }
    for (std::size_t i = 0; i < bytes; ++i) {
      std::atomic_ref<unsigned char>(to[i]).store(from[i], std::memory_order_relaxed);
    }
  }

 private:
  struct alignas(256) Chunk {
    std::byte bytes[256];
  };
  struct Owned {
    base::Fd fd;
    base::Mapping mapping;
  };

  Block keep(base::Fd fd, std::uint64_t bytes, std::uint64_t offset) {
    constexpr std::uint64_t kPage = 4096;
    const std::uint64_t lead =
        offset % kPage;  // a mapping starts at a page; adopted memory need not
    Owned owned;
    owned.mapping = base::Mapping::of_fd(fd.get(), bytes + lead, offset - lead);
    owned.fd = std::move(fd);
    Block block;
    block.device = block.host = owned.mapping.as<std::byte>(lead);
    block.bytes = bytes;
    block.kind = Memory::host;
    block.fd = owned.fd.get();
    block.fd_offset = offset;
    std::lock_guard lock(mutex_);
    owned_.emplace(block.host, std::move(owned));
    return block;
  }

  std::mutex mutex_;
  std::map<std::byte*, Owned> owned_;
  std::vector<base::Fd> adopted_;
  std::map<const void*, std::unique_ptr<Chunk[]>> tables_;
};

}  // namespace

std::unique_ptr<Arena> create_cpu_arena() { return std::make_unique<CpuArena>(); }

}  // namespace marrow::memory
