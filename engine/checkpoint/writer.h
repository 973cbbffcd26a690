// A rank's writer thread: writes the rank's shard and summary in the background and, on rank 0,
// puts the manifest in its place when every rank's summary is there. Talks to the other ranks
// through the file system alone, so the step's communicator never waits for a disk.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "engine/checkpoint/job_folder.h"
#include "engine/checkpoint/shard_file.h"
#include "upipe/v1/report.pb.h"

namespace upipe::checkpoint {

struct WriterOptions {
  const JobFolder& folder;
  v1::CheckpointOwner owner;
  int rank = 0;
  int num_ranks = 1;
  // What every manifest says alike: job, generation, tensors, spec, plan hash.
  v1::CheckpointManifest facts;
  std::string arithmetic;   // what this rank's bits depend on
  absl::Duration patience;  // for the other ranks' summaries, from when this rank's is there
  // Called on the writer's thread. The first looks at this process's own deadline before anything
  // is renamed.
  std::function<absl::Status()> may_commit = {};
  std::function<void(const v1::CheckpointRef&)> on_committed = {};
  std::function<void(const v1::CheckpointProblem&)> on_problem = {};
};

// Methods are called by the rank's thread; Retain by any.
class Writer {
 public:
  explicit Writer(WriterOptions options);
  // Leaves what is being written unfinished.
  ~Writer();
  Writer(const Writer&) = delete;

  // Begins to write; only while idle. The pieces' memory stays as it is until busy() is false.
  void Start(const v1::TrainingState& state, std::vector<MemoryPiece> pieces);
  bool busy() const;
  absl::Duration busy_for() const;  // since Start

  // What a rank tells the others at a step boundary.
  struct Standing {
    bool busy = false;
    int64_t failed_step = 0;  // could not be written or, on rank 0, committed; 0 = none
    int64_t sealed_step = 0;  // rank 0: its manifest is in its place or about to be
  };
  // Until Release, no manifest is renamed that Standing did not call sealed: what all ranks then
  // decide about a failed step stays true.
  Standing Hold();
  // A step that failed on some rank is given up by all, whether it is being written or was: its
  // files are removed, later. Not blocking.
  void Abandon(int64_t step);
  // It is whole all the same.
  void Forgive(int64_t step);
  void Release();
  // Blocks until this rank's own part is written or given up; does not wait for other ranks.
  void AwaitPart();
  // Blocks until idle: on rank 0, until committed or failed.
  void AwaitIdle();
  // Ends what is going on without removing anything: idle soon, and for good.
  void Cancel();
  // Why this rank failed last.
  absl::Status last_error() const;

  // Deletes old checkpoints when nothing is being written, while the folder is still the owner's. A
  // problem is reported, not returned.
  void Retain(const v1::CheckpointRef& newest, int keep);
  void Report(int64_t step, std::string message) const;  // a problem

  const JobFolder& folder() const { return options_.folder; }
  const WriterOptions& options() const { return options_; }

 private:
  struct Write {
    v1::TrainingState state;
    std::vector<MemoryPiece> pieces;
    BootTime start;
  };
  struct Remove {
    int64_t step;
  };
  struct Delete {
    v1::CheckpointRef newest;
    int keep;
  };
  using Task = std::variant<Write, Remove, Delete>;

  void Loop();
  void Do(const Write& write);
  void Do(const Delete& order);
  absl::Status WritePart(const Write& write);
  absl::Status Commit(const Write& write);
  absl::StatusOr<std::vector<v1::ShardSummary>> AwaitSummaries(const Folder& folder,
                                                               const Write& write);
  absl::Status RemovePart(int64_t step) const;
  // Not OK when the step is to be given up.
  absl::Status GoOn(int64_t step) const;
  absl::Status GoOnLocked(int64_t step) const;
  absl::Status Seal(int64_t step);

  const WriterOptions options_;
  mutable std::mutex mutex_;  // of all below but the thread
  mutable std::condition_variable changed_;
  std::deque<Task> tasks_;
  bool busy_ = false;       // with a Write, from Start on
  bool part_open_ = false;  // its part is not yet written or given up
  bool removing_ = false;
  bool held_ = false;
  bool cancelled_ = false;
  bool ending_ = false;
  BootTime start_;
  int64_t failed_step_ = 0;
  int64_t abandoned_step_ = 0;
  int64_t sealed_step_ = 0;
  absl::Status last_error_;
  std::thread thread_;
};

}  // namespace upipe::checkpoint
