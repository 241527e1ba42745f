// SPDX-License-Identifier: Apache-2.0
// admit() and rejoin(): a new process takes the place of a failed rank.
//
// Everything that names peers is taken apart on every survivor and made again by the same collectives
// that made it first, in the same order, with the newcomer as one of the ranks. The newcomer's program
// makes its windows and device communicators as it would at start; each of these calls is the
// newcomer's half of a step of the survivors' admit(). So there is one code path for set-up, every size
// is compared, and signals, counters, barrier words, packets and queues are as new on every rank. Only
// the windows' own memory stays.
//
// reconnect() does the same without a newcomer, where a connection between two that live has broken.
//
// If the newcomer dies half way, survivors are left without windows (torn_) until agree_failures(),
// which makes them again among the survivors.
#include <algorithm>

#include "base/log.hpp"
#include "base/text.hpp"
#include "core/device_state.hpp"
#include "core/state.hpp"
#include "core/window.hpp"

namespace marrow::core {
namespace {

std::string describe(const Recipe& recipe) {
  const auto& v = recipe.values;
  switch (recipe.what) {
    case Recipe::What::allocated:
      return base::cat("allocate(", v[0], " bytes, Memory::", v[1] == 0 ? "device" : "host", ")");
    case Recipe::What::registered: return base::cat("register_window(", v[0], " bytes)");
    case Recipe::What::device_communicator:
      return base::cat("device_communicator(", v[0], " contexts, ", v[1], " signals, ", v[2],
                       " counters, ", v[3], " barriers, ", v[4], " packets)");
  }
  return "another object";
}

/// The first words between survivors and newcomer.
struct Meeting {
  std::uint32_t abi = kAbiVersion;
  std::int32_t objects = 0;  ///< what a survivor has; a newcomer says -1
};

}  // namespace

void CommunicatorState::require_admitted(const char* what) const {
  if (to_make_ == 0) return;
  throw Error(
      Code::invalid_argument,
      base::cat(what, " while rank ", bootstrap_->rank(), " is being admitted"),
      base::cat("first make the survivors' windows and device communicators, in their order: ",
                to_make_, " are missing"));
}

std::string CommunicatorState::why_torn() const {
  return torn_ ? "an admission or a reconnect() did not finish" : "it was not made again";
}

void CommunicatorState::begin_making(const Recipe& recipe) {
  if (torn_ && !rebuilding_) {
    throw Error(Code::peer_failed,
                base::cat(describe(recipe), " after an admission or a reconnect() that failed"),
                "call agree_failures() on every survivor");
  }
  if (newcomer_ < 0) return;
  const std::vector<Recipe> recipes = allgather(recipe);
  for (int r = 0; r < nranks(); ++r) {
    Recipe same = recipes[r];
    same.number = 0;
    Recipe mine = recipe;
    mine.number = 0;
    if (masked_[r] || same == mine) continue;
    int survivor = 0;
    while (masked_[survivor] || survivor == newcomer_) ++survivor;
    throw Error(Code::mismatch,
                base::cat("object ", recipes[survivor].number, " of the survivors is ",
                          describe(recipes[survivor]), "; rank ", newcomer_,
                          ", which is being admitted, called ", describe(recipes[newcomer_])),
                "make the same windows and device communicators as the survivors have open, in the "
                "order in which they were made");
  }
}

void CommunicatorState::end_making() {
  ++made_;
  if (to_make_ > 0 && --to_make_ == 0) finish_admission();
}

void CommunicatorState::meet_newcomer(int objects) {
  Meeting mine;
  mine.objects = objects;
  const std::vector<Meeting> all = allgather(mine);
  int survivor = 0;
  while (masked_[survivor] || survivor == newcomer_) ++survivor;
  for (int r = 0; r < nranks(); ++r) {
    if (masked_[r]) continue;
    if (all[r].abi != all[survivor].abi) {
      throw Error(Code::version,
                  base::cat("rank ", r, " has ABI ", all[r].abi, ", rank ", survivor, " ABI ",
                            all[survivor].abi),
                  "start the replacement with the survivors' version of Marrow");
    }
    if (r == newcomer_) {
      if (all[r].objects < 0) continue;
      throw Error(Code::mismatch, base::cat("rank ", r, " is not a replacement"),
                  "make it with Communicator::rejoin");
    }
    if (all[r].objects == all[survivor].objects) continue;
    throw Error(Code::mismatch,
                base::cat("rank ", r, " has ", all[r].objects,
                          " windows and device communicators open, rank ", survivor, " ",
                          all[survivor].objects),
                "open and close them on every rank");
  }
  if (objects < 0) to_make_ = all[survivor].objects;
}

/// Local, after every rank's kernels have ended and its proxy threads have stopped.
void CommunicatorState::take_apart() {
  for (const auto& device : devices_) device->release();
  for (LocalBufferState* buffer : buffers_) buffer->suspend();
  for (const auto& window : windows_) window->suspend();
  std::unique_ptr<proxy::Transport> proxy;
  {
    std::lock_guard lock(mutex_);  // the bootstrap's thread may be telling it of a failure
    proxy = std::move(proxy_);
  }
  proxy.reset();
  nic_.reset();
  gda_reason_.clear();
  next_id_ = 0;
}

/// Collective, after take_apart(). A newcomer's side: join_survivors(), then its own calls.
void CommunicatorState::rebuild() {
  rebuilding_ = true;
  plan_ = {};
  choose_paths();
  together("registering local buffers again", [&] {
    for (LocalBufferState* buffer : buffers_) buffer->attach();
  });
  std::vector<std::pair<std::uint32_t, std::function<void()>>> steps;
  for (const auto& window : windows_)
    steps.emplace_back(window->recipe().number, [this, &window] { window->rebuild(*this); });
  for (const auto& device : devices_)
    steps.emplace_back(device->recipe().number, [this, &device] { device->rebuild(*this); });
  std::sort(steps.begin(), steps.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [number, step] : steps) step();
  finish_admission();
}

void CommunicatorState::finish_admission() {
  bootstrap_->barrier();  // every rank has made everything
  newcomer_ = -1;
  rebuilding_ = torn_ = false;
}

void CommunicatorState::admit(int rank, std::chrono::milliseconds deadline) {
  require_admitted("admit()");
  if (closed_) {
    throw Error(Code::invalid_argument, base::cat("admit(", rank, ") after close()"),
                "make a new communicator");
  }
  synchronize();  // our kernels: none of this communicator may run meanwhile
  bootstrap_->admit(rank, base::Deadline::after(deadline));
  // From here on windows and queues are taken apart: what fails is mended by agree_failures().
  torn_ = true;
  newcomer_ = rank;
  try {
    {
      std::lock_guard lock(mutex_);
      masked_[rank] = false;
      slow_periods_[rank] = 0;
    }
    meet_newcomer(static_cast<int>(windows_.size() + devices_.size()));
    for (const auto& device : devices_) device->stop();
    bootstrap_->barrier();  // no proxy thread of any rank touches anything any more
    take_apart();
    faults_->admitted(rank);
    rebuild();
  } catch (...) {
    newcomer_ = -1;
    rebuilding_ = false;
    throw;
  }
  MARROW_INFO(core, "rank ", rank, " was replaced");
}

/// Collective of those who are here. What fails is mended by agree_failures().
void CommunicatorState::make_again() {
  torn_ = true;
  for (const auto& device : devices_) device->stop();
  bootstrap_->barrier();  // no proxy thread of any rank touches anything any more
  take_apart();
  try {
    rebuild();
  } catch (...) {
    rebuilding_ = false;
    throw;
  }
}

void CommunicatorState::reconnect() {
  require_admitted("reconnect()");
  if (closed_)
    throw Error(Code::invalid_argument, "reconnect() after close()", "make a new communicator");
  synchronize();  // our kernels: none of this communicator may run meanwhile
  constexpr std::uint64_t kCall =
      0x7265636f6e6e6563;  // any number that other collectives do not send
  try {
    same_on_all("the call reconnect()", kCall);
  } catch (const Error& error) {
    if (error.code() != Code::timeout) throw;
    // The others may still come to what we have left: agreeing begins all counts anew.
    throw Error(Code::timeout, base::cat("reconnect(): ", error.sentence()),
                "nothing has changed here; call agree_failures() on every rank, then reconnect()");
  }
  make_again();
  faults_->agreed(masked_);  // what the old connections had to say is over
  MARROW_INFO(core, "connections, windows and device communicators were made again");
}

/// The newcomer's half of admit(), up to the objects, which its program makes.
void CommunicatorState::join_survivors() {
  meet_newcomer(-1);
  bootstrap_->barrier();  // the survivors' proxy threads have stopped
  choose_paths();
  together("registering local buffers again", [] {});
  if (to_make_ == 0) finish_admission();
}

void CommunicatorState::rebuild_if_torn() {
  const std::vector<std::uint8_t> torn = allgather(static_cast<std::uint8_t>(torn_));
  if (std::none_of(torn.begin(), torn.end(), [](auto t) { return t != 0; })) return;
  make_again();
}

}  // namespace marrow::core
