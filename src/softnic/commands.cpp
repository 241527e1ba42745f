// SPDX-License-Identifier: Apache-2.0
// The firmware commands, read from the bytes that a real ConnectX would get. Whatever a field says is
// checked against what exists; a refusal carries the PRM status and a sentence.
#include <cstring>

#include "base/text.hpp"
#include "softnic/objects.hpp"

namespace marrow::softnic {
namespace {

namespace ads = mlx5::ads;
namespace command = mlx5::command;
namespace cqc = mlx5::cqc;
namespace create_cq = mlx5::create_cq;
namespace create_qp = mlx5::create_qp;
namespace hca_cap = mlx5::hca_cap;
namespace modify_qp = mlx5::modify_qp;
namespace qpc = mlx5::qpc;
namespace query_qp = mlx5::query_qp;
namespace reply = mlx5::reply;
using base::cat;
using mlx5::at;
using mlx5::Command;
using mlx5::CommandStatus;
using mlx5::Cqe;
using mlx5::DoorbellRecord;
using mlx5::Field;
using mlx5::get;
using mlx5::QpState;
using mlx5::set;
using enum mlx5::Command;
using enum mlx5::CommandStatus;
using enum mlx5::QpState;

[[noreturn]] void refuse(CommandStatus status, std::string sentence) {
  throw Refused{status, std::move(sentence)};
}
void require(bool good, CommandStatus status, const char* sentence) {
  if (!good) refuse(status, sentence);
}
void need_bytes(std::size_t have, std::size_t want, CommandStatus status) {
  if (have < want) refuse(status, cat("the command buffer has ", have, " bytes, not ", want));
}

Umem& umem(Context& context, std::uint64_t id, const char* what) {
  const auto found = context.umems.find(static_cast<std::uint32_t>(id));
  if (found == context.umems.end()) refuse(kStatusBadResource, cat(what, ": no umem ", id));
  return *found->second;
}
std::byte* inside(const Umem& memory, std::uint64_t offset, std::uint64_t bytes,
                  std::uint64_t align, const char* what) {
  std::byte* at = memory.at(offset, bytes);
  if (at == nullptr) {
    refuse(kStatusBadParameter, cat(what, ": ", bytes, " bytes at offset ", offset,
                                    " of a umem of ", memory.bytes, " bytes"));
  }
  if (reinterpret_cast<std::uintptr_t>(at) % align != 0) {
    refuse(kStatusBadParameter, cat(what, " is not aligned to ", align, " bytes"));
  }
  return at;
}
Uar& uar(Context& context, std::uint64_t page, const char* what) {
  const auto found = context.uars.find(static_cast<std::uint32_t>(page));
  if (found == context.uars.end()) refuse(kStatusBadResource, cat(what, ": no UAR page ", page));
  return *found->second;
}
CqObject& completion_queue(Context& context, std::uint64_t cqn, const char* what) {
  const auto found = context.cqs.find(static_cast<std::uint32_t>(cqn));
  if (found == context.cqs.end()) refuse(kStatusBadResource, cat(what, ": no CQ ", cqn));
  return *found->second;
}

std::unique_ptr<CqObject> create_cq_object(Context& context, const std::uint8_t* in,
                                           std::size_t in_bytes, std::uint8_t* out) {
  need_bytes(in_bytes, create_cq::cq_umem_valid.byte + 1, kStatusBadInputLength);
  const std::uint8_t* c = in + create_cq::kContext;
  require(get(c, cqc::cqe_size) == 0, kStatusBadParameter, "only 64-byte CQEs are supported");
  require(get(c, cqc::eqn) == kEventQueue, kStatusBadResource, "the EQN is not query_eqn's");
  require(get(in, create_cq::cq_umem_valid) == 1, kStatusBadParameter, "CQ: cq_umem_valid is 0");
  require(get(c, cqc::record_umem_valid) == 1, kStatusBadParameter, "CQ: dbr_umem_valid is 0");
  uar(context, get(c, cqc::uar_page), "CQ");
  const std::uint64_t log_size = get(c, cqc::log_cq_size);
  require(log_size <= kLogMaxCq, kStatusExceedLimit, "CQ: log_cq_size above 22");
  auto object = std::make_unique<CqObject>();
  object->owner = &context;
  object->ring = &umem(context, get(in, create_cq::cq_umem_id), "CQ ring");
  object->record = &umem(context, get(c, cqc::record_umem_id), "CQ record");
  CompletionQueue& cq = object->cq;
  cq.entries = 1u << log_size;
  cq.ring = reinterpret_cast<Cqe*>(inside(*object->ring, get(in, create_cq::cq_umem_offset),
                                          std::uint64_t{cq.entries} * sizeof(Cqe), sizeof(Cqe),
                                          "CQ ring"));
  cq.record = reinterpret_cast<const std::uint32_t*>(
      inside(*object->record, get(c, cqc::record_address), 8, 8, "CQ record"));
  cq.collapsed = get(c, cqc::collapsed) == 1;
  cq.overrun_ignored = get(c, cqc::overrun_ignore) == 1;
  cq.produced = cq.good = context.job->options().start_index;
  object->engine = context.engine;
  cq.cqn = context.engine != nullptr ? context.engine->next_completion_queue()
                                     : context.job->next_number();
  require(cq.cqn != 0, kStatusNoResources, "the GPU engine has no free completion queue left");
  ++object->ring->users;
  ++object->record->users;
  context.cqs[cq.cqn] = object.get();
  if (context.engine != nullptr) {
    context.engine->add(cq);
  } else {
    context.job->engine().add(cq);
  }
  set(out, reply::object, cq.cqn);
  return object;
}

bool pd_exists(const Context& context, std::uint64_t pdn) {
  for (const Pd* pd : context.pds) {
    if (pd->pdn == pdn) return true;
  }
  return false;
}

void reset_progress(HostQueuePair& qp) {
  qp.producer = qp.consumer = qp.start;
  qp.rq_consumer = 0;
  qp.own_message.reset();
  qp.stage = QueuePair::Stage::fetch;
  qp.not_before = 0;
  qp.give_up = 0;
}

void take_doorbells(HostQueuePair& qp, const Uar& uar) {
  qp.doorbell = static_cast<std::uint64_t*>(uar.reg_addr);
  qp.blue_flame = uar.blue_flame;
  if (!uar.blue_flame) return;
  qp.other_doorbell = reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(uar.reg_addr) +
                                                       (1u << mlx5::kLogBlueFlameBytes) / 2);
}

/// Where receives come from: the ring in front of the send ring, a shared one, or nowhere.
void take_receives(Context& context, HostQueuePair& qp, const std::uint8_t* c) {
  MessageState& state = qp.own_message;
  qp.message = &state;
  state.receives = &state.own;
  if (get(c, qpc::rq_type) == mlx5::kRqShared) {
    const auto found = context.shared_receives.find(static_cast<std::uint32_t>(get(c, qpc::srqn)));
    if (found == context.shared_receives.end()) {
      refuse(kStatusBadResource, cat("QP: no SRQ ", get(c, qpc::srqn)));
    }
    require(found->second.pd == qp.pd, kStatusBadParameter,
            "QP: the SRQ belongs to another protection domain");
    state.receives = &found->second;
    return;
  }
  state.own.ring = qp.rq;
  state.own.record = qp.record == nullptr ? nullptr : &qp.record->receive;
  state.own.depth = qp.rq_depth;
  state.own.stride = qp.rq_stride;
}

std::unique_ptr<QpObject> create_qp_object(Context& context, const std::uint8_t* in,
                                           std::size_t in_bytes, std::uint8_t* out) {
  need_bytes(in_bytes, create_qp::wq_umem_valid.byte + 1, kStatusBadInputLength);
  const std::uint8_t* c = in + create_qp::kContext;
  require(get(c, qpc::service_type) == mlx5::kServiceRc, kStatusBadParameter,
          "only RC queue pairs are supported");
  require(pd_exists(context, get(c, qpc::pd)), kStatusBadResource, "QP: no such PD");
  require(get(in, create_qp::wq_umem_valid) == 1, kStatusBadParameter, "QP: wq_umem_valid is 0");
  const std::uint64_t rq_type = get(c, qpc::rq_type);
  require(rq_type == mlx5::kRqOwn || rq_type == mlx5::kRqShared || rq_type == mlx5::kRqNone,
          kStatusBadParameter, "QP: rq_type is not 0 (own), 1 (shared) or 3 (none)");
  auto object = std::make_unique<QpObject>();
  object->owner = &context;
  HostQueuePair& qp = object->qp;
  qp.pd = static_cast<std::uint32_t>(get(c, qpc::pd));
  if (rq_type == mlx5::kRqOwn) {
    qp.rq_depth = 1u << get(c, qpc::log_rq_size);
    qp.rq_stride = 16u << get(c, qpc::log_rq_stride);
  }
  qp.depth = get(c, qpc::no_sq) == 1 ? 0 : 1u << get(c, qpc::log_sq_size);
  const std::uint64_t rq_bytes = std::uint64_t{qp.rq_depth} * qp.rq_stride;
  const std::uint64_t sq_bytes = std::uint64_t{qp.depth} * mlx5::kBlockBytes;
  object->rings = &umem(context, get(in, create_qp::wq_umem_id), "QP rings");
  // The receive ring comes first, the send ring follows.
  const std::byte* rings = inside(*object->rings, get(in, create_qp::wq_umem_offset),
                                  rq_bytes + sq_bytes, 8, "QP rings");
  qp.rq = rings;
  qp.sq = rings + rq_bytes;
  require(reinterpret_cast<std::uintptr_t>(qp.sq) % mlx5::kBlockBytes == 0, kStatusBadParameter,
          "QP: the send ring is not aligned to 64 bytes");
  object->uar = &uar(context, get(c, qpc::uar_page), "QP");
  GpuEngine* const gpu = context.engine;
  require(object->uar->engine == gpu, kStatusBadParameter,
          "QP: the UAR page is of another engine than the queue pair");
  take_doorbells(qp, *object->uar);
  if (get(c, qpc::send_record_mode) != 0) {
    // Without a record the doorbell has a place of its own in the page; the register still counts.
    qp.other_doorbell = qp.doorbell;
    qp.doorbell = reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(object->uar->base_addr) +
                                                   mlx5::kNoRecordDoorbell);
  } else {
    require(get(c, qpc::record_umem_valid) == 1, kStatusBadParameter, "QP: dbr_umem_valid is 0");
    object->record = &umem(context, get(c, qpc::record_umem_id), "QP record");
    qp.record = reinterpret_cast<const DoorbellRecord*>(
        inside(*object->record, get(c, qpc::record_address), sizeof(DoorbellRecord),
               sizeof(DoorbellRecord), "QP record"));
  }
  take_receives(context, qp, c);
  qp.send_cq = &completion_queue(context, get(c, qpc::cqn_send), "QP send").cq;
  // A queue pair that never receives needs no queue for it; drivers then name none.
  const std::uint64_t receives_to = get(c, qpc::cqn_receive);
  qp.receive_cq = rq_type == mlx5::kRqNone && receives_to == 0
                      ? qp.send_cq
                      : &completion_queue(context, receives_to, "QP receive").cq;
  qp.user_index = static_cast<std::uint32_t>(get(c, qpc::user_index));
  std::memcpy(qp.context, c, qpc::kBytes);
  qp.slot = context.job->directory().claim_qp(qp.qpn);
  require(qp.slot != nullptr, kStatusNoResources, "the job has no free queue pair left");
  qp.slot->pd.store(qp.pd, std::memory_order_relaxed);
  qp.slot->access.store(0, std::memory_order_relaxed);
  qp.slot->remote_qpn.store(0, std::memory_order_relaxed);
  qp.slot->inbox.state.store(Inbox::kIdle, std::memory_order_relaxed);
  Engine::set_state(qp, kReset);
  qp.slot->qpn.store(qp.qpn, std::memory_order_release);
  // A real NIC begins at 0. Here a creator may ask for another first index, to reach the wrap; a
  // completion queue that nobody uses yet begins there too.
  std::uint16_t start = context.job->options().start_index;
  if (get(c, qpc::hw_sq_index) != 0) {
    start = static_cast<std::uint16_t>(get(c, qpc::hw_sq_index));
    if (qp.send_cq->users == 0) qp.send_cq->produced = qp.send_cq->good = start;
  }
  qp.start = start;
  reset_progress(qp);
  qp.work = &qp.own_work;
  if (gpu != nullptr) {
    try {
      gpu->add(qp);
    } catch (...) {
      qp.slot->qpn.store(0, std::memory_order_release);
      throw;
    }
  } else {
    context.job->engine().add(qp);
  }
  ++object->rings->users;
  if (object->record != nullptr) ++object->record->users;
  ++object->uar->users;
  ++qp.send_cq->users;
  ++qp.receive_cq->users;
  set(out, reply::object, qp.qpn);
  return object;
}

