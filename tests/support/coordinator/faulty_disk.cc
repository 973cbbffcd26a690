#include "tests/support/coordinator/faulty_disk.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

namespace upipe::testing {

// An open file, in memory that SQLite owns.
struct DiskFile {
  sqlite3_file base;
  FaultyDisk* disk;
  std::shared_ptr<FaultyDisk::Inode> inode;
  std::string name;  // empty: temporary
  int64_t boot;
  bool syncs_folder;  // at its first sync, as SQLite's own VFS does for a journal it made
  bool removed_at_close;

  static DiskFile& Of(sqlite3_file* file) { return *reinterpret_cast<DiskFile*>(file); }

  static int Close(sqlite3_file* file) {
    DiskFile& self = Of(file);
    if (self.removed_at_close) {
      std::lock_guard lock(self.disk->mutex_);
      self.disk->names_.erase(self.name);
    }
    self.~DiskFile();
    return SQLITE_OK;
  }

  static int Read(sqlite3_file* file, void* out, int size, sqlite3_int64 offset) {
    DiskFile& self = Of(file);
    std::lock_guard lock(self.disk->mutex_);
    if (self.disk->Down(self.boot)) return SQLITE_IOERR_READ;
    const std::string& bytes = self.inode->cached;
    const int64_t there = std::clamp<int64_t>(static_cast<int64_t>(bytes.size()) - offset, 0, size);
    if (there > 0) std::memcpy(out, bytes.data() + offset, there);
    std::memset(static_cast<char*>(out) + there, 0, size - there);
    return there == size ? SQLITE_OK : SQLITE_IOERR_SHORT_READ;
  }

  static int Write(sqlite3_file* file, const void* bytes, int size, sqlite3_int64 offset) {
    DiskFile& self = Of(file);
    FaultyDisk& disk = *self.disk;
    std::lock_guard lock(disk.mutex_);
    const int error = disk.Write(self.boot);
    // A write that the power cut short is in the cache: LosePower decides what of it stays.
    if (error != SQLITE_OK && error != SQLITE_IOERR) return error;
    if (!disk.watched_.empty() && self.name == disk.watched_) {
      auto& [first, last] = disk.watched_changes_;
      if (first == 0) first = disk.changes_;
      last = disk.changes_;
    }
    FaultyDisk::Inode& inode = *self.inode;
    if (static_cast<int64_t>(inode.cached.size()) < offset + size) {
      inode.cached.resize(offset + size);
      inode.resized = true;
    }
    std::memcpy(inode.cached.data() + offset, bytes, size);
    const int64_t last = (offset + size - 1) / FaultyDisk::kPageBytes;
    for (int64_t page = offset / FaultyDisk::kPageBytes; page <= last; ++page) {
      inode.dirty.insert(page);
    }
    // Now and then the kernel writes a page early.
    if (disk.random_() % 8 == 0) disk.WriteBack(inode, *inode.dirty.begin());
    return error;
  }

  static int Truncate(sqlite3_file* file, sqlite3_int64 size) {
    DiskFile& self = Of(file);
    std::lock_guard lock(self.disk->mutex_);
    if (const int error = self.disk->Write(self.boot); error != SQLITE_OK) return error;
    self.inode->cached.resize(size);
    self.inode->resized = true;
    return SQLITE_OK;
  }

  static int Sync(sqlite3_file* file, int) {
    DiskFile& self = Of(file);
    FaultyDisk& disk = *self.disk;
    std::function<void()> hook;
    {
      std::lock_guard lock(disk.mutex_);
      hook = disk.on_sync_;
    }
    if (hook) hook();
    std::lock_guard lock(disk.mutex_);
    const int error = disk.Sync(self.boot);
    if (error == SQLITE_IOERR_FSYNC) self.inode->dirty.clear();  // the kernel calls them clean
    if (error != SQLITE_OK) return error;
    disk.Flush(*self.inode);
    if (self.syncs_folder) disk.durable_names_ = disk.names_;
    self.syncs_folder = false;
    return SQLITE_OK;
  }

  static int FileSize(sqlite3_file* file, sqlite3_int64* size) {
    DiskFile& self = Of(file);
    std::lock_guard lock(self.disk->mutex_);
    if (self.disk->Down(self.boot)) return SQLITE_IOERR_FSTAT;
    *size = static_cast<sqlite3_int64>(self.inode->cached.size());
    return SQLITE_OK;
  }

