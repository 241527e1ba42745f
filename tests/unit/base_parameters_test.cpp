// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan
// The registry: ranges, units, overrides, sentences of bad values, hints for misspelt names.
#include "base/parameters.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <mutex>
#include <vector>

#include "base/log.hpp"
#include "marrow/error.hpp"

namespace marrow::base {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

/// Sets a variable for a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

std::string failure(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::invalid_argument);
    return error.what();
  }
  return "no error";
}

TEST(Parameters, TableIsSortedAndEveryDefaultIsValid) {
  std::string_view before;
  for (const Parameter& declared : parameters()) {
    EXPECT_LT(before, declared.name);
    before = declared.name;
    EXPECT_TRUE(declared.name.starts_with("MARROW_"));
    EXPECT_FALSE(declared.help.empty()) << declared.name;
    EXPECT_FALSE(declared.owner.empty()) << declared.name;
    if (!declared.default_value.empty()) {
      Parameters settings;
      EXPECT_NO_THROW(settings.set(declared.name, declared.default_value)) << declared.name;
    }
  }
}

TEST(Parameters, DurationsTakeUnits) {
  EXPECT_EQ(parameter_duration("MARROW_PEER_TIMEOUT"), milliseconds(30000));
  const std::pair<const char*, int> cases[] = {
      {"30", 30000}, {"5s", 5000}, {"500ms", 500}, {"2m", 120000}, {"1H", 3600000}};
  for (auto [text, expected] : cases) {
    Variable set("MARROW_PEER_TIMEOUT", text);
    EXPECT_EQ(parameter_duration("MARROW_PEER_TIMEOUT"), milliseconds(expected)) << text;
  }
}

TEST(Parameters, BadValuesAreNamedWithRangeAndNextStep) {
  for (const char* text : {"soon", "-1", "99", "10 s", "3parsecs", "9223372036854775807h"}) {
    Variable set("MARROW_PEER_TIMEOUT", std::string(text) == "99" ? "99ms" : text);
    std::string what = failure([] { parameter_duration("MARROW_PEER_TIMEOUT"); });
    EXPECT_THAT(what, HasSubstr("MARROW_PEER_TIMEOUT=\""));
    EXPECT_THAT(what, HasSubstr("100ms to 86400s"));
    EXPECT_THAT(what, HasSubstr("the environment"));
    EXPECT_THAT(what, HasSubstr("Next: "));
  }
  Variable depth("MARROW_GDA_DEPTH", "1000");
  EXPECT_THAT(failure([] { parameter_int("MARROW_GDA_DEPTH"); }), HasSubstr("a power of two"));
  EXPECT_THAT(failure([] { check_parameters(); }), HasSubstr("MARROW_GDA_DEPTH=\"1000\""));
}

TEST(Parameters, ChoicesIgnoreCaseAndBooleansHaveWords) {
  Variable queue("MARROW_GDA_CQ", "Collapsed");
  EXPECT_EQ(parameter_string("MARROW_GDA_CQ"), "collapsed");
  Variable on("MARROW_MULTIMEM", "Yes");
  EXPECT_TRUE(parameter_bool("MARROW_MULTIMEM"));
  Variable bad("MARROW_GDA_CQ", "square");
  EXPECT_THAT(failure([] { parameter_string("MARROW_GDA_CQ"); }), HasSubstr("ring, collapsed"));
}

TEST(Parameters, CommunicatorSettingsLieOverTheEnvironment) {
  Variable set("MARROW_CPU_LANES", "4");
  Parameters settings;
  EXPECT_EQ(parameter_int("MARROW_CPU_LANES", settings), 4);
  settings.set("MARROW_CPU_LANES", "2");
  EXPECT_EQ(parameter_int("MARROW_CPU_LANES", settings), 2);
  EXPECT_EQ(parameter_text("MARROW_CPU_LANES", settings).source, ParameterSource::communicator);
  EXPECT_EQ(parameter_int("MARROW_CPU_LANES"), 4);
  EXPECT_THAT(failure([&] { settings.set("MARROW_CPU_LANES", "33"); }), HasSubstr("from 1 to 32"));
  EXPECT_THAT(failure([&] { settings.set("MARROW_CPU_LANE", "1"); }),
              HasSubstr("did you mean MARROW_CPU_LANES?"));
}

TEST(Parameters, AnEmptyVariableIsTheDefault) {
  Variable set("MARROW_CPU_LANES", "");
  EXPECT_EQ(parameter_int("MARROW_CPU_LANES"), 1);
}

TEST(Parameters, SizesTakeSuffixes) {
  EXPECT_EQ(parse_size("64K", "x"), 65536u);
  EXPECT_EQ(parse_size("3MiB", "x"), 3u << 20);
  EXPECT_EQ(parse_size("2gb", "x"), 2ull << 30);
  EXPECT_EQ(parse_size("17", "x"), 17u);
  EXPECT_THROW(parse_size("17q", "x"), Error);
  EXPECT_THROW(parse_size("9999999T", "x"), Error);
}

TEST(Parameters, AMisspeltVariableWarnsOnceWithAHint) {
  Variable typo("MARROW_PEER_TIMEOT", "3");
  Variable nonsense("MARROW_XYZZY_PLUGH_QUUX", "3");
  std::vector<std::string> lines;
  log::set_callback(
      [&](log::Level, log::Subsystem, std::string_view line) { lines.emplace_back(line); });
  check_parameters();
  check_parameters();
  log::set_callback({});
  ASSERT_EQ(lines.size(), 2u);
  std::string all = lines[0] + lines[1];
  EXPECT_THAT(all, HasSubstr("MARROW_PEER_TIMEOT is ignored; did you mean MARROW_PEER_TIMEOUT?"));
  EXPECT_THAT(all, HasSubstr("MARROW_XYZZY_PLUGH_QUUX is ignored; `marrow env` lists"));
}

TEST(Parameters, AnUndeclaredNameIsABugInMarrow) {
  try {
    parameter_int("MARROW_NOT_DECLARED");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Code::internal);
  }
}

}  // namespace
}  // namespace marrow::base
