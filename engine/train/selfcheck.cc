#include "engine/train/selfcheck.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "common/rounding.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/comm/dry/dry_communicator.h"
#include "engine/train/selfcheck_side.h"

namespace upipe::train {
namespace {

using kernels::MemoryStats;
using model::ShardedParameters;
using optim::StepScalars;

constexpr int64_t kMostSteps = 1000;
// A dry run of more tells nothing new: every step gets the addresses of the first.
constexpr int64_t kDrySteps = 2;
constexpr std::array kSides = {Side::kAlone, Side::kScaled, Side::kJob};

struct SideMemory {
  MemoryStats device, host;
  int64_t arenas() const { return device.arena_high_water_bytes + host.arena_high_water_bytes; }
};

SideMemory MemoryOf(kernels::Device& device) {
  return {device.allocator().stats(), device.host_allocator().stats()};
}

absl::StatusOr<SideMemory> PlanSide(const ShortJob& job, Side side, int rank) {
  const v1::ParallelSpec& parallel = job.job.spec().parallel();
  UPIPE_ASSIGN_OR_RETURN(const auto device, kernels::CreateDryDevice(parallel.backend()));
  comm::DryCommunicator comm(rank, parallel.ranks(),
                             {.reduce_room = comm::ReduceRoomOf(parallel.backend())});
  ShortJob shorter = job;
  shorter.steps = std::min(job.steps, kDrySteps);
  UPIPE_RETURN_IF_ERROR(RunSide(shorter, side, *device, comm, nullptr));
  return MemoryOf(*device);
}

// What is planned and measured of a side, in an order of its own: first what people look at first.
std::vector<PlannedAndMeasured> Quantities(const std::string& side, const SideMemory& planned,
                                           const SideMemory& measured) {
  std::vector<PlannedAndMeasured> all;
  const auto add = [&](const char* pool, const MemoryStats& p, const MemoryStats& m) {
    const auto one = [&](const char* what, int64_t of_plan, int64_t of_run) {
      all.push_back({absl::StrCat(side, ", ", pool, ": ", what), of_plan, of_run});
    };
    one("peak", p.peak_total_bytes, m.peak_total_bytes);
    one("arena", p.arena_high_water_bytes, m.arena_high_water_bytes);
    one("attention", p.attention_peak_bytes, m.attention_peak_bytes);
    for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
      one(kernels::kMemoryTagNames[tag], p.peak_bytes[tag], m.peak_bytes[tag]);
    }
  };
  add("device", planned.device, measured.device);
  add("host", planned.host, measured.host);
  return all;
}

double HalfEpsilonOf(kernels::DType storage) {
  return storage == kernels::DType::kBFloat16 ? 1.0 / 256
                                              : std::numeric_limits<float>::epsilon() / 2;
}

double RelativeDifference(double value, double reference) {
  const double difference = std::abs(value - reference);
  return reference == 0 ? difference : difference / std::abs(reference);
}

// Squared norms by tensor, in the order of the layout.
struct TensorSums {
  std::vector<double> reference;    // of the gradient at CP = 1
  std::vector<double> scaled, job;  // of what these differ from it by
};

class SelfCheck final : private SideWatch {
 public:
  explicit SelfCheck(const SelfCheckRun& run)
      : run_(run),
        spec_(run.plan.spec()),
        mesh_(parallel::Mesh::From(spec_.parallel())),
        job_{.job = run.plan, .steps = run.options.steps},
        layout_(model::ParameterLayout::Make(
            model::ModelConfig::From(spec_.model(), spec_.train().context()), mesh_.shard_ranks(),
            mesh_.dp_ranks)) {
    for (const model::ParameterUnit* unit : layout_.Units()) {
      for (const model::ParameterTensor& tensor : unit->tensors) {
        index_[tensor.name] = names_.size();
        names_.push_back(tensor.name);
      }
    }
    for (auto* list : {&sums_.reference, &sums_.scaled, &sums_.job}) list->resize(names_.size());
  }

