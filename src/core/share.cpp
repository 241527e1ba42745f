// SPDX-License-Identifier: Apache-2.0
// How ranks see each other's memory: threads of one process exchange pointers, processes of one host
// exchange descriptors.
#include "base/text.hpp"
#include "core/state.hpp"

namespace marrow::core {
namespace {

/// A block as the others need to know it: a pointer for threads of our process, a record for other
/// processes. Trivially copyable.
struct BlockRecord {
  std::uint64_t device = 0;
  std::uint64_t host = 0;
  memory::ExportRecord exported;
  Place place;
};

}  // namespace

std::vector<memory::Block> CommunicatorState::share(memory::Arena& arena,
                                                    const memory::Block& mine) {
  BlockRecord record;
  record.device = reinterpret_cast<std::uint64_t>(mine.device);
  record.host = reinterpret_cast<std::uint64_t>(mine.host);
  record.place = place();
  together("exporting memory to peers", [&] { record.exported = arena.export_record(mine); });
  const std::vector<BlockRecord> records = allgather(record);
  const std::vector<std::vector<base::Fd>> fds = bootstrap_->exchange_fds(
      mine.fd >= 0 ? std::span<const int>(&mine.fd, 1) : std::span<const int>());

  std::vector<memory::Block> blocks(nranks());
  const auto map_all = [&] {
    for (int r = 0; r < nranks(); ++r) {
      if (masked_[r] || !plan_.same_team(rank(), r)) continue;
      const BlockRecord& other = records[r];
      if (r == rank()) {
        blocks[r] = mine;
      } else if (bootstrap_->same_process(r)) {
        memory::Block theirs;
        theirs.device = reinterpret_cast<std::byte*>(other.device);
        theirs.host = reinterpret_cast<std::byte*>(other.host);
        theirs.bytes = other.exported.bytes;
        theirs.kind = other.exported.kind;
        blocks[r] = arena.alias(theirs, other.place);
      } else if (other.exported.has_ipc || (other.exported.has_fd && !fds[r].empty())) {
        blocks[r] = arena.map_record(other.exported, fds[r].empty() ? -1 : fds[r][0].get());
      } else {
        throw Error(Code::unsupported,
                    base::cat("rank ", r, "'s memory of ", other.exported.bytes,
                              " bytes has no descriptor that rank ", rank(),
                              " in another process could map"),
                    "use Communicator::allocate, or register memory that is a shared memfd mapping "
                    "(CPU) or CUDA VMM "
                    "memory with a POSIX descriptor (GPU)");
      }
    }
  };
  try {
    together("mapping peers' memory", map_all);
  } catch (...) {
    for (int r = 0; r < nranks(); ++r) {
      if (blocks[r].device && r != rank() && !bootstrap_->same_process(r)) arena.release(blocks[r]);
    }
    throw;
  }
  return blocks;
}

}  // namespace marrow::core
