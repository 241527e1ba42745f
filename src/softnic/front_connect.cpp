// SPDX-License-Identifier: Apache-2.0
// ibv_modify_qp and ibv_query_qp as the kernel's mlx5 driver does them: attributes that a transition
// needs are demanded, then become a QP context in a command.
#include <cstring>

#include "base/text.hpp"
#include "softnic/front_verbs.hpp"

namespace marrow::softnic {
namespace {

using mlx5::at;
using mlx5::get;
using mlx5::set;
using verbs::ibv_qp;
using verbs::ibv_qp_attr;
using verbs::ibv_qp_init_attr;
using namespace verbs;  // NOLINT: the attribute masks, twenty names
namespace ads = mlx5::ads;
namespace qpc = mlx5::qpc;

struct Transition {
  int from;
  int to;
  mlx5::Command command;
  int required;  ///< attributes besides the state
  int optional;
};

constexpr Transition kTransitions[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, mlx5::kRstToInit,
     IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, mlx5::kInitToInit, 0,
     IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR, mlx5::kInitToRtr,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_RTR, IBV_QPS_RTS, mlx5::kRtrToRts,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_RTS, mlx5::kRtsToRts, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
};

std::uint64_t log2_of(unsigned value) {
  std::uint64_t result = 0;
  while (value > 1) {
    value >>= 1;
    ++result;
  }
  return result;
}

void keep(ibv_qp_attr& to, const ibv_qp_attr& from, int mask) {
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0) to.qp_access_flags = from.qp_access_flags;
  if ((mask & IBV_QP_PKEY_INDEX) != 0) to.pkey_index = from.pkey_index;
  if ((mask & IBV_QP_PORT) != 0) to.port_num = from.port_num;
  if ((mask & IBV_QP_AV) != 0) to.ah_attr = from.ah_attr;
  if ((mask & IBV_QP_PATH_MTU) != 0) to.path_mtu = from.path_mtu;
  if ((mask & IBV_QP_TIMEOUT) != 0) to.timeout = from.timeout;
  if ((mask & IBV_QP_RETRY_CNT) != 0) to.retry_cnt = from.retry_cnt;
  if ((mask & IBV_QP_RNR_RETRY) != 0) to.rnr_retry = from.rnr_retry;
  if ((mask & IBV_QP_RQ_PSN) != 0) to.rq_psn = from.rq_psn;
  if ((mask & IBV_QP_SQ_PSN) != 0) to.sq_psn = from.sq_psn;
  if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0) to.max_rd_atomic = from.max_rd_atomic;
  if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0) to.max_dest_rd_atomic = from.max_dest_rd_atomic;
  if ((mask & IBV_QP_MIN_RNR_TIMER) != 0) to.min_rnr_timer = from.min_rnr_timer;
  if ((mask & IBV_QP_DEST_QPN) != 0) to.dest_qp_num = from.dest_qp_num;
}

/// The context of a command: all that is known so far; the command takes what is its own.
void fill_context(std::uint8_t* c, const ibv_qp_attr& a) {
  set(c, qpc::path_migration, mlx5::kPathMigrated);
  set(c, qpc::mtu, static_cast<std::uint64_t>(a.path_mtu));
  set(c, qpc::log_message_max, kLogMaxMessage);
  set(c, qpc::remote_qpn, a.dest_qp_num);
  set(c, qpc::retry_count, a.retry_cnt);
  set(c, qpc::rnr_retry, a.rnr_retry);
  set(c, qpc::next_send_psn, a.sq_psn);
  set(c, qpc::next_receive_psn, a.rq_psn);
  set(c, qpc::min_rnr_nak, a.min_rnr_timer);
  set(c, qpc::log_outstanding_reads, log2_of(a.max_rd_atomic));
  set(c, qpc::log_responder_reads, log2_of(a.max_dest_rd_atomic));
  set(c, qpc::atomic_mode, 1);
  set(c, qpc::remote_read_enable, (a.qp_access_flags & IBV_ACCESS_REMOTE_READ) != 0);
  set(c, qpc::remote_write_enable, (a.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) != 0);
  set(c, qpc::remote_atomic_enable, (a.qp_access_flags & IBV_ACCESS_REMOTE_ATOMIC) != 0);
  const auto path = [&](mlx5::Field field, std::uint64_t value) {
    set(c, at(qpc::kPrimaryPath, field), value);
  };
  path(ads::pkey_index, a.pkey_index);
  path(ads::rlid, a.ah_attr.dlid);
  path(ads::service_level, a.ah_attr.sl);
  path(ads::grh, a.ah_attr.is_global != 0);
  path(ads::src_addr_index, a.ah_attr.grh.sgid_index);
  path(ads::hop_limit, a.ah_attr.grh.hop_limit);
  path(ads::tclass, a.ah_attr.grh.traffic_class);
  path(ads::rgid_high, mlx5::from_big64(a.ah_attr.grh.dgid.global.subnet_prefix));
  path(ads::rgid_low, mlx5::from_big64(a.ah_attr.grh.dgid.global.interface_id));
  if (a.ah_attr.is_global != 0) {  // read on RoCE ports only
    const std::uint64_t mac = mac_of(a.ah_attr.grh.dgid);
    path(ads::rmac_high, mac >> 32);
    path(ads::rmac_low, mac & 0xffffffff);
  }
  path(ads::ack_timeout, a.timeout);
  path(ads::port, a.port_num);
}

