// What every Store promises, and what only the one on disk can.
#include "coordinator/store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>

#include "absl/strings/str_cat.h"
#include "coordinator/store/memory_store.h"
#include "coordinator/store/sqlite_store.h"
#include "tests/support/coordinator/faulty_disk.h"

namespace upipe::coordinator {
namespace {

using ::testing::HasSubstr;

class TemporaryFolder {
 public:
  TemporaryFolder() : path_((std::filesystem::temp_directory_path() / "upipe-store-XXXXXX")) {
    EXPECT_NE(mkdtemp(path_.data()), nullptr);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  std::string file() const { return path_ + "/store.sqlite"; }

 private:
  std::string path_;
};

class StoreContract : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "memory") {
      store_ = std::make_unique<MemoryStore>();
    } else {
      auto store = GetParam() == "sqlite" ? SqliteStore::Open(folder_.file())
                                          : SqliteStore::Open("/store", disk_.vfs());
      ASSERT_TRUE(store.ok()) << store.status();
      store_ = *std::move(store);
    }
  }
  absl::StatusOr<int64_t> Put(const std::string& key, const std::string& value,
                              std::optional<int64_t> expected = std::nullopt) {
    return store_->Commit(std::vector<Batch>{Batch{{Write{key, value, expected}}}});
  }

  TemporaryFolder folder_;
  testing::FaultyDisk disk_;
  std::unique_ptr<Store> store_;
};

TEST_P(StoreContract, BatchesGetOneRevisionEach) {
  EXPECT_EQ(store_->Revision(), 0);
  EXPECT_EQ(*Put("a", "1"), 1);
  const std::vector<Batch> two = {Batch{{Write{"b", "2"}, Write{"c", "3"}}},
                                  Batch{{Write{"d", "4"}}}};
  EXPECT_EQ(*store_->Commit(two), 3);
  const auto all = store_->List("");
  ASSERT_TRUE(all.ok());
  ASSERT_EQ(all->size(), 4u);
  EXPECT_EQ((*all)[1].key, "b");
  EXPECT_EQ((*all)[1].revision, 2);
  EXPECT_EQ((*all)[2].revision, 2);
  EXPECT_EQ((*all)[3].revision, 3);
  EXPECT_EQ(store_->Revision(), 3);
}

TEST_P(StoreContract, ListsByPrefixInByteOrder) {
  const std::string binary("p/\0\xff", 4);
  for (const std::string& key :
       {std::string("p"), std::string("p/z"), binary, std::string("q/a"), std::string("p0")}) {
    ASSERT_TRUE(Put(key, std::string("v\0w", 3)).ok());
  }
  const auto entries = store_->List("p/");
  ASSERT_TRUE(entries.ok());
  ASSERT_EQ(entries->size(), 2u);
  EXPECT_EQ((*entries)[0].key, binary);
  EXPECT_EQ((*entries)[0].value, std::string("v\0w", 3));
  EXPECT_EQ((*entries)[1].key, "p/z");
}

TEST_P(StoreContract, AnotherRevisionAbortsTheWholeGroup) {
  ASSERT_TRUE(Put("a", "1", 0).ok());
  EXPECT_EQ(Put("a", "2", 0).status().code(), absl::StatusCode::kAborted);
  const std::vector<Batch> group = {Batch{{Write{"b", "2"}}}, Batch{{Write{"a", "3", 7}}}};
  EXPECT_EQ(store_->Commit(group).status().code(), absl::StatusCode::kAborted);
  EXPECT_EQ(store_->List("")->size(), 1u);
  EXPECT_EQ(store_->Revision(), 1);
  EXPECT_EQ(*Put("a", "4", 1), 2);
  // Within a group the second batch sees the first.
  const std::vector<Batch> chain = {Batch{{Write{"a", "5", 2}}}, Batch{{Write{"a", "6", 3}}}};
  EXPECT_EQ(*store_->Commit(chain), 4);
}

