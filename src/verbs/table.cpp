// SPDX-License-Identifier: Apache-2.0
// Provider registry, and the system provider: the real libraries opened with dlopen, so one binary
// starts with or without them. libmlx5 may be absent (soft-RoCE): then only the plain verbs are
// set.
#include "verbs/table.hpp"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::verbs {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, const Table*, std::less<>> tables;
};

// Built on first use: providers register from static initialisers in any order.
Registry& registry() {
  static Registry instance;
  return instance;
}

// The default version of a symbol is the current one, so plain dlsym is what a linked program gets.
template <class Function>
bool find(void* library, const char* symbol, Function& target) {
  target = reinterpret_cast<Function>(::dlsym(library, symbol));
  return target != nullptr;
}

template <class Function>
void need(void* library, const char* symbol, Function& target, std::string& missing) {
  if (!find(library, symbol, target)) missing += base::cat(missing.empty() ? "" : ", ", symbol);
}

void load_ibverbs(Table& t) {
  void* library = ::dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw Error(Code::unsupported, base::cat("no RDMA library: ", ::dlerror(), "."),
                "install rdma-core (libibverbs1), or use provider softnic");
  }
  std::string missing;
  need(library, "ibv_get_device_list", t.get_device_list, missing);
  need(library, "ibv_free_device_list", t.free_device_list, missing);
  need(library, "ibv_get_device_name", t.get_device_name, missing);
  need(library, "ibv_open_device", t.open_device, missing);
  need(library, "ibv_close_device", t.close_device, missing);
  need(library, "ibv_query_device", t.query_device, missing);
  need(library, "ibv_query_port", t.query_port, missing);
  need(library, "ibv_query_gid", t.query_gid, missing);
  need(library, "ibv_alloc_pd", t.alloc_pd, missing);
  need(library, "ibv_dealloc_pd", t.dealloc_pd, missing);
  need(library, "ibv_reg_mr", t.reg_mr, missing);
  need(library, "ibv_dereg_mr", t.dereg_mr, missing);
  if (!missing.empty()) {
    throw Error(Code::unsupported, base::cat("libibverbs.so.1 lacks ", missing, "."),
                "install rdma-core 34 or newer");
  }
  find(library, "ibv_reg_mr_iova2", t.reg_mr_iova2);
  find(library, "ibv_reg_dmabuf_mr", t.reg_dmabuf_mr);
  find(library, "ibv_create_cq", t.create_cq);
  find(library, "ibv_destroy_cq", t.destroy_cq);
  find(library, "ibv_create_qp", t.create_qp);
  find(library, "ibv_modify_qp", t.modify_qp);
  find(library, "ibv_query_qp", t.query_qp);
  find(library, "ibv_destroy_qp", t.destroy_qp);
  find(library, "_ibv_query_gid_ex", t.query_gid_ex);  // newer than rdma-core 32
  find(library, "ibv_create_ah", t.create_ah);
  find(library, "ibv_destroy_ah", t.destroy_ah);
  find(library, "ibv_get_async_event", t.get_async_event);
  find(library, "ibv_ack_async_event", t.ack_async_event);
}

void load_mlx5(Table& t) {
  void* library = ::dlopen("libmlx5.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return;
  find(library, "mlx5dv_is_supported", t.is_supported);
  find(library, "mlx5dv_init_obj", t.init_obj);
  find(library, "mlx5dv_devx_umem_reg", t.devx_umem_reg);
  find(library, "mlx5dv_devx_umem_reg_ex", t.devx_umem_reg_ex);
  find(library, "mlx5dv_devx_umem_dereg", t.devx_umem_dereg);
  find(library, "mlx5dv_devx_alloc_uar", t.devx_alloc_uar);
  find(library, "mlx5dv_devx_free_uar", t.devx_free_uar);
  find(library, "mlx5dv_devx_obj_create", t.devx_obj_create);
  find(library, "mlx5dv_devx_obj_query", t.devx_obj_query);
  find(library, "mlx5dv_devx_obj_modify", t.devx_obj_modify);
  find(library, "mlx5dv_devx_obj_destroy", t.devx_obj_destroy);
  find(library, "mlx5dv_devx_query_eqn", t.devx_query_eqn);
  find(library, "mlx5dv_devx_general_cmd", t.devx_general_cmd);
}

// Loaded once and kept: the libraries do not support being unloaded. A throw leaves it unloaded.
const Table& system_table() {
  static const Table table = [] {
    Table t;
    t.name = "system";
    load_ibverbs(t);
    load_mlx5(t);
    return t;
  }();
  return table;
}

}  // namespace

bool register_provider(const Table* table) {
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  r.tables[table->name] = table;
  return true;
}

const Table& provider(std::string_view name) {
  if (name == "system") return system_table();
  {
    Registry& r = registry();
    std::lock_guard lock(r.mutex);
    if (auto found = r.tables.find(name); found != r.tables.end()) return *found->second;
  }
  std::string known;
  for (const std::string& each : provider_names())
    known += base::cat(known.empty() ? "" : ", ", each);
  throw Error(Code::invalid_argument, base::cat("no verbs provider named '", name, "'."),
              base::cat("use one of: ", known));
}

std::vector<std::string> provider_names() {
  std::vector<std::string> names{"system"};
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  for (const auto& [name, table] : r.tables) names.push_back(name);
  return names;
}

}  // namespace marrow::verbs