void copy_field(HostQueuePair& qp, const std::uint8_t* from, Field field) {
  set(qp.context, field, get(from, field));
}

// Remote rights: RST2INIT states them; later commands may add to them, or restate them with the
// optional-parameter bits RRE (1), RAE (2), RWE (3).
void take_access(HostQueuePair& qp, const std::uint8_t* c, std::uint64_t restated) {
  struct Right {
    Field field;
    unsigned bit;
    std::uint32_t access;
  };
  constexpr Right rights[] = {{qpc::remote_read_enable, 1, verbs::IBV_ACCESS_REMOTE_READ},
                              {qpc::remote_atomic_enable, 2, verbs::IBV_ACCESS_REMOTE_ATOMIC},
                              {qpc::remote_write_enable, 3, verbs::IBV_ACCESS_REMOTE_WRITE}};
  std::uint32_t access = qp.slot->access.load(std::memory_order_relaxed);
  for (const Right& right : rights) {
    if (((restated >> right.bit) & 1) != 0) access &= ~right.access;
    if (get(c, right.field) == 1) access |= right.access;
    set(qp.context, right.field, (access & right.access) != 0 ? 1 : 0);
  }
  qp.slot->access.store(access, std::memory_order_relaxed);
}

/// How packets find the peer's port. Where they really go, its QPN says.
void check_path(const std::uint8_t* c, bool roce) {
  const auto path = [c](Field field) { return get(c, at(qpc::kPrimaryPath, field)); };
  if (!roce) {
    require(path(ads::rlid) != 0, kStatusBadParameter, "INIT2RTR: rlid is 0 on an InfiniBand port");
    return;
  }
  require(path(ads::rmac_high) != 0 || path(ads::rmac_low) != 0, kStatusBadParameter,
          "INIT2RTR: rmac is 0 on an Ethernet port");
  require(path(ads::rgid_high) != 0 || path(ads::rgid_low) != 0, kStatusBadParameter,
          "INIT2RTR: rgid_rip is 0 on an Ethernet port");
  require(path(ads::src_addr_index) < kRoceGids, kStatusBadIndex,
          "INIT2RTR: src_addr_index is not in the GID table");
  require(path(ads::hop_limit) != 0, kStatusBadParameter,
          "INIT2RTR: hop_limit is 0 on an Ethernet port");
}

