// The verbs about jobs: their options, help and examples.
#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/command_line_parts.h"
#include "client/time_text.h"

namespace upipe::client {
namespace {

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

// An empty string, or what is wrong: what CLI11 wants of a check.
std::string CheckMoment(const std::string& text) {
  const absl::StatusOr<absl::Time> time = ParseMoment(text, absl::Now());
  return time.ok() ? "" : std::string(time.status().message());
}

}  // namespace

void CommandLine::Parts::AddSubmit() {
  CLI::App* verb =
      AddVerb("submit", "Check a job file and hand it to the coordinator",
              {"upipe submit deploy/samples/demo.yaml",
               "upipe submit deploy/samples/demo.yaml --set train.steps=100 --watch",
               "upipe submit deploy/samples/demo.yaml --priority 10 --time-limit 12h --hold",
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
  verb->add_option("--priority", submit.priority,
                   "-1,000 to 1,000, higher first, over the file's (default: the file's, or 0)")
      ->type_name("N")
      ->check(CLI::Range(-1000, 1000));
  AddSpan(verb, "--time-limit", submit.time_limit,
          "After so long starting or running, over all attempts, it is checkpointed, stopped and "
          "fails; over the file's (default: the file's, or none)");
  verb->add_flag("--hold", submit.hold, "Plan it, but start it only after `upipe release`");
  verb->add_flag("-w,--watch", submit.watch,
                 "Stay and show progress; the exit code is the outcome");
  AddJson(verb, "the job, or with --watch a line for each change and step");
  OnCall(verb, [this](Console& console) { return Submit(console, submit); });
}

void CommandLine::Parts::AddList() {
  CLI::App* verb = AddVerb(
      "list", "Jobs, newest first",
      {"upipe list --state running --state queued", "upipe list --name demo --since 2h --limit 20",
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

void CommandLine::Parts::AddDescribe() {
  CLI::App* verb =
      AddVerb("describe", "Everything about one job: cause, ranks, plan, memory, events",
              {"upipe describe demo-x3kqab", "upipe describe demo -o json"});
  AddJob(verb);
  AddJson(verb, "one Job");
  OnCall(verb, [this](Console& console) { return client::Describe(console, job); });
}

void CommandLine::Parts::AddWhy() {
  CLI::App* verb =
      AddVerb("why", "The one reason why a job is not running, and its place in the queue",
              {"upipe why demo-x3kqab", "upipe why demo -o json"});
  AddJob(verb);
  AddJson(verb, "one WhyResponse");
  OnCall(verb, [this](Console& console) { return Why(console, job); });
}

void CommandLine::Parts::AddWatch() {
  CLI::App* verb = AddVerb("watch",
                           "Live progress; Ctrl-C ends the watching, not the job; the exit code "
                           "is the outcome",
                           {"upipe watch demo-x3kqab", "upipe watch demo -o json"});
  AddJob(verb);
  AddJson(verb, "one WatchResponse a line");
  OnCall(verb, [this](Console& console) { return Watch(console, job); });
}

void CommandLine::Parts::AddWait() {
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

void CommandLine::Parts::AddLogs() {
  CLI::App* verb = AddVerb("logs", "What one rank wrote",
                           {"upipe logs demo-x3kqab", "upipe logs demo --rank 1 --tail 20",
                            "upipe logs demo --generation 1", "upipe logs -f demo > demo.log"});
  AddJob(verb);
  verb->add_option("--rank", logs.rank, "Rank, from 0 (default 0)")
      ->type_name("RANK")
      ->check(CLI::Range(0, 1023));
  verb->add_option("--generation", logs.generation,
                   "Of which attempt, from 1: `upipe describe` lists them (default: the latest)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000'000}));
  verb->add_flag("-f,--follow", logs.follow,
                 "Wait for the job to start, go on through its restarts, then say on stderr how it "
                 "ended; with --generation, until that attempt's rank is gone");
  verb->add_option("--tail", logs.tail, "Only the last N lines (default: all)")
      ->type_name("N")
      ->check(CLI::Range(0, 1'000'000'000));
  OnCall(verb, [this](Console& console) {
    logs.job = job;
    return Logs(console, logs);
  });
}

void CommandLine::Parts::AddTop() {
  CLI::App* verb = AddVerb(
      "top",
      "The cluster and its jobs, or the ranks of one job, as they are now and again and again; "
      "Ctrl-C ends it; printed once where there is no terminal",
      {"upipe top", "upipe top demo --every 5s", "upipe top --once"});
  CLI::Option* option =
      verb->add_option("job", top.job, "Job id, or the beginning of one (default: all jobs)");
  option->type_name("");
  sources[option] = {Kind::kJobs, {}};
  verb->add_flag("--once", top.once, "Print it once and end");
  AddSpan(verb, "--every", top.every, "How long between two looks, 100ms to 1h (default: 2s)");
  OnCall(verb, [this](Console& console) { return Top(console, top); });
}

// Where a verb writes to, which is not the format of its answer.
void CommandLine::Parts::AddTarget(CLI::App* verb, std::string& path, const std::string& what) {
  CLI::Option* option = verb->add_option("-o,--output", path, what);
  option->type_name("FILE");
  sources[option] = {Kind::kFiles, {}};
}

void CommandLine::Parts::AddReport() {
  CLI::App* verb = AddVerb(
      "report",
      "A job as one HTML page: loss, speed, memory, a step's timeline, restarts, configuration; "
      "needs no network and no script, fits a phone and paper",
      {"upipe report demo-x3kqab -o demo.html", "upipe report demo --output ~/pages/demo.html"});
  AddJob(verb);
  AddTarget(verb, report.path,
            "The page; appears whole or not at all (default: JOB.html in this folder)");
  OnCall(verb, [this](Console& console) {
    report.job = job;
    return JobReport(console, report);
  });
}

void CommandLine::Parts::AddTrace() {
  CLI::App* verb =
      AddVerb("trace",
              "A measured step of every rank for https://ui.perfetto.dev: what ran when by layer "
              "and stage, "
              "and memory by category",
              {"upipe trace demo-x3kqab -o demo.json", "upipe trace demo --rank 1 -o rank-1.json",
               "upipe trace demo --step 1 --generation 2 -o first.json"});
  AddJob(verb);
  AddTarget(verb, trace.path,
            "Chrome trace-event JSON; appears whole or not at all (default: JOB-trace.json in this "
            "folder)");
  verb->add_option("--rank", trace.rank, "Only this one, from 0 (default: all ranks)")
      ->type_name("RANK")
      ->check(CLI::Range(0, 1023));
  verb->add_option("--step", trace.step,
                   "Which step, of those that were recorded (default: the newest that most ranks "
                   "have)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000'000}));
  verb->add_option("--generation", trace.generation,
                   "Of which attempt, from 1: `upipe describe` lists them (default: the latest)")
      ->type_name("N")
      ->check(CLI::Range(int64_t{1}, int64_t{1'000'000'000}));
  OnCall(verb, [this](Console& console) {
    trace.job = job;
    return JobTrace(console, trace);
  });
}

void CommandLine::Parts::AddCheckpoints() {
  CLI::App* verb = AddVerb("checkpoints",
                           "A job's checkpoints: the coordinator's record, and the folder where "
                           "this machine reaches it",
                           {"upipe checkpoints demo-x3kqab", "upipe checkpoints demo -o json"});
  AddJob(verb);
  AddJson(verb, "last_commit, resume, problems and the folder's content");
  OnCall(verb, [this](Console& console) { return Checkpoints(console, job); });
}

void CommandLine::Parts::AddHold() {
  CLI::App* verb = AddVerb(
      "hold",
      "Keep a job out of the queue until it is released; one that runs goes on, and is held "
      "when it is queued again",
      {"upipe hold demo-x3kqab", "upipe hold demo -o json"});
  AddJob(verb);
  AddJson(verb, "the Job");
  OnCall(verb, [this](Console& console) { return Hold(console, job); });
}

void CommandLine::Parts::AddRelease() {
  CLI::App* verb = AddVerb("release", "Let a held job start",
                           {"upipe release demo-x3kqab", "upipe release demo -o json"});
  AddJob(verb);
  AddJson(verb, "the Job");
  OnCall(verb, [this](Console& console) { return Release(console, job); });
}

void CommandLine::Parts::AddCancel() {
  CLI::App* verb = AddVerb(
      "cancel", "Stop a job for good; harmless when it has ended",
      {"upipe cancel demo-x3kqab", "upipe cancel demo --grace 10m", "upipe cancel demo -o json"});
  AddJob(verb);
  AddSpan(verb, "--grace", grace,
          "How long it has to reach the end of a step and checkpoint; 0s = none (default: 5s)");
  AddJson(verb, "the Job");
  OnCall(verb, [this](Console& console) { return Cancel(console, job, grace); });
}

}  // namespace upipe::client