  absl::StatusOr<SelfCheckReport> Run() {
    UPIPE_RETURN_IF_ERROR(ChooseContext());
    probes_ = LeakProbesOf(job_);
    gradients_changed_.resize(probes_.size() * names_.size());
    losses_.resize(probes_.size());
    for (const Side side : kSides) UPIPE_RETURN_IF_ERROR(MeasureSide(side));
    for (auto* list : {&sums_.reference, &sums_.scaled, &sums_.job, &gradients_changed_}) {
      UPIPE_RETURN_IF_ERROR(OverRanks(comm::ReduceOp::kSum, *list));
    }
    FillReport();
    UPIPE_RETURN_IF_ERROR(FindFailure());
    UPIPE_RETURN_IF_ERROR(LeaveTogether());
    return std::move(report_);
  }

 private:
  std::string NameOf(Side side) const {
    if (side == Side::kJob) return absl::StrCat("CP = ", mesh_.context_ranks());
    return side == Side::kAlone ? "CP = 1" : "CP = 1 scaled";
  }

  // What a check of this context takes of this rank.
  absl::StatusOr<int64_t> BytesOf(int64_t context) {
    job_.context = context;
    int64_t arenas = 0;
    for (const Side side : kSides) {
      UPIPE_ASSIGN_OR_RETURN(const SideMemory planned, PlanSide(job_, side, run_.rank));
      arenas = std::max(arenas, planned.arenas());
    }
    return arenas + layout_.shard_elements * static_cast<int64_t>(sizeof(float));
  }

  // The longest that every rank has room for.
  absl::Status ChooseContext() {
    const v1::RankPlan& own = run_.plan.ranks(run_.rank);
    const int64_t room = std::max(own.memory().arena_bytes() + own.host_memory().arena_bytes(),
                                  run_.options.memory_bytes.value_or(0));
    const auto context_of = [&](int64_t units) {
      return run_.options.context.value_or(ContextOf(run_.plan, units));
    };
    int64_t units = run_.options.context ? 1 : MostUnits(run_.plan);
    int64_t bytes = 0;
    while (true) {
      UPIPE_ASSIGN_OR_RETURN(bytes, BytesOf(context_of(units)));
      if (bytes <= room || units == 1) break;
      units /= 2;
    }
    const bool fits = bytes <= room;
    // The shortest, and of ranks without room the most bytes and the least room.
    std::vector<double> agreement = {
        fits ? -static_cast<double>(units) : 0, fits ? 0 : static_cast<double>(bytes),
        fits ? -std::numeric_limits<double>::max() : -static_cast<double>(room)};
    UPIPE_RETURN_IF_ERROR(OverRanks(comm::ReduceOp::kMax, agreement));
    if (agreement[0] == 0) {
      job_.context = context_of(1);
      return DoesNotFit(static_cast<int64_t>(agreement[1]), static_cast<int64_t>(-agreement[2]));
    }
    const auto agreed = static_cast<int64_t>(-agreement[0]);
    if (agreed != units) {
      UPIPE_ASSIGN_OR_RETURN(bytes, BytesOf(context_of(agreed)));
    }
    report_.bytes = bytes;
    return absl::OkStatus();
  }

  absl::Status DoesNotFit(int64_t bytes, int64_t room) const {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the self check of ", job_.context, " tokens takes ", FormatBytes(bytes), " (", bytes,
        " bytes) of a rank, which may take ", FormatBytes(room), " (", room,
        " bytes); raise train.memory_per_rank to at least the former, or check the job on more "
        "ranks"));
  }

  // Arena and pool of exactly what the dry run needed.
  absl::Status MeasureSide(Side side) {
    UPIPE_ASSIGN_OR_RETURN(const SideMemory planned, PlanSide(job_, side, run_.rank));
    kernels::DeviceOptions options;
    options.backend = spec_.parallel().backend();
    options.arena_bytes = planned.device.arena_high_water_bytes;
    options.host_bytes = planned.host.arena_high_water_bytes;
    options.num_threads = spec_.parallel().threads_per_rank();
    options.cpus = run_.cpus;
    UPIPE_ASSIGN_OR_RETURN(const auto device, run_.create_device(options));
    side_ = side;
    UPIPE_RETURN_IF_ERROR(RunSide(job_, side, *device, run_.comm, this));
    for (PlannedAndMeasured& each : Quantities(NameOf(side), planned, MemoryOf(*device))) {
      report_.memory.push_back(std::move(each));
    }
    return absl::OkStatus();
  }

  void OnLossPart(double loss) override { loss_parts_[side_].push_back(loss); }

  void OnStep(const StepResult& result) override { results_[side_].push_back(result); }

