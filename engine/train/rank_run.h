// One rank from its first to its last step: reads its parts of its group's sequences of the packed
// data, runs TrainStep, evaluates on held-out sequences and reports. The same for a thread of
// upipe-run and for a trainer process.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/position_page.h"
#include "engine/checkpoint/writer.h"
#include "engine/comm/communicator.h"
#include "engine/train/memory_message.h"
#include "engine/train/step_timeline.h"
#include "kernels/api/device.h"
#include "upipe/v1/plan.pb.h"
#include "upipe/v1/report.pb.h"
#include "upipe/v1/timeline.pb.h"

namespace upipe::train {

// Everything is borrowed for the length of the run. Callbacks run on the caller's thread between
// steps: they must not block.
struct RankRun {
  const v1::RunPlan& plan;
  int rank = 0;
  comm::Communicator& comm;
  kernels::Device& device;
  PositionPage* position = nullptr;
  std::function<void(const v1::StepReport&)> on_step = {};
  // Of the first step, and then of at most one in timeline_every.
  std::function<void(const v1::StepTimeline&)> on_timeline = {};
  absl::Duration timeline_every = kTimelineEvery;
  std::function<void()> on_running = {};  // all ranks are connected and agree on the schedule
  // Asks all ranks to checkpoint and leave at the next step boundary.
  const std::atomic<bool>* stop_requested = nullptr;
  // Where the spec has a checkpoint path: this rank's, over the job's folder, and what all ranks go
  // on from; null = from the beginning. The writer is cancelled when TrainRank returns.
  checkpoint::Writer* writer = nullptr;
  const v1::CheckpointRef* resume = nullptr;
  // How long the last checkpoint is tried again, in pauses of up to 30 s, before the run fails for
  // it. Equal on all ranks.
  absl::Duration patience_at_end;
};

// Blocking. OK after the last step and, with a writer, when its checkpoint is committed; Cancelled
// when any rank was asked to stop; else the first error of data, device, communicator, restoring or
// training (too many skipped steps: FailedPrecondition). A checkpoint that fails earlier is a
// problem for its writer to report, and the run goes on. On an error the communicator is aborted.
absl::Status TrainRank(const RankRun& run);

// What a rank's attention runs on: "cudnn 9.19, own backward" of a plan's "cuda cudnn 9.19, own
// backward bf16".
std::string AttentionKernelOf(const v1::RunPlan& plan);

// The device a rank's plan asks for: backend, threads, an arena and a host pool of exactly the
// planned high-water marks. Its threads run on `cpus`; none = anywhere.
absl::StatusOr<std::unique_ptr<kernels::Device>> CreateRankDevice(
    const v1::RunPlan& plan, int rank, const std::vector<int>& cpus = {});

// How long one collective may wait for a peer: two minutes more than the busiest rank's whole step
// takes at 1 GFLOP/s, on cuda 20 TFLOP/s, and, at the end, its part of a checkpoint. Only a
// backstop: a dead peer is noticed by its worker.
absl::Duration CollectiveDeadline(const v1::RunPlan& plan);

}  // namespace upipe::train
