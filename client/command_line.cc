#include "client/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <map>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/commands.h"
#include "client/local/local_commands.h"
#include "client/presets.h"
#include "client/render.h"
#include "client/report.h"
#include "client/time_text.h"
#include "common/errors/rpc_error.h"
#include "common/units.h"

namespace upipe::client {
namespace {

using Kind = CompletionSource::Kind;

constexpr absl::Duration kCompletionDeadline = absl::Seconds(2);
constexpr int kCompletionJobs = 200;

// "running" -> JOB_STATE_RUNNING.
const std::map<std::string, v1::JobState>& StatesByName() {
  static const auto& states = *[] {
    auto* named = new std::map<std::string, v1::JobState>();
    for (int i = v1::JobState_MIN; i <= v1::JobState_MAX; ++i) {
      const auto state = static_cast<v1::JobState>(i);
      if (!v1::JobState_IsValid(i) || state == v1::JOB_STATE_UNSPECIFIED) continue;
      const std::string prefix = "JOB_STATE_";
      (*named)[absl::AsciiStrToLower(v1::JobState_Name(state).substr(prefix.size()))] = state;
    }
    return named;
  }();
  return states;
}

std::vector<std::string> StateNames() {
  std::vector<std::string> names;
  for (const auto& [name, state] : StatesByName()) names.push_back(name);
  return names;
}

std::string Examples(const std::vector<std::string>& lines) {
  std::string text = "Examples:";
  for (const std::string& line : lines) absl::StrAppend(&text, "\n  ", line);
  return text;
}

// An empty string, or what is wrong: what CLI11 wants of a check.
std::string CheckMoment(const std::string& text) {
  const absl::StatusOr<absl::Time> time = ParseMoment(text, absl::Now());
  return time.ok() ? "" : std::string(time.status().message());
}

std::string CheckByteCount(const std::string& text) {
  const absl::StatusOr<int64_t> bytes = ParseBytes(text);
  return bytes.ok() ? "" : std::string(bytes.status().message());
}

}  // namespace

struct CommandLine::Parts {
  explicit Parts(Surroundings given) : surroundings(std::move(given)) {
    // CLI11 would call a misspelt command "required" instead of unexpected.
    app.require_subcommand(0, 1);
    app.fallthrough();
    app.set_version_flag("--version", absl::StrCat("upipe ", surroundings.version));
    app.add_option("--coordinator", coordinator,
                   "host:port of the coordinator (default: $UPIPE_COORDINATOR, else the cluster "
                   "of `upipe local up`)");
    app.footer(
        "Jobs are named by id or by a beginning that only one has. `upipe VERB --help` has "
        "examples.\n"
        "Exit codes: 0 done or SUCCEEDED, 1 failed or FAILED, 2 the request is wrong, 3 "
        "CANCELLED, 4 out of time.");
    AddSubmit();
    AddList();
    AddDescribe();
    AddWatch();
    AddWait();
    AddLogs();
    AddCancel();
    AddNodes();
    AddPresets();
    AddLocal();
    AddSiblings();
    AddCompletion();
  }

  // Builders of options shared by verbs.

  CLI::App* AddVerb(const std::string& name, const std::string& purpose,
                    const std::vector<std::string>& examples) {
    CLI::App* verb = app.add_subcommand(name, purpose);
    verb->footer(Examples(examples));
    return verb;
  }

  // A command that talks to the coordinator.
  void OnCall(CLI::App* verb, std::function<int(Console&)> call) {
    verb->callback(
        [this, call = std::move(call)] { command = [this, call] { return WithConsole(call); }; });
  }

  void AddJson(CLI::App* verb, const std::string& what) {
    CLI::Option* option =
        verb->add_option("-o,--output", output,
                         absl::StrCat("text or json: ", what,
                                      ", and errors as JSON lines on stderr (default text)"));
    option->check(CLI::IsMember({"text", "json"}))->type_name("FORMAT");
    sources[option] = {Kind::kWords, {"text", "json"}};
  }

  void AddJob(CLI::App* verb) {
    CLI::Option* option = verb->add_option("job", job, "Job id, or the beginning of one");
    option->required()->type_name("");
    sources[option] = {Kind::kJobs, {}};
  }

  // Verbs.

