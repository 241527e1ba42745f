// SPDX-License-Identifier: Apache-2.0
// libibverbs.so.1 in front of softnic: a program that opens or links the library of that name finds
// one device. Names, signatures and versions (ibverbs.map) are those of the public interface
// (rdma-core, libibverbs/verbs.h); what softnic does not have answers as a device without it does.
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "base/log.hpp"
#include "marrow/abi/mlx5_wqe.h"
#include "softnic_libs/library.hpp"

namespace {

using namespace marrow::verbs;  // NOLINT: this file is that interface

const Table& nic() { return *marrow_softnic_verbs_table(); }

int unsupported() {
  errno = EOPNOTSUPP;
  return EOPNOTSUPP;
}
std::nullptr_t no_object() {
  errno = EOPNOTSUPP;
  return nullptr;
}

struct GidEntry {
  ibv_gid gid;
  std::uint32_t index;
  std::uint32_t port;
  std::uint32_t type;  ///< 0 InfiniBand
  std::uint32_t interface;
};
static_assert(sizeof(GidEntry) == 32);

int fill_gid(ibv_context* context, std::uint32_t port, std::uint32_t index, GidEntry& entry) {
  entry = {};
  entry.index = index;
  entry.port = port;
  return nic().query_gid(context, static_cast<std::uint8_t>(port), static_cast<int>(index),
                         &entry.gid) == 0
             ? 0
             : errno;
}

/// ibv_rate, for ports that ask. A rate is lanes times their signalling rate, which since FDR is above the round
/// number of the name; `multiple` is in 2.5 Gb/s, -1 where the interface has none.
struct Rate {
  int rate;
  int mbps;
  int multiple;
};
constexpr Rate kRates[] = {
    {2, 2500, 1},      {3, 10000, 4},     {4, 30000, 12},    {5, 5000, 2},     {6, 20000, 8},
    {7, 40000, 16},    {8, 60000, 24},    {9, 80000, 32},    {10, 120000, 48}, {11, 14062, -1},
    {12, 56250, -1},   {13, 112500, -1},  {14, 168750, -1},  {15, 25781, -1},  {16, 103125, -1},
    {17, 206250, -1},  {18, 309375, -1},  {19, 28125, 11},   {20, 53125, 20},  {21, 425000, 160},
    {22, 637500, 240}, {23, 850000, 320}, {24, 1275000, 480}};

}  // namespace

// What libmlx5.so.1 uses: one provider for both.
MARROW_EXPORT const Table* marrow_softnic_verbs_table() {
  static const Table& table = provider("softnic");
  return &table;
}

// --- devices ------------------------------------------------------------------------------------

MARROW_EXPORT ibv_device** ibv_get_device_list(int* count) { return nic().get_device_list(count); }
MARROW_EXPORT void ibv_free_device_list(ibv_device** list) { nic().free_device_list(list); }
MARROW_EXPORT const char* ibv_get_device_name(ibv_device* device) {
  return nic().get_device_name(device);
}
MARROW_EXPORT int ibv_get_device_index(ibv_device*) { return 0; }
/// Of the device; a context's own (query_device) also names its process.
MARROW_EXPORT std::uint64_t ibv_get_device_guid(ibv_device*) {
  return marrow::mlx5::to_big64(0x024d415252000000ull);
}
/// A program says only that it could not open the device: the reason is for whoever started it.
MARROW_EXPORT ibv_context* ibv_open_device(ibv_device* device) {
  ibv_context* context = nic().open_device(device);
  if (context == nullptr) MARROW_WARN(softnic, nic().last_error());
  return context;
}
MARROW_EXPORT int ibv_close_device(ibv_context* context) { return nic().close_device(context); }
MARROW_EXPORT int ibv_fork_init() { return 0; }
MARROW_EXPORT int ibv_is_fork_initialized() { return 0; }
MARROW_EXPORT int ibv_dontfork_range(void*, std::size_t) { return 0; }
MARROW_EXPORT int ibv_dofork_range(void*, std::size_t) { return 0; }

