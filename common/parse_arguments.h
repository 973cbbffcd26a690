// How every program answers a command line that it cannot read: exit code 2, as any wrong request.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>

namespace upipe {

// Nothing when `app` has read the command line. Else the exit code: 0 after --help or --version,
// which it printed, and 2 after something wrong, which it explained on stderr.
inline std::optional<int> ParseArguments(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return std::nullopt;
}

}  // namespace upipe