void init_to_rtr(HostQueuePair& qp, const std::uint8_t* c, bool roce) {
  const std::uint64_t mtu = get(c, qpc::mtu);
  require(mtu >= 1 && mtu <= 5, kStatusBadParameter, "INIT2RTR: mtu is not 1..5");
  require(get(c, qpc::remote_qpn) != 0, kStatusBadParameter, "INIT2RTR: remote_qpn is 0");
  check_path(c, roce);
  require(get(c, at(qpc::kPrimaryPath, ads::port)) <= 1, kStatusBadIndex,
          "INIT2RTR: the device has port 1 only");
  require(get(c, qpc::log_message_max) <= kLogMaxMessage, kStatusExceedLimit,
          "INIT2RTR: log_msg_max above 30");
  qp.remote_qpn = static_cast<std::uint32_t>(get(c, qpc::remote_qpn));
  // All our GIDs end in what would be the LID.
  qp.remote_lid =
      static_cast<std::uint32_t>(roce ? get(c, at(qpc::kPrimaryPath, ads::rgid_low)) & 0xffff
                                      : get(c, at(qpc::kPrimaryPath, ads::rlid)));
  qp.slot->remote_qpn.store(qp.remote_qpn, std::memory_order_relaxed);
  for (const Field field : {qpc::mtu, qpc::log_message_max, qpc::remote_qpn, qpc::min_rnr_nak,
                            qpc::next_receive_psn, qpc::log_responder_reads,
                            at(qpc::kPrimaryPath, ads::rlid), at(qpc::kPrimaryPath, ads::port)}) {
    copy_field(qp, c, field);
  }
}

