// SPDX-License-Identifier: Apache-2.0
// What stands behind the opaque handles that the verbs functions give out. Plain structs derived from
// the interface's own; all are touched under the engine's ControlLock.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/mapping.hpp"
#include "marrow/abi/mlx5_prm.h"
#include "softnic/gpu_engine.hpp"
#include "softnic/job.hpp"
#include "softnic/queues.hpp"
#include "softnic/receive.hpp"
#include "verbs/ibverbs_abi.h"

namespace marrow::softnic {

struct Context;
struct VerbsCq;  // front_verbs.hpp

struct Pd : verbs::ibv_pd {
  std::uint32_t pdn = 0;
  std::uint32_t users = 0;
};

struct Mr : verbs::ibv_mr {};

struct Umem : verbs::mlx5dv_devx_umem {
  Context* owner = nullptr;
  std::byte* address = nullptr;
  std::size_t bytes = 0;
  std::uint32_t users = 0;

  /// Pointer to [offset, offset + size), null if not all inside.
  std::byte* at(std::uint64_t offset, std::uint64_t size) const {
    return offset > bytes || size > bytes - offset ? nullptr : address + offset;
  }
};

/// Memory of up to 64 UARs. Each has a start of its own, 128 bytes behind the previous one, so that
/// base_addr + kNoRecordDoorbell (even cache lines) and reg_addr (odd ones) are its alone. A BlueFlame
/// UAR has a page to itself.
struct UarPage {
  static constexpr std::uint32_t kStep = 128;
  static constexpr std::uint32_t kRegister = 0x800 + 64;
  static constexpr std::uint32_t kBlueFlameRegister = 0x800;
  static constexpr std::uint32_t kCells = 64;
  static constexpr std::uint32_t kBytes = 12288;
  static_assert(kCells * kStep + kRegister <= kBytes && mlx5::kNoRecordDoorbell % kStep == 0);
  base::Mapping memory;
  std::uint64_t used = 0;  ///< bit i = UAR i
};

struct Uar : verbs::mlx5dv_devx_uar {
  Context* owner = nullptr;
  UarPage* page = nullptr;  ///< null: a cell of the GPU engine
  GpuEngine* engine = nullptr;
  std::uint32_t cell = 0;
  bool blue_flame = false;
  bool freed = false;
  std::uint32_t users = 0;
};

struct CqObject;
struct QpObject;

struct Context : verbs::ibv_context {
  ::pid_t process = ::getpid();  ///< that opened it
  std::shared_ptr<Job> job;
  std::set<Pd*> pds;
  std::set<Mr*> mrs;
  std::map<std::uint32_t, std::unique_ptr<Umem>> umems;
  std::map<std::uint32_t, std::unique_ptr<Uar>> uars;
  std::vector<std::unique_ptr<UarPage>> pages;
  std::map<std::uint32_t, CqObject*> cqs;
  std::map<std::uint32_t, ReceiveQueue> shared_receives;  ///< by SRQ number
  int async_write_fd = -1;                                ///< other end of async_fd
  std::mutex event_lock;
  std::map<std::uint64_t, VerbsCq*> event_queues;  ///< by Events::number, under event_lock alone
  int gpu = -1;                                    ///< whose kernels use the queues; -1: a CPU's
  GpuEngine* engine = nullptr;  ///< of queues made from now on; null: the CPU engine
  std::set<verbs::mlx5dv_devx_obj*> objects;

  std::uint16_t lid() const { return static_cast<std::uint16_t>(job->directory().self() + 1); }
  std::uint64_t guid() const { return 0x024d415252000000ull + lid(); }
};

}  // namespace marrow::softnic

namespace marrow::verbs {
/// The interface leaves this type open; softnic is its only maker in this program.
struct mlx5dv_devx_obj {
  softnic::Context* owner = nullptr;
  virtual ~mlx5dv_devx_obj() = default;
};
}  // namespace marrow::verbs

namespace marrow::softnic {

/// A queue pair with what only the control path and the CPU engine need.
/// GIDs of a RoCE port.
inline constexpr int kRoceGids = 4;

struct HostQueuePair : QueuePair {
  std::uint8_t context[mlx5::qpc::kBytes] = {};  ///< as given, for QUERY_QP
  Work own_work;
  MessageState own_message;
};

struct CqObject : verbs::mlx5dv_devx_obj {
  CompletionQueue cq;
  Events events;
  GpuEngine* engine = nullptr;
  Umem* ring = nullptr;
  Umem* record = nullptr;
};

struct QpObject : verbs::mlx5dv_devx_obj {
  HostQueuePair qp;
  Umem* rings = nullptr;
  Umem* record = nullptr;
  Uar* uar = nullptr;
};

/// A command that the NIC refuses: PRM status and the reason in words.
struct Refused {
  mlx5::CommandStatus status;
  std::string sentence;
};

// commands.cpp: the PRM. `in` and `out` have at least the header's size; lock held. Throw Refused.
std::unique_ptr<verbs::mlx5dv_devx_obj> create_object(Context& context, const std::uint8_t* in,
                                                      std::size_t in_bytes, std::uint8_t* out,
                                                      std::size_t out_bytes);
void modify_object(verbs::mlx5dv_devx_obj& object, const std::uint8_t* in, std::size_t in_bytes);
void query_object(const verbs::mlx5dv_devx_obj& object, const std::uint8_t* in, std::uint8_t* out,
                  std::size_t out_bytes);
void general_command(const Context& context, const std::uint8_t* in, std::uint8_t* out,
                     std::size_t out_bytes);
/// Ends a UAR that its owner freed, once nobody uses it. Lock held.
void release_uar(Uar& uar);
/// Detaches the object from the engine. @throws Refused while others use it
void detach_object(verbs::mlx5dv_devx_obj& object);

/// The event queue number that query_eqn reports and CREATE_CQ wants back.
inline constexpr std::uint32_t kEventQueue = 4;
inline constexpr std::uint32_t kLogMaxCq = 22;
/// READs and atomics in flight, as initiator and as responder.
inline constexpr int kLogMostReadsInFlight = 4;
inline constexpr int kMostReadsInFlight = 1 << kLogMostReadsInFlight;

}  // namespace marrow::softnic
