// upipe: the command line. Reads the arguments and the environment, then calls one command; `run`,
// `plan` and `data` are programs of their own beside this one.
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/commands.h"
#include "client/local/local_commands.h"
#include "common/units.h"

namespace upipe::client {
namespace {

// Everything the environment says, read once.
struct Environment {
  std::string coordinator;  // UPIPE_COORDINATOR
  std::string state_dir;    // of `upipe local`
};

std::string EnvironmentValue(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Environment ReadEnvironment() {
  std::string state = EnvironmentValue("XDG_STATE_HOME");
  if (state.empty()) state = absl::StrCat(EnvironmentValue("HOME"), "/.local/state");
  return {EnvironmentValue("UPIPE_COORDINATOR"), absl::StrCat(state, "/upipe/local")};
}

// The folder this program lies in.
std::string BinaryDir() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
}

std::optional<size_t> TerminalWidth() {
  winsize size = {};
  const char* terminal = std::getenv("TERM");
  if (isatty(STDOUT_FILENO) == 0 || (terminal != nullptr && std::strcmp(terminal, "dumb") == 0))
    return std::nullopt;
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 20) return 80;
  return size.ws_col;
}

// Becomes `upipe-<verb>`; returns only when that cannot be.
int Execute(const std::string& verb, const std::vector<std::string>& arguments) {
  const std::string path = absl::StrCat(BinaryDir(), "/upipe-", verb);
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(path.c_str(), argv.data());
  std::cerr << "upipe: cannot run " << path << ": " << std::strerror(errno) << "\n";
  return kExitFailed;
}

// The command line: options bound to fields, and the one command that was asked for.
class CommandLine {
 public:
  explicit CommandLine(Environment environment) : environment_(std::move(environment)) {
    app_.require_subcommand(
        0, 1);  // CLI11 would call a misspelt command "required" instead of unexpected
    app_.fallthrough();
    app_.set_version_flag("--version", "upipe " UPIPE_VERSION);
    app_.add_option("--coordinator", coordinator_,
                    "host:port; else $UPIPE_COORDINATOR, else the cluster of `upipe local up`");
    app_.footer(
        "Exit codes: 0 done or SUCCEEDED, 1 failed or FAILED, 2 the request is wrong, 3 CANCELLED, "
        "4 out of time.");
    AddSubmit();
    AddLogs();
    AddJobCommands();
    AddNodes();
    AddLocalCommands();
    AddSiblings();
  }

  int Run(int argc, char** argv) {
    try {
      app_.parse(argc, argv);
    } catch (const CLI::ParseError& error) {
      return app_.exit(error) == 0 ? kExitDone : kExitWrongRequest;
    }
    if (command_) return command_();
    std::cerr << app_.help();
    return kExitWrongRequest;
  }

 private:
  // A command that talks to the coordinator.
  void OnCall(CLI::App* app, std::function<int(Console&)> command) {
    app->callback([this, command = std::move(command)] {
      command_ = [this, command] { return WithConsole(command); };
    });
  }

  int WithConsole(const std::function<int(Console&)>& command) {
    std::string address = !coordinator_.empty() ? coordinator_ : environment_.coordinator;
    if (address.empty()) address = LocalAddress(environment_.state_dir).value_or("");
    if (address.empty()) {
      std::cerr
          << "upipe: no coordinator: give --coordinator HOST:PORT, set UPIPE_COORDINATOR, or run "
             "`upipe local up`\n";
      return kExitWrongRequest;
    }
    const std::unique_ptr<CoordinatorClient> client = ConnectCoordinator(address);
    Console console{*client,
                    std::cout,
                    std::cerr,
                    SystemClock(),
                    [](absl::Duration d) { absl::SleepFor(d); },
                    TerminalWidth()};
    return command(console);
  }

  void AddJson(CLI::App* app) {
    app->add_option_function<std::string>(
           "-o,--output", [this](const std::string& value) { json_ = value == "json"; },
           "text (default) or json, with the field names of the proto files")
        ->check(CLI::IsMember({"text", "json"}));
  }

  void AddJob(CLI::App* app) {
    app->add_option("job", job_, "Job id, or the beginning of one")->required();
  }

  void AddSubmit() {
    CLI::App* submit =
        app_.add_subcommand("submit", "Check a job file and hand it to the coordinator");
    submit->add_option("file", submit_.path, "Job file (YAML)")->required();
    submit
        ->add_option("--set", submit_.overrides,
                     "path=value over the file, e.g. train.steps=100; repeatable; relative "
                     "paths start at the current folder")
        ->allow_extra_args(false);
    submit
        ->add_option("--request-id", submit_.request_id,
                     "The same id again answers with the same job")
        ->check(
            [](const std::string& id) { return id.size() <= 128 ? "" : "at most 128 characters"; });
    submit->add_flag("-w,--watch", submit_.watch,
                     "Stay and show progress; the exit code is the outcome");
    AddJson(submit);
    submit->footer(
        "Example: upipe submit deploy/samples/demo.yaml --set data.path=/data/corpus --watch");
    OnCall(submit, [this](Console& console) {
      submit_.json = json_;
      return Submit(console, submit_);
    });
  }

