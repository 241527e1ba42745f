// SPDX-License-Identifier: Apache-2.0
// Golden test of what each operation compiles to: number, scope and order of fences, releases,
// acquires and single-copy stores. Needs nvcc, no GPU; it is never a timing. A fence that appears or
// vanishes here costs half a microsecond or an answer, so a change must be meant.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

namespace {

using List = std::vector<std::string>;

std::string find_nvcc() {
  std::string candidates = std::getenv("PATH") ? std::getenv("PATH") : "";
  candidates += ":/usr/local/cuda/bin";
  std::istringstream folders(candidates);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string path = folder + "/nvcc";
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  return {};
}

/// Each kernel's own lines.
std::map<std::string, List> read_lines(const std::string& file) {
  std::map<std::string, List> out;
  static const std::regex entry(R"(\.entry\s+(\w+))");
  std::ifstream in(file);
  std::string kernel;
  std::smatch match;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(".func", 0) == 0 || line.rfind(".visible .func", 0) == 0) kernel.clear();
    if (std::regex_search(line, match, entry)) kernel = match[1];
    if (!kernel.empty()) out[kernel].push_back(line);
  }
  return out;
}

/// The instructions that order memory, by kernel: operands, `volatile` and state spaces are dropped, plain
/// loads and stores too.
std::map<std::string, List> read_ptx(const std::string& file) {
  std::map<std::string, List> out;
  static const std::regex entry(R"(\.entry\s+(\w+))");
  static const std::regex ordering(
      R"((?:^|[\s{;"])((fence|membar|red|atom)\.[\w.:]+|(st|ld)\.(relaxed|acquire|release)[\w.:]+))");
  std::ifstream in(file);
  std::string kernel;
  std::smatch match;
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(".func", 0) == 0 || line.rfind(".visible .func", 0) == 0) kernel.clear();
    if (std::regex_search(line, match, entry)) {
      kernel = match[1];
      out[kernel];
    } else if (!kernel.empty()) {
      // One line of inline assembly may hold several instructions.
      for (auto at = std::sregex_iterator(line.begin(), line.end(), ordering);
           at != std::sregex_iterator(); ++at) {
        std::string text = (*at)[1];
        const std::size_t space = text.find(".global");
        if (space != std::string::npos) text.erase(space, 7);
        out[kernel].push_back(text);
      }
    }
  }
  return out;
}

class PtxGolden : public testing::TestWithParam<const char*> {
 protected:
  static void SetUpTestSuite() {
    const std::string nvcc = find_nvcc();
    if (nvcc.empty()) return;
    // Both architectures at once: nvcc takes seconds, most of them in one thread.
    std::map<std::string, pid_t> running;
    for (const char* arch : {"90a", "80"}) {
      const std::string file = ptx_file(arch);
      const std::string text =
          nvcc + " -std=c++20 --expt-relaxed-constexpr -DNDEBUG -ptx -arch=compute_" + arch +
          " -I" MARROW_SOURCE_DIR "/include -o " + file +
          " " MARROW_SOURCE_DIR "/tests/unit/ptx_golden_kernels.cu > " + file + ".log 2>&1";
      const pid_t child = fork();
      if (child == 0) {
        execl("/bin/sh", "sh", "-c", text.c_str(), static_cast<char*>(nullptr));
        _exit(127);
      }
      running[arch] = child;
    }
    for (const auto& [arch, child] : running) {
      int status = 1;
      waitpid(child, &status, 0);
      if (status == 0) kernels_[arch] = read_ptx(ptx_file(arch));
    }
  }
  void SetUp() override {
    if (find_nvcc().empty()) GTEST_SKIP() << "no nvcc on PATH or in /usr/local/cuda/bin";
    if (kernels_[GetParam()].empty()) {
      std::ifstream log(ptx_file(GetParam()) + ".log");
      std::stringstream text;
      text << log.rdbuf();
      FAIL() << "nvcc made no PTX for " << GetParam() << ":\n" << text.str();
    }
  }
  static std::string ptx_file(const std::string& arch) {
    return std::string(MARROW_BINARY_DIR) + "/tests/ptx_golden_" + arch + ".ptx";
  }
  const List& of(const std::string& kernel) { return kernels_[GetParam()].at(kernel); }
  /// fence.release came with sm_90; before it the same place holds the dearer fence.acq_rel.
  static std::string release(const std::string& scope) {
    return (std::string(GetParam()) == "90a" ? "fence.release." : "fence.acq_rel.") + scope;
  }