MARROW_EXPORT int ibv_query_device(ibv_context* context, ibv_device_attr* attr) {
  return nic().query_device(context, attr);
}
/// Fills the first 48 bytes only: older callers have no more, newer ones zero the rest first.
MARROW_EXPORT int ibv_query_port(ibv_context* context, std::uint8_t port, void* attr) {
  ibv_port_attr full{};
  const int error = nic().query_port(context, port, &full);
  if (error == 0) std::memcpy(attr, &full, kCompatPortAttrBytes);
  return error;
}
/// In units of 100 Mb/s.
MARROW_EXPORT int ibv_query_port_speed(ibv_context*, std::uint32_t port, std::uint64_t* speed) {
  if (port != 1) return EINVAL;
  *speed = 4000;
  return 0;
}
MARROW_EXPORT int ibv_query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) {
  return nic().query_gid(context, port, index, gid);
}
MARROW_EXPORT int ibv_query_gid_type(ibv_context*, std::uint8_t port, unsigned index, int* type) {
  if (port != 1 || index != 0) {
    errno = EINVAL;
    return -1;
  }
  *type = 0;
  return 0;
}
MARROW_EXPORT int _ibv_query_gid_ex(ibv_context* context, std::uint32_t port, std::uint32_t index,
                                    void* entry, std::uint32_t flags, std::size_t entry_bytes) {
  GidEntry filled;
  if (flags != 0 || entry_bytes < sizeof filled) return EINVAL;
  const int error = fill_gid(context, port, index, filled);
  if (error == 0) std::memcpy(entry, &filled, sizeof filled);
  return error;
}
MARROW_EXPORT ssize_t _ibv_query_gid_table(ibv_context* context, void* entries, std::size_t most,
                                           std::uint32_t flags, std::size_t entry_bytes) {
  if (flags != 0 || entry_bytes < sizeof(GidEntry) || most < 1) return -EINVAL;
  GidEntry filled;
  const int error = fill_gid(context, 1, 0, filled);
  if (error != 0) return -error;
  std::memcpy(entries, &filled, sizeof filled);
  return 1;
}
MARROW_EXPORT int ibv_query_pkey(ibv_context*, std::uint8_t port, int index, std::uint16_t* key) {
  if (port != 1 || index != 0) {
    errno = EINVAL;
    return -1;
  }
  *key = 0xffff;
  return 0;
}
MARROW_EXPORT int ibv_get_pkey_index(ibv_context*, std::uint8_t port, std::uint16_t key) {
  return port == 1 && key == 0xffff ? 0 : -1;
}

// --- memory -------------------------------------------------------------------------------------

MARROW_EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) { return nic().alloc_pd(context); }
MARROW_EXPORT int ibv_dealloc_pd(ibv_pd* pd) { return nic().dealloc_pd(pd); }
MARROW_EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* addr, std::size_t length, int access) {
  return nic().reg_mr(pd, addr, length, access);
}
MARROW_EXPORT ibv_mr* ibv_reg_mr_iova(ibv_pd* pd, void* addr, std::size_t length,
                                      std::uint64_t iova, int access) {
  return nic().reg_mr_iova2(pd, addr, length, iova, static_cast<unsigned>(access));
}
MARROW_EXPORT ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* addr, std::size_t length,
                                       std::uint64_t iova, unsigned access) {
  return nic().reg_mr_iova2(pd, addr, length, iova, access);
}
MARROW_EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length,
                                        std::uint64_t iova, int fd, int access) {
  return nic().reg_dmabuf_mr(pd, offset, length, iova, fd, access);
}
MARROW_EXPORT int ibv_rereg_mr(ibv_mr*, int, ibv_pd*, void*, std::size_t, int) {
  errno = EOPNOTSUPP;
  return -1;  // IBV_REREG_MR_ERR_INPUT: the region is as it was
}
MARROW_EXPORT int ibv_dereg_mr(ibv_mr* mr) { return nic().dereg_mr(mr); }

// --- queues -------------------------------------------------------------------------------------

