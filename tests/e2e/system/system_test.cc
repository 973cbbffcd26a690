// The built binaries together: a job from YAML to SUCCEEDED over two workers and UCX, the same bits
// as threads in one process, queueing, cancelling, and every kind of bad input refused with one
// sentence and nothing started.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/metrics/timeline_line.h"
#include "tests/support/cluster/cluster.h"

namespace upipe {
namespace {

using testing::Cluster;
using testing::CommandResult;
using ::testing::HasSubstr;

class SystemTest : public ::testing::Test {
 protected:
  SystemTest() : cluster_(absl::StrCat(::testing::TempDir(), "upipe-system-", getpid())) {
    cluster_.StartCoordinator();
    cluster_.StartWorker("w0", 2);
    cluster_.StartWorker("w1", 2);
  }
  // Submits and returns the id, which -o json prints.
  std::string Submit(const std::string& file) {
    const CommandResult result = cluster_.Upipe({"submit", file, "-o", "json"});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const auto json = nlohmann::json::parse(result.output, nullptr, false);
    return json.is_object() ? json.value("id", "") : "";
  }
  // The coordinator's file of the job accounts for every step and ends with the last one, equal in
  // what does not depend on time.
  void ExpectKept(const std::string& job, const nlohmann::json& last) {
    nlohmann::json kept;
    int64_t steps = 0;
    cluster_.Await("the last step in metrics.jsonl", absl::Seconds(10), [&] {
      std::ifstream file(
          absl::StrCat(cluster_.folder(), "/coordinator/jobs/", job, "/metrics.jsonl"));
      steps = 0;
      for (std::string line; std::getline(file, line);) {
        kept = nlohmann::json::parse(line, nullptr, false);
        if (kept.is_object()) steps += 1 + kept.value("missing_steps", 0);
      }
      return kept.is_object() && kept["step"] == last["step"];
    });
    EXPECT_EQ(steps, last["step"].get<int64_t>());
    for (const char* field : {"loss", "grad_norm", "held_out_loss", "loss_by_position",
                              "held_out_loss_by_position", "sent_to_peer_bytes"}) {
      EXPECT_EQ(kept[field], last[field]) << field;
    }
  }
  // Each worker keeps timelines of its ranks: of step 1 at least, and every head-chunk stage in it.
  void ExpectTimelines(const std::string& job, int ranks) {
    int seen = 0;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(cluster_.folder())) {
      const std::string path = entry.path().string();
      if (entry.path().filename() != "timeline.jsonl" || !absl::StrContains(path, job)) continue;
      std::ifstream file(path);
      std::string line;
      ASSERT_TRUE(std::getline(file, line)) << path;
      const auto timeline = ParseTimelineLine(line);
      ASSERT_TRUE(timeline.ok()) << path << ": " << timeline.status();
      EXPECT_EQ(timeline->step(), 1) << path;
      EXPECT_EQ(timeline->generation(), 1) << path;
      EXPECT_TRUE(absl::StrContains(path, absl::StrCat("r", timeline->rank(), "/"))) << path;
      std::set<std::string> stages;
      for (const auto& slice : timeline->slices()) {
        stages.insert(timeline->stages(slice.stage_name()));
      }
      EXPECT_THAT(stages, ::testing::IsSupersetOf({"projection", "exchange", "attention", "return",
                                                   "mlp", "loss", "weights", "optimizer"}));
      EXPECT_GT(timeline->memory_size(), 0) << path;
      ++seen;
    }
    EXPECT_EQ(seen, ranks);
  }
  void ExpectAllSlotsFree() {
    cluster_.Await("every slot to be FREE", absl::Seconds(10), [&] {
      int free = 0;
      for (const auto& node : cluster_.Nodes()) {
        for (const auto& slot : node.value("slots", nlohmann::json::array())) {
          free += slot.value("state", "") == "SLOT_STATE_FREE";
        }
      }
      return free == 4;
    });
  }