TEST_P(StoreContract, DeletesAndDeletesOfNothing) {
  ASSERT_TRUE(Put("a", "").ok());
  EXPECT_EQ(store_->List("a")->at(0).value, "");
  EXPECT_TRUE(store_->Commit(std::vector<Batch>{Batch{{Write{"a", std::nullopt, 1}}}}).ok());
  EXPECT_TRUE(store_->List("a")->empty());
  EXPECT_TRUE(store_->Commit(std::vector<Batch>{Batch{{Write{"a", std::nullopt, 0}}}}).ok());
  EXPECT_TRUE(Put("a", "again", 0).ok());
}

TEST_P(StoreContract, RefusesBatchesOverTheLimits) {
  EXPECT_EQ(store_->Commit(std::vector<Batch>{Batch{}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  Batch many;
  for (size_t i = 0; i <= kMaxBatchWrites; ++i) many.writes.push_back({absl::StrCat("k", i), "v"});
  EXPECT_EQ(store_->Commit(std::vector<Batch>{many}).status().code(),
            absl::StatusCode::kInvalidArgument);
  many.writes.pop_back();
  EXPECT_TRUE(store_->Commit(std::vector<Batch>{many}).ok());
  EXPECT_EQ(Put("big", std::string(kMaxBatchBytes, 'x')).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(Put("big", std::string(kMaxBatchBytes - 3, 'x')).ok());
  const std::vector<Batch> twice = {Batch{{Write{"t", "1"}, Write{"t", "2"}}}};
  EXPECT_EQ(store_->Commit(twice).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(store_->List("t")->empty());
}

INSTANTIATE_TEST_SUITE_P(Stores, StoreContract, ::testing::Values("memory", "sqlite", "disk"),
                         [](const auto& info) { return info.param; });

TEST(SqliteStoreTest, KeepsEverythingAcrossReopeningAndAgreesWithTheOracle) {
  const uint64_t seed = 20261129;
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937_64 random(seed);
  TemporaryFolder folder;
  MemoryStore oracle;
  for (int round = 0; round < 5; ++round) {
    auto store = SqliteStore::Open(folder.file());
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_EQ((*store)->Revision(), oracle.Revision());
    for (int i = 0; i < 100; ++i) {
      Batch batch;
      Write write{absl::StrCat("k", random() % 20), absl::StrCat("v", random() % 100)};
      if (random() % 4 == 0) write.value.reset();
      if (random() % 2 == 0) write.expected_revision = random() % (oracle.Revision() + 1);
      batch.writes.push_back(write);
      const auto expected = oracle.Commit(std::vector<Batch>{batch});
      const auto got = (*store)->Commit(std::vector<Batch>{batch});
      ASSERT_EQ(expected.status().code(), got.status().code());
      if (expected.ok()) {
        ASSERT_EQ(*expected, *got);
      }
    }
    const auto expected = oracle.List("");
    const auto got = (*store)->List("");
    ASSERT_EQ(expected->size(), got->size());
    for (size_t i = 0; i < got->size(); ++i) {
      EXPECT_EQ((*expected)[i].key, (*got)[i].key);
      EXPECT_EQ((*expected)[i].value, (*got)[i].value);
      EXPECT_EQ((*expected)[i].revision, (*got)[i].revision);
    }
  }
}

TEST(SqliteStoreTest, ASecondHolderIsRefusedInOneSentence) {
  TemporaryFolder folder;
  const auto first = SqliteStore::Open(folder.file());
  ASSERT_TRUE(first.ok());
  const auto second = SqliteStore::Open(folder.file());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("another coordinator holds"));
}

TEST(SqliteStoreTest, AFileOfSomethingElseIsRefusedAndLeftAlone) {
  TemporaryFolder folder;
  std::ofstream(folder.file()) << std::string(100, 'x');
  EXPECT_EQ(SqliteStore::Open(folder.file()).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(std::filesystem::file_size(folder.file()), 100u);
}

}  // namespace
}  // namespace upipe::coordinator
