// The archive as `tar` reads it; what is in it when everything answers, and when nothing does.
#include "client/support_bundle.h"

#include <gmock/gmock.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/tar_gzip.h"
#include "tests/unit/client/console_test.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class SupportBundleTest : public ConsoleTest {
 protected:
  std::string Archive() const { return folder_ + "/bundle.tar.gz"; }
  // Unpacks the archive with the system's tar; where it lies.
  std::string Unpack() {
    const std::string into = folder_ + "/unpacked";
    std::filesystem::create_directory(into);
    std::string words[] = {"tar", "-xzf", Archive(), "-C", into};
    char* argv[] = {words[0].data(), words[1].data(), words[2].data(),
                    words[3].data(), words[4].data(), nullptr};
    pid_t pid = -1;
    EXPECT_EQ(posix_spawnp(&pid, "tar", nullptr, nullptr, argv, environ), 0);
    int status = -1;
    EXPECT_EQ(waitpid(pid, &status, 0), pid);
    EXPECT_EQ(status, 0);
    return into + "/upipe-support/";
  }
  BundleOptions Options() {
    return {.path = Archive(),
            .version = "1.2.3",
            .coordinator = "h:1",
            .fetch_metrics = [](const std::string& address) -> absl::StatusOr<std::string> {
              if (address == "h:2") return "upipe_jobs 1\n";
              return absl::UnavailableError("cannot read from " + address + ": refused");
            }};
  }
  void AddJob(const std::string& id, v1::JobState state) {
    v1::Job& job = coordinator_.jobs.emplace_back();
    job.set_id(id);
    job.set_state(state);
    job.set_generation(2);
    job.mutable_cause()->set_rank(3);
    job.mutable_cause()->set_message("rank 3 was killed");
  }
};

TEST_F(SupportBundleTest, HoldsWhatSomebodyNeedsWhoWasNotThere) {
  coordinator_.nodes.set_coordinator_version("1.2.4");
  coordinator_.nodes.set_coordinator_metrics_address("h:2");
  coordinator_.nodes.add_coordinator_configuration("heartbeat=2s");
  v1::Node& node = *coordinator_.nodes.add_nodes();
  node.set_worker("../a b");
  node.set_version("1.2.5");
  node.set_metrics_address("h:3");
  AddJob("bad-aaaaaa", v1::JOB_STATE_FAILED);
  AddJob("good-bbbbbb", v1::JOB_STATE_SUCCEEDED);
  AddJob("slow-cccccc", v1::JOB_STATE_RUNNING);
  v1::LogsResponse log;
  log.set_data("step 1\nAWS_SECRET=hunter2 nonce 0123456789abcdef0123456789ABCDEF.\n");
  coordinator_.logs = {{{log}, absl::OkStatus()}};
  WriteText(folder_ + "/coordinator.log", "served\n");
  BundleOptions options = Options();
  options.local_logs = {{"coordinator", folder_ + "/coordinator.log"},
                        {"worker-0", folder_ + "/none.log"}};
  EXPECT_EQ(SupportBundle(console_, options), kExitDone);
  const std::string at = Unpack();
  EXPECT_EQ(ReadText(at + "versions.txt"),
            "client 1.2.3\ncoordinator 1.2.4 at h:1\nworker ../a b 1.2.5\n");
  EXPECT_EQ(ReadText(at + "configuration.txt"), "heartbeat=2s\n");
  EXPECT_EQ(ReadText(at + "metrics/coordinator.txt"), "upipe_jobs 1\n");
  EXPECT_THAT(ReadText(at + "nodes.txt"), HasSubstr("../a b"));
  EXPECT_TRUE(nlohmann::json::parse(ReadText(at + "nodes.json")).contains("nodes"));
  EXPECT_THAT(ReadText(at + "jobs.txt"), AllOf(HasSubstr("bad-aaaaaa"), HasSubstr("good-bbbbbb")));
  EXPECT_THAT(ReadText(at + "jobs/bad-aaaaaa.txt"), HasSubstr("rank 3 was killed"));
  EXPECT_THAT(ReadText(at + "jobs/slow-cccccc.json"), HasSubstr("JOB_STATE_RUNNING"));
  EXPECT_FALSE(std::filesystem::exists(at + "jobs/good-bbbbbb.txt"));
  EXPECT_EQ(ReadText(at + "logs/bad-aaaaaa-g2-r3.log"), "step 1\nAWS_SECRET= [left out]\n");
  EXPECT_EQ(ReadText(at + "local/coordinator.log"), "served\n");
  EXPECT_EQ(ReadText(at + "missing.txt"),
            absl::StrCat("metrics/worker-.._a_b.txt: cannot read from h:3: refused\n",
                         "local/worker-0.log: cannot read ", folder_, "/none.log\n"));
  ASSERT_EQ(coordinator_.log_requests.size(), 1u);
  EXPECT_EQ(coordinator_.log_requests[0].rank(), 3);
  EXPECT_LT(coordinator_.log_requests[0].offset(), 0);
  EXPECT_THAT(err_.str(), HasSubstr("missing: metrics/worker-.._a_b.txt"));
}

