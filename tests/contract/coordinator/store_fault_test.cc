// The store on a disk that fails at the nth operation, for every n until none fails: what was
// acknowledged is there, nothing is there by halves, and a failed commit is the last word.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "coordinator/store/memory_store.h"
#include "coordinator/store/sqlite_store.h"
#include "tests/support/coordinator/faulty_disk.h"

namespace upipe::coordinator {
namespace {

using testing::FaultyDisk;
using Fault = FaultyDisk::Fault;

constexpr char kPath[] = "/state/store";

std::string Filler(int64_t revision, size_t bytes) {
  std::string text;
  while (text.size() < bytes) absl::StrAppend(&text, revision, ".");
  return text;
}

// The batch that makes `revision`: new keys, keys written over, a key removed, a condition.
Batch BatchOf(int64_t revision, size_t bytes) {
  Batch batch;
  batch.writes.push_back({absl::StrCat("job/", revision), Filler(revision, bytes), 0});
  batch.writes.push_back({"head", absl::StrCat(revision), revision - 1});
  batch.writes.push_back({absl::StrCat("wide/", revision % 3), Filler(revision, bytes / 2)});
  batch.writes.push_back({absl::StrCat("job/", revision - 3), std::nullopt});
  return batch;
}

// Groups of 1, 2 and 3 batches in turn: the revisions at which each group ends.
int64_t EndOfGroup(int64_t begin) { return begin + (begin % 4 == 0 ? 0 : begin % 4 == 1 ? 1 : 2); }

std::vector<Entry> Everything(Store& store) {
  const auto entries = store.List("");
  EXPECT_TRUE(entries.ok()) << entries.status();
  return entries.ok() ? *entries : std::vector<Entry>();
}

// A coordinator's life with its store: opens, commits, ends, and knows what was acknowledged.
class StoreLife {
 public:
  explicit StoreLife(size_t bytes) : bytes_(bytes) {}

  FaultyDisk& disk() { return disk_; }
  int64_t acknowledged() const { return acknowledged_; }

  // False at the first error.
  bool Open() {
    auto store = SqliteStore::Open(kPath, disk_.vfs());
    if (!store.ok()) return false;
    store_ = *std::move(store);
    return true;
  }
  void Close() { store_.reset(); }

  // Commits groups until `last` is reached. False at the first error, which is then all that the
  // store says.
  bool CommitUpTo(int64_t last) {
    while (store_->Revision() < last) {
      const int64_t begin = store_->Revision() + 1;
      tried_ = EndOfGroup(begin);
      std::vector<Batch> group;
      for (int64_t revision = begin; revision <= tried_; ++revision) {
        group.push_back(BatchOf(revision, bytes_));
      }
      const auto revision = store_->Commit(group);
      if (!revision.ok()) {
        ExpectBroken(group, revision.status());
        return false;
      }
      EXPECT_EQ(*revision, tried_);
      acknowledged_ = *revision;
    }
    return true;
  }

  // After the end of the process or the machine: opens without a fault and compares with an oracle.
  void ExpectWhole() {
    Close();
    disk_.Boot();
    auto store = SqliteStore::Open(kPath, disk_.vfs());
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    EXPECT_TRUE(store_->CheckIntegrity().ok()) << store_->CheckIntegrity();
    const int64_t revision = store_->Revision();
    ASSERT_TRUE(revision == acknowledged_ || revision == tried_)
        << revision << " is neither " << acknowledged_ << ", the last acknowledged, nor " << tried_
        << ", the last tried";
    acknowledged_ = revision;
    MemoryStore oracle;
    for (int64_t r = 1; r <= revision; ++r) {
      ASSERT_TRUE(oracle.Commit(std::vector<Batch>{BatchOf(r, bytes_)}).ok());
    }
    const std::vector<Entry> expected = Everything(oracle), got = Everything(*store_);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      EXPECT_EQ(got[i].key, expected[i].key);
      EXPECT_TRUE(got[i].value == expected[i].value) << got[i].key;
      EXPECT_EQ(got[i].revision, expected[i].revision) << got[i].key;
    }
  }

 private:
  // The disk may work again by now: the store still answers with its first error, and writes
  // nothing.
  void ExpectBroken(const std::vector<Batch>& group, const absl::Status& error) {
    const int64_t changes = disk_.changes();
    EXPECT_EQ(store_->Commit(group).status(), error);
    EXPECT_EQ(store_->List("").status(), error);
    EXPECT_EQ(store_->StartCopy("/state/copy").status(), error);
    EXPECT_EQ(disk_.changes(), changes);
  }

