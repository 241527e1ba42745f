// SPDX-License-Identifier: Apache-2.0
// The GPU engine's block on an emulated GPU: what tests/gpu/softnic_engine_test.cu does on a real one, without it. Logic
// only: doorbells, runs of small WRITEs, everything that goes through QueueMachine, long copies by all warps, commands,
// errors and flush, ending and starting again.
#if defined(__x86_64__)  // emulated_gpu.hpp
#include <gtest/gtest.h>

#include "unit/emulated_gpu.hpp"
// The code under test.
#include "softnic/gpu_engine_block.cu"  // NOLINT

namespace marrow::softnic::gpu {

alignas(128) static unsigned char block_memory[sizeof(Block)];
Block& the_block() { return *reinterpret_cast<Block*>(block_memory); }

namespace {

using namespace mlx5;

constexpr std::uint32_t kDepth = 64;
constexpr std::uint32_t kRemoteKey = 16 << 8 | 1, kLocalKey = 17 << 8 | 1;

/// A block, queue pairs that post to memory of this process, and the words around them.
class SoftnicGpuBlock : public ::testing::Test {
 protected:
  struct Queue {
    alignas(64) std::byte ring[kDepth * kBlockBytes] = {};
    alignas(64) Cqe entries[kDepth] = {};
    alignas(64) std::uint64_t doorbell = 0;
    DoorbellRecord record = {};
    QpSlot slot = {};
    std::uint16_t producer = 0;
    std::uint64_t seen = 0;
  };

  void SetUp() override {
    launch_.mailbox = mailbox_.get();
    launch_.tables = tables_.get();
    launch_.directory = directory_.get();
    launch_.idle = ~Nanoseconds{0} >> 1;
    launch_.heartbeat = ~Nanoseconds{0} >> 1;
    Region remote;
    remote.key = kRemoteKey;
    remote.pd = 1;
    remote.access = verbs::IBV_ACCESS_REMOTE_WRITE | verbs::IBV_ACCESS_REMOTE_READ |
                    verbs::IBV_ACCESS_REMOTE_ATOMIC | verbs::IBV_ACCESS_LOCAL_WRITE;
    remote.iova = 0x1000;
    remote.length = target_.size() * 8;
    remote.base = reinterpret_cast<std::byte*>(target_.data());
    tables_->regions[kRemoteKey >> 8] = remote;
    Region local = remote;
    local.key = kLocalKey;
    local.iova = 0x1000;
    local.length = source_.size() * 8;
    local.base = reinterpret_cast<std::byte*>(source_.data());
    tables_->regions[kLocalKey >> 8] = local;
    for (std::size_t i = 0; i < source_.size(); ++i) source_[i] = i * 0x9e3779b97f4a7c15ull + 1;
  }
  void TearDown() override { stop(); }

