// SPDX-License-Identifier: Apache-2.0
// softnic's mlx5dv functions: umems, doorbell cells, and commands, whose refusals go into the reply.
#include <cerrno>
#include <cstring>
#include <memory>
#include <new>

#include "softnic/front.hpp"
#include "softnic/front_verbs.hpp"
#include "softnic/objects.hpp"

namespace marrow::softnic {
namespace {

using verbs::ibv_context;
using verbs::kUmemMaskDmabuf;
using verbs::mlx5dv_devx_obj;
using verbs::mlx5dv_devx_uar;
using verbs::mlx5dv_devx_umem;
using verbs::mlx5dv_devx_umem_in;
using verbs::mlx5dv_obj;
using Lock = Engine::ControlLock;

void describe(const VerbsQp& qp, verbs::mlx5dv_qp& out) {
  out.dbrec = &qp.record->receive;
  out.sq = {qp.sq, qp.depth, mlx5::kBlockBytes};
  out.rq = {qp.receives.ring, qp.receives.depth, qp.receives.stride};
  out.bf = {qp.queue.uar->reg_addr, 0};
  out.comp_mask = 0;
}
void describe(const VerbsCq& cq, verbs::mlx5dv_cq& out) {
  out = {cq.ring(), cq.record(), cq.entries, sizeof(mlx5::Cqe), cq.queue.uar->base_addr, cq.cqn, 0};
}
void describe(const VerbsSrq& srq, verbs::mlx5dv_srq& out) {
  const bool wants_number = (out.comp_mask & 1) != 0;
  out.buf = srq.receives.ring;
  out.dbrec = srq.receives.record;
  out.stride = srq.receives.stride;
  out.head = 0;
  out.tail = srq.receives.depth - 1;
  out.comp_mask = wants_number ? 1 : 0;
  if (wants_number) out.srqn = srq.srqn;
}

int init_obj(mlx5dv_obj* object, std::uint64_t type) {
  constexpr std::uint64_t known =
      verbs::kObjectQp | verbs::kObjectCq | verbs::kObjectSrq | verbs::kObjectAh | verbs::kObjectPd;
  if ((type & ~known) != 0) return failed(EOPNOTSUPP, "init_obj: QP, CQ, SRQ, AH and PD only");
  if ((type & verbs::kObjectPd) != 0) {
    object->pd.out->pdn = static_cast<const Pd*>(object->pd.in)->pdn;
    object->pd.out->comp_mask = 0;
  }
  if ((type & verbs::kObjectQp) != 0) {
    describe(*static_cast<VerbsQp*>(object->qp.in), *object->qp.out);
  }
  if ((type & verbs::kObjectCq) != 0) {
    describe(*static_cast<VerbsCq*>(object->cq.in), *object->cq.out);
  }
  if ((type & verbs::kObjectSrq) != 0) {
    describe(*static_cast<VerbsSrq*>(object->srq.in), *object->srq.out);
  }
  if ((type & verbs::kObjectAh) != 0) {
    object->ah.out->av = &static_cast<VerbsAh*>(object->ah.in)->vector;
    object->ah.out->comp_mask = 0;
  }
  return 0;
}

mlx5dv_devx_umem* devx_umem_reg(ibv_context* raw, void* addr, std::size_t size,
                                std::uint32_t access) {
  return guarded<mlx5dv_devx_umem*>(nullptr, [&]() -> mlx5dv_devx_umem* {
    if (addr == nullptr || size == 0) {
      failed(EINVAL, "a umem needs an address and a size above 0");
      return nullptr;
    }
    Context& context = of(raw);
    if (!can_pin(context, addr, size, access)) return nullptr;
    Lock lock(context.job->engine());
    auto umem = std::make_unique<Umem>();
    umem->umem_id = context.job->next_number();
    umem->owner = &context;
    umem->address = static_cast<std::byte*>(addr);
    umem->bytes = size;
    if (FarMemory* far = FarMemory::active()) far->note(addr, size);
    Umem* result = umem.get();
    context.umems[umem->umem_id] = std::move(umem);
    return result;
  });
}

mlx5dv_devx_umem* devx_umem_reg_ex(ibv_context* context, mlx5dv_devx_umem_in* in) {
  if ((in->comp_mask & kUmemMaskDmabuf) != 0) {
    failed(EOPNOTSUPP, "softnic does not take dma-buf memory");
    return nullptr;
  }
  return devx_umem_reg(context, in->addr, in->size, in->access);
}

int devx_umem_dereg(mlx5dv_devx_umem* raw) {
  Umem* umem = static_cast<Umem*>(raw);
  Context& context = *umem->owner;
  Lock lock(context.job->engine());
  if (umem->users != 0) return failed(EBUSY, "a queue still lies in the umem");
  if (FarMemory* far = FarMemory::active()) far->forget(umem->address);
  context.umems.erase(umem->umem_id);
  return 0;
}

/// A doorbell cell of the GPU engine, in its GPU's memory.
mlx5dv_devx_uar* gpu_uar(Context& context) {
  auto uar = std::make_unique<Uar>();
  std::uint64_t* const cell = context.engine->take_cell();
  if (cell == nullptr) {
    failed(ENOMEM, "the GPU engine has no free doorbell cell left");
    return nullptr;
  }
  uar->owner = &context;
  uar->engine = context.engine;
  uar->base_addr = uar->reg_addr = cell;
  uar->page_id = context.job->next_number();
  uar->mmap_off = 0;
  uar->comp_mask = 0;
  Uar* result = uar.get();
  context.uars[uar->page_id] = std::move(uar);
  return result;
}

/// A page with room. One that is empty again is used like a new one.
UarPage& page_for(Context& context, bool whole) {
  for (const auto& each : context.pages) {
    if (whole ? each->used == 0 : each->used != ~std::uint64_t{0}) return *each;
  }
  auto made = std::make_unique<UarPage>();
  made->memory = base::Mapping::anonymous(UarPage::kBytes);
  return *context.pages.emplace_back(std::move(made));
}

mlx5dv_devx_uar* devx_alloc_uar(ibv_context* raw, std::uint32_t flags) {
  return guarded<mlx5dv_devx_uar*>(nullptr, [&]() -> mlx5dv_devx_uar* {
    if (flags != verbs::kUarBlueFlame && flags != verbs::kUarNonCached &&
        flags != verbs::kUarNonCachedDedicated) {
      failed(EOPNOTSUPP, "softnic has BlueFlame (0), non-cached (1) and dedicated (1 << 31) UARs");
      return nullptr;
    }
    Context& context = of(raw);
    Lock lock(context.job->engine());
    if (context.engine != nullptr) return gpu_uar(context);
    auto uar = std::make_unique<Uar>();
    uar->blue_flame = flags == verbs::kUarBlueFlame;
    UarPage& page = page_for(context, uar->blue_flame);
    uar->owner = &context;
    uar->page = &page;
    uar->cell = uar->blue_flame ? 0 : static_cast<std::uint32_t>(__builtin_ctzll(~page.used));
    auto* start = page.memory.as<std::byte>(std::size_t{uar->cell} * UarPage::kStep);
    uar->base_addr = start;
    if (uar->blue_flame) {
      page.used = ~std::uint64_t{0};
      uar->reg_addr = start + UarPage::kBlueFlameRegister;
      std::memset(start, 0, UarPage::kBytes);
    } else {
      page.used |= std::uint64_t{1} << uar->cell;
      uar->reg_addr = start + UarPage::kRegister;
      std::memset(uar->reg_addr, 0, 64);
      std::memset(start + mlx5::kNoRecordDoorbell, 0, 64);
    }
    uar->page_id = context.job->next_number();
    uar->mmap_off = 0;
    uar->comp_mask = 0;
    Uar* result = uar.get();
    context.uars[uar->page_id] = std::move(uar);
    return result;
  });
}

/// With queue pairs that still ring it the UAR stays until the last of them goes: drivers free a shared
/// one with the first.
void devx_free_uar(mlx5dv_devx_uar* raw) {
  Uar* uar = static_cast<Uar*>(raw);
  Context& context = *uar->owner;
  Lock lock(context.job->engine());
  uar->freed = true;
  release_uar(*uar);
}

int devx_query_eqn(ibv_context*, std::uint32_t vector, std::uint32_t* eqn) {
  if (vector != 0) return failed(EINVAL, "softnic has completion vector 0 only");
  *eqn = kEventQueue;
  return 0;
}

/// Runs a command: a refusal goes into the reply's status and, as with the kernel's DevX, makes the
/// call fail with EREMOTEIO. @return 0 or errno
template <class Body>
int run_command(Context& context, const void* in, std::size_t in_bytes, void* out,
                std::size_t out_bytes, Body&& body) {
  if (in == nullptr || out == nullptr || in_bytes < mlx5::command::kHeaderBytes || out_bytes < 8) {
    return failed(EINVAL, "a command needs at least 16 bytes in and 8 bytes out");
  }
  auto* reply = static_cast<std::uint8_t*>(out);
  std::memset(reply, 0, out_bytes);
  try {
    Lock lock(context.job->engine());
    body(static_cast<const std::uint8_t*>(in), reply);
    return 0;
  } catch (const Refused& refused) {
    std::memset(reply, 0, out_bytes);
    mlx5::set(reply, mlx5::reply::status, refused.status);
    mlx5::set(reply, mlx5::reply::syndrome, 0x50f70000u | refused.status);
    return failed(EREMOTEIO, refused.sentence);
  } catch (const Error& error) {
    return failed(code_to_errno(error.code()), error.what());
  } catch (const std::bad_alloc&) {
    return failed(ENOMEM, "softnic ran out of memory");
  }
}

mlx5dv_devx_obj* devx_obj_create(ibv_context* raw, const void* in, std::size_t in_bytes, void* out,
                                 std::size_t out_bytes) {
  Context& context = of(raw);
  mlx5dv_devx_obj* made = nullptr;
  run_command(context, in, in_bytes, out, out_bytes,
              [&](const std::uint8_t* command, std::uint8_t* reply) {
                auto object = create_object(context, command, in_bytes, reply, out_bytes);
                context.objects.insert(object.get());
                made = object.release();
              });
  return made;
}

int devx_obj_modify(mlx5dv_devx_obj* object, const void* in, std::size_t in_bytes, void* out,
                    std::size_t out_bytes) {
  return run_command(*object->owner, in, in_bytes, out, out_bytes,
                     [&](const std::uint8_t* command, std::uint8_t*) {
                       modify_object(*object, command, in_bytes);
                     });
}

int devx_obj_query(mlx5dv_devx_obj* object, const void* in, std::size_t in_bytes, void* out,
                   std::size_t out_bytes) {
  return run_command(*object->owner, in, in_bytes, out, out_bytes,
                     [&](const std::uint8_t* command, std::uint8_t* reply) {
                       query_object(*object, command, reply, out_bytes);
                     });
}

int devx_obj_destroy(mlx5dv_devx_obj* object) {
  Context& context = *object->owner;
  try {
    Lock lock(context.job->engine());
    detach_object(*object);
    context.objects.erase(object);
  } catch (const Refused& refused) {
    return failed(EBUSY, refused.sentence);
  }
  delete object;
  return 0;
}

int devx_general_cmd(ibv_context* raw, const void* in, std::size_t in_bytes, void* out,
                     std::size_t out_bytes) {
  Context& context = of(raw);
  return run_command(context, in, in_bytes, out, out_bytes,
                     [&](const std::uint8_t* command, std::uint8_t* reply) {
                       general_command(context, command, reply, out_bytes);
                     });
}

}  // namespace

void release_uar(Uar& uar) {
  if (!uar.freed || uar.users != 0) return;
  if (uar.engine != nullptr) {
    uar.engine->give_cell(static_cast<std::uint64_t*>(uar.reg_addr));
  } else {
    uar.page->used &= uar.blue_flame ? 0 : ~(std::uint64_t{1} << uar.cell);
  }
  uar.owner->uars.erase(uar.page_id);
}

void set_devx_functions(verbs::Table& t) {
  t.init_obj = init_obj;
  t.devx_umem_reg = devx_umem_reg;
  t.devx_umem_reg_ex = devx_umem_reg_ex;
  t.devx_umem_dereg = devx_umem_dereg;
  t.devx_alloc_uar = devx_alloc_uar;
  t.devx_free_uar = devx_free_uar;
  t.devx_obj_create = devx_obj_create;
  t.devx_obj_query = devx_obj_query;
  t.devx_obj_modify = devx_obj_modify;
  t.devx_obj_destroy = devx_obj_destroy;
  t.devx_query_eqn = devx_query_eqn;
  t.devx_general_cmd = devx_general_cmd;
}

}  // namespace marrow::softnic
