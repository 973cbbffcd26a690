// The whole system under an enemy: full disks, garbage on every socket, trainers that are no
// trainers, data that changes under a job, stopped processes, storms of submits and cancels, odd
// shapes. Every job ends with its reason, and no process, shared memory or slot is left behind.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "tests/support/cluster/cluster.h"

namespace upipe {
namespace {

namespace fs = std::filesystem;
using testing::Cluster;
using testing::CommandResult;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TrainersOf;

constexpr int kForever = 1000000;
constexpr char kNoRestarts[] = "restarts: {infrastructure: 0, application: 0}\n";

class HostileTest : public ::testing::Test {
 protected:
  HostileTest() : cluster_(absl::StrCat(::testing::TempDir(), "upipe-hostile-", getpid())) {}
  ~HostileTest() override {
    for (const std::string& mounted : mounts_) umount2(mounted.c_str(), MNT_DETACH);
  }

  void Start(const std::vector<std::string>& coordinator_flags = {}) {
    cluster_.StartCoordinator(/*autonomy_seconds=*/60, coordinator_flags);
    cluster_.StartWorker("w0", 2);
    cluster_.StartWorker("w1", 2);
  }
  std::string Submit(const std::string& file, const std::vector<std::string>& more = {}) {
    std::vector<std::string> arguments = {"submit", file, "-o", "json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const CommandResult result = cluster_.Upipe(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    const auto json = nlohmann::json::parse(result.output, nullptr, false);
    return json.is_object() ? json.value("id", "") : "";
  }
  std::string RunningJob(const std::string& name, int ranks = 4) {
    const std::string job = Submit(cluster_.JobFile(name, ranks, kForever));
    cluster_.AwaitStep(job, absl::Seconds(60));
    return job;
  }
  int Outcome(const std::string& job) {
    return cluster_.Upipe({"wait", job}, absl::Seconds(60)).exit_code;
  }
  std::string CauseOf(const std::string& job) {
    return cluster_.Describe(job)["cause"].value("message", "");
  }
  int64_t StepOf(const std::string& job) {
    int64_t step = -1;
    const auto described = cluster_.Describe(job);
    if (described.contains("last_report")) {
      EXPECT_TRUE(absl::SimpleAtoi(described["last_report"].value("step", ""), &step));
    }
    return step;
  }
  void ExpectProgress(const std::string& job) {
    const int64_t before = StepOf(job);
    cluster_.Await("the job to go on", absl::Seconds(20), [&] { return StepOf(job) > before; });
  }
  void ExpectNothingLeft(int slots = 4) {
    cluster_.Await("every slot to be FREE", absl::Seconds(10), [&] {
      int free = 0;
      for (const auto& node : cluster_.Nodes()) {
        for (const auto& slot : node.value("slots", nlohmann::json::array())) {
          free += slot.value("state", "") == "SLOT_STATE_FREE";
        }
      }
      return free == slots;
    });
    for (const std::string& job : Jobs()) EXPECT_TRUE(TrainersOf(job).empty()) << job;
    EXPECT_EQ(testing::NumSharedMemorySegments(), segments_before_);
  }
  std::vector<std::string> Jobs() {
    std::vector<std::string> ids;
    const auto listed =
        nlohmann::json::parse(cluster_.Upipe({"list", "-o", "json"}).output, nullptr, false);
    if (!listed.is_object()) return ids;
    for (const auto& job : listed.value("jobs", nlohmann::json::array())) {
      ids.push_back(job.value("id", ""));
    }
    return ids;
  }
  void Cancel(const std::string& job) {
    EXPECT_EQ(cluster_.Upipe({"cancel", job}).exit_code, 0);
    EXPECT_EQ(Outcome(job), 3);
    EXPECT_TRUE(TrainersOf(job).empty()) << job;
  }
  // False where this process may not mount.
  bool MountSmallDisk(const std::string& folder, const std::string& size) {
    fs::create_directories(folder);
    if (mount("tmpfs", folder.c_str(), "tmpfs", 0, ("size=" + size).c_str()) != 0) return false;
    mounts_.push_back(folder);
    return true;
  }
  static void Fill(const std::string& folder) {
    std::ofstream file(folder + "/fill", std::ios::binary | std::ios::app);
    const std::string block(4096, 'x');
    while (file.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }

  const int segments_before_ = testing::NumSharedMemorySegments();
  std::vector<std::string> mounts_;
  Cluster cluster_;
};

int Connect(const std::string& host_port) {
  const std::vector<std::string> parts = absl::StrSplit(host_port, ':');
  sockaddr_in address{};
  address.sin_family = AF_INET;
  int port = 0;
  EXPECT_TRUE(absl::SimpleAtoi(parts.back(), &port)) << host_port;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0) << host_port;
  return fd;
}

int ConnectUnix(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  EXPECT_LT(path.size(), sizeof address.sun_path);
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0) << path;
  return fd;
}

void SendAndClose(int fd, const std::string& bytes) {
  (void)send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  close(fd);
}

std::string Scrape(const std::string& host_port) {
  const int fd = Connect(host_port);
  const timeval patience{10, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  const std::string request = "GET /metrics HTTP/1.0\r\n\r\n";
  (void)send(fd, request.data(), request.size(), MSG_NOSIGNAL);
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(fd, buffer, sizeof buffer)) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  return text;
}

TEST_F(HostileTest, CancelAtAnyMomentEndsTheJobAndFreesItsSlots) {
  Start();
  const std::string file = cluster_.JobFile("moment", 4, kForever);
  Cancel(Submit(file));  // planning, queued or starting
  std::string job = Submit(file);
  cluster_.Await("its trainers", absl::Seconds(20), [&] { return !TrainersOf(job).empty(); });
  Cancel(job);
  job = Submit(file, {"--set", "train.eval_every=1", "--set", "train.eval_sequences=5"});
  cluster_.AwaitStep(job, absl::Seconds(30));
  std::thread twice([&] { cluster_.Upipe({"cancel", job}); });
  Cancel(job);
  twice.join();
  EXPECT_EQ(cluster_.Upipe({"cancel", ""}).exit_code, 2);  // no job begins with nothing
  // A trainer that cannot hear the request ends by force.
  job = RunningJob("deaf");
  kill(TrainersOf(job).front(), SIGSTOP);
  Cancel(job);
  ExpectNothingLeft();
}

TEST_F(HostileTest, AWorkerThatPausesIsSuspectAndItsJobGoesOn) {
  Start();
  const std::string job = RunningJob("pause");
  const auto state = [&](const std::string& shown) {
    return [this, shown] {
      for (const auto& node : cluster_.Nodes()) {
        if (node["worker"] == "w1" && node.value("state", "") == shown) return true;
      }
      return false;
    };
  };
  cluster_.Signal("w1", SIGSTOP);
  cluster_.Await("w1 to be SUSPECT", absl::Seconds(10), state("NODE_STATE_SUSPECT"));
  cluster_.Signal("w1", SIGCONT);
  cluster_.Await("w1 to be READY", absl::Seconds(10), state("NODE_STATE_READY"));
  ExpectProgress(job);
  Cancel(job);
  ExpectNothingLeft();
}

TEST_F(HostileTest, ACoordinatorThatPausesIsWaitedFor) {
  Start();
  const std::string job = RunningJob("patient", 2);
  cluster_.Signal("coordinator", SIGSTOP);
  CommandResult nodes;
  std::thread asking([&] { nodes = cluster_.Upipe({"nodes"}); });
  absl::SleepFor(absl::Milliseconds(700));  // a machine too busy to take a connection
  cluster_.Signal("coordinator", SIGCONT);
  asking.join();
  EXPECT_EQ(nodes.exit_code, 0) << nodes.errors;
  ExpectProgress(job);
  Cancel(job);
  ExpectNothingLeft();
}

TEST_F(HostileTest, GarbageOnEverySocketHurtsNobodyAndMetricsGoOn) {
  Start();
  const std::string job = RunningJob("garbage");
  std::minstd_rand random(1);
  std::string noise(3000, '\0');
  for (char& byte : noise) byte = static_cast<char>(random());
  EXPECT_EQ(testing::RunCommand({testing::BinDir() + "/upipe-coordinator", "--state-dir",
                                 cluster_.folder() + "/other", "--listen", "127.0.0.1:99999"},
                                absl::Seconds(10))
                .exit_code,
            1);
  const std::string metrics = cluster_.Nodes()[0].value("metrics_address", "");
  for (const std::string& bytes :
       {noise, std::string("GET / HTTP/1.1\r\n\r\n"),
        absl::StrCat("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", noise), std::string(9, '\0')}) {
    SendAndClose(Connect(cluster_.address()), bytes);
    SendAndClose(Connect(metrics), bytes);
    SendAndClose(ConnectUnix(cluster_.folder() + "/w0/trainers.sock"), bytes);
  }
  ExpectProgress(job);
  const std::vector<int> mute = {Connect(metrics), Connect(metrics), Connect(metrics)};
  const std::string text = Scrape(metrics);
  for (const int fd : mute) close(fd);
  for (const char* series :
       {"upipe_loss{", "upipe_tokens_per_second{", "upipe_step_seconds{", "upipe_grad_norm{",
        "upipe_comm_seconds_total{", "upipe_memory_bytes{", "upipe_memory_peak_bytes{"}) {
    EXPECT_THAT(text, HasSubstr(series));
  }
  EXPECT_THAT(text, HasSubstr(absl::StrCat("job=\"", job, "\"")));
  Cancel(job);
  ExpectNothingLeft();
  EXPECT_THAT(Scrape(metrics), Not(HasSubstr("upipe_attempt_info{")));
}

TEST_F(HostileTest, TrainersThatAreNoTrainersFailTheirJobWithTheReason) {
  const std::string script = cluster_.folder() + "/trainer";
  std::ofstream(script) << "#!/bin/sh\n"
                        << "case \"$UPIPE_JOB\" in\n"
                        << "early-*) exit 0;;\n"
                        << "noise-*) head -c 5000 /dev/urandom; printf '\\377\\n'; exit 7;;\n"
                        << "forks-*) (setsid sleep 1000 &); exit 3;;\n"
                        << "*) trap '' TERM; while :; do sleep 0.1; done;;\n"
                        << "esac\n";
  chmod(script.c_str(), 0700);
  cluster_.StartCoordinator(60, {"--start-deadline", "2"});
  cluster_.StartWorker("w0", 2, "512MiB", {"--trainer-binary", script});
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"early", "exit code 0"},
      {"noise", "exit code 7"},
      {"forks", "exit code 3"},
      {"silent", "not ready within 2.0 s"}};
  for (const auto& [name, says] : cases) {
    const std::string job = Submit(cluster_.JobFile(name, 2, 3, kNoRestarts));
    EXPECT_EQ(Outcome(job), 1) << name;
    EXPECT_THAT(CauseOf(job), HasSubstr(says)) << name;
    ExpectNothingLeft(2);
  }
  fs::remove(script);
  const std::string job = Submit(cluster_.JobFile("missing", 2, 3, kNoRestarts));
  EXPECT_EQ(Outcome(job), 1);
  EXPECT_THAT(CauseOf(job), HasSubstr("No such file"));
  ExpectNothingLeft(2);
}

