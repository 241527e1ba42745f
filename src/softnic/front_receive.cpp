// SPDX-License-Identifier: Apache-2.0
// Shared receive queues and address handles: the minimum that a program needs which has them.
#include <cstring>

#include "softnic/front_verbs.hpp"

namespace marrow::softnic {
namespace {

using verbs::ibv_ah;
using verbs::ibv_pd;
using verbs::ibv_srq;
using verbs::ibv_srq_attr;

ibv_srq* create_srq(ibv_pd* pd, verbs::ibv_srq_init_attr* init) {
  return guarded<ibv_srq*>(nullptr, [&]() -> ibv_srq* {
    if (init->attr.max_wr == 0 || init->attr.max_wr > kMostSharedReceives ||
        init->attr.max_sge > mlx5::kMostReceiveSges) {
      failed(EINVAL, "a shared receive queue has 1 to 16384 receives of up to 128 buffers");
      return nullptr;
    }
    auto srq = std::make_unique<VerbsSrq>();
    static_cast<ibv_srq&>(*srq) = {};
    srq->context = pd->context;
    srq->srq_context = init->srq_context;
    srq->pd = pd;
    // Receives complete out of order across queue pairs; a ring twice as large leaves room.
    srq->receives.size(2 * init->attr.max_wr, std::max(1u, init->attr.max_sge));
    if (!srq->queue.allocate(pd->context, srq->receives.bytes() + 64, verbs::kUarNonCached))
      return nullptr;
    srq->receives.ring = srq->queue.memory.as<std::byte>();
    srq->receives.record = srq->queue.memory.as<std::uint32_t>(srq->receives.bytes());
    srq->receives.reset();
    Context& context = of(pd->context);
    Engine::ControlLock lock(context.job->engine());
    ReceiveQueue queue;
    queue.ring = srq->receives.ring;
    queue.record = srq->receives.record;
    queue.depth = srq->receives.depth;
    queue.stride = srq->receives.stride;
    queue.pd = static_cast<Pd*>(pd)->pdn;
    srq->srqn = srq->handle = context.job->next_number();
    context.shared_receives[srq->srqn] = queue;
    ++static_cast<Pd*>(pd)->users;
    init->attr.max_wr = srq->receives.depth;
    ::pthread_mutex_init(&srq->mutex, nullptr);
    ::pthread_cond_init(&srq->cond, nullptr);
    return srq.release();
  });
}

int modify_srq(ibv_srq*, ibv_srq_attr*, int) {
  return failed(EOPNOTSUPP, "a shared receive queue cannot be modified");
}

int query_srq(ibv_srq* raw, ibv_srq_attr* attr) {
  const auto& srq = *static_cast<VerbsSrq*>(raw);
  *attr = {srq.receives.depth, srq.receives.max_sges, 0};
  return 0;
}

int destroy_srq(ibv_srq* raw) {
  auto* srq = static_cast<VerbsSrq*>(raw);
  Context& context = of(srq->context);
  {
    Engine::ControlLock lock(context.job->engine());
    if (srq->users != 0) return failed(EBUSY, "the shared receive queue has queue pairs");
    context.shared_receives.erase(srq->srqn);
    --static_cast<Pd*>(srq->pd)->users;
  }
  ::pthread_mutex_destroy(&srq->mutex);
  ::pthread_cond_destroy(&srq->cond);
  delete srq;
  return 0;
}

ibv_ah* create_ah(ibv_pd* pd, verbs::ibv_ah_attr* attr) {
  return guarded<ibv_ah*>(nullptr, [&]() -> ibv_ah* {
    if (attr->port_num != 1) {
      failed(EINVAL, "softnic has port 1 only");
      return nullptr;
    }
    auto ah = std::make_unique<VerbsAh>();
    ah->context = pd->context;
    ah->pd = pd;
    ah->handle = 0;
    ah->vector.rlid = mlx5::to_big16(attr->dlid);
    ah->vector.stat_rate_sl = static_cast<std::uint8_t>(attr->static_rate << 4 | attr->sl);
    ah->vector.fl_mlid = attr->src_path_bits & 0x7f;
    ah->vector.hop_limit = attr->grh.hop_limit;
    ah->vector.tclass = attr->grh.traffic_class;
    std::memcpy(ah->vector.rgid, attr->grh.dgid.raw, sizeof ah->vector.rgid);
    if (of(pd->context).job->options().roce) {
      if (attr->is_global == 0) {
        failed(EINVAL, "an address handle of a RoCE port needs a GID");
        return nullptr;
      }
      const std::uint64_t mac = mac_of(attr->grh.dgid);
      for (int i = 0; i < 6; ++i)
        ah->vector.rmac[i] = static_cast<std::uint8_t>(mac >> (8 * (5 - i)));
    }
    return ah.release();
  });
}

int destroy_ah(ibv_ah* ah) {
  delete static_cast<VerbsAh*>(ah);
  return 0;
}

}  // namespace

void set_shared_receive_functions(verbs::Table& t) {
  t.create_srq = create_srq;
  t.modify_srq = modify_srq;
  t.query_srq = query_srq;
  t.destroy_srq = destroy_srq;
  t.create_ah = create_ah;
  t.destroy_ah = destroy_ah;
}

}  // namespace marrow::softnic