  const size_t bytes_;
  FaultyDisk disk_;
  std::unique_ptr<SqliteStore> store_;
  int64_t acknowledged_ = 0;
  int64_t tried_ = 0;
};

// A first start, commits, a clean end; a second start, commits. Stops where the fault strikes.
void TwoLives(StoreLife& life) {
  if (!life.Open() || !life.CommitUpTo(9)) return;
  life.Close();
  if (life.Open()) life.CommitUpTo(16);
}

struct FaultLoop {
  const char* name;
  Fault fault;
  bool stays;
};

class StoreFault : public ::testing::TestWithParam<FaultLoop> {};

// The fault at operation `n`, the end of the process (or the power), a look; then a life that goes
// on, a loss of power, a look. False when no fault fired.
bool Strike(const FaultLoop& loop, int64_t n, uint64_t seed) {
  StoreLife life(/*bytes=*/3000);
  life.disk().Arm(loop.fault, n, loop.stays);
  TwoLives(life);
  const bool fired = life.disk().fired();
  if (loop.fault == Fault::kPowerLoss) {
    life.disk().LosePower(seed);
  } else {
    life.disk().Kill();
  }
  life.ExpectWhole();
  if (StoreFault::HasFailure()) return fired;
  EXPECT_TRUE(life.CommitUpTo(life.acknowledged() + 6));
  life.disk().LosePower(seed + 1);
  life.ExpectWhole();
  return fired;
}

TEST_P(StoreFault, KeepsWhatItAcknowledgedWhereverItStrikes) {
  bool fired = true;
  int64_t n = 0;
  while (fired && !HasFailure()) {
    ++n;
    const int losses = GetParam().fault == Fault::kPowerLoss ? 4 : 1;
    for (int64_t seed = 100 * n; seed < 100 * n + losses && !HasFailure(); ++seed) {
      SCOPED_TRACE(absl::StrCat(GetParam().name, " at ", n, ", seed ", seed));
      fired = Strike(GetParam(), n, seed);
    }
  }
  EXPECT_GT(n, 14);
  RecordProperty("faults", static_cast<int>(n - 1));
}

// The log grows past its checkpoint in the middle of commits. The power fails at changes of the
// disk before, in and after that checkpoint.
TEST(StoreCheckpointTest, APowerLossWhileTheLogIsMovedLosesNothing) {
  constexpr size_t kBytes = 100000;  // 40 pages a batch
  constexpr int64_t kLast = 40;
  StoreLife undisturbed(kBytes);
  ASSERT_TRUE(undisturbed.Open());
  undisturbed.disk().WatchWritesTo(kPath);
  ASSERT_TRUE(undisturbed.CommitUpTo(kLast));
  const auto [begin, end] = undisturbed.disk().watched_changes();
  ASSERT_GT(begin, 1000) << "no checkpoint, or not after some commits";
  ASSERT_LT(end, undisturbed.disk().changes()) << "no commit after the checkpoint";
  int losses = 0;
  for (int64_t n = begin - 3; n <= end + 3 && !HasFailure(); n += 1 + (end - begin) / 30) {
    StoreLife life(kBytes);
    ASSERT_TRUE(life.Open());
    life.disk().Arm(Fault::kPowerLoss, n);
    SCOPED_TRACE(absl::StrCat("power lost at change ", n, " of ", begin, " to ", end));
    EXPECT_FALSE(life.CommitUpTo(kLast));
    life.disk().LosePower(/*seed=*/n);
    life.ExpectWhole();
    ++losses;
  }
  EXPECT_GT(losses, 20);
}

// A checkpoint syncs too, and runs behind a commit that is durable already.
TEST(StoreCheckpointTest, NoFailedSyncIsPassedOver) {
  int64_t n = 0;
  bool fired = true;
  while (fired && !HasFailure()) {
    StoreLife life(/*bytes=*/100000);
    ASSERT_TRUE(life.Open());
    life.disk().Arm(Fault::kSyncError, ++n);
    SCOPED_TRACE(absl::StrCat("sync ", n));
    const bool all = life.CommitUpTo(40);
    fired = life.disk().fired();
    EXPECT_EQ(all, !fired);
    life.disk().Kill();
    life.ExpectWhole();
  }
  EXPECT_GT(n, 15);
}

INSTANTIATE_TEST_SUITE_P(Faults, StoreFault,
                         ::testing::Values(FaultLoop{"WriteErrorOnce", Fault::kWriteError, false},
                                           FaultLoop{"WriteErrorStays", Fault::kWriteError, true},
                                           FaultLoop{"SyncErrorOnce", Fault::kSyncError, false},
                                           FaultLoop{"SyncErrorStays", Fault::kSyncError, true},
                                           FaultLoop{"DiskFull", Fault::kFull, true},
                                           FaultLoop{"PowerLoss", Fault::kPowerLoss, false}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace upipe::coordinator
