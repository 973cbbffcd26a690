// A disk in memory behind an SQLite VFS (version-1 file methods): a page cache over what is
// durable, as Linux has it, with faults at the nth operation. One process at a time uses it: locks
// always succeed.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>

namespace upipe::testing {

// Thread-safe.
class FaultyDisk {
 public:
  enum class Fault {
    kNone,
    kWriteError,  // the nth write or truncation fails
    kSyncError,   // the nth sync fails; what it should have kept no later sync keeps either
    kFull,        // from the nth write on all writes say that the disk is full
    kPowerLoss,   // the nth change of the disk does not come back, and nothing after it
  };

  FaultyDisk();   // registers the VFS
  ~FaultyDisk();  // every file is closed

  const std::string& vfs() const { return name_; }

  // Replaces the fault. `n` counts from 1, from now. Write and sync errors come once, or with
  // `stays` from then on.
  void Arm(Fault fault, int64_t n, bool stays = false);
  bool fired() const;
  // Of the disk, since the last Arm.
  int64_t changes() const;
  // Numbers the changes, from now, of which the first and the last write to the file `name` are.
  void WatchWritesTo(std::string name);
  std::pair<int64_t, int64_t> watched_changes() const;

  // The process is gone: everything fails until Boot, what was written stays.
  void Kill();
  // The machine is gone as well: of what was not synced, whole pages, sectors or parts of sectors
  // stay or vanish at random, and so do names since the folder was synced.
  void LosePower(uint64_t seed);
  // A process may begin; files opened earlier go on failing. Disarms.
  void Boot();

  // Called before each sync, on the thread that syncs; may block.
  void OnSync(std::function<void()> hook);

 private:
  friend struct DiskFile;
  static constexpr int64_t kPageBytes = 4096;
  static constexpr int64_t kSectorBytes = 512;
  struct Inode {
    std::string cached;
    std::string durable;
    std::set<int64_t> dirty;  // pages of `cached` to be written
    bool resized = false;
  };
  using Names = std::map<std::string, std::shared_ptr<Inode>>;

  // What the fault makes of an operation: SQLITE_OK, or the error to answer.
  int Write(int64_t boot);
  int Sync(int64_t boot);
  int Change(int64_t boot);  // create or delete
  bool Down(int64_t boot) const { return down_ || boot != boot_; }
  bool CountToFault(Fault kind, int64_t count);
  void WriteBack(Inode& inode, int64_t page);
  void Flush(Inode& inode);
  void LoseUnsynced(Inode& inode);
  void TearPage(Inode& inode, int64_t page);

  static FaultyDisk& Of(sqlite3_vfs* vfs) { return *static_cast<FaultyDisk*>(vfs->pAppData); }
  static int Open(sqlite3_vfs* vfs, const char* name, sqlite3_file* out, int flags, int* got);
  static int Delete(sqlite3_vfs* vfs, const char* name, int sync_folder);
  static int Access(sqlite3_vfs* vfs, const char* name, int flags, int* result);

  const std::string name_;
  sqlite3_vfs vfs_ = {};
  mutable std::mutex mutex_;
  std::function<void()> on_sync_;
  Names names_;
  Names durable_names_;
  std::mt19937_64 random_{1};
  Fault fault_ = Fault::kNone;
  int64_t fault_at_ = 0;
  bool stays_ = false;
  bool fired_ = false;
  int64_t writes_ = 0;
  int64_t syncs_ = 0;
  int64_t changes_ = 0;
  std::string watched_;
  std::pair<int64_t, int64_t> watched_changes_{0, 0};
  bool down_ = false;
  int64_t boot_ = 1;  // files opened before the last Boot have a lower one
};

}  // namespace upipe::testing
