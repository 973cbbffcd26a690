// upipe-run: the same job in one process, ranks as threads over the inproc communicator, no
// daemons.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/cpu_placement.h"
#include "common/failpoint.h"
#include "common/ids.h"
#include "common/machine.h"
#include "common/metrics/step_line.h"
#include "common/metrics/timeline_line.h"
#include "common/parse_arguments.h"
#include "common/spec/yaml_spec.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/checkpoint/job_folder.h"
#include "engine/checkpoint/writer.h"
#include "engine/comm/comm_factory.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/train/checkpointing.h"
#include "engine/train/rank_run.h"
#include "kernels/cpu/isa.h"
#include "planner/plan.h"
#include "planner/render.h"
#include "planner/selfcheck_threads.h"

namespace upipe::planner {
namespace {

std::atomic<bool> stop_requested{false};

struct Flags {
  std::string job_file;
  std::vector<std::string> overrides;
  std::string metrics_file;
  std::string timeline_file;
  bool quiet = false;
  bool place = true;
};

// Prints rank 0's reports and keeps every rank's, and their timelines, in files, one JSON object a
// line.
class Reporter {
 public:
  explicit Reporter(const Flags& flags) : quiet_(flags.quiet) {
    if (!flags.metrics_file.empty()) metrics_.open(flags.metrics_file, std::ios::trunc);
    if (!flags.timeline_file.empty()) timelines_.open(flags.timeline_file, std::ios::trunc);
  }
  bool keeps_timelines() const { return timelines_.is_open(); }
  // The file that could not be opened or written, or none.
  std::string Failed(const Flags& flags) const {
    return metrics_.fail() ? flags.metrics_file : timelines_.fail() ? flags.timeline_file : "";
  }
  void Flush() {
    if (metrics_.is_open()) metrics_.flush();
    if (timelines_.is_open()) timelines_.flush();
  }

  void OnCheckpoint(const v1::CheckpointRef& ref) {
    const std::lock_guard lock(mutex_);
    if (quiet_) return;
    std::cout << absl::StrFormat("checkpoint of step %d  %s  %.2f s  content_sha256 %s", ref.step(),
                                 FormatBytes(ref.bytes()), ref.write_seconds(),
                                 ref.content_sha256())
              << std::endl;
  }
  // Also when quiet: the run goes on without it.
  void OnProblem(const v1::CheckpointProblem& problem) {
    const std::lock_guard lock(mutex_);
    std::cerr << "upipe-run: checkpoint of step " << problem.step() << ": " << problem.message()
              << std::endl;
  }

  void OnStep(int rank, const v1::StepReport& report) {
    const std::lock_guard lock(mutex_);
    if (metrics_.is_open()) metrics_ << FormatStepLine({.rank = rank, .report = report}) << "\n";
    if (rank != 0 || quiet_) return;
    std::cout << absl::StrFormat("step %d/%d  loss %.4f  grad norm %.3f  %.0f tokens/s  peak %s",
                                 report.step(), report.total_steps(), report.loss(),
                                 report.grad_norm(), report.tokens_per_second(),
                                 FormatBytes(report.memory().peak_bytes()));
    if (report.has_held_out_loss())
      std::cout << absl::StrFormat("  held-out %.4f", report.held_out_loss());
    std::cout << (report.skipped() ? "  skipped" : "") << std::endl;
  }

  void OnTimeline(const v1::StepTimeline& timeline) {
    const std::lock_guard lock(mutex_);
    timelines_ << FormatTimelineLine(timeline) << "\n";
  }

