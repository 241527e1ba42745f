// SPDX-License-Identifier: Apache-2.0
// An endpoint over libfabric's reliable datagrams (FI_EP_RDM). Puts are writes whose remote completion data is the
// immediate; a put_value and a message are small packets, since no provider promises that a write's 8-byte words
// land whole, and the receiver's thread stores those: into device memory by the GPU's copy engine, whose end it
// awaits before it says that they landed. Puts of a few bytes are packets too, where the provider injects them: over
// tcp that takes 3.3 us, a write and its completion 6.1. Connections are the provider's: made on first use.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <array>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "marrow/network.h"
#include "networks/libfabric/devices.hpp"

namespace marrow::networks::libfabric {

struct CloseFid {
  template <class Fid>
  void operator()(Fid* object) const {
    object->fid.ops->close(&object->fid);
  }
};
template <class Fid>
using Owned = std::unique_ptr<Fid, CloseFid>;

/// Our memory.
struct Region {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  bool device = false;
  std::uint32_t id = 0;
  Owned<fid_mr> mr;
};
/// A peer's.
struct Remote {
  std::uint32_t id = 0;
  std::uint64_t key = 0;
  std::uint64_t base = 0;  ///< of offsets: its virtual address, or 0
  std::uint64_t bytes = 0;
  bool device = false;
  std::byte* own = nullptr;  ///< set when the peer is this rank
};

/// Of an endpoint, random: whoever was given its address knows it, and shows it in every packet.
using Token = std::array<std::uint8_t, 16>;

enum class PacketKind : std::uint8_t { message = 1, value = 2 };

/// What is sent, not written. Small enough to be injected by every provider.
struct Packet {
  Token token;  ///< the receiver's
  PacketKind kind;
  std::uint8_t has_immediate : 1;
  std::uint8_t bytes : 7;  ///< of content
  std::uint16_t source;
  std::uint32_t number;  ///< of this packet, from that source to this rank
  union Content {
    std::uint8_t message[MARROW_NETWORK_MAX_MESSAGE];
    struct {
      std::uint32_t region;
      std::uint32_t immediate;
      std::uint64_t offset;
      std::uint8_t data[MARROW_NETWORK_MAX_MESSAGE - 16];
    } value;
  } content;

  static constexpr std::size_t kHeader = 24;
  static constexpr std::size_t kValueHeader = 16;
};
static_assert(sizeof(Packet) == Packet::kHeader + MARROW_NETWORK_MAX_MESSAGE);

class Endpoint {
 public:
  Endpoint(const marrow_network_services& services, const fi_info& device, const Options& options,
           std::uint32_t rank, std::uint32_t nranks, const marrow_network_events& events);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  marrow_network_address address() const;
  void connect(const marrow_network_address* addresses);

  // Any thread.
  std::unique_ptr<Region> register_memory(const marrow_network_memory& memory, void* key,
                                          std::uint32_t* key_bytes);
  void deregister_memory(const Region& region);
  std::unique_ptr<Remote> import_key(std::uint32_t peer, const void* key, std::uint32_t key_bytes);
  void abort(std::uint32_t peer);

  // The progress thread.
  std::uint32_t post(const marrow_network_operation* operations, std::uint32_t n);
  std::uint32_t progress();
  std::uint32_t test(marrow_network_completion* completions, std::uint32_t n);

 private:
  using Clock = std::chrono::steady_clock;

  /// What a completion queue's context points to; first in it what providers may write to.
  struct Context {
    fi_context2 for_provider;
    enum class Kind : std::uint8_t { operation, send, receive } kind;
  };
  struct Request : Context {
    std::uint64_t token = 0;
    std::uint32_t peer = 0;
    bool active = false;   ///< the provider has it
    bool dropped = false;  ///< completed by us already
  };
  struct Slot : Request {  ///< with a packet of its own, in registered memory
    Packet* packet = nullptr;
  };
  struct Peer {
    std::string where;
    fi_addr_t address = FI_ADDR_NOTAVAIL;
    std::atomic<bool> gone{false};  ///< aborted or down: its operations fail
    bool down = false;              ///< told
    bool ending = false;            ///< its operations were looked at after gone
    Token token{};
    std::uint32_t packets_sent = 0;
    std::uint32_t packets_taken = 0;
    Clock::time_point trying{};  ///< since when it cannot be reached; none: it can
  };

