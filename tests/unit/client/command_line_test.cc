// The command line whole: help that teaches, examples that parse, options that reach the request.
#include "client/command_line.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "client/commands.h"
#include "client/time_text.h"
#include "tests/unit/client/fake_coordinator.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

// Hands every call to a coordinator the test keeps.
class Borrowed : public CoordinatorClient {
 public:
  explicit Borrowed(FakeCoordinator& fake) : fake_(fake) {}
  absl::StatusOr<v1::Job> Submit(const v1::SubmitRequest& r) override { return fake_.Submit(r); }
  absl::StatusOr<v1::Job> GetJob(const std::string& id) override { return fake_.GetJob(id); }
  absl::StatusOr<v1::ListJobsResponse> ListJobs(const v1::ListJobsRequest& r) override {
    return fake_.ListJobs(r);
  }
  absl::StatusOr<v1::Job> Cancel(const v1::CancelRequest& r) override { return fake_.Cancel(r); }
  absl::StatusOr<v1::Job> Hold(const std::string& id) override { return fake_.Hold(id); }
  absl::StatusOr<v1::Job> Release(const std::string& id) override { return fake_.Release(id); }
  absl::StatusOr<v1::WhyResponse> Why(const std::string& id) override { return fake_.Why(id); }
  absl::StatusOr<v1::ListNodesResponse> ListNodes() override { return fake_.ListNodes(); }
  absl::StatusOr<v1::Node> Cordon(const v1::CordonRequest& r) override { return fake_.Cordon(r); }
  absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& r) override {
    return fake_.Drain(r);
  }
  absl::StatusOr<v1::Node> Uncordon(const std::string& worker) override {
    return fake_.Uncordon(worker);
  }
  absl::StatusOr<v1::Node> FenceNode(const std::string& worker) override {
    return fake_.FenceNode(worker);
  }
  absl::Status ForgetNode(const std::string& worker) override { return fake_.ForgetNode(worker); }
  absl::Status Backup(const OnBackup& on) override { return fake_.Backup(on); }
  absl::Status Watch(const std::string& id, absl::Duration limit, const OnWatch& on) override {
    return fake_.Watch(id, limit, on);
  }
  absl::Status Logs(const v1::LogsRequest& request, const OnLogs& on) override {
    return fake_.Logs(request, on);
  }

 private:
  FakeCoordinator& fake_;
};

class CommandLineTest : public testing::Test {
 protected:
  std::unique_ptr<CommandLine> Make(const std::string& coordinator = "h:1") {
    return std::make_unique<CommandLine>(Surroundings{
        "1.2.3", coordinator, "/nonexistent/state", "/nonexistent/bin", std::nullopt, out_, err_,
        [this](const std::string& address, absl::Duration) {
          connected_.push_back(address);
          return std::make_unique<Borrowed>(fake_);
        },
        [this](const std::string& verb, const std::vector<std::string>& arguments) {
          executed_ = verb + " " + absl::StrJoin(arguments, " ");
          return 7;
        },
        ask_});
  }
  int Run(const std::vector<std::string>& arguments) { return Make()->Run(arguments); }

  FakeCoordinator fake_;
  std::ostringstream out_, err_;
  std::vector<std::string> connected_;
  std::string executed_;
  std::function<std::optional<std::string>(const std::string&)> ask_;
};

// Calls visit(path, verb) for the program and every verb below it.
void ForEachVerb(
    const CompletionVerb& verb, const std::vector<std::string>& path,
    const std::function<void(const std::vector<std::string>&, const CompletionVerb&)>& visit) {
  visit(path, verb);
  for (const CompletionVerb& below : verb.verbs) {
    std::vector<std::string> below_path = path;
    below_path.push_back(below.name);
    ForEachVerb(below, below_path, visit);
  }
}

bool IsSibling(const std::vector<std::string>& path) {
  return path == std::vector<std::string>{"run"} || path == std::vector<std::string>{"plan"} ||
         path == std::vector<std::string>{"data"} || path == std::vector<std::string>{"verify"} ||
         path == std::vector<std::string>{"calibrate"} ||
         path == std::vector<std::string>{"selfcheck"};
}