  const int segments_before_ = testing::NumSharedMemorySegments();
  Cluster cluster_;
};

TEST_F(SystemTest, TrainersOverUcxGiveTheBitsOfThreadsInOneProcess) {
  const std::string file = cluster_.JobFile("bits", 4, 5);
  const std::string job = Submit(file);
  EXPECT_EQ(cluster_.Upipe({"wait", job}, absl::Seconds(90)).exit_code, 0);
  const auto described = cluster_.Describe(job);
  EXPECT_EQ(described.value("shown_state", ""), "SUCCEEDED");
  const auto report = described["last_report"];
  EXPECT_EQ(report.value("step", ""), "5");

  ExpectTimelines(job, 4);

  const std::string metrics = cluster_.folder() + "/threads.jsonl";
  const std::string own_timelines = cluster_.folder() + "/threads.timelines";
  const CommandResult threads =
      testing::RunCommand({testing::BinDir() + "/upipe-run", file, "--metrics", metrics,
                           "--timeline", own_timelines, "--quiet"});
  ASSERT_EQ(threads.exit_code, 0) << threads.errors;
  int ranks_told = 0;
  std::ifstream timelines(own_timelines);
  for (std::string line; std::getline(timelines, line);) {
    const auto timeline = ParseTimelineLine(line);
    ASSERT_TRUE(timeline.ok()) << timeline.status();
    ranks_told += timeline->step() == 1;
  }
  EXPECT_EQ(ranks_told, 4);
  bool compared = false;
  std::ifstream lines(metrics);
  for (std::string line; std::getline(lines, line);) {
    const auto row = nlohmann::json::parse(line);
    if (row["rank"] != 0 || row["step"] != 5) continue;
    compared = true;
    for (const char* field : {"loss", "grad_norm", "held_out_loss"}) {
      EXPECT_EQ(row[field], report[field]) << field;
    }
    ExpectKept(job, row);
    // Measured equals planned, in both, to the byte.
    const auto planned = described["plan"]["ranks"][0]["memory"];
    EXPECT_EQ(report["memory"]["arena_bytes"], planned["arena_bytes"]);
    EXPECT_EQ(row["memory"]["peak_bytes"].dump(), planned["peak_bytes"].get<std::string>());
  }
  EXPECT_TRUE(compared);
  ExpectAllSlotsFree();
  EXPECT_TRUE(testing::TrainersOf(job).empty());
  EXPECT_EQ(testing::NumSharedMemorySegments(), segments_before_);
}

TEST_F(SystemTest, BusySlotsQueueAndLogsAreReadable) {
  const std::string first = Submit(cluster_.JobFile("first", 4, 100000));
  cluster_.AwaitStep(first, absl::Seconds(60));
  const std::string second = Submit(cluster_.JobFile("second", 2, 2));
  cluster_.AwaitState(second, "QUEUED", absl::Seconds(20));
  EXPECT_NE(cluster_.Describe(second).value("reason", ""), "");
  EXPECT_EQ(cluster_.Upipe({"cancel", first}).exit_code, 0);
  EXPECT_EQ(cluster_.Upipe({"wait", first}).exit_code, 3);
  EXPECT_TRUE(testing::TrainersOf(first).empty());
  EXPECT_EQ(cluster_.Upipe({"wait", second}).exit_code, 0);
  EXPECT_EQ(cluster_.Upipe({"logs", first, "--rank", "1"}).exit_code, 0);
  EXPECT_EQ(cluster_.Upipe({"cancel", first}).exit_code, 0);  // idempotent
  ExpectAllSlotsFree();
  EXPECT_EQ(testing::NumSharedMemorySegments(), segments_before_);
}

TEST_F(SystemTest, BadInputIsRefusedWithItsNumberAndStartsNothing) {
  const std::string good = cluster_.JobFile("good", 4, 3);
  auto write = [&](const std::string& name, const std::string& text) {
    const std::string path = absl::StrCat(cluster_.folder(), "/", name, ".yaml");
    std::ofstream(path) << text;
    return path;
  };
  std::ifstream in(good);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  struct Bad {
    std::vector<std::string> arguments;
    std::vector<std::string> says;
  };
  const std::vector<Bad> cases = {
      {{"submit", good, "--set", "model.num_kv_heads=3"}, {"3", "8"}},
      {{"submit", good, "--set", "parallel.heads_per_stage=6"}, {"6", "4"}},
      {{"submit", good, "--set", "parallel.ranks=auto"}, {"parallel.ranks", "auto"}},
      {{"submit", good, "--set", "train.context=16K", "--set", "train.eval_sequences=0", "--set",
        "train.memory_per_rank=1MiB"},
       {"1.0 MiB"}},
      {{"submit", good, "--set", "parallel.ranks=5", "--set", "parallel.heads_per_stage=5"},
       {"5", "4"}},
      {{"submit", good, "--set", "data.path=/nonexistent/data"}, {"/nonexistent/data"}},
      {{"submit", write("unknown", text + "trian: {steps: 3}\n")}, {"trian", "train"}},
      {{"submit", write("duplicate", text + "name: again\n")}, {"name", "6"}},
      {{"submit", write("garbage", std::string("\x7f"
                                               "ELF\0\1\2",
                                               7))},
       {"garbage.yaml"}},
      {{"submit", cluster_.folder() + "/missing.yaml"}, {"missing.yaml"}},
      {{"submit", good, "--set", "model.vocab_size=100"}, {"257", "100"}},
      {{"submit", good, "--set", "parallel.isa_cap=AVX9"}, {"AVX9", "AVX2"}},
  };
  for (const Bad& bad : cases) {
    const CommandResult result = cluster_.Upipe(bad.arguments);
    const std::string where =
        absl::StrCat(bad.arguments.back(), "\n", result.output, result.errors);
    EXPECT_NE(result.exit_code, 0) << where;
    for (const std::string& word : bad.says)
      EXPECT_THAT(result.errors + result.output, HasSubstr(word)) << where;
  }
  // Binary garbage where packed data should be.
  std::filesystem::copy(cluster_.Data(), cluster_.folder() + "/broken");
  std::ofstream(cluster_.folder() + "/broken/train.tokens", std::ios::binary)
      << std::string(5000, '\xa5');
  const CommandResult broken =
      cluster_.Upipe({"submit", good, "--set", "data.path=" + cluster_.folder() + "/broken"});
  EXPECT_NE(broken.exit_code, 0);
  EXPECT_THAT(broken.errors + broken.output, HasSubstr("train.tokens"));
  const auto jobs = nlohmann::json::parse(cluster_.Upipe({"list", "-o", "json"}).output);
  for (const auto& job : jobs.value("jobs", nlohmann::json::array())) {
    EXPECT_EQ(job.value("shown_state", ""), "FAILED") << job;
    EXPECT_TRUE(testing::TrainersOf(job.value("id", "?")).empty());
  }
  ExpectAllSlotsFree();
}

TEST(Coordinator, ServesPlaintextMetricsOnLoopbackOnly) {
  const CommandResult result =
      testing::RunCommand({testing::BinDir() + "/upipe-coordinator", "--state-dir",
                           absl::StrCat(::testing::TempDir(), "upipe-metrics-", getpid()),
                           "--metrics-listen", "0.0.0.0:0"},
                          absl::Seconds(10));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.errors, HasSubstr("--insecure-listen"));
}