  void AddLogs() {
    CLI::App* logs = app_.add_subcommand("logs", "What one rank wrote");
    AddJob(logs);
    logs->add_option("--rank", logs_.rank, "Rank, from 0 (default 0)")->check(CLI::Range(0, 1023));
    logs->add_flag("-f,--follow", logs_.follow, "Go on until the rank is gone");
    logs->add_option("--tail", logs_.tail, "Only the last N lines")
        ->check(CLI::Range(0, 1'000'000'000));
    logs->footer("Example: upipe logs demo-x3 --rank 1 --tail 20 -f");
    OnCall(logs, [this](Console& console) {
      logs_.job = job_;
      return Logs(console, logs_);
    });
  }

  void AddNodes() {
    CLI::App* nodes =
        app_.add_subcommand("nodes", "Workers, their slots, memory and metrics addresses");
    AddJson(nodes);
    nodes->footer("Example: upipe nodes");
    OnCall(nodes, [this](Console& console) { return Nodes(console, json_); });
  }

  void AddJobCommands() {
    CLI::App* list = app_.add_subcommand("list", "All jobs, newest first");
    AddJson(list);
    list->footer("Example: upipe list -o json");
    OnCall(list, [this](Console& console) { return List(console, json_); });

    CLI::App* describe = app_.add_subcommand(
        "describe", "Everything about one job: cause, ranks, plan, memory, events");
    AddJob(describe);
    AddJson(describe);
    describe->footer("Example: upipe describe demo-x3");
    OnCall(describe, [this](Console& console) { return Describe(console, job_, json_); });

    CLI::App* cancel =
        app_.add_subcommand("cancel", "Stop a job for good; harmless when it has ended");
    AddJob(cancel);
    cancel->footer("Example: upipe cancel demo-x3");
    OnCall(cancel, [this](Console& console) { return Cancel(console, job_); });

    CLI::App* wait = app_.add_subcommand("wait", "Until a job ends; the exit code is the outcome");
    AddJob(wait);
    wait->add_option("--timeout", timeout_seconds_, "Seconds; exit code 4 after them")
        ->check(CLI::PositiveNumber);
    wait->footer("Example: upipe wait demo-x3 --timeout 600 && echo trained");
    OnCall(wait, [this](Console& console) {
      return Wait(console, job_,
                  timeout_seconds_ ? absl::Seconds(*timeout_seconds_) : absl::InfiniteDuration());
    });

    CLI::App* watch =
        app_.add_subcommand("watch", "Live progress; Ctrl-C ends the watching, not the job");
    AddJob(watch);
    watch->footer("Example: upipe watch demo-x3");
    OnCall(watch, [this](Console& console) { return Watch(console, job_); });
  }

  void AddLocalCommands() {
    CLI::App* local = app_.add_subcommand(
        "local", "A coordinator and workers on this machine, in the background");
    local->require_subcommand(1);
    local->fallthrough();
    local->add_option("--state-dir", environment_.state_dir,
                      "Where the daemons keep their state and logs (default: upipe/local below "
                      "$XDG_STATE_HOME, or below ~/.local/state)");
    const auto on_local = [this](CLI::App* app, std::function<int(const LocalConsole&)> command) {
      app->callback([this, command = std::move(command)] {
        command_ = [this, command] {
          std::error_code error;
          const std::string state_dir =
              std::filesystem::absolute(environment_.state_dir, error).string();
          return command({state_dir, BinaryDir(), std::cout, std::cerr, ConnectCoordinator});
        };
      });
    };
    CLI::App* up =
        local->add_subcommand("up", "Start a coordinator and workers; returns when all are ready");
    up->add_option("--workers", local_.workers, "Worker daemons (default 1)")
        ->check(CLI::Range(1, 64));
    up->add_option("--ranks-per-worker", local_.ranks_per_worker, "Slots of each (default 1)")
        ->check(CLI::Range(1, 1024));
    up->add_option_function<std::string>(
          "--memory-per-rank",
          [this](const std::string& text) {
            local_.memory_per_rank = ParseBytes(text).value_or(0);
          },
          "Bytes each rank may allocate, e.g. 2GiB (default: available memory / ranks)")
        ->check([](const std::string& text) {
          const absl::StatusOr<int64_t> bytes = ParseBytes(text);
          return bytes.ok() ? "" : std::string(bytes.status().message());
        });
    up->footer("Example: upipe local up --workers 2 --ranks-per-worker 2");
    on_local(up, [this](const LocalConsole& console) { return LocalUp(console, local_); });
    on_local(local->add_subcommand("down", "Stop what `up` started"), LocalDown);
    on_local(local->add_subcommand("status", "What `up` started and whether it runs"), LocalStatus);
  }

  void AddSiblings() {
    AddSibling("run", "Train a job in one process, ranks as threads, without daemons");
    AddSibling("plan", "What a job would take: peak bytes by category, traffic, FLOPs");
    AddSibling("data", "Pack text into token shards; entropy of a corpus");
  }

  void AddSibling(const std::string& verb, const std::string& description) {
    CLI::App* app = app_.add_subcommand(verb, description);
    app->prefix_command();
    app->fallthrough(false);
    app->set_help_flag();
    app->callback(
        [this, app, verb] { command_ = [app, verb] { return Execute(verb, app->remaining()); }; });
  }

  Environment environment_;
  CLI::App app_{"Trains Transformers on long contexts.", "upipe"};
  std::string coordinator_;
  std::string job_;
  bool json_ = false;
  SubmitOptions submit_;
  LogsOptions logs_;
  std::optional<double> timeout_seconds_;
  LocalUpOptions local_;
  std::function<int()> command_;
};

}  // namespace
}  // namespace upipe::client

int main(int argc, char** argv) {
  return upipe::client::CommandLine(upipe::client::ReadEnvironment()).Run(argc, argv);
}
