#include "worker/launcher/oom_evidence.h"

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace upipe::worker {
namespace {

constexpr char kTrainer[] = "upipe-trainer";

TEST(OomEvidence, TheBestComesFirst) {
  const OomCounters before{.memory_events = 1, .v1_control = 2, .machine = 3};
  OomCounters after = before;
  const OomKills named{.ours = "Killed process 7"};
  EXPECT_EQ(OomEvidence(before, after, {}), "");
  after.machine = 5;
  EXPECT_EQ(OomEvidence(before, after, {}), "/proc/vmstat oom_kill +2, anywhere on this machine");
  EXPECT_EQ(OomEvidence(before, after, named), "kernel log: Killed process 7");
  after.v1_control = 3;
  EXPECT_EQ(OomEvidence(before, after, named), "memory.oom_control oom_kill +1");
  after.memory_events = 4;
  EXPECT_EQ(OomEvidence(before, after, named), "memory.events oom_kill +3");
}

TEST(OomEvidence, KillsOfOtherProgramsAreNoEvidence) {
  const OomCounters before{.machine = 3}, after{.machine = 5};
  EXPECT_EQ(OomEvidence(before, after, {.others = 2}), "");
  EXPECT_EQ(OomEvidence(before, after, {.others = 3}), "");
  EXPECT_EQ(OomEvidence(before, after, {.others = 1}),
            "/proc/vmstat oom_kill +1, anywhere on this machine");
}

TEST(OomEvidence, ACounterThatCannotBeReadSaysNothing) {
  const OomCounters before{.memory_events = -1, .v1_control = 0, .machine = -1};
  const OomCounters after{.memory_events = 7, .v1_control = -1, .machine = -1};
  EXPECT_EQ(OomEvidence(before, after, {}), "");
}

TEST(OomEvidence, TheKernelsWordNamesThePid) {
  const char* lines[] = {
      "Out of memory: Killed process 4711 (upipe-trainer) total-vm:9kB, anon-rss:8kB",
      "Memory cgroup out of memory: Killed process 4711 (upipe-trainer) total-vm:9kB",
      "Out of memory: Kill process 4711 (upipe-trainer) score 900 or sacrifice child"};
  for (const char* line : lines) {
    EXPECT_TRUE(IsOomKillOf(line, 4711)) << line;
    EXPECT_FALSE(IsOomKillOf(line, 471)) << line;
    EXPECT_FALSE(IsOomKillOf(line, 47110)) << line;
  }
  EXPECT_FALSE(IsOomKillOf("process 4711 (x) Killed process 4711", 4711));
  EXPECT_FALSE(IsOomKillOf("", 0));
}

TEST(KernelLog, IsReadFromItsConstructionOn) {
  std::string pattern = (std::filesystem::temp_directory_path() / "kernel-log-XXXXXX").string();
  const std::string dir = mkdtemp(pattern.data());
  const std::string path = dir + "/kmsg";
  const auto append = [&](const std::string& text) { std::ofstream(path, std::ios::app) << text; };
  append("3,1,1,-;Out of memory: Killed process 7 (an earlier one of this pid)\n");
  KernelLog log(path);
  EXPECT_EQ(log.ReadOomKills(7, kTrainer).ours, std::nullopt);
  append("6,2,2,-;eth0: link up\n3,3,3,-;Out of memory: Killed process 7 (upipe-trainer)\n");
  EXPECT_EQ(log.ReadOomKills(7, kTrainer).ours, "Out of memory: Killed process 7 (upipe-trainer)");
  EXPECT_EQ(log.ReadOomKills(7, kTrainer).ours, std::nullopt);
  EXPECT_EQ(KernelLog(dir + "/none").ReadOomKills(7, kTrainer).ours, std::nullopt);
  std::filesystem::remove_all(dir);
}

TEST(KernelLog, CountsKillsOfOtherPrograms) {
  std::string pattern = (std::filesystem::temp_directory_path() / "kernel-log-XXXXXX").string();
  const std::string path = std::string(mkdtemp(pattern.data())) + "/kmsg";
  std::ofstream(path).flush();
  KernelLog log(path);
  std::ofstream(path) << "3,3,3,-;Out of memory: Killed process 9 (cc1plus) total-vm:9kB\n"
                         "3,4,4,-;Memory cgroup out of memory: Killed process 8 (python3)\n"
                         "3,5,5,-;Out of memory: Killed process 6 (upipe-trainer)\n"
                         "6,6,6,-;eth0: Killed process accounting\n";
  const OomKills kills = log.ReadOomKills(7, kTrainer);
  EXPECT_EQ(kills.ours, std::nullopt);
  EXPECT_EQ(kills.others, 2);
  std::filesystem::remove_all(std::filesystem::path(path).parent_path());
}

}  // namespace
}  // namespace upipe::worker
