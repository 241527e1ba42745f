// SPDX-License-Identifier: Apache-2.0
// Marrow's kernels of the issue bench, by the public API: a put of 64 bytes through Gin<Path::gda> on a
// device communicator whose queues no NIC reads. Included by two sources, one of which is compiled
// without the check for room.
#pragma once

#include <cstring>
#include <vector>

#include "bench.cuh"
#include "marrow/device.cuh"

namespace gda_bench {
namespace {

using namespace marrow;

enum class What { put, put_value, put_signal, put_each_lane };

/// kFixed: the sharing mode is a constant of the kernel.
template <Sharing kSharing, bool kFixed>
__device__ __forceinline__ Gin<Path::gda> gin_of(const DeviceCommunicator& comm) {
  if constexpr (kFixed) {
    return Gin<Path::gda>(comm, 0, kSharing);
  } else {
    return Gin<Path::gda>(comm, 0);
  }
}

template <What kWhat>
__device__ __forceinline__ Status post(const Gin<Path::gda>& gin, int peer,
                                       const WindowHandle& window, std::uint64_t offset,
                                       Doorbell doorbell) {
  if constexpr (kWhat == What::put) {
    return gin.put(peer, window, offset, window, offset, 64, doorbell);
  } else if constexpr (kWhat == What::put_value) {
    return gin.put_value(peer, window, offset, offset, doorbell);
  } else if constexpr (kWhat == What::put_signal) {
    return gin.put(peer, window, offset, window, offset, 64, SignalAdd{0, 1}, doorbell);
  } else {
    return gin.put(peer, window, offset, window, offset, 64, EachLane{}, doorbell);
  }
}

/// @param every  a doorbell with every `every`-th call, a power of two
template <Sharing kSharing, bool kFixed, What kWhat>
__global__ void issue(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                      const MARROW_GRID_CONSTANT WindowHandle window, const int* peers, int every,
                      int calls, std::uint32_t* log, Clock* clock, int* failed) {
  const auto gin = gin_of<kSharing, kFixed>(comm);
  const int peer = *peers;  // as from a routing table
  Status worst = Status::ok;
  if (every == 1) {
    timed(log, clock, calls, [&](int i) {
      worst = worse(
          worst, post<kWhat>(gin, peer, window, static_cast<std::uint64_t>(i) * 64, Doorbell::now));
    });
  } else {
    timed(log, clock, calls, [&](int i) {
      worst = worse(worst, post<kWhat>(gin, peer, window, static_cast<std::uint64_t>(i) * 64,
                                       (i + 1) & (every - 1) ? Doorbell::deferred : Doorbell::now));
    });
  }
  if (worst != Status::ok) *failed = static_cast<int>(worst);
}

/// One thread that holds its queue (ExclusiveQueue).
template <bool kSignal>
__global__ void issue_held(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                           const MARROW_GRID_CONSTANT WindowHandle window, const int* peers,
                           int every, int calls, std::uint32_t* log, Clock* clock, int* failed) {
  auto queue = gin_of<Sharing::thread, true>(comm).exclusive(*peers);
  const auto target = queue.remote(window);
  const auto source = queue.local(window);
  Status worst = Status::ok;
  const auto put = [&](int i, Doorbell doorbell) {
    const std::uint64_t offset = static_cast<std::uint64_t>(i) * 64;
    if constexpr (kSignal) {
      worst =
          worse(worst, queue.put(target, offset, source, offset, 64, SignalAdd{0, 1}, doorbell));
    } else {
      worst = worse(worst, queue.put(target, offset, source, offset, 64, doorbell));
    }
  };
  if (every == 1) {
    timed(log, clock, calls, [&](int i) { put(i, Doorbell::now); });
  } else {
    timed(log, clock, calls,
          [&](int i) { put(i, (i + 1) & (every - 1) ? Doorbell::deferred : Doorbell::now); });
  }
  if (worst != Status::ok) *failed = static_cast<int>(worst);
}

/// Every warp has one peer.
template <Sharing kSharing, What kWhat>
__global__ void rate(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                     const MARROW_GRID_CONSTANT WindowHandle window, int queues, std::uint64_t ns,
                     Rate* out, int* failed) {
  const auto gin = gin_of<kSharing, true>(comm);
  const int warps = (static_cast<int>(blockDim.x) + 31) / 32;
  const int peer =
      (static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / 32) % queues;
  const std::uint64_t own = (blockIdx.x * blockDim.x + threadIdx.x) * 64ull;
  Status worst = Status::ok;
  rated(out, ns, 4,
        [&](int) { worst = worse(worst, post<kWhat>(gin, peer, window, own, Doorbell::now)); });
  if (worst != Status::ok) *failed = static_cast<int>(worst);
}

/// A communicator of `queues` peers whose gda queues no NIC reads.
class Fabricated {
 public:
  Fabricated(int queues, Sharing sharing, Placement placement, GdaRelease release)
      : queues_(queues), placement_(placement) {
    const Memory& m = memory(placement);
    std::vector<GdaQueue> image(queues + 1);
    GdaDevice header;
    header.queues = queues;
    for (int i = 0; i < queues; ++i) {
      GdaQueue& q = image[i + 1];
      q.sq = m.sq[i];
      q.doorbell = m.doorbell[i];
      q.record = reinterpret_cast<std::uint32_t*>(m.record[i]) + 1;
      q.qpn = mlx5::to_big32(qpn(i) << 8);
      q.mask = kDepth - 1;
      q.release = static_cast<std::uint8_t>(release);
      q.cq = reinterpret_cast<const std::uint32_t*>(m.cq) + 15;
      q.completed_index = kFarAhead;
    }
    // The header takes the 128 bytes before the first queue.
    const std::size_t at = sizeof(GdaQueue) - sizeof(GdaDevice);
    std::memcpy(reinterpret_cast<std::byte*>(image.data()) + at, &header, sizeof header);
    block_ = upload(image.data(), image.size() * sizeof(GdaQueue));
    const std::vector<std::uint8_t> path(queues, static_cast<std::uint8_t>(Path::gda));
    const std::vector<std::uint64_t> base(queues, 0x1000000);
    const std::vector<std::uint32_t> rkey(queues, mlx5::to_big32(0x77));
    window.abi = kAbiVersion;
    window.bytes = std::uint64_t{1} << 40;
    window.gda_base = upload(base.data(), base.size() * 8);
    window.gda_rkey = upload(rkey.data(), rkey.size() * 4);
    window.gda_local = 0x2000000;
    window.gda_lkey = mlx5::to_big32(0x66);
    window.atomic_path = Path::gda;
    comm.abi = kAbiVersion;
    comm.bytes = sizeof comm;
    comm.nranks = queues;
    comm.contexts = 1;
    comm.signals = comm.signal_words = 1;
    comm.atomic_path = Path::gda;
    comm.connected = comm.feeds = 1u << static_cast<int>(Path::gda);
    comm.sharing = sharing;
    comm.wait_ns = 2'000'000'000;
    comm.path = upload(path.data(), path.size());
    const ControlBlock control{};
    comm.control = upload(&control, sizeof control);
    const std::uint64_t look[2] = {};
    comm.look = upload(look, sizeof look);
    comm.sync[static_cast<int>(Path::gda)] = window;
    comm.gda = reinterpret_cast<const GdaDevice*>(reinterpret_cast<std::byte*>(block_) + at);
    const int none = 0;
    failed = upload(&none, sizeof none);
    peers = upload(&none, sizeof none);
  }
  ~Fabricated() {
    for (void* p : uploads_) cudaFree(p);
  }
  static std::uint32_t qpn(int i) { return 0x100 + i; }