int run(VerbsQp& qp, mlx5::Command command, const ibv_qp_attr& attr, std::uint32_t optional) {
  std::uint8_t in[mlx5::modify_qp::kInBytes] = {};
  std::uint8_t out[mlx5::modify_qp::kOutBytes] = {};
  set(in, mlx5::command::opcode, command);
  set(in, mlx5::command::object, qp.qp_num);
  set(in, mlx5::command::optional_mask, optional);
  fill_context(in + mlx5::modify_qp::kContext, attr);
  const int error = devx().devx_obj_modify(qp.queue.object, in, sizeof in, out, sizeof out);
  // The command interface reports a refusal as EREMOTEIO; verbs say that the argument was wrong.
  return error == EREMOTEIO ? (errno = EINVAL) : error;
}

/// The state as the NIC has it: an error moves it without us.
int state_of(const VerbsQp& qp, std::uint8_t* context) {
  std::uint8_t in[mlx5::query_qp::kInBytes] = {};
  std::uint8_t out[mlx5::query_qp::kOutBytes] = {};
  set(in, mlx5::command::opcode, mlx5::kQueryQp);
  set(in, mlx5::command::object, qp.qp_num);
  if (devx().devx_obj_query(qp.queue.object, in, sizeof in, out, sizeof out) != 0) return -1;
  if (context != nullptr) std::memcpy(context, out + mlx5::query_qp::kContext, qpc::kBytes);
  return static_cast<int>(get(out + mlx5::query_qp::kContext, qpc::state));
}

const char* wrong_values(const ibv_qp_attr& attr, int mask) {
  if ((mask & IBV_QP_PORT) != 0 && attr.port_num != 1) return "modify_qp: there is port 1 only";
  if ((mask & IBV_QP_PKEY_INDEX) != 0 && attr.pkey_index != 0) {
    return "modify_qp: there is P_Key index 0 only";
  }
  if ((mask & IBV_QP_MAX_QP_RD_ATOMIC) != 0 && attr.max_rd_atomic > kMostReadsInFlight) {
    return "modify_qp: max_rd_atomic is above the device's 16";
  }
  if ((mask & IBV_QP_MAX_DEST_RD_ATOMIC) != 0 && attr.max_dest_rd_atomic > kMostReadsInFlight) {
    return "modify_qp: max_dest_rd_atomic is above the device's 16";
  }
  return nullptr;
}

int modify_qp(ibv_qp* raw, ibv_qp_attr* attr, int mask) {
  auto& qp = *static_cast<VerbsQp*>(raw);
  if (const char* wrong = wrong_values(*attr, mask)) return failed(EINVAL, wrong);
  std::scoped_lock lock(qp.send_lock);
  const int now = state_of(qp, nullptr);
  const int wanted = (mask & IBV_QP_STATE) != 0 ? attr->qp_state : now;
  int error = 0;
  if (wanted == IBV_QPS_ERR) {
    error = run(qp, mlx5::kToErr, qp.attr, 0);
  } else if (wanted == IBV_QPS_RESET) {
    error = run(qp, mlx5::kToRst, qp.attr, 0);
    if (error == 0) {
      for (VerbsCq* cq : {qp.sends_to(), qp.receives_to()}) {
        std::lock_guard cq_lock(cq->lock);
        cq->forget(qp.qp_num);
      }
      qp.reset();
      qp.attr = {};
    }
  } else {
    const Transition* found = nullptr;
    for (const Transition& each : kTransitions) {
      if (each.from == now && each.to == wanted) found = &each;
    }
    if (found == nullptr) {
      return failed(EINVAL, base::cat("modify_qp: no way from state ", now, " to ", wanted));
    }
    const int given = mask & ~IBV_QP_STATE;
    if ((given & found->required) != found->required ||
        (given & ~(found->required | found->optional)) != 0) {
      return failed(
          EINVAL, base::cat("modify_qp: from state ", now, " to ", wanted, " with attribute mask ",
                            mask, ", needed are ", found->required | IBV_QP_STATE));
    }
    ibv_qp_attr next = qp.attr;
    keep(next, *attr, mask);
    // Bits RRE, RAE, RWE of the optional mask: the rights are stated anew.
    const std::uint32_t rights = (mask & IBV_QP_ACCESS_FLAGS) != 0 ? 0xeu : 0u;
    error = run(qp, found->command, next, rights);
    if (error == 0) qp.attr = next;
  }
  if (error == 0) qp.state = wanted;
  return error;
}

int query_qp(ibv_qp* raw, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) {
  auto& qp = *static_cast<VerbsQp*>(raw);
  const int state = state_of(qp, nullptr);
  if (state < 0) return EIO;
  qp.state = state;
  *attr = qp.attr;
  attr->qp_state = attr->cur_qp_state = state;
  attr->cap = qp.cap;
  if (init != nullptr) {
    *init = {};
    init->qp_context = qp.qp_context;
    init->send_cq = qp.send_cq;
    init->recv_cq = qp.recv_cq;
    init->srq = qp.srq;
    init->cap = qp.cap;
    init->qp_type = qp.qp_type;
    init->sq_sig_all = qp.signal_all ? 1 : 0;
  }
  return 0;
}

}  // namespace

void set_connection_functions(verbs::Table& t) {
  t.modify_qp = modify_qp;
  t.query_qp = query_qp;
}

}  // namespace marrow::softnic
