// The views of a job, with the built `upipe` against real daemons and trainers: its page over two
// attempts, also when a worker is gone; its trace; `upipe top` on a terminal while the coordinator
// dies and comes back.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/metrics/timeline_line.h"
#include "tests/support/cluster/cluster.h"
#include "tests/support/report/sample_record.h"

namespace upipe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using testing::BinDir;
using testing::Cluster;
using testing::CommandResult;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int kForever = 1000000;
constexpr absl::Duration kPatience = absl::Seconds(60);

std::string TextOf(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

class Views : public ::testing::Test {
 protected:
  Views() : cluster_(absl::StrCat(::testing::TempDir(), "upipe-views-", getpid())) {
    StartCoordinator();
    cluster_.StartWorker("w0", 1);
    cluster_.StartWorker("w1", 1);
  }
  void StartCoordinator() {
    cluster_.StartCoordinator(/*autonomy_seconds=*/3, {"--backoff", "0.1"});
  }
  std::string Submit(const std::string& file) {
    const CommandResult result = cluster_.Upipe({"submit", file, "-o", "json"});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return json::parse(result.output, nullptr, false).value("id", "");
  }
  int64_t StepOf(const std::string& job) {
    const json described = cluster_.Describe(job);
    return described.contains("last_report")
               ? std::stoll(described["last_report"].value("step", "0"))
               : 0;
  }
  // The page of a job, as it is now.
  std::string Page(const std::string& job, std::string* errors = nullptr) {
    const std::string path = cluster_.folder() + "/page.html";
    const CommandResult result = cluster_.Upipe({"report", job, "-o", path});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    if (errors != nullptr) *errors = result.errors;
    return TextOf(path);
  }

  Cluster cluster_;
};

TEST_F(Views, APageShowsEveryAttemptAlsoWhenAWorkerIsGone) {
  const std::string job = Submit(cluster_.JobFile(
      "paged", 2, 120,
      absl::StrCat("checkpoint: {path: ", cluster_.folder(), "/checkpoints, every_steps: 5}\n")));
  cluster_.Await("ten steps", kPatience, [&] { return StepOf(job) >= 10; });
  std::string errors;
  EXPECT_THAT(Page(job, &errors), AllOf(HasSubstr("RUNNING"), HasSubstr("<section id=\"loss\"")));
  EXPECT_EQ(errors, "");
  const std::vector<pid_t> trainers = testing::TrainersOf(job);
  ASSERT_EQ(trainers.size(), 2u);
  kill(trainers[0], SIGKILL);
  cluster_.AwaitState(job, "SUCCEEDED", kPatience);
  const json described = cluster_.Describe(job);
  // More of them where the machine stood still longer than a worker may be silent.
  ASSERT_GE(std::stoi(described.value("generation", "0")), 2);
  const std::string peak = described["ranks"][0]["last_report"]["memory"].value("arena_bytes", "0");
  std::string page = Page(job, &errors);
  EXPECT_EQ(errors, "");
  EXPECT_THAT(page, AllOf(HasSubstr("120 of 120"), HasSubstr("generation 1 ended"),
                          HasSubstr("SIGNAL, rank "), HasSubstr("as planned, to the byte"),
                          HasSubstr("num_kv_heads: 2"), Not(HasSubstr("Missing on this page"))));
  EXPECT_NE(peak, "0");

  // Who kept the steps of the fullest rank is gone: the curve is whole, and the page says what it
  // lacks.
  const std::string keeper = described["ranks"][0].value("node", "");
  cluster_.KillWorker(keeper);
  cluster_.Await("the worker to be missed", absl::Seconds(20), [&] {
    for (const json& node : cluster_.Nodes()) {
      if (node.value("worker", "") == keeper) return node.value("state", "") != "NODE_STATE_READY";
    }
    return false;
  });
  page = Page(job, &errors);
  EXPECT_THAT(page, AllOf(HasSubstr("120 of 120"), HasSubstr("<section id=\"memory\""),
                          HasSubstr("Missing on this page: the steps of rank 0"),
                          HasSubstr("worker " + keeper)));
  EXPECT_THAT(errors, HasSubstr("not on the page"));
}

TEST_F(Views, ATraceIsWhatTheRanksRecorded) {
  const std::string job = Submit(cluster_.JobFile("traced", 2, 3));
  cluster_.AwaitState(job, "SUCCEEDED", kPatience);
  const std::string path = cluster_.folder() + "/trace.json";
  const json described = cluster_.Describe(job);
  for (int rank = 0; rank < 2; ++rank) {
    std::ofstream(absl::StrCat(cluster_.folder(), "/", described["ranks"][rank].value("node", ""),
                               "/ranks/", job, "/g1/r", rank, "/timeline.jsonl"))
        << FormatTimelineLine(testing::SampleTimeline(rank, 2, 2)) << "\n{\"cut off";
  }
  const CommandResult result = cluster_.Upipe({"trace", job, "-o", path});
  ASSERT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, HasSubstr("step 2 of 2 ranks"));
  const json trace = json::parse(TextOf(path), nullptr, false);
  ASSERT_TRUE(trace.is_object());
  int counters[3] = {}, slices[3] = {};
  for (const json& event : trace["traceEvents"]) {
    const int process = event["pid"];
    ASSERT_TRUE(process == 1 || process == 2) << event;
    counters[process] += event["ph"] == "C";
    slices[process] += event["ph"] == "X";
  }
  EXPECT_GT(counters[1], 10);
  EXPECT_GT(slices[1], 30);
  EXPECT_EQ(counters[1], counters[2]);
  EXPECT_EQ(slices[1], slices[2]);
  EXPECT_THAT(Page(job), HasSubstr("Step 2 of rank 0"));
}