  absl::Status OnGradients(const engine::RankContext& context,
                           const ShardedParameters& parameters) override {
    if (side_ == Side::kAlone) return KeepGradients(context, parameters, &sums_.reference);
    std::vector<double>& squares = side_ == Side::kScaled ? sums_.scaled : sums_.job;
    return ForEachPart(
        context, parameters, parameters.gradients(),
        [&](const std::string& tensor, int64_t at, absl::Span<float> values) {
          const double scale =
              side_ == Side::kScaled ? WeightScale(tensor, spec_.model().tie_embeddings()) : 1;
          double& sum = squares[index_.at(tensor)];
          for (const float value : values) {
            const double difference = scale * value - kept_[at++];
            sum += difference * difference;
          }
        });
  }

  absl::Status OnProbe(const Probed& probed, const engine::RankContext& context,
                       const ShardedParameters& parameters) override {
    losses_[probed.probe][probed.changed ? 1 : 0] = probed.losses;
    if (!probed.changed) return KeepGradients(context, parameters, nullptr);
    double* changed = &gradients_changed_[probed.probe * names_.size()];
    return ForEachPart(context, parameters, parameters.gradients(),
                       [&](const std::string& tensor, int64_t at, absl::Span<float> values) {
                         for (const float value : values) {
                           if (!(value == kept_[at++])) changed[index_.at(tensor)] += 1;
                         }
                       });
  }

  // For later ones to be compared with.
  absl::Status KeepGradients(const engine::RankContext& context,
                             const ShardedParameters& parameters, std::vector<double>* squares) {
    kept_.resize(layout_.shard_elements);
    return ForEachPart(context, parameters, parameters.gradients(),
                       [&](const std::string& tensor, int64_t at, absl::Span<float> values) {
                         std::copy(values.begin(), values.end(), kept_.begin() + at);
                         if (squares == nullptr) return;
                         double& sum = (*squares)[index_.at(tensor)];
                         for (const float value : values) sum += double{value} * value;
                       });
  }

  // In place, over all ranks; the same on each of them.
  absl::Status OverRanks(comm::ReduceOp op, std::vector<double>& values) const {
    const auto count = static_cast<int64_t>(values.size());
    if (count == 0) return absl::OkStatus();
    const int64_t bytes = count * static_cast<int64_t>(sizeof(double));
    const int64_t scratch_bytes = run_.comm.AllReduceScratchBytes(count);
    constexpr int64_t kAlignment = kernels::Allocator::kAlignmentBytes;
    kernels::DeviceOptions options;
    options.backend = spec_.parallel().backend();
    options.arena_bytes = RoundUp(bytes, kAlignment) + RoundUp(scratch_bytes, kAlignment);
    options.cpus = run_.cpus;
    UPIPE_ASSIGN_OR_RETURN(const auto device, kernels::CreateDevice(options));
    const auto stream = device->CreateStream("selfcheck");
    kernels::Allocator& allocator = device->allocator();
    UPIPE_ASSIGN_OR_RETURN(const kernels::Buffer buffer,
                           allocator.Allocate(kernels::MemoryTag::kComm, bytes, *stream));
    UPIPE_ASSIGN_OR_RETURN(const kernels::Buffer scratch,
                           allocator.Allocate(kernels::MemoryTag::kComm, scratch_bytes, *stream));
    device->CopyFromHost(buffer.data(), values.data(), bytes, *stream);
    UPIPE_RETURN_IF_ERROR(run_.comm.AllReduce(static_cast<double*>(buffer.data()), count, op,
                                              scratch.data(), *stream));
    device->CopyToHost(values.data(), buffer.data(), bytes, *stream);
    return stream->Synchronize();
  }

  // A rank that leaves first, as after FAIL, would end the last collective of the others.
  absl::Status LeaveTogether() const {
    kernels::DeviceOptions options;
    options.backend = spec_.parallel().backend();
    options.cpus = run_.cpus;
    UPIPE_ASSIGN_OR_RETURN(const auto device, kernels::CreateDevice(options));
    const auto stream = device->CreateStream("selfcheck");
    run_.comm.Barrier(*stream).IgnoreError();
    stream->Synchronize().IgnoreError();
    return absl::OkStatus();
  }

  void FillReport() {
    report_.context_ranks = mesh_.context_ranks();
    report_.context = job_.context;
    report_.documents = static_cast<int64_t>(MakeShortSequence(job_, 0).document_starts.size());
    report_.steps = job_.steps;
    report_.sequences = SequencesOfStep(job_);
    for (const LeakProbe& probe : probes_) report_.probes.push_back(probe.what);
    FillGradients();
    FillNumbers();
  }