TEST_F(SupportBundleTest, IsMadeWithoutACoordinatorToo) {
  coordinator_.node_answers = {absl::UnavailableError("cannot reach the coordinator at h:1")};
  WriteText(folder_ + "/coordinator.log", "out of disk\n");
  BundleOptions options = Options();
  options.local_logs = {{"coordinator", folder_ + "/coordinator.log"}};
  console_.json = true;
  EXPECT_EQ(SupportBundle(console_, options), kExitDone);
  const auto json = nlohmann::json::parse(out_.str());
  EXPECT_EQ(json.at("missing").size(), 1u);
  const std::string at = Unpack();
  EXPECT_EQ(ReadText(at + "local/coordinator.log"), "out of disk\n");
  EXPECT_THAT(ReadText(at + "missing.txt"), HasSubstr("cannot reach the coordinator at h:1"));
  EXPECT_EQ(ReadText(at + "versions.txt"), "client 1.2.3\ncoordinator unknown at h:1\n");
}

TEST_F(SupportBundleTest, IsBoundedHoweverMuchThereIs) {
  coordinator_.nodes.set_coordinator_metrics_address("h:2");
  for (int i = 0; i < 30; ++i) {
    v1::Node& node = *coordinator_.nodes.add_nodes();
    node.set_worker(absl::StrCat("w", i));
    node.set_metrics_address("h:2");
  }
  BundleOptions options = Options();
  const std::string endless(5 << 20, 'x');
  options.fetch_metrics = [&](const std::string&) { return endless; };
  EXPECT_EQ(SupportBundle(console_, options), kExitDone);
  EXPECT_LT(std::filesystem::file_size(Archive()), size_t{1} << 20);  // 64 MiB of one letter
  const std::string at = Unpack();
  EXPECT_EQ(std::filesystem::file_size(at + "metrics/coordinator.txt"), size_t{4} << 20);
  EXPECT_THAT(ReadText(at + "missing.txt"),
              AllOf(HasSubstr("metrics/coordinator.txt: all but its last 4.0 MiB"),
                    HasSubstr("metrics/worker-w29.txt: the archive holds 64.0 MiB at most")));
}

TEST_F(SupportBundleTest, SecretsAreLeftOut) {
  EXPECT_EQ(WithoutSecrets("a\nb"), "a\nb");
  EXPECT_EQ(WithoutSecrets("token: abc\nnext\n"), "token: [left out]\nnext\n");
  EXPECT_EQ(WithoutSecrets(R"({"password" : "x", "y": 1})"), R"({"password" : [left out])");
  EXPECT_EQ(WithoutSecrets("nonce=00000000000000000000000000000000 on"), "nonce=[left out] on");
  // Checksums are no nonces, and a number of tokens is no token.
  const std::string sum(64, 'a');
  EXPECT_EQ(WithoutSecrets(sum), sum);
  EXPECT_EQ(WithoutSecrets("1,024 tokens/s"), "1,024 tokens/s");
  EXPECT_EQ(WithoutSecrets("tokens: 12"), "tokens: 12");
}

TEST_F(SupportBundleTest, LongPathsAndOddSizesSurviveTar) {
  std::ofstream file(Archive(), std::ios::binary);
  TarGzip archive(absl::FromUnixSeconds(1769847330), [&](absl::string_view bytes) {
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return absl::OkStatus();
  });
  const std::string folder = "upipe-support/" + std::string(100, 'f');
  const std::string name(90, 'n');
  for (const size_t size : {0, 1, 511, 512, 513, 100'000}) {
    ASSERT_TRUE(archive.Add(absl::StrCat(folder, "/", size, name), std::string(size, 'z')).ok());
  }
  ASSERT_TRUE(archive.Finish().ok());
  file.close();
  const std::string at = Unpack() + std::string(100, 'f') + "/";
  for (const size_t size : {0, 1, 511, 512, 513, 100'000}) {
    EXPECT_EQ(ReadText(absl::StrCat(at, size, name)), std::string(size, 'z'));
  }
}

TEST_F(SupportBundleTest, AFullDiskEndsTheArchive) {
  TarGzip archive(absl::UnixEpoch(),
                  [](absl::string_view) { return absl::UnavailableError("no space left"); });
  EXPECT_FALSE(archive.Add("a", std::string(1 << 20, 'x')).ok());
  EXPECT_EQ(archive.Finish().message(), "no space left");
}

}  // namespace
}  // namespace upipe::client
