// SPDX-License-Identifier: Apache-2.0
// A driver for tests: opens softnic through the verbs table, creates queues with PRM commands and
// posts WQEs the way a kernel does (WQE, record, doorbell; each publication a release).
#pragma once

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.hpp"
#include "base/mapping.hpp"
#include "base/memfd.hpp"
#include "cuda/driver.hpp"
#include "marrow/abi/mlx5_prm.h"
#include "marrow/abi/mlx5_wqe.h"
#include "verbs/table.hpp"

namespace marrow::softnic_test {

using namespace marrow::mlx5;
using verbs::Table;

inline const Table& nic() { return verbs::provider("softnic"); }

/// A job name no other test or process uses.
inline std::string unique_job(const char* name) {
  static std::atomic<int> count{0};
  return std::string("test-") + name + "-" + std::to_string(::getpid()) + "-" +
         std::to_string(count.fetch_add(1));
}

/// Memory with a descriptor, as core's windows have.
struct SharedMemory {
  explicit SharedMemory(std::size_t bytes)
      : fd(base::memfd("softnic-test", bytes)), mapping(base::Mapping::of_fd(fd.get(), bytes)) {}
  std::byte* data() const { return mapping.as<std::byte>(); }
  std::uint64_t* words() const { return mapping.as<std::uint64_t>(); }
  base::Fd fd;
  base::Mapping mapping;
};

/// The GPU whose engine serves the queues that tests make from now on; -1: the CPU engine. Tests still post
/// from the CPU: queues and data lie in host memory that the GPU sees, and doorbells go by the record only,
/// because the register is in GPU memory.
inline int& test_gpu() {
  static int gpu = -1;
  return gpu;
}

/// Zeroed pages that the engine of test_gpu() can reach.
class Pages {
 public:
  Pages() = default;
  explicit Pages(std::size_t bytes) : mapping_(base::Mapping::anonymous(bytes)) {
    if (test_gpu() < 0) return;
    context_ = cuda::Context::of(test_gpu());
    const cuda::Current current(*context_);
    cuda::check(
        cuda::driver().host_register(mapping_.data(), mapping_.size(),
                                     cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap),
        "registering a test's memory");
  }
  Pages(Pages&&) noexcept = default;
  Pages& operator=(Pages&& other) noexcept {
    reset();
    mapping_ = std::move(other.mapping_);
    context_ = std::move(other.context_);
    return *this;
  }
  ~Pages() { reset(); }
  void* data() const { return mapping_.data(); }
  template <class T>
  T* as(std::size_t offset = 0) const {
    return mapping_.as<T>(offset);
  }

