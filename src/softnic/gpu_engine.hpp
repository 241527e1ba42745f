// SPDX-License-Identifier: Apache-2.0
// The host's side of the GPU engine: memory for its tables, a thread that starts the block, keeps its heartbeat
// going, maps what it asks for and watches the peers, and commands by which the control path changes
// tables while the block runs. Every call but failures() is made with the job's ControlLock held.
//
// The block ends by itself when it has had no work for a while, and is started again at once: so CUDA calls that
// wait for all kernels of the GPU (cudaFree, cudaDeviceSynchronize, loading of a module) wait for
// milliseconds, not for ever.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mapping.hpp"
#include "cuda/driver.hpp"
#include "cuda/mappings.hpp"
#include "softnic/directory.hpp"
#include "softnic/engine.hpp"
#include "softnic/gpu_layout.hpp"
#include "softnic/options.hpp"
#include "softnic/regions.hpp"

namespace marrow::softnic {

class GpuEngine final : public Regions::Watcher {
 public:
  /// Whether this build and machine can run one, else a sentence.
  static bool possible(const Options& options, std::string* why);

  /// Pages registered with CUDA.
  class Pinned {
   public:
    Pinned() = default;
    ~Pinned();
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;
    /// @return what CUDA says
    cuda::Result pin(std::shared_ptr<cuda::Context> context, void* pages, std::size_t bytes);
    void keep() { pages_ = nullptr; }

   private:
    std::shared_ptr<cuda::Context> context_;
    void* pages_ = nullptr;
  };

  /// @param lock  whose ControlLock guards the job's tables
  /// @param directory_pin  of the directory's pages; the job's first engine registers them, the last one to go gives them
  ///   up: each one's block reads them to its end
  /// @throws Error(cuda | unsupported | out_of_memory)
  GpuEngine(Directory& directory, Regions& regions, Engine& lock, const Options& options,
            int device, std::weak_ptr<Pinned>& directory_pin);
  /// Ends the block. Queues must have been removed.
  ~GpuEngine() override;
  GpuEngine(const GpuEngine&) = delete;
  GpuEngine& operator=(const GpuEngine&) = delete;

  /// A number for a new completion queue; 0 when there is room for no more.
  std::uint32_t next_completion_queue();
  void add(CompletionQueue& cq);
  void remove(CompletionQueue& cq);
  /// @throws Error(out_of_memory) when there is room for no more
  void add(QueuePair& qp);
  void remove(QueuePair& qp);

  /// Stops serving a queue pair and brings the host's copy of it up to date.
  void take(QueuePair& qp);
  /// Gives the host's copy back. @param flags  gpu::kPrime, gpu::kClearCell
  void give(QueuePair& qp, std::uint32_t flags = 0);
  /// The queue pair as it is now; it goes on being served.
  QueuePair look_at(const QueuePair& qp);

  /// A doorbell cell in GPU memory, zeroed; null when there is none left.
  std::uint64_t* take_cell();
  void give_cell(std::uint64_t* cell);

  /// Queue pairs that an error has stopped so far. Any thread.
  std::uint64_t failures() const;
  int device() const { return context_->device(); }

 private:
  void entered(const Region& region) override;
  void revoked(std::uint32_t key) noexcept override;

  struct Import {
    cuda::VmmMapping vmm;
    cuda::IpcMapping ipc;
    base::Mapping file;
    bool registered = false;
  };

  void start_block();
  void end_block() noexcept;
  void leave() noexcept;
  bool block_left();
  void fetch_replies();
  void look_for_crash();
  void serve();
  void attend();
  void answer_requests();
  base::Fd fetch_for(std::uint32_t key);
  void watch_peers();
  void forget_stale();
  void drop(Import& import) noexcept;
  bool import(std::uint32_t key, const base::Fd& fd);
  void enter(const Region& region);
  void command(gpu::Command kind, std::uint32_t index, std::uint32_t flags, const void* out,
               void* in, std::uint32_t bytes, std::uint64_t address = 0);
  void beat();
  [[noreturn]] void broken(const std::string& what);
  QueuePair as_device(const QueuePair& qp) const;
  void mark_user(CompletionQueue& cq, const QueuePair& qp);

  Directory& directory_;
  Regions& regions_;
  Engine& lock_;
  std::shared_ptr<cuda::Context> context_;
  cuda::Stream stream_;
  cuda::VmmMapping tables_memory_;
  gpu::Tables* tables_ = nullptr;  ///< GPU address
  base::Mapping mailbox_memory_;
  gpu::Mailbox* mailbox_ = nullptr;
  gpu::Replies* replies_ = nullptr;  ///< as last fetched, in pinned memory behind the mailbox
  cuda::Stream copies_;
  std::atomic<std::uint64_t> failures_{0};
  gpu::Launch launch_;
  Pinned mailbox_pin_;
  std::shared_ptr<Pinned> directory_pin_;

  bool running_ = false;
  std::string broken_;  ///< why no command is sent any more
  std::uint64_t commands_ = 0;
  std::uint64_t wanted_[gpu::kWarps] =
      {};                                ///< requests for keys, as last fetched; its thread's own
  std::vector<QueuePair*> queue_pairs_;  ///< by index; null: free
  std::vector<bool> completion_queues_;  ///< by slot
  std::vector<bool> cells_;
  std::vector<std::uint32_t> generations_;
  std::map<std::uint32_t, Import> imports_;  ///< by key, of other processes
  std::vector<bool> entered_;                ///< by region slot: in the table
  std::atomic<std::uint32_t> in_use_{0};     ///< queue pairs
  Nanoseconds watched_ = 0;
  Nanoseconds tidied_ = 0;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// The host's copy of a queue pair, up to date and not served, for the time of a change.
class QueueChange {
 public:
  explicit QueueChange(QueuePair& qp) : qp_(qp) {
    if (qp_.gpu != nullptr) qp_.gpu->take(qp_);
  }
  /// Ends the change. @throws Error as the engine
  void finish() {
    if (qp_.gpu != nullptr && !std::exchange(finished_, true)) qp_.gpu->give(qp_, flags);
  }
  /// After an exception: as it was, as far as the engine still answers.
  ~QueueChange() {
    try {
      finish();
    } catch (const std::exception&) {  // the engine has logged it
    }
  }
  QueueChange(const QueueChange&) = delete;
  QueueChange& operator=(const QueueChange&) = delete;
  std::uint32_t flags = 0;

 private:
  QueuePair& qp_;
  bool finished_ = false;
};

}  // namespace marrow::softnic
