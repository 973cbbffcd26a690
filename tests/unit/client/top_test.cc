// `upipe top`: lines that fit whatever is named, numbers where they belong, and a coordinator that
// comes and goes.
#include "client/top.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/terminal_text.h"
#include "client/top_view.h"
#include "tests/unit/client/console_test.h"

namespace upipe::client {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;

constexpr int64_t kMiB = 1 << 20;

void AddTag(v1::MemoryUsage& memory, const std::string& tag, int64_t bytes) {
  v1::TagBytes& it = *memory.add_tags();
  it.set_tag(tag);
  it.set_at_peak_bytes(bytes);
  it.set_peak_bytes(bytes);
  memory.set_peak_bytes(memory.peak_bytes() + bytes);
}

v1::Job RunningJob(const std::string& id, int ranks) {
  v1::Job job;
  job.set_id(id);
  job.set_state(v1::JOB_STATE_RUNNING);
  job.set_generation(2);
  job.mutable_restarts()->set_infrastructure(2);
  job.mutable_plan()->mutable_spec()->mutable_model()->set_num_layers(32);
  job.mutable_plan()->mutable_budget()->set_device_bytes(80 * kMiB);
  for (int r = 0; r < ranks; ++r) {
    v1::RankPlan& plan = *job.mutable_plan()->add_ranks();
    plan.set_rank(r);
    plan.mutable_memory()->set_peak_bytes(60 * kMiB);
    v1::RankStatus& rank = *job.add_ranks();
    rank.set_rank(r);
    rank.set_node(absl::StrCat("w", r / 2));
    rank.set_slot(r % 2);
    rank.set_state(v1::RANK_STATE_RUNNING);
    v1::RankPosition& position = *rank.mutable_position();
    position.set_rank(r);
    position.set_pass("backward");
    position.set_layer(20 - r);
    position.set_stage(1);
    position.set_collective(100 + r);
    v1::StepReport& report = *rank.mutable_last_report();
    report.set_step(120);
    report.set_total_steps(400);
    report.set_loss(3.2145);
    report.set_tokens_per_second(12345);
    report.set_step_seconds(2);
    report.set_comm_seconds(r == 1 ? 0.25 : 1.5);
    AddTag(*report.mutable_memory(), "weights", 20 * kMiB);
    AddTag(*report.mutable_memory(), "attn_q", 20 * kMiB);
  }
  *job.mutable_last_report() = job.ranks(0).last_report();
  return job;
}

v1::ListNodesResponse TwoNodes() {
  v1::ListNodesResponse nodes;
  for (const char* worker : {"w0", "w1"}) {
    v1::Node& node = *nodes.add_nodes();
    node.set_worker(worker);
    node.set_state(v1::NODE_STATE_READY);
    node.add_slots()->set_state(v1::SLOT_STATE_BUSY);
    node.add_slots()->set_state(v1::SLOT_STATE_FREE);
  }
  return nodes;
}

std::string Text(const std::vector<std::string>& lines) { return absl::StrJoin(lines, "\n"); }

TEST(TerminalText, IsAsWideAsItIsSaidToBe) {
  EXPECT_EQ(Fitted("abc", 2), "ab");
  EXPECT_EQ(Padded("abc", 5), "abc  ");
  EXPECT_EQ(Fitted("漢字", 3), "漢");
  EXPECT_EQ(Padded("漢字", 3), "漢 ");
  EXPECT_EQ(ColumnsOf("漢字🔥"), 6u);
  EXPECT_EQ(ColumnsOf("e\xcc\x81"), 1u);              // e and an accent
  EXPECT_EQ(Fitted("a\x1b[2Jb\r\n", 9), "a [2Jb  ");  // no escape, no new line
  EXPECT_EQ(Fitted("a\xc2\x9b"
                   "2J",
                   9),
            "a 2J");  // the one-byte form of ESC [
  EXPECT_EQ(Fitted("a\xe2\x80\xae"
                   "b",
                   9),
            "a b");  // right-to-left override
  EXPECT_EQ(Fitted("a\xff\xc3", 9), "a??");
}

TEST(Top, ShowsTheClusterAndItsJobs) {
  TopCluster cluster{TwoNodes(), {RunningJob("demo-x3kqab", 4)}, {}};
  cluster.nodes.mutable_nodes(1)->set_cordoned(true);
  cluster.nodes.mutable_nodes(1)->set_cordon_reason("new disk");
  v1::Job& waiting = cluster.jobs.emplace_back();
  waiting.set_id("next-abcdef");
  waiting.set_state(v1::JOB_STATE_QUEUED);
  waiting.set_reason("needs 4 slots, 2 are free");
  cluster.paces["demo-x3kqab"].Take(cluster.jobs[0]);
  const std::vector<std::string> lines =
      RenderTop(cluster, "", absl::UnixEpoch(), TerminalSize{80, 24});
  const std::string text = Text(lines);
  EXPECT_THAT(lines[0], HasSubstr("2 workers (1 cordoned)  2 of 4 slots busy, 2 free"));
  EXPECT_THAT(text, HasSubstr("w1: READY, cordoned, new disk"));
  EXPECT_THAT(
      text, HasSubstr("demo-x3kqab          RUNNING    2 restarts step 120/400 [###.......] 30 %"));
  EXPECT_THAT(text, HasSubstr("loss 3.2145  12,345 tokens/s  left 9 min 20 s"));
  // The rank that is furthest behind, and the peak against the plan.
  EXPECT_THAT(text,
              HasSubstr("backward, layer 21 of 32, stage 2  peak [#####...] 40.0 MiB of 60.0"));
  EXPECT_THAT(text, HasSubstr("next-abcdef          QUEUED"));
  EXPECT_THAT(text, HasSubstr("  needs 4 slots, 2 are free"));
}

TEST(Top, ShowsTheRanksOfAJob) {
  const v1::Job job = RunningJob("demo-x3kqab", 4);
  Progress pace;
  pace.Take(job);
  const std::vector<std::string> lines =
      RenderTopJob(job, pace, "", absl::UnixEpoch(), TerminalSize{80, 24});
  const std::string text = Text(lines);
  EXPECT_THAT(text, HasSubstr("40.0 MiB of 60.0 MiB  slowest of 4: rank 1 on w0, 1.8 s"));
  EXPECT_THAT(
      text, HasSubstr("bars end at 80.0 MiB, the limit; | is the plan\nW weights, A attention\n"));
  // 12 cells of 80 MiB: 3 of weights, 3 of attention, the plan at 9.
  EXPECT_THAT(text, HasSubstr("2    w1/0        backward layer 19/32 s2"));
  EXPECT_THAT(text, HasSubstr(" 500 ms  [WWWAAA...|..] 40.0 MiB"));
}

// A limit far above the plan would flatten the bars.
TEST(Top, BarsEndAtThePlanWhereTheLimitIsFar) {
  v1::Job job = RunningJob("demo-x3kqab", 1);
  job.mutable_plan()->mutable_budget()->set_device_bytes(800 * kMiB);
  const std::string text =
      Text(RenderTopJob(job, Progress(), "", absl::UnixEpoch(), TerminalSize{80, 24}));
  EXPECT_THAT(text, HasSubstr("bars end at 60.0 MiB, the limit is 800.0 MiB"));
  EXPECT_THAT(text, HasSubstr("[WWWWAAAA....] 40.0 MiB"));
}

TEST(Top, FitsEveryTerminal) {
  v1::Job job = RunningJob("demo-x3kqab", 64);
  const std::string hostile = "\x1b[2J\x1b]0;taken\x07 漢字漢字漢字漢字漢字漢字漢字 \xff\xfe\r\n🔥🔥";
  job.set_reason(hostile);
  job.mutable_cause()->set_message(hostile);
  for (v1::RankStatus& rank : *job.mutable_ranks()) rank.set_node(hostile);
  TopCluster cluster{TwoNodes(), std::vector<v1::Job>(30, job), {}};
  cluster.nodes.mutable_nodes(0)->set_worker(hostile);
  cluster.nodes.mutable_nodes(0)->set_leaving(true);
  Progress pace;
  pace.Take(job);
  for (const TerminalSize size :
       {TerminalSize{80, 24}, TerminalSize{20, 3}, TerminalSize{200, 60}, TerminalSize{80, 1000}}) {
    for (const auto& lines : {RenderTop(cluster, hostile, absl::UnixEpoch(), size),
                              RenderTopJob(job, pace, hostile, absl::UnixEpoch(), size)}) {
      EXPECT_LE(lines.size(), size.lines);
      for (const std::string& line : lines) {
        EXPECT_LE(ColumnsOf(line), size.columns) << line;
        EXPECT_EQ(Fitted(line, 10'000), line) << line;  // nothing a terminal would obey
      }
    }
  }
  EXPECT_THAT(RenderTopJob(job, pace, "", absl::UnixEpoch(), TerminalSize{80, 24}).back(),
              AllOf(StartsWith(".. "), HasSubstr("more lines of ranks")));
}

TEST(Top, OfAJobThatHasNothingYet) {
  v1::Job job;
  job.set_id("demo-x3kqab");
  job.set_state(v1::JOB_STATE_PLANNING);
  EXPECT_THAT(RenderTopJob(job, Progress(), "", absl::UnixEpoch(), TerminalSize()), SizeIs(1));
  job.set_state(v1::JOB_STATE_FAILED);
  job.mutable_cause()->set_message("a rank needs 91.2 GiB");
  EXPECT_THAT(Text(RenderTopJob(job, Progress(), "", absl::UnixEpoch(), TerminalSize())),
              HasSubstr("a rank needs 91.2 GiB"));
}

class TopCommand : public ConsoleTest {};

TEST_F(TopCommand, IsPrintedOnceWhereThereIsNoTerminal) {
  coordinator_.nodes = TwoNodes();
  coordinator_.jobs = {RunningJob("demo-x3kqab", 2)};
  EXPECT_EQ(Top(console_, {}), kExitDone);
  EXPECT_THAT(pauses_, SizeIs(0));
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("2 of 4 slots busy"), HasSubstr("layer 21 of 32"),
                                Not(HasSubstr("\x1b"))));
}

TEST_F(TopCommand, OfAJobEndsWithIt) {
  console_.terminal_width = 80;
  coordinator_.jobs = {RunningJob("demo-x3kqab", 2)};
  console_.pause = [this](absl::Duration d) {
    pauses_.push_back(d);
    coordinator_.jobs[0].set_state(v1::JOB_STATE_SUCCEEDED);
  };
  EXPECT_EQ(Top(console_, {.job = "demo", .every = absl::Seconds(5)}), kExitDone);
  EXPECT_THAT(pauses_, ElementsAre(absl::Seconds(5)));
  EXPECT_THAT(out_.str(), HasSubstr("SUCCEEDED"));
  EXPECT_THAT(out_.str(), HasSubstr("A\r"));  // drawn over the first look
}

TEST_F(TopCommand, SaysThatTheCoordinatorIsAwayAndGoesOn) {
  console_.terminal_width = 80;
  coordinator_.jobs = {RunningJob("demo-x3kqab", 2)};
  coordinator_.node_answers = {TwoNodes(), absl::UnavailableError("cannot reach h:1"), TwoNodes(),
                               absl::PermissionDeniedError("enough")};
  EXPECT_EQ(Top(console_, {}), kExitFailed);
  EXPECT_THAT(pauses_, SizeIs(3));
  EXPECT_THAT(out_.str(), HasSubstr("** no answer for 2.0 s, trying again: cannot reach h:1"));
  const size_t gap = out_.str().find("** no answer");
  EXPECT_EQ(out_.str().find("** no answer", gap + 1), std::string::npos);
  EXPECT_THAT(out_.str().substr(gap), HasSubstr("2 of 4 slots busy"));  // what was known stays
  EXPECT_THAT(err_.str(), HasSubstr("enough"));
}

TEST_F(TopCommand, GivesUpOnACoordinatorThatWasNeverThere) {
  console_.terminal_width = 80;
  coordinator_.node_answers = {absl::UnavailableError("cannot reach h:1")};
  EXPECT_EQ(Top(console_, {}), kExitFailed);
  EXPECT_THAT(err_.str(), HasSubstr("cannot reach h:1"));
  EXPECT_EQ(out_.str(), "");
  EXPECT_THAT(pauses_, Each(absl::Seconds(2)));
}

TEST_F(TopCommand, AnUnknownJobIsAWrongRequest) {
  EXPECT_EQ(Top(console_, {.job = "nobody"}), kExitWrongRequest);
}

}  // namespace
}  // namespace upipe::client
