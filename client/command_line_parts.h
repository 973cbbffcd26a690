// The command line's inside: the CLI11 program, what its options fill in, and the builders that the
// verbs share. Private to client/command_line.cc, job_verbs.cc and operator_verbs.cc, the only
// files of the client that know CLI11.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "client/command_line.h"
#include "client/commands.h"
#include "client/job_page.h"
#include "client/job_trace.h"
#include "client/local/local_commands.h"
#include "client/node_commands.h"
#include "client/support_bundle.h"
#include "client/top.h"

namespace upipe::client {

struct CommandLine::Parts {
  using Kind = CompletionSource::Kind;

  explicit Parts(Surroundings given);

  // Builders of options shared by verbs.
  CLI::App* AddVerb(const std::string& name, const std::string& purpose,
                    const std::vector<std::string>& examples);
  // One below another: `upipe node fence`.
  CLI::App* AddBelow(CLI::App* verb, const std::string& name, const std::string& purpose,
                     const std::vector<std::string>& examples);
  // A command that talks to the coordinator.
  void OnCall(CLI::App* verb, std::function<int(Console&)> call);
  void AddJson(CLI::App* verb, const std::string& what);
  void AddJob(CLI::App* verb);
  void AddTarget(CLI::App* verb, std::string& path, const std::string& what);
  void AddWorker(CLI::App* verb);
  void AddReason(CLI::App* verb);
  // A span of time, "90s" or "3d"; `target` stays empty without it.
  void AddSpan(CLI::App* verb, const std::string& name, std::optional<absl::Duration>& target,
               const std::string& purpose);

  // job_verbs.cc
  void AddSubmit();
  void AddList();
  void AddDescribe();
  void AddWhy();
  void AddWatch();
  void AddWait();
  void AddLogs();
  void AddReport();
  void AddTrace();
  void AddTop();
  void AddCheckpoints();
  void AddHold();
  void AddRelease();
  void AddCancel();

  // operator_verbs.cc
  void AddNodes();
  void AddCordon();
  void AddDrain();
  void AddUncordon();
  void AddNode();
  void AddAdmin();
  void AddSupportBundle();
  void AddPresets();
  void AddLocal();
  void AddLocalUp(CLI::App& verb);
  void OnLocal(CLI::App* verb, std::function<int(const LocalConsole&)> call);
  void AddSibling(const std::string& name, const std::string& purpose);
  void AddCompletion();

  // Running.
  std::string Address() const;
  int WithConsole(const std::function<int(Console&)>& call);
  int PrintCandidates(std::vector<std::string> words);
  std::string AddressIn(const std::vector<std::string>& words) const;
  CompletionVerb DescribeVerb(const CLI::App& verb) const;

  Surroundings surroundings;
  CLI::App app{"Trains Transformers on long contexts.", "upipe"};
  std::map<const CLI::Option*, CompletionSource> sources;
  std::string coordinator;
  std::string job;
  std::string worker;
  std::string reason;
  std::string output;
  SubmitOptions submit;
  ListOptions list;
  std::vector<std::string> state_names;
  std::string since;
  std::string until;
  LogsOptions logs;
  ReportOptions report;
  TraceOptions trace;
  TopOptions top;
  std::optional<double> timeout_seconds;
  std::optional<absl::Duration> grace;
  bool wait = false;
  bool yes = false;
  std::string file;
  LocalUpOptions local;
  std::string shell;
  std::function<int()> command;
};

std::string Examples(const std::vector<std::string>& lines);

}  // namespace upipe::client