void rtr_to_rts(HostQueuePair& qp, const std::uint8_t* c) {
  qp.retry_count = static_cast<std::uint32_t>(get(c, qpc::retry_count));
  qp.rnr_retry = static_cast<std::uint32_t>(get(c, qpc::rnr_retry));
  qp.ack_timeout = static_cast<std::uint32_t>(get(c, at(qpc::kPrimaryPath, ads::ack_timeout)));
  for (const Field field :
       {qpc::retry_count, qpc::rnr_retry, qpc::next_send_psn, qpc::log_outstanding_reads,
        qpc::log_ack_request_frequency, at(qpc::kPrimaryPath, ads::ack_timeout)}) {
    copy_field(qp, c, field);
  }
}

void modify_queue_pair(HostQueuePair& qp, const std::uint8_t* in, std::size_t in_bytes,
                       QueueChange& change, bool roce) {
  const auto opcode = static_cast<Command>(get(in, command::opcode));
  if (opcode == kToErr) return Engine::set_state(qp, kError);
  if (opcode == kToRst) {
    Engine::set_state(qp, kReset);
    qp.remote_qpn = 0;
    qp.slot->remote_qpn.store(0, std::memory_order_relaxed);
    qp.slot->access.store(0, std::memory_order_relaxed);
    reset_progress(qp);
    // The owner starts again at the first index and rewrites the record before it posts. The register
    // is ours: emptied, so that a doorbell equal to the last one is noticed.
    qp.last_record = mlx5::record_word(qp.start);
    qp.last_doorbell = qp.last_other_doorbell = 0;
    if (qp.gpu != nullptr) {
      change.flags = gpu::kClearCell;
    } else {
      std::atomic_ref<std::uint64_t>(*qp.doorbell).store(0, std::memory_order_relaxed);
      if (qp.other_doorbell != nullptr) {
        std::atomic_ref<std::uint64_t>(*qp.other_doorbell).store(0, std::memory_order_relaxed);
      }
    }
    return;
  }
  need_bytes(in_bytes, modify_qp::kContext + qpc::kBytes, kStatusBadInputLength);
  const std::uint8_t* c = in + modify_qp::kContext;
  const std::uint64_t mask = get(in, command::optional_mask);
  const auto from = [&](QpState wanted) {
    require(qp.state == wanted, kStatusBadQpState, "the queue pair is not in that state");
  };
  switch (opcode) {
    case kRstToInit:
      from(kReset);
      require(get(c, qpc::path_migration) == mlx5::kPathMigrated, kStatusBadParameter,
              "RST2INIT: pm_state is not 'migrated' (3)");
      take_access(qp, c, ~std::uint64_t{0});
      return Engine::set_state(qp, kInit);
    case kInitToInit: from(kInit); return take_access(qp, c, mask);
    case kInitToRtr:
      from(kInit);
      init_to_rtr(qp, c, roce);
      take_access(qp, c, mask);
      return Engine::set_state(qp, kReadyToReceive);
    case kRtrToRts:
      from(kReadyToReceive);
      rtr_to_rts(qp, c);
      take_access(qp, c, mask);
      return Engine::set_state(qp, kReadyToSend);
    case kRtsToRts: from(kReadyToSend); return take_access(qp, c, mask);
    default: refuse(kStatusBadOpcode, cat("command ", opcode, " does not modify a queue pair"));
  }
}

}  // namespace

