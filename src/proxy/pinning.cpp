// SPDX-License-Identifier: Apache-2.0
// hwloc says which CPUs are near a NUMA node and allowed to us; without it, sysfs says the first half. hwloc's
// header is needed to build it in, the library only to run.
#include "proxy/pinning.hpp"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "base/log.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

#if defined(MARROW_HAVE_HWLOC)
#include <dlfcn.h>
#include <hwloc.h>
#endif

namespace marrow::proxy {
namespace {

constexpr int kMaxCpu = CPU_SETSIZE - 1;

[[noreturn]] void refuse(const std::string& text) {
  throw Error(Code::invalid_argument, base::cat("MARROW_PROXY_CPUS is '", text, "'"),
              base::cat("give auto, none, or CPUs from 0 to ", kMaxCpu, " as in 2-5,8"));
}

#if defined(MARROW_HAVE_HWLOC)
/// The library's functions by name, so that a program starts without it.
struct Hwloc {
  decltype(&::hwloc_topology_init) init = nullptr;
  decltype(&::hwloc_topology_load) load = nullptr;
  decltype(&::hwloc_topology_destroy) destroy = nullptr;
  decltype(&::hwloc_get_type_depth) depth = nullptr;
  decltype(&::hwloc_get_nbobjs_by_depth) count = nullptr;
  decltype(&::hwloc_get_obj_by_depth) object = nullptr;
  decltype(&::hwloc_bitmap_next) next = nullptr;
  void* library = nullptr;

  Hwloc() {
    library = ::dlopen("libhwloc.so.15", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    const bool all = take(init, "hwloc_topology_init") && take(load, "hwloc_topology_load") &&
                     take(destroy, "hwloc_topology_destroy") &&
                     take(depth, "hwloc_get_type_depth") &&
                     take(count, "hwloc_get_nbobjs_by_depth") &&
                     take(object, "hwloc_get_obj_by_depth") && take(next, "hwloc_bitmap_next");
    if (!all) close();
  }
  ~Hwloc() { close(); }
  Hwloc(const Hwloc&) = delete;
  Hwloc& operator=(const Hwloc&) = delete;

 private:
  template <class Function>
  bool take(Function& to, const char* name) {
    to = reinterpret_cast<Function>(::dlsym(library, name));
    return to != nullptr;
  }
  void close() {
    if (library) ::dlclose(library);
    library = nullptr;
  }
};

/// CPUs of a NUMA node by hwloc; empty: it cannot say.
std::vector<int> by_hwloc(int node) {
  const Hwloc hwloc;
  std::vector<int> cpus;
  if (!hwloc.library) return cpus;
  hwloc_topology_t topology = nullptr;
  if (hwloc.init(&topology) != 0) return cpus;
  if (hwloc.load(topology) == 0) {
    const int depth = hwloc.depth(topology, HWLOC_OBJ_NUMANODE);
    for (unsigned i = 0; i < hwloc.count(topology, depth); ++i) {
      const hwloc_obj* const object = hwloc.object(topology, depth, i);
      if (!object || static_cast<int>(object->os_index) != node || !object->cpuset) continue;
      for (int cpu = hwloc.next(object->cpuset, -1); cpu >= 0;
           cpu = hwloc.next(object->cpuset, cpu))
        cpus.push_back(cpu);
    }
  }
  hwloc.destroy(topology);
  return cpus;
}
#else
std::vector<int> by_hwloc(int) { return {}; }
#endif

std::vector<int> by_sysfs(int node) {
  std::ifstream file(base::cat("/sys/devices/system/node/node", node, "/cpulist"));
  std::string text;
  if (!std::getline(file, text) || text.empty()) return {};
  return parse_cpus(text);
}

/// Those that we may run on.
std::vector<int> allowed(const std::vector<int>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return cpus;
  std::vector<int> ours;
  std::copy_if(cpus.begin(), cpus.end(), std::back_inserter(ours),
               [&](int cpu) { return cpu <= kMaxCpu && CPU_ISSET(cpu, &set); });
  return ours;
}

}  // namespace

std::vector<int> parse_cpus(const std::string& text) {
  std::vector<int> cpus;
  const char* at = text.c_str();
  const auto number = [&] {
    if (*at < '0' || *at > '9') refuse(text);
    char* end = nullptr;
    const unsigned long value = std::strtoul(at, &end, 10);
    if (value > kMaxCpu) refuse(text);
    at = end;
    return static_cast<int>(value);
  };
  for (;;) {
    const int first = number();
    int last = first;
    if (*at == '-') {
      ++at;
      last = number();
      if (last < first) refuse(text);
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
    if (*at == 0) return cpus;
    if (*at++ != ',') refuse(text);
  }
}

std::string cpus_text(const std::vector<int>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    text += base::cat(text.empty() ? "" : ",", cpus[i], last > i ? base::cat("-", cpus[last]) : "");
    i = last + 1;
  }
  return text;
}

Pinning::Pinning(const std::string& wanted, int numa_node) {
  if (wanted == "none") {
    where_ = "on any CPU (MARROW_PROXY_CPUS=none)";
  } else if (wanted != "auto") {
    cpus_ = parse_cpus(wanted);
    one_each_ = true;
    where_ = base::cat("one after the other on CPUs ", cpus_text(cpus_));
  } else if (numa_node < 0) {
    where_ = "on any CPU: it is not known which are near the network's device";
  } else {
    cpus_ = allowed(by_hwloc(numa_node));
    const bool hwloc = !cpus_.empty();
    if (!hwloc) cpus_ = allowed(by_sysfs(numa_node));
    where_ = cpus_.empty() ? base::cat("on any CPU: none of NUMA node ", numa_node, " is ours")
                           : base::cat("on CPUs ", cpus_text(cpus_), " of NUMA node ", numa_node,
                                       hwloc ? " (by hwloc)" : " (by sysfs; no hwloc here)");
  }
}

void Pinning::pin(int thread) const {
  if (cpus_.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (one_each_) {
    CPU_SET(cpus_[static_cast<std::size_t>(thread) % cpus_.size()], &set);
  } else {
    for (const int cpu : cpus_) CPU_SET(cpu, &set);
  }
  if (::sched_setaffinity(0, sizeof(set), &set) != 0) {
    MARROW_WARN(proxy, "progress thread ", thread, " cannot be bound ", where_, ": ",
                std::strerror(errno), ". Next: name CPUs of this process in MARROW_PROXY_CPUS");
  }
}

}  // namespace marrow::proxy
