// SPDX-License-Identifier: Apache-2.0
// The whole command line, on CLI11.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "cli/options.hpp"
#include "cli/text.hpp"

namespace marrow::cli {

const bool kFullParser = true;

namespace {

/// For a word that is no command, or an option that its command does not have.
std::string hint_for(int argc, char** argv, const std::vector<CommandSpec>& commands) {
  std::vector<std::string> names, options;
  for (const CommandSpec& spec : commands) {
    names.push_back(spec.name);
    if (argc > 1 && spec.name == argv[1]) {
      for (const OptionSpec& option : spec.options) options.push_back(option.name);
    }
  }
  std::string near;
  if (options.empty()) near = argc > 1 ? nearest(argv[1], names) : "";
  for (int i = 2; i < argc && near.empty(); ++i) {
    const std::string word = std::string(argv[i]).substr(0, std::string(argv[i]).find('='));
    const bool known = std::find(options.begin(), options.end(), word) != options.end() ||
                       word == "--help" || word == "-h";
    if (word.rfind("--", 0) == 0 && !known) near = nearest(word, options);
  }
  return near.empty() ? "" : " Did you mean '" + near + "'?";
}

}  // namespace

std::optional<int> parse(int argc, char** argv, Invocation& into) {
  CLI::App app(headline(), "marrow");
  const std::string notice = reduced_notice();
  app.footer("Run 'marrow COMMAND --help' for the options of a command." +
             (notice.empty() ? "" : "\n" + notice));
  app.set_version_flag("--version", headline());
  app.require_subcommand(0, 1);
  app.fallthrough(false);
  const std::vector<CommandSpec> commands = command_line(into);
  for (const CommandSpec& spec : commands) {
    CLI::App* sub = app.add_subcommand(spec.name, spec.help);
    sub->footer("Examples:\n" + spec.examples);
    sub->callback([&into, &spec] { into.command = spec.command; });
    for (const OptionSpec& option : spec.options) {
      if (option.meta.empty()) {
        sub->add_flag_callback(
            option.name, [&option] { option.set(""); }, option.help);
      } else {
        sub->add_option_function<std::string>(option.name, option.set, option.help)
            ->type_name(option.meta)
            ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
      }
    }
    if (!spec.positional.name.empty()) {
      sub->add_option_function<std::string>(spec.positional.name, spec.positional.set,
                                            spec.positional.help)
          ->type_name("")
          ->required();
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    const std::string hint = hint_for(argc, argv, commands);
    std::fprintf(stderr, "marrow: %s.%s Run 'marrow --help' or 'marrow COMMAND --help'.\n",
                 error.what(), hint.c_str());
    return 2;
  } catch (const UsageError& error) {
    std::fprintf(stderr, "marrow: %s Run 'marrow COMMAND --help'.\n", error.what());
    return 2;
  }
  if (into.command == Command::none) {
    std::fputs(app.help().c_str(), stdout);
    return argc > 1 ? 2 : 0;
  }
  return std::nullopt;
}

}  // namespace marrow::cli