  static std::map<std::string, std::map<std::string, List>> kernels_;
};
std::map<std::string, std::map<std::string, List>> PtxGolden::kernels_;

TEST_P(PtxGolden, PublishIsOneReleaseThenRelaxedStoresInOrder) {
  EXPECT_EQ(of("publish_system"),
            (List{release("sys"), "st.relaxed.sys.b64", "st.relaxed.sys.b64"}));
  EXPECT_EQ(of("publish_device"), (List{release("gpu"), "st.relaxed.gpu.b64"}));
  EXPECT_EQ(of("publish_block"), (List{release("cta"), "st.relaxed.cta.b64"}));
  EXPECT_EQ(of("publication"), (List{release("sys"), "st.relaxed.sys.b64", "st.relaxed.sys.b32",
                                     "red.relaxed.sys.add.u64"}));
}

TEST_P(PtxGolden, PublishAddIsOneReleaseReduction) {
  EXPECT_EQ(of("add_system"), List{"red.release.sys.add.u64"});
  EXPECT_EQ(of("add_device"), List{"red.release.gpu.add.u64"});
}

TEST_P(PtxGolden, ObserveIsOneAcquireLoad) {
  EXPECT_EQ(of("observe_system"), List{"ld.acquire.sys.b64"});
  EXPECT_EQ(of("observe_device"), List{"ld.acquire.gpu.b64"});
}

TEST_P(PtxGolden, SettleIsOneFullFence) { EXPECT_EQ(of("settled"), List{"fence.acq_rel.sys"}); }

TEST_P(PtxGolden, CellsAreOneAccessOf16Bytes) {
  EXPECT_EQ(of("cell_store"), List{"st.relaxed.sys.b128"});
  EXPECT_EQ(of("cell_load"), List{"ld.relaxed.sys.b128"});
}

// Two branches that a put on the lsa path never takes at run time are in its code: the constructor's
// report of a foreign ABI, and the completion of adds when they travel on another path. Its own
// instructions are there twice, for the short way and the long one, and nvcc puts the long one there
// once more behind that completion (whose fence also releases what follows); a put takes one of them.
const char* const kForeignAbi = "st.relaxed.sys.b64";
const char* const kAddsElsewhere = "fence.acq_rel.sys";

TEST_P(PtxGolden, LsaPutAndSignalIsOneReleaseReduction) {
  const List add{"red.release.sys.add.u64"};
  EXPECT_EQ(of("lsa_put_signal"),
            (List{kForeignAbi, kAddsElsewhere, add[0], kAddsElsewhere, add[0], add[0]}));
  EXPECT_EQ(of("lsa_block_put_signal"),
            (List{kForeignAbi, kAddsElsewhere, add[0], add[0], kAddsElsewhere, add[0]}));
  EXPECT_EQ(of("lsa_put"), List{kForeignAbi}) << "a put alone orders nothing";
  EXPECT_EQ(of("lsa_packet"), (List{kForeignAbi, "st.relaxed.sys.b128", "st.relaxed.sys.b128"}));
}

TEST_P(PtxGolden, OrderingKnobSparesTheReleaseOfASignalAlone) {
  EXPECT_EQ(of("lsa_signal_released"), (List{kForeignAbi, kAddsElsewhere, "red.relaxed.sys.add.u64",
                                             kAddsElsewhere, "red.relaxed.sys.add.u64"}));
  EXPECT_EQ(of("lsa_put_released"),
            (List{kForeignAbi, kAddsElsewhere, "red.release.sys.add.u64", kAddsElsewhere,
                  "red.relaxed.sys.add.u64", "red.release.sys.add.u64"}))
      << "the put's own stores need a release";
}

TEST_P(PtxGolden, WaitSignalAcquiresAndNeverFences) {
  int acquires = 0;
  // Besides loads: waiters take turns at reading the host's words.
  const List turns{"atom.relaxed.gpu.cas.b64", "st.relaxed.gpu.b64"};
  for (const std::string& instruction : of("wait_one_signal")) {
    const bool turn = std::find(turns.begin(), turns.end(), instruction) != turns.end();
    EXPECT_TRUE(instruction.rfind("ld.", 0) == 0 || instruction == kForeignAbi || turn)
        << instruction;
    acquires += instruction == "ld.acquire.sys.b64";
  }
  EXPECT_GE(acquires, 1);
}

