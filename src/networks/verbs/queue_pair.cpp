// SPDX-License-Identifier: Apache-2.0
#include "networks/verbs/queue_pair.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/log.hpp"
#include "base/memfd.hpp"
#include "base/random.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::networks::rdma {
namespace {

using base::cat;
namespace v = marrow::verbs;
using namespace v;  // NOLINT: attribute masks and states of verbs, thirty names

constexpr std::uint8_t kRnrTimer = 12;  // 0.64 ms until the sender asks again
constexpr int kMostReads = 16;
constexpr std::size_t kPage = 4096;

}  // namespace

QueuePair::QueuePair(std::shared_ptr<Device> device, v::ibv_cq* cq, const Options& options,
                     std::uint32_t peer)
    : device_(std::move(device)), options_(options), peer_(peer), depth_(options.depth) {
  try {
    make_queues(cq);
    make_memory();
  } catch (...) {
    drop();
    throw;
  }
  std::uint64_t random = base::random_u64();
  end_.qpn = qp_->qp_num;
  end_.psn = static_cast<std::uint32_t>(random & 0xffffff);
  end_.port = v::address_of(device_->port());
  end_.control = reinterpret_cast<std::uint64_t>(memory_.data());
  end_.control_rkey = region_->rkey;
  end_.credits = options_.credits;
  const v::ibv_device_attr& a = device_->attributes();
  end_.max_answers = static_cast<std::uint16_t>(std::clamp(a.max_qp_rd_atom, 0, kMostReads));
  end_.max_asked = static_cast<std::uint16_t>(std::clamp(a.max_qp_init_rd_atom, 0, kMostReads));
}

QueuePair::~QueuePair() { drop(); }

void QueuePair::drop() noexcept {
  const v::Table& table = device_->table();
  if (qp_) {
    if (const int error = table.destroy_qp(qp_)) {
      MARROW_WARN(net, "verbs: destroying the queue pair to rank ", peer_, ": ",
                  base::errno_text(error));
    }
  }
  if (region_) {
    if (const int error = table.dereg_mr(region_)) {
      MARROW_WARN(net, "verbs: freeing the message buffers of rank ", peer_, ": ",
                  base::errno_text(error));
    }
  }
  qp_ = nullptr;
  region_ = nullptr;
}

void QueuePair::make_queues(v::ibv_cq* cq) {
  const v::Table& table = device_->table();
  const int most = device_->attributes().max_qp_wr;
  const auto fits = [most](std::uint32_t wanted) {
    return most > 0 ? std::min(wanted, static_cast<std::uint32_t>(most)) : wanted;
  };
  v::ibv_qp_init_attr init{};
  init.send_cq = init.recv_cq = cq;
  init.qp_type = v::kQpTypeRc;
  init.cap.max_send_wr = fits(depth_ + kReserve);
  init.cap.max_recv_wr = fits(options_.credits);
  init.cap.max_send_sge = init.cap.max_recv_sge = 1;
  if (init.cap.max_send_wr < depth_ + kReserve || init.cap.max_recv_wr < options_.credits) {
    throw Error(Code::invalid_argument,
                cat(device_->name(), " has queues of ", most, " entries at most, not ",
                    std::max(depth_ + kReserve, options_.credits)),
                "choose a smaller MARROW_VERBS_DEPTH or MARROW_VERBS_CREDITS");
  }
  // Whole messages inline if the NIC takes them, else values, else nothing.
  int error = 0;
  for (const std::uint32_t bytes : {kSlotBytes, std::uint32_t{MARROW_NETWORK_MAX_INLINE}, 0u}) {
    v::ibv_qp_init_attr attempt = init;
    attempt.cap.max_inline_data = bytes;
    errno = 0;
    qp_ = table.create_qp(device_->pd(), &attempt);
    error = errno;
    if (qp_) {
      max_inline_ = std::max(bytes, attempt.cap.max_inline_data);
      return;
    }
    if (error != EINVAL) break;
  }
  const bool full = error == ENOMEM || error == EAGAIN || error == ENOSPC;
  throw Error(full ? Code::out_of_memory : Code::network,
              cat(device_->name(), " gave no queue pair for rank ", peer_, " (", depth_ + kReserve,
                  " sends, ", options_.credits, " receives): ", v::last_failure(table, error),
                  full ? cat("; ", v::locked_memory_limit()) : ""),
              full ? "raise `ulimit -l`, or choose a smaller MARROW_VERBS_DEPTH and "
                     "MARROW_VERBS_CREDITS"
                   : "look at the kernel's log and `ibv_devinfo -v`");
}