 private:
  void reset() noexcept {
    if (context_ && mapping_.valid()) {
      const cuda::Current current(*context_);
      cuda::check_quietly(cuda::driver().host_unregister(mapping_.data()), "unregistering");
    }
    context_.reset();
    mapping_.reset();
  }
  base::Mapping mapping_;
  std::shared_ptr<cuda::Context> context_;
};

struct Completed {
  bool arrived = false;
  std::uint8_t opcode = kInvalidCompletion;
  std::uint8_t syndrome = 0;
  std::uint16_t counter = 0;
  std::uint32_t bytes = 0;
  std::uint32_t immediate = 0;
  bool ok() const { return arrived && opcode == kRequester; }
};

inline std::uint32_t load32(const void* p) {
  return std::atomic_ref<std::uint32_t>(
             *const_cast<std::uint32_t*>(static_cast<const std::uint32_t*>(p)))
      .load(std::memory_order_acquire);
}

/// A completion queue and its reader.
class Cq {
 public:
  Cq() = default;
  void create(verbs::ibv_context* context, std::uint32_t uar_page, unsigned log_size,
              bool collapsed, std::uint16_t start = 0, bool overrun_ignored = true) {
    entries = 1u << log_size;
    collapsed_ = collapsed;
    next = start;
    const std::size_t bytes = entries * sizeof(Cqe) + 64;
    memory = Pages(bytes);
    for (std::uint32_t i = 0; i < entries; ++i) ring()[i].counter_owner = kInitialCounterOwner;
    if (collapsed) {
      ring()[0].counter_owner = to_big32(std::uint32_t(std::uint16_t(start - 1)) << 16 | 0xf1);
    }
    umem = nic().devx_umem_reg(context, memory.data(), bytes, verbs::IBV_ACCESS_LOCAL_WRITE);
    std::uint32_t eqn = 0;
    nic().devx_query_eqn(context, 0, &eqn);
    std::uint8_t in[create_cq::kInBytes] = {};
    std::uint8_t out[create_cq::kOutBytes] = {};
    set(in, command::opcode, kCreateCq);
    std::uint8_t* c = in + create_cq::kContext;
    set(c, cqc::record_umem_valid, 1);
    set(c, cqc::record_umem_id, umem->umem_id);
    set(c, cqc::record_address, entries * sizeof(Cqe));
    set(c, cqc::collapsed, collapsed ? 1 : 0);
    set(c, cqc::overrun_ignore, overrun_ignored ? 1 : 0);
    set(c, cqc::log_cq_size, log_size);
    set(c, cqc::uar_page, uar_page);
    set(c, cqc::eqn, eqn);
    set(in, create_cq::cq_umem_id, umem->umem_id);
    set(in, create_cq::cq_umem_valid, 1);
    object = nic().devx_obj_create(context, in, sizeof in, out, sizeof out);
    ASSERT_NE(object, nullptr) << nic().last_error();
    number = static_cast<std::uint32_t>(get(out, reply::object));
  }
  void destroy() {
    if (object == nullptr) return;
    EXPECT_EQ(nic().devx_obj_destroy(object), 0) << nic().last_error();
    EXPECT_EQ(nic().devx_umem_dereg(umem), 0);
    object = nullptr;
    umem = nullptr;
  }

  Cqe* ring() const { return memory.as<Cqe>(); }
  std::uint32_t* record() const { return memory.as<std::uint32_t>(entries * sizeof(Cqe)); }

  /// Ring: the next entry in order.
  Completed poll(std::chrono::milliseconds most = std::chrono::milliseconds(5000)) {
    const Cqe& cqe = ring()[next & (entries - 1)];
    return wait(
        cqe, most, [&](std::uint32_t dword) { return cqe_valid(dword, next, entries); }, true);
  }
  /// Collapsed: until the WQE whose first block is `index` is done, or an error stands there.
  Completed poll_counter(std::uint16_t index,
                         std::chrono::milliseconds most = std::chrono::milliseconds(5000)) {
    return wait(
        ring()[0], most,
        [&](std::uint32_t dword) {
          return cqe_opcode(dword) == kRequesterError || counter_reached(cqe_counter(dword), index);
        },
        false);
  }

  std::uint32_t number = 0;
  std::uint32_t entries = 0;
  std::uint64_t next = 0;
  verbs::mlx5dv_devx_obj* object = nullptr;
  verbs::mlx5dv_devx_umem* umem = nullptr;
  Pages memory;