// A program on a terminal of its own, and all that it wrote there.
class Terminal {
 public:
  Terminal(const std::vector<std::string>& arguments, unsigned short columns,
           unsigned short lines) {
    winsize size = {lines, columns, 0, 0};
    pid_ = forkpty(&fd_, nullptr, nullptr, &size);
    if (pid_ != 0) return;
    std::vector<char*> argv;
    for (const std::string& argument : arguments)
      argv.push_back(const_cast<char*>(argument.c_str()));
    argv.push_back(nullptr);
    setenv("TERM", "xterm", 1);
    execv(argv[0], argv.data());
    _exit(127);
  }
  ~Terminal() {
    if (pid_ > 0) kill(pid_, SIGKILL);
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
    close(fd_);
  }
  // Until it has written `text` after what it wrote until the last call.
  ::testing::AssertionResult Shows(const std::string& text, absl::Duration limit) {
    const absl::Time deadline = absl::Now() + limit;
    for (;;) {
      const size_t at = screen_.find(text, seen_);
      if (at != std::string::npos) {
        seen_ = at + text.size();
        return ::testing::AssertionSuccess();
      }
      pollfd ready = {fd_, POLLIN, 0};
      const auto left = absl::ToInt64Milliseconds(deadline - absl::Now());
      if (left <= 0 || poll(&ready, 1, static_cast<int>(left)) <= 0) break;
      char buffer[4096];
      const ssize_t got = read(fd_, buffer, sizeof buffer);
      if (got <= 0) break;
      screen_.append(buffer, static_cast<size_t>(got));
    }
    return ::testing::AssertionFailure() << "not shown: " << text << "\n" << screen_.substr(seen_);
  }
  void Type(const std::string& keys) { EXPECT_EQ(write(fd_, keys.data(), keys.size()), 1); }
  // Its exit status once it has ended.
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

 private:
  pid_t pid_ = -1;
  int fd_ = -1;
  std::string screen_;
  size_t seen_ = 0;
};

TEST_F(Views, TopSurvivesTheCoordinator) {
  const std::string job = Submit(cluster_.JobFile("watched", 2, kForever));
  cluster_.AwaitStep(job, kPatience);
  Terminal all(
      {BinDir() + "/upipe", "--coordinator", cluster_.address(), "top", "--every", "200ms"}, 80,
      24);
  EXPECT_TRUE(all.Shows("2 of 2 slots busy", kPatience));
  EXPECT_TRUE(all.Shows(job, kPatience));
  EXPECT_TRUE(all.Shows("tokens/s", kPatience));
  EXPECT_TRUE(all.Shows("layer ", kPatience));  // from a heartbeat
  Terminal one(
      {BinDir() + "/upipe", "--coordinator", cluster_.address(), "top", job, "--every", "200ms"},
      80, 24);
  EXPECT_TRUE(one.Shows("RANK NODE/SLOT", kPatience));
  EXPECT_TRUE(one.Shows("w1/0", kPatience));
  cluster_.KillCoordinator();
  EXPECT_TRUE(all.Shows("** no answer for", kPatience));
  EXPECT_TRUE(all.Shows("2 of 2 slots busy", kPatience));  // as it was last known
  StartCoordinator();
  EXPECT_TRUE(one.Shows("** no answer for", kPatience));
  EXPECT_EQ(cluster_.Upipe({"cancel", job, "--grace", "0s"}, kPatience).exit_code, 0);
  EXPECT_TRUE(one.Shows("CANCELLED", kPatience));
  EXPECT_EQ(one.Wait(), 0);
  EXPECT_TRUE(all.Shows("0 of 2 slots busy", kPatience));
  all.Type("\x03");
  const int status = all.Wait();
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT) << status;
}

TEST_F(Views, TopWithoutATerminalPrintsOnce) {
  const CommandResult result = cluster_.Upipe({"top"});
  EXPECT_EQ(result.exit_code, 0) << result.errors;
  EXPECT_THAT(result.output, AllOf(HasSubstr("2 workers  0 of 2 slots busy"), HasSubstr("No jobs."),
                                   Not(HasSubstr("\x1b"))));
}

}  // namespace
}  // namespace upipe
