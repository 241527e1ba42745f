// SPDX-License-Identifier: Apache-2.0
// Queues of one device communicator: lays them out in one block of memory, connects them with the
// peers', fills in what kernels read, and turns recorded failures into sentences.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "bootstrap/bootstrap.hpp"
#include "gda/nic.hpp"
#include "gda/queue_pair.hpp"
#include "gda/queues.hpp"
#include "memory/arena.hpp"

namespace marrow::gda {

class Connection final : public Queues {
 public:
  /// See Nic::connect.
  Connection(std::shared_ptr<Device> device, bootstrap::Bootstrap& bootstrap, memory::Arena& arena,
             const Requirements& requirements, const Region* counters);
  ~Connection() override;

  const GdaDevice* device() const override { return table_; }
  std::vector<QueueError> errors() const override;
  void mask_peer(int rank) noexcept override;
  std::string release_scope() const override;

 private:
  struct Layout;
  void make(const Layout& layout, const Requirements& requirements);
  std::vector<std::vector<std::byte>> exchange_numbers(bootstrap::Bootstrap& bootstrap);
  void connect(const std::vector<std::vector<std::byte>>& numbers);
  void make_fences();
  void agree(bootstrap::Bootstrap& bootstrap, bool good);
  void publish(const Layout& layout, const Requirements& requirements, const Region* counters);
  void drop() noexcept;
  std::uint64_t failure_in_queue(std::size_t queue) const;
  /// First failure among the entries of a completion queue, as they stand.
  static std::uint64_t first_failure(mlx5::Cqe* entries, std::size_t count);
  /// The same for queues in GPU memory: looked for when the NIC counts new failures.
  void look_in_gpu_memory() const;
  /// Length of what each rank tells the others.
  std::size_t words() const { return kPortWords + mains() + 2 * 3; }
  static constexpr std::size_t kPortWords = sizeof(verbs::PortAddress) / 4;
  /// Queues of (context, peer); companions follow.
  std::size_t mains() const {
    return static_cast<std::size_t>(contexts_) * static_cast<std::size_t>(nranks_);
  }

  std::shared_ptr<Device> nic_;
  memory::Arena& arena_;
  int rank_;
  int nranks_;
  int contexts_;
  bool counting_;
  memory::Block block_;        ///< rings, records, results
  memory::Block error_block_;  ///< error words, where block_ is GPU memory
  mutable std::uint64_t failures_seen_ = 0;
  mutable std::vector<std::uint64_t> found_;  ///< by queue, of look_in_gpu_memory
  /// A word in device (0) and host (1) memory that peers READ; only where the NIC uses both.
  struct Fence {
    memory::Block block;
    verbs::ibv_mr* region = nullptr;
    std::vector<std::uint64_t> bases;
    std::vector<std::uint32_t> keys;
  };
  Fence fences_[2];
  std::unique_ptr<Umem> umem_;
  verbs::ibv_mr* results_ = nullptr;
  std::vector<std::unique_ptr<QueuePair>> pairs_;  ///< by (context, peer), then companions
  mutable std::mutex mutex_;                       ///< masked_
  std::vector<bool> masked_;
  std::uint64_t* errors_ = nullptr;  ///< one word a queue, stride Layout::kTailBytes
  const GdaDevice* table_ = nullptr;
};

}  // namespace marrow::gda
