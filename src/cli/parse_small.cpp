// SPDX-License-Identifier: Apache-2.0
// The reduced command line: the same options from the same model, without CLI11.
#include <cstdio>

#include "cli/options.hpp"
#include "cli/text.hpp"

namespace marrow::cli {

const bool kFullParser = false;

namespace {

void print_help(const std::vector<CommandSpec>& commands) {
  std::printf("%s\nUsage: marrow COMMAND [OPTIONS]\n\nCommands:\n", headline().c_str());
  for (const CommandSpec& spec : commands)
    std::printf("  %-8s %s\n", spec.name.c_str(), spec.help.c_str());
  std::printf("\nRun 'marrow COMMAND --help' for the options of a command.\n%s\n",
              reduced_notice().c_str());
}

void print_help(const CommandSpec& spec) {
  std::printf("%s\nUsage: marrow %s %s[OPTIONS]\n\nOptions:\n", spec.help.c_str(),
              spec.name.c_str(),
              spec.positional.name.empty() ? "" : (spec.positional.meta + " ").c_str());
  if (!spec.positional.name.empty()) {
    std::printf("  %s: %s\n", spec.positional.meta.c_str(), spec.positional.help.c_str());
  }
  for (const OptionSpec& option : spec.options) {
    std::printf("  %-26s %s\n", (option.name + " " + option.meta).c_str(), option.help.c_str());
  }
  std::printf("\nExamples:\n%s%s\n", spec.examples.c_str(), reduced_notice().c_str());
}

const OptionSpec& find(const CommandSpec& spec, const std::string& name) {
  std::vector<std::string> names;
  for (const OptionSpec& option : spec.options) {
    if (option.name == name) return option;
    names.push_back(option.name);
  }
  const std::string near = nearest(name, names);
  throw UsageError("There is no option " + name + "." +
                   (near.empty() ? "" : " Did you mean " + near + "?"));
}

/// @return true when --help was printed
bool parse_command(const CommandSpec& spec, const std::vector<std::string>& words) {
  bool positional = spec.positional.name.empty();
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--help" || word == "-h") {
      print_help(spec);
      return true;
    }
    if (word.rfind("--", 0) != 0) {
      if (positional) throw UsageError("'" + word + "' is one word too many.");
      spec.positional.set(word);
      positional = true;
      continue;
    }
    const std::size_t equals = word.find('=');
    const OptionSpec& option = find(spec, word.substr(0, equals));
    if (option.meta.empty()) {
      if (equals != std::string::npos) throw UsageError(option.name + " takes no value.");
      option.set("");
    } else if (equals != std::string::npos) {
      option.set(word.substr(equals + 1));
    } else if (i + 1 < words.size()) {
      option.set(words[++i]);
    } else {
      throw UsageError(option.name + " needs a value: " + option.meta + ".");
    }
  }
  if (!positional)
    throw UsageError(spec.positional.name + " is required: " + spec.positional.help + ".");
  return false;
}

}  // namespace

std::optional<int> parse(int argc, char** argv, Invocation& into) {
  const std::vector<CommandSpec> commands = command_line(into);
  const std::vector<std::string> words(argv + 1, argv + argc);
  if (words.empty() || words[0] == "--help" || words[0] == "-h") {
    print_help(commands);
    return 0;
  }
  if (words[0] == "--version") {
    std::printf("%s\n", headline().c_str());
    return 0;
  }
  std::vector<std::string> names;
  try {
    for (const CommandSpec& spec : commands) {
      if (spec.name == words[0]) {
        if (parse_command(spec, {words.begin() + 1, words.end()})) return 0;
        into.command = spec.command;
        return std::nullopt;
      }
      names.push_back(spec.name);
    }
    const std::string near = nearest(words[0], names);
    throw UsageError("There is no command '" + words[0] + "'." +
                     (near.empty() ? "" : " Did you mean '" + near + "'?"));
  } catch (const UsageError& error) {
    std::fprintf(stderr, "marrow: %s Run 'marrow --help' or 'marrow COMMAND --help'.\n",
                 error.what());
    return 2;
  }
}

}  // namespace marrow::cli