// The words of a shell command, quotes understood, up to what the shell itself reads.
std::vector<std::string> ShellWords(const std::string& line) {
  std::vector<std::string> words = {""};
  char quote = 0;
  for (const char c : line) {
    if (c == quote) {
      quote = 0;
    } else if (quote == 0 && (c == '\'' || c == '"')) {
      quote = c;
    } else if (quote == 0 && (c == '&' || c == '>' || c == '|' || c == ')')) {
      break;
    } else if (quote == 0 && c == ' ') {
      if (!words.back().empty()) words.emplace_back();
    } else {
      words.back() += c;
    }
  }
  if (words.back().empty()) words.pop_back();
  return words;
}

std::vector<std::string> ExamplesIn(const std::string& help) {
  std::vector<std::string> examples;
  const size_t begin = help.find("Examples:");
  if (begin == std::string::npos) return examples;
  for (const absl::string_view line : absl::StrSplit(help.substr(begin), '\n')) {
    const size_t at = line.find("upipe ");
    if (at != absl::string_view::npos) examples.emplace_back(line.substr(at));
  }
  return examples;
}

TEST_F(CommandLineTest, EveryVerbHasExamplesAndTheyParse) {
  int verbs = 0;
  const auto line = Make();
  ForEachVerb(line->Describe(), {}, [&](const auto& path, const CompletionVerb& verb) {
    EXPECT_NE(verb.description, "") << verb.name;
    if (path.empty() || IsSibling(path)) return;
    ++verbs;
    const std::vector<std::string> examples = ExamplesIn(line->Help(path));
    EXPECT_GE(examples.size(), 2u) << verb.name;
    for (const std::string& example : examples) {
      std::vector<std::string> words = ShellWords(example);
      EXPECT_EQ(words.at(0), "upipe");
      words.erase(words.begin());
      EXPECT_EQ(words.at(0), path.at(0)) << example;
      EXPECT_EQ(Make()->Parse(words), std::nullopt) << example << "\n" << err_.str();
    }
  });
  EXPECT_GE(verbs, 26);
}

TEST_F(CommandLineTest, EveryOptionWithAValueSaysItsDefault) {
  ForEachVerb(Make()->Describe(), {}, [&](const auto&, const CompletionVerb& verb) {
    for (const CompletionOption& option : verb.options) {
      EXPECT_NE(option.description, "") << verb.name << " " << option.names.back();
      if (!option.takes_value) continue;
      EXPECT_THAT(option.description, HasSubstr("default")) << verb.name;
    }
  });
}