std::unique_ptr<verbs::mlx5dv_devx_obj> create_object(Context& context, const std::uint8_t* in,
                                                      std::size_t in_bytes, std::uint8_t* out,
                                                      std::size_t out_bytes) {
  need_bytes(out_bytes, reply::kHeaderBytes, kStatusBadOutputLength);
  switch (get(in, command::opcode)) {
    case kCreateCq: return create_cq_object(context, in, in_bytes, out);
    case kCreateQp: return create_qp_object(context, in, in_bytes, out);
    default:
      refuse(kStatusBadOpcode, cat("command ", get(in, command::opcode), " creates nothing here"));
  }
}

void modify_object(verbs::mlx5dv_devx_obj& object, const std::uint8_t* in, std::size_t in_bytes) {
  auto* qp_object = dynamic_cast<QpObject*>(&object);
  require(qp_object != nullptr, kStatusBadOpcode, "a completion queue cannot be modified");
  HostQueuePair& qp = qp_object->qp;
  require(get(in, command::object) == qp.qpn, kStatusBadResource,
          "the command's QPN is not the object's");
  QueueChange change(qp);
  if (get(in, command::opcode) == kToRst) {
    Messages::withdraw(qp_object->owner->job->directory(), qp);
  }
  modify_queue_pair(qp, in, in_bytes, change, qp_object->owner->job->options().roce);
  change.finish();
}

