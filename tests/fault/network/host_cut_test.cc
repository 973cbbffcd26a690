// Three hosts: the coordinator's and two workers', a network for control and one between the
// trainers. The payload crosses where it should; a host that falls silent, whole or between the
// trainers only, costs the job a restart and not a bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/support/cluster/cluster.h"
#include "tests/support/network/network_lab.h"

namespace upipe {
namespace {

using ::testing::AnyOf;
using testing::Cluster;
using testing::CommandResult;
using ::testing::HasSubstr;
using testing::NetworkLab;
using testing::TrainersOf;

constexpr int kControl = 0;  // networks
constexpr int kTransport = 1;
constexpr int kSteps = 200;
constexpr int kSavedEvery = 20;

class HostCutTest : public ::testing::Test {
 protected:
  HostCutTest() : cluster_(absl::StrCat(::testing::TempDir(), "upipe-network-", getpid())) {}

  void SetUp() override {
    auto lab = NetworkLab::Create(/*num_hosts=*/3, /*num_networks=*/2);
    if (!lab.ok()) GTEST_SKIP() << lab.status().message();
    lab_ = *std::move(lab);
    cluster_.PutOn("coordinator", lab_->On(0));
    cluster_.PutOn("upipe", lab_->On(0));
    cluster_.ListenOn(NetworkLab::Address(0, kControl));
    cluster_.StartCoordinator();
    for (const int host : {1, 2}) {
      const std::string name = absl::StrCat("w", host);
      cluster_.PutOn(name, lab_->On(host));
      // Each host has a /sys of its own: they would not see each other's claims on CPUs.
      cluster_.StartWorker(
          name, /*slots=*/2, "512MiB",
          {"--no-cpu-placement", "--transport-interface", absl::StrCat("net", kTransport)});
    }
  }

  std::string Submit(const std::string& name) {
    const std::string file =
        cluster_.JobFile(name, /*ranks=*/4, kSteps,
                         absl::StrCat("checkpoint: {path: ", cluster_.folder(),
                                      "/checkpoints, every_steps: ", kSavedEvery, "}\n"));
    const CommandResult result = cluster_.Upipe({"submit", file, "-o", "json"});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const auto json = nlohmann::json::parse(result.output, nullptr, /*allow_exceptions=*/false);
    return json.is_object() ? json.value("id", "") : "";
  }
  void AwaitCommit(const std::string& job) {
    cluster_.Await("a committed checkpoint", absl::Seconds(60),
                   [&] { return cluster_.Describe(job).contains("last_commit"); });
  }
  // Waits for the job's end and returns the content of its last checkpoint.
  std::string AwaitContent(const std::string& job) {
    EXPECT_EQ(cluster_.Upipe({"wait", job}, absl::Seconds(120)).exit_code, 0);
    const auto described = cluster_.Describe(job);
    EXPECT_EQ(described.value("shown_state", ""), "SUCCEEDED") << described;
    const auto commit = described.value("last_commit", nlohmann::json::object());
    EXPECT_EQ(commit.value("step", ""), absl::StrCat(kSteps));
    return commit.value("content_sha256", "");
  }
  std::string UndisturbedContent() {
    static const std::string content = AwaitContent(Submit("undisturbed"));
    return content;
  }

  // How earlier attempts of the job ended, as CAUSE_KIND_... words.
  std::vector<std::string> EarlierCauses(const std::string& job) {
    std::vector<std::string> causes;
    for (const auto& attempt : cluster_.Describe(job).value("attempts", nlohmann::json::array()))
      causes.push_back(attempt.value("cause", nlohmann::json::object()).value("kind", ""));
    return causes;
  }
  std::string StateOf(const std::string& worker) {
    for (const auto& node : cluster_.Nodes())
      if (node["worker"] == worker) return node.value("state", "");
    return "";
  }
  void ExpectNothingLeft(const std::string& job) {
    EXPECT_TRUE(TrainersOf(job).empty());
    cluster_.Await("every slot to be FREE", absl::Seconds(15), [&] {
      int free = 0;
      for (const auto& node : cluster_.Nodes()) {
        for (const auto& slot : node.value("slots", nlohmann::json::array()))
          free += slot.value("state", "") == "SLOT_STATE_FREE";
      }
      return free == 4;
    });
    cluster_.Await("shared memory to be gone", absl::Seconds(5),
                   [&] { return testing::NumSharedMemorySegments() <= segments_before_; });
  }

