// When a rank checkpoints and what it goes on from: the part of the step loop that talks to the
// writer. Every decision follows from a vote at the step boundary, so all ranks come to the same.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "engine/checkpoint/job_folder.h"
#include "engine/checkpoint/writer.h"
#include "engine/train/step.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

// What every manifest of the job says alike: tensors, seed and data order, spec, plan hash. What
// another job's checkpoint is known by.
v1::CheckpointManifest CheckpointFacts(const v1::RunPlan& plan);

// How long rank 0 waits for other ranks' parts: one minute more than the largest part takes at
// 10 MB/s. Zero without a checkpoint path.
absl::Duration CheckpointPatience(const v1::RunPlan& plan);

// Why a run that goes on from `stored` may differ from one that was never interrupted, in bits but
// within the bound: another layout, instruction set or library, or ops that promise no bits. Empty
// when its bits are the same.
std::string WhyNotBitIdentical(const v1::CheckpointManifest& stored, const v1::RunPlan& plan,
                               int rank, const std::string& arithmetic);

class Checkpointing {
 public:
  struct Params {
    TrainStep& step;
    const engine::RankContext& context;
    const v1::JobSpec& spec;
    checkpoint::Writer* writer = nullptr;  // null: votes on stopping alone
    absl::Duration patience_at_end;        // equal on all ranks: RankRun
  };
  explicit Checkpointing(const Params& params) : params_(params) {}
  // Nobody reads the snapshot any more.
  ~Checkpointing();
  Checkpointing(const Checkpointing&) = delete;

  // Fills the step from `ref`; what it goes on from. Blocking. FailedPrecondition naming the first
  // difference when it is of another job.
  absl::StatusOr<v1::TrainingState> Restore(const v1::CheckpointRef& ref, const v1::RunPlan& plan,
                                            const std::atomic<bool>* stop);

  // After state.step() steps: begins a checkpoint where one is due; true on every rank when any of
  // them wants to stop. Waits for the copy alone, but before leaving for the whole checkpoint.
  // Blocking, collective.
  absl::StatusOr<bool> AtBoundary(const v1::TrainingState& state, bool stop);
  // After the last step: OK when its checkpoint is committed. Waits for room, as long as its
  // patience lasts and no rank wants to stop.
  absl::Status AtEnd(const v1::TrainingState& state, const std::function<bool()>& stop_requested);

 private:
  absl::StatusOr<BoundaryVote> Vote(bool stop);
  absl::Status Begin(const v1::TrainingState& state);
  absl::StatusOr<bool> Settle();
  void Pause(absl::Duration pause);
  absl::Status Complete(const v1::TrainingState& state, absl::Duration patience,
                        const std::function<bool()>& stop_requested);

  const Params params_;
  int64_t newest_step_ = 0;  // begun, or gone on from
  int64_t given_up_ = 0;     // the last step that a vote gave up
};

}  // namespace upipe::train