TEST_F(CommandLineTest, HelpAndVersionGoToStdoutAndMistakesToStderr) {
  EXPECT_EQ(Run({"list", "--help"}), kExitDone);
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("--since TIME"), HasSubstr("Examples:")));
  EXPECT_EQ(Run({"--version"}), kExitDone);
  EXPECT_THAT(out_.str(), HasSubstr("upipe 1.2.3"));
  EXPECT_EQ(err_.str(), "");
  for (const std::vector<std::string>& wrong :
       std::vector<std::vector<std::string>>{{},
                                             {"lst"},
                                             {"list", "--state", "sleeping"},
                                             {"list", "--since", "yesterday"},
                                             {"list", "--limit", "0"},
                                             {"list", "--name", std::string(100'000, 'a')},
                                             {"logs", "j", "--rank", "-1"},
                                             {"logs", "j", "--tail", "x"},
                                             {"submit", "f", "--request-id", std::string(129, 'x')},
                                             {"completion", "tcsh"},
                                             {"submit", "f", "--priority", "1001"},
                                             {"submit", "f", "--time-limit", "soon"},
                                             {"logs", "j", "--generation", "0"},
                                             {"cancel", "j", "--grace", "-5s"},
                                             {"drain"},
                                             {"drain", "a", "--timeout", "0"},
                                             {"node"},
                                             {"node", "bury", "a"},
                                             {"admin", "backup"},
                                             {"cancel"}}) {
    err_.str("");
    EXPECT_EQ(Run(wrong), kExitWrongRequest) << absl::StrJoin(wrong, " ").substr(0, 80);
    EXPECT_NE(err_.str(), "");
  }
  EXPECT_THAT(connected_, SizeIs(0));
}

TEST_F(CommandLineTest, ListOptionsReachTheRequest) {
  EXPECT_EQ(Run({"list", "--state", "Running", "--state", "queued", "--name", "demo", "--since",
                 "2h", "--limit", "20", "-o", "json"}),
            kExitDone);
  ASSERT_THAT(fake_.listed, SizeIs(1));
  const v1::ListJobsRequest& request = fake_.listed[0];
  EXPECT_THAT(request.states(), ElementsAre(v1::JOB_STATE_RUNNING, v1::JOB_STATE_QUEUED));
  EXPECT_EQ(request.id_prefix(), "demo");
  EXPECT_EQ(request.page_size(), 20);
  EXPECT_TRUE(request.has_submitted_from_unix_millis());
  EXPECT_FALSE(request.has_submitted_until_unix_millis());
  EXPECT_TRUE(nlohmann::json::parse(out_.str()).contains("jobs"));
}

TEST_F(CommandLineTest, OperatorsOptionsReachTheRequest) {
  v1::Job job;
  job.set_id("demo-aaaaaa");
  fake_.jobs = {job};
  fake_.nodes.add_nodes()->set_worker("a");
  EXPECT_EQ(Run({"cancel", "demo", "--grace", "1m30s"}), kExitDone);
  EXPECT_EQ(Run({"cancel", "demo", "--grace", "0s"}), kExitDone);
  EXPECT_EQ(Run({"cancel", "demo"}), kExitDone);
  ASSERT_THAT(fake_.cancelled, SizeIs(3));
  EXPECT_EQ(fake_.cancelled[0].grace_millis(), 90'000);
  EXPECT_TRUE(fake_.cancelled[1].has_grace_millis());
  EXPECT_FALSE(fake_.cancelled[2].has_grace_millis());
  EXPECT_EQ(Run({"hold", "demo"}), kExitDone);
  EXPECT_EQ(Run({"release", "demo"}), kExitDone);
  EXPECT_EQ(Run({"cordon", "a", "--reason", "new disk"}), kExitDone);
  EXPECT_EQ(Run({"uncordon", "a"}), kExitDone);
  EXPECT_EQ(Run({"drain", "a", "--grace", "30m", "--reason", "new disk"}), kExitDone);
  EXPECT_EQ(Run({"node", "fence", "a", "--yes"}), kExitDone);
  EXPECT_EQ(Run({"node", "forget", "--yes", "a"}), kExitDone);
  EXPECT_THAT(fake_.changes, ElementsAre("hold demo-aaaaaa", "release demo-aaaaaa",
                                         "cordon a new disk", "uncordon a", "fence a", "forget a"));
  ASSERT_THAT(fake_.drained, SizeIs(1));
  EXPECT_EQ(fake_.drained[0].grace_millis(), 1'800'000);
  EXPECT_EQ(fake_.drained[0].reason(), "new disk");
}

TEST_F(CommandLineTest, AFenceWithoutTheOperatorsWordDoesNothing) {
  fake_.nodes.add_nodes()->set_worker("a");
  EXPECT_EQ(Run({"node", "fence", "a"}), kExitWrongRequest);  // nobody is there to ask
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("its machine is off"), HasSubstr("--yes")));
  std::string typed = "yes";
  ask_ = [&](const std::string& sentence) {
    EXPECT_THAT(sentence, HasSubstr("Type the worker's name"));
    return typed;
  };
  EXPECT_EQ(Run({"node", "forget", "a"}), kExitWrongRequest);
  EXPECT_THAT(fake_.changes, testing::IsEmpty());
  typed = "a";
  EXPECT_EQ(Run({"node", "forget", "a"}), kExitDone);
  EXPECT_THAT(fake_.changes, ElementsAre("forget a"));
}

TEST_F(CommandLineTest, AnErrorBeforeAnyCallIsJsonToo) {
  EXPECT_EQ(Make("")->Run({"nodes", "-o", "json"}), kExitWrongRequest);
  EXPECT_EQ(nlohmann::json::parse(err_.str()).at("error").at("reason"), "COORDINATOR_UNKNOWN");
}

TEST_F(CommandLineTest, TheCoordinatorOptionBeatsTheEnvironment) {
  EXPECT_EQ(Run({"nodes", "--coordinator", "other:2"}), kExitDone);
  EXPECT_EQ(Run({"nodes"}), kExitDone);
  EXPECT_THAT(connected_, ElementsAre("other:2", "h:1"));
}

