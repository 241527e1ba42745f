// SPDX-License-Identifier: Apache-2.0
#include "networks/verbs/words.hpp"

#include "base/text.hpp"
#include "marrow/network.h"

namespace marrow::networks::rdma {
namespace {

using base::cat;
using namespace marrow::verbs;  // NOLINT: enumerators of verbs, thirty names

struct Words {
  int number;
  const char* constant;
  const char* words;
};

constexpr Words kStatuses[] = {
    {IBV_WC_SUCCESS, "IBV_WC_SUCCESS", "success"},
    {IBV_WC_LOC_LEN_ERR, "IBV_WC_LOC_LEN_ERR", "a message longer than the receive posted for it"},
    {IBV_WC_LOC_QP_OP_ERR, "IBV_WC_LOC_QP_OP_ERR", "a malformed work request"},
    {IBV_WC_LOC_EEC_OP_ERR, "IBV_WC_LOC_EEC_OP_ERR", "a malformed request of an EE context"},
    {IBV_WC_LOC_PROT_ERR, "IBV_WC_LOC_PROT_ERR", "our own buffer is not registered for this"},
    {IBV_WC_WR_FLUSH_ERR, "IBV_WC_WR_FLUSH_ERR", "the queue pair had stopped before"},
    {IBV_WC_MW_BIND_ERR, "IBV_WC_MW_BIND_ERR", "a memory window could not be bound"},
    {IBV_WC_BAD_RESP_ERR, "IBV_WC_BAD_RESP_ERR", "the peer's NIC gave an answer out of place"},
    {IBV_WC_LOC_ACCESS_ERR, "IBV_WC_LOC_ACCESS_ERR", "a peer's data did not fit our memory"},
    {IBV_WC_REM_INV_REQ_ERR, "IBV_WC_REM_INV_REQ_ERR",
     "the peer's NIC cannot execute such a request"},
    {IBV_WC_REM_ACCESS_ERR, "IBV_WC_REM_ACCESS_ERR",
     "the peer's memory is not registered for this"},
    {IBV_WC_REM_OP_ERR, "IBV_WC_REM_OP_ERR", "the peer's NIC could not finish it"},
    {IBV_WC_RETRY_EXC_ERR, "IBV_WC_RETRY_EXC_ERR", "no answer in spite of all retries"},
    {IBV_WC_RNR_RETRY_EXC_ERR, "IBV_WC_RNR_RETRY_EXC_ERR",
     "the peer had no receive posted in spite of all retries"},
    {14, "IBV_WC_LOC_RDD_VIOL_ERR", "a reliable datagram domain was violated"},
    {15, "IBV_WC_REM_INV_RD_REQ_ERR", "a reliable datagram was refused"},
    {IBV_WC_REM_ABORT_ERR, "IBV_WC_REM_ABORT_ERR", "the peer's NIC aborted it"},
    {17, "IBV_WC_INV_EECN_ERR", "a wrong EE context"},
    {18, "IBV_WC_INV_EEC_STATE_ERR", "an EE context in a wrong state"},
    {19, "IBV_WC_FATAL_ERR", "the NIC failed"},
    {20, "IBV_WC_RESP_TIMEOUT_ERR", "the peer's NIC did not answer in time"},
    {IBV_WC_GENERAL_ERR, "IBV_WC_GENERAL_ERR", "an error without a name"},
};

constexpr Words kEvents[] = {
    {IBV_EVENT_CQ_ERR, "IBV_EVENT_CQ_ERR", "a completion queue overran"},
    {IBV_EVENT_QP_FATAL, "IBV_EVENT_QP_FATAL", "a queue pair failed"},
    {IBV_EVENT_QP_REQ_ERR, "IBV_EVENT_QP_REQ_ERR", "the peer sent an invalid request"},
    {IBV_EVENT_QP_ACCESS_ERR, "IBV_EVENT_QP_ACCESS_ERR",
     "the peer accessed memory that it may not access"},
    {IBV_EVENT_COMM_EST, "IBV_EVENT_COMM_EST", "the first packet came early"},
    {IBV_EVENT_SQ_DRAINED, "IBV_EVENT_SQ_DRAINED", "a send queue is drained"},
    {IBV_EVENT_PATH_MIG, "IBV_EVENT_PATH_MIG", "a path migrated"},
    {IBV_EVENT_PATH_MIG_ERR, "IBV_EVENT_PATH_MIG_ERR", "a path could not migrate"},
    {IBV_EVENT_DEVICE_FATAL, "IBV_EVENT_DEVICE_FATAL", "the NIC failed"},
    {IBV_EVENT_PORT_ACTIVE, "IBV_EVENT_PORT_ACTIVE", "port active"},
    {IBV_EVENT_PORT_ERR, "IBV_EVENT_PORT_ERR", "port down"},
    {IBV_EVENT_LID_CHANGE, "IBV_EVENT_LID_CHANGE", "the port's LID changed"},
    {IBV_EVENT_PKEY_CHANGE, "IBV_EVENT_PKEY_CHANGE", "the port's P_Key table changed"},
    {IBV_EVENT_SM_CHANGE, "IBV_EVENT_SM_CHANGE", "another subnet manager"},
    {IBV_EVENT_SRQ_ERR, "IBV_EVENT_SRQ_ERR", "a shared receive queue failed"},
    {IBV_EVENT_SRQ_LIMIT_REACHED, "IBV_EVENT_SRQ_LIMIT_REACHED", "few shared receives are left"},
    {IBV_EVENT_QP_LAST_WQE_REACHED, "IBV_EVENT_QP_LAST_WQE_REACHED", "a queue pair is drained"},
    {IBV_EVENT_CLIENT_REREGISTER, "IBV_EVENT_CLIENT_REREGISTER", "the subnet asks to join anew"},
    {IBV_EVENT_GID_CHANGE, "IBV_EVENT_GID_CHANGE", "the port's GID table changed"},
};

template <std::size_t N>
std::string find(const Words (&table)[N], int number, const char* what) {
  for (const Words& each : table) {
    if (each.number == number) return cat(each.words, " (", each.constant, ")");
  }
  return cat(what, " ", number);
}

}  // namespace

std::string status_text(int status) { return find(kStatuses, status, "completion status"); }
std::string event_text(int type) { return find(kEvents, type, "asynchronous event"); }

bool means_peer_gone(int status) {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
    case IBV_WC_REM_ABORT_ERR:
    case IBV_WC_WR_FLUSH_ERR:
    case 20: return true;
    default: return false;
  }
}

