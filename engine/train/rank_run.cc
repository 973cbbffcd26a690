#include "engine/train/rank_run.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/clock.h"
#include "common/failpoint.h"
#include "common/metrics/names.h"
#include "common/status.h"
#include "engine/data/sequence_source.h"
#include "engine/train/checkpointing.h"
#include "engine/train/measured_workspaces.h"
#include "engine/train/step.h"
#include "kernels/device_factory.h"

namespace upipe::train {
namespace {

using optim::StepScalars;
using SteadyClock = std::chrono::steady_clock;

double SecondsSince(SteadyClock::time_point start) {
  return std::chrono::duration<double>(SteadyClock::now() - start).count();
}

// Host memory for this rank's part of one sequence; made once.
struct TokenBuffers {
  std::vector<int32_t> tokens, labels;
  std::vector<int64_t> positions;

  explicit TokenBuffers(int64_t n) : tokens(n), labels(n), positions(n) {}
};

// This rank's part of any sequence, padded with unlabelled zeros past the context.
class TokenReader {
 public:
  TokenReader(data::SequenceSource source, v1::Documents documents,
              const parallel::TokenMap& tokens, int context_rank)
      : source_(std::move(source)),
        documents_(documents),
        context_(tokens.context),
        runs_(tokens.RunsOf(context_rank)) {}

  absl::StatusOr<HostTokens> Read(int64_t sequence, TokenBuffers& to) const {
    HostTokens host = Unlabelled(to);
    if (documents_ != v1::DOCUMENTS_JOIN) {
      UPIPE_ASSIGN_OR_RETURN(host.document_starts, source_.Documents(sequence));
    }
    if (documents_ == v1::DOCUMENTS_RESTART) WritePositions(host.document_starts, to);
    int64_t at = 0;
    for (const kernels::PositionRun& run : runs_) {
      const int64_t count = std::max<int64_t>(0, std::min(run.end, context_) - run.begin);
      if (count > 0) {
        UPIPE_RETURN_IF_ERROR(
            source_.Read(sequence, run.begin, count, to.tokens.data() + at, to.labels.data() + at));
      }
      at += run.end - run.begin;
    }
    return host;
  }

  // A sequence that adds nothing: what a group without one of its own joins the others with.
  HostTokens Unlabelled(TokenBuffers& to) const {
    std::fill(to.tokens.begin(), to.tokens.end(), 0);
    std::fill(to.labels.begin(), to.labels.end(), -1);
    WritePositions({0}, to);
    return {
        .tokens = to.tokens.data(), .labels = to.labels.data(), .positions = to.positions.data()};
  }

 private:
  void WritePositions(const std::vector<int64_t>& document_starts, TokenBuffers& to) const {
    int64_t* out = to.positions.data();
    for (const kernels::PositionRun& run : runs_) {
      data::RotaryPositions(document_starts, run, out);
      out += run.end - run.begin;
    }
  }

  data::SequenceSource source_;
  v1::Documents documents_;
  int64_t context_;
  std::vector<kernels::PositionRun> runs_;
};

absl::StatusOr<TokenReader> OpenReader(const v1::RunPlan& plan, const char* shard_name,
                                       const parallel::TokenMap& tokens, int context_rank) {
  const v1::JobSpec& spec = plan.spec();
  const std::string path = absl::StrCat(spec.data().path(), "/", shard_name);
  UPIPE_ASSIGN_OR_RETURN(data::TokenShard shard, data::TokenShard::Open(path));
  if (shard.vocab_size() > spec.model().vocab_size()) {
    return absl::InvalidArgumentError(absl::StrCat(path, " holds tokens of a vocabulary of ",
                                                   shard.vocab_size(), "; the model's is ",
                                                   spec.model().vocab_size()));
  }
  const v1::Documents documents = spec.data().documents();
  UPIPE_ASSIGN_OR_RETURN(data::SequenceSource source,
                         data::SequenceSource::Create(
                             std::move(shard), tokens.context, spec.train().seed(),
                             documents == v1::DOCUMENTS_JOIN ? data::LabelRule::kEveryToken
                                                             : data::LabelRule::kWithinDocuments));
  return TokenReader(std::move(source), documents, tokens, context_rank);
}

class RankLoop {
 public:
  explicit RankLoop(const RankRun& run)
      : run_(run),
        spec_(run.plan.spec()),
        mesh_(parallel::Mesh::From(spec_.parallel())),
        group_(mesh_.SequenceGroup(run.rank)),
        state_(CheckpointFacts(run.plan).state()) {}

