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
  absl::StatusOr<v1::Job> Cancel(const std::string& id) override { return fake_.Cancel(id); }
  absl::StatusOr<v1::ListNodesResponse> ListNodes() override { return fake_.ListNodes(); }
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
        }});
  }
  int Run(const std::vector<std::string>& arguments) { return Make()->Run(arguments); }

  FakeCoordinator fake_;
  std::ostringstream out_, err_;
  std::vector<std::string> connected_;
  std::string executed_;
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
         path == std::vector<std::string>{"data"};
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
  EXPECT_GE(verbs, 12);
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
  const std::pair<std::vector<std::string>, std::string> cases[] = {
      {{"complete", "--", "prese"}, "presets\t"},
      {{"complete", "--", "list", "--state", "f"}, "failed\t\n"},
      {{"complete", "--", "logs", "-f", "de"}, "demo-aaaaaa\t"},
      {{"complete", "--", "--coordinator", "other:2", "cancel", ""}, "demo-aaaaaa\t"},
      {{"complete", "--", "local", "up", "--help", "--w"}, "--workers\t"},
      {{"complete", "--", "submit", ""}, ":files\n"},
      {{"complete"}, "submit\t"}};
  for (const auto& [arguments, begins] : cases) {
    out_.str("");
    EXPECT_EQ(Run(arguments), kExitDone);
    EXPECT_THAT(out_.str(), testing::StartsWith(begins));
  }
  EXPECT_THAT(connected_, ElementsAre("h:1", "other:2"));
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