TEST_F(HostileTest, AWorkersFullDiskFailsLaunchesWithTheReasonAndNothingElse) {
  cluster_.StartCoordinator(60);
  const std::string disk = cluster_.folder() + "/w0";
  if (!MountSmallDisk(disk, "2m")) GTEST_SKIP() << "may not mount a small disk";
  cluster_.StartWorker("w0", 4);
  Fill(disk);
  // The journal's last page takes a few launches more.
  std::string refused;
  for (int i = 0, outcome = 0; i < 10 && outcome == 0; ++i) {
    refused = Submit(cluster_.JobFile("refused", 4, 3, kNoRestarts));
    outcome = Outcome(refused);
  }
  ASSERT_EQ(Outcome(refused), 1);
  EXPECT_THAT(CauseOf(refused), HasSubstr("No space left"));
  fs::remove(disk + "/fill");
  const std::string job = RunningJob("after");  // the same worker, with room again
  Fill(disk);
  ExpectProgress(job);
  Cancel(job);
  ExpectNothingLeft();
}

TEST_F(HostileTest, TheCoordinatorsFullDiskRefusesSubmitsAndEndsLiveJobs) {
  const std::string disk = cluster_.folder() + "/coordinator";
  if (!MountSmallDisk(disk, "80m")) GTEST_SKIP() << "may not mount a small disk";
  Start();
  const std::string job = RunningJob("live");
  const std::string file = cluster_.JobFile("late", 2, 3);
  Fill(disk);
  cluster_.Await("submits to be refused", absl::Seconds(10), [&] {
    const CommandResult late = cluster_.Upipe({"submit", file});
    return late.exit_code == 1 && late.errors.find("needed to accept jobs") != std::string::npos;
  });
  Fill(disk);  // the room that was kept, too
  cluster_.KillCoordinator();
  fs::resize_file(disk + "/fill", fs::file_size(disk + "/fill") - (1 << 20));
  cluster_.StartCoordinator(60);
  ExpectProgress(job);
  Cancel(job);
  fs::remove(disk + "/fill");
  cluster_.Await("submits to be taken", absl::Seconds(10), [&] {
    return cluster_.Upipe({"submit", file}).exit_code == 0;
  });
  EXPECT_EQ(Outcome(Jobs().front()), 0);
  ExpectNothingLeft();
}

