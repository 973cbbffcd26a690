// The command line of `upipe`: verbs, options, their help with examples, and the one command that
// was asked for. Everything outside the process comes in through Surroundings, so that tests parse
// and run it whole.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/commands.h"
#include "client/completion.h"
#include "client/rpc/coordinator_client.h"

namespace upipe::client {

struct Surroundings {
  std::string version;
  std::string coordinator;  // UPIPE_COORDINATOR; empty when not set
  std::string state_dir;    // of `upipe local`
  std::string binary_dir;   // where the sibling programs lie
  std::optional<size_t> terminal_width;
  std::ostream& out;
  std::ostream& err;
  std::function<std::unique_ptr<CoordinatorClient>(const std::string& address,
                                                   absl::Duration deadline)>
      connect;
  // Becomes `upipe-<verb>`; returns an exit code only when that cannot be.
  std::function<int(const std::string& verb, const std::vector<std::string>& arguments)> execute;
  // Shows a sentence and returns the line a person types; null when nobody is there.
  std::function<std::optional<std::string>(const std::string& sentence)> ask;
  // Of the terminal that `out` is; null where it is none.
  std::function<std::optional<TerminalSize>()> terminal_size = nullptr;
};

class CommandLine {
 public:
  explicit CommandLine(Surroundings surroundings);
  ~CommandLine();

  // `arguments` follow the program's name. Returns the process's exit code (client/commands.h).
  int Run(const std::vector<std::string>& arguments);

  // The exit code when parsing is all there is to do (help, version, a wrong argument), else none.
  // Once per object.
  std::optional<int> Parse(const std::vector<std::string>& arguments);

  // Every verb and option, hidden ones left out.
  CompletionVerb Describe() const;

  // What `--help` of a verb shows, e.g. {"local", "up"}; {} is the program's own. The verb exists.
  std::string Help(const std::vector<std::string>& verb) const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace upipe::client
