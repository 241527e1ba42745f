// SPDX-License-Identifier: Apache-2.0
// softnic's functions with the signatures of libibverbs and libmlx5, and their registration as the
// provider "softnic". They report errors as the real ones do (null or a code, with errno); the reason
// in words is kept for last_error.
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "base/log.hpp"
#include "base/mapping.hpp"
#include "base/parameters.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"
#include "softnic/far_memory.hpp"
#include "softnic/front.hpp"
#include "softnic/front_verbs.hpp"
#include "softnic/objects.hpp"
#include "verbs/table.hpp"

namespace marrow::softnic {
namespace {

using verbs::IBV_ACCESS_LOCAL_WRITE;
using verbs::IBV_ACCESS_REMOTE_ATOMIC;
using verbs::IBV_ACCESS_REMOTE_WRITE;
using verbs::ibv_context;
using verbs::ibv_device;
using verbs::ibv_device_attr;
using verbs::ibv_gid;
using verbs::ibv_mr;
using verbs::ibv_pd;
using verbs::ibv_port_attr;
using verbs::kLinkLayerInfiniBand;
using verbs::kMtu4096;
using verbs::kPortActive;
using verbs::mlx5dv_devx_obj;
using verbs::register_provider;
using verbs::Table;
using Lock = Engine::ControlLock;

thread_local std::string last_error_text;

}  // namespace

int failed(int error, std::string sentence) {
  MARROW_INFO(softnic, sentence);
  last_error_text = std::move(sentence);
  errno = error;
  return error;
}

const char* last_error() { return last_error_text.c_str(); }

int code_to_errno(Code code) {
  switch (code) {
    case Code::invalid_argument: return EINVAL;
    case Code::out_of_memory: return ENOMEM;
    case Code::authentication: return EACCES;
    case Code::timeout: return ETIMEDOUT;
    case Code::version: return EPROTO;
    default: return EIO;
  }
}

bool can_pin(const Context& context, const void* address, std::size_t bytes, unsigned access) {
  if (context.gpu >= 0) return true;  // may be a GPU's, whose driver is asked elsewhere
  const FarMemory* far = FarMemory::active();
  if (far != nullptr && far->is_far(address)) return true;
  const bool written = (access & IBV_ACCESS_LOCAL_WRITE) != 0;
  if (base::is_mapped(
          address, bytes,
          written ? base::Mapping::Access::read_write : base::Mapping::Access::read_only)) {
    return true;
  }
  failed(EFAULT, base::cat("not all of the ", bytes, " bytes from ", address,
                           " is memory that this process can ", written ? "write" : "read"));
  return false;
}

namespace {

// --- device -------------------------------------------------------------------------------------

ibv_device& the_device() {
  static ibv_device device = [] {
    ibv_device d{};
    d.node_type = 1;
    std::strncpy(d.name, "mlx5_softnic0", sizeof d.name - 1);
    std::strncpy(d.dev_name, "softnic0", sizeof d.dev_name - 1);
    return d;
  }();
  return device;
}

ibv_device** get_device_list(int* count) {
  ibv_device** list = static_cast<ibv_device**>(std::calloc(2, sizeof(void*)));
  if (list == nullptr) {
    errno = ENOMEM;
    return nullptr;
  }
  list[0] = &the_device();
  if (count != nullptr) *count = 1;
  return list;
}
void free_device_list(ibv_device** list) { std::free(list); }
const char* get_device_name(ibv_device* device) { return device->name; }
bool is_supported(ibv_device* device) { return device == &the_device(); }

/// What programs reach through the context only.
void set_context_functions(Context& context) {
  verbs::ibv_context_ops& ops = context.ops;
  ops.poll_cq = poll_cq;
  ops.req_notify_cq = req_notify_cq;
  ops.post_send = post_send;
  ops.post_recv = post_recv;
  ops.post_srq_recv = post_srq_recv;
  ops.alloc_mw = [](ibv_pd*, int) -> void* {
    failed(EOPNOTSUPP, "softnic has no memory windows");
    return nullptr;
  };
  ops.bind_mw = [](verbs::ibv_qp*, void*, void*) -> int { return EOPNOTSUPP; };
  ops.dealloc_mw = [](void*) -> int { return EOPNOTSUPP; };
}

ibv_context* open_device_in_job(ibv_device* device, const char* job, const char* options_text) {
  return guarded<ibv_context*>(nullptr, [&]() -> ibv_context* {
    const Options options = parse_options(
        options_text != nullptr ? options_text : base::parameter_string("MARROW_SOFTNIC"));
    std::string name = options.job.empty() ? "default" : options.job;
    if (job != nullptr) name = job;
    auto context = std::make_unique<Context>();
    static_cast<ibv_context&>(*context) = ibv_context{};
    context->device = device;
    context->cmd_fd = -1;
    context->async_fd = -1;
    context->num_comp_vectors = 1;
    set_context_functions(*context);
    context->job = Job::join(name, options);
    if (!open_events(*context)) return nullptr;
    ::pthread_mutex_init(&context->mutex, nullptr);
    return context.release();
  });
}
ibv_context* open_device(ibv_device* device) {
  return open_device_in_job(device, nullptr, nullptr);
}

/// Whatever the caller did not destroy goes too, queues before what they use.
int close_device(ibv_context* raw) {
  Context* context = static_cast<Context*>(raw);
  // A child that was forked closes its copy only, as with the kernel's: the queues are the parent's.
  if (context->process != ::getpid()) return 0;
  {
    Lock lock(context->job->engine());
    for (const bool queue_pairs : {true, false}) {
      for (auto it = context->objects.begin(); it != context->objects.end();) {
        mlx5dv_devx_obj* object = *it;
        if ((dynamic_cast<QpObject*>(object) != nullptr) != queue_pairs) {
          ++it;
          continue;
        }
        detach_object(*object);
        it = context->objects.erase(it);
        delete object;
      }
    }
    for (Mr* mr : context->mrs) {
      context->job->regions().remove(mr->lkey);
      delete mr;
    }
    for (Pd* pd : context->pds) delete pd;
  }
  close_events(*context);
  ::pthread_mutex_destroy(&context->mutex);
  delete context;  // the last one stops the engine
  return 0;
}

int query_device(ibv_context* context, ibv_device_attr* attr) {
  *attr = ibv_device_attr{};
  std::strncpy(attr->fw_ver, "softnic.1", sizeof attr->fw_ver - 1);
  attr->node_guid = attr->sys_image_guid = mlx5::to_big64(of(context).guid());
  attr->max_mr_size = ~0ull;
  attr->page_size_cap = ~0ull << 12;
  attr->vendor_id = 0x02c9;
  attr->vendor_part_id = 4129;
  attr->max_qp = static_cast<int>(kMaxQueuePairs);
  attr->max_qp_wr = 1 << mlx5::kMaxLogQueue;
  attr->max_sge = 30;
  attr->max_sge_rd = 2;
  attr->max_cq = static_cast<int>(kMaxQueuePairs);
  attr->max_cqe = (1 << kLogMaxCq) - 1;
  attr->max_mr = static_cast<int>(kMaxRegions - kFirstRegion);
  attr->max_pd = 1 << 24;
  attr->max_qp_rd_atom = kMostReadsInFlight;
  attr->max_qp_init_rd_atom = kMostReadsInFlight;
  attr->max_res_rd_atom = kMostReadsInFlight << kQpSlotBits;
  attr->max_srq = static_cast<int>(kMaxQueuePairs);
  attr->max_srq_wr = static_cast<int>(kMostSharedReceives);
  attr->max_srq_sge = static_cast<int>(mlx5::kMostReceiveSges);
  attr->max_ah = 1 << 24;
  attr->atomic_cap = of(context).job->options().hca_atomics ? 1 : 2;
  attr->max_pkeys = 1;
  attr->phys_port_cnt = 1;
  return 0;
}

int query_port(ibv_context* context, std::uint8_t port, ibv_port_attr* attr) {
  if (port != 1) return failed(EINVAL, "softnic has port 1 only");
  *attr = ibv_port_attr{};
  attr->state = kPortActive;
  attr->max_mtu = attr->active_mtu = kMtu4096;
  attr->gid_tbl_len = 1;
  attr->link_layer = kLinkLayerInfiniBand;
  attr->max_msg_sz = 1u << kLogMaxMessage;
  attr->pkey_tbl_len = 1;
  if (of(context).job->options().roce) {
    attr->link_layer = verbs::kLinkLayerEthernet;
    attr->gid_tbl_len = kRoceGids;
  } else {
    attr->lid = of(context).lid();
    attr->sm_lid = 1;
  }
  attr->max_vl_num = 1;
  attr->active_width = 2;    // 4 lanes
  attr->active_speed = 128;  // NDR
  attr->phys_state = 5;      // link up
  return 0;
}

/// RoCE: link-local and IPv4 (198.18.0.0/15, which is for such tests), each as version 1 and 2.
int query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) {
  const bool roce = of(context).job->options().roce;
  if (port != 1 || index < 0 || index >= (roce ? kRoceGids : 1))
    return failed(EINVAL, base::cat("softnic has no GID ", index, " of port ", int{port})), -1;
  gid->global.subnet_prefix = mlx5::to_big64(0xfe80000000000000ull);
  gid->global.interface_id = mlx5::to_big64(of(context).guid());
  if (index >= 2) {
    const std::uint64_t address = 198u << 24 | 18u << 16 | of(context).lid();
    gid->global.subnet_prefix = 0;
    gid->global.interface_id = mlx5::to_big64(0xffffull << 32 | address);
  }
  return 0;
}
int query_gid_ex(ibv_context* context, std::uint32_t port, std::uint32_t index,
                 verbs::ibv_gid_entry* entry, std::uint32_t flags, std::size_t bytes) {
  if (flags != 0 || bytes != sizeof *entry) return failed(EOPNOTSUPP, "query_gid_ex: wrong size");
  *entry = {};
  if (query_gid(context, static_cast<std::uint8_t>(port), static_cast<int>(index), &entry->gid) !=
      0)
    return ENODATA;
  entry->gid_index = index;
  entry->port_num = port;
  entry->gid_type = of(context).job->options().roce ? 1 + index % 2 : 0;
  return 0;
}

// --- protection domains and memory -----------------------------------------------------------------

ibv_pd* alloc_pd(ibv_context* raw) {
  return guarded<ibv_pd*>(nullptr, [&]() -> ibv_pd* {
    Context& context = of(raw);
    Lock lock(context.job->engine());
    auto pd = std::make_unique<Pd>();
    pd->context = raw;
    // Job-wide numbers: a region's and a peer queue's PD are compared across processes.
    pd->pdn = context.job->directory().shared().next_pd.fetch_add(1) & 0xffffff;
    pd->handle = pd->pdn;
    context.pds.insert(pd.get());
    return pd.release();
  });
}

int dealloc_pd(ibv_pd* raw) {
  Context& context = of(raw->context);
  Lock lock(context.job->engine());
  Pd* pd = static_cast<Pd*>(raw);
  bool busy = pd->users != 0;
  for (const mlx5dv_devx_obj* object : context.objects) {
    const auto* qp = dynamic_cast<const QpObject*>(object);
    busy = busy || (qp != nullptr && qp->qp.pd == pd->pdn);
  }
  if (busy) return failed(EBUSY, "the protection domain still has regions or queue pairs");
  context.pds.erase(pd);
  delete pd;
  return 0;
}

/// The rights of verbs.h (bits 0 to 9) and its optional ones, which a NIC may ignore (bits 20 to 29).
constexpr unsigned kKnownAccess = 0x3ff003ff;

ibv_mr* reg_mr_iova2(ibv_pd* raw, void* addr, std::size_t length, std::uint64_t iova,
                     unsigned access) {
  return guarded<ibv_mr*>(nullptr, [&]() -> ibv_mr* {
    constexpr unsigned remote_changes = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    if (addr == nullptr || length == 0) {
      failed(EINVAL, "a region needs an address and a length above 0");
      return nullptr;
    }
    if ((access & remote_changes) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0) {
      failed(EINVAL, "remote write or atomic access needs local write access");
      return nullptr;
    }
    if (iova + length < iova) {
      failed(EINVAL, "the region's address space wraps around");
      return nullptr;
    }
    if ((access & ~kKnownAccess) != 0) {
      failed(EINVAL, base::cat("access flags ", access, " have bits that no verb defines"));
      return nullptr;
    }
    Context& context = of(raw->context);
    if (!can_pin(context, addr, length, access)) return nullptr;
    Lock lock(context.job->engine());
    Pd* pd = static_cast<Pd*>(raw);
    auto mr = std::make_unique<Mr>();
    if (FarMemory* far = FarMemory::active()) far->note(addr, length);
    const std::uint32_t key =
        context.job->regions().add(static_cast<std::byte*>(addr), length, iova, access, pd->pdn);
    if (key == 0) {
      failed(ENOMEM, "the job has no free region left");
      return nullptr;
    }
    mr->context = raw->context;
    mr->pd = raw;
    mr->addr = addr;
    mr->length = length;
    mr->handle = key;
    mr->lkey = mr->rkey = key;
    context.mrs.insert(mr.get());
    ++pd->users;
    return mr.release();
  });
}

ibv_mr* reg_mr(ibv_pd* pd, void* addr, std::size_t length, int access) {
  return reg_mr_iova2(pd, addr, length, reinterpret_cast<std::uint64_t>(addr),
                      static_cast<unsigned>(access));
}

/// There is no device memory here to export; a probe with descriptor -1 gets what a NIC that knows
/// the call answers.
ibv_mr* reg_dmabuf_mr(ibv_pd*, std::uint64_t, std::size_t, std::uint64_t, int fd, int) {
  failed(fd < 0 ? EBADF : EOPNOTSUPP, "softnic does not take dma-buf memory");
  return nullptr;
}

int dereg_mr(ibv_mr* raw) {
  Context& context = of(raw->context);
  Lock lock(context.job->engine());
  Mr* mr = static_cast<Mr*>(raw);
  context.job->regions().remove(mr->lkey);
  if (FarMemory* far = FarMemory::active()) far->forget(mr->addr);
  --static_cast<Pd*>(mr->pd)->users;
  context.mrs.erase(mr);
  delete mr;
  return 0;
}

int expose_memory(ibv_context* context, void* addr, std::size_t bytes, int fd,
                  std::uint64_t offset) {
  return guarded(EIO, [&] {
    Lock lock(of(context).job->engine());
    const int error =
        of(context).job->regions().expose(static_cast<std::byte*>(addr), bytes, fd, offset);
    return error == 0 ? 0 : failed(error, "expose_memory: descriptor, size or alignment is wrong");
  });
}
int withdraw_memory(ibv_context* context, void* addr) {
  Lock lock(of(context).job->engine());
  return of(context).job->regions().withdraw(static_cast<std::byte*>(addr));
}

/// Kernels of this GPU will use the context. @return null, or why its memory cannot be used
const char* accept_gpu(ibv_context* raw, int gpu) {
  Context& context = of(raw);
  Lock lock(context.job->engine());
  context.gpu = gpu;
  std::string why;
  if (!GpuEngine::possible(context.job->options(), &why)) {
    failed(EOPNOTSUPP, why);
    return last_error();
  }
  context.job->regions().expect_gpu_memory();
  return nullptr;
}

int choose_engine(ibv_context* raw, int gpu_memory) {
  return guarded(-1, [&] {
    Context& context = of(raw);
    Lock lock(context.job->engine());
    const Options& options = context.job->options();
    if (context.gpu < 0 || !GpuEngine::possible(options, nullptr)) return 0;
    if (options.engine == EngineChoice::automatic && gpu_memory == 0) return 0;
    context.engine = &context.job->gpu_engine(context.gpu);
    return 1;
  });
}

std::uint64_t failures(ibv_context* raw) {
  const Context& context = of(raw);
  return context.engine != nullptr ? context.engine->failures() : 0;
}

const Table& softnic_table() {
  static const Table table = [] {
    Table t;
    t.name = "softnic";
    t.get_device_list = get_device_list;
    t.free_device_list = free_device_list;
    t.get_device_name = get_device_name;
    t.open_device = open_device;
    t.close_device = close_device;
    t.query_device = query_device;
    t.query_port = query_port;
    t.query_gid = query_gid;
    t.query_gid_ex = query_gid_ex;
    t.alloc_pd = alloc_pd;
    t.dealloc_pd = dealloc_pd;
    t.reg_mr = reg_mr;
    t.dereg_mr = dereg_mr;
    t.reg_mr_iova2 = reg_mr_iova2;
    t.reg_dmabuf_mr = reg_dmabuf_mr;
    t.is_supported = is_supported;
    set_devx_functions(t);
    set_queue_functions(t);
    set_connection_functions(t);
    set_shared_receive_functions(t);
    set_event_functions(t);
    t.open_device_in_job = open_device_in_job;
    t.expose_memory = expose_memory;
    t.withdraw_memory = withdraw_memory;
    t.accept_gpu = accept_gpu;
    t.choose_engine = choose_engine;
    t.failures = failures;
    t.last_error = last_error;
    return t;
  }();
  return table;
}

// Linking this file makes the provider known; verbs never names softnic.
[[maybe_unused]] const bool registered = register_provider(&softnic_table());

}  // namespace
}  // namespace marrow::softnic
