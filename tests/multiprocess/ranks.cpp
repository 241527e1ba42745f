// SPDX-License-Identifier: Apache-2.0
#include "multiprocess/ranks.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <thread>

namespace marrow::test {
namespace {

std::map<std::string, Role>& roles() {
  static std::map<std::string, Role> table;
  return table;
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
/// Whole or not at all.
void write_file(const std::string& path, const std::string& text) {
  const std::string unfinished = path + ".new";
  std::ofstream(unfinished, std::ios::binary) << text;
  std::filesystem::rename(unfinished, path);
}
std::string message_file(const RankContext& self, int who, const std::string& what) {
  return self.folder + "/" + std::to_string(who) + "." + what;
}

}  // namespace

RoleEntry::RoleEntry(const char* name, Role role) { roles()[name] = role; }

std::int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void RankContext::say(const std::string& what, const std::string& text) const {
  write_file(message_file(*this, rank, what), text);
}

std::string RankContext::hear(int who, const std::string& what, Milliseconds deadline) const {
  const std::string path = message_file(*this, who, what);
  const auto end = std::chrono::steady_clock::now() + deadline;
  while (!std::filesystem::exists(path)) {
    if (std::chrono::steady_clock::now() > end) {
      throw Error(Code::timeout, "rank " + std::to_string(who) + " did not say " + what);
    }
    std::this_thread::sleep_for(Milliseconds(1));
  }
  return read_file(path);
}

UniqueId RankContext::id(const std::string& name) const {
  if (rank == 0) {
    const UniqueId id = UniqueId::create();
    say(name, std::string(reinterpret_cast<const char*>(id.bytes().data()), UniqueId::kSize));
    return id;
  }
  return made_id(name);
}

UniqueId RankContext::made_id(const std::string& name) const {
  const std::string text = hear(0, name);
  return UniqueId::from_bytes(std::as_bytes(std::span(text)));
}

Config RankContext::config() const {
  Config config;
  if (argument == "mixed") {
    config.parameters["MARROW_LSA_SIZE"] = "2";  // gda between teams
    config.parameters["MARROW_NIC"] = "softnic";
  } else if (!argument.empty())
    config.parameters["MARROW_PATH"] = argument;
  if (argument == "gda") config.parameters["MARROW_NIC"] = "softnic";
  return config;
}

Ranks::Ranks(const std::string& role, int nranks, const std::string& argument,
             const std::map<std::string, std::string>& environment) {
  context_.nranks = nranks;
  context_.argument = argument;
  context_.folder = (std::filesystem::temp_directory_path() / "marrow-ranks-XXXXXX").string();
  if (!mkdtemp(context_.folder.data())) throw std::runtime_error("no temporary folder");
  environment_ = environment;
  children_.assign(nranks, -1);
  for (int rank = 0; rank < nranks; ++rank) start(role, rank, argument);
}

void Ranks::start(const std::string& role, int rank, const std::string& argument) {
  if (children_[rank] > 0) {
    (void)kill(children_[rank], SIGKILL);
    (void)waitpid(children_[rank], nullptr, 0);
  }
  std::vector<std::string> words{
      "/proc/self/exe", "--role", role, std::to_string(rank), std::to_string(context_.nranks),
      context_.folder,  argument};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string log = message_file(context_, rank, "log");
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child == 0) {
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    const int fd = open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0600);
    if (fd < 0 || dup2(fd, 1) < 0 || dup2(fd, 2) < 0) _exit(1);
    for (const auto& [name, value] : environment_) setenv(name.c_str(), value.c_str(), 1);
    execv(argv[0], argv.data());
    _exit(127);
  }
  children_[rank] = child;
}

Ranks::~Ranks() {
  for (const pid_t child : children_) {
    if (child <= 0) continue;
    (void)kill(child, SIGKILL);
    (void)waitpid(child, nullptr, 0);
  }
  std::error_code ignored;
  std::filesystem::remove_all(context_.folder, ignored);
}

void Ranks::signal(int rank, int number) {
  if (children_[rank] > 0) (void)kill(children_[rank], number);
}

bool Ranks::all_said(const std::vector<int>& ranks, const std::string& what,
                     Milliseconds deadline) {
  for (const int rank : ranks) {
    try {
      (void)context_.hear(rank, what, deadline);
    } catch (const Error&) {
      ADD_FAILURE() << "rank " << rank << " did not say " << what << "; its log:\n"
                    << read_file(message_file(context_, rank, "log"));
      return false;
    }
  }
  return true;
}

std::string Ranks::result(int rank, Milliseconds deadline) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  int status = 0;
  while (children_[rank] > 0 && waitpid(children_[rank], &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > end) {
      return "rank " + std::to_string(rank) + " is stuck; its log:\n" +
             read_file(message_file(context_, rank, "log"));
    }
    std::this_thread::sleep_for(Milliseconds(2));
  }
  children_[rank] = -1;
  if (WIFSIGNALED(status))
    return "signal " + std::to_string(WTERMSIG(status)) + "\n" +
           read_file(message_file(context_, rank, "log"));
  const std::string text = read_file(message_file(context_, rank, "result"));
  if (status != 0)
    return "exit " + std::to_string(WEXITSTATUS(status)) + ": " + text + "\n" +
           read_file(message_file(context_, rank, "log"));
  return text;
}

namespace {

int run_role(char** argv) {
  RankContext self;
  self.rank = std::atoi(argv[3]);
  self.nranks = std::atoi(argv[4]);
  self.folder = argv[5];
  self.argument = argv[6];
  std::string result;
  try {
    result = roles().at(argv[2])(self);
  } catch (const std::exception& error) {
    result = std::string("threw ") + error.what();
  }
  self.say("result", result);
  return 0;
}

}  // namespace
}  // namespace marrow::test

int main(int argc, char** argv) {
  if (argc == 7 && std::strcmp(argv[1], "--role") == 0) return marrow::test::run_role(argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