TEST_P(PtxGolden, ProxyPostsFourCellsBehindAtMostOneRelease) {
  const auto publishing = [&](const std::string& kernel) {
    List list;
    for (const std::string& instruction : of(kernel)) {
      if (instruction.rfind("fence", 0) == 0 || instruction.rfind("st.", 0) == 0)
        list.push_back(instruction);
    }
    return list;
  };
  const List cells(4, "st.relaxed.sys.b128");
  List behind_release = cells;
  behind_release.insert(behind_release.begin(), release("sys"));
  const auto without_sharing_store = [&](List list) {
    // An exclusive queue stores its indices where a shared one has atomics; both are in the code.
    std::erase(list, "st.relaxed.gpu.b64");
    return list;
  };
  EXPECT_EQ(without_sharing_store(publishing("proxy_put_signal")), behind_release);
  EXPECT_EQ(without_sharing_store(publishing("proxy_put_released")), cells)
      << "the caller has released the payload";
  EXPECT_EQ(without_sharing_store(publishing("proxy_value_signal")), cells)
      << "an inline value needs no fence";
}

// The short way of an exclusive context comes first in the code: index and limit in one load, the index, four cells, the
// ticket, nothing at a wider scope than the thread but the cells. Behind it stands the long way, with the wait for
// room.
TEST_P(PtxGolden, ProxyValueOfAnExclusiveContextIsFourCellsAndTwoPlainStores) {
  const List& all = of("proxy_value_alone");
  const List cells(4, "st.relaxed.sys.b128");
  ASSERT_GT(all.size(), 6u);
  EXPECT_EQ(all[0], kForeignAbi);
  EXPECT_TRUE(std::equal(cells.begin(), cells.end(), all.begin() + 1));
  for (const std::string& instruction : all) {
    EXPECT_NE(instruction.rfind("fence", 0), 0u) << instruction;
    EXPECT_NE(instruction.rfind("membar", 0), 0u) << instruction;
  }
}

// What fits a descriptor is read by the kernel; the way with a release behind it is for sources that are not inside their
// region, which the host refuses.
TEST_P(PtxGolden, ProxySmallPutTravelsInItsDescriptorWithoutARelease) {
  const List& all = of("proxy_small_put");
  const List cells(4, "st.relaxed.sys.b128");
  const auto released = std::find(all.begin(), all.end(), release("sys"));
  const auto sent = std::search(all.begin(), all.end(), cells.begin(), cells.end());
  EXPECT_NE(sent, all.end());
  EXPECT_EQ(std::count(all.begin(), all.end(), release("sys")), 1);
  EXPECT_NE(released, all.end());
}

// Lanes that post together share one ring's indices. Whether it is one ring, only its address tells: lanes of a
// warp may post on different device communicators, whose rings have the same numbers.
TEST_P(PtxGolden, LanesPostTogetherOnlyOnOneRingOrQueue) {
  for (const auto& [kernel, lines] : read_lines(ptx_file(GetParam()))) {
    int by_address = 0;
    for (const std::string& line : lines) {
      EXPECT_EQ(line.find("match.any.sync.b32"), std::string::npos) << kernel << ": " << line;
      by_address += line.find("match.any.sync.b64") != std::string::npos;
    }
    if (kernel.find("proxy_put_signal") != std::string::npos) {
      EXPECT_GE(by_address, 1) << kernel;
    }
  }
}

