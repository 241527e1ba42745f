// SPDX-License-Identifier: Apache-2.0
// The table itself. To add a parameter: one entry here, in alphabetical order (a test checks it).
#include "base/parameters.hpp"

#include <algorithm>
#include <array>

#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::base {
namespace {

constexpr std::int64_t kDay = 24 * 3600 * 1000LL;  // ms; longer waits than a day are not waits

constexpr Parameter flag(std::string_view name, std::string_view value, std::string_view owner,
                         std::string_view help) {
  return {name, ParameterType::boolean, value, 0, 1, false, {}, owner, help};
}
constexpr Parameter integer(std::string_view name, std::string_view value, std::int64_t minimum,
                            std::int64_t maximum, std::string_view owner, std::string_view help) {
  return {name, ParameterType::integer, value, minimum, maximum, false, {}, owner, help};
}
constexpr Parameter power_of_two(std::string_view name, std::string_view value,
                                 std::int64_t minimum, std::int64_t maximum, std::string_view owner,
                                 std::string_view help) {
  return {name, ParameterType::integer, value, minimum, maximum, true, {}, owner, help};
}
constexpr Parameter duration(std::string_view name, std::string_view value, std::int64_t minimum,
                             std::int64_t maximum, std::string_view owner, std::string_view help) {
  return {name, ParameterType::duration, value, minimum, maximum, false, {}, owner, help};
}
constexpr Parameter size(std::string_view name, std::string_view value, std::int64_t minimum,
                         std::int64_t maximum, std::string_view owner, std::string_view help) {
  return {name, ParameterType::size, value, minimum, maximum, false, {}, owner, help};
}
constexpr Parameter text(std::string_view name, std::string_view value, std::string_view owner,
                         std::string_view help) {
  return {name, ParameterType::string, value, 0, 0, false, {}, owner, help};
}
constexpr Parameter choice(std::string_view name, std::string_view value, std::string_view choices,
                           std::string_view owner, std::string_view help) {
  return {name, ParameterType::choice, value, 0, 0, false, choices, owner, help};
}

constexpr std::array kTable = {
    duration("MARROW_BOOTSTRAP_TIMEOUT", "60s", 10, kDay, "bootstrap",
             "How long set-up and teardown wait for the other ranks."),
    text("MARROW_CHECKED_REPORT", "", "device",
         "File that also receives the reports of a MARROW_CHECKED build (bounds, alignment, bad "
         "peer, "
         "signal or context, with file and line), one a line. Empty: those that check() has not "
         "thrown when the communicator closes go to the log, as WARN."),
    integer(
        "MARROW_CPU_LANES", "1", 1, 32, "device",
        "Lanes (OS threads) in a warp when a kernel runs on the CPU. 1 is fastest, 4 makes warp "
        "code race."),
    integer("MARROW_CPU_SEED", "0", 0, INT64_MAX, "device",
            "Seed of the random pauses that kernels on the CPU take at their synchronisation "
            "points, to find schedules that rarely happen. 0: no pauses."),
    choice("MARROW_DEBUG", "WARN", "NONE|VERSION|WARN|INFO|TRACE", "log", "How much is logged."),
    text("MARROW_DEBUG_FILE", "", "log",
         "File that receives the log; %h is the host, %p the process number. Empty: stderr."),
    text("MARROW_DEBUG_SUBSYS", "", "log",
         "Subsystems whose INFO and TRACE lines are logged, separated by commas; a leading ^ means "
         "all but these. Empty: all."),
    choice("MARROW_GDA_CQ", "ring", "ring|collapsed", "gda",
           "Completion queues of the gda path: a ring keeps the exact syndrome of each failed "
           "operation, collapsed is one entry that only says which queue failed."),
    power_of_two("MARROW_GDA_DEPTH", "1024", 32, 32768, "gda",
                 "Work queue entries (64 bytes each) per queue pair of the gda path."),
    integer(
        "MARROW_GID_INDEX", "-1", -1, 255, "verbs",
        "Index in the port's GID table, for RoCE: which address and RoCE version packets use. -1: "
        "RoCE v2 before v1, an IPv4 address before a global IPv6 one before a link-local one."),
    integer("MARROW_LSA_SIZE", "0", 0, 1 << 20, "topology",
            "Ranks per load/store team. 0: all that can reach each other. k splits a host into "
            "teams of k, so that NIC and proxy paths run between GPUs that share NVLink."),
    flag("MARROW_MULTIMEM", "0", "core",
         "Kept for NVLink multicast in Multimem; no effect in this version, which loops over the "
         "peers. A crash while multicast is in use can put a host's GPUs out of service."),
    text("MARROW_NETWORK", "auto", "core",
         "Network under the proxy path: auto, the name of a built-in one, or the path of a plugin "
         "(.so); options of a network follow a '?'."),
    text("MARROW_NIC", "auto", "gda",
         "NIC of the gda path and of the verbs network: auto (the nearest to the GPU of the real "
         "ones "
         "that can be used, else softnic), softnic, none, or a device such as mlx5_0 or mlx5_0:2 "
         "(its second port). The "
         "libfabric network takes the name of one of its devices, such as eth0."),
    text("MARROW_PATH", "auto", "topology",
         "Path to the peers: auto, lsa, gda, proxy, or a comma list with one entry per peer rank."),
    duration("MARROW_PEER_TIMEOUT", "30s", 100, kDay, "bootstrap",
             "Silence after which a peer counts as failed. Before that it is slow."),
    text("MARROW_PROXY_CPUS", "auto", "proxy",
         "Where progress threads run: auto (the CPUs near the network's device, or near the GPU), "
         "none, or CPUs as in 2-5,8: thread t on the t-th of them."),
    power_of_two("MARROW_PROXY_RING", "1024", 16, 1 << 20, "proxy",
                 "Descriptors (64 bytes each) per ring of the proxy path."),
    integer(
        "MARROW_PROXY_SLEEP_US", "100", 1, 100000, "proxy",
        "Microseconds that an idle progress thread sleeps at a time, up to half of it longer where "
        "the kernel so chooses: the latency of the first operation after a pause, against the load "
        "of an idle job."),
    integer("MARROW_PROXY_SPINS", "64", 0, 1000000000, "proxy",
            "Passes that a progress thread spins after its last work, before it yields its core "
            "and then sleeps."),
    choice(
        "MARROW_PROXY_STAGE", "auto", "auto|always|never", "proxy",
        "Windows and local buffers that the network cannot read and write (GPU memory): auto "
        "stages "
        "them through pinned host memory, never refuses them, always stages all of them, whatever "
        "the memory and the network, for tests."),
    size("MARROW_PROXY_STAGE_BYTES", "64M", 0, INT64_C(1) << 40, "proxy",
         "Pinned host memory of one rank for staging, shared out among its peers; allocated with "
         "the "
         "first window or buffer that is staged. At least 64 KiB a peer are taken. The same on "
         "every "
         "rank."),
    size("MARROW_PROXY_STAGE_KERNEL_BYTES", "32K", 0, 65536, "proxy",
         "Puts from staged memory of at most so many bytes are written to pinned memory by the "
         "kernel itself, larger ones by the GPU's copy engine. 0: all by the copy engine."),
    size("MARROW_PROXY_STAGE_THREAD_BYTES", "4K", 0, 65536, "proxy",
         "And of at most so many bytes for each calling thread: one alone takes longer than a copy "
         "engine does to start."),
    integer("MARROW_PROXY_THREADS", "1", 1, 64, "proxy",
            "Progress threads per communicator on the proxy path."),
    text("MARROW_RENDEZVOUS", "", "bootstrap",
         "Where ranks without a launcher's help meet: tcp://host:port or file:///path. Rank 0 "
         "listens "
         "on the address given, behind a name on all of its addresses. RANK and WORLD_SIZE (or the "
         "launcher's variables) still say who is who."),
    text("MARROW_SECRET_FILE", "", "bootstrap",
         "File with the job's secret (at least 16 bytes, readable by the user only), the same on "
         "all hosts. Needed for tcp:// rendezvous beyond this host."),
    text("MARROW_SOCKET_IFNAME", "", "bootstrap",
         "Network interfaces of the bootstrap and of the libfabric network: comma list of name "
         "prefixes, = in front means exact, "
         "^ means all but these. Empty: all but loopback and docker."),
    text("MARROW_SOFTNIC", "", "softnic",
         "Engine and faults of softnic, key=value separated by commas: engine=auto|cpu|gpu|copy "
         "(copy: a CPU thread that reaches GPU memory by copies, slow), seed=N, delay=US, "
         "reorder=1, drop=N, "
         "corrupt=N, error_at=N, stall=N[:MS], retry=MS, atomics=hca, port=roce, start_index=N, "
         "job=NAME. N "
         "counts operations of a process. Empty: a perfect NIC without delays."),
    choice("MARROW_VERBS_CONNECT", "lazy", "lazy|eager", "verbs",
           "When the verbs network connects a pair of ranks: with its first operation, or all "
           "pairs at "
           "set-up."),
    integer(
        "MARROW_VERBS_CREDITS", "64", 2, 16384, "verbs",
        "Receives posted per peer of the verbs network: messages that may be under way before the "
        "receiver has looked."),
    integer("MARROW_VERBS_DEPTH", "256", 16, 16384, "verbs",
            "Send queue entries per peer of the verbs network."),
    integer("MARROW_VERBS_RETRIES", "7", 0, 7, "verbs",
            "How often the NIC sends again without an answer before the peer has failed."),
    integer("MARROW_VERBS_RNR_RETRIES", "7", 0, 7, "verbs",
            "How often the NIC sends again when the receiver has no receive posted; 7: for ever. "
            "Credits keep that from happening."),
    integer("MARROW_VERBS_SERVICE_LEVEL", "0", 0, 15, "verbs",
            "Service level (InfiniBand) or priority (RoCE) of the verbs network and the gda path."),
    integer(
        "MARROW_VERBS_TIMEOUT", "18", 0, 31, "verbs",
        "Time without an answer after which the NIC sends again: 4.096 us * 2^N, 0: for ever. With "
        "the default and 7 retries a link may be down for about 8 s; NICs may wait up to four "
        "times as long."),
    integer(
        "MARROW_VERBS_TRAFFIC_CLASS", "0", 0, 255, "verbs",
        "Traffic class (DSCP and ECN bits) of RoCE packets of the verbs network and the gda path."),
    duration("MARROW_WAIT_TIMEOUT", "30s", 1, kDay, "device",
             "Default bound of each wait inside a kernel."),
};

}  // namespace

std::span<const Parameter> parameters() noexcept { return kTable; }

const Parameter& parameter(std::string_view name) {
  auto found = std::lower_bound(kTable.begin(), kTable.end(), name,
                                [](const Parameter& p, std::string_view n) { return p.name < n; });
  if (found == kTable.end() || found->name != name) {
    throw Error(Code::internal, cat("Parameter ", name, " was asked for but never declared."),
                "declare it in src/base/parameters.cpp.");
  }
  return *found;
}

}  // namespace marrow::base
