// Backups of the store: a thread that has a copy made, reads it and hands it out in pieces.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "common/bounded_queue.h"
#include "coordinator/runtime/loop.h"
#include "upipe/v1/node_service.pb.h"

namespace upipe::coordinator {

// Where the pieces of a backup go. Thread-safe.
class BackupReader {
 public:
  virtual ~BackupReader() = default;
  // Blocks while the piece before is on its way. False: the reader has left.
  virtual bool Write(v1::BackupResponse piece) = 0;
  virtual void End(const absl::Status& status) = 0;
};

class BackupThread {
 public:
  struct Options {
    std::string store_path;
    // The copy lies here until it is read; a file that an earlier process left is removed.
    std::string copy_path;
    int64_t min_free_bytes = 0;  // that the copy leaves on the disk
  };
  // `loop` outlives the thread.
  BackupThread(Options options, Loop& loop);
  // The loop has ended and readers have left.
  ~BackupThread();

  // Sends the store to `reader`, then ends it. One at a time: others are ended at once. Never
  // blocks.
  void Start(std::shared_ptr<BackupReader> reader);

 private:
  void Run();
  absl::Status Serve(BackupReader& reader);
  absl::Status CheckRoom() const;

  const Options options_;
  Loop& loop_;
  BoundedQueue<std::shared_ptr<BackupReader>> readers_{1};
  std::atomic<bool> busy_{false};
  std::thread thread_;
};

}  // namespace upipe::coordinator