  absl::Status Run() {
    const parallel::TokenMap tokens = TokensOf(spec_);
    const int context_rank = mesh_.ContextRank(run_.rank);
    UPIPE_ASSIGN_OR_RETURN(const TokenReader train,
                           OpenReader(run_.plan, data::kTrainShardName, tokens, context_rank));
    std::optional<TokenReader> held_out;
    if (spec_.train().eval_sequences() > 0) {
      UPIPE_ASSIGN_OR_RETURN(held_out,
                             OpenReader(run_.plan, data::kHeldOutShardName, tokens, context_rank));
    }
    buffers_.assign(spec_.train().gradient_accumulation(), TokenBuffers(tokens.tokens_per_rank));
    // Drained before what its tasks touch: declared after the buffers and the clock, destroyed
    // before them.
    const auto streams = engine::RankStreams::Create(run_.device, run_.rank);
    stream_ = streams.compute.get();
    clock_.Watch(streams);
    const engine::RankContext context({.device = run_.device,
                                       .streams = streams,
                                       .comm = run_.comm,
                                       .position = run_.position,
                                       .clock = &clock_,
                                       .storage = model::StorageTypeOf(spec_.train()),
                                       .mesh = mesh_});
    StepTimelines timelines({.rank = run_.rank,
                             .clock = clock_,
                             .device = run_.device,
                             .tell = run_.on_timeline,
                             .every = run_.timeline_every});
    timelines_ = &timelines;
    UPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<TrainStep> step,
                           TrainStep::Create(context, run_.plan));
    Checkpointing checkpoints({.step = *step,
                               .context = context,
                               .spec = spec_,
                               .writer = run_.writer,
                               .patience_at_end = run_.patience_at_end});
    if (run_.resume != nullptr) {
      UPIPE_ASSIGN_OR_RETURN(state_,
                             checkpoints.Restore(*run_.resume, run_.plan, run_.stop_requested));
    }
    if (run_.on_running) run_.on_running();
    const int64_t total = spec_.train().steps();
    for (int64_t number = state_.step() + 1; number <= total; ++number) {
      const StepStart start{SteadyClock::now(), run_.comm.stats()};
      timelines.BeginStep();
      UPIPE_ASSIGN_OR_RETURN(const bool stop, checkpoints.AtBoundary(state_, StopRequested()));
      if (stop) {
        return Together(absl::CancelledError(absl::StrCat("asked to stop before step ", number)));
      }
      UPIPE_RETURN_IF_ERROR(OneStep(*step, train, held_out, number, start));
    }
    const absl::Status committed = checkpoints.AtEnd(state_, [this] { return StopRequested(); });
    if (!committed.ok()) return Together(committed);
    context.Mark(total, StepPass::kDone, -1, -1);
    UPIPE_RETURN_IF_ERROR(run_.comm.Barrier(*stream_));
    return stream_->Synchronize();
  }

 private:
  bool StopRequested() const {
    return run_.stop_requested != nullptr && run_.stop_requested->load(std::memory_order_relaxed);
  }

  // Of a step, its vote and the copy of a checkpoint that is begun before it included.
  struct StepStart {
    SteadyClock::time_point time;
    comm::CommStats comm;
  };

  absl::Status OneStep(TrainStep& step, const TokenReader& train,
                       const std::optional<TokenReader>& held_out, int64_t number,
                       const StepStart& start) {
    const auto data_start = SteadyClock::now();
    UPIPE_RETURN_IF_ERROR(Failpoint(failpoints::kTrainerStep));
    std::vector<HostTokens> micro_steps;
    for (size_t micro = 0; micro < buffers_.size(); ++micro) {
      const int64_t sequence = SequenceOf(spec_, number, static_cast<int64_t>(micro), group_);
      UPIPE_ASSIGN_OR_RETURN(HostTokens tokens, train.Read(sequence, buffers_[micro]));
      micro_steps.push_back(std::move(tokens));
    }
    v1::StepReport report;
    report.set_data_seconds(SecondsSince(data_start));
    UPIPE_ASSIGN_OR_RETURN(const StepResult result, step.Run(number, micro_steps));
    UPIPE_RETURN_IF_ERROR(timelines_->EndStep());
    report.set_step_seconds(SecondsSince(start.time));
    timelines_->Tell(number);
    Advance(result, step.applied_steps(), number);
    AddResult(number, result, start.comm, report);
    const int64_t every = spec_.train().eval_every();
    if (held_out && (number == spec_.train().steps() || (every > 0 && number % every == 0))) {
      UPIPE_ASSIGN_OR_RETURN(const auto by_position, HeldOutLoss(step, *held_out, number));
      const StepScalars::LossAndCount total = optim::TotalOf(by_position);
      report.set_held_out_loss(total.loss / total.count);
      *report.mutable_held_out_loss_by_position() = ToMessages(by_position);
    }
    if (run_.on_step) run_.on_step(report);
    return CheckSkipped(result, number);
  }

