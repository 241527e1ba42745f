// SPDX-License-Identifier: Apache-2.0
// Where a measurement ran: which CPUs share a core, which CPU a thread is on, on which NUMA node the ring's pages lie
// and how they lie there, what the hypervisor took. A rate that differs from run to run is explained by one of these or it
// is not explained by placement.
#pragma once

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace placement {

inline std::string line_of(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// CPUs of "2-5,8".
inline std::vector<int> list(const std::string& text) {
  std::vector<int> out;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto dash = part.find('-');
    const int first = std::atoi(part.c_str());
    const int last = dash == std::string::npos ? first : std::atoi(part.c_str() + dash + 1);
    for (int cpu = first; cpu <= last; ++cpu) out.push_back(cpu);
  }
  return out;
}
inline std::string text(const std::vector<int>& cpus) {
  std::string out;
  for (const int cpu : cpus) {
    if (!out.empty()) out += ',';
    out += std::to_string(cpu);
  }
  return out;
}

inline void pin_self(const std::vector<int>& to) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : to) CPU_SET(cpu, &set);
  (void)::pthread_setaffinity_np(::pthread_self(), sizeof(set), &set);
}
inline void pin_self(int cpu) { pin_self(std::vector<int>{cpu}); }

/// CPUs of one core, itself included.
inline std::vector<int> siblings(int cpu) {
  const std::string found = line_of("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                                    "/topology/thread_siblings_list");
  return found.empty() ? std::vector<int>{cpu} : list(found);
}
inline std::vector<int> allowed() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> out;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return out;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) out.push_back(cpu);
  }
  return out;
}
/// CPUs to measure on: of that NUMA node first (-1: any), one of each core before a second of any.
inline std::vector<int> one_each_core(int node) {
  std::vector<int> all = allowed();
  if (node >= 0) {
    const std::vector<int> near =
        list(line_of("/sys/devices/system/node/node" + std::to_string(node) + "/cpulist"));
    std::stable_partition(all.begin(), all.end(), [&](int cpu) {
      return std::find(near.begin(), near.end(), cpu) != near.end();
    });
  }
  std::stable_partition(all.begin(), all.end(),
                        [](int cpu) { return siblings(cpu).front() == cpu; });
  return all;
}

/// Of a thread of this process: the CPU it is on, and how often it was moved off one against its will.
struct Task {
  int id = 0, cpu = -1;
  std::uint64_t pushed = 0;   ///< nonvoluntary context switches
  std::uint64_t used_ns = 0;  ///< CPU time
};
inline Task task(int id) {
  const std::string folder = "/proc/self/task/" + std::to_string(id);
  Task out;
  out.id = id;
  const std::string stat = line_of(folder + "/stat");
  std::stringstream fields(stat.substr(std::min(stat.size(), stat.rfind(')') + 2)));
  std::string field;
  for (int i = 3; i <= 39 && fields >> field; ++i) {
    if (i == 39) out.cpu = std::atoi(field.c_str());
  }
  std::ifstream status(folder + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("nonvoluntary_ctxt_switches:", 0) == 0)
      out.pushed = std::strtoull(line.c_str() + 27, nullptr, 10);
  }
  std::ifstream(folder + "/schedstat") >> out.used_ns;
  return out;
}
/// Threads of that name.
inline std::vector<Task> tasks(const std::string& name) {
  std::vector<Task> out;
  DIR* folder = ::opendir("/proc/self/task");
  if (!folder) return out;
  while (const dirent* entry = ::readdir(folder)) {
    if (entry->d_name[0] == '.') continue;
    if (line_of(std::string("/proc/self/task/") + entry->d_name + "/comm") == name)
      out.push_back(task(std::atoi(entry->d_name)));
  }
  ::closedir(folder);
  std::sort(out.begin(), out.end(), [](const Task& a, const Task& b) { return a.id < b.id; });
  return out;
}
/// Milliseconds that the hypervisor gave a CPU to others, since boot (in steps of 10).
inline std::uint64_t stolen_ms(int cpu) {
  std::ifstream file("/proc/stat");
  const std::string name = "cpu" + std::to_string(cpu) + " ";
  for (std::string line; std::getline(file, line);) {
    if (line.rfind(name, 0) != 0) continue;
    std::stringstream fields(line.substr(name.size()));
    std::uint64_t value = 0;
    for (int i = 0; i < 8; ++i) fields >> value;
    return value * 10;
  }
  return 0;
}

/// How memory lies: pages on each NUMA node, and in how many physically contiguous pieces.
struct Pages {
  std::vector<int> on_node;  ///< [node]; empty: the kernel does not say
  int pieces = 0;            ///< 0: the kernel does not say
  int frames = 0;            ///< 2 MiB frames that hold them
};
inline Pages pages(const void* address, std::size_t bytes) {
  Pages out;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = reinterpret_cast<std::uintptr_t>(address) / page;
  const std::size_t count = (bytes + page - 1) / page;
  std::vector<void*> at(count);
  std::vector<int> node(count, -1);
  for (std::size_t i = 0; i < count; ++i) at[i] = reinterpret_cast<void*>((first + i) * page);
  if (::syscall(SYS_move_pages, 0, count, at.data(), nullptr, node.data(), 0) == 0) {
    for (const int n : node) {
      if (n < 0) continue;
      if (out.on_node.size() <= static_cast<std::size_t>(n)) out.on_node.resize(n + 1);
      ++out.on_node[n];
    }
  }
  std::ifstream map("/proc/self/pagemap", std::ios::binary);
  map.seekg(static_cast<std::streamoff>(first * 8));
  std::vector<std::uint64_t> entry(count);
  if (map.read(reinterpret_cast<char*>(entry.data()), static_cast<std::streamsize>(count * 8))) {
    constexpr std::uint64_t kFrame = (std::uint64_t{1} << 55) - 1;
    std::set<std::uint64_t> frames;
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t now = entry[i] & kFrame;
      if (now == 0) return out;  // without the right to see them they are all zero
      out.pieces += i == 0 || now != (entry[i - 1] & kFrame) + 1;
      frames.insert(now / ((std::size_t{2} << 20) / page));
    }
    out.frames = static_cast<int>(frames.size());
  }
  return out;
}
inline std::string text(const Pages& pages) {
  std::ostringstream out;
  for (std::size_t n = 0; n < pages.on_node.size(); ++n) {
    if (pages.on_node[n]) out << pages.on_node[n] << " pages on node " << n << ", ";
  }
  if (pages.on_node.empty()) out << "node of pages not known, ";
  if (pages.pieces) {
    out << pages.pieces << " pieces in " << pages.frames << " frames of 2 MiB";
  } else {
    out << "frames not known";
  }
  return out.str();
}
/// The largest mapping of this process that is a file of that name, e.g. "memfd:marrow-host".
inline std::pair<const void*, std::size_t> mapping(const std::string& name) {
  std::pair<const void*, std::size_t> out{nullptr, 0};
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0, end = 0;
    if (line.find(name) == std::string::npos ||
        std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2)
      continue;
    if (end - begin > out.second) out = {reinterpret_cast<const void*>(begin), end - begin};
  }
  return out;
}

}  // namespace placement