  void start() {
    ++launch_.number;
    std::atomic_ref(mailbox_->command).store(commands_);
    barrier_ = std::make_unique<std::barrier<>>(kWarps);
    threads_ = emulated_gpu::launch(kWarps, *barrier_, [this] { engine_block(launch_); });
  }
  void stop() {
    if (threads_.empty()) return;
    std::atomic_ref(mailbox_->command).store(commands_ | kQuit);
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }
  void command(Command kind, std::uint32_t index, const void* out, std::uint32_t bytes) {
    std::memcpy(mailbox_->payload, out, bytes);
    mailbox_->kind = kind;
    mailbox_->index = index;
    mailbox_->flags = 0;
    std::atomic_ref(mailbox_->command).store(++commands_);
    while (std::atomic_ref(tables_->replies.done).load() != commands_) std::this_thread::yield();
  }
  /// Queue pair `index`, its number 100 + index, by commands.
  Queue& add_queue(std::uint32_t index) {
    auto& queue = *queues_.emplace_back(std::make_unique<Queue>());
    for (Cqe& entry : queue.entries) entry.counter_owner = kInitialCounterOwner;
    CompletionQueue cq;
    cq.cqn = kMaxCompletionQueues + 1 + index;
    cq.ring = queue.entries;
    cq.entries = kDepth;
    command(Command::put_completion_queue, 1 + index, &cq, sizeof cq);
    QueuePair qp;
    qp.qpn = 100 + index;
    qp.pd = 1;
    qp.slot = &queue.slot;
    qp.state = kReadyToSend;
    qp.sq = queue.ring;
    qp.depth = kDepth;
    qp.record = &queue.record;
    qp.doorbell = &queue.doorbell;
    qp.send_index = qp.receive_index = 1 + index;
    qp.peer = {PeerFacts::connected, 0, 1, ~0u};
    command(Command::put_queue_pair, index, &qp, sizeof qp);
    return queue;
  }
  template <class... Segments>
  void post(Queue& queue, std::uint32_t index, std::uint8_t opcode, const Segments&... segments) {
    std::byte* at = queue.ring + (queue.producer % kDepth) * kBlockBytes;
    ControlSegment control{};
    control.opmod_index_opcode = control_word(opcode, queue.producer, 0);
    control.qpn_ds = qpn_ds_word(100 + index, 1 + sizeof...(segments));
    control.fm_ce_se = kCompletionAlways;
    std::memcpy(at, &control, 16);
    ((at += 16, std::memcpy(at, &segments, 16)), ...);
    ++queue.producer;
  }
  static RemoteSegment remote(std::uint64_t offset, std::uint32_t key = kRemoteKey) {
    return {to_big64(0x1000 + offset), to_big32(key), 0};
  }
  static DataSegment local(std::uint64_t offset, std::uint32_t bytes) {
    return {to_big32(bytes), to_big32(kLocalKey), to_big64(0x1000 + offset)};
  }
  void ring(Queue& queue, std::uint32_t index) {
    std::atomic_ref(queue.record.send).store(record_word(queue.producer));
    std::atomic_ref(queue.doorbell).store(doorbell_value(100 + index, queue.producer));
  }
  /// The next completion's syndrome; 0: good, 255: none came.
  int poll(Queue& queue) {
    auto* entry = reinterpret_cast<std::uint32_t*>(&queue.entries[queue.seen % kDepth]);
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (;;) {
      const std::uint32_t word = std::atomic_ref(entry[15]).load();
      if (cqe_valid(word, queue.seen, kDepth)) {
        EXPECT_EQ(cqe_counter(word), static_cast<std::uint16_t>(queue.seen));
        ++queue.seen;
        return cqe_opcode(word) == kRequester ? 0 : static_cast<int>(from_big32(entry[13]) & 0xff);
      }
      if (std::chrono::steady_clock::now() > end) return 255;
      std::this_thread::yield();
    }
  }