  void Advance(const StepResult& result, int64_t applied_steps, int64_t number) {
    state_.set_step(number);
    state_.set_applied_steps(applied_steps);
    state_.set_skipped_steps(state_.skipped_steps() + (result.skipped ? 1 : 0));
    state_.set_skipped_in_a_row(result.skipped ? state_.skipped_in_a_row() + 1 : 0);
  }

  void AddResult(int64_t number, const StepResult& result, const comm::CommStats& before,
                 v1::StepReport& report) {
    report.set_step(number);
    report.set_total_steps(spec_.train().steps());
    report.set_loss(result.loss);
    report.set_grad_norm(result.grad_norm);
    report.set_learning_rate(result.learning_rate);
    report.set_skipped(result.skipped);
    report.set_skipped_steps_total(state_.skipped_steps());
    *report.mutable_loss_by_position() = ToMessages(result.by_position);
    const int64_t tokens = spec_.train().context() * SequencesPerStep(spec_);
    report.set_tokens(tokens);
    report.set_tokens_per_second(static_cast<double>(tokens) / report.step_seconds());
    AddTimes(clock_.times(), report);
    AddTraffic(before, run_.comm.stats(), report);
    *report.mutable_memory() = ToMessage(run_.device.allocator().stats());
    *report.mutable_host_memory() = ToMessage(run_.device.host_allocator().stats());
    report.set_unix_millis(SystemClock().UnixMillis());
  }

  static void AddTimes(const engine::StepTimes& times, v1::StepReport& report) {
    for (int name = 0; name < engine::kNumStageNames; ++name) {
      if (times.stage_nanos[name] == 0) continue;
      v1::StageSeconds& stage = *report.add_stages();
      stage.set_stage(NameOf(static_cast<engine::StageName>(name)));
      stage.set_seconds(1e-9 * static_cast<double>(times.stage_nanos[name]));
    }
    report.set_hidden_seconds(1e-9 * static_cast<double>(times.hidden_nanos));
  }

  static void AddTraffic(const comm::CommStats& before, const comm::CommStats& after,
                         v1::StepReport& report) {
    report.set_comm_seconds(after.seconds() - before.seconds());
    for (size_t peer = 0; peer < after.bytes_sent_to_peer.size(); ++peer) {
      report.add_bytes_sent_to_peer(after.bytes_sent_to_peer[peer] -
                                    before.bytes_sent_to_peer[peer]);
    }
    for (int i = 0; i < comm::kNumCommOperations; ++i) {
      const comm::CommStats::Use &was = before.by_operation[i], &is = after.by_operation[i];
      if (is.calls == was.calls) continue;
      v1::CommUse& use = *report.add_comm();
      static_assert(kOperationNames.size() == comm::kNumCommOperations);
      use.set_operation(kOperationNames[i]);
      use.set_bytes_sent(is.bytes_sent - was.bytes_sent);
      use.set_seconds(is.seconds - was.seconds);
      use.set_calls(is.calls - was.calls);
    }
  }

  // Group g takes held-out sequences g, g + groups, ..: as many rounds for every group.
  absl::StatusOr<StepScalars::ByPosition> HeldOutLoss(TrainStep& step, const TokenReader& held_out,
                                                      int64_t number) {
    StepScalars::ByPosition sum;
    const int64_t sequences = spec_.train().eval_sequences();
    for (int64_t first = 0; first < sequences; first += mesh_.sequence_groups()) {
      HostTokens tokens;
      if (first + group_ < sequences) {
        UPIPE_ASSIGN_OR_RETURN(tokens, held_out.Read(first + group_, buffers_[0]));
      } else {
        tokens = held_out.Unlabelled(buffers_[0]);
      }
      UPIPE_ASSIGN_OR_RETURN(const auto round, step.Evaluate(number, tokens));
      for (size_t range = 0; range < sum.size(); ++range) {
        sum[range].loss += round[range].loss;
        sum[range].count += round[range].count;
      }
    }
    return sum;
  }

