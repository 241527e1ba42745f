// SPDX-License-Identifier: Apache-2.0
#include "softnic/descriptor_server.hpp"

#include <cstring>
#include <span>
#include <string>

#include "base/log.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "base/threads.hpp"
#include "base/unix_fds.hpp"
#include "marrow/error.hpp"

namespace marrow::softnic {
namespace {

constexpr auto kTime = std::chrono::seconds(2);
constexpr std::chrono::milliseconds kPause{100};
/// More than there are processes in a job, each of which asks at once when it has connected.
constexpr std::size_t kMostSilent = 2 * kMaxProcesses;

std::string socket_name(std::uint64_t number) { return base::cat("marrow-softnic-", number); }

}  // namespace

DescriptorServer::DescriptorServer(Directory& directory, Regions& regions, Engine& lock)
    : directory_(directory),
      regions_(regions),
      lock_(lock),
      number_(base::random_u64() | 1),
      door_(base::unix_listen(socket_name(number_)), kMostSilent) {
  thread_ = base::start_thread("softnic's thread that hands out descriptors", [this] { serve(); });
  directory_.shared().processes[directory_.self()].descriptors.store(number_,
                                                                     std::memory_order_release);
}

DescriptorServer::~DescriptorServer() {
  directory_.shared().processes[directory_.self()].descriptors.store(0, std::memory_order_release);
  stop_.store(true);
  thread_.join();
}

void DescriptorServer::serve() {
  while (!stop_.load(std::memory_order_relaxed)) {
    try {
      if (auto asked = door_.next(base::Deadline::after(kPause))) answer(*asked);
    } catch (const Error& error) {
      MARROW_INFO(softnic, "handing out a descriptor: ", error.what());
      // Without descriptors of its own the door throws at once, again and again.
      std::this_thread::sleep_for(kPause);
    }
  }
}

void DescriptorServer::answer(base::FdDoor::Arrival& asked) {
  std::uint32_t key = 0;
  if (asked.message.payload.size() != sizeof key) return;
  std::memcpy(&key, asked.message.payload.data(), sizeof key);
  base::Fd copy;
  {
    Engine::ControlLock lock(lock_);
    const int fd = regions_.descriptor(key);
    if (fd >= 0) copy = base::Fd::dup_of(fd);
  }
  const int fd = copy.get();
  base::send_fds(asked.socket.get(), std::span<const int>(&fd, copy ? 1 : 0),
                 std::as_bytes(std::span(&key, 1)), base::Deadline::after(kTime));
}

base::Fd fetch_descriptor(Directory& directory, std::uint32_t process, std::uint32_t key) {
  const std::uint64_t number =
      directory.shared().processes[process].descriptors.load(std::memory_order_acquire);
  if (number == 0) {
    throw Error(Code::peer_failed,
                base::cat("process slot ", process, " hands out no descriptors of GPU memory."),
                "every rank must use softnic's GPU engine");
  }
  const base::Fd connection = base::unix_connect(socket_name(number), base::Deadline::after(kTime));
  base::send_fds(connection.get(), {}, std::as_bytes(std::span(&key, 1)),
                 base::Deadline::after(kTime));
  base::FdMessage reply = base::receive_fds(connection.get(), base::Deadline::after(kTime));
  if (reply.fds.empty()) {
    throw Error(Code::network, base::cat("key ", key, " has no descriptor in its process."));
  }
  return std::move(reply.fds[0]);
}

}  // namespace marrow::softnic
