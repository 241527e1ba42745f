// SPDX-License-Identifier: Apache-2.0
// ibv_create_cq and ibv_create_qp: memory, CREATE_CQ and CREATE_QP.
#include <bit>
#include <cstring>

#include "softnic/front_verbs.hpp"

namespace marrow::softnic {
namespace {

using mlx5::get;
using mlx5::set;
using verbs::ibv_context;
using verbs::ibv_cq;
using verbs::ibv_pd;
using verbs::ibv_qp;
using verbs::ibv_qp_init_attr;

ibv_cq* create_cq(ibv_context* context, int entries, void* cq_context,
                  verbs::ibv_comp_channel* channel, int vector) {
  return guarded<ibv_cq*>(nullptr, [&]() -> ibv_cq* {
    if (entries < 1 || entries >= (1 << kLogMaxCq) || vector != 0) {
      failed(EINVAL, "a completion queue has 1 to 2^22-1 entries and vector 0");
      return nullptr;
    }
    auto cq = std::make_unique<VerbsCq>();
    static_cast<ibv_cq&>(*cq) = {};
    cq->context = context;
    cq->channel = channel;
    cq->cq_context = cq_context;
    // One more than asked for, as libmlx5: the ring never looks empty when it is full.
    cq->entries = std::bit_ceil(static_cast<std::uint32_t>(entries) + 1);
    cq->cqe = static_cast<int>(cq->entries) - 1;
    cq->next = of(context).job->options().start_index;
    const std::size_t ring_bytes = cq->entries * sizeof(mlx5::Cqe);
    if (!cq->queue.allocate(context, ring_bytes + 64, verbs::kUarNonCached)) return nullptr;
    for (std::uint32_t i = 0; i < cq->entries; ++i) {
      cq->ring()[i].counter_owner = mlx5::kInitialCounterOwner;
    }
    cq->record()[0] = mlx5::to_big32(cq->next & 0xffffff);
    std::uint32_t event_queue = 0;
    devx().devx_query_eqn(context, 0, &event_queue);
    std::uint8_t in[mlx5::create_cq::kInBytes] = {};
    std::uint8_t out[mlx5::create_cq::kOutBytes] = {};
    set(in, mlx5::command::opcode, mlx5::kCreateCq);
    std::uint8_t* c = in + mlx5::create_cq::kContext;
    set(c, mlx5::cqc::record_umem_valid, 1);
    set(c, mlx5::cqc::record_umem_id, cq->queue.umem->umem_id);
    set(c, mlx5::cqc::record_address, ring_bytes);
    set(c, mlx5::cqc::log_cq_size, static_cast<std::uint64_t>(std::countr_zero(cq->entries)));
    set(c, mlx5::cqc::uar_page, cq->queue.uar->page_id);
    set(c, mlx5::cqc::eqn, event_queue);
    set(in, mlx5::create_cq::cq_umem_id, cq->queue.umem->umem_id);
    set(in, mlx5::create_cq::cq_umem_valid, 1);
    cq->queue.object = devx().devx_obj_create(context, in, sizeof in, out, sizeof out);
    if (cq->queue.object == nullptr) return nullptr;
    cq->cqn = cq->handle = static_cast<std::uint32_t>(get(out, mlx5::reply::object));
    ::pthread_mutex_init(&cq->mutex, nullptr);
    ::pthread_cond_init(&cq->cond, nullptr);
    Engine::ControlLock lock(of(context).job->engine());
    auto& object = *static_cast<CqObject*>(cq->queue.object);
    begin_events(*cq);
    object.events.errors = of(context).async_write_fd;
    if (channel != nullptr) {
      ++channel->refcnt;
      object.events.channel = static_cast<VerbsChannel*>(channel)->write_fd;
    }
    object.cq.events = &object.events;
    return cq.release();
  });
}

int destroy_cq(ibv_cq* raw) {
  auto* cq = static_cast<VerbsCq*>(raw);
  {
    std::lock_guard lock(cq->lock);
    if (cq->users != 0) return failed(EBUSY, "the completion queue has queue pairs");
  }
  end_events(*cq);
  // Events that were handed out must have been acknowledged, as with the real library.
  ::pthread_mutex_lock(&cq->mutex);
  while (cq->events != cq->comp_events_completed) ::pthread_cond_wait(&cq->cond, &cq->mutex);
  ::pthread_mutex_unlock(&cq->mutex);
  if (cq->channel != nullptr) {
    Engine::ControlLock lock(of(cq->context).job->engine());
    --cq->channel->refcnt;
  }
  ::pthread_mutex_destroy(&cq->mutex);
  ::pthread_cond_destroy(&cq->cond);
  delete cq;
  return 0;
}

/// Blocks that the largest WQE of these capabilities takes; 0 if none is large enough.
std::uint32_t blocks_per_request(const verbs::ibv_qp_cap& cap) {
  const std::uint32_t inline_segments =
      (cap.max_inline_data + 4 + mlx5::kSegmentBytes - 1) / mlx5::kSegmentBytes;
  const std::uint32_t payload =
      std::max({cap.max_send_sge, cap.max_inline_data == 0 ? 0 : inline_segments, 2u});
  const std::uint32_t segments = 2 + payload;  // control, remote; an atomic has two behind them
  return segments > mlx5::kMaxSegments ? 0 : mlx5::blocks_of(segments);
}

const char* wrong_capabilities(const ibv_qp_init_attr& init) {
  if (init.qp_type != verbs::kQpTypeRc) return "softnic has RC queue pairs only";
  if (init.send_cq == nullptr || init.recv_cq == nullptr) {
    return "a queue pair needs a send and a receive completion queue";
  }
  const verbs::ibv_qp_cap& cap = init.cap;
  if (cap.max_send_sge > mlx5::kMaxSegments || cap.max_inline_data > 1024 ||
      blocks_per_request(cap) == 0) {
    return "the send requests do not fit a WQE of 63 segments";
  }
  constexpr std::uint32_t most = 1u << mlx5::kMaxLogQueue;
  if (cap.max_send_wr > most / blocks_per_request(cap)) return "the send queue is too deep";
  if (cap.max_recv_wr > most || cap.max_recv_sge > mlx5::kMostReceiveSges) {
    return "the receive queue is too deep, or more than 128 buffers a receive";
  }
  return nullptr;
}

bool create_object(VerbsQp& qp, ibv_pd* pd, std::size_t sq_offset, std::size_t record_offset) {
  std::uint8_t in[mlx5::create_qp::kInBytes] = {};
  std::uint8_t out[mlx5::create_qp::kOutBytes] = {};
  set(in, mlx5::command::opcode, mlx5::kCreateQp);
  std::uint8_t* c = in + mlx5::create_qp::kContext;
  set(c, mlx5::qpc::path_migration, mlx5::kPathMigrated);
  set(c, mlx5::qpc::pd, static_cast<Pd*>(pd)->pdn);
  set(c, mlx5::qpc::uar_page, qp.queue.uar->page_id);
  set(c, mlx5::qpc::user_index, 0xffffff);
  if (qp.depth == 0) {
    set(c, mlx5::qpc::no_sq, 1);
  } else {
    set(c, mlx5::qpc::log_sq_size, static_cast<std::uint64_t>(std::countr_zero(qp.depth)));
  }
  if (qp.srq != nullptr) {
    set(c, mlx5::qpc::rq_type, mlx5::kRqShared);
    set(c, mlx5::qpc::srqn, qp.shared()->srqn);
  } else if (sq_offset == 0) {
    set(c, mlx5::qpc::rq_type, mlx5::kRqNone);
  } else {
    const ReceiveRing& ring = qp.receives;
    set(c, mlx5::qpc::rq_type, mlx5::kRqOwn);
    set(c, mlx5::qpc::log_rq_size, static_cast<std::uint64_t>(std::countr_zero(ring.depth)));
    set(c, mlx5::qpc::log_rq_stride,
        static_cast<std::uint64_t>(std::countr_zero(ring.stride / mlx5::kSegmentBytes)));
  }
  set(c, mlx5::qpc::cqn_send, qp.sends_to()->cqn);
  set(c, mlx5::qpc::cqn_receive, qp.receives_to()->cqn);
  set(c, mlx5::qpc::record_umem_valid, 1);
  set(c, mlx5::qpc::record_umem_id, qp.queue.umem->umem_id);
  set(c, mlx5::qpc::record_address, record_offset);
  set(in, mlx5::create_qp::wq_umem_id, qp.queue.umem->umem_id);
  set(in, mlx5::create_qp::wq_umem_valid, 1);
  qp.queue.object = devx().devx_obj_create(pd->context, in, sizeof in, out, sizeof out);
  if (qp.queue.object == nullptr) return false;
  qp.qp_num = qp.handle = static_cast<std::uint32_t>(get(out, mlx5::reply::object));
  return true;
}

ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* init) {
  return guarded<ibv_qp*>(nullptr, [&]() -> ibv_qp* {
    if (const char* wrong = wrong_capabilities(*init)) {
      failed(init->qp_type != verbs::kQpTypeRc ? EOPNOTSUPP : EINVAL, wrong);
      return nullptr;
    }
    auto qp = std::make_unique<VerbsQp>();
    static_cast<ibv_qp&>(*qp) = {};
    qp->context = pd->context;
    qp->qp_context = init->qp_context;
    qp->pd = pd;
    qp->send_cq = init->send_cq;
    qp->recv_cq = init->recv_cq;
    qp->srq = init->srq;
    qp->state = verbs::IBV_QPS_RESET;
    qp->qp_type = init->qp_type;
    qp->signal_all = init->sq_sig_all != 0;
    qp->start = of(pd->context).job->options().start_index;
    const std::uint32_t blocks = blocks_per_request(init->cap);
    qp->depth = std::bit_ceil(std::max(1u, init->cap.max_send_wr) * blocks);
    const bool own_receives = init->srq == nullptr && init->cap.max_recv_wr != 0;
    if (own_receives) {
      qp->receives.size(init->cap.max_recv_wr, std::max(1u, init->cap.max_recv_sge));
    }
    // Receives first, then sends, which start at a block.
    const std::size_t sq_offset = (qp->receives.bytes() + 63) / 64 * 64;
    const std::size_t record_offset = sq_offset + std::size_t{qp->depth} * mlx5::kBlockBytes;
    if (!qp->queue.allocate(pd->context, record_offset + 64, verbs::kUarBlueFlame)) return nullptr;
    qp->sq = qp->queue.memory.as<std::byte>(sq_offset);
    qp->record = qp->queue.memory.as<mlx5::DoorbellRecord>(record_offset);
    qp->receives.ring = qp->queue.memory.as<std::byte>();
    qp->receives.record = &qp->record->receive;
    qp->slots.resize(qp->depth);
    qp->reset();
    if (!create_object(*qp, pd, own_receives ? sq_offset : 0, record_offset)) return nullptr;
    init->cap.max_send_wr = qp->depth / blocks;
    init->cap.max_recv_wr = qp->receives.depth;
    qp->cap = init->cap;
    ::pthread_mutex_init(&qp->mutex, nullptr);
    ::pthread_cond_init(&qp->cond, nullptr);
    for (VerbsCq* cq : {qp->sends_to(), qp->receives_to()}) {
      std::lock_guard lock(cq->lock);
      cq->queue_pairs[qp->qp_num] = qp.get();
      ++cq->users;
    }
    Engine::ControlLock lock(of(pd->context).job->engine());
    if (qp->srq != nullptr) ++qp->shared()->users;
    return qp.release();
  });
}

int destroy_qp(ibv_qp* raw) {
  auto* qp = static_cast<VerbsQp*>(raw);
  const int error = devx().devx_obj_destroy(qp->queue.object);
  if (error != 0) return error;
  qp->queue.object = nullptr;
  for (VerbsCq* cq : {qp->sends_to(), qp->receives_to()}) {
    std::lock_guard lock(cq->lock);
    cq->forget(qp->qp_num);
    cq->queue_pairs.erase(qp->qp_num);
    --cq->users;
  }
  if (qp->srq != nullptr) {
    Engine::ControlLock lock(of(qp->context).job->engine());
    --qp->shared()->users;
  }
  ::pthread_mutex_destroy(&qp->mutex);
  ::pthread_cond_destroy(&qp->cond);
  delete qp;
  return 0;
}

}  // namespace