// What is auto is chosen by the coordinator's planner, stored with the job, and what the trainers
// took is what was planned.
TEST_F(SystemTest, AnAutoJobIsPlannedAtSubmitAndTakesWhatWasPlanned) {
  const std::string file = cluster_.JobFile("planned", 4, 3, "memory: {policy: auto}\n");
  const CommandResult result = cluster_.Upipe({"submit", file, "--set", "parallel.method=auto",
                                               "--set", "parallel.heads_per_stage=", "-o", "json"});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  const std::string job = nlohmann::json::parse(result.output).value("id", "");
  EXPECT_EQ(cluster_.Upipe({"wait", job}, absl::Seconds(90)).exit_code, 0);
  const auto described = cluster_.Describe(job);
  EXPECT_EQ(described.value("shown_state", ""), "SUCCEEDED");
  EXPECT_EQ(described["spec"]["parallel"]["method"], "METHOD_AUTO");
  const auto plan = described["plan"];
  EXPECT_NE(plan["spec"]["parallel"]["method"], "METHOD_AUTO");
  EXPECT_GT(plan["candidates"].size(), 1u);
  EXPECT_EQ(plan["ranks"][0]["memory"]["peak_bytes"],
            described["last_report"]["memory"]["peak_bytes"]);
}

}  // namespace
}  // namespace upipe
