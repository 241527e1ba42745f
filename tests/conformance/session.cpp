// SPDX-License-Identifier: Apache-2.0
// One rank of one row: communicator, windows, the kernel, the verdict.
#include "conformance/session.hpp"

#include <chrono>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <new>
#include <thread>

namespace marrow::conformance {
namespace {

using namespace std::chrono_literals;

UniqueId meet(int rank, const std::string& file) {
  if (rank == 0) {
    const UniqueId id = UniqueId::create();
    const std::string unfinished = file + ".new";
    std::ofstream(unfinished, std::ios::binary)
        .write(reinterpret_cast<const char*>(id.bytes().data()), UniqueId::kSize);
    std::rename(unfinished.c_str(), file.c_str());
    return id;
  }
  for (int tries = 0; tries < 10000; ++tries) {
    std::ifstream in(file, std::ios::binary);
    std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
    if (bytes.size() == UniqueId::kSize)
      return UniqueId::from_bytes(std::as_bytes(std::span(bytes)));
    std::this_thread::sleep_for(1ms);
  }
  throw Error(Code::timeout, "rank 0 wrote no id in 10 s");
}

std::string path_of(const Row& row, int rank) {
  if (!row.is("path", "mixed")) return row.text("path");
  static constexpr const char* kNames[] = {"lsa", "gda", "proxy"};
  std::string list;
  for (int peer = 0; peer < static_cast<int>(row.number("ranks")); ++peer) {
    // The same from both ends; our own entry is lsa.
    const char* name = peer == rank ? "lsa" : kNames[(rank + peer + row.number("seed")) % 3];
    list += (peer ? "," : "") + std::string(name);
  }
  return list;
}

Config config_of(const Row& row, int rank, const Place& place) {
  Config config;
  config.place = place;
  auto& p = config.parameters;
  p["MARROW_PATH"] = path_of(row, rank);
  p["MARROW_WAIT_TIMEOUT"] = "15s";
  p["MARROW_BOOTSTRAP_TIMEOUT"] = "20s";
  if (row.is("path", "gda") || row.is("path", "mixed")) p["MARROW_NIC"] = "softnic";
  p["MARROW_GDA_CQ"] = row.text("cq");
  if (!row.is("network", "auto")) p["MARROW_NETWORK"] = row.text("network");
  if (row.number("depth")) {
    p["MARROW_GDA_DEPTH"] = row.text("depth");
    p["MARROW_PROXY_RING"] = row.text("depth");
  }
  if (row.number("lsa-size")) p["MARROW_LSA_SIZE"] = row.text("lsa-size");
  return config;
}

/// Memory outside of any window, laid out like the outbox.
class Local {
 public:
  Local(Communicator& comm, Machine& machine, std::size_t bytes, bool host)
      : machine_(machine), host_(host) {
    pointer_ = machine.allocate(bytes, host);
    buffer_ = comm.register_local(pointer_, bytes);
  }
  ~Local() {
    buffer_ = {};
    machine_.release(pointer_, host_);
  }
  Local(const Local&) = delete;
  Local& operator=(const Local&) = delete;
  LocalBufferHandle handle() const { return buffer_.handle(); }

