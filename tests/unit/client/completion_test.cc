// Which words may come next on a command line.
#include "client/completion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"

namespace upipe::client {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

using Kind = CompletionSource::Kind;

CompletionVerb Program() {
  return {"upipe",
          "",
          {{{"-h", "--help"}, "help", false, {}}, {{"--coordinator"}, "where", true, {}}},
          {},
          {{"list",
            "jobs",
            {{{"--state"}, "state", true, {Kind::kWords, {"queued", "running"}}},
             {{"--since"}, "time", true, {}}},
            {},
            {}},
           {"logs", "log", {{{"-f", "--follow"}, "on", false, {}}}, {{Kind::kJobs, {}}}, {}},
           {"drain", "empty", {}, {{Kind::kWorkers, {}}}, {}},
           {"submit", "hand over", {}, {{Kind::kFiles, {}}}, {}},
           {"local", "here", {}, {}, {{"up", "start", {}, {}, {}}, {"down", "stop", {}, {}, {}}}}}};
}

std::vector<std::string> Words(const std::vector<std::string>& words) {
  CandidateLookups lookups;
  lookups.jobs = [](const std::string& prefix) {
    std::vector<Candidate> found;
    for (const char* id : {"demo-aaaaaa", "demo-bbbbbb", "tiny-cccccc"}) {
      if (absl::StartsWith(id, prefix)) found.push_back({id, "RUNNING"});
    }
    return found;
  };
  lookups.workers = [](const std::string&) {
    return std::vector<Candidate>{{"worker-0", "READY"}};
  };
  const auto candidates = Complete(Program(), words, lookups);
  if (!candidates) return {"FILES"};
  std::vector<std::string> found;
  for (const Candidate& candidate : *candidates) found.push_back(candidate.word);
  return found;
}

TEST(Completion, VerbsThenTheirWords) {
  EXPECT_THAT(Words({"l"}), ElementsAre("list", "logs", "local"));
  EXPECT_THAT(Words({}), ElementsAre("list", "logs", "drain", "submit", "local"));
  EXPECT_THAT(Words({"drain", ""}), ElementsAre("worker-0"));
  EXPECT_THAT(Words({"local", ""}), ElementsAre("up", "down"));
  EXPECT_THAT(Words({"logs", "demo"}), ElementsAre("demo-aaaaaa", "demo-bbbbbb"));
  EXPECT_THAT(Words({"logs", "-f", "t"}), ElementsAre("tiny-cccccc"));
  EXPECT_THAT(Words({"logs", "demo-aaaaaa", ""}), IsEmpty());  // it takes one
  EXPECT_THAT(Words({"submit", ""}), ElementsAre("FILES"));
  EXPECT_THAT(Words({"nonsense", "x"}), testing::SizeIs(0));
}

TEST(Completion, OptionsAndTheirValues) {
  EXPECT_THAT(Words({"list", "--s"}), ElementsAre("--state", "--since"));
  EXPECT_THAT(Words({"list", "--"}), ElementsAre("--state", "--since", "--help", "--coordinator"));
  EXPECT_THAT(Words({"list", "--state", ""}), ElementsAre("queued", "running"));
  EXPECT_THAT(Words({"list", "--state", "r"}), ElementsAre("running"));
  EXPECT_THAT(Words({"list", "--state=r"}), ElementsAre("--state=running"));
  EXPECT_THAT(Words({"list", "--state", "=", "r"}), ElementsAre("running"));  // as bash cuts it
  EXPECT_THAT(Words({"--coordinator", "h:1", "logs", "t"}), ElementsAre("tiny-cccccc"));
  EXPECT_THAT(Words({"logs", "--", "-"}), IsEmpty());
}

TEST(Completion, NothingUntrustedReachesTheShellRaw) {
  EXPECT_EQ(RenderCandidates(std::vector<Candidate>{{"a\nb", "x\ty"}}), "a b\tx y\n");
}

}  // namespace
}  // namespace upipe::client