  // Ranges that held a token with a label, up to the context.
  google::protobuf::RepeatedPtrField<v1::PositionLoss> ToMessages(
      const StepScalars::ByPosition& by_position) const {
    google::protobuf::RepeatedPtrField<v1::PositionLoss> messages;
    for (int range = 0; range < model::kNumPositionRanges; ++range) {
      const StepScalars::LossAndCount& sum = by_position[range];
      if (sum.count == 0) continue;
      v1::PositionLoss& message = *messages.Add();
      message.set_begin(range == 0 ? 0 : model::PositionRangeEnd(range - 1));
      message.set_end(std::min(model::PositionRangeEnd(range), spec_.train().context()));
      message.set_loss(sum.loss / sum.count);
      message.set_tokens(static_cast<int64_t>(sum.count));
    }
    return messages;
  }

  absl::Status CheckSkipped(const StepResult& result, int64_t number) {
    if (state_.skipped_in_a_row() < spec_.optimizer().max_skipped_steps()) return absl::OkStatus();
    return Together(absl::FailedPreconditionError(absl::StrCat(
        state_.skipped_in_a_row(), " updates in a row were skipped up to step ", number,
        ": gradient norm ", result.grad_norm, ", valid tokens ", result.valid_tokens,
        "; lower optimizer.learning_rate, or raise optimizer.max_skipped_steps")));
  }

  // `verdict` is one that every rank comes to at this step. Returns it when all have: the first to
  // leave aborts the group, which would end the last collective of the others before they had
  // reported their step.
  absl::Status Together(absl::Status verdict) {
    run_.comm.Barrier(*stream_).IgnoreError();
    stream_->Synchronize().IgnoreError();
    return verdict;
  }

  const RankRun& run_;
  const v1::JobSpec& spec_;
  const parallel::Mesh mesh_;
  const int64_t group_;                // whose sequences this rank trains on
  std::vector<TokenBuffers> buffers_;  // of the micro-steps
  engine::StepClock clock_;
  StepTimelines* timelines_ = nullptr;  // while Run runs, as is stream_
  kernels::Stream* stream_ = nullptr;
  v1::TrainingState state_;  // what a checkpoint of now would go on from
};

}  // namespace

absl::Status TrainRank(const RankRun& run) {
  absl::Status status = RankLoop(run).Run();
  if (!status.ok()) run.comm.Abort(status);
  return status;
}

std::string AttentionKernelOf(const v1::RunPlan& plan) {
  std::vector<std::string> words = absl::StrSplit(plan.attention_kernel(), ' ');
  if (words.size() < 3) return kernels::DeviceOptions().attention_kernel;
  return absl::StrJoin(words.begin() + 1, words.end() - 1, " ");
}

absl::StatusOr<std::unique_ptr<kernels::Device>> CreateRankDevice(const v1::RunPlan& plan, int rank,
                                                                  const std::vector<int>& cpus) {
  if (rank < 0 || rank >= plan.ranks_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " of a plan for ", plan.ranks_size(), " ranks"));
  }
  kernels::DeviceOptions options;
  options.backend = plan.spec().parallel().backend();
  options.arena_bytes = plan.ranks(rank).memory().arena_bytes();
  options.host_bytes = plan.ranks(rank).host_memory().arena_bytes();
  options.num_threads = plan.spec().parallel().threads_per_rank();
  options.cpus = cpus;
  options.attention_kernel = AttentionKernelOf(plan);
  options.measured = ScratchTableOf(plan);
  return kernels::CreateDevice(options);
}

absl::Duration CollectiveDeadline(const v1::RunPlan& plan) {
  double flops = 0;
  for (const v1::RankPlan& rank : plan.ranks()) flops = std::max(flops, rank.step_flops());
  const double slowest = plan.spec().parallel().backend() == "cuda" ? 2e13 : 1e9;
  return absl::Minutes(2) + absl::Seconds(flops / slowest) + CheckpointPatience(plan);
}

}  // namespace upipe::train
