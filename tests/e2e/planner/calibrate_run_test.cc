// upipe-calibrate as a person calls it: a file that plans can be timed by, its numbers of a size
// that a machine can have, and wrong options refused before anything is measured.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "planner/device_file.h"

namespace upipe::planner {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

std::string TextOf(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Outcome {
  int code = 0;
  std::string out;
  std::string err;
};

Outcome Calibrate(const std::vector<std::string>& arguments) {
  const std::string base = absl::StrCat(testing::TempDir(), "/calibrate");
  std::vector<std::string> words = {absl::StrCat(std::getenv("UPIPE_BIN_DIR"), "/upipe-calibrate")};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  constexpr int kNew = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, (base + ".out").c_str(), kNew, 0600);
  posix_spawn_file_actions_addopen(&files, STDERR_FILENO, (base + ".err").c_str(), kNew, 0600);
  pid_t pid = 0;
  EXPECT_EQ(posix_spawn(&pid, argv[0], &files, nullptr, argv.data(), environ), 0) << argv[0];
  posix_spawn_file_actions_destroy(&files);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return {WEXITSTATUS(status), TextOf(base + ".out"), TextOf(base + ".err")};
}

TEST(Calibrate, WritesAFileThatPlansAreTimedBy) {
  const std::string path = absl::StrCat(testing::TempDir(), "/two-ranks.yaml");
  const Outcome outcome = Calibrate({"--quick", "--ranks", "2", "--output", path});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, HasSubstr("two-ranks: "));  // the table
  EXPECT_FALSE(std::filesystem::exists(path + ".partial"));
  const auto device = ReadDeviceFile(path);
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ(device->name(), "two-ranks");
  EXPECT_EQ(device->backend(), "cpu");
  EXPECT_EQ(device->devices_per_node(), 2);
  EXPECT_GT(device->host_memory().bytes(), int64_t{256} << 20);
  EXPECT_GT(device->context().bytes(), 0);
  EXPECT_THAT(device->host_copy().source(),
              StartsWith("measured: upipe calibrate --ranks 2 --threads-per-rank 1 --quick: "));

  // From a slow and busy core to one of tomorrow.
  const auto between = [](double low, double high) {
    return testing::AllOf(testing::Gt(low), testing::Lt(high));
  };
  for (const auto& rate : {device->matmul_bf16(), device->matmul_fp32()}) {
    EXPECT_THAT(rate.flops(), between(1e8, 1e14));
    EXPECT_THAT(rate.half_rows(), between(-1, 1e4));
  }
  ASSERT_EQ(device->attention_bf16_size(), 2);
  ASSERT_EQ(device->attention_fp32_size(), 2);
  for (const auto& rates : {device->attention_bf16(), device->attention_fp32()}) {
    for (const auto& rate : rates) {
      EXPECT_THAT(rate.forward_flops(), between(1e7, 1e14));
      EXPECT_THAT(rate.backward_flops(), between(1e7, 1e14));
    }
  }
  EXPECT_THAT(device->memory_bandwidth().value(), between(1e7, 1e13));
  EXPECT_THAT(device->exchange_in_node().value(), between(1e6, 1e13));
  EXPECT_THAT(device->host_copy().value(), between(1e7, 1e13));
  EXPECT_THAT(device->host_update().value(), between(1e5, 1e12));
  EXPECT_THAT(device->exchange_latency().value(), between(1e-8, 1));
  EXPECT_THAT(device->launch().value(), between(1e-9, 1e-2));
  // An op of nothing is cheaper than a collective of nothing.
  EXPECT_LT(device->launch().value(), device->exchange_latency().value());
}

TEST(Calibrate, WrongOptionsAreRefusedInASentence) {
  struct Case {
    std::vector<std::string> arguments;
    const char* sentence;
  };
  const Case cases[] = {
      {{"--ranks", "0"}, "upipe-calibrate: --ranks is 0; it is 1 to 64\n"},
      {{"--ranks", "two"}, "Could not convert: --ranks = two"},
      {{"--threads-per-rank", "65"}, "upipe-calibrate: --threads-per-rank is 65; it is 1 to 64\n"},
      {{"--output", "/nonexistent/a.yaml"}, "cannot write --output /nonexistent/a.yaml; give a"},
      {{"--output", testing::TempDir()}, " is a folder"},
      {{"--name", "a_b"}, "'a_b' has others; give --name"},
      {{"--busy", "--threads-per-rank", "2"}, "upipe-calibrate: --busy counts processor time,"},
      {{"--colour"}, "--colour"},
  };
  for (const Case& c : cases) {
    const Outcome outcome = Calibrate(c.arguments);
    EXPECT_EQ(outcome.code, 2) << c.sentence;
    EXPECT_EQ(outcome.out, "") << c.sentence;
    EXPECT_THAT(outcome.err, HasSubstr(c.sentence));
    EXPECT_THAT(outcome.err, testing::Not(HasSubstr("matmul"))) << "something was measured";
  }
}

}  // namespace
}  // namespace upipe::planner