TEST_F(CommandLineTest, SiblingsGetTheirArgumentsUntouched) {
  EXPECT_EQ(Run({"plan", "job.yaml", "--set", "a=b", "--help"}), 7);
  EXPECT_EQ(executed_, "plan job.yaml --set a=b --help");
}

TEST_F(CommandLineTest, CompletesItsOwnWords) {
  v1::Job job;
  job.set_id("demo-aaaaaa");
  fake_.jobs = {job};
  v1::Node& node = *fake_.nodes.add_nodes();
  node.set_worker("worker-0");
  node.set_state(v1::NODE_STATE_READY);
  node.set_cordoned(true);
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"complete", "--", "prese"}, "presets\t"},
      {{"complete", "--", "list", "--state", "f"}, "failed\t\n"},
      {{"complete", "--", "logs", "-f", "de"}, "demo-aaaaaa\t"},
      {{"complete", "--", "--coordinator", "other:2", "cancel", ""}, "demo-aaaaaa\t"},
      {{"complete", "--", "local", "up", "--help", "--w"}, "--workers\t"},
      {{"complete", "--", "submit", ""}, ":files\n"},
      {{"complete", "--", "drain", "wor"}, "worker-0\tREADY, cordoned\n"},
      {{"complete", "--", "node", "fence", "--yes", ""}, "worker-0\t"},
      {{"complete", "--", "node", "f"}, "fence\t"},
      {{"complete", "--", "admin", "backup", ""}, ":files\n"},
      {{"complete"}, "submit\t"}};
  for (const auto& [arguments, begins] : cases) {
    out_.str("");
    EXPECT_EQ(Run(arguments), kExitDone);
    EXPECT_THAT(out_.str(), testing::StartsWith(begins));
  }
  EXPECT_THAT(connected_, ElementsAre("h:1", "other:2", "h:1", "h:1"));
}

TEST_F(CommandLineTest, PresetsNeedNoCoordinator) {
  EXPECT_EQ(Make("")->Run({"presets"}), kExitDone);
  EXPECT_THAT(out_.str(), testing::ContainsRegex(
                              "llama3-8b +32 +4096 +32 +8 +128 +14336 +128,256 +8,030,261,248"));
  out_.str("");
  EXPECT_EQ(Make("")->Run({"presets", "-o", "json"}), kExitDone);
  const auto presets = nlohmann::json::parse(out_.str()).at("presets");
  ASSERT_GT(presets.size(), 0u);
  EXPECT_TRUE(presets[0].at("model").contains("hidden_size"));
}

TEST(Spans, HaveUnits) {
  EXPECT_EQ(*ParseSpan("90s"), absl::Seconds(90));
  EXPECT_EQ(*ParseSpan("1d"), absl::Hours(24));
  EXPECT_EQ(*ParseSpan("0s"), absl::ZeroDuration());
  for (const char* wrong : {"", "5", "-1s", "soon", "inf"}) EXPECT_FALSE(ParseSpan(wrong).ok());
}

TEST(Moments, AreSpansBackOrDates) {
  const absl::Time now = absl::FromUnixSeconds(1'000'000);
  EXPECT_EQ(*ParseMoment("90s", now), now - absl::Seconds(90));
  EXPECT_EQ(*ParseMoment("1h30m", now), now - absl::Minutes(90));
  EXPECT_EQ(*ParseMoment("3d", now), now - absl::Hours(72));
  EXPECT_EQ(*ParseMoment("2w", now), now - absl::Hours(336));
  EXPECT_EQ(*ParseMoment("2026-01-31T08:15:30Z", now), absl::FromUnixSeconds(1769847330));
  EXPECT_EQ(*ParseMoment("2026-01-31 08:15", now),
            absl::FromCivil(absl::CivilMinute(2026, 1, 31, 8, 15), absl::LocalTimeZone()));
  EXPECT_EQ(*ParseMoment("2026-01-31", now),
            absl::FromCivil(absl::CivilDay(2026, 1, 31), absl::LocalTimeZone()));
  for (const char* wrong : {"", "d", "-2h", "nand", "inf", "1e300d", "5", "2026-13-01", "2h ago"}) {
    EXPECT_FALSE(ParseMoment(wrong, now).ok()) << wrong;
  }
  EXPECT_THAT(ParseMoment("2h ago", now).status().message(), HasSubstr("2h or 3d for so long ago"));
}

}  // namespace
}  // namespace upipe::client