 private:
  const bool quiet_;
  std::mutex mutex_;
  std::ofstream metrics_, timelines_;
};

// CPUs of each rank; empty, in words for people, when the machine has too few free ones for all.
absl::StatusOr<std::vector<CpuClaim>> ClaimCpus(const v1::ParallelSpec& parallel) {
  std::vector<CpuClaim> claims;
  for (int rank = 0; rank < parallel.ranks(); ++rank) {
    UPIPE_ASSIGN_OR_RETURN(claims.emplace_back(),
                           CpuClaim::Take(parallel.ranks(), parallel.threads_per_rank()));
  }
  return claims;
}

std::string DescribeClaims(const absl::StatusOr<std::vector<CpuClaim>>& claims) {
  if (!claims.ok()) return absl::StrCat("any (", claims.status().message(), ")");
  return absl::StrJoin(*claims, " | ", [](std::string* out, const CpuClaim& claim) {
    absl::StrAppend(out, FormatCpuList(claim.cpus()));
  });
}

// The checkpoints of a run without a coordinator: its folder is called by the job's name, and what
// is old is deleted as soon as something newer is committed.
class LocalCheckpoints {
 public:
  // Null where the job has no checkpoint path. FailedPrecondition when another process trains into
  // the folder, or what lies there is none to go on from.
  static absl::StatusOr<std::unique_ptr<LocalCheckpoints>> Open(const v1::RunPlan& plan,
                                                                Reporter& reporter) {
    const v1::JobSpec& spec = plan.spec();
    if (spec.checkpoint().path().empty()) return nullptr;
    UPIPE_ASSIGN_OR_RETURN(checkpoint::JobFolder folder,
                           checkpoint::JobFolder::Open(spec.checkpoint().path(), spec.name()));
    std::unique_ptr<LocalCheckpoints> local(new LocalCheckpoints(std::move(folder)));
    UPIPE_RETURN_IF_ERROR(local->folder_.Lock());
    UPIPE_ASSIGN_OR_RETURN(const int64_t generation, local->folder_.NextGeneration());
    local->owner_.set_job_id(spec.name());
    local->owner_.set_generation(generation);
    local->owner_.set_nonce(RandomNonce());
    UPIPE_RETURN_IF_ERROR(local->folder_.Claim(local->owner_));
    UPIPE_ASSIGN_OR_RETURN(const checkpoint::ResumeChoice choice,
                           local->folder_.FindNewest(train::CheckpointFacts(plan)));
    for (const v1::CheckpointProblem& problem : choice.passed_over) reporter.OnProblem(problem);
    const bool all_unfinished = std::all_of(
        choice.passed_over.begin(), choice.passed_over.end(),
        [&](const v1::CheckpointProblem& problem) {
          const auto step = local->folder_.OpenStep({problem.generation(), problem.step()});
          return step.ok() && !step->OpenFile(checkpoint::kManifestName).ok();
        });
    if (!choice.newest && !all_unfinished) {
      return absl::FailedPreconditionError(absl::StrCat(
          "none of the checkpoints in ", local->folder_.path(),
          " can be gone on from; use another name or checkpoint.path, or delete them"));
    }
    local->resume_ = choice.newest;
    for (int rank = 0; rank < spec.parallel().ranks(); ++rank) {
      local->writers_.push_back(local->MakeWriter(plan, rank, reporter));
    }
    return local;
  }

  checkpoint::Writer* writer(int rank) { return writers_[rank].get(); }
  const v1::CheckpointRef* resume() const { return resume_ ? &*resume_ : nullptr; }

 private:
  explicit LocalCheckpoints(checkpoint::JobFolder folder) : folder_(std::move(folder)) {}

  std::unique_ptr<checkpoint::Writer> MakeWriter(const v1::RunPlan& plan, int rank,
                                                 Reporter& reporter) {
    return std::make_unique<checkpoint::Writer>(checkpoint::WriterOptions{
        .folder = folder_,
        .owner = owner_,
        .rank = rank,
        .num_ranks = plan.spec().parallel().ranks(),
        .facts = train::CheckpointFacts(plan),
        .arithmetic = absl::StrCat(kernels::Arithmetic(), ", upipe ", UPIPE_VERSION),
        .patience = train::CheckpointPatience(plan),
        .on_committed =
            [this, rank, keep = plan.spec().checkpoint().keep(),
             &reporter](const v1::CheckpointRef& ref) {
              reporter.OnCheckpoint(ref);
              writers_[rank]->Retain(ref, keep);
            },
        .on_problem =
            [&reporter](const v1::CheckpointProblem& problem) { reporter.OnProblem(problem); }});
  }

