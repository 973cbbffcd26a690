// Files of lines read as one run of bytes, also when they are turned over meanwhile.
#include "worker/launcher/line_file.h"

#include <filesystem>
#include <fstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace upipe::worker {
namespace {

namespace fs = std::filesystem;

class LineFileTest : public ::testing::Test {
 protected:
  LineFileTest() {
    std::string pattern = (fs::temp_directory_path() / "line-file-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    path_ = root_ + "/metrics.jsonl";
  }
  ~LineFileTest() override { fs::remove_all(root_); }
  static void Append(const std::string& path, const std::string& text) {
    std::ofstream(path, std::ios::app) << text;
  }
  // All there is from `offset`, in pieces of `bytes`.
  static std::string ReadOn(LineFileReader& reader, int64_t& offset, int64_t bytes) {
    std::string text;
    for (;;) {
      const absl::StatusOr<LogPiece> piece = reader.Read(offset, bytes);
      EXPECT_TRUE(piece.ok()) << piece.status();
      if (!piece.ok()) return text;
      offset = piece->offset + static_cast<int64_t>(piece->data.size());
      if (piece->data.empty()) return text;
      EXPECT_LE(static_cast<int64_t>(piece->data.size()), bytes);
      text += piece->data;
    }
  }

  std::string root_, path_;
};

TEST_F(LineFileTest, WhatWasTurnedOverComesFirst) {
  Append(path_ + ".1", "one\ntwo\n");
  Append(path_, "three\n");
  LineFileReader reader(path_);
  int64_t offset = 0;
  EXPECT_EQ(ReadOn(reader, offset, 3), "one\ntwo\nthree\n");
  offset = -8;
  EXPECT_EQ(ReadOn(reader, offset, 100), "o\nthree\n");
  offset = -1000;
  EXPECT_EQ(ReadOn(reader, offset, 100), "one\ntwo\nthree\n");
  offset = 1000;
  EXPECT_EQ(ReadOn(reader, offset, 100), "");
  EXPECT_EQ(offset, 14);
}

TEST_F(LineFileTest, AReaderKeepsItsPlaceWhenTheFileIsTurnedOver) {
  Append(path_, "one\n");
  LineFileReader reader(path_);
  int64_t offset = 0;
  EXPECT_EQ(ReadOn(reader, offset, 100), "one\n");
  Append(path_, "two\n");
  fs::rename(path_, path_ + ".1");
  EXPECT_EQ(ReadOn(reader, offset, 100), "two\n");
  Append(path_, "three\n");
  fs::rename(path_, path_ + ".1");
  Append(path_, "four\n");
  // "three" came and went between two reads, as no file does that is worth 64 MiB.
  EXPECT_EQ(ReadOn(reader, offset, 100), "four\n");
  offset = 0;
  EXPECT_EQ(ReadOn(reader, offset, 100), "one\ntwo\nfour\n");
}

TEST_F(LineFileTest, AFileThatIsNotThereMayCome) {
  LineFileReader reader(path_);
  EXPECT_TRUE(absl::IsNotFound(reader.Read(0, 10).status()));
  Append(path_, "one\n");
  EXPECT_EQ(reader.Read(0, 10)->data, "one\n");
}

TEST_F(LineFileTest, OnlyFilesAreRead) {
  fs::create_directory(path_);
  EXPECT_FALSE(LineFileReader(path_).Read(0, 10).ok());
  fs::remove(path_);
  Append(root_ + "/secret", "secret");
  fs::create_symlink(root_ + "/secret", path_);
  EXPECT_FALSE(LineFileReader(path_).Read(0, 10).ok());
}

}  // namespace
}  // namespace upipe::worker