  /// Ring, record and doorbell say what was posted; all indices agree; no call failed.
  /// @param entries  WQEs posted in all, to any queue; -1: not known
  /// @param writes   whether they are all WRITEs of one block
  bool good(std::int64_t entries, bool writes) {
    int status = 0;
    must(cudaMemcpy(&status, failed, sizeof status, cudaMemcpyDeviceToHost), "copy");
    if (status) return false;
    std::vector<GdaQueue> image(queues_ + 1);
    must(cudaMemcpy(image.data(), block_, image.size() * sizeof(GdaQueue), cudaMemcpyDeviceToHost),
         "copy");
    std::int64_t sum = 0;
    bool ok = true;
    for (int i = 0; i < queues_; ++i) {
      const GdaQueue& q = image[i + 1];
      const std::uint64_t end = q.reserved_index;
      sum += static_cast<std::int64_t>(end);
      ok = ok && (comm.sharing == Sharing::thread ? q.deferred_index != end
                                                  : q.posted_index == end && q.ready_index == end);
      ok = ok && verify(placement_, i, end, qpn(i), writes);
    }
    return ok && (entries < 0 || sum == entries);
  }

  DeviceCommunicator comm;
  WindowHandle window;
  int* failed = nullptr;
  int* peers = nullptr;

 private:
  template <class T>
  T* upload(const T* from, std::size_t bytes) {
    void* p = nullptr;
    must(cudaMalloc(&p, bytes), "malloc");
    must(cudaMemcpy(p, from, bytes, cudaMemcpyHostToDevice), "copy");
    uploads_.push_back(p);
    return static_cast<T*>(p);
  }
  int queues_;
  Placement placement_;
  GdaQueue* block_ = nullptr;
  std::vector<void*> uploads_;
};

inline const char* sharing_name(Sharing s) {
  return s == Sharing::thread ? "thread" : s == Sharing::block ? "block" : "device";
}

/// Launches issue kernels of `kernel`'s arguments and adds the row. @param each  WQEs a call
template <class Kernel>
void issue_row_of(Kernel kernel, Sharing sharing, int threads, int each, bool writes,
                  const char* what, Placement placement, GdaRelease release, int every,
                  const char* note) {
  Fabricated f(1, sharing, placement, release);
  kernel<<<1, threads>>>(f.comm, f.window, f.peers, every, kCalls, cycle_log(), clock_words(),
                         f.failed);
  must(cudaGetLastError(), what);
  must(cudaDeviceSynchronize(), what);
  Row row;
  row.what = what;
  row.sharing = sharing_name(sharing);
  row.placement = placement == Placement::device ? "device" : "host";
  row.scope = release == GdaRelease::device ? "device" : "system";
  row.batch = threads > 1 ? "32 a call" : every == 1 ? "1" : "32";
  row.note = note;
  row.threads = threads;
  row.verified = f.good(std::int64_t{kCalls} * each, writes);
  add_times(std::move(row), kCalls);
}

template <Sharing kSharing, bool kFixed, What kWhat>
void issue_row(const char* what, Placement placement, GdaRelease release, int every = 1,
               const char* note = "") {
  constexpr bool kLanes = kWhat == What::put_each_lane;
  issue_row_of(issue<kSharing, kFixed, kWhat>, kSharing, kLanes ? 32 : 1,
               (kWhat == What::put_signal ? 2 : 1) * (kLanes ? 32 : 1),
               kWhat == What::put || kLanes, what, placement, release, every, note);
}

template <bool kSignal>
void issue_held_row(const char* what, Placement placement, GdaRelease release, int every = 1,
                    const char* note = "queue held by the thread") {
  issue_row_of(issue_held<kSignal>, Sharing::thread, 1, kSignal ? 2 : 1, !kSignal, what, placement,
               release, every, note);
}

template <Sharing kSharing, What kWhat>
void rate_row(const char* what, int blocks, int threads, int queues) {
  Fabricated f(queues, kSharing, Placement::device, GdaRelease::device);
  reset_rate();
  rate<kSharing, kWhat>
      <<<blocks, threads>>>(f.comm, f.window, queues, 8'000'000, rate_words(), f.failed);
  must(cudaGetLastError(), what);
  must(cudaDeviceSynchronize(), what);
  Row row;
  row.what = what;
  row.sharing = sharing_name(kSharing);
  row.placement = "device";
  row.scope = "device";
  row.batch = "warp";
  row.threads = blocks * threads;
  row.queues = queues;
  row.verified = f.good(-1, true);
  add_rate(std::move(row));
}

}  // namespace
}  // namespace gda_bench