const verbs::Table& devx() {
  static const verbs::Table table = [] {
    verbs::Table t;
    set_devx_functions(t);
    return t;
  }();
  return table;
}

VerbsObject::~VerbsObject() {
  if (object != nullptr) devx().devx_obj_destroy(object);
  if (umem != nullptr) devx().devx_umem_dereg(umem);
  if (uar != nullptr) devx().devx_free_uar(uar);
}

bool VerbsObject::allocate(ibv_context* context, std::size_t bytes, std::uint32_t uar_kind) {
  memory = base::Mapping::anonymous(bytes);
  umem = devx().devx_umem_reg(context, memory.data(), bytes, verbs::IBV_ACCESS_LOCAL_WRITE);
  uar = umem == nullptr ? nullptr : devx().devx_alloc_uar(context, uar_kind);
  return uar != nullptr;
}

void VerbsCq::forget(std::uint32_t qpn) {
  for (std::uint32_t i = 0; i < entries; ++i) {
    mlx5::Cqe& cqe = ring()[(next + i) & (entries - 1)];
    const std::uint32_t mark =
        std::atomic_ref<std::uint32_t>(cqe.counter_owner).load(std::memory_order_acquire);
    if (!mlx5::cqe_valid(mark, next + i, entries)) return;
    // Queue pair 0 never exists: the reader passes over the entry.
    if ((mlx5::from_big32(cqe.opcode_qpn) & 0xffffff) == qpn) cqe.opcode_qpn = 0;
  }
}

void VerbsQp::reset() {
  producer = start;
  posted = 0;
  retired.store(0, std::memory_order_relaxed);
  std::atomic_ref<std::uint32_t>(record->send).store(mlx5::record_word(start));
  receives.reset();
}

void set_queue_functions(verbs::Table& t) {
  t.create_cq = create_cq;
  t.destroy_cq = destroy_cq;
  t.create_qp = create_qp;
  t.destroy_qp = destroy_qp;
}

}  // namespace marrow::softnic
