#include "worker/launcher/rank_log.h"

#include <signal.h>
#include <sys/resource.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace upipe::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class RankLogTest : public ::testing::Test {
 protected:
  RankLogTest() {
    std::string pattern = (std::filesystem::temp_directory_path() / "rank-log-XXXXXX").string();
    dir_ = mkdtemp(pattern.data());
  }
  ~RankLogTest() override { std::filesystem::remove_all(dir_); }
  void Write(RankLogWriter& writer, const std::string& text) {
    writer.Write(text.data(), text.size());
  }
  std::string dir_;
};

TEST_F(RankLogTest, ReadsFromAnyOffset) {
  RankLogWriter writer(dir_, 1024);
  Write(writer, "one\ntwo\nthree");
  EXPECT_EQ(ReadRankLog(dir_, 0, 100)->data, "one\ntwo\nthree");
  EXPECT_EQ(ReadRankLog(dir_, 4, 3)->data, "two");
  EXPECT_EQ(ReadRankLog(dir_, -5, 100)->data, "three");
  EXPECT_EQ(ReadRankLog(dir_, -5, 100)->offset, 8);
  EXPECT_EQ(ReadRankLog(dir_, 13, 100)->data, "");
  EXPECT_EQ(ReadRankLog(dir_, 99, 100)->offset, 13);
  EXPECT_THAT(writer.Tail(), ElementsAre("one", "two", "three"));
  EXPECT_EQ(ReadRankLog(dir_ + "/none", 0, 1).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(RankLogTest, KeepsTwoSegmentsAndNamesTheGap) {
  RankLogWriter writer(dir_, 10);
  for (int i = 0; i < 5; ++i) Write(writer, "0123456789");
  const absl::StatusOr<LogPiece> piece = ReadRankLog(dir_, 0, 100);
  ASSERT_TRUE(piece.ok());
  EXPECT_EQ(piece->offset, 30);
  EXPECT_EQ(piece->data, "0123456789");  // one segment at a time
  EXPECT_THAT(piece->gap, HasSubstr("bytes 0 to 30 are gone"));
  EXPECT_EQ(ReadRankLog(dir_, 40, 100)->data, "0123456789");
  EXPECT_EQ(ReadRankLog(dir_, 35, 100)->gap, "");
}

TEST_F(RankLogTest, TheTailIsBounded) {
  RankLogWriter writer(dir_, 1 << 20);
  for (int i = 0; i < 100; ++i) Write(writer, absl::StrCat("line ", i, "\n"));
  Write(writer, std::string(5000, 'x'));
  const std::vector<std::string> tail = writer.Tail();
  ASSERT_EQ(tail.size(), 20u);
  EXPECT_EQ(tail[0], "line 81");
  EXPECT_EQ(tail.back().size(), 512u);
}

TEST_F(RankLogTest, TheTailIsTextWhateverTheRankWrote) {
  RankLogWriter writer(dir_, 1 << 20);
  Write(writer, "\xff\xfe raw\n");
  std::string euros;
  for (int i = 0; i < 200; ++i) euros += "\xe2\x82\xac";  // 600 bytes: the cut falls into one
  Write(writer, euros + "\n");
  EXPECT_THAT(writer.Tail(), ElementsAre("?? raw", euros.substr(0, 510) + "??"));
}

// A file size limit stands for the full disk. Every byte the rank wrote counts, so that offsets
// stay true and the reader is told what is not there.
TEST_F(RankLogTest, WhatTheDiskDoesNotTakeIsADeclaredGap) {
  signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto limit = [&](rlim_t bytes) {
    const rlimit now{bytes, before.rlim_max};
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &now), 0);
  };
  {
    RankLogWriter writer(dir_, 1 << 20);
    limit(6);
    Write(writer, "0123456789");  // six of ten are taken
    limit(0);
    for (int i = 0; i < 5; ++i) Write(writer, "lost line\n");
    limit(before.rlim_cur);
    Write(writer, "later");
    EXPECT_THAT(writer.Tail().back(), HasSubstr("later"));
    limit(0);
    Write(writer, "the end");
    limit(before.rlim_cur);
  }
  EXPECT_EQ(ReadRankLog(dir_, 0, 100)->data, "012345");
  const absl::StatusOr<LogPiece> resumed = ReadRankLog(dir_, 6, 100);
  EXPECT_EQ(resumed->offset, 60);
  EXPECT_EQ(resumed->data, "later");
  EXPECT_EQ(resumed->gap, "bytes 6 to 60 are missing: the worker's disk did not take them");
  const absl::StatusOr<LogPiece> end = ReadRankLog(dir_, 65, 100);
  EXPECT_EQ(end->offset, 72);
  EXPECT_EQ(end->data, "");
  EXPECT_THAT(end->gap, HasSubstr("bytes 65 to 72 are missing"));
}

TEST_F(RankLogTest, ASecondWriterGoesOnBehindTheFirst) {
  {
    RankLogWriter first(dir_, 1024);
    Write(first, "first");
  }
  RankLogWriter second(dir_, 1024);
  Write(second, "second");
  EXPECT_EQ(ReadRankLog(dir_, 0, 100)->data, "first");
  EXPECT_EQ(ReadRankLog(dir_, 5, 100)->data, "second");
  EXPECT_EQ(ReadRankLog(dir_, 5, 100)->gap, "");
}

}  // namespace
}  // namespace upipe::worker
