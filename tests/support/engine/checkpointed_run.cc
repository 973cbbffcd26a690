#include "tests/support/engine/checkpointed_run.h"

#include <filesystem>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/data/shard_writer.h"
#include "engine/train/checkpointing.h"

namespace upipe::testing {
namespace {

// What the ranks' threads report.
struct Record {
  std::mutex mutex;
  CheckpointedResult& result;
};

checkpoint::WriterOptions OptionsOf(const CheckpointedRun& run, const checkpoint::JobFolder& folder,
                                    const v1::CheckpointOwner& owner, int rank, Record& record,
                                    std::unique_ptr<checkpoint::Writer>& self) {
  return {.folder = folder,
          .owner = owner,
          .rank = rank,
          .num_ranks = run.plan.spec().parallel().ranks(),
          .facts = train::CheckpointFacts(run.plan),
          .arithmetic = "test",
          .patience = train::CheckpointPatience(run.plan),
          .may_commit = [&run,
                         rank] { return run.may_commit ? run.may_commit(rank) : absl::OkStatus(); },
          .on_committed =
              [&run, &record, &self](const v1::CheckpointRef& ref) {
                const std::lock_guard lock(record.mutex);
                record.result.commits.push_back(ref);
                if (run.retain) self->Retain(ref, run.plan.spec().checkpoint().keep());
              },
          .on_problem =
              [&record](const v1::CheckpointProblem& problem) {
                const std::lock_guard lock(record.mutex);
                record.result.problems.push_back(problem);
              }};
}

absl::Status Start(const CheckpointedRun& run, const checkpoint::JobFolder& folder,
                   const v1::CheckpointOwner& owner, checkpoint::ResumeChoice& choice) {
  UPIPE_RETURN_IF_ERROR(folder.Claim(owner));
  UPIPE_ASSIGN_OR_RETURN(choice, folder.FindNewest(train::CheckpointFacts(run.plan)));
  return folder.AwaitOwner(owner, absl::Seconds(10));
}

}  // namespace

void WriteSmallCorpus(const std::string& folder) {
  std::filesystem::create_directories(folder);
  std::string text;
  for (int i = 0; i < 1600; ++i) absl::StrAppend(&text, "line ", i * i, "\n");
  for (const char* name : {data::kTrainShardName, data::kHeldOutShardName}) {
    UPIPE_CHECK_OK(data::WriteByteShard(absl::StrCat(folder, "/", name), {text}).status());
  }
}

bool CheckpointedResult::ok() const {
  bool fine = start.ok();
  for (const absl::Status& status : statuses) fine = fine && status.ok();
  return fine;
}

std::string CheckpointedResult::DebugString() const {
  std::string text = start.ToString();
  for (const absl::Status& status : statuses) absl::StrAppend(&text, "\n", status.ToString());
  for (const auto& ref : commits) absl::StrAppend(&text, "\ncommit ", ref.ShortDebugString());
  for (const auto& problem : problems) absl::StrAppend(&text, "\n", problem.ShortDebugString());
  for (const auto& problem : choice.passed_over) {
    absl::StrAppend(&text, "\npassed over ", problem.ShortDebugString());
  }
  return text;
}

CheckpointedResult RunCheckpointed(const CheckpointedRun& run) {
  CheckpointedResult result;
  const int ranks = run.plan.spec().parallel().ranks();
  v1::CheckpointOwner owner;
  owner.set_job_id(run.job_id);
  owner.set_generation(run.generation);
  owner.set_nonce(absl::StrCat("nonce", run.generation));
  const auto folder = checkpoint::JobFolder::Open(run.plan.spec().checkpoint().path(), run.job_id);
  result.start = folder.ok() ? Start(run, *folder, owner, result.choice) : folder.status();
  if (!result.start.ok()) return result;
  result.statuses.resize(ranks);
  Record record{.mutex = {}, .result = result};
  std::vector<std::unique_ptr<checkpoint::Writer>> writers(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    writers[rank] = std::make_unique<checkpoint::Writer>(
        OptionsOf(run, *folder, owner, rank, record, writers[rank]));
  }
  const auto comms =
      comm::InprocGroup::Create(ranks, {.deadline = absl::Minutes(1), .observer = {}});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = train::CreateRankDevice(run.plan, rank);
      UPIPE_CHECK_OK(device.status());
      result.statuses[rank] =
          train::TrainRank({.plan = run.plan,
                            .rank = rank,
                            .comm = *comms[rank],
                            .device = **device,
                            .on_step =
                                [&, rank](const v1::StepReport& report) {
                                  if (rank == 0) result.reports.push_back(report);
                                  if (run.on_step) run.on_step(rank, report.step());
                                },
                            .on_running =
                                [&, rank] {
                                  if (run.on_running) run.on_running(rank);
                                },
                            .stop_requested = run.stop,
                            .writer = writers[rank].get(),
                            .resume = result.choice.newest ? &*result.choice.newest : nullptr,
                            .patience_at_end = run.patience_at_end});
    });
  }
  for (std::thread& thread : threads) thread.join();
  return result;
}

}  // namespace upipe::testing