 private:
  template <class Ready>
  Completed wait(const Cqe& cqe, std::chrono::milliseconds most, Ready&& ready, bool advance) {
    const auto end = std::chrono::steady_clock::now() + most;
    Completed result;
    for (int spins = 0;; ++spins) {
      const std::uint32_t dword = load32(&cqe.counter_owner);
      if (ready(dword)) {
        result.arrived = true;
        result.opcode = cqe_opcode(dword);
        result.counter = cqe_counter(dword);
        const std::uint32_t syndromes =
            load32(reinterpret_cast<const std::uint8_t*>(&cqe) + kHardwareSyndromeOffset);
        if (result.opcode == kRequesterError || result.opcode == kResponderError) {
          result.syndrome = static_cast<std::uint8_t>(from_big32(syndromes));
        }
        result.bytes = from_big32(load32(&cqe.byte_count));
        result.immediate = from_big32(load32(&cqe.immediate));
        if (advance) ++next;
        return result;
      }
      if (spins % 64 == 63) std::this_thread::yield();
      if (spins % 1024 == 1023 && std::chrono::steady_clock::now() > end) return result;
    }
  }
  bool collapsed_ = false;
};

struct QpOptions {
  unsigned log_sq = 5;
  bool collapsed = false;
  bool receive_queue = false;       ///< 16 entries
  unsigned receive_log_stride = 0;  ///< buffers a receive, as a power of two
  std::uint32_t uar_kind = verbs::kUarNonCachedDedicated;
  bool record = true;
  unsigned rnr_retry = 7;
  unsigned ack_timeout = 14;
  std::uint32_t access = verbs::IBV_ACCESS_REMOTE_WRITE | verbs::IBV_ACCESS_REMOTE_READ |
                         verbs::IBV_ACCESS_REMOTE_ATOMIC;
  std::uint16_t start = 0;        ///< must be softnic's start_index, or
  bool start_by_command = false;  ///< asked for in CREATE_QP
  bool overrun_ignored = true;
};

/// Context, protection domain, one queue pair with its completion queues.
class Endpoint {
 public:
  Endpoint(const std::string& job, const char* options = "", QpOptions qp = {}) : qp_(qp) {
    int count = 0;
    verbs::ibv_device** list = nic().get_device_list(&count);
    context = nic().open_device_in_job(list[0], job.c_str(), options);
    nic().free_device_list(list);
    if (context == nullptr) throw std::runtime_error(nic().last_error());
    if (test_gpu() >= 0) {
      if (const char* why = nic().accept_gpu(context, test_gpu())) throw std::runtime_error(why);
      if (nic().choose_engine(context, 1) != 1) throw std::runtime_error(nic().last_error());
    }
    pd = nic().alloc_pd(context);
    verbs::mlx5dv_pd out{};
    verbs::mlx5dv_obj object{};
    object.pd.in = pd;
    object.pd.out = &out;
    nic().init_obj(&object, verbs::kObjectPd);
    pdn = out.pdn;
    uar = nic().devx_alloc_uar(context, qp.uar_kind);
    cq.create(context, uar->page_id, qp.log_sq, qp.collapsed, qp.start, qp.overrun_ignored);
    receive_cq.create(context, uar->page_id, 4, false, qp.start);
    create_qp_object();
    producer = qp.start;
  }
  ~Endpoint() { close(); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  void close() {
    if (context == nullptr) return;
    for (verbs::ibv_mr* mr : mrs) EXPECT_EQ(nic().dereg_mr(mr), 0);
    mrs.clear();
    EXPECT_EQ(nic().devx_obj_destroy(object), 0);
    cq.destroy();
    receive_cq.destroy();
    EXPECT_EQ(nic().devx_umem_dereg(rings_umem), 0);
    if (!uar_freed) nic().devx_free_uar(uar);
    EXPECT_EQ(nic().dealloc_pd(pd), 0) << nic().last_error();
    EXPECT_EQ(nic().close_device(context), 0);
    context = nullptr;
  }

  std::uint16_t lid() const {
    verbs::ibv_port_attr attr{};
    nic().query_port(context, 1, &attr);
    return attr.lid;
  }

  int modify(Command opcode, const std::uint8_t* qpc_bytes = nullptr, std::uint32_t mask = 0) {
    std::uint8_t in[modify_qp::kInBytes] = {};
    std::uint8_t out[modify_qp::kOutBytes] = {};
    set(in, command::opcode, opcode);
    set(in, command::object, qpn);
    set(in, command::optional_mask, mask);
    if (qpc_bytes != nullptr) std::memcpy(in + modify_qp::kContext, qpc_bytes, qpc::kBytes);
    return nic().devx_obj_modify(object, in, sizeof in, out, sizeof out);
  }

  void to_init() {
    std::uint8_t c[qpc::kBytes] = {};
    set(c, qpc::path_migration, kPathMigrated);
    set(c, qpc::remote_read_enable, (qp_.access & verbs::IBV_ACCESS_REMOTE_READ) != 0);
    set(c, qpc::remote_write_enable, (qp_.access & verbs::IBV_ACCESS_REMOTE_WRITE) != 0);
    set(c, qpc::remote_atomic_enable, (qp_.access & verbs::IBV_ACCESS_REMOTE_ATOMIC) != 0);
    set(c, at(qpc::kPrimaryPath, ads::port), 1);
    ASSERT_EQ(modify(kRstToInit, c), 0) << nic().last_error();
  }
  void to_rtr(std::uint32_t remote_qpn, std::uint16_t remote_lid) {
    std::uint8_t c[qpc::kBytes] = {};
    set(c, qpc::mtu, 5);
    set(c, qpc::log_message_max, 30);
    set(c, qpc::remote_qpn, remote_qpn);
    set(c, at(qpc::kPrimaryPath, ads::rlid), remote_lid);
    set(c, at(qpc::kPrimaryPath, ads::port), 1);
    ASSERT_EQ(modify(kInitToRtr, c), 0) << nic().last_error();
  }
  void to_rts() {
    std::uint8_t c[qpc::kBytes] = {};
    set(c, qpc::retry_count, 7);
    set(c, qpc::rnr_retry, qp_.rnr_retry);
    set(c, at(qpc::kPrimaryPath, ads::ack_timeout), qp_.ack_timeout);
    ASSERT_EQ(modify(kRtrToRts, c), 0) << nic().last_error();
  }
  void connect(std::uint32_t remote_qpn, std::uint16_t remote_lid) {
    to_init();
    to_rtr(remote_qpn, remote_lid);
    to_rts();
  }
  unsigned state() const {
    std::uint8_t in[query_qp::kInBytes] = {};
    std::uint8_t out[query_qp::kOutBytes] = {};
    set(in, command::opcode, kQueryQp);
    set(in, command::object, qpn);
    EXPECT_EQ(nic().devx_obj_query(object, in, sizeof in, out, sizeof out), 0);
    return static_cast<unsigned>(get(out + query_qp::kContext, qpc::state));
  }

  /// How far the NIC is, in words.
  std::string progress() const {
    std::uint8_t in[query_qp::kInBytes] = {};
    std::uint8_t out[query_qp::kOutBytes] = {};
    set(in, command::opcode, kQueryQp);
    set(in, command::object, qpn);
    if (nic().devx_obj_query(object, in, sizeof in, out, sizeof out) != 0)
      return nic().last_error();
    const std::uint8_t* c = out + query_qp::kContext;
    return "state " + std::to_string(get(c, qpc::state)) + ", done to " +
           std::to_string(get(c, qpc::hw_sq_index)) + ", known to " +
           std::to_string(get(c, qpc::sw_sq_index)) + ", posted to " + std::to_string(producer);
  }

  static constexpr unsigned kAllAccess =
      verbs::IBV_ACCESS_LOCAL_WRITE | verbs::IBV_ACCESS_REMOTE_WRITE |
      verbs::IBV_ACCESS_REMOTE_READ | verbs::IBV_ACCESS_REMOTE_ATOMIC;
  verbs::ibv_mr* region(void* addr, std::size_t bytes, unsigned access = kAllAccess) {
    return region_at(addr, bytes, reinterpret_cast<std::uint64_t>(addr), access);
  }
  verbs::ibv_mr* region_at(void* addr, std::size_t bytes, std::uint64_t iova,
                           unsigned access = kAllAccess) {
    verbs::ibv_mr* mr = nic().reg_mr_iova2(pd, addr, bytes, iova, access);
    if (mr == nullptr) throw std::runtime_error(nic().last_error());
    mrs.push_back(mr);
    return mr;
  }

  // --- WQEs -------------------------------------------------------------------------------------

  /// Copies a whole WQE of ds segments into the ring. @return its index
  std::uint16_t put_wqe(const void* segments, std::uint32_t ds) {
    const std::uint16_t index = producer;
    const auto* from = static_cast<const std::byte*>(segments);
    for (std::uint32_t i = 0; i < ds; ++i) {
      const std::uint32_t block = (index + i / 4) & ((1u << qp_.log_sq) - 1);
      std::memcpy(sq + block * 64 + (i % 4) * 16, from + i * 16, 16);
    }
    producer = static_cast<std::uint16_t>(producer + blocks_of(ds));
    return index;
  }
  struct Wqe {
    alignas(16) std::uint8_t bytes[1024] = {};
    std::uint32_t ds = 1;
    template <class Segment>
    Wqe& add(const Segment& segment) {
      std::memcpy(bytes + ds * 16, &segment, sizeof segment);
      ds += sizeof segment / 16;
      return *this;
    }
  };
  std::uint16_t post(Wqe& wqe, std::uint8_t opcode, std::uint8_t fm_ce_se = kCompletionAlways,
                     std::uint8_t opmod = 0, std::uint32_t immediate = 0, bool ring_now = true) {
    ControlSegment control{};
    control.opmod_index_opcode = control_word(opcode, producer, opmod);
    control.qpn_ds = qpn_ds_word(qpn, wqe.ds);
    control.fm_ce_se = fm_ce_se;
    control.immediate = to_big32(immediate);
    std::memcpy(wqe.bytes, &control, 16);
    const std::uint16_t index = put_wqe(wqe.bytes, wqe.ds);
    if (ring_now) ring();
    return index;
  }
  static RemoteSegment remote(std::uint64_t address, std::uint32_t rkey) {
    return {to_big64(address), to_big32(rkey), 0};
  }
  static DataSegment data(std::uint64_t address, std::uint32_t bytes, std::uint32_t lkey) {
    return {to_big32(bytes), to_big32(lkey), to_big64(address)};
  }
  static DataSegment data(const void* address, std::uint32_t bytes, std::uint32_t lkey) {
    return data(reinterpret_cast<std::uint64_t>(address), bytes, lkey);
  }
  static std::uint64_t u64(const void* p) { return reinterpret_cast<std::uint64_t>(p); }

  std::uint16_t write(const void* from, std::uint32_t bytes, std::uint32_t lkey, std::uint64_t to,
                      std::uint32_t rkey, std::uint8_t fm_ce_se = kCompletionAlways) {
    Wqe w;
    w.add(remote(to, rkey)).add(data(from, bytes, lkey));
    return post(w, kWrite, fm_ce_se);
  }
  std::uint16_t read(void* to, std::uint32_t bytes, std::uint32_t lkey, std::uint64_t from,
                     std::uint32_t rkey) {
    Wqe w;
    w.add(remote(from, rkey)).add(data(to, bytes, lkey));
    return post(w, kRead);
  }
  std::uint16_t fetch_add(void* old, std::uint32_t lkey, std::uint64_t at, std::uint32_t rkey,
                          std::uint64_t n, std::uint8_t fm_ce_se = kCompletionAlways) {
    Wqe w;
    w.add(remote(at, rkey)).add(AtomicSegment{to_big64(n), 0}).add(data(old, 8, lkey));
    return post(w, kFetchAdd, fm_ce_se);
  }
  std::uint16_t nop() {
    Wqe w;
    return post(w, kNop);
  }

  enum class Bell { both, record_only, next_index, last_wqe };
  void ring(Bell bell = Bell::both) {
    if (test_gpu() >= 0) bell = Bell::record_only;
    if (bell != Bell::next_index && bell != Bell::last_wqe && qp_.record) {
      std::atomic_ref<std::uint32_t>(record->send)
          .store(record_word(producer), std::memory_order_release);
    }
    if (bell == Bell::record_only) return;
    std::uint64_t value = doorbell_value(qpn, producer);
    if (bell == Bell::last_wqe) {
      const std::uint32_t block =
          static_cast<std::uint16_t>(producer - 1) & ((1u << qp_.log_sq) - 1);
      std::memcpy(&value, sq + block * 64, 8);
    }
    std::atomic_ref<std::uint64_t>(*static_cast<std::uint64_t*>(uar->reg_addr))
        .store(value, std::memory_order_release);
  }
  /// A receive into buffers; fewer than the ring's entries hold end with the invalid key.
  void post_receive(std::initializer_list<DataSegment> buffers) {
    const std::size_t stride = std::size_t{16} << qp_.receive_log_stride;
    std::byte* at = rings.as<std::byte>((receive_producer % 16) * stride);
    std::size_t n = 0;
    for (const DataSegment& buffer : buffers) std::memcpy(at + 16 * n++, &buffer, 16);
    const DataSegment end{0, to_big32(kInvalidLkey), 0};
    if (n < stride / 16) std::memcpy(at + 16 * n, &end, 16);
    post_receive();
  }
  void post_receive() {
    ++receive_producer;
    std::atomic_ref<std::uint32_t>(record->receive)
        .store(to_big32(receive_producer), std::memory_order_release);
  }

  verbs::ibv_context* context = nullptr;
  verbs::ibv_pd* pd = nullptr;
  std::uint32_t pdn = 0;
  verbs::mlx5dv_devx_uar* uar = nullptr;
  bool uar_freed = false;  ///< the test did it
  Cq cq;
  Cq receive_cq;
  Pages rings;
  verbs::mlx5dv_devx_umem* rings_umem = nullptr;
  verbs::mlx5dv_devx_obj* object = nullptr;
  std::byte* sq = nullptr;
  DoorbellRecord* record = nullptr;
  std::uint32_t qpn = 0;
  std::uint16_t producer = 0;
  std::uint16_t receive_producer = 0;
  std::vector<verbs::ibv_mr*> mrs;

 private:
  void create_qp_object() {
    const std::size_t rq_bytes =
        qp_.receive_queue ? std::size_t{16 * 16} << qp_.receive_log_stride : 0;
    const std::size_t sq_bytes = (std::size_t{1} << qp_.log_sq) * 64;
    const std::size_t bytes = rq_bytes + sq_bytes + 64;
    rings = Pages(bytes);
    sq = rings.as<std::byte>(rq_bytes);
    record = rings.as<DoorbellRecord>(rq_bytes + sq_bytes);
    rings_umem = nic().devx_umem_reg(context, rings.data(), bytes, verbs::IBV_ACCESS_LOCAL_WRITE);
    std::uint8_t in[create_qp::kInBytes] = {};
    std::uint8_t out[create_qp::kOutBytes] = {};
    set(in, command::opcode, kCreateQp);
    std::uint8_t* c = in + create_qp::kContext;
    set(c, qpc::path_migration, kPathMigrated);
    set(c, qpc::pd, pdn);
    set(c, qpc::uar_page, uar->page_id);
    set(c, qpc::log_sq_size, qp_.log_sq);
    set(c, qpc::rq_type, qp_.receive_queue ? kRqOwn : kRqNone);
    if (qp_.receive_queue) {
      set(c, qpc::log_rq_size, 4);
      set(c, qpc::log_rq_stride, qp_.receive_log_stride);
    }
    set(c, qpc::cqn_send, cq.number);
    set(c, qpc::cqn_receive, receive_cq.number);
    set(c, qpc::send_record_mode, qp_.record ? 0 : 1);
    set(c, qpc::record_umem_valid, 1);
    set(c, qpc::record_umem_id, rings_umem->umem_id);
    set(c, qpc::record_address, rq_bytes + sq_bytes);
    if (qp_.start_by_command) set(c, qpc::hw_sq_index, qp_.start);
    set(in, create_qp::wq_umem_id, rings_umem->umem_id);
    set(in, create_qp::wq_umem_valid, 1);
    object = nic().devx_obj_create(context, in, sizeof in, out, sizeof out);
    if (object == nullptr) throw std::runtime_error(nic().last_error());
    qpn = static_cast<std::uint32_t>(get(out, reply::object));
  }
  QpOptions qp_;
};

/// Two connected endpoints of one job in this process; `b` is the target.
struct Pair {
  Pair(const char* name, const char* options = "", QpOptions qp = {}, QpOptions peer = {})
      : Pair(InJob{unique_job(name)}, options, qp, peer) {}
  struct InJob {
    std::string name;
  };
  explicit Pair(const InJob& in, const char* options = "", QpOptions qp = {}, QpOptions peer = {})
      : job(in.name), a(job, options, qp), b(job, options, with_start(peer, qp)) {
    a.connect(b.qpn, b.lid());
    b.connect(a.qpn, a.lid());
  }
  static QpOptions with_start(QpOptions peer, const QpOptions& like) {
    peer.start = like.start;
    return peer;
  }
  std::string job;
  Endpoint a;
  Endpoint b;
};

}  // namespace marrow::softnic_test