MARROW_EXPORT ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  return nic().create_comp_channel(context);
}
MARROW_EXPORT int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  return nic().destroy_comp_channel(channel);
}
MARROW_EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* cq_context,
                                    ibv_comp_channel* channel, int vector) {
  return nic().create_cq(context, entries, cq_context, channel, vector);
}
MARROW_EXPORT int ibv_resize_cq(ibv_cq*, int) { return unsupported(); }
MARROW_EXPORT int ibv_destroy_cq(ibv_cq* cq) { return nic().destroy_cq(cq); }
MARROW_EXPORT int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) {
  return nic().get_cq_event(channel, cq, cq_context);
}
MARROW_EXPORT void ibv_ack_cq_events(ibv_cq* cq, unsigned count) { nic().ack_cq_events(cq, count); }
MARROW_EXPORT ibv_srq* ibv_create_srq(ibv_pd* pd, ibv_srq_init_attr* attr) {
  return nic().create_srq(pd, attr);
}
MARROW_EXPORT int ibv_modify_srq(ibv_srq* srq, ibv_srq_attr* attr, int mask) {
  return nic().modify_srq(srq, attr, mask);
}
MARROW_EXPORT int ibv_query_srq(ibv_srq* srq, ibv_srq_attr* attr) {
  return nic().query_srq(srq, attr);
}
MARROW_EXPORT int ibv_destroy_srq(ibv_srq* srq) { return nic().destroy_srq(srq); }
MARROW_EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) {
  return nic().create_qp(pd, attr);
}
MARROW_EXPORT int ibv_modify_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask) {
  return nic().modify_qp(qp, attr, mask);
}
MARROW_EXPORT int ibv_query_qp(ibv_qp* qp, ibv_qp_attr* attr, int mask, ibv_qp_init_attr* init) {
  return nic().query_qp(qp, attr, mask, init);
}
MARROW_EXPORT int ibv_destroy_qp(ibv_qp* qp) { return nic().destroy_qp(qp); }
MARROW_EXPORT int ibv_query_ece(ibv_qp*, void*) { return unsupported(); }
MARROW_EXPORT int ibv_set_ece(ibv_qp*, void*) { return unsupported(); }
MARROW_EXPORT int ibv_query_qp_data_in_order(ibv_qp*, int, std::uint32_t) { return 0; }
/// No queue pair has the newer posting functions.
MARROW_EXPORT void* ibv_qp_to_qp_ex(ibv_qp*) { return nullptr; }
MARROW_EXPORT ibv_ah* ibv_create_ah(ibv_pd* pd, ibv_ah_attr* attr) {
  return nic().create_ah(pd, attr);
}
MARROW_EXPORT int ibv_init_ah_from_wc(ibv_context*, std::uint8_t, ibv_wc*, void*, ibv_ah_attr*) {
  errno = EOPNOTSUPP;
  return -1;
}
MARROW_EXPORT ibv_ah* ibv_create_ah_from_wc(ibv_pd*, ibv_wc*, void*, std::uint8_t) {
  return no_object();
}
MARROW_EXPORT int ibv_destroy_ah(ibv_ah* ah) { return nic().destroy_ah(ah); }
MARROW_EXPORT int ibv_attach_mcast(ibv_qp*, const ibv_gid*, std::uint16_t) { return unsupported(); }
MARROW_EXPORT int ibv_detach_mcast(ibv_qp*, const ibv_gid*, std::uint16_t) { return unsupported(); }

MARROW_EXPORT int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  return nic().get_async_event(context, event);
}
MARROW_EXPORT void ibv_ack_async_event(ibv_async_event* event) { nic().ack_async_event(event); }

// --- for librdmacm ------------------------------------------------------------------------------

// The connection manager binds these when it is loaded and calls them with what its kernel device said;
// there is none here.
MARROW_EXPORT void ibv_copy_ah_attr_from_kern(void*, void*) {}
MARROW_EXPORT void ibv_copy_qp_attr_from_kern(void*, void*) {}
MARROW_EXPORT void ibv_copy_path_rec_from_kern(void*, void*) {}
MARROW_EXPORT void ibv_copy_path_rec_to_kern(void*, void*) {}