// The short way of a put comes first in the code: one release, record, doorbell. Behind it stands the long
// way: for queues that another processor reads, with the wait for room and what it takes to report failures.
TEST_P(PtxGolden, GdaPutOfOneThreadIsOneReleaseThenRecordThenDoorbell) {
  const List device{release("gpu"), "st.relaxed.sys.b32", "st.relaxed.sys.b64"};
  const List system{release("sys"), "st.relaxed.sys.b32", "st.relaxed.sys.b64"};
  // One doorbell for WRITE and FETCH_ADD, and for the entries of a whole warp.
  for (const char* kernel : {"gda_put_thread", "gda_put_signal_thread", "gda_put_each_lane"}) {
    const List& all = of(kernel);
    ASSERT_GT(all.size(), 4u) << kernel;
    EXPECT_EQ(all[0], kForeignAbi) << kernel;
    EXPECT_TRUE(std::equal(device.begin(), device.end(), all.begin() + 1)) << kernel;
    EXPECT_NE(std::search(all.begin(), all.end(), system.begin(), system.end()), all.end())
        << kernel;
    for (const std::string& instruction : all) {
      EXPECT_NE(instruction.rfind("membar", 0), 0u) << kernel;
      EXPECT_NE(instruction.rfind("red.", 0), 0u) << kernel;
      // Nothing atomic but the first failure, kept by whoever finds it, and whose turn it is to read the
      // host's words.
      if (instruction.rfind("atom.", 0) == 0) {
        EXPECT_EQ(instruction, "atom.relaxed.gpu.cas.b64") << kernel;
      }
    }
  }
}

TEST_P(PtxGolden, GdaPutOnASharedQueueIsOneReservationAndOneHandOver) {
  // The line is empty: guess, take, release, record, doorbell, hand over; once for a lone thread and once for
  // lanes together (their take stands before the lone thread's release). Whoever has to wait does so in a
  // function of its own.
  for (const auto& [kernel, scope, hand_over] :
       {std::tuple{"gda_put_block", "cta", "st.relaxed.cta.b64"},
        std::tuple{"gda_put_device", "gpu", "red.relaxed.gpu.add.u64"}}) {
    const std::string s = scope;
    const List post{release("gpu"),       "st.relaxed.sys.b32",
                    "st.relaxed.sys.b64", "st.relaxed." + s + ".b64",
                    release(s),           hand_over,
                    "st.relaxed.cta.b64"};
    List all{kForeignAbi,          "ld.relaxed.cta.b64",
             "ld.acquire.cta.b64", "atom.relaxed." + s + ".cas.b64",
             release("sys"),       "atom.relaxed." + s + ".cas.b64"};
    all.insert(all.end(), post.begin(), post.end());
    all.push_back(release("sys"));
    all.insert(all.end(), post.begin(), post.end());
    EXPECT_EQ(of(kernel), all) << kernel;
  }
}

// The host may mask a peer while a kernel runs: a loop of puts reads the peer's path each time. Keys and
// addresses are constants, which it may keep.
TEST_P(PtxGolden, GdaPutInALoopReadsThePathEachTime) {
  const List lines = read_lines(ptx_file(GetParam()))["gda_put_loop"];
  static const std::regex label(R"(^(\$\w+):)");
  static const std::regex branch(R"(bra(?:\.uni)?\s+(\$\w+);)");
  std::map<std::string, std::size_t> labels;
  bool read = false, again = false;
  std::smatch match;
  std::size_t load = 0;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    if (!read && lines[i].find("ld.global.u8") != std::string::npos) {
      read = true;
      load = i;
    }
    if (std::regex_search(lines[i], match, label)) labels[match[1]] = i;
    if (read && std::regex_search(lines[i], match, branch) && labels.count(match[1]) &&
        labels[match[1]] < load)
      again = true;
  }
  EXPECT_TRUE(read);
  EXPECT_TRUE(again) << "the first read of the path stands before the loop";
}

// Its L1 is what lets a block trust a guess: the key tells it from all blocks that run, of any kernel.
TEST_P(PtxGolden, AGuessIsForOneBlockOfOneLaunch) {
  const auto kernels = read_lines(ptx_file(GetParam()));
  for (const char* word : {"%gridid", "%ctaid.x", "%ctaid.y", "%ctaid.z"}) {
    const auto reads = [&](const char* kernel) {
      for (const std::string& line : kernels.at(kernel)) {
        if (line.find(word) != std::string::npos) return true;
      }
      return false;
    };
    EXPECT_TRUE(reads("gda_put_device")) << word;
    EXPECT_FALSE(reads("gda_put_block")) << word << " costs, and one block needs no key";
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, PtxGolden, testing::Values("90a", "80"),
                         [](const auto& which) { return std::string("sm_") + which.param; });

}  // namespace