  void open(const fi_info& device);
  void log(int level, const std::string& line) const {
    if (services_.log) services_.log(services_.user, level, line.c_str());
  }
  Owned<fid_mr> register_own(void* data, std::size_t bytes);
  void post_receive(Slot& slot);
  std::int64_t start(const marrow_network_operation& operation);
  std::int64_t write(const marrow_network_operation& operation);
  std::int64_t read(const marrow_network_operation& operation);
  std::int64_t send(const marrow_network_operation& operation);
  void run_own(const marrow_network_operation& operation);
  void finish_own(const marrow_network_operation& operation);
  /// Started by the GPU's copy engine; the copies of an endpoint end in their order.
  struct Copying {
    std::uint64_t ticket = 0;
    std::uint32_t source = 0;
    marrow_network_operation operation{};  ///< of ours to ourselves; of a peer: its immediate
  };
  bool start_copy(void* to, const void* from, std::uint64_t bytes, Copying copying);
  std::uint32_t take_copies();
  Request& take_request(const marrow_network_operation& operation);
  void give_back(Request& request);
  void complete(std::uint64_t token, std::uint32_t peer, int status);
  void fail(Request& request, int error);
  std::uint32_t take(const fi_cq_data_entry& entry, fi_addr_t source);
  std::uint32_t take_packet(const Packet& packet, std::size_t bytes);
  void take_error();
  bool store_packet(std::uint32_t source, const Packet& packet);
  std::uint32_t take_aborted();
  bool follows(const Packet& packet);
  void peer_down(std::uint32_t peer, const std::string& why);
  bool still_trying(std::uint32_t peer, std::int64_t error);
  std::uint32_t say_given_up();
  void* descriptor(const Region& region) const;

  const marrow_network_services& services_;
  const Options options_;
  const std::uint32_t rank_;
  const std::uint32_t nranks_;
  const marrow_network_events events_;
  Info info_;
  Token token_{};
  bool stranger_ = false;  ///< one was told of
  bool carries_rank_ = false;
  bool numbers_packets_ = false;
  bool closes_connections_ = false;  ///< when an address is removed
  std::size_t most_injected_ = 0;    ///< bytes of a put that goes as a packet
  std::chrono::milliseconds patience_{30000};

  Owned<fid_fabric> fabric_;
  Owned<fid_domain> domain_;
  Owned<fid_cq> cq_;
  Owned<fid_av> av_;
  Owned<fid_mr> packets_mr_;
  std::vector<Packet> packets_;
  std::vector<Slot> receives_;
  std::deque<Slot> sends_;
  std::vector<Slot*> free_sends_;
  std::deque<Request> requests_;
  std::vector<Request*> free_requests_;
  Owned<fid_ep> ep_;  ///< after what it uses: closed first

  std::vector<std::unique_ptr<Peer>> peers_;
  std::unordered_map<fi_addr_t, std::uint32_t> rank_of_;  ///< where completions do not carry it
  /// How long a provider may take to give back what was under way to a peer that is gone.
  static constexpr std::chrono::milliseconds kGrace{500};
  std::vector<std::pair<std::uint32_t, Clock::time_point>>
      ends_;  ///< {peer that is gone, latest end}
  std::vector<std::pair<std::uint32_t, std::string>> given_up_;  ///< in post(), to be said
  std::atomic<bool> aborted_{false};  ///< some peer's gone was set since the last look
  std::deque<marrow_network_completion> completions_;
  std::deque<marrow_network_operation> own_;  ///< messages and immediates of this rank to itself
  std::deque<Copying> copying_;
  bool copy_failed_ = false;
  std::mutex mutex_;
  std::unordered_map<std::uint32_t, const Region*> regions_;  ///< by id, for packets
  std::uint32_t next_region_ = 1;
};

}  // namespace marrow::networks::libfabric
