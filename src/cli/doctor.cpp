// SPDX-License-Identifier: Apache-2.0
// `marrow doctor`: everything the gda path needs of this machine, found or missing, all at once.
#include <algorithm>
#include <cstdio>

#include "cli/commands.hpp"
#include "cli/json.hpp"
#include "cli/table.hpp"
#include "cli/text.hpp"
#include "marrow/inventory.hpp"

namespace marrow::cli {
namespace {

/// --nic, else MARROW_NIC.
std::string nic_of(const DoctorOptions& options) {
  if (!options.nic.empty()) return options.nic;
  for (const ParameterInfo& parameter : parameters()) {
    if (parameter.name == "MARROW_NIC") return parameter.value;
  }
  return "auto";
}

void print(const Diagnosis& found) {
  Table table({{"part"}, {"need"}, {"state"}, {"found"}});
  for (const Need& need : found.needs)
    table.add({need.part, need.name, name(need.state), need.found});
  std::printf("%s", table.text().c_str());
  bool heading = false;
  for (const Need& need : found.needs) {
    if (need.state == Need::State::found) continue;
    if (!heading) std::printf("\nWhat is needed, and how to get it:\n");
    heading = true;
    std::printf("  %s, %s (%s)\n    needed: %s\n    fix:    %s\n", need.part.c_str(),
                need.name.c_str(), name(need.state), need.needed.c_str(), need.fix.c_str());
  }
  const auto missing = std::count_if(found.needs.begin(), found.needs.end(), [](const Need& need) {
    return need.state == Need::State::missing;
  });
  if (found.emulated) {
    std::printf("\nThe gda path is %s on softnic, which emulates a NIC on one host.\n",
                found.usable ? "usable" : "not usable");
  } else if (found.usable) {
    std::printf(
        "\nThe gda path is usable with %s as far as can be seen from here. Nobody has run it on a "
        "real NIC yet:\nplease report what you see (docs/real-nic.md).\n",
        found.nic.c_str());
  } else {
    std::printf(
        "\nThe gda path is not usable on a real NIC here: %td missing. The lsa and proxy paths "
        "need none of this;\n`marrow info` shows them, and MARROW_NIC=softnic emulates a NIC.\n",
        missing);
  }
}

}  // namespace

int run_doctor(const DoctorOptions& options) {
  prepare_json(options.json, true);
  const std::string nic = nic_of(options);
  Document document;
  document.command = "doctor";
  document.parameters = {{"nic", nic}};
  document.diagnosis = diagnose(nic);
  if (options.json != "-") print(*document.diagnosis);
  if (!options.json.empty()) write_json(options.json, document);
  return document.diagnosis->usable ? 0 : 1;
}

}  // namespace marrow::cli