  double BoundOf(double rounding) const {
    return 3 * rounding + HalfEpsilonOf(model::StorageTypeOf(spec_.train()));
  }

  // Embedding last: the order of the backward pass.
  void FillGradients() {
    const auto relative = [](double squares, double reference) {
      return reference == 0 ? std::sqrt(squares) : std::sqrt(squares / reference);
    };
    double scaled = 0, reference = 0;
    for (size_t i = names_.size(); i-- > 0;) {
      report_.gradients.push_back(
          {.what = names_[i],
           .alone = std::sqrt(sums_.reference[i]),
           .error = relative(sums_.job[i], sums_.reference[i]),
           .bound = BoundOf(relative(sums_.scaled[i], sums_.reference[i]))});
      scaled += sums_.scaled[i];
      reference += sums_.reference[i];
    }
    gradient_rounding_ = relative(scaled, reference);
  }

  void FillNumbers() {
    const std::vector<StepResult>& alone = results_[Side::kAlone];
    const std::vector<StepResult>& job = results_[Side::kJob];
    double difference = 0, sum = 0;
    for (int part = 0; part < kLossParts; ++part) {
      const double loss = loss_parts_[Side::kAlone][part];
      difference += std::abs(loss_parts_[Side::kScaled][part] - loss);
      sum += loss;
    }
    const double loss_rounding = sum == 0 ? 0 : difference / sum;
    for (size_t i = 0; i < alone.size(); ++i) {
      const auto add = [&](const char* what, double one, double all, double bound) {
        report_.numbers.push_back({.what = absl::StrCat(what, " of step ", i + 1),
                                   .alone = one,
                                   .job = all,
                                   .error = RelativeDifference(all, one),
                                   .bound = bound});
      };
      const auto labels = static_cast<double>(NumLabels(job_, static_cast<int64_t>(i) + 1));
      add("valid tokens", alone[i].valid_tokens, job[i].valid_tokens, 0);
      report_.numbers.back().error = std::max(RelativeDifference(alone[i].valid_tokens, labels),
                                              RelativeDifference(job[i].valid_tokens, labels));
      add("loss", alone[i].loss, job[i].loss, BoundOf(loss_rounding));
      add("gradient norm", alone[i].grad_norm, job[i].grad_norm, BoundOf(gradient_rounding_));
    }
  }

  // The first thing that differs, in the order in which one defect shows first.
  absl::Status FindFailure() {
    UPIPE_ASSIGN_OR_RETURN(const std::string memory, MemoryFailure());
    const auto find = [&](const std::vector<Compared>& list, size_t begin, size_t end) {
      for (size_t i = begin; i < end && report_.failure.empty(); ++i) {
        if (!list[i].holds()) report_.failure = Describe(list[i]);
      }
    };
    const std::vector<Compared>& numbers = report_.numbers;
    find(numbers, 0, 2);  // valid tokens and loss of step 1
    find(report_.gradients, 0, report_.gradients.size());
    find(numbers, 2, numbers.size());
    for (size_t i = 0; i < probes_.size() && report_.failure.empty(); ++i) {
      report_.failure = ProbeFailure(i);
    }
    if (report_.failure.empty()) report_.failure = memory;
    return absl::OkStatus();
  }

  std::string Describe(const Compared& compared) const {
    const std::string n = NameOf(Side::kJob);
    const bool tensor = index_.contains(compared.what);
    const std::string values =
        tensor ? absl::StrFormat("norm %.6g at CP = 1", compared.alone)
               : absl::StrFormat("%.9g at CP = 1, %.9g at %s", compared.alone, compared.job, n);
    if (!std::isfinite(compared.alone) || !std::isfinite(compared.job)) {
      return absl::StrCat(compared.what, " is not finite: ", values);
    }
    if (compared.bound == 0)
      return absl::StrCat(compared.what, " are not the labels of the data: ", values);
    return absl::StrFormat(
        "%s%s differs between CP = 1 and %s by %.3g of it, rounding explains %.3g (%s)",
        tensor ? "the gradient of " : "", compared.what, n, compared.error, compared.bound, values);
  }