TEST_F(HostileTest, ACommitThatFailsEndsTheCoordinatorAndNothingElse) {
  const std::string disk = cluster_.folder() + "/coordinator";
  if (!MountSmallDisk(disk, "80m")) GTEST_SKIP() << "may not mount a small disk";
  Start();
  const std::string job = RunningJob("live");
  const std::string waiting = Submit(cluster_.JobFile("waiting", 4, 3));
  cluster_.AwaitState(waiting, "QUEUED", absl::Seconds(20));
  Fill(disk);
  cluster_.Await("the ballast to be given back", absl::Seconds(10),
                 [&] { return !fs::exists(disk + "/ballast"); });
  // Its name goes before its blocks do.
  cluster_.Await("the ballast's blocks to be free", absl::Seconds(10),
                 [&] { return fs::space(disk).available > 8 << 20; });
  Fill(disk);
  cluster_.Upipe({"cancel", waiting}, absl::Seconds(2));  // nobody answers
  EXPECT_EQ(cluster_.ReapCoordinator(), 74);
  std::stringstream log;
  log << std::ifstream(cluster_.folder() + "/coordinator.log").rdbuf();
  EXPECT_THAT(log.str(), HasSubstr("the store failed and the coordinator ends"));
  EXPECT_THAT(log.str(), HasSubstr("database or disk is full"));
  EXPECT_THAT(log.str(), HasSubstr("submits are refused: the state disk at"));
  EXPECT_EQ(TrainersOf(job).size(), 4u);
  fs::remove(disk + "/fill");
  cluster_.StartCoordinator(60);  // as a supervisor does
  ExpectProgress(job);
  EXPECT_EQ(cluster_.Describe(job).value("generation", ""), "1");
  Cancel(waiting);  // was not durable; nothing was answered
  Cancel(job);
  ExpectNothingLeft();
}

