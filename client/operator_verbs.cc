// The verbs about workers, the coordinator itself and this machine: their options, help and
// examples.
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "client/backup.h"
#include "client/command_line_parts.h"
#include "client/http_get.h"
#include "client/local/cluster_file.h"
#include "client/presets.h"
#include "common/units.h"

namespace upipe::client {
namespace {

std::string CheckByteCount(const std::string& text) {
  const absl::StatusOr<int64_t> bytes = ParseBytes(text);
  return bytes.ok() ? "" : std::string(bytes.status().message());
}

}  // namespace

void CommandLine::Parts::AddNodes() {
  CLI::App* verb = AddVerb("nodes", "Workers, their slots, memory and metrics addresses",
                           {"upipe nodes", "upipe nodes -o json"});
  AddJson(verb, "one ListNodesResponse");
  OnCall(verb, [](Console& console) { return Nodes(console); });
}

void CommandLine::Parts::AddCordon() {
  CLI::App* verb = AddVerb("cordon", "No new ranks on a worker; what runs there goes on",
                           {"upipe cordon worker-0", "upipe cordon worker-0 --reason 'new disk'"});
  AddWorker(verb);
  AddReason(verb);
  AddJson(verb, "the Node");
  OnCall(verb, [this](Console& console) { return Cordon(console, worker, reason); });
}

void CommandLine::Parts::AddDrain() {
  CLI::App* verb =
      AddVerb("drain",
              "Cordon a worker and move its jobs elsewhere: each checkpoints, stops "
              "and is queued again",
              {"upipe drain worker-0", "upipe drain worker-0 --wait --reason 'new disk'",
               "upipe drain worker-0 --grace 30m --wait --timeout 3600"});
  AddWorker(verb);
  AddReason(verb);
  AddSpan(verb, "--grace", grace,
          "How long jobs have to reach the end of a step and checkpoint (default: 10m)");
  verb->add_flag("--wait", wait, "Until no rank is left on the worker");
  verb->add_option("--timeout", timeout_seconds,
                   "Seconds after which --wait gives up, with exit code 4 (default: never)")
      ->type_name("SECONDS")
      ->check(CLI::PositiveNumber);
  AddJson(verb, "one DrainResponse");
  OnCall(verb, [this](Console& console) {
    const absl::Duration timeout =
        timeout_seconds ? absl::Seconds(*timeout_seconds) : absl::InfiniteDuration();
    return Drain(console, {worker, reason, grace, wait, timeout});
  });
}

void CommandLine::Parts::AddUncordon() {
  CLI::App* verb = AddVerb("uncordon", "Let a cordoned or drained worker take ranks again",
                           {"upipe uncordon worker-0", "upipe uncordon worker-0 -o json"});
  AddWorker(verb);
  AddJson(verb, "the Node");
  OnCall(verb, [this](Console& console) { return Uncordon(console, worker); });
}

void CommandLine::Parts::AddNode() {
  CLI::App* verb = AddVerb("node", "The operator's word on a worker that is silent or gone",
                           {"upipe node fence worker-0", "upipe node forget worker-0"});
  verb->require_subcommand(1);
  verb->fallthrough();
  const auto add = [&](const std::string& name, const std::string& purpose, auto call) {
    CLI::App* below = AddBelow(verb, name, purpose,
                               {absl::StrCat("upipe node ", name, " worker-0"),
                                absl::StrCat("upipe node ", name, " worker-0 --yes")});
    AddWorker(below);
    below->add_flag("--yes", yes, "The word is given: do not ask");
    AddJson(below, "the answer");
    OnCall(below, [this, call](Console& console) {
      return call(console, NodeWord{worker, yes, surroundings.ask});
    });
  };
  add("fence", "A silent worker's machine is off: its ranks count as gone at once", FenceNode);
  add("forget", "Drop the record of a lost worker", ForgetNode);
}

void CommandLine::Parts::AddAdmin() {
  CLI::App* verb = AddVerb(
      "admin", "The coordinator's own state",
      {"upipe admin backup coordinator.backup", "upipe admin backup coordinator.backup -o json"});
  verb->require_subcommand(1);
  verb->fallthrough();
  CLI::App* backup = AddBelow(
      verb, "backup",
      "A consistent copy of the coordinator's store while it is in use; "
      "`upipe-coordinator --restore FILE` takes it back",
      {"upipe admin backup coordinator.backup", "upipe admin backup coordinator.backup -o json"});
  CLI::Option* option = backup->add_option("file", file, "Where to; appears whole or not at all");
  option->required()->type_name("");
  sources[option] = {Kind::kFiles, {}};
  AddJson(backup, "file, bytes, revision, sha256");
  OnCall(backup, [this](Console& console) { return Backup(console, file); });
}

void CommandLine::Parts::AddSupportBundle() {
  CLI::App* verb =
      AddVerb("support-bundle",
              "Versions, configuration, nodes, jobs, metrics and logs of failures in one archive, "
              "for somebody who was not there; secrets are left out",
              {"upipe support-bundle", "upipe support-bundle --file monday.tar.gz"});
  CLI::Option* option = verb->add_option(
      "--file", file, "The archive (default: upipe-support-DATE-TIME.tar.gz in this folder)");
  option->type_name("FILE");
  sources[option] = {Kind::kFiles, {}};
  AddJson(verb, "file, bytes, files, missing");
  OnCall(verb, [this](Console& console) {
    BundleOptions options{.path = file, .version = surroundings.version, .coordinator = Address()};
    options.fetch_metrics = [](const std::string& address) { return HttpGet(address, "/metrics"); };
    if (const auto cluster = ReadCluster(surroundings.state_dir); cluster.ok()) {
      for (const LocalDaemon& daemon : cluster->daemons) {
        options.local_logs.emplace_back(daemon.name, daemon.log_path);
      }
    }
    return SupportBundle(console, options);
  });
}

void CommandLine::Parts::AddPresets() {
  CLI::App* verb = AddVerb("presets",
                           "Model shapes a job file can name as model.preset: layers, width d, "
                           "heads H, K/V heads K, head size D, MLP width F",
                           {"upipe presets", "upipe presets -o json"});
  AddJson(verb, "all presets with their ModelSpec");
  verb->callback(
      [this] { command = [this] { return Presets(surroundings.out, output == "json"); }; });
}

void CommandLine::Parts::AddLocal() {
  CLI::App* verb = AddVerb("local", "A coordinator and workers on this machine, in the background",
                           {"upipe local up --workers 2 --ranks-per-worker 2", "upipe local status",
                            "upipe local down"});
  verb->require_subcommand(1);
  verb->fallthrough();
  CLI::Option* folder =
      verb->add_option("--state-dir", surroundings.state_dir,
                       "Where the daemons keep their state and logs (default: upipe/local below "
                       "$XDG_STATE_HOME, or below ~/.local/state)");
  folder->type_name("FOLDER");
  sources[folder] = {Kind::kFiles, {}};
  AddLocalUp(*verb);
  CLI::App* down = verb->add_subcommand("down", "Stop what `up` started");
  down->footer(Examples({"upipe local down", "upipe local down --state-dir ~/second-cluster"}));
  OnLocal(down, LocalDown);
  CLI::App* status = verb->add_subcommand("status", "What `up` started and whether it runs");
  status->footer(
      Examples({"upipe local status", "upipe local status --state-dir ~/second-cluster"}));
  OnLocal(status, LocalStatus);
}

void CommandLine::Parts::AddLocalUp(CLI::App& verb) {
  CLI::App* up =
      verb.add_subcommand("up", "Start a coordinator and workers; returns when all are ready");
  up->footer(Examples({"upipe local up", "upipe local up --workers 2 --ranks-per-worker 2",
                       "upipe local up --memory-per-rank 2GiB"}));
  up->add_option("--workers", local.workers, "Worker daemons, 1 to 64 (default 1)")
      ->type_name("N")
      ->check(CLI::Range(1, 64));
  up->add_option("--ranks-per-worker", local.ranks_per_worker,
                 "Slots of each, 1 to 1024 (default 1)")
      ->type_name("N")
      ->check(CLI::Range(1, 1024));
  up->add_option_function<std::string>(
        "--memory-per-rank",
        [this](const std::string& text) { local.memory_per_rank = ParseBytes(text).value_or(0); },
        "What each rank may allocate, e.g. 2GiB (default: available memory / ranks)")
      ->type_name("BYTES")
      ->check(CheckByteCount);
  OnLocal(up, [this](const LocalConsole& console) { return LocalUp(console, local); });
}

void CommandLine::Parts::OnLocal(CLI::App* verb, std::function<int(const LocalConsole&)> call) {
  verb->callback([this, call = std::move(call)] {
    command = [this, call] {
      std::error_code error;
      const std::string state_dir =
          std::filesystem::absolute(surroundings.state_dir, error).string();
      return call({state_dir, surroundings.binary_dir, surroundings.out, surroundings.err,
                   [this](const std::string& address) {
                     return surroundings.connect(address, kUnaryDeadline);
                   }});
    };
  });
}

// A program of its own; its --help is its own.
void CommandLine::Parts::AddSibling(const std::string& name, const std::string& purpose) {
  CLI::App* verb = app.add_subcommand(name, purpose);
  verb->prefix_command();
  verb->fallthrough(false);
  verb->set_help_flag();
  verb->callback([this, verb, name] {
    command = [this, verb, name] { return surroundings.execute(name, verb->remaining()); };
  });
}

void CommandLine::Parts::AddCompletion() {
  CLI::App* verb =
      AddVerb("completion", "A script that lets a shell complete upipe's words",
              {"source <(upipe completion bash)", "upipe completion zsh > ~/.zfunc/_upipe",
               "upipe completion fish > ~/.config/fish/completions/upipe.fish"});
  CLI::Option* name = verb->add_option("shell", shell, "bash, zsh or fish");
  name->required()->type_name("")->check(CLI::IsMember({"bash", "zsh", "fish"}));
  sources[name] = {Kind::kWords, {"bash", "zsh", "fish"}};
  verb->callback([this] {
    command = [this] {
      surroundings.out << CompletionScript(shell);
      return kExitDone;
    };
  });
}

}  // namespace upipe::client
