// SPDX-License-Identifier: Apache-2.0
// A put of Marrow's proxy path over libfabric beside a bare fi_write over the same device, in the same run: the same
// two processes, on the same cores, in turns. What is above the bare call is Marrow's.
//   marrow_libfabric_put [--provider tcp] [--cores A,B,C,D] [--rounds N] [--json FILE]
// Rank 0 (cores A, B) writes, rank 1 (cores C, D) only makes progress. A put's time is from its call in a kernel on the
// CPU device to the return of flush; fi_write's from the call to its completion.
#include <rdma/fi_cm.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "marrow/device.cuh"
#include "marrow/marrow.hpp"
#include "networks/libfabric/endpoint.hpp"
#include "networks/libfabric/table.hpp"

namespace {

using namespace marrow;
namespace lf = marrow::networks::libfabric;
using Clock = std::chrono::steady_clock;

constexpr int kSmall = 8;
constexpr std::uint64_t kLarge = 4 << 20;
constexpr int kBatch = 16;  // large ones before a flush

struct Options {
  std::string provider = "tcp";
  std::vector<int> cores;
  int rounds = 3;
  int samples = 20000;
  std::string json;
};

/// What the two processes share.
struct Shared {
  std::atomic<int> step[2];
  std::uint8_t address[2][256];
  std::uint64_t address_bytes[2];
  std::uint64_t key, base;
  std::uint8_t id[UniqueId::kSize];
};

void pin(const std::vector<int>& cores, std::size_t first, std::size_t count) {
  if (cores.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (std::size_t i = first; i < first + count && i < cores.size(); ++i) CPU_SET(cores[i], &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0) std::perror("sched_setaffinity");
}

/// Both processes have come to step n.
void meet(Shared& shared, int rank, int n, fid_cq* cq = nullptr) {
  shared.step[rank].store(n);
  fi_cq_data_entry entries[8];
  while (shared.step[1 - rank].load() < n) {
    if (cq) (void)cq->ops->read(cq, entries, 8);  // the other one needs our progress
  }
}

struct Bare {
  lf::Info info;
  lf::Owned<fid_fabric> fabric;
  lf::Owned<fid_domain> domain;
  lf::Owned<fid_av> av;
  lf::Owned<fid_cq> cq;
  lf::Owned<fid_mr> mr;
  lf::Owned<fid_ep> ep;
  std::vector<char> memory = std::vector<char>(kLarge, 1);
};

Bare open_bare(const Options& options, Shared& shared, int rank) {
  Bare b;
  static const marrow_network_services services{MARROW_NETWORK_VERSION,
                                                sizeof(services),
                                                nullptr,
                                                nullptr,
                                                nullptr,
                                                nullptr,
                                                nullptr,
                                                nullptr,
                                                nullptr,
                                                nullptr};
  lf::Options wanted;
  wanted.provider = options.provider;
  b.info = std::move(lf::find_devices(services, wanted).front());
  fid_fabric* fabric = nullptr;
  lf::check(lf::table().fabric(b.info->fabric_attr, &fabric, nullptr), "fabric");
  b.fabric.reset(fabric);
  fid_domain* domain = nullptr;
  lf::check(fabric->ops->domain(fabric, b.info.get(), &domain, nullptr), "domain");
  b.domain.reset(domain);
  fi_av_attr av_attr{};
  av_attr.type = FI_AV_TABLE;
  av_attr.count = 2;
  fid_av* av = nullptr;
  lf::check(domain->ops->av_open(domain, &av_attr, &av, nullptr), "address vector");
  b.av.reset(av);
  fi_cq_attr cq_attr{};
  cq_attr.format = FI_CQ_FORMAT_DATA;
  fid_cq* cq = nullptr;
  lf::check(domain->ops->cq_open(domain, &cq_attr, &cq, nullptr), "completion queue");
  b.cq.reset(cq);
  fid_ep* ep = nullptr;
  lf::check(domain->ops->endpoint(domain, b.info.get(), &ep, nullptr), "endpoint");
  b.ep.reset(ep);
  lf::check(ep->fid.ops->bind(&ep->fid, &av->fid, 0), "bind");
  lf::check(ep->fid.ops->bind(&ep->fid, &cq->fid, FI_TRANSMIT | FI_RECV), "bind");
  lf::check(ep->fid.ops->control(&ep->fid, FI_ENABLE, nullptr), "enable");
  fid_mr* mr = nullptr;
  lf::check(domain->mr->reg(&domain->fid, b.memory.data(), b.memory.size(),
                            FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 77, 0, &mr,
                            nullptr),
            "registration");
  b.mr.reset(mr);
  std::size_t bytes = sizeof(shared.address[0]);
  lf::check(ep->cm->getname(&ep->fid, shared.address[rank], &bytes), "name");
  if (rank == 1) {
    shared.key = mr->key;
    shared.base = b.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR
                      ? reinterpret_cast<std::uint64_t>(b.memory.data())
                      : 0;
  }
  return b;
}

std::int64_t wait_one(Bare& b) {
  fi_cq_data_entry entry[8];
  for (;;) {
    const std::int64_t n = b.cq->ops->read(b.cq.get(), entry, 8);
    if (n > 0) return n;
    if (n != -FI_EAGAIN) lf::check(n, "completion");
  }
}

void bare_write(Bare& b, Shared& shared, std::uint64_t bytes) {
  static fi_context2 contexts[kBatch];
  static int next = 0;
  for (;;) {
    const std::int64_t n = b.ep->rma->write(b.ep.get(), b.memory.data(), bytes, b.mr->mem_desc, 1,
                                            shared.base, shared.key, &contexts[next++ % kBatch]);
    if (n == 0) return;
    fi_cq_data_entry entry[1];
    if (n != -FI_EAGAIN) lf::check(n, "write");
    (void)b.cq->ops->read(b.cq.get(), entry, 0);
  }
}

double microseconds(Clock::time_point since) {
  return std::chrono::duration<double, std::micro>(Clock::now() - since).count();
}

struct Figures {
  std::vector<double> small;  ///< us, one put
  std::vector<double> large;  ///< GB/s, of one batch
};

void run_bare(const Options& options, Shared& shared, int rank, int step, Figures& out) {
  pin(options.cores, rank == 0 ? 0 : 2, 1);
  Bare b = open_bare(options, shared, rank);
  meet(shared, rank, step);
  for (int r = 0; r < 2; ++r) {
    fi_addr_t index = 0;
    if (b.av->ops->insert(b.av.get(), shared.address[r], 1, &index, 0, nullptr) != 1)
      lf::check(-FI_EINVAL, "address");
  }
  if (rank == 0) {
    for (int i = -1000; i < options.samples; ++i) {
      const auto start = Clock::now();
      bare_write(b, shared, kSmall);
      wait_one(b);
      if (i >= 0) out.small.push_back(microseconds(start));
    }
    for (int i = -2; i < 20; ++i) {
      const auto start = Clock::now();
      for (int k = 0; k < kBatch; ++k) bare_write(b, shared, kLarge);
      for (std::int64_t left = kBatch; left > 0;) left -= wait_one(b);
      if (i >= 0)
        out.large.push_back(static_cast<double>(kBatch * kLarge) / microseconds(start) / 1e3);
    }
  }
  meet(shared, rank, step + 1, b.cq.get());
  pin(options.cores, rank == 0 ? 0 : 2, 2);
}

MARROW_KERNEL puts(DeviceCommunicator comm, WindowHandle window, std::uint64_t bytes, int batch,
                   int samples, double* us, Status* status) {
  Gin gin(comm, 0);
  for (int i = 0; i < samples && *status == Status::ok; ++i) {
    const auto start = Clock::now();
    for (int k = 0; k < batch; ++k)
      *status = worse(*status, gin.put(1, window, 0, window, 0, bytes));
    *status = worse(*status, gin.flush(1));
    us[i] = microseconds(start);
  }
}

void run_marrow(const Options& options, Shared& shared, int rank, int step, Figures& out) {
  Config config;
  config.parameters["MARROW_PATH"] = "proxy";
  config.parameters["MARROW_NETWORK"] = "libfabric?prov=" + options.provider;
  config.parameters["MARROW_PROXY_SPINS"] = "1000000000";
  if (rank == 0) {
    const UniqueId made = UniqueId::create();
    std::memcpy(shared.id, made.bytes().data(), UniqueId::kSize);
  }
  meet(shared, rank, step);
  std::array<std::byte, UniqueId::kSize> id;
  std::memcpy(id.data(), shared.id, id.size());
  Communicator comm(UniqueId::from_bytes(id), 2, rank, config);
  Window window = comm.allocate(kLarge, Memory::host);
  DeviceCommunicatorOwner device = comm.device_communicator({.contexts = 1, .signals = 1});
  if (rank == 0) {
    std::memset(window.host(), 3, kLarge);
    Status status = Status::ok;
    std::vector<double> us(static_cast<std::size_t>(options.samples));
    const auto run = [&](std::uint64_t bytes, int batch, int samples) {
      launch(comm.place(), 1, 1, 0, puts, device.handle(), window.handle(), bytes, batch, samples,
             us.data(), &status);
    };
    run(kSmall, 1, 1000);
    run(kSmall, 1, options.samples);
    out.small.insert(out.small.end(), us.begin(), us.end());
    run(kLarge, kBatch, 2);
    run(kLarge, kBatch, 20);
    for (int i = 0; i < 20; ++i)
      out.large.push_back(static_cast<double>(kBatch * kLarge) / us[static_cast<std::size_t>(i)] /
                          1e3);
    if (status != Status::ok) {
      std::fprintf(stderr, "a put ended with %s\n", name(status));
      std::exit(1);
    }
  }
  comm.barrier();
  if (rank == 1) {
    const auto* bytes = static_cast<const char*>(window.host());
    if (std::any_of(bytes, bytes + kLarge, [](char c) { return c != 3; })) {
      std::fprintf(stderr, "the data is wrong\n");
      std::exit(1);
    }
  }
  device.close();
  window.close();
  comm.close();
}

struct Statistics {
  double min, median, mean, p99, max, stddev;
};
Statistics of(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const double mean = std::accumulate(v.begin(), v.end(), 0.0) / static_cast<double>(v.size());
  double squares = 0;
  for (const double x : v) squares += (x - mean) * (x - mean);
  return {v.front(), v[v.size() / 2],
          mean,      v[v.size() * 99 / 100],
          v.back(),  std::sqrt(squares / static_cast<double>(v.size()))};
}

void write_json(const Options& options, const Figures& bare, const Figures& ours) {
  std::FILE* file = std::fopen(options.json.c_str(), "w");
  if (!file) {
    std::perror(options.json.c_str());
    std::exit(1);
  }
  const auto row = [&](const char* what, const char* unit, bool marrow, std::uint64_t bytes,
                       const std::vector<double>& samples, bool last) {
    const Statistics s = of(samples);
    std::fprintf(file,
                 "{\"what\": \"%s\", \"unit\": \"%s\", \"kind\": \"%s\", %s\"network\": "
                 "\"libfabric\", \"devices\": "
                 "[{\"role\": \"%s\", \"device\": \"%s\", \"name\": \"\"}], \"parameters\": "
                 "{\"provider\": \"%s\", "
                 "\"bytes\": %llu, \"rounds\": %d, \"pinned\": %s}, \"statistics\": {\"count\": "
                 "%zu, \"min\": %g, "
                 "\"median\": %g, \"mean\": %g, \"p99\": %g, \"max\": %g, \"stddev\": %g}}%s\n",
                 what, unit, marrow ? "emulated" : "measured (host)",
                 marrow ? "\"path\": \"proxy\", " : "", marrow ? "kernels" : "caller",
                 marrow ? "cpu device" : "host", options.provider.c_str(),
                 static_cast<unsigned long long>(bytes), options.rounds,
                 options.cores.empty() ? "false" : "true", samples.size(), s.min, s.median, s.mean,
                 s.p99, s.max, s.stddev, last ? "" : ",");
  };
  std::fprintf(file, "[\n");
  row("fi_write to completion", "us", false, kSmall, bare.small, false);
  row("put to flush", "us", true, kSmall, ours.small, false);
  row("fi_write bandwidth", "GB/s", false, kLarge, bare.large, false);
  row("put bandwidth", "GB/s", true, kLarge, ours.large, true);
  std::fprintf(file, "]\n");
  std::fclose(file);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string key = argv[i];
    if (key == "--provider") options.provider = argv[i + 1];
    if (key == "--rounds") options.rounds = std::atoi(argv[i + 1]);
    if (key == "--samples") options.samples = std::atoi(argv[i + 1]);
    if (key == "--json") options.json = argv[i + 1];
    if (key == "--cores") {
      for (const char* at = argv[i + 1]; at;
           at = std::strchr(at, ',') ? std::strchr(at, ',') + 1 : nullptr)
        options.cores.push_back(std::atoi(at));
    }
  }
  return options;
}

int run(const Options& options, Shared& shared, int rank) {
  Figures bare;
  Figures ours;
  for (int round = 0; round < options.rounds; ++round) {
    run_bare(options, shared, rank, 10 * round + 1, bare);
    run_marrow(options, shared, rank, 10 * round + 3, ours);
  }
  if (rank != 0) return 0;
  const double small[] = {of(bare.small).median, of(ours.small).median};
  const double large[] = {of(bare.large).median, of(ours.large).median};
  std::printf("libfabric %s, two processes, %s, medians of %d rounds\n", options.provider.c_str(),
              options.cores.empty() ? "not pinned" : "pinned", options.rounds);
  std::printf("  %-34s %9.2f us    bare fi_write %9.2f us    ratio %.2f (limit 1.25)\n",
              "put of 8 bytes until flush", small[1], small[0], small[1] / small[0]);
  std::printf("  %-34s %9.2f GB/s  bare fi_write %9.2f GB/s  ratio %.2f (limit 0.90)\n",
              "puts of 4 MiB, 16 and a flush", large[1], large[0], large[1] / large[0]);
  if (!options.json.empty()) write_json(options, bare, ours);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  void* mapped =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 1;
  auto& shared = *new (mapped) Shared{};
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
  }
  try {
    const int status = run(options, shared, child == 0 ? 1 : 0);
    if (child == 0) _exit(status);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", child == 0 ? 1 : 0, error.what());
    if (child != 0) kill(child, SIGKILL);
    return 1;
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
