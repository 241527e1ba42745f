// SPDX-License-Identifier: Apache-2.0
// How ranks see each other's memory: threads of one process exchange pointers, processes of one host
// exchange descriptors.
#include "base/text.hpp"
#include "core/state.hpp"

namespace marrow::core {
namespace {

/// A block as the others need to know it. Trivially copyable.
struct BlockRecord {
  std::uint64_t device = 0;
  std::uint64_t host = 0;
  std::uint64_t bytes = 0;
  std::uint64_t fd_offset = 0;
  Place place;
  Memory kind = Memory::host;
  std::uint8_t has_fd = 0;
};

}  // namespace

std::vector<memory::Block> CommunicatorState::share(memory::Arena& arena, const memory::Block& mine) {
  BlockRecord record;
  record.device = reinterpret_cast<std::uint64_t>(mine.device);
  record.host = reinterpret_cast<std::uint64_t>(mine.host);
  record.bytes = mine.bytes;
  record.fd_offset = mine.fd_offset;
  record.place = place();
  record.kind = mine.kind;
  record.has_fd = mine.fd >= 0;
  const std::vector<BlockRecord> records = allgather(record);
  const std::vector<std::vector<base::Fd>> fds =
      bootstrap_->exchange_fds(mine.fd >= 0 ? std::span<const int>(&mine.fd, 1) : std::span<const int>());

  std::vector<memory::Block> blocks(nranks());
  together("mapping peers' memory", [&] {
    for (int r = 0; r < nranks(); ++r) {
      if (masked_[r] || !plan_.same_team(rank(), r)) continue;
      const BlockRecord& other = records[r];
      if (r == rank()) {
        blocks[r] = mine;
      } else if (bootstrap_->same_process(r)) {
        memory::Block theirs;
        theirs.device = reinterpret_cast<std::byte*>(other.device);
        theirs.host = reinterpret_cast<std::byte*>(other.host);
        theirs.bytes = other.bytes;
        theirs.kind = other.kind;
        blocks[r] = arena.alias(theirs, other.place);
      } else if (other.has_fd && !fds[r].empty()) {
        blocks[r] = arena.map(fds[r][0].get(), other.bytes, other.kind, other.fd_offset);
      } else {
        throw Error(Code::unsupported,
                    base::cat("rank ", r, "'s memory of ", other.bytes,
                              " bytes has no descriptor that rank ", rank(), " in another process could map"),
                    "use Communicator::allocate, or register memory that is a shared memfd mapping (CPU) or CUDA VMM "
                    "memory with a POSIX descriptor (GPU)");
      }
    }
  });
  return blocks;
}

}  // namespace marrow::core