  void AddSubmit() {
    CLI::App* verb =
        AddVerb("submit", "Check a job file and hand it to the coordinator",
                {"upipe submit deploy/samples/demo.yaml",
                 "upipe submit deploy/samples/demo.yaml --set train.steps=100 --watch",
                 "upipe submit deploy/samples/tiny.yaml --request-id nightly-7 -o json"});
    CLI::Option* file = verb->add_option("file", submit.path, "Job file (YAML)");
    file->required()->type_name("");
    sources[file] = {Kind::kFiles, {}};
    verb->add_option("--set", submit.overrides,
                     "path=value over the file, path= to unset; repeatable; relative data paths "
                     "start at the current folder (default: the file as it is)")
        ->allow_extra_args(false)
        ->type_name("PATH=VALUE");
    verb->add_option("--request-id", submit.request_id,
                     "The same id again answers with the same job; at most 128 characters "
                     "(default: a random one)")
        ->type_name("ID")
        ->check([](const std::string& id) {
          return id.size() <= 128 ? std::string() : "at most 128 characters";
        });
    verb->add_flag("-w,--watch", submit.watch,
                   "Stay and show progress; the exit code is the outcome");
    AddJson(verb, "the job, or with --watch a line for each change and step");
    OnCall(verb, [this](Console& console) { return Submit(console, submit); });
  }