  static int Lock(sqlite3_file*, int) { return SQLITE_OK; }
  static int CheckReservedLock(sqlite3_file*, int* held) {
    *held = 0;
    return SQLITE_OK;
  }
  static int FileControl(sqlite3_file*, int, void*) { return SQLITE_NOTFOUND; }
  static int SectorSize(sqlite3_file*) { return FaultyDisk::kPageBytes; }
  static int Characteristics(sqlite3_file*) { return SQLITE_IOCAP_POWERSAFE_OVERWRITE; }
};

namespace {

constexpr sqlite3_io_methods kMethods = {
    .iVersion = 1,
    .xClose = DiskFile::Close,
    .xRead = DiskFile::Read,
    .xWrite = DiskFile::Write,
    .xTruncate = DiskFile::Truncate,
    .xSync = DiskFile::Sync,
    .xFileSize = DiskFile::FileSize,
    .xLock = DiskFile::Lock,
    .xUnlock = DiskFile::Lock,
    .xCheckReservedLock = DiskFile::CheckReservedLock,
    .xFileControl = DiskFile::FileControl,
    .xSectorSize = DiskFile::SectorSize,
    .xDeviceCharacteristics = DiskFile::Characteristics,
};

int FullPathname(sqlite3_vfs*, const char* name, int size, char* out) {
  sqlite3_snprintf(size, out, "%s", name);
  return SQLITE_OK;
}

int Randomness(sqlite3_vfs*, int size, char* out) {
  for (int i = 0; i < size; ++i) out[i] = static_cast<char>(i * 37 + 11);
  return size;
}

int Sleep(sqlite3_vfs*, int microseconds) { return microseconds; }

int CurrentTime(sqlite3_vfs*, double* julian_day) {
  *julian_day = 2460000.5;
  return SQLITE_OK;
}

std::string FreshName() {
  static std::atomic<int> count{0};
  return "faulty-disk-" + std::to_string(++count);
}

}  // namespace

FaultyDisk::FaultyDisk() : name_(FreshName()) {
  vfs_.iVersion = 1;
  vfs_.szOsFile = sizeof(DiskFile);
  vfs_.mxPathname = 512;
  vfs_.zName = name_.c_str();
  vfs_.pAppData = this;
  vfs_.xOpen = Open;
  vfs_.xDelete = Delete;
  vfs_.xAccess = Access;
  vfs_.xFullPathname = FullPathname;
  vfs_.xRandomness = Randomness;
  vfs_.xSleep = Sleep;
  vfs_.xCurrentTime = CurrentTime;
  sqlite3_vfs_register(&vfs_, /*makeDflt=*/0);
}

FaultyDisk::~FaultyDisk() { sqlite3_vfs_unregister(&vfs_); }

void FaultyDisk::Arm(Fault fault, int64_t n, bool stays) {
  std::lock_guard lock(mutex_);
  fault_ = fault;
  fault_at_ = n;
  stays_ = stays || fault == Fault::kFull;
  fired_ = false;
  writes_ = syncs_ = changes_ = 0;
}

bool FaultyDisk::fired() const {
  std::lock_guard lock(mutex_);
  return fired_;
}

int64_t FaultyDisk::changes() const {
  std::lock_guard lock(mutex_);
  return changes_;
}

void FaultyDisk::WatchWritesTo(std::string name) {
  std::lock_guard lock(mutex_);
  watched_ = std::move(name);
  watched_changes_ = {0, 0};
  changes_ = 0;
}

std::pair<int64_t, int64_t> FaultyDisk::watched_changes() const {
  std::lock_guard lock(mutex_);
  return watched_changes_;
}

void FaultyDisk::OnSync(std::function<void()> hook) {
  std::lock_guard lock(mutex_);
  on_sync_ = std::move(hook);
}

bool FaultyDisk::CountToFault(Fault kind, int64_t count) {
  if (fault_ != kind || (stays_ ? count < fault_at_ : count != fault_at_)) return false;
  return fired_ = true;
}

int FaultyDisk::Change(int64_t boot) {
  if (Down(boot)) return SQLITE_IOERR;
  if (!CountToFault(Fault::kPowerLoss, ++changes_)) return SQLITE_OK;
  down_ = true;
  return SQLITE_IOERR;
}

int FaultyDisk::Write(int64_t boot) {
  if (Down(boot)) return SQLITE_IOERR_WRITE;
  ++writes_;
  if (CountToFault(Fault::kFull, writes_)) return SQLITE_FULL;
  if (CountToFault(Fault::kWriteError, writes_)) return SQLITE_IOERR_WRITE;
  return Change(boot);
}

int FaultyDisk::Sync(int64_t boot) {
  if (Down(boot)) return SQLITE_IOERR;
  if (CountToFault(Fault::kSyncError, ++syncs_)) return SQLITE_IOERR_FSYNC;
  return Change(boot);
}

void FaultyDisk::WriteBack(Inode& inode, int64_t page) {
  const int64_t begin = page * kPageBytes;
  const int64_t end = std::min<int64_t>(begin + kPageBytes, inode.cached.size());
  inode.dirty.erase(page);
  if (end <= begin) return;  // cut off since
  if (static_cast<int64_t>(inode.durable.size()) < end) inode.durable.resize(end);
  std::copy(inode.cached.begin() + begin, inode.cached.begin() + end,
            inode.durable.begin() + begin);
}

void FaultyDisk::Flush(Inode& inode) {
  if (inode.resized) inode.durable.resize(inode.cached.size());
  inode.resized = false;
  while (!inode.dirty.empty()) WriteBack(inode, *inode.dirty.begin());
}

void FaultyDisk::TearPage(Inode& inode, int64_t page) {
  const int64_t end = std::min<int64_t>((page + 1) * kPageBytes, inode.cached.size());
  for (int64_t sector = page * kPageBytes; sector < end; sector += kSectorBytes) {
    const int64_t length = std::min(kSectorBytes, end - sector);
    const uint64_t chance = random_() % 4;
    const int64_t kept = chance == 0 ? 0 : chance == 1 ? random_() % length : length;
    if (kept == 0) continue;
    if (static_cast<int64_t>(inode.durable.size()) < sector + kept) {
      inode.durable.resize(sector + kept);
    }
    std::copy_n(inode.cached.begin() + sector, kept, inode.durable.begin() + sector);
  }
}

void FaultyDisk::Kill() {
  std::lock_guard lock(mutex_);
  down_ = true;
}

void FaultyDisk::LosePower(uint64_t seed) {
  std::lock_guard lock(mutex_);
  down_ = true;
  random_.seed(seed);
  for (const Names* names : {&names_, &durable_names_}) {
    for (const auto& [name, inode] : *names) LoseUnsynced(*inode);
  }
  Names names = durable_names_;
  for (const auto& [name, inode] : names_) {
    if (random_() % 2 == 0) names[name] = inode;
  }
  for (const auto& [name, inode] : durable_names_) {
    if (!names_.contains(name) && random_() % 2 == 0) names.erase(name);
  }
  names_ = durable_names_ = std::move(names);
}

void FaultyDisk::LoseUnsynced(Inode& inode) {
  if (inode.resized && random_() % 2 == 0) inode.durable.resize(inode.cached.size());
  inode.resized = false;
  for (const int64_t page : std::exchange(inode.dirty, {})) {
    const uint64_t chance = random_() % 3;
    if (chance == 1) TearPage(inode, page);
    if (chance == 2) WriteBack(inode, page);
  }
  inode.cached = inode.durable;
}

void FaultyDisk::Boot() {
  std::lock_guard lock(mutex_);
  ++boot_;
  fault_ = Fault::kNone;
  down_ = false;
}

int FaultyDisk::Open(sqlite3_vfs* vfs, const char* name, sqlite3_file* out, int flags, int* got) {
  FaultyDisk& disk = Of(vfs);
  out->pMethods = nullptr;
  std::lock_guard lock(disk.mutex_);
  if (disk.down_) return SQLITE_CANTOPEN;
  std::shared_ptr<Inode> inode;
  bool made = false;
  if (name == nullptr) {
    inode = std::make_shared<Inode>();
  } else if (const auto found = disk.names_.find(name); found != disk.names_.end()) {
    if ((flags & SQLITE_OPEN_EXCLUSIVE) != 0) return SQLITE_CANTOPEN;
    inode = found->second;
  } else {
    if ((flags & SQLITE_OPEN_CREATE) == 0) return SQLITE_CANTOPEN;
    if (disk.Change(disk.boot_) != SQLITE_OK) return SQLITE_CANTOPEN;
    inode = disk.names_[name] = std::make_shared<Inode>();
    made = true;
  }
  constexpr int kJournals = SQLITE_OPEN_MAIN_JOURNAL | SQLITE_OPEN_WAL | SQLITE_OPEN_SUPER_JOURNAL;
  DiskFile& file = *new (out) DiskFile;
  file.base.pMethods = &kMethods;
  file.disk = &disk;
  file.inode = std::move(inode);
  file.name = name == nullptr ? "" : name;
  file.boot = disk.boot_;
  file.syncs_folder = made && (flags & kJournals) != 0;
  file.removed_at_close = name != nullptr && (flags & SQLITE_OPEN_DELETEONCLOSE) != 0;
  if (got != nullptr) *got = flags;
  return SQLITE_OK;
}

int FaultyDisk::Delete(sqlite3_vfs* vfs, const char* name, int sync_folder) {
  FaultyDisk& disk = Of(vfs);
  std::lock_guard lock(disk.mutex_);
  if (disk.down_) return SQLITE_IOERR_DELETE;
  if (!disk.names_.contains(name)) return SQLITE_IOERR_DELETE_NOENT;
  if (disk.Change(disk.boot_) != SQLITE_OK) return SQLITE_IOERR_DELETE;
  disk.names_.erase(name);
  if (sync_folder != 0) disk.durable_names_ = disk.names_;
  return SQLITE_OK;
}

int FaultyDisk::Access(sqlite3_vfs* vfs, const char* name, int flags, int* result) {
  FaultyDisk& disk = Of(vfs);
  std::lock_guard lock(disk.mutex_);
  const auto found = disk.names_.find(name);
  // An empty file does not count as there, as in SQLite's own VFS.
  *result = found != disk.names_.end() &&
            (flags != SQLITE_ACCESS_EXISTS || !found->second->cached.empty());
  return SQLITE_OK;
}

}  // namespace upipe::testing