void QueuePair::make_memory() {
  const auto align = [](std::size_t n) { return (n + 63) & ~std::size_t{63}; };
  results_ = align(sizeof(ControlWords) + 64);
  staging_ = align(results_ + std::size_t{ring()} * sizeof(std::uint64_t));
  const bool stage = max_inline_ < kSlotBytes;
  receives_ = staging_ + (stage ? std::size_t{ring()} * kSlotBytes : 0);
  const std::size_t bytes = receives_ + std::size_t{options_.credits} * kSlotBytes;
  const std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
  v::Memory memory;
  if (device_->emulated()) {  // whose engines map it by its file
    file_ = base::memfd("marrow-verbs", whole);
    memory_ = base::Mapping::of_fd(file_.get(), whole);
    memory.fd = file_.get();
  } else {
    memory_ = base::Mapping::anonymous(whole);
  }
  memory.address = memory_.data();
  memory.bytes = whole;
  region_ =
      v::register_memory(device_->table(), device_->context(), device_->pd(), memory,
                         IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
                         nullptr, cat(device_->name(), " for messages of rank ", peer_))
          .region;
}

int QueuePair::post_receive(std::uint32_t slot) {
  v::ibv_sge sge{reinterpret_cast<std::uint64_t>(receive_buffer(slot)), kSlotBytes, region_->lkey};
  v::ibv_recv_wr request{};
  request.wr_id = work_id(peer_, slot, true);
  request.sg_list = &sge;
  request.num_sge = 1;
  v::ibv_recv_wr* bad = nullptr;
  return qp_->context->ops.post_recv(qp_, &request, &bad);
}

void QueuePair::step(v::ibv_qp_attr& attr, int mask, const char* name) {
  const int error = device_->table().modify_qp(qp_, &attr, mask | IBV_QP_STATE);
  if (error == 0) return;
  const std::string words = v::last_failure(device_->table(), error > 0 ? error : errno);
  const bool route = error == ENETUNREACH || error == EHOSTUNREACH || error == ETIMEDOUT;
  throw Error(route ? Code::peer_failed : Code::network,
              cat("the queue pair to rank ", peer_, " could not become ", name, " on ",
                  device_->name(), " ", v::describe(device_->port()), ": ", words),
              route ? "check that the peer's address answers (ping), and MARROW_GID_INDEX"
                    : "check MARROW_GID_INDEX and MARROW_NIC on both ranks; `rdma link` shows the "
                      "ports");
}

void QueuePair::connect(const End& theirs) {
  theirs_ = theirs;
  const v::Port& port = device_->port();
  v::ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = port.number;
  attr.qp_access_flags =
      IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
  step(attr, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "initialised");
  for (std::uint32_t slot = 0; slot < options_.credits; ++slot) {
    if (const int error = post_receive(slot)) {
      throw Error(error == ENOMEM ? Code::out_of_memory : Code::network,
                  cat("receive ", slot, " of ", options_.credits, " for rank ", peer_,
                      " could not be posted: ", base::errno_text(error)),
                  "choose a smaller MARROW_VERBS_CREDITS");
    }
  }
  attr = {};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = std::min(port.mtu, int{theirs.port.mtu});
  attr.dest_qp_num = theirs.qpn;
  attr.rq_psn = theirs.psn;
  attr.max_dest_rd_atomic = static_cast<std::uint8_t>(std::min(end_.max_answers, theirs.max_asked));
  attr.min_rnr_timer = kRnrTimer;
  attr.ah_attr = v::path_to(port, theirs.port, options_.service_level, options_.traffic_class);
  step(attr,
       IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
           IBV_QP_MIN_RNR_TIMER,
       "ready to receive");
  attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = options_.timeout;
  attr.retry_cnt = options_.retries;
  attr.rnr_retry = options_.rnr_retries;
  attr.sq_psn = end_.psn;
  attr.max_rd_atomic = static_cast<std::uint8_t>(std::min(end_.max_asked, theirs.max_answers));
  step(attr,
       IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
           IBV_QP_MAX_QP_RD_ATOMIC,
       "ready to send");
}

bool QueuePair::stop() noexcept {
  v::ibv_qp_attr attr{};
  attr.qp_state = IBV_QPS_ERR;
  return device_->table().modify_qp(qp_, &attr, IBV_QP_STATE) == 0;
}

}  // namespace marrow::networks::rdma