  checkpoint::JobFolder folder_;
  v1::CheckpointOwner owner_;
  std::optional<v1::CheckpointRef> resume_;
  std::vector<std::unique_ptr<checkpoint::Writer>> writers_;  // [ranks]
};

absl::Status RunRanks(const v1::RunPlan& plan, const std::vector<CpuClaim>& claims,
                      LocalCheckpoints* checkpoints, Reporter& reporter) {
  const int ranks = plan.spec().parallel().ranks();
  std::vector<std::unique_ptr<kernels::Device>> devices;
  const auto cpus_of = [&claims](int rank) {
    return claims.empty() ? std::vector<int>() : claims[rank].cpus();
  };
  for (int rank = 0; rank < ranks; ++rank) {
    UPIPE_ASSIGN_OR_RETURN(devices.emplace_back(),
                           train::CreateRankDevice(plan, rank, cpus_of(rank)));
  }
  UPIPE_ASSIGN_OR_RETURN(const auto shared, comm::OpenCommDevice(plan.spec().parallel().backend()));
  const auto comms = comm::InprocGroup::Create(
      ranks,
      {.deadline = train::CollectiveDeadline(plan),
       .observer = {},
       .reduce_room = comm::ReduceRoomOf(plan.spec().parallel().backend())},
      shared);
  std::vector<absl::Status> statuses(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      if (!claims.empty()) PlaceThisThread(claims[rank].cpus()).IgnoreError();
      std::function<void(const v1::StepTimeline&)> on_timeline;
      if (reporter.keeps_timelines()) {
        on_timeline = [&](const v1::StepTimeline& timeline) { reporter.OnTimeline(timeline); };
      }
      statuses[rank] = train::TrainRank({
          .plan = plan,
          .rank = rank,
          .comm = *comms[rank],
          .device = *devices[rank],
          .on_step = [&, rank](const v1::StepReport& report) { reporter.OnStep(rank, report); },
          .on_timeline = std::move(on_timeline),
          .stop_requested = &stop_requested,
          .writer = checkpoints == nullptr ? nullptr : checkpoints->writer(rank),
          .resume = checkpoints == nullptr ? nullptr : checkpoints->resume(),
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) UPIPE_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

// FailedPrecondition with the verdict when it is FAIL.
absl::Status CheckSelf(const v1::RunPlan& plan, int64_t available, bool quiet) {
  UPIPE_ASSIGN_OR_RETURN(
      const train::SelfCheckReport report,
      CheckOnThreads(plan, {.memory_bytes = available / plan.spec().parallel().ranks()}));
  const std::string verdict = absl::StrCat("self check: ", VerdictOf(report));
  if (!report.passed()) return absl::FailedPreconditionError(verdict);
  if (!quiet) std::cout << verdict << "\n";
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  UPIPE_ASSIGN_OR_RETURN(const v1::JobSpec spec, ReadJobSpecFile(flags.job_file, flags.overrides));
  UPIPE_ASSIGN_OR_RETURN(const int64_t available, AvailableMemoryBytes());
  UPIPE_ASSIGN_OR_RETURN(const v1::RunPlan plan,
                         MakeRunPlan(spec, {.memory_per_rank_bytes =
                                                available / std::max(1, spec.parallel().ranks())}));
  if (!plan.spec().parallel().isa_cap().empty()) {
    UPIPE_RETURN_IF_ERROR(kernels::CapIsa(plan.spec().parallel().isa_cap()));
  }
  absl::StatusOr<std::vector<CpuClaim>> claims = absl::CancelledError("--no-cpu-placement");
  if (flags.place) claims = ClaimCpus(plan.spec().parallel());
  if (!flags.quiet) {
    std::cout << RenderPlan(plan) << "cpus       " << DescribeClaims(claims) << "\n\n";
  }
  if (!claims.ok()) claims = std::vector<CpuClaim>();
  Reporter reporter(flags);
  if (const std::string file = reporter.Failed(flags); !file.empty()) {
    return absl::PermissionDeniedError(absl::StrCat("cannot write ", file));
  }
  UPIPE_ASSIGN_OR_RETURN(const std::unique_ptr<LocalCheckpoints> checkpoints,
                         LocalCheckpoints::Open(plan, reporter));
  if (checkpoints && checkpoints->resume() != nullptr && !flags.quiet) {
    std::cout << "goes on from the checkpoint of step " << checkpoints->resume()->step() << "\n";
  }
  const bool resumes = checkpoints && checkpoints->resume() != nullptr;
  if (plan.spec().train().selfcheck() && !resumes) {
    UPIPE_RETURN_IF_ERROR(CheckSelf(plan, available, flags.quiet));
  }
  UPIPE_RETURN_IF_ERROR(RunRanks(plan, *claims, checkpoints.get(), reporter));
  reporter.Flush();
  const std::string failed = reporter.Failed(flags);
  if (failed.empty()) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("trained, but ", failed, " lacks records: writing to it failed"));
}

int Main(int argc, char** argv) {
  CLI::App app{
      "Runs a job in this process, one thread per rank, without daemons. With a checkpoint "
      "section\n"
      "it goes on from the newest whole checkpoint in PATH/<name>; Ctrl-C checkpoints and leaves.\n"
      "Example: upipe run deploy/samples/tiny.yaml --set train.steps=20"};
  Flags flags;
  app.add_option("job", flags.job_file, "job file (YAML)")->required();
  app.add_option("--set", flags.overrides, "override a field, path=value (repeatable)")
      ->allow_extra_args(false);
  app.add_option("--metrics", flags.metrics_file,
                 "write every step report of every rank here, JSON lines (docs/metrics.md)");
  app.add_option("--timeline", flags.timeline_file,
                 "write timelines of some steps of every rank here, JSON lines");
  app.add_flag("!--no-cpu-placement", flags.place,
               "let the kernel choose the CPUs of ranks (default: each rank its own, where there "
               "are enough)");
  app.add_flag("--quiet", flags.quiet, "print nothing but errors");
  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  if (const absl::Status armed =
          ArmFailpoints(getenv("UPIPE_FAILPOINT"), getenv("UPIPE_FAILPOINT_FILE"));
      !armed.ok()) {
    std::cerr << "upipe-run: " << armed.message() << "\n";
    return 2;
  }
  std::signal(SIGINT, [](int) { stop_requested = true; });
  std::signal(SIGTERM, [](int) { stop_requested = true; });
  const absl::Status status = Run(flags);
  if (status.ok()) return 0;
  std::cerr << "upipe-run: " << status.message() << "\n";
  if (absl::IsInvalidArgument(status)) return 2;
  return absl::IsCancelled(status) ? 3 : 1;
}

}  // namespace
}  // namespace upipe::planner

int main(int argc, char** argv) { return upipe::planner::Main(argc, argv); }