  void AddList() {
    CLI::App* verb = AddVerb("list", "Jobs, newest first",
                             {"upipe list --state running --state queued",
                              "upipe list --name demo --since 2h --limit 20",
                              "upipe list --since 2026-01-31 --until '2026-01-31 12:00' -o json"});
    CLI::Option* state = verb->add_option(
        "--state", state_names, "Only jobs in this state; repeatable (default: all states)");
    state->allow_extra_args(false)->type_name("STATE")->check(
        CLI::IsMember(StateNames(), CLI::ignore_case));
    sources[state] = {Kind::kWords, StateNames()};
    CLI::Option* name = verb->add_option(
        "--name", list.name, "Only jobs whose id, the name first, begins so (default: all names)");
    name->type_name("PREFIX")->check([](const std::string& text) {
      return text.size() <= 70 ? std::string() : "an id has at most 70 characters";
    });
    sources[name] = {Kind::kJobs, {}};
    verb->add_option("--since", since,
                     "Only jobs submitted at or after: 30m, 2h or 3d for so long ago, or "
                     "'2026-01-31 08:15' (default: from the first)")
        ->type_name("TIME")
        ->check(CheckMoment);
    verb->add_option("--until", until,
                     "Only jobs submitted before, written as --since (default: to the last)")
        ->type_name("TIME")
        ->check(CheckMoment);
    verb->add_option("--limit", list.limit, "The newest N of them (default: all)")
        ->type_name("N")
        ->check(CLI::Range(1, 1'000'000'000));
    AddJson(verb, "one ListJobsResponse");
    OnCall(verb, [this](Console& console) {
      for (const std::string& text : state_names)
        list.states.push_back(StatesByName().at(absl::AsciiStrToLower(text)));
      const absl::Time now = absl::FromUnixMillis(console.clock.UnixMillis());
      if (!since.empty()) list.since = *ParseMoment(since, now);
      if (!until.empty()) list.until = *ParseMoment(until, now);
      return List(console, list);
    });
  }

  void AddDescribe() {
    CLI::App* verb =
        AddVerb("describe", "Everything about one job: cause, ranks, plan, memory, events",
                {"upipe describe demo-x3kqab", "upipe describe demo -o json"});
    AddJob(verb);
    AddJson(verb, "one Job");
    OnCall(verb, [this](Console& console) { return client::Describe(console, job); });
  }

  void AddWatch() {
    CLI::App* verb = AddVerb("watch",
                             "Live progress; Ctrl-C ends the watching, not the job; the exit code "
                             "is the outcome",
                             {"upipe watch demo-x3kqab", "upipe watch demo -o json"});
    AddJob(verb);
    AddJson(verb, "one WatchResponse a line");
    OnCall(verb, [this](Console& console) { return Watch(console, job); });
  }

  void AddWait() {
    CLI::App* verb =
        AddVerb("wait", "Until a job ends; the exit code is the outcome",
                {"upipe wait demo-x3kqab && echo trained", "upipe wait demo --timeout 600"});
    AddJob(verb);
    verb->add_option("--timeout", timeout_seconds,
                     "Seconds after which to give up, with exit code 4 (default: never)")
        ->type_name("SECONDS")
        ->check(CLI::PositiveNumber);
    AddJson(verb, "the Job as it ended");
    OnCall(verb, [this](Console& console) {
      return Wait(console, job,
                  timeout_seconds ? absl::Seconds(*timeout_seconds) : absl::InfiniteDuration());
    });
  }

  void AddLogs() {
    CLI::App* verb = AddVerb("logs", "What one rank wrote",
                             {"upipe logs demo-x3kqab", "upipe logs demo --rank 1 --tail 20",
                              "upipe logs -f demo > demo.log"});
    AddJob(verb);
    verb->add_option("--rank", logs.rank, "Rank, from 0 (default 0)")
        ->type_name("RANK")
        ->check(CLI::Range(0, 1023));
    verb->add_flag("-f,--follow", logs.follow,
                   "Wait for the job to start, go on until the rank is gone, then say on stderr "
                   "how the job ended");
    verb->add_option("--tail", logs.tail, "Only the last N lines (default: all)")
        ->type_name("N")
        ->check(CLI::Range(0, 1'000'000'000));
    OnCall(verb, [this](Console& console) {
      logs.job = job;
      return Logs(console, logs);
    });
  }

  void AddCancel() {
    CLI::App* verb = AddVerb("cancel", "Stop a job for good; harmless when it has ended",
                             {"upipe cancel demo-x3kqab", "upipe cancel demo -o json"});
    AddJob(verb);
    AddJson(verb, "the Job");
    OnCall(verb, [this](Console& console) { return Cancel(console, job); });
  }

  void AddNodes() {
    CLI::App* verb = AddVerb("nodes", "Workers, their slots, memory and metrics addresses",
                             {"upipe nodes", "upipe nodes -o json"});
    AddJson(verb, "one ListNodesResponse");
    OnCall(verb, [](Console& console) { return Nodes(console); });
  }

  void AddPresets() {
    CLI::App* verb = AddVerb("presets",
                             "Model shapes a job file can name as model.preset: layers, width d, "
                             "heads H, K/V heads K, head size D, MLP width F",
                             {"upipe presets", "upipe presets -o json"});
    AddJson(verb, "all presets with their ModelSpec");
    verb->callback(
        [this] { command = [this] { return Presets(surroundings.out, output == "json"); }; });
  }

  void AddLocal() {
    CLI::App* verb =
        AddVerb("local", "A coordinator and workers on this machine, in the background",
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

  void AddLocalUp(CLI::App& verb) {
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

  void OnLocal(CLI::App* verb, std::function<int(const LocalConsole&)> call) {
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

  // Programs of their own; their --help is theirs.
  void AddSiblings() {
    AddSibling("run", "Train a job in one process, ranks as threads, without daemons");
    AddSibling("plan", "What a job would take: peak bytes by category, traffic, FLOPs");
    AddSibling("data", "Pack text into token shards; entropy of a corpus");
  }

  void AddSibling(const std::string& name, const std::string& purpose) {
    CLI::App* verb = app.add_subcommand(name, purpose);
    verb->prefix_command();
    verb->fallthrough(false);
    verb->set_help_flag();
    verb->callback([this, verb, name] {
      command = [this, verb, name] { return surroundings.execute(name, verb->remaining()); };
    });
  }

  void AddCompletion() {
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

  // Running.

  std::string Address() const {
    if (!coordinator.empty()) return coordinator;
    if (!surroundings.coordinator.empty()) return surroundings.coordinator;
    return LocalAddress(surroundings.state_dir).value_or("");
  }

  int WithConsole(const std::function<int(Console&)>& call) {
    const bool json = output == "json";
    const std::string address = Address();
    if (address.empty()) {
      const absl::Status error =
          RpcError(Reason::kCoordinatorUnknown,
                   "no coordinator: give --coordinator HOST:PORT, set UPIPE_COORDINATOR, or run "
                   "`upipe local up`");
      surroundings.err << (json ? ErrorJson(error) : ErrorText(error));
      return kExitWrongRequest;
    }
    const auto client = surroundings.connect(address, kUnaryDeadline);
    Console console{*client,
                    surroundings.out,
                    surroundings.err,
                    SystemClock(),
                    [](absl::Duration d) { absl::SleepFor(d); },
                    surroundings.terminal_width,
                    json};
    return call(console);
  }

  // Nothing is said of what goes wrong: the person is in the middle of a line.
  int PrintCandidates(std::vector<std::string> words) {
    if (!words.empty() && words.front() == "--") words.erase(words.begin());
    const auto jobs = [&](const std::string& prefix) {
      std::vector<Candidate> found;
      const std::string address = AddressIn(words);
      if (address.empty()) return found;
      v1::ListJobsRequest request;
      request.set_id_prefix(prefix);
      request.set_page_size(kCompletionJobs);
      const auto page = surroundings.connect(address, kCompletionDeadline)->ListJobs(request);
      if (!page.ok()) return found;
      for (const v1::Job& job : page->jobs()) found.push_back({job.id(), ShownState(job)});
      return found;
    };
    surroundings.out << RenderCandidates(Complete(DescribeVerb(app), words, jobs));
    return kExitDone;
  }

  // The coordinator of a command line that is being typed.
  std::string AddressIn(const std::vector<std::string>& words) const {
    for (size_t i = 0; i + 1 < words.size(); ++i) {
      if (words[i] == "--coordinator") return words[i + 1];
    }
    return Address();
  }

  CompletionVerb DescribeVerb(const CLI::App& verb) const {
    CompletionVerb described{verb.get_name(), verb.get_description(), {}, {}, {}};
    for (const CLI::Option* option : verb.get_options()) {
      const auto source = sources.find(option);
      const CompletionSource value = source == sources.end() ? CompletionSource() : source->second;
      if (option->get_positional()) {
        described.positionals.push_back(value);
        continue;
      }
      CompletionOption entry{
          {}, option->get_description(), option->get_items_expected_max() > 0, value};
      for (const std::string& name : option->get_snames()) entry.names.push_back("-" + name);
      for (const std::string& name : option->get_lnames()) entry.names.push_back("--" + name);
      described.options.push_back(std::move(entry));
    }
    for (const CLI::App* sub : verb.get_subcommands({})) {
      if (!sub->get_group().empty()) described.verbs.push_back(DescribeVerb(*sub));
    }
    const bool sibling = verb.get_prefix_command();
    if (sibling) described.positionals.assign(8, {Kind::kFiles, {}});
    return described;
  }

  Surroundings surroundings;
  CLI::App app{"Trains Transformers on long contexts.", "upipe"};
  std::map<const CLI::Option*, CompletionSource> sources;
  std::string coordinator;
  std::string job;
  std::string output;
  SubmitOptions submit;
  ListOptions list;
  std::vector<std::string> state_names;
  std::string since;
  std::string until;
  LogsOptions logs;
  std::optional<double> timeout_seconds;
  LocalUpOptions local;
  std::string shell;
  std::function<int()> command;
};

CommandLine::CommandLine(Surroundings surroundings)
    : parts_(std::make_unique<Parts>(std::move(surroundings))) {}

CommandLine::~CommandLine() = default;

std::optional<int> CommandLine::Parse(const std::vector<std::string>& arguments) {
  // What the scripts of `completion` call. Its words are another command line, unfinished: not for
  // the parser.
  if (!arguments.empty() && arguments.front() == "complete") {
    parts_->command = [this, words = std::vector(arguments.begin() + 1, arguments.end())] {
      return parts_->PrintCandidates(words);
    };
    return std::nullopt;
  }
  std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());  // CLI11's order
  try {
    parts_->app.parse(reversed);
  } catch (const CLI::ParseError& error) {
    const int code = parts_->app.exit(error, parts_->surroundings.out, parts_->surroundings.err);
    return code == 0 ? kExitDone : kExitWrongRequest;
  }
  if (parts_->command) return std::nullopt;
  parts_->surroundings.err << parts_->app.help();
  return kExitWrongRequest;
}

int CommandLine::Run(const std::vector<std::string>& arguments) {
  const std::optional<int> over = Parse(arguments);
  return over ? *over : parts_->command();
}

CompletionVerb CommandLine::Describe() const { return parts_->DescribeVerb(parts_->app); }

std::string CommandLine::Help(const std::vector<std::string>& verb) const {
  const CLI::App* app = &parts_->app;
  for (const std::string& name : verb) app = app->get_subcommand(name);
  return app->help();
}

}  // namespace upipe::client
