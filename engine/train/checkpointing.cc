#include "engine/train/checkpointing.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/failpoint.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::train {
namespace {

constexpr double kBytesPerSecond = 10e6;
constexpr int kTriesAtEnd = 3;  // one after the other; more come with pauses
constexpr absl::Duration kFirstPause = absl::Seconds(1);
constexpr absl::Duration kLongestPause = absl::Seconds(30);
constexpr absl::Duration kMarkInterval = absl::Milliseconds(500);

int64_t CheckpointBytes(const v1::RankPlan& rank) {
  for (const v1::TagBytes& tag : rank.host_memory().tags()) {
    if (tag.tag() == NameOf(kernels::MemoryTag::kCheckpoint)) return tag.peak_bytes();
  }
  return 0;
}

}  // namespace

v1::CheckpointManifest CheckpointFacts(const v1::RunPlan& plan) {
  const v1::JobSpec& spec = plan.spec();
  v1::CheckpointManifest facts;
  const auto layout =
      model::ParameterLayout::Make(model::ModelConfig::From(spec.model(), spec.train().context()),
                                   /*shard_ranks=*/1);
  for (const model::ParameterUnit* unit : layout.Units()) {
    for (const model::ParameterTensor& tensor : unit->tensors) {
      v1::TensorExtent& extent = *facts.add_tensors();
      extent.set_name(tensor.name);
      for (const int64_t dim : tensor.shape) extent.add_shape(dim);
    }
  }
  facts.mutable_state()->set_seed(spec.train().seed());
  facts.mutable_state()->set_context(spec.train().context());
  facts.mutable_state()->set_sequences_per_step(SequencesPerStep(spec));
  *facts.mutable_spec() = spec;
  facts.set_plan_hash(plan.plan_hash());
  facts.set_attention_kernel(plan.attention_kernel());
  return facts;
}

absl::Duration CheckpointPatience(const v1::RunPlan& plan) {
  if (plan.spec().checkpoint().path().empty()) return absl::ZeroDuration();
  int64_t largest = 0;
  for (const v1::RankPlan& rank : plan.ranks()) largest = std::max(largest, CheckpointBytes(rank));
  return absl::Minutes(1) + absl::Seconds(static_cast<double>(largest) / kBytesPerSecond);
}

std::string WhyNotBitIdentical(const v1::CheckpointManifest& stored, const v1::RunPlan& plan,
                               int rank, const std::string& arithmetic) {
  const v1::JobSpec& before = stored.spec();
  const v1::JobSpec& spec = plan.spec();
  const auto same = [](const auto& a, const auto& b) {
    return a.SerializeAsString() == b.SerializeAsString();
  };
  if (!same(before.parallel(), spec.parallel()) || !same(before.memory(), spec.memory()) ||
      before.train().gradient_accumulation() != spec.train().gradient_accumulation()) {
    return "it was written with another layout of ranks or memory policy";
  }
  if (before.train().dtype() != spec.train().dtype()) return "it was trained in another dtype";
  if (!stored.attention_kernel().empty() && stored.attention_kernel() != plan.attention_kernel()) {
    return absl::StrCat("attention was done by ", stored.attention_kernel(), " and is by ",
                        plan.attention_kernel());
  }
  if (!plan.bit_identical()) {
    return absl::StrCat("the attention backward of ", plan.attention_kernel(),
                        " adds in no fixed order; train.deterministic: true keeps the bits");
  }
  if (rank >= stored.shards_size()) return "it was written by fewer ranks";
  const std::string& written = stored.shards(rank).arithmetic();
  if (written == arithmetic) return "";
  return absl::StrCat("rank ", rank, " computed with ", written, " and goes on with ", arithmetic);
}

Checkpointing::~Checkpointing() {
  if (params_.writer == nullptr) return;
  params_.writer->Cancel();
  params_.writer->AwaitIdle();
}

absl::StatusOr<v1::TrainingState> Checkpointing::Restore(const v1::CheckpointRef& ref,
                                                         const v1::RunPlan& plan,
                                                         const std::atomic<bool>* stop) {
  params_.context.Mark(ref.step(), StepPass::kRestoring, -1, -1);
  const checkpoint::Writer& writer = *params_.writer;
  UPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<checkpoint::Checkpoint> from,
                         writer.folder().Open(ref));
  const v1::CheckpointManifest& manifest = from->manifest();
  UPIPE_RETURN_IF_ERROR(checkpoint::CheckSameJob(manifest, CheckpointFacts(plan)));
  UPIPE_RETURN_IF_ERROR(params_.step.Restore(*from, stop));
  const std::string why =
      WhyNotBitIdentical(manifest, plan, params_.context.rank(), writer.options().arithmetic);
  if (!why.empty()) {
    writer.Report(ref.step(), absl::StrCat("goes on within the bound, not bit for bit: ", why));
  }
  newest_step_ = manifest.state().step();
  UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kCheckpointRestored));
  return manifest.state();
}

