// SPDX-License-Identifier: Apache-2.0
// Passing the descriptors of regions and inboxes between the processes of one host. Each endpoint has
// one thread, asleep in poll, that answers its peers' requests and notices when a peer's end closes:
// the progress thread is never kept waiting by a system call.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/deadline.hpp"
#include "base/fd.hpp"
#include "base/unix_fds.hpp"

namespace marrow::networks::shm {

/// What is asked for: an endpoint's inbox or one of its regions.
inline constexpr std::uint64_t kInboxId = 0;

/// A mapped file's descriptor and which part of it is meant.
struct Offer {
  base::Fd fd;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

class DescriptorServer {
 public:
  /// Listens at once; answers from start() on. Throws Error.
  DescriptorServer();
  ~DescriptorServer();
  DescriptorServer(const DescriptorServer&) = delete;
  DescriptorServer& operator=(const DescriptorServer&) = delete;

  const std::string& socket_name() const { return name_; }
  void start();

  /// @param id  kInboxId, or unique and not 0
  void offer(std::uint64_t id, Offer offer);
  void withdraw(std::uint64_t id);

  /// Calls `closed` on the server's thread, once, when the other end of `socket` closes. The socket
  /// must stay open until the server is gone.
  void watch(int socket, std::function<void()> closed);

 private:
  struct Client {
    base::Fd socket;
    base::FdReceiver receiver;
  };
  void run();
  void wake();
  void answer(Client& client);

  std::string name_;
  base::Fd listener_;
  base::Fd wake_;
  std::mutex mutex_;  ///< offers and watched
  std::map<std::uint64_t, Offer> offers_;
  std::vector<std::pair<int, std::function<void()>>> watched_;
  std::vector<Client> clients_;  ///< the server thread's own
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// Our connection to a peer's server.
class DescriptorClient {
 public:
  /// Throws Error(timeout, authentication, system).
  DescriptorClient(const std::string& socket_name, base::Deadline deadline);
  int socket() const { return socket_.get(); }
  /// Throws Error(invalid_argument) when the peer has no such region; Error(timeout | peer_failed).
  Offer ask(std::uint64_t id, base::Deadline deadline);

 private:
  base::Fd socket_;
  std::mutex mutex_;
};

}  // namespace marrow::networks::shm
