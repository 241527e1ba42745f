// SPDX-License-Identifier: Apache-2.0
// Where a communicator's memory comes from. One Arena per communicator (and one per device
// communicator, so that closing it frees at once); it owns what it hands out.
//
//   CPU device   everything is a shared memfd mapping; tables are heap memory
//   GPU          device: CUDA VMM with a POSIX descriptor; host: memfd, mapped and registered
//                (cudaHostRegister), so that GPU, CPU threads and other processes all reach it;
//                tables: device memory filled by copy
#pragma once

#include <cstring>
#include <memory>
#include <span>

#include "marrow/place.hpp"
#include "memory/block.hpp"

namespace marrow::memory {

class Arena {
 public:
  virtual ~Arena() = default;
  Arena() = default;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// The executor's kind of arena.
  /// @throws Error(unsupported) for a GPU place without a driver, naming what is missing
  static std::unique_ptr<Arena> create(const Place& place);

  /// Zeroed, page-aligned, exportable by descriptor (block.fd stays the arena's).
  /// @throws Error(out_of_memory | cuda | system)
  virtual Block allocate(std::uint64_t bytes, Memory kind) = 0;
  /// On a GPU, host memory is given back when the kernels that run now have ended: its registration
  /// cannot be taken back before. Everything else returns at once.
  virtual void release(const Block& block) = 0;

  /// Maps another process's block by its descriptor for our kernels and, for host memory, our CPU
  /// threads. The descriptor is duplicated as needed.
  virtual Block map(int fd, std::uint64_t bytes, Memory kind, std::uint64_t fd_offset = 0) = 0;

  /// What a peer process gets of one of our blocks (allocated or adopted): give it to its map_record,
  /// with block.fd when has_fd is set.
  /// @throws Error(unsupported) when the memory cannot be shared with another process
  virtual ExportRecord export_record(const Block& block) {
    ExportRecord record;
    record.bytes = block.bytes;
    record.fd_offset = block.fd_offset;
    record.kind = block.kind;
    record.has_fd = block.fd >= 0;
    return record;
  }
  /// @param fd  descriptor that came with the record; -1 when it has none. Duplicated as needed
  virtual Block map_record(const ExportRecord& record, int fd) {
    return map(fd, record.bytes, record.kind, record.fd_offset);
  }

  /// Makes another thread rank's block usable by our kernels: same address on the CPU; on a GPU
  /// peer access is enabled (the address stays).
  virtual Block alias(const Block& block, const Place& owner) = 0;

  /// What is known of memory that somebody else allocated: kind, and a descriptor if it has one.
  /// @throws Error(unsupported) with the reason
  virtual Block adopt(void* pointer, std::uint64_t bytes) = 0;
  /// Ends one adopt() of this block: gives back its descriptor and registration. The memory stays.
  virtual void disown(const Block& block) = 0;

  /// A copy that kernels read, e.g. a table of peers. Aligned to 256 bytes.
  virtual void* upload(const void* data, std::size_t bytes) = 0;
  /// Takes an uploaded table back; nobody reads it any more. Null: nothing to do.
  virtual void drop(const void* table) = 0;
  /// Overwrites an uploaded table, also while kernels run (words are written whole).
  virtual void update(void* table, std::size_t offset, const void* data, std::size_t bytes) = 0;

  /// Reads what kernels or a NIC wrote to device memory, also while kernels run.
  virtual void download(void* to, const void* from, std::size_t offset, std::size_t bytes) = 0;

  template <class T>
  T* upload(std::span<const T> values) {
    return static_cast<T*>(upload(values.data(), values.size_bytes()));
  }
};

}  // namespace marrow::memory
