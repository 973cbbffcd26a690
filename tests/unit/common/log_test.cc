#include "common/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_split.h"

namespace upipe {
namespace {

TEST(Log, LineCarriesTimeLevelComponentMessage) {
  EXPECT_EQ(
      FormatLogLine(absl::FromUnixMillis(1769847330125), LogLevel::kWarning, "worker", "slot 3"),
      "2026-01-31T08:15:30.125Z WARNING worker: slot 3\n");
}

TEST(Log, AMessageIsAlwaysOneLine) {
  EXPECT_EQ(FormatLogLine(absl::UnixEpoch(), LogLevel::kInfo, "c", "a\nb\x1b[2J"),
            "1970-01-01T00:00:00.000Z INFO c: a\\nb\\x1b[2J\n");
}

TEST(Log, DroppedLinesDoNotEvaluateTheirArguments) {
  int evaluated = 0;
  UPIPE_LOG(DEBUG) << ++evaluated;
  EXPECT_EQ(evaluated, 0);
}

TEST(Log, ThreadsDoNotMixTheirLines) {
  constexpr int kThreads = 4, kLines = 200;
  testing::internal::CaptureStderr();
  {
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([t] {
        for (int i = 0; i < kLines; ++i)
          UPIPE_LOG(INFO) << std::string(50, static_cast<char>('a' + t)) << ".";
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  const std::string written = testing::internal::GetCapturedStderr();
  const std::vector<std::string> lines = absl::StrSplit(written, '\n', absl::SkipEmpty());
  EXPECT_EQ(lines.size(), static_cast<size_t>(kThreads * kLines));
  for (const std::string& line : lines) {
    EXPECT_THAT(line, testing::MatchesRegex(".*Z INFO upipe: (a+|b+|c+|d+)\\."));
  }
}

}  // namespace
}  // namespace upipe