TEST_F(HostileTest, DataThatChangesUnderAJobFailsItWithTheFilesName) {
  Start();
  const auto copy = [&](const std::string& name) {
    const std::string folder = cluster_.folder() + "/" + name;
    fs::copy(cluster_.Data(), folder);
    return folder;
  };
  const std::string busy = RunningJob("busy");
  const std::string removed = copy("removed"), shortened = copy("shortened");
  const std::string file = cluster_.JobFile("queued", 2, 3);
  const std::string first = Submit(file, {"--set", "data.path=" + removed});
  const std::string second = Submit(file, {"--set", "data.path=" + shortened});
  cluster_.AwaitState(first, "QUEUED", absl::Seconds(20));
  cluster_.AwaitState(second, "QUEUED", absl::Seconds(20));
  fs::remove_all(removed);
  fs::resize_file(shortened + "/train.tokens", 1000);
  Cancel(busy);
  EXPECT_EQ(Outcome(first), 1);
  EXPECT_THAT(CauseOf(first), HasSubstr(removed + "/train.tokens"));
  EXPECT_EQ(Outcome(second), 1);
  EXPECT_THAT(CauseOf(second), HasSubstr("1000 bytes"));
  ExpectNothingLeft();
}

TEST_F(HostileTest, AStormOfJobsOnTwoSlotsAllSucceedOnce) {
  cluster_.StartCoordinator(60);
  cluster_.StartWorker("w0", 2);
  const std::string one = cluster_.JobFile("one", 1, 2), two = cluster_.JobFile("two", 2, 2);
  std::set<std::string> ids;
  for (int i = 0; i < 16; ++i) {
    const std::string request = absl::StrCat("storm-", i);
    const std::string job = Submit(i % 2 == 0 ? one : two, {"--request-id", request});
    EXPECT_EQ(Submit(i % 2 == 0 ? one : two, {"--request-id", request}), job);
    ids.insert(job);
  }
  EXPECT_EQ(ids.size(), 16u);
  EXPECT_EQ(Jobs().size(), 16u);
  for (const std::string& job : ids) EXPECT_EQ(Outcome(job), 0) << CauseOf(job);
  ExpectNothingLeft(2);
}

