// SPDX-License-Identifier: Apache-2.0
// Command layouts: abi/mlx5_prm.h. Values that are not obvious: rq_type 3 (no receive queue, nothing is
// ever received), overrun ignored (completion indices are counted by the poller, the consumer record is
// never written), minimal retry timers of vendor libraries (ack timeout 20 = 4.3 s, 7 retries).
#include "gda/queue_pair.hpp"

#include <bit>
#include <cerrno>

#include "base/log.hpp"
#include "base/text.hpp"
#include "marrow/abi/mlx5_prm.h"
#include "marrow/abi/mlx5_wqe.h"
#include "marrow/error.hpp"

namespace marrow::gda {
namespace {

namespace ads = mlx5::ads;
namespace command = mlx5::command;
namespace cqc = mlx5::cqc;
namespace create_cq_command = mlx5::create_cq;
namespace create_qp_command = mlx5::create_qp;
namespace modify_qp = mlx5::modify_qp;
namespace qpc = mlx5::qpc;
namespace query_qp = mlx5::query_qp;
namespace reply = mlx5::reply;
using base::cat;
using mlx5::at;
using mlx5::get;
using mlx5::set;

constexpr unsigned kAckTimeout = 20;
constexpr unsigned kRetries = 7;
constexpr unsigned kReceiverRetries = 7;
constexpr unsigned kMinReceiverTimer = 12;
constexpr unsigned kLogOutstandingReads = 4;
constexpr unsigned kLogMaxMessage = 30;
constexpr unsigned kAtomicMode8 = 3;      // 8-byte atomics
constexpr unsigned kRestateRights = 0xe;  // optional-parameter bits: read, atomic, write

unsigned log2_of(std::uint32_t power_of_two) {
  return static_cast<unsigned>(std::countr_zero(power_of_two));
}

[[noreturn]] void refused(const Device& device, const char* command, const std::uint8_t* reply,
                          const std::string& why) {
  const auto status = static_cast<unsigned>(get(reply, reply::status));
  const bool full =
      status == mlx5::kStatusNoResources || status == mlx5::kStatusExceedLimit || errno == ENOMEM;
  throw Error(full ? Code::out_of_memory : Code::network,
              cat(device.name(), " refused ", command, " (status ", status, ", syndrome ",
                  get(reply, reply::syndrome), "): ", why),
              full ? "use fewer contexts or ranks, or a smaller MARROW_GDA_DEPTH"
                   : "run with MARROW_DEBUG=INFO and report it");
}

void set_rights(std::uint8_t* context) {
  set(context, qpc::remote_read_enable, 1);
  set(context, qpc::remote_write_enable, 1);
  set(context, qpc::remote_atomic_enable, 1);
  set(context, qpc::atomic_mode, kAtomicMode8);
}

}  // namespace

Umem::Umem(std::shared_ptr<Device> device, void* address, std::size_t bytes)
    : device_(std::move(device)),
      umem_(device_->table().devx_umem_reg(device_->context(), address, bytes,
                                           verbs::IBV_ACCESS_LOCAL_WRITE)) {
  if (!umem_) {
    throw Error(Code::out_of_memory,
                cat(device_->name(), ": ", bytes,
                    " bytes of queues cannot be registered: ", device_->failure()),
                "raise `ulimit -l`, or use a smaller MARROW_GDA_DEPTH");
  }
}

Umem::~Umem() {
  if (device_->table().devx_umem_dereg(umem_) != 0)
    MARROW_WARN(gda, device_->name(), ": freeing a umem: ", device_->failure());
}

QueuePair::QueuePair(std::shared_ptr<Device> device, const Umem& umem, const QueuePlace& place,
                     std::uint16_t first, bool wakes)
    : device_(std::move(device)) {
  try {
    const verbs::Table& table = device_->table();
    // A register of its own: two queues that share a memory cell would lose doorbells (a real register
    // is a stream of posted writes and would not).
    for (const std::uint32_t kind :
         {verbs::kUarNonCachedDedicated, verbs::kUarNonCached, verbs::kUarBlueFlame}) {
      uar_ = table.devx_alloc_uar(device_->context(), kind);
      if (uar_) break;
    }
    if (!uar_) {
      throw Error(Code::out_of_memory,
                  cat(device_->name(), " has no doorbell register left: ", device_->failure()),
                  "use fewer contexts or ranks");
    }
    doorbell_ = device_->map_doorbell(*uar_);
    create_cq(umem, place);
    create_qp(umem, place, first, wakes);
  } catch (...) {
    destroy();
    throw;
  }
}

QueuePair::~QueuePair() { destroy(); }

void QueuePair::create_cq(const Umem& umem, const QueuePlace& place) {
  std::uint8_t in[create_cq_command::kInBytes] = {};
  std::uint8_t out[create_cq_command::kOutBytes] = {};
  set(in, command::opcode, mlx5::kCreateCq);
  std::uint8_t* c = in + create_cq_command::kContext;
  set(c, cqc::record_umem_valid, 1);
  set(c, cqc::record_umem_id, umem.id());
  set(c, cqc::record_address, place.cq_record);
  set(c, cqc::collapsed, device_->options().collapsed ? 1 : 0);
  set(c, cqc::overrun_ignore, 1);
  set(c, cqc::log_cq_size, log2_of(device_->options().depth));
  set(c, cqc::uar_page, uar_->page_id);
  set(c, cqc::eqn, device_->eqn());
  set(in, create_cq_command::cq_umem_offset, place.cq);
  set(in, create_cq_command::cq_umem_id, umem.id());
  set(in, create_cq_command::cq_umem_valid, 1);
  cq_ = device_->table().devx_obj_create(device_->context(), in, sizeof in, out, sizeof out);
  if (!cq_) refused(*device_, "CREATE_CQ", out, device_->failure());
  cqn_ = static_cast<std::uint32_t>(get(out, reply::object));
}

void QueuePair::create_qp(const Umem& umem, const QueuePlace& place, std::uint16_t first,
                          bool wakes) {
  std::uint8_t in[create_qp_command::kInBytes] = {};
  std::uint8_t out[create_qp_command::kOutBytes] = {};
  set(in, command::opcode, mlx5::kCreateQp);
  std::uint8_t* c = in + create_qp_command::kContext;
  set(c, qpc::service_type, mlx5::kServiceRc);
  set(c, qpc::path_migration, mlx5::kPathMigrated);
  set(c, qpc::pd, device_->pdn());
  set(c, qpc::uar_page, uar_->page_id);
  set(c, qpc::log_sq_size, log2_of(device_->options().depth));
  set(c, qpc::rq_type, mlx5::kRqNone);
  set(c, qpc::cqn_send, cqn_);
  set(c, qpc::cqn_receive, cqn_);
  set(c, qpc::cross_channel_master, wakes ? 1 : 0);
  set(c, qpc::record_umem_valid, 1);
  set(c, qpc::record_umem_id, umem.id());
  set(c, qpc::record_address, place.record);
  // Reserved for a real NIC; softnic starts there, so that tests reach the wrap of indices.
  if (device_->emulated()) set(c, qpc::hw_sq_index, first);
  set(in, create_qp_command::wq_umem_offset, place.sq);
  set(in, create_qp_command::wq_umem_id, umem.id());
  set(in, create_qp_command::wq_umem_valid, 1);
  qp_ = device_->table().devx_obj_create(device_->context(), in, sizeof in, out, sizeof out);
  if (!qp_) refused(*device_, "CREATE_QP", out, device_->failure());
  qpn_ = static_cast<std::uint32_t>(get(out, reply::object));

  std::uint8_t query[query_qp::kInBytes] = {};
  std::uint8_t found[query_qp::kOutBytes] = {};
  set(query, command::opcode, mlx5::kQueryQp);
  set(query, command::object, qpn_);
  if (device_->table().devx_obj_query(qp_, query, sizeof query, found, sizeof found) != 0) {
    refused(*device_, "QUERY_QP", found, device_->failure());
  }
  first_ = static_cast<std::uint16_t>(get(found + query_qp::kContext, qpc::hw_sq_index));
}

namespace {

/// How packets find the peer's port. RoCE: by its Ethernet address, and by its GID behind routers.
void set_path(const Device& device, std::uint32_t qpn, std::uint8_t* c,
              const verbs::PortAddress& remote) {
  const auto set_path = [c](mlx5::Field field, std::uint64_t value) {
    set(c, at(qpc::kPrimaryPath, field), value);
  };
  const verbs::Port& port = device.port();
  const QueueOptions& options = device.options();
  const verbs::ibv_ah_attr path =
      verbs::path_to(port, remote, options.service_level, options.traffic_class);
  set_path(ads::port, port.number);
  if (path.is_global != 0) {
    set_path(ads::src_addr_index, path.grh.sgid_index);
    set_path(ads::hop_limit, path.grh.hop_limit);
    set_path(ads::tclass, path.grh.traffic_class);
    set_path(ads::rgid_high, mlx5::from_big64(path.grh.dgid.global.subnet_prefix));
    set_path(ads::rgid_low, mlx5::from_big64(path.grh.dgid.global.interface_id));
  }
  if (!port.ethernet) {
    set_path(ads::grh, path.is_global);
    set_path(ads::rlid, remote.lid);
    set_path(ads::service_level, path.sl);
    return;
  }
  const std::uint64_t mac = device.mac_of(remote);
  set_path(ads::rmac_high, mac >> 32);
  set_path(ads::rmac_low, mac & 0xffffffff);
  set_path(ads::eth_priority, path.sl & 7);
  if (port.gid.kind == verbs::GidKind::roce_v1) return;
  set_path(ads::dscp, path.grh.traffic_class >> 2);
  // Routers spread flows by it; 0xC000 and up are RoCE v2's source ports.
  set_path(ads::udp_sport, 0xc000 | (qpn * 0x9e37u >> 2 & 0x3fff));
}

}  // namespace

void QueuePair::connect(std::uint32_t remote_qpn, const verbs::PortAddress& remote) {
  const auto step = [&](mlx5::Command opcode, const char* name, auto&& fill) {
    std::uint8_t in[modify_qp::kInBytes] = {};
    std::uint8_t out[modify_qp::kOutBytes] = {};
    set(in, command::opcode, opcode);
    set(in, command::object, qpn_);
    fill(in, in + modify_qp::kContext);
    if (device_->table().devx_obj_modify(qp_, in, sizeof in, out, sizeof out) != 0) {
      refused(*device_, name, out, device_->failure());
    }
  };
  constexpr std::uint32_t path = qpc::kPrimaryPath;
  step(mlx5::kRstToInit, "RST2INIT", [&](std::uint8_t*, std::uint8_t* c) {
    set(c, qpc::path_migration, mlx5::kPathMigrated);
    set(c, at(path, ads::port), device_->port().number);
    set_rights(c);
  });
  step(mlx5::kInitToRtr, "INIT2RTR", [&](std::uint8_t* in, std::uint8_t* c) {
    set(in, command::optional_mask, kRestateRights);
    set(c, qpc::mtu, static_cast<std::uint64_t>(std::min(device_->port().mtu, int{remote.mtu})));
    set(c, qpc::log_message_max, kLogMaxMessage);
    set(c, qpc::remote_qpn, remote_qpn);
    set(c, qpc::log_responder_reads, kLogOutstandingReads);
    set(c, qpc::min_rnr_nak, kMinReceiverTimer);
    set_path(*device_, qpn_, c, remote);
    set_rights(c);
  });
  step(mlx5::kRtrToRts, "RTR2RTS", [&](std::uint8_t*, std::uint8_t* c) {
    set(c, qpc::log_outstanding_reads, kLogOutstandingReads);
    set(c, qpc::retry_count, kRetries);
    set(c, qpc::rnr_retry, kReceiverRetries);
    set(c, at(path, ads::ack_timeout), kAckTimeout);
    set(c, at(path, ads::port), device_->port().number);
    set_rights(c);
  });
}

void QueuePair::stop() noexcept {
  std::uint8_t in[modify_qp::kInBytes] = {};
  std::uint8_t out[modify_qp::kOutBytes] = {};
  set(in, command::opcode, mlx5::kToErr);
  set(in, command::object, qpn_);
  if (device_->table().devx_obj_modify(qp_, in, sizeof in, out, sizeof out) != 0) {
    MARROW_WARN(gda, device_->name(), ": stopping queue pair ", qpn_, ": ", device_->failure());
  }
}

void QueuePair::destroy() noexcept {
  const verbs::Table& table = device_->table();
  if (qp_ && table.devx_obj_destroy(qp_) != 0)
    MARROW_WARN(gda, "destroying queue pair ", qpn_, ": ", device_->failure());
  if (cq_ && table.devx_obj_destroy(cq_) != 0)
    MARROW_WARN(gda, "destroying completion queue ", cqn_, ": ", device_->failure());
  if (doorbell_) device_->unmap_doorbell(*uar_);
  if (uar_) table.devx_free_uar(uar_);
  qp_ = cq_ = nullptr;
  doorbell_ = nullptr;
  uar_ = nullptr;
}

}  // namespace marrow::gda
