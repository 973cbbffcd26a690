// The operator's commands: what workers there are, taking one out of service and back, and what to
// say of one that is gone for good. Exit codes as client/commands.h lists them.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "client/commands.h"

namespace upipe::client {

int Nodes(Console& console);

// No new ranks on a worker; what runs there goes on.
int Cordon(Console& console, const std::string& worker, const std::string& reason);
int Uncordon(Console& console, const std::string& worker);

struct DrainOptions {
  std::string worker;
  std::string reason;
  std::optional<absl::Duration> grace;  // absent: the coordinator's
  bool wait = false;                    // until no slot of the worker is taken
  absl::Duration timeout = absl::InfiniteDuration();
};
// Cordons, and has every job that has ranks there checkpoint, stop and queue again.
int Drain(Console& console, const DrainOptions& options);

// Asks a person: shows the sentence, returns the line they typed; none when nobody is there.
using Ask = std::function<std::optional<std::string>(const std::string& sentence)>;

struct NodeWord {
  std::string worker;
  bool yes = false;  // the operator's word is given already
  Ask ask;
};
// The operator's word that a silent worker's machine is off. Without `yes` the worker's name is to
// be typed.
int FenceNode(Console& console, const NodeWord& word);
// Drops the record of a lost worker.
int ForgetNode(Console& console, const NodeWord& word);

}  // namespace upipe::client