TEST_F(HostileTest, OddShapesGiveTheBitsOfThreadsInOneProcess) {
  cluster_.StartCoordinator(60);
  cluster_.StartWorker("w0", 3);
  cluster_.StartWorker("w1", 2);
  struct Shape {
    int ranks;
    std::vector<std::string> sets;
  };
  const std::vector<Shape> shapes = {
      {1, {"train.eval_sequences=0"}},
      {3, {"model.num_kv_heads=1", "model.tie_embeddings=true"}},  // 8 heads on 3 ranks
      {5, {"train.context=3"}},                                    // ranks without a token
      {2, {"train.context=1", "parallel.threads_per_rank=2"}},
      {3, {"parallel.heads_per_stage=9", "optimizer.clip_norm=.inf"}},
      {2, {"parallel.backend=reference"}},
  };
  for (const Shape& shape : shapes) {
    const std::string file = cluster_.JobFile("shape", shape.ranks, 2);
    const std::string metrics = cluster_.folder() + "/threads.jsonl";
    std::vector<std::string> sets;
    for (const std::string& set : shape.sets) sets.insert(sets.end(), {"--set", set});
    const std::string job = Submit(file, sets);
    EXPECT_EQ(Outcome(job), 0) << sets.back() << ": " << CauseOf(job);
    std::vector<std::string> command = {testing::BinDir() + "/upipe-run", file, "--metrics",
                                        metrics, "--quiet"};
    command.insert(command.end(), sets.begin(), sets.end());
    ASSERT_EQ(testing::RunCommand(command).exit_code, 0) << sets.back();
    const auto report = cluster_.Describe(job)["last_report"];
    bool compared = false;
    std::ifstream lines(metrics);
    for (std::string line; std::getline(lines, line);) {
      const auto row = nlohmann::json::parse(line);
      if (row["rank"] != 0 || row["step"] != 2) continue;
      compared = true;
      for (const char* field : {"loss", "grad_norm", "held_out_loss"}) {
        nlohmann::json daemons = report.value(field, nlohmann::json());
        if (daemons.is_string()) daemons = nullptr;  // protobuf's way to write NaN
        EXPECT_EQ(row.value(field, nlohmann::json()), daemons) << sets.back() << " " << field;
      }
    }
    EXPECT_TRUE(compared) << sets.back();
    fs::remove(metrics);
  }
  const std::string wild =
      Submit(cluster_.JobFile("wild", 2, 60), {"--set", "optimizer.learning_rate=1e30"});
  EXPECT_EQ(Outcome(wild), 1);
  EXPECT_THAT(CauseOf(wild), HasSubstr("10 updates in a row were skipped"));
  ExpectNothingLeft(5);
}

}  // namespace
}  // namespace upipe
