#include "client/command_line.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/command_line_parts.h"
#include "client/render.h"
#include "client/report.h"
#include "client/time_text.h"
#include "common/errors/rpc_error.h"

namespace upipe::client {
namespace {

constexpr absl::Duration kCompletionDeadline = absl::Seconds(2);
constexpr int kCompletionJobs = 200;

// An empty string, or what is wrong: what CLI11 wants of a check.
std::string CheckSpan(const std::string& text) {
  const absl::StatusOr<absl::Duration> span = ParseSpan(text);
  return span.ok() ? "" : std::string(span.status().message());
}

}  // namespace

std::string Examples(const std::vector<std::string>& lines) {
  std::string text = "Examples:";
  for (const std::string& line : lines) absl::StrAppend(&text, "\n  ", line);
  return text;
}

CommandLine::Parts::Parts(Surroundings given) : surroundings(std::move(given)) {
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
  AddWhy();
  AddWatch();
  AddWait();
  AddTop();
  AddLogs();
  AddReport();
  AddTrace();
  AddCheckpoints();
  AddSibling("verify", "Read a checkpoint whole and check every byte of it");
  AddHold();
  AddRelease();
  AddCancel();
  AddNodes();
  AddCordon();
  AddDrain();
  AddUncordon();
  AddNode();
  AddAdmin();
  AddSupportBundle();
  AddPresets();
  AddLocal();
  AddSibling("run", "Train a job in one process, ranks as threads, without daemons");
  AddSibling("plan", "What a job would take: peak bytes by category, traffic, FLOPs");
  AddSibling("selfcheck", "Compare a job's ranks with one of them alone over a few short steps");
  AddSibling("calibrate", "Measure this node into a device description that plans are timed by");
  AddSibling("data", "Pack text into token shards; entropy of a corpus");
  AddCompletion();
}

CLI::App* CommandLine::Parts::AddVerb(const std::string& name, const std::string& purpose,
                                      const std::vector<std::string>& examples) {
  CLI::App* verb = app.add_subcommand(name, purpose);
  verb->footer(Examples(examples));
  return verb;
}

CLI::App* CommandLine::Parts::AddBelow(CLI::App* verb, const std::string& name,
                                       const std::string& purpose,
                                       const std::vector<std::string>& examples) {
  CLI::App* below = verb->add_subcommand(name, purpose);
  below->footer(Examples(examples));
  return below;
}

void CommandLine::Parts::OnCall(CLI::App* verb, std::function<int(Console&)> call) {
  verb->callback(
      [this, call = std::move(call)] { command = [this, call] { return WithConsole(call); }; });
}

void CommandLine::Parts::AddJson(CLI::App* verb, const std::string& what) {
  CLI::Option* option = verb->add_option(
      "-o,--output", output,
      absl::StrCat("text or json: ", what, ", and errors as JSON lines on stderr (default text)"));
  option->check(CLI::IsMember({"text", "json"}))->type_name("FORMAT");
  sources[option] = {Kind::kWords, {"text", "json"}};
}

void CommandLine::Parts::AddJob(CLI::App* verb) {
  CLI::Option* option = verb->add_option("job", job, "Job id, or the beginning of one");
  option->required()->type_name("");
  sources[option] = {Kind::kJobs, {}};
}

void CommandLine::Parts::AddWorker(CLI::App* verb) {
  CLI::Option* option = verb->add_option("worker", worker, "The worker's name: `upipe nodes`");
  option->required()->type_name("");
  sources[option] = {Kind::kWorkers, {}};
}

void CommandLine::Parts::AddReason(CLI::App* verb) {
  verb->add_option("--reason", reason, "What others read in `upipe nodes` (default: none)")
      ->type_name("TEXT");
}

void CommandLine::Parts::AddSpan(CLI::App* verb, const std::string& name,
                                 std::optional<absl::Duration>& target,
                                 const std::string& purpose) {
  verb->add_option_function<std::string>(
          name, [&target](const std::string& text) { target = *ParseSpan(text); }, purpose)
      ->type_name("TIME")
      ->check(CheckSpan);
}

std::string CommandLine::Parts::Address() const {
  if (!coordinator.empty()) return coordinator;
  if (!surroundings.coordinator.empty()) return surroundings.coordinator;
  return LocalAddress(surroundings.state_dir).value_or("");
}

int CommandLine::Parts::WithConsole(const std::function<int(Console&)>& call) {
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
                  json,
                  surroundings.terminal_size};
  return call(console);
}

// Nothing is said of what goes wrong: the person is in the middle of a line.
int CommandLine::Parts::PrintCandidates(std::vector<std::string> words) {
  if (!words.empty() && words.front() == "--") words.erase(words.begin());
  CandidateLookups lookups;
  lookups.jobs = [&](const std::string& prefix) {
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
  lookups.workers = [&](const std::string& prefix) {
    std::vector<Candidate> found;
    const std::string address = AddressIn(words);
    if (address.empty()) return found;
    const auto nodes = surroundings.connect(address, kCompletionDeadline)->ListNodes();
    if (!nodes.ok()) return found;
    for (const v1::Node& node : nodes->nodes()) {
      if (absl::StartsWith(node.worker(), prefix)) {
        found.push_back({node.worker(), NodeStateText(node)});
      }
    }
    return found;
  };
  surroundings.out << RenderCandidates(Complete(DescribeVerb(app), words, lookups));
  return kExitDone;
}

// The coordinator of a command line that is being typed.
std::string CommandLine::Parts::AddressIn(const std::vector<std::string>& words) const {
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    if (words[i] == "--coordinator") return words[i + 1];
  }
  return Address();
}

CompletionVerb CommandLine::Parts::DescribeVerb(const CLI::App& verb) const {
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