  std::string ProbeFailure(size_t probe) const {
    const auto& [before, after] = losses_[probe];
    for (size_t range = 0; range < before.size(); ++range) {
      if (before[range].loss == after[range].loss && before[range].count == after[range].count) {
        continue;
      }
      const StepScalars::LossAndCount a = optim::TotalOf(before), b = optim::TotalOf(after);
      return absl::StrFormat(
          "other tokens %s change losses that must not see them: the mean of %.0f tokens from "
          "%.9g to %.9g",
          probes_[probe].what, a.count, a.loss / a.count, b.loss / b.count);
    }
    for (size_t i = names_.size(); i-- > 0;) {
      const double changed = gradients_changed_[probe * names_.size() + i];
      if (changed == 0) continue;
      return absl::StrFormat(
          "other tokens %s, which have no label, change %.0f elements of the gradient of %s",
          probes_[probe].what, changed, names_[i]);
    }
    return "";
  }

  // Of the first rank that measures something else than was planned; every rank gets to know.
  absl::StatusOr<std::string> MemoryFailure() {
    constexpr size_t kFields = 3;  // index + 1 of the first difference, planned, measured
    std::vector<double> by_rank(run_.comm.size() * kFields);
    for (size_t i = 0; i < report_.memory.size(); ++i) {
      const PlannedAndMeasured& each = report_.memory[i];
      if (each.planned == each.measured) continue;
      double* own = &by_rank[run_.rank * kFields];
      own[0] = static_cast<double>(i + 1);
      own[1] = static_cast<double>(each.planned);
      own[2] = static_cast<double>(each.measured);
      break;
    }
    UPIPE_RETURN_IF_ERROR(OverRanks(comm::ReduceOp::kSum, by_rank));
    for (int rank = 0; rank < run_.comm.size(); ++rank) {
      const double* fields = &by_rank[rank * kFields];
      if (fields[0] == 0) continue;
      return absl::StrFormat("rank %d measured %.0f bytes of %s, %.0f were planned", rank,
                             fields[2], report_.memory[static_cast<size_t>(fields[0]) - 1].what,
                             fields[1]);
    }
    return "";
  }

  const SelfCheckRun& run_;
  const v1::JobSpec& spec_;
  const parallel::Mesh mesh_;
  ShortJob job_;
  const model::ParameterLayout layout_;
  std::map<std::string, size_t> index_;  // of names_
  std::vector<std::string> names_;       // of tensors
  std::map<Side, std::vector<StepResult>> results_;
  Side side_ = Side::kAlone;  // that runs
  std::vector<float> kept_;   // [shard_elements] gradients later ones are compared with
  TensorSums sums_;
  std::map<Side, std::vector<double>> loss_parts_;
  double gradient_rounding_ = 0;
  std::vector<LeakProbe> probes_;
  std::vector<std::array<StepScalars::ByPosition, 2>> losses_;  // [probes] before, changed
  std::vector<double> gradients_changed_;                       // [probes, names] elements
  SelfCheckReport report_;
};

}  // namespace

std::string VerdictOf(const SelfCheckReport& report) {
  const std::string what =
      absl::StrCat(report.steps, report.steps == 1 ? " step" : " steps", " of ", report.context,
                   " tokens at CP = ", report.context_ranks, " and at CP = 1");
  if (!report.passed()) return absl::StrCat("FAIL: ", report.failure, "; of ", what);
  return absl::StrCat(
      "PASS: ", what, " agree: losses, norms and ", report.gradients.size(),
      " gradients within what rounding explains; no token reaches what it must not (",
      report.probes.size(), report.probes.size() == 1 ? " probe" : " probes",
      "); memory as planned to the byte");
}

absl::StatusOr<SelfCheckReport> RunSelfCheck(const SelfCheckRun& run) {
  const SelfCheckOptions& options = run.options;
  const int64_t longest = run.plan.spec().train().context();
  if (options.steps < 1 || options.steps > kMostSteps) {
    return absl::InvalidArgumentError(
        absl::StrCat("a self check of ", options.steps, " steps; 1 to ", kMostSteps));
  }
  if (options.context && (*options.context < 1 || *options.context > longest)) {
    return absl::InvalidArgumentError(absl::StrCat("a self check of ", *options.context,
                                                   " tokens; 1 to the job's context of ", longest));
  }
  UPIPE_ASSIGN_OR_RETURN(SelfCheckReport report, SelfCheck(run).Run());
  return report;
}

}  // namespace upipe::train
