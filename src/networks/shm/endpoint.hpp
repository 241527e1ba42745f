// SPDX-License-Identifier: Apache-2.0
// An endpoint of the shm network: the ranks of one host, as processes or as threads of one process.
// Every peer's region is mapped here, so a put is a memcpy by the progress thread and needs nobody at
// the other side; only messages are received. A thread rank's region is used at its own address: one
// address a byte, which is also what lets ThreadSanitizer see every conflict.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "networks/shm/descriptors.hpp"
#include "networks/shm/host_identity.hpp"
#include "networks/shm/inbox.hpp"

namespace marrow::networks::shm {

struct Options {
  /// Not 0: puts are held back and land in an order drawn from this seed, messages overtake them. The
  /// network then says it is unordered. For tests.
  std::uint64_t reorder = 0;
};
/// Throws Error(invalid_argument) naming the key.
Options parse_options(const std::string& text);

/// Memory as this process reaches it; ours or a peer's.
struct Region {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  bool device = false;
  std::uint64_t id = 0;    ///< ours: its offer
  base::Mapping mapping;   ///< a peer process's host memory
  void* mapped = nullptr;  ///< a peer process's device memory, through the copy engine
};

class Endpoint {
 public:
  Endpoint(const marrow_network_services& services, const Options& options, std::uint32_t rank,
           std::uint32_t nranks, const marrow_network_events& events);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  marrow_network_address address() const;
  void connect(const marrow_network_address* addresses, base::Deadline deadline);

  // Any thread.
  std::unique_ptr<Region> register_memory(const marrow_network_memory& memory, void* key,
                                          std::uint32_t* key_bytes);
  void deregister_memory(Region& region);
  std::unique_ptr<Region> import_key(std::uint32_t peer, const void* key, std::uint32_t key_bytes);
  void release_key(Region& region);
  void abort(std::uint32_t peer);

  // The progress thread.
  std::uint32_t post(const marrow_network_operation* operations, std::uint32_t n);
  std::uint32_t progress();
  std::uint32_t test(marrow_network_completion* completions, std::uint32_t n);

 private:
  struct Held {
    marrow_network_operation operation;
    bool copying = false;
    std::uint64_t ticket = 0;
    std::uint32_t age = 0;  ///< passes it has been held back
  };
  struct Peer {
    HostIdentity identity;
    std::unique_ptr<DescriptorClient> client;  ///< null: a thread of this process
    std::shared_ptr<Inbox> inbox;
    Sender sender;
    Receiver receiver;
    std::deque<Held> held;            ///< must wait: for a copy before it, or for its lot
    std::atomic<bool> gone{false};    ///< aborted or closed: its operations fail
    std::atomic<bool> closed{false};  ///< its end of the connection closed; not yet told
    std::string why;                  ///< set before `closed`
  };

  bool run(Peer& peer, const marrow_network_operation& operation);
  void complete(const marrow_network_operation& operation, int status);
  std::uint32_t progress_held(Peer& peer);
  void shuffle_held(Peer& peer);
  bool touches_device(const marrow_network_operation& operation) const;
  std::uint64_t start_copy(const marrow_network_operation& operation);
  std::uint32_t receive(std::uint32_t rank, Peer& peer);
  std::uint64_t random();

  const marrow_network_services& services_;
  const Options options_;
  const std::uint32_t rank_;
  const std::uint32_t nranks_;
  const marrow_network_events events_;
  const HostIdentity identity_;
  std::uint64_t endpoint_id_;
  std::shared_ptr<Inbox> inbox_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::deque<marrow_network_completion> completions_;
  std::uint32_t held_peers_ = 0;  ///< peers whose held is not empty
  std::uint64_t random_;
  std::atomic<std::uint64_t> next_region_{1};
  DescriptorServer server_;  ///< last: its thread calls into what stands above
};

}  // namespace marrow::networks::shm
