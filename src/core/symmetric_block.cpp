// SPDX-License-Identifier: Apache-2.0
#include "core/symmetric_block.hpp"

#include "base/text.hpp"

namespace marrow::core {

struct SymmetricBlock::GdaRegistration {};

SymmetricBlock::SymmetricBlock(CommunicatorState& comm, memory::Arena& arena, const memory::Block& block,
                               std::uint32_t id, PathBits paths)
    : comm_(comm), arena_(arena), block_(block), paths_(paths), peers_(comm.nranks()) {
  handle_.abi = kAbiVersion;
  handle_.id = id;
  handle_.bytes = block.bytes;
  handle_.local = block.device;
  handle_.atomic_path = comm.plan().atomic;
  handle_.host_memory = block.kind == Memory::host;
  if (paths_ & bit(Path::lsa)) map_peers();
  if (paths_ & bit(Path::gda)) register_gda();
  if (paths_ & bit(Path::proxy)) register_proxy();
}

SymmetricBlock::~SymmetricBlock() {
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    // Mappings are ours to release; aliases and our own block are not (release ignores them).
    if (r != comm_.rank() && peers_[r].device && !comm_.bootstrap().same_process(r)) arena_.release(peers_[r]);
  }
}

void SymmetricBlock::map_peers() {
  peers_ = comm_.share(arena_, block_);
  std::vector<std::uint64_t> addresses(peers_.size());
  for (std::size_t r = 0; r < peers_.size(); ++r) addresses[r] = reinterpret_cast<std::uint64_t>(peers_[r].device);
  handle_.lsa = arena_.upload(std::span<const std::uint64_t>(addresses));
}

void SymmetricBlock::register_gda() {}
void SymmetricBlock::register_proxy() {}

}  // namespace marrow::core