void query_object(const verbs::mlx5dv_devx_obj& object, const std::uint8_t* in, std::uint8_t* out,
                  std::size_t out_bytes) {
  const auto* qp_object = dynamic_cast<const QpObject*>(&object);
  require(qp_object != nullptr && get(in, command::opcode) == kQueryQp, kStatusBadOpcode,
          "only QUERY_QP of a queue pair is supported");
  const HostQueuePair& known = qp_object->qp;
  require(get(in, command::object) == known.qpn, kStatusBadResource,
          "the command's QPN is not the object's");
  need_bytes(out_bytes, query_qp::kContext + qpc::kBytes, kStatusBadOutputLength);
  std::uint8_t* c = out + query_qp::kContext;
  std::memcpy(c, known.context, qpc::kBytes);
  const QueuePair qp = known.gpu != nullptr ? known.gpu->look_at(known) : QueuePair(known);
  set(c, qpc::state, qp.state);
  // Before INIT2RTR gives one: the smallest. A driver may read any valid one, never 0.
  if (get(c, qpc::mtu) == 0) set(c, qpc::mtu, 1);
  set(c, qpc::hw_sq_index, qp.consumer);
  set(c, qpc::sw_sq_index, qp.producer);
  set(c, qpc::hw_rq_index,
      known.gpu != nullptr ? qp.rq_consumer : known.message->receives->consumer);
}

void general_command(const Context& context, const std::uint8_t* in, std::uint8_t* out,
                     std::size_t out_bytes) {
  (void)context;
  if (get(in, command::opcode) != kQueryHcaCap) {
    refuse(kStatusBadOpcode, cat("command ", get(in, command::opcode), " is not supported"));
  }
  need_bytes(out_bytes, hca_cap::kCapability + 0x60, kStatusBadOutputLength);
  std::uint8_t* c = out + hca_cap::kCapability;
  switch (get(in, command::op_mod) >> 1) {
    case hca_cap::kGeneral: break;
    case hca_cap::kAtomic:
      set(c, hca_cap::atomic_operations, 0xf);
      set(c, hca_cap::atomic_sizes, 4 | 8);
      return;
    case hca_cap::kGeneral2: set(c, hca_cap::no_record_mode, 1); return;
    default: return;  // nothing of that kind: all zero
  }
  set(c, hca_cap::general_2_present, 1);
  set(c, hca_cap::log_max_qp_size, mlx5::kMaxLogQueue);
  set(c, hca_cap::log_max_qp, kQpSlotBits);
  set(c, hca_cap::log_max_cq_size, kLogMaxCq);
  set(c, hca_cap::log_max_cq, kQpSlotBits);
  set(c, hca_cap::log_max_initiator_reads, kLogMostReadsInFlight);
  set(c, hca_cap::log_max_responder_reads, kLogMostReadsInFlight);
  set(c, hca_cap::gid_table_size, 0);
  set(c, hca_cap::port_type, 0);  // InfiniBand: no MAC address, no GID to resolve
  set(c, hca_cap::port_count, 1);
  set(c, hca_cap::log_max_message, kLogMaxMessage);
  set(c, hca_cap::cqe_version, 1);
  set(c, hca_cap::atomic, 1);
  set(c, hca_cap::cq_overrun_ignore, 1);
  set(c, hca_cap::cross_channel, 1);
  set(c, hca_cap::reliable_connected, 1);
  set(c, hca_cap::blue_flame, 1);
  set(c, hca_cap::log_bf_register_size, mlx5::kLogBlueFlameBytes);
  set(c, hca_cap::max_send_wqe_bytes, 1024);
  set(c, hca_cap::max_receive_wqe_bytes, mlx5::kMostReceiveSges * mlx5::kSegmentBytes);
}

void detach_object(verbs::mlx5dv_devx_obj& object) {
  Context& context = *object.owner;
  if (auto* cq = dynamic_cast<CqObject*>(&object)) {
    require(cq->cq.users == 0, kStatusResourceBusy, "the completion queue has queue pairs");
    if (cq->engine != nullptr) {
      cq->engine->remove(cq->cq);
    } else {
      context.job->engine().remove(cq->cq);
    }
    context.cqs.erase(cq->cq.cqn);
    --cq->ring->users;
    --cq->record->users;
  } else if (auto* qp = dynamic_cast<QpObject*>(&object)) {
    if (qp->qp.gpu != nullptr) {
      qp->qp.gpu->remove(qp->qp);
    } else {
      context.job->engine().remove(qp->qp);
      context.job->engine().forget_messages(qp->qp);
    }
    Engine::set_state(qp->qp, kReset);
    qp->qp.slot->qpn.store(0, std::memory_order_release);
    --qp->rings->users;
    if (qp->record != nullptr) --qp->record->users;
    --qp->uar->users;
    release_uar(*qp->uar);
    --qp->qp.send_cq->users;
    --qp->qp.receive_cq->users;
  }
}

}  // namespace marrow::softnic