  const int segments_before_ = testing::NumSharedMemorySegments();
  std::unique_ptr<NetworkLab> lab_;
  Cluster cluster_;
};

TEST_F(HostCutTest, PayloadCrossesTheTransportInterface) {
  const int64_t before[2] = {lab_->BytesSent(1, kTransport), lab_->BytesSent(2, kTransport)};
  const int64_t control_before = lab_->BytesSent(1, kControl);
  const std::string job = Submit("payload");
  EXPECT_NE(AwaitContent(job), "");
  // The last step's bytes from rank 0 to the ranks of the other host; every rank sends as much.
  const auto report = cluster_.Describe(job).value("last_report", nlohmann::json::object());
  const auto sent = report.value("bytes_sent_to_peer", nlohmann::json::array());
  int64_t from_rank_0 = 0;
  ASSERT_EQ(sent.size(), 4u);
  for (const int peer : {2, 3}) {
    int64_t bytes = 0;
    ASSERT_TRUE(absl::SimpleAtoi(sent[peer].get<std::string>(), &bytes));
    from_rank_0 += bytes;
  }
  ASSERT_GT(from_rank_0, 0);
  for (const int host : {1, 2})
    EXPECT_GE(lab_->BytesSent(host, kTransport) - before[host - 1], 2 * from_rank_0 * kSteps)
        << "host " << host;
  EXPECT_LT(lab_->BytesSent(1, kControl) - control_before, from_rank_0 * kSteps);
  ExpectNothingLeft(job);
}

TEST_F(HostCutTest, HostCutOffAndReturned) {
  const std::string undisturbed = UndisturbedContent();
  const std::string job = Submit("cut");
  AwaitCommit(job);
  ASSERT_EQ(TrainersOf(job).size(), 4u);
  for (const int network : {kControl, kTransport}) ASSERT_TRUE(lab_->Cut(2, network).ok());
  // The worker ends its ranks by itself, and the coordinator the others; it presumes, for it cannot
  // know.
  cluster_.Await("all ranks to be gone", absl::Seconds(20),
                 [&] { return TrainersOf(job).empty(); });
  cluster_.Await("the silent worker to be LOST", absl::Seconds(20),
                 [&] { return StateOf("w2") == "NODE_STATE_LOST"; });
  EXPECT_THAT(cluster_.Describe(job).value("shown_state", ""), AnyOf("QUEUED", "RESTARTING"));
  for (const int network : {kControl, kTransport}) ASSERT_TRUE(lab_->Join(2, network).ok());
  EXPECT_EQ(AwaitContent(job), undisturbed);
  EXPECT_THAT(EarlierCauses(job),
              ::testing::Contains(AnyOf("CAUSE_KIND_NODE_LOST", "CAUSE_KIND_PEER_FAILURE")));
  ExpectNothingLeft(job);
}

TEST_F(HostCutTest, NetworkBetweenTrainersCutAndReturned) {
  const std::string undisturbed = UndisturbedContent();
  const std::string job = Submit("cut");
  AwaitCommit(job);
  ASSERT_TRUE(lab_->Cut(2, kTransport).ok());
  cluster_.Await("the attempt to end", absl::Seconds(30),
                 [&] { return !EarlierCauses(job).empty(); });
  ASSERT_TRUE(lab_->Join(2, kTransport).ok());
  const nlohmann::json cause = cluster_.Describe(job)["attempts"][0]["cause"];
  EXPECT_EQ(cause.value("kind", ""), "CAUSE_KIND_PEER_FAILURE") << cause;
  EXPECT_THAT(cause.value("message", ""), HasSubstr("has not answered for")) << cause;
  EXPECT_THAT(cause.value("message", ""), HasSubstr("on node w")) << cause;
  EXPECT_EQ(StateOf("w2"), "NODE_STATE_READY");
  EXPECT_EQ(AwaitContent(job), undisturbed);
  ExpectNothingLeft(job);
}

}  // namespace
}  // namespace upipe
