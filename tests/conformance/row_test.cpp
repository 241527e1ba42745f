// SPDX-License-Identifier: Apache-2.0
// Rows of marrow_conformance_gpu, looked at without a GPU: row.cpp is compiled for it, with a case of its own.
// What a path reaches of a GPU's memory must have rows, or a matrix passes because it is empty.
#include "conformance/row.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace marrow::conformance {

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {{"one", "", nullptr, kSized},
                                        {"words", "", nullptr, kWindowWords}};
  return all;
}

namespace {

std::vector<Row> rows(const std::string& path, const std::string& memory, const std::string& as) {
  Columns columns;
  for (const Parameter& p : parameters()) {
    const std::string_view name = p.name;
    columns.emplace_back(p.name, split(name == "case"     ? "one,words"
                                       : name == "path"   ? path
                                       : name == "memory" ? memory
                                       : name == "as"     ? as
                                       : name == "block"  ? "32,128"
                                       : name == "gpus"   ? "2"
                                                          : p.matrix));
  }
  std::vector<Row> found;
  for (const Row& row : pairwise(columns, 1)) {
    if (row.is("path", path) && row.is("memory", memory) && row.is("as", as) && possible(row))
      found.push_back(row);
  }
  return found;
}

struct Reach {
  const char* path;
  const char* memory;
  const char* kind;
};

TEST(GpuRows, EachMemoryThatAPathReachesHasRows) {
  for (const Reach& reach :
       {Reach{"lsa", "device", "measured"}, Reach{"lsa", "host", "measured"},
        Reach{"gda", "device", "emulated"}, Reach{"gda", "host", "emulated"},
        Reach{"proxy", "device", "measured"}, Reach{"proxy", "host", "measured"},
        Reach{"mixed", "host", "emulated"}}) {
    for (const char* as : {"threads", "processes"}) {
      EXPECT_GT(rows(reach.path, reach.memory, as).size(), 10u)
          << reach.path << " " << reach.memory << " " << as;
    }
    EXPECT_EQ(kind_of(reach.path), reach.kind) << reach.path;
  }
}

TEST(GpuRows, WordsAreWhereTheyCanBeAddedTo) {
  const auto words = [](const char* path, const char* memory) {
    const std::vector<Row> all = rows(path, memory, "threads");
    return std::any_of(all.begin(), all.end(),
                       [](const Row& row) { return row.is("case", "words"); });
  };
  EXPECT_TRUE(words("gda", "device"));
  EXPECT_TRUE(words("gda", "host"));
  EXPECT_TRUE(words("lsa", "device"));
  EXPECT_FALSE(words("lsa", "host"));
  EXPECT_FALSE(words("proxy", "device"));
  EXPECT_TRUE(words("proxy", "host"));
}

// The first windows of a communicator decide who executes its gda queues.
TEST(GpuRows, ACommunicatorHasWindowsOfOneMemory) {
  const auto key = [](const char* path, const char* memory) {
    Row row;
    row.set("case", "one");
    row.set("path", path);
    row.set("memory", memory);
    return communicator_key(row);
  };
  EXPECT_NE(key("gda", "host"), key("gda", "device"));
  EXPECT_EQ(key("lsa", "host"), key("lsa", "device"));
}

}  // namespace
}  // namespace marrow::conformance