std::string status_advice(int status, const Options& options) {
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
    case 20:
      return cat(
          "look at that rank's log and at the link (ip link, rdma link); a link that is down "
          "for more than ",
          options.patience_seconds(), " s needs a larger MARROW_VERBS_TIMEOUT (now ",
          int{options.timeout}, ")");
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return cat("that rank does not progress; MARROW_VERBS_RNR_RETRIES=7 waits for ever (now ",
                 int{options.rnr_retries}, ")");
    case IBV_WC_LOC_LEN_ERR: return "run the same version of Marrow on every rank";
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return "keep buffers registered and mapped until their operations are complete";
    case IBV_WC_REM_ACCESS_ERR:
      return "windows are closed by all ranks together; check offsets and sizes with a "
             "MARROW_CHECKED kernel";
    case IBV_WC_REM_INV_REQ_ERR:
      return "atomics need addresses that are multiples of 8 and a NIC that has them "
             "(ibv_devinfo -v, atomic_cap)";
    case IBV_WC_WR_FLUSH_ERR: return "look for the first error of that rank";
    case IBV_WC_REM_OP_ERR:  // soft-RoCE's answer for a queue pair that ends with its process
    case IBV_WC_REM_ABORT_ERR:
      return "look at that rank's log, since its process may have ended, and else at the kernel's "
             "log of its host (dmesg)";
    default: return "look at the kernel's log of both hosts (dmesg) and at the NIC's firmware";
  }
}

const char* operation_text(std::uint32_t kind) {
  switch (kind) {
    case MARROW_NETWORK_PUT: return "a put";
    case MARROW_NETWORK_PUT_VALUE: return "a put of a value";
    case MARROW_NETWORK_GET: return "a get";
    case MARROW_NETWORK_ADD: return "an add";
    case MARROW_NETWORK_FETCH_ADD: return "a fetch_add";
    case MARROW_NETWORK_COMPARE_SWAP: return "a compare_swap";
    case MARROW_NETWORK_MESSAGE: return "a message";
    case MARROW_NETWORK_FLUSH: return "a flush";
    default: return "the return of receives";
  }
}

}  // namespace marrow::networks::rdma
