// SPDX-License-Identifier: Apache-2.0
// The whole command line, on CLI11.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "cli/options.hpp"
#include "cli/text.hpp"

namespace marrow::cli {

const bool kFullParser = true;

std::optional<int> parse(int argc, char** argv, Invocation& into) {
  CLI::App app(headline(), "marrow");
  const std::string notice = reduced_notice();
  app.footer("Run 'marrow COMMAND --help' for the options of a command." + (notice.empty() ? "" : "\n" + notice));
  app.set_version_flag("--version", headline());
  app.require_subcommand(0, 1);
  app.fallthrough(false);
  const std::vector<CommandSpec> commands = command_line(into);
  std::vector<std::string> names;
  for (const CommandSpec& spec : commands) {
    names.push_back(spec.name);
    CLI::App* sub = app.add_subcommand(spec.name, spec.help);
    sub->footer("Examples:\n" + spec.examples);
    sub->callback([&into, &spec] { into.command = spec.command; });
    for (const OptionSpec& option : spec.options) {
      if (option.meta.empty()) {
        sub->add_flag_callback(option.name, [&option] { option.set(""); }, option.help);
      } else {
        sub->add_option_function<std::string>(option.name, option.set, option.help)
            ->type_name(option.meta)
            ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
      }
    }
    if (!spec.positional.name.empty()) {
      sub->add_option_function<std::string>(spec.positional.name, spec.positional.set, spec.positional.help)
          ->type_name("")
          ->required();
    }
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    std::string hint;
    if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr && argc > 1 && into.command == Command::none) {
      const std::string near = nearest(argv[1], names);
      if (!near.empty()) hint = " Did you mean '" + near + "'?";
    }
    std::fprintf(stderr, "marrow: %s%s Run 'marrow --help' or 'marrow COMMAND --help'.\n", error.what(), hint.c_str());
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
