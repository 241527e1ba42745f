// SPDX-License-Identifier: Apache-2.0
// The public face: argument checks, then the service. exchange_fds is in exchange_fds.cpp.
#include "bootstrap/bootstrap.hpp"

#include "base/text.hpp"
#include "bootstrap/service.hpp"

namespace marrow::bootstrap {

const char* name(PeerState state) noexcept {
  switch (state) {
    case PeerState::alive: return "alive";
    case PeerState::slow: return "slow";
    case PeerState::failed: return "failed";
  }
  return "unknown";
}

Bootstrap::Bootstrap(const UniqueId& id, int nranks, int rank, Options options) {
  if (nranks < 1) {
    throw Error(Code::invalid_argument, base::cat("A communicator of ", nranks, " ranks."),
                "pass the number of ranks, at least 1.");
  }
  service_ = std::make_unique<Service>(id, nranks, rank, std::move(options));
}

void Bootstrap::give_up(const UniqueId& id, int nranks, int rank, const Error& error) noexcept {
  try {
    Options options;
    options.deadline = base::Deadline::after(std::chrono::seconds(2));
    // What is wrong may be a parameter: none is read.
    options.parameters.set("MARROW_PEER_TIMEOUT", "30s");
    options.gave_up = error;
    const Bootstrap refused(id, nranks, rank, std::move(options));
  } catch (const std::exception&) {  // the same error, or nobody is there to be told
  }
}

Bootstrap::~Bootstrap() {
  // The child's copy cannot be taken apart (see there); the child's memory ends with it.
  if (service_ && service_->in_forked_child()) static_cast<void>(service_.release());
}

int Bootstrap::rank() const noexcept { return service_->rank_; }
int Bootstrap::nranks() const noexcept { return service_->nranks_; }

std::vector<std::vector<std::byte>> Bootstrap::allgather(std::span<const std::byte> mine,
                                                         MaybeDeadline deadline) {
  return service_->collective(Op::allgather, 0, mine, deadline);
}

void Bootstrap::barrier(MaybeDeadline deadline) {
  service_->collective(Op::barrier, 0, {}, deadline);
}

std::vector<std::byte> Bootstrap::broadcast(int root, std::span<const std::byte> mine,
                                            MaybeDeadline deadline) {
  service_->check_peer(root);
  auto parts = service_->collective(Op::broadcast, root,
                                    root == rank() ? mine : std::span<const std::byte>(), deadline);
  return std::move(parts[static_cast<std::size_t>(root)]);
}

std::vector<bool> Bootstrap::agree_failures(MaybeDeadline deadline) {
  return service_->agree(deadline);
}

void Bootstrap::admit(int rank, MaybeDeadline deadline) { service_->admit(rank, deadline); }

void Bootstrap::abandon(const std::string& sentence) { service_->abandon(sentence); }

void Bootstrap::close(MaybeDeadline deadline) { service_->close(deadline); }

PeerState Bootstrap::state(int peer) const {
  service_->check_peer(peer);
  std::lock_guard lock(service_->mutex_);
  return service_->peers_[static_cast<std::size_t>(peer)].state;
}

std::string Bootstrap::state_sentence(int peer) const {
  service_->check_peer(peer);
  std::lock_guard lock(service_->mutex_);
  return service_->peers_[static_cast<std::size_t>(peer)].sentence;
}

std::vector<bool> Bootstrap::mask() const {
  std::lock_guard lock(service_->mutex_);
  std::vector<bool> out;
  for (const auto& peer : service_->peers_) out.push_back(peer.masked);
  return out;
}

void Bootstrap::on_change(OnChange callback) { service_->set_on_change(std::move(callback)); }
void Bootstrap::revoke(const std::string& sentence) { service_->revoke(sentence); }
void Bootstrap::on_revoke(OnRevoke callback) { service_->set_on_revoke(std::move(callback)); }

std::optional<std::string> Bootstrap::revoked() const {
  std::lock_guard lock(service_->mutex_);
  if (!service_->revoked_) return std::nullopt;
  return service_->revoked_->second;
}

int Bootstrap::root() const {
  std::lock_guard lock(service_->mutex_);
  return service_->root_;
}

std::uint64_t Bootstrap::host_id(int peer) const { return service_->info(peer).host_id; }
std::uint64_t Bootstrap::process_id(int peer) const { return service_->info(peer).process_id; }
std::int64_t Bootstrap::pid(int peer) const { return service_->info(peer).pid; }
std::string Bootstrap::host_name(int peer) const { return service_->info(peer).host; }
bool Bootstrap::same_host(int peer) const { return host_id(peer) == host_id(rank()); }
bool Bootstrap::same_process(int peer) const { return process_id(peer) == process_id(rank()); }

}  // namespace marrow::bootstrap