 private:
  Machine& machine_;
  bool host_;
  void* pointer_ = nullptr;
  LocalBuffer buffer_;
};

std::string describe(const Report& report, int rank) {
  return "rank " + std::to_string(rank) + ": " + std::to_string(report.errors) +
         " errors; the first: kernel line " + std::to_string(report.line) + ", iteration " +
         std::to_string(report.iteration) + ", peer " + std::to_string(report.peer) + ", index " +
         std::to_string(report.index) + ", got " + std::to_string(report.got) + ", wanted " +
         std::to_string(report.want);
}

}  // namespace

Session::Session(int rank) : rank_(rank) {}

void Session::open(const Row& row, const std::string& id_file) {
  if (!machine_) {
    machine_ = make_machine();
    place_ = machine_->place(rank_, static_cast<int>(row.number("gpus")));
  }
  if (comm_ && key_ == communicator_key(row)) return;
  if (comm_) {
    comm_->close();
    comm_.reset();
  }
  const UniqueId id = meet(rank_, id_file);
  comm_ = std::make_unique<Communicator>(id, static_cast<int>(row.number("ranks")), rank_,
                                         config_of(row, rank_, place_));
  key_ = communicator_key(row);
}

std::string Session::run(const Row& row, const std::string& id_file) {
  try {
    open(row, id_file);
    return run_case(row);
  } catch (const std::exception& error) {
    return "rank " + std::to_string(rank_) + ": " + error.what();
  }
}

std::string Session::close() {
  try {
    if (comm_) comm_->close();
    comm_.reset();
    return {};
  } catch (const std::exception& error) {
    return "rank " + std::to_string(rank_) + ", closing its communicator: " + error.what();
  }
}

std::string Session::run_case(const Row& row) {
  const Case& which = row.which();
  const int nranks = static_cast<int>(row.number("ranks"));
  const bool gpu = place_.on_gpu();
  const int rank = rank_;
  const Place& place = place_;
  Communicator& comm = *comm_;

  const std::vector<std::string> wanted = split(path_of(row, rank));
  for (const PeerInfo& peer : comm.peers()) {
    const std::string& want = wanted[wanted.size() == 1 ? 0 : peer.rank];
    if (name(peer.path) != want && (peer.rank != rank || want != "lsa")) {
      return "rank " + std::to_string(rank) + " reaches rank " + std::to_string(peer.rank) +
             " by " + name(peer.path) + ", the row asks for " + want;
    }
  }

  Args args;
  const bool sized = (which.traits & kSized) != 0;
  args.bytes = sized ? row.number("bytes") : which.bytes;
  args.base = row.number("far") ? (std::uint64_t{4} << 30) + (std::uint64_t{1} << 20) : 0;
  const std::string& shift = row.text("shift");
  if (shift == "target" || shift == "both") args.target_shift = 1 + row.number("seed") % 15;
  if (shift == "source" || shift == "both") args.source_shift = 1 + row.number("seed") * 5 % 15;
  args.seed = row.number("seed");
  args.count = row.number("count");
  args.delay_ns = static_cast<int>(row.number("delay")) * 1000;
  args.iterations = static_cast<int>(row.number("iterations"));
  if (!args.iterations) {
    // Every thread of every rank spins for the others: many of them on few cores take turns.
    const bool crowded = !gpu && nranks * static_cast<int>(row.number("block")) >= 12;
    args.iterations = args.bytes >= 65536 && sized ? 3
                      : crowded                    ? (which.iterations + 3) / 4
                                                   : which.iterations;
  }
  args.group = row.is("group", "thread") ? Group::thread
               : row.is("group", "warp") ? Group::warp
                                         : Group::block;
  args.use_local = row.is("source", "local");

  Requirements requirements;
  requirements.contexts = static_cast<int>(row.number("contexts"));
  requirements.signals = 2 * nranks + 4;
  requirements.counters = 16;
  requirements.packets = 2 * nranks + 2;
  requirements.sharing = row.is("sharing", "thread")  ? Sharing::thread
                         : row.is("sharing", "block") ? Sharing::block
                                                      : Sharing::device;
  // A little before the wrap, so that the case crosses it.
  if (row.is("index", "wrap16")) requirements.first_index = (std::uint64_t{1} << 16) - 20;
  if (row.is("index", "wrap32")) requirements.first_index = (std::uint64_t{1} << 32) - 20;
  args.context = requirements.contexts - 1;

  const Memory memory = row.is("memory", "host") ? Memory::host : Memory::device;
  const std::uint64_t slots = slot_stride(args.bytes) * static_cast<std::uint64_t>(nranks);
  Window inbox = comm.allocate(args.base + slots + kWords * 8, memory);
  Window outbox = comm.allocate(slots, memory);
  Window reports = comm.allocate(4096, Memory::host);
  Local local(comm, *machine_, slots, memory == Memory::host);
  DeviceCommunicatorOwner device = comm.device_communicator(requirements);
  args.comm = device.handle();
  args.inbox = inbox.handle();
  args.outbox = outbox.handle();
  args.local = local.handle();
  args.report = static_cast<Report*>(reports.data());
  const Report& report = *new (reports.host()) Report;

  launch_prepare(place, args);
  comm.synchronize();
  comm.barrier();
  const int block = static_cast<int>(row.number("block"));
  int grid = static_cast<int>(row.number("grid"));
  if (grid == 0) grid = (which.traits & kManyPosters) ? (gpu ? 4 : 2) : 1;
  which.launch(place, grid, block, args);
  comm.synchronize();
  if (report.errors) {
    const std::string text = describe(report, rank);
    std::string why;
    try {
      comm.check();
    } catch (const std::exception& error) {
      why = std::string("; check(): ") + error.what();
    }
    comm.revoke("conformance case " + std::string(which.name) + " failed");
    return text + why;
  }
#if defined(MARROW_CHECKED)
  const bool must_throw = (which.traits & (kCheckThrows | kReports)) != 0;
#else
  const bool must_throw = (which.traits & kCheckThrows) != 0;
#endif
  try {
    comm.check();
    if (must_throw) return "check() should have thrown, and did not";
  } catch (const Error& error) {
    if (!must_throw) return std::string("check(): ") + error.what();
  }
  comm.barrier();
  device.close();
  reports.close();
  outbox.close();
  inbox.close();
  return {};
}

}  // namespace marrow::conformance