  std::vector<std::uint64_t> source_ = std::vector<std::uint64_t>(1 << 15);
  std::vector<std::uint64_t> target_ = std::vector<std::uint64_t>(1 << 15);
  std::unique_ptr<Mailbox> mailbox_ = std::make_unique<Mailbox>();
  std::unique_ptr<Tables> tables_ = std::make_unique<Tables>();
  std::unique_ptr<SharedDirectory> directory_ = std::make_unique<SharedDirectory>();
  Launch launch_;
  std::uint64_t commands_ = 0;
  std::vector<std::unique_ptr<Queue>> queues_;
  std::unique_ptr<std::barrier<>> barrier_;
  std::vector<std::thread> threads_;
};

TEST_F(SoftnicGpuBlock, RunsOfSmallWritesOnManyQueues) {
  start();
  constexpr std::uint32_t kQueues = kWorkers + 2, kEach = 12;
  for (std::uint32_t q = 0; q < kQueues; ++q) add_queue(q);
  for (int round = 0; round < 2; ++round) {
    for (std::uint32_t q = 0; q < kQueues; ++q) {
      for (std::uint32_t i = 0; i < kEach; ++i) {
        const std::uint64_t at = (q * 256 + round * kEach + i) * 8;
        post(*queues_[q], q, kWrite, remote(at), local(at, 8));
      }
      ring(*queues_[q], q);
    }
    for (std::uint32_t q = 0; q < kQueues; ++q) {
      for (std::uint32_t i = 0; i < kEach; ++i) ASSERT_EQ(poll(*queues_[q]), 0) << "queue " << q;
    }
  }
  for (std::uint32_t q = 0; q < kQueues; ++q) {
    for (std::uint32_t i = 0; i < 2 * kEach; ++i)
      ASSERT_EQ(target_[q * 256 + i], source_[q * 256 + i]);
  }
}

TEST_F(SoftnicGpuBlock, OrderWithinAQueue) {
  start();
  Queue& queue = add_queue(0);
  // To one word, then one that reads what the other wrote: a lane each would be wrong.
  for (std::uint32_t i = 0; i < 8; ++i) post(queue, 0, kWrite, remote(0), local(i * 8, 8));
  post(queue, 0, kFetchAdd, remote(64), AtomicSegment{to_big64(5), 0}, local(4096, 8));
  post(queue, 0, kFetchAdd, remote(64), AtomicSegment{to_big64(6), 0}, local(4104, 8));
  post(queue, 0, kRead, remote(0), local(8192, 8));
  ring(queue, 0);
  for (int i = 0; i < 11; ++i) ASSERT_EQ(poll(queue), 0);
  EXPECT_EQ(target_[0], source_[7]);
  EXPECT_EQ(target_[8], 11u);
  EXPECT_EQ(source_[512], 0u);
  EXPECT_EQ(source_[513], 5u);
  EXPECT_EQ(source_[1024], source_[7]);
}

TEST_F(SoftnicGpuBlock, LongCopiesTakeEverybody) {
  start();
  Queue& a = add_queue(0);
  Queue& b = add_queue(1);
  post(a, 0, kWrite, remote(0), local(0, 120'000));
  post(b, 1, kWrite, remote(131'072), local(131'072, 100'001));
  ring(a, 0);
  ring(b, 1);
  ASSERT_EQ(poll(a), 0);
  ASSERT_EQ(poll(b), 0);
  EXPECT_EQ(std::memcmp(target_.data(), source_.data(), 120'000), 0);
  EXPECT_EQ(std::memcmp(target_.data() + 16'384, source_.data() + 16'384, 100'001), 0);
}

/// Lengths that a warp copies alone, the copy engine and all warps; odd ends; more WQEs than one look serves.
TEST_F(SoftnicGpuBlock, WritesOfEveryLengthInOrder) {
  start();
  Queue& queue = add_queue(0);
  std::uint64_t to = 0;
  const std::uint32_t lengths[] = {1, 12, 16, 300, 4096, 16'384, 16'400, 40'009};
  for (const std::uint32_t bytes : lengths) {
    post(queue, 0, kWrite, remote(to), local(to, bytes));
    to += (bytes + 127) / 64 * 64;
  }
  for (std::uint32_t i = 0; i < 40; ++i)
    post(queue, 0, kWrite, remote(to + i * 8), local(i * 8, 8));
  ring(queue, 0);
  for (std::size_t i = 0; i < std::size(lengths) + 40; ++i) ASSERT_EQ(poll(queue), 0) << i;
  const auto* target = reinterpret_cast<const char*>(target_.data());
  const auto* source = reinterpret_cast<const char*>(source_.data());
  to = 0;
  for (const std::uint32_t bytes : lengths) {
    ASSERT_EQ(std::memcmp(target + to, source + to, bytes), 0) << bytes;
    ASSERT_EQ(target[to + bytes], 0) << bytes;
    to += (bytes + 127) / 64 * 64;
  }
  ASSERT_EQ(std::memcmp(target + to, source, 320), 0);
}

/// More queue pairs than shared memory has room for, and than the fast loop has.
class SoftnicGpuBlockFar : public SoftnicGpuBlock,
                           public ::testing::WithParamInterface<std::uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Queues, SoftnicGpuBlockFar,
                         ::testing::Values(kHotQueuePairs + 3, kFastQueuePairs + 3));
TEST_P(SoftnicGpuBlockFar, QueuesBeyondTheNearOnes) {
  start();
  const std::uint32_t kFar = GetParam();
  Queue& near = add_queue(1);
  Queue& far = add_queue(kFar);
  for (std::uint32_t i = 0; i < 3; ++i) {
    post(near, 1, kWrite, remote(i * 8), local(i * 8, 8));
    post(far, kFar, kWrite, remote(1024 + i * 8), local(1024 + i * 8, 8));
    ring(near, 1);
    ring(far, kFar);
    ASSERT_EQ(poll(near), 0);
    ASSERT_EQ(poll(far), 0);
  }
  EXPECT_EQ(target_[2], source_[2]);
  EXPECT_EQ(target_[130], source_[130]);
}

/// A WAIT whose turn never comes must not hold up other queues of its warp.
TEST_F(SoftnicGpuBlock, AWaitingQueueHoldsUpNobody) {
  start();
  Queue& waits = add_queue(0);
  add_queue(1);
  Queue& other = add_queue(kWorkers);  // the same warp's
  struct {
    std::uint64_t reserved = 0;
    std::uint32_t index = to_big32(0), cqn = to_big32(kMaxCompletionQueues + 2);
  } wait;
  post(waits, 0, kWait, wait);
  ring(waits, 0);
  post(other, kWorkers, kWrite, remote(0), local(8, 8));
  ring(other, kWorkers);
  ASSERT_EQ(poll(other), 0);
  post(*queues_[1], 1, kNop);
  ring(*queues_[1], 1);
  ASSERT_EQ(poll(*queues_[1]), 0);
  ASSERT_EQ(poll(waits), 0);
}

TEST_F(SoftnicGpuBlock, ErrorsFlushAndOverrun) {
  start();
  Queue& queue = add_queue(0);
  post(queue, 0, kWrite, remote(0), local(0, 8));
  post(queue, 0, kWrite, remote(0, kRemoteKey ^ 1), local(0, 8));
  post(queue, 0, kWrite, remote(8), local(0, 8));
  ring(queue, 0);
  // A key that this process has not: the host is asked, and says no.
  while (std::atomic_ref(tables_->replies.wanted[0]).load() == 0) std::this_thread::yield();
  std::atomic_ref(mailbox_->answered[0]).store(tables_->replies.wanted[0]);
  EXPECT_EQ(poll(queue), 0);
  EXPECT_EQ(poll(queue), kRemoteAccessError);
  EXPECT_EQ(poll(queue), kFlushError);
  EXPECT_EQ(target_[1], 0u);
  EXPECT_EQ(queue.slot.state.load(), kError);
  Queue& overrun = add_queue(1);
  overrun.producer = 70;
  ring(overrun, 1);
  EXPECT_EQ(poll(overrun), kLocalQpOperationError);
}

TEST_F(SoftnicGpuBlock, StateOutlivesTheBlock) {
  start();
  Queue& queue = add_queue(0);
  for (int round = 0; round < 4; ++round) {
    post(queue, 0, kWrite, remote(round * 8), local(round * 8, 8));
    if (round % 2 == 0) ring(queue, 0);
    if (round % 2 == 0) {
      ASSERT_EQ(poll(queue), 0);
    }
    stop();
    ring(queue, 0);
    launch_.queue_pairs = 1;
    start();
    if (round % 2 != 0) {
      ASSERT_EQ(poll(queue), 0);
    }
  }
  for (int i = 0; i < 4; ++i) EXPECT_EQ(target_[i], source_[i]);
}

}  // namespace
}  // namespace marrow::softnic::gpu
#endif