absl::StatusOr<BoundaryVote> Checkpointing::Vote(bool stop) {
  checkpoint::Writer* const writer = params_.writer;
  if (writer == nullptr) return params_.step.Vote({.stop = stop});
  const checkpoint::Writer::Standing standing = writer->Hold();
  absl::StatusOr<BoundaryVote> vote = params_.step.Vote({.stop = stop,
                                                         .writing = standing.busy,
                                                         .failed_step = standing.failed_step,
                                                         .sealed_step = standing.sealed_step});
  if (vote.ok() && vote->failed_step > vote->sealed_step) {
    writer->Abandon(vote->failed_step);
    given_up_ = vote->failed_step;
  } else if (vote.ok()) {
    writer->Forgive(vote->failed_step);
  }
  writer->Release();
  return vote;
}

absl::Status Checkpointing::Begin(const v1::TrainingState& state) {
  params_.context.Mark(state.step(), StepPass::kCheckpoint, -1, -1);
  UPIPE_ASSIGN_OR_RETURN(std::vector<checkpoint::MemoryPiece> pieces, params_.step.TakeSnapshot());
  UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kCheckpointCopied));
  params_.writer->Start(state, std::move(pieces));
  newest_step_ = state.step();
  return absl::OkStatus();
}

// Waits until nothing is being written on any rank. Whether the newest step is committed.
absl::StatusOr<bool> Checkpointing::Settle() {
  params_.context.Mark(newest_step_, StepPass::kCheckpoint, -1, -1);
  // First everybody's part, or its failure, which ends rank 0's waiting for it.
  params_.writer->AwaitPart();
  UPIPE_RETURN_IF_ERROR(Vote(false).status());
  params_.writer->AwaitIdle();
  UPIPE_RETURN_IF_ERROR(Vote(false).status());
  params_.writer->AwaitIdle();
  return given_up_ < newest_step_;
}

// Marks its position all the while: a rank that waits for room is no stall.
void Checkpointing::Pause(absl::Duration pause) {
  for (absl::Duration left = pause; left > absl::ZeroDuration(); left -= kMarkInterval) {
    params_.context.Mark(newest_step_, StepPass::kCheckpoint, -1, -1);
    absl::SleepFor(std::min(left, kMarkInterval));
  }
}

// What a rank does here follows from votes and counts alone, so all of them try equally often.
absl::Status Checkpointing::Complete(const v1::TrainingState& state, absl::Duration patience,
                                     const std::function<bool()>& stop_requested) {
  int tries = 0;
  for (absl::Duration pause = kFirstPause;; ++tries) {
    UPIPE_ASSIGN_OR_RETURN(const bool committed, Settle());
    if (committed && newest_step_ == state.step()) return absl::OkStatus();
    if (tries >= kTriesAtEnd) {
      if (patience <= absl::ZeroDuration()) break;
      UPIPE_ASSIGN_OR_RETURN(const BoundaryVote vote, Vote(stop_requested()));
      if (vote.stop) break;
      Pause(pause);
      patience -= pause;
      pause = std::min(2 * pause, kLongestPause);
    }
    given_up_ = 0;
    UPIPE_RETURN_IF_ERROR(Begin(state));
  }
  const absl::Status error = params_.writer->last_error();
  // Of no kind by which an error of a peer or the transport is known.
  return absl::Status(
      absl::IsResourceExhausted(error) ? absl::StatusCode::kResourceExhausted
                                       : absl::StatusCode::kInternal,
      absl::StrCat("the checkpoint of step ", state.step(), " could not be written in ", tries,
                   " tries: ", error.ok() ? "another rank knows why" : error.message()));
}

absl::StatusOr<bool> Checkpointing::AtBoundary(const v1::TrainingState& state, bool stop) {
  UPIPE_ASSIGN_OR_RETURN(const BoundaryVote vote, Vote(stop));
  if (params_.writer == nullptr) return vote.stop;
  if (vote.stop) {
    if (state.step() == 0) return true;
    const absl::Status status = Complete(state, absl::ZeroDuration(), {});
    // The writer has reported why; what was committed before stands.
    if (!status.ok() && !params_.context.comm().status().ok()) return status;
    return true;
  }
  const bool due =
      state.step() > newest_step_ && state.step() % params_.spec.checkpoint().every_steps() == 0;
  if (!due) return false;
  if (!vote.writing) {
    UPIPE_RETURN_IF_ERROR(Begin(state));
  } else if (params_.context.rank() == 0) {
    params_.writer->Report(
        state.step(),
        absl::StrCat("skipped: the checkpoint of step ", newest_step_,
                     " is still being written after ", FormatTimeSpan(params_.writer->busy_for()),
                     "; a faster disk or a larger checkpoint.every_steps would help"));
  }
  return false;
}

absl::Status Checkpointing::AtEnd(const v1::TrainingState& state,
                                  const std::function<bool()>& stop_requested) {
  if (params_.writer == nullptr) return absl::OkStatus();
  return Complete(state, params_.patience_at_end, stop_requested);
}

}  // namespace upipe::train
