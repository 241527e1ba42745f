// SPDX-License-Identifier: Apache-2.0
#include "cli/options.hpp"

#include "cli/experiments.hpp"
#include "cli/text.hpp"
#include "marrow/marrow.hpp"

namespace marrow::cli {
namespace {

OptionSpec number(const std::string& name, std::string help, std::int64_t* to, std::int64_t minimum,
                  std::int64_t maximum) {
  return {name, "N", std::move(help),
          [=](const std::string& text) { *to = parse_number(name, text, minimum, maximum); }};
}
OptionSpec number(const std::string& name, std::string help, int* to, int minimum, int maximum) {
  return {name, "N", std::move(help), [=](const std::string& text) {
            *to = static_cast<int>(parse_number(name, text, minimum, maximum));
          }};
}
OptionSpec text(const std::string& name, std::string meta, std::string help, std::string* to) {
  return {name, std::move(meta), std::move(help), [=](const std::string& value) {
            if (value.empty()) throw UsageError(name + " is empty.");
            *to = value;
          }};
}
OptionSpec flag(std::string name, std::string help, bool* to) {
  return {std::move(name), "", std::move(help), [=](const std::string&) { *to = true; }};
}
OptionSpec choice(const std::string& name, std::string help, std::string* to,
                  const std::vector<std::string>& choices) {
  return {name, join(choices, "|"), std::move(help),
          [=](const std::string& value) { *to = parse_choice(name, value, choices); }};
}
OptionSpec json(std::string* to) {
  return text("--json", "FILE", "write the results as bench/schema.json says; - is stdout", to);
}
OptionSpec network(std::string* to) {
  return text(
      "--network", "NAME",
      "network under the proxy (shm, verbs, libfabric, a plugin) or NIC of gda (softnic, mlx5_0)",
      to);
}

void add_rank_options(std::vector<OptionSpec>& options, RankOptions& where, const char* ranks_help,
                      int maximum) {
  options.push_back(number("--ranks", ranks_help, &where.ranks, 1, maximum));
  options.push_back(flag("--processes", "ranks are processes (default: threads of this process)",
                         &where.processes));
  options.push_back({"--place", "cpu|gpu", "where kernels run (default: cpu)",
                     [&where](const std::string& value) {
                       where.gpu = parse_choice("--place", value, {"cpu", "gpu"}) == "gpu";
                     }});
}

CommandSpec demo_command(DemoOptions& o) {
  CommandSpec c{
      Command::demo,
      "demo",
      "four ranks exchange the tokens of a mixture-of-experts layer, checked element by element",
      "  marrow demo\n"
      "  marrow demo --path gda --corrupt                one flipped byte: must fail and name the "
      "element\n"
      "  marrow demo --routing router.jsonl --hidden 64  a router log in vLLM's JSON-lines form\n",
      {}};
  add_rank_options(c.options, o.where, "ranks (default: 4)", 64);
  c.options.push_back(choice("--path", "path to exchange over (default: all, one after the other)",
                             &o.path, {"all", "lsa", "gda", "proxy"}));
  c.options.push_back(network(&o.network));
  c.options.push_back(
      text("--routing", "FILE",
           "router log: a meta line, then one route line a token with topk_ids and topk_weights",
           &o.routing));
  c.options.push_back(
      number("--tokens", "use the first N tokens (default: all of the file; 2048 generated ones)",
             &o.tokens, 1, 1 << 22));
  c.options.push_back(number("--hidden", "float elements a token, a multiple of 4 (default: 128)",
                             &o.hidden, 4, 16384));
  c.options.push_back({"--seed", "N", "seed of token values and of the generator (default: 1)",
                       [&o](const std::string& value) {
                         o.seed = static_cast<std::uint64_t>(
                             parse_number("--seed", value, 0, INT64_MAX));
                       }});
  c.options.push_back(
      flag("--corrupt", "flip one bit of one token on its way: the check must fail", &o.corrupt));
  c.options.push_back(json(&o.json));
  return c;
}

CommandSpec perf_command(PerfOptions& o) {
  CommandSpec c{
      Command::perf,
      "perf",
      "time one operation between ranks, on the device's own clock",
      "  marrow perf put --path lsa --sizes 8,1K,64K..1M\n"
      "  marrow perf put --place gpu --path lsa --sizes 64M --blocks 8 --threads 1024\n"
      "  mpirun -n 2 marrow perf signal        ranks from the launcher (also torchrun, srun)\n"
      "  marrow perf alltoall --ranks 2 --sizes 64K,64M --place gpu --json alltoall.json\n"
      "\nLatencies of put, put_value, signal and packet are half of a round trip; get and barrier "
      "are whole.\n"
      "alltoall: size is a rank's whole buffer, algbw = size / time, busbw = algbw x (n-1)/n, "
      "launch included.\n",
      {}};
  std::vector<std::string> names;
  std::string list;
  for (const Experiment& e : experiments()) {
    names.push_back(e.name);
    list += (list.empty() ? "" : ", ") + e.name;
  }
  c.positional = {"operation", "OPERATION", "one of " + list,
                  [&o, names](const std::string& value) {
                    o.operation = parse_choice("the operation", value, names);
                  }};
  c.options.push_back(choice("--path", "path between the ranks (default: auto, the best one)",
                             &o.path, {"auto", "lsa", "gda", "proxy"}));
  c.options.push_back(network(&o.network));
  add_rank_options(c.options, o.where, "local ranks to start (default: 2)", 64);
  c.options.push_back(
      {"--sizes", "LIST", "bytes: a list such as 8,1K,64K..1M (a..b doubles)",
       [&o](const std::string& value) { o.sizes = parse_sizes("--sizes", value); }});
  c.options.push_back(number("--iterations", "timed iterations (default: by size and place)",
                             &o.iterations, 1, 10'000'000));
  c.options.push_back(number("--warmup", "iterations before the clock counts (default: a tenth)",
                             &o.warmup, 1, 10'000'000));
  c.options.push_back(
      number("--blocks", "blocks of a kernel that moves bulk data", &o.blocks, 1, 1024));
  c.options.push_back(number("--threads", "threads a block", &o.threads, 1, 1024));
  c.options.push_back(choice("--memory", "memory of the windows (default: what the path can use)",
                             &o.memory, {"auto", "device", "host"}));
  c.options.push_back(json(&o.json));
  return c;
}

CommandSpec ep_command(EpOptions& o) {
  CommandSpec c{Command::ep,
                "ep",
                "MoE dispatch and combine between ranks: checked, then timed apart, per rank",
                "  marrow ep\n"
                "  marrow ep --place gpu --ranks 4 --mode exact --graph --json ep.json\n"
                "  marrow ep --place gpu --ranks 4 --processes --sms 24\n"
                "  marrow ep --path gda --routing router.jsonl --hidden 256\n"
                "  marrow ep --place gpu --ranks 4 --compare deepep=/opt/DeepEP\n"
                "\nDefaults: 128 tokens a rank, hidden 7168, top-8 of 256 experts on GPUs; 16, "
                "512, top-4 of 32 on the CPU "
                "device.\n",
                {}};
  add_rank_options(c.options, o.where, "ranks (default: 2)", 64);
  c.options.push_back(number("--tokens", "tokens of a rank in a batch", &o.tokens, 1, 65536));
  c.options.push_back(number("--hidden", "channels of a token", &o.hidden, 16, 16384));
  c.options.push_back(number("--topk", "experts a token chooses", &o.top_k, 1, 32));
  c.options.push_back(number("--experts", "experts of all ranks", &o.experts, 1, 2048));
  c.options.push_back(choice("--payload",
                             "what dispatch sends: fp8 quantises bf16 rows (default: fp8)",
                             &o.payload, {"fp8", "bf16"}));
  c.options.push_back(choice("--mode", "combine: exact sends every expert's row (default: fast)",
                             &o.mode, {"fast", "exact"}));
  c.options.push_back(
      number("--sms", "blocks of a kernel at most (default: all SMs)", &o.sms, 1, 1024));
  c.options.push_back(
      flag("--graph", "time CUDA graphs of 20 instead of single launches", &o.graph));
  c.options.push_back(
      number("--iterations", "timed batches (default: by place)", &o.iterations, 1, 1'000'000));
  c.options.push_back(
      {"--seed", "N", "seed of the routing (default: 1)", [&o](const std::string& value) {
         o.seed = static_cast<std::uint64_t>(parse_number("--seed", value, 0, INT64_MAX));
       }});
  c.options.push_back(
      text("--routing", "FILE", "router log as in demo, in place of uniform routing", &o.routing));
  c.options.push_back(
      text("--compare", "deepep=PATH",
           "also run the low-latency tests of a DeepEP checkout; skipped, and said so, where "
           "it cannot run",
           &o.compare));
  c.options.push_back(choice("--path", "path between the ranks (default: auto, the best one)",
                             &o.path, {"auto", "lsa", "gda", "proxy"}));
  c.options.push_back(network(&o.network));
  c.options.push_back(
      flag("--corrupt", "flip one bit of one dispatched row: the check must fail", &o.corrupt));
  c.options.push_back(json(&o.json));
  return c;
}

CommandSpec info_command(InfoOptions& o) {
  CommandSpec c{
      Command::info,
      "info",
      "GPUs, NICs, networks, the path each pair gets and why better ones were rejected",
      "  marrow info\n  marrow info --ranks 4 --path gda\n  marrow info --place gpu --json -\n",
      {}};
  add_rank_options(c.options, o.where, "ranks to look at (default: 2)", 64);
  c.options.push_back(choice("--path", "ask for this path (default: auto)", &o.path,
                             {"auto", "lsa", "gda", "proxy"}));
  c.options.push_back(network(&o.network));
  c.options.push_back(json(&o.json));
  return c;
}

CommandSpec doctor_command(DoctorOptions& o) {
  CommandSpec c{Command::doctor,
                "doctor",
                "everything the gda path needs of a real NIC: found or missing, and how to fix it",
                "  marrow doctor\n  marrow doctor --nic mlx5_0 --json doctor.json\n"
                "  marrow doctor --nic softnic\n"
                "\nExit code 0: the path can run; 1: something is missing.\n",
                {}};
  c.options.push_back(
      text("--nic", "NAME",
           "look at this one: mlx5_0, softnic (default: MARROW_NIC; auto: all real ones)", &o.nic));
  c.options.push_back(json(&o.json));
  return c;
}

}  // namespace

std::vector<CommandSpec> command_line(Invocation& into) {
  std::vector<CommandSpec> commands;
  commands.push_back(demo_command(into.demo));
  commands.push_back(perf_command(into.perf));
  commands.push_back(ep_command(into.ep));
  commands.push_back(info_command(into.info));
  commands.push_back(doctor_command(into.doctor));
  CommandSpec env{Command::env,
                  "env",
                  "every MARROW_* parameter: value in force, default, range, meaning",
                  "  marrow env\n  marrow env --markdown > docs/env.md\n",
                  {}};
  env.options.push_back(json(&into.env.json));
  env.options.push_back(flag("--markdown", "the page docs/env.md", &into.env.markdown));
  commands.push_back(std::move(env));
  CommandSpec errors{Command::errors,
                     "errors",
                     "every error code: meaning, cause, fix",
                     "  marrow errors\n  marrow errors --markdown > docs/errors.md\n",
                     {}};
  errors.options.push_back(flag("--markdown", "the page docs/errors.md", &into.errors.markdown));
  commands.push_back(std::move(errors));
  return commands;
}

std::string headline() {
  return std::string("marrow ") + version() +
         ": one put, signal and wait over load/store, NIC queues and a proxy";
}

std::string reduced_notice() {
  std::vector<std::string> missing;
  if (!kFullParser) missing.emplace_back("CLI11");
  if (!kFullJson) missing.emplace_back("nlohmann-json");
  if (missing.empty()) return {};
  return "This is the reduced command line, built without " + join(missing, " and ") +
         (kFullJson ? "" : " (no --json, no --routing)") +
         ". For the whole one: install libcli11-dev and nlohmann-json3-dev, then build again.";
}

}  // namespace marrow::cli