// --- words and numbers --------------------------------------------------------------------------

MARROW_EXPORT const char* ibv_wc_status_str(int status) {
  static const char* const texts[] = {"done",
                                      "the message is longer than the local buffers",
                                      "the queue pair cannot do this request",
                                      "the local EE context cannot do this request",
                                      "a local buffer is not covered by its key",
                                      "flushed: the queue pair is in the error state",
                                      "a memory window could not be bound",
                                      "the answer made no sense",
                                      "the local buffer of a receive may not be written",
                                      "the peer refused the request as invalid",
                                      "the peer's memory may not be accessed so",
                                      "the peer could not finish the request",
                                      "the peer does not answer, retries are used up",
                                      "the peer had no receive posted, retries are used up",
                                      "the local RDD does not match",
                                      "the peer refused the RD request as invalid",
                                      "the peer aborted the request",
                                      "no such EE context",
                                      "the EE context is in the wrong state",
                                      "the NIC failed",
                                      "no answer in time",
                                      "another error"};
  return status < 0 || status >= static_cast<int>(std::size(texts)) ? "no such status"
                                                                    : texts[status];
}
MARROW_EXPORT const char* ibv_node_type_str(int type) {
  return type == 1 ? "channel adapter (InfiniBand)" : "unknown";
}
MARROW_EXPORT const char* ibv_port_state_str(int state) {
  static const char* const texts[] = {"no change",  "port down",   "initialising",
                                      "port armed", "port active", "active, deferred"};
  return state < 0 || state >= static_cast<int>(std::size(texts)) ? "unknown" : texts[state];
}
MARROW_EXPORT const char* ibv_event_type_str(int event) {
  static const char* const texts[] = {"a completion queue overran or failed",
                                      "a queue pair failed",
                                      "a queue pair had an invalid request from its peer",
                                      "a queue pair's peer accessed what it may not",
                                      "a queue pair received before it was ready to send",
                                      "a send queue has drained",
                                      "a path has migrated",
                                      "a path could not migrate",
                                      "the NIC failed",
                                      "a port has come up",
                                      "a port has gone down",
                                      "a port's LID is new",
                                      "a port's partition keys are new",
                                      "the subnet manager is new",
                                      "a shared receive queue failed",
                                      "a shared receive queue is below its limit",
                                      "a queue pair took its last shared receive",
                                      "the subnet manager wants clients to register again",
                                      "a port's GIDs are new",
                                      "a work queue failed"};
  return event < 0 || event >= static_cast<int>(std::size(texts)) ? "no such event" : texts[event];
}
MARROW_EXPORT int ibv_rate_to_mult(int rate) {
  for (const Rate& each : kRates) {
    if (each.rate == rate) return each.multiple;
  }
  return -1;
}
MARROW_EXPORT int mult_to_ibv_rate(int multiple) {
  for (const Rate& each : kRates) {
    if (multiple > 0 && each.multiple == multiple) return each.rate;
  }
  return 0;
}
MARROW_EXPORT int ibv_rate_to_mbps(int rate) {
  for (const Rate& each : kRates) {
    if (each.rate == rate) return each.mbps;
  }
  return -1;
}
MARROW_EXPORT int mbps_to_ibv_rate(int mbps) {
  for (const Rate& each : kRates) {
    if (each.mbps == mbps) return each.rate;
  }
  return 0;
}

MARROW_EXPORT const char* ibv_get_sysfs_path() { return "/sys"; }
/// The device has no folder there; other paths are read as they are.
MARROW_EXPORT int ibv_read_sysfs_file(const char* folder, const char* file, char* buffer,
                                      std::size_t bytes) {
  char path[512];
  std::snprintf(path, sizeof path, "%s/%s", folder, file);
  std::FILE* stream = bytes == 0 ? nullptr : std::fopen(path, "re");
  if (stream == nullptr) return -1;
  std::size_t got = std::fread(buffer, 1, bytes - 1, stream);
  std::fclose(stream);
  if (got > 0 && buffer[got - 1] == '\n') --got;
  buffer[got] = 0;
  return static_cast<int>(got);
}
