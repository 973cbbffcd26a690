#include "benchmarks/support/rank_gang.h"

#include <cctype>
#include <chrono>
#include <ctime>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "engine/rank_context.h"
#include "engine/train/rank_run.h"
#include "engine/train/step.h"

namespace upipe::bench {
namespace {

double ProcessCpuSeconds() {
  timespec time;
  UPIPE_CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time) == 0) << "no processor clock";
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

int32_t TokenAt(int64_t position, int64_t vocab_size) {
  uint64_t bits = static_cast<uint64_t>(position) * 6364136223846793005u + 1442695040888963407u;
  bits = (bits ^ (bits >> 29)) * 0xbf58476d1ce4e5b9u;
  return static_cast<int32_t>((bits >> 33) % static_cast<uint64_t>(vocab_size));
}

// A rank's part of the one sequence that is trained on again and again.
struct RankTokens {
  RankTokens(const v1::JobSpec& spec, int context_rank) {
    for (const kernels::PositionRun& run : train::TokensOf(spec).RunsOf(context_rank)) {
      for (int64_t position = run.begin; position < run.end; ++position) {
        const bool padding = position >= spec.train().context();
        tokens.push_back(padding ? 0 : TokenAt(position, spec.model().vocab_size()));
        labels.push_back(padding ? -1 : TokenAt(position + 1, spec.model().vocab_size()));
        positions.push_back(position);
      }
    }
  }
  train::HostTokens host() const {
    return {.tokens = tokens.data(), .labels = labels.data(), .positions = positions.data()};
  }
  std::vector<int32_t> tokens, labels;
  std::vector<int64_t> positions;
};

// "compute3" -> "compute".
std::string WithoutRank(std::string stream) {
  while (!stream.empty() && std::isdigit(static_cast<unsigned char>(stream.back()))) {
    stream.pop_back();
  }
  return stream;
}

}  // namespace

// In the order of its making: what comes later uses what comes before.
struct RankGang::Rank {
  int index = 0;
  std::unique_ptr<comm::Communicator> comm;
  std::unique_ptr<kernels::Device> bare;
  std::unique_ptr<TimedDevice> device;
  std::unique_ptr<RankTokens> tokens;
  engine::RankStreams streams;
  std::optional<engine::RankContext> context;
  std::unique_ptr<train::TrainStep> step;
  train::StepResult result;

  absl::Status Make(const v1::RunPlan& plan) {
    const v1::JobSpec& spec = plan.spec();
    const parallel::Mesh mesh = parallel::Mesh::From(spec.parallel());
    UPIPE_ASSIGN_OR_RETURN(bare, train::CreateRankDevice(plan, index));
    device = std::make_unique<TimedDevice>(*bare, Clock::kProcessor);
    tokens = std::make_unique<RankTokens>(spec, mesh.ContextRank(index));
    streams = engine::RankStreams::Create(*device, index);
    context.emplace(engine::RankContextParams{.device = *device,
                                              .streams = streams,
                                              .comm = *comm,
                                              .storage = model::StorageTypeOf(spec.train()),
                                              .mesh = mesh});
    UPIPE_ASSIGN_OR_RETURN(step, train::TrainStep::Create(*context, plan));
    return streams.compute->Synchronize();
  }

  absl::Status Run(int64_t number, int64_t micro_steps) {
    const std::vector<train::HostTokens> sequences(micro_steps, tokens->host());
    UPIPE_ASSIGN_OR_RETURN(result, step->Run(number, sequences));
    return absl::OkStatus();
  }
};

RankGang::RankGang(const v1::RunPlan& plan, std::vector<std::unique_ptr<comm::Communicator>> comms)
    : plan_(plan) {
  for (auto& comm : comms) {
    auto rank = std::make_unique<Rank>();
    rank->index = static_cast<int>(ranks_.size());
    rank->comm = std::move(comm);
    ranks_.push_back(std::move(rank));
  }
}

RankGang::~RankGang() = default;

absl::StatusOr<std::unique_ptr<RankGang>> RankGang::Create(
    const v1::RunPlan& plan, std::vector<std::unique_ptr<comm::Communicator>> comms) {
  UPIPE_CHECK(static_cast<int>(comms.size()) == plan.ranks_size())
      << comms.size() << " communicators for " << plan.ranks_size() << " ranks";
  std::unique_ptr<RankGang> gang(new RankGang(plan, std::move(comms)));
  UPIPE_RETURN_IF_ERROR(gang->OnEveryRank([&](Rank& rank) { return rank.Make(plan); }));
  return gang;
}

absl::Status RankGang::OnEveryRank(const std::function<absl::Status(Rank&)>& body) {
  std::vector<absl::Status> statuses(ranks_.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    threads.emplace_back([&, i] {
      statuses[i] = body(*ranks_[i]);
      if (!statuses[i].ok()) ranks_[i]->comm->Abort(statuses[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) UPIPE_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::StatusOr<GangStep> RankGang::Step() {
  for (const auto& rank : ranks_) rank->device->profile().Take();
  const int64_t number = ++steps_done_;
  const int64_t micro_steps = plan_.spec().train().gradient_accumulation();
  const double cpu_start = ProcessCpuSeconds();
  const auto start = std::chrono::steady_clock::now();
  UPIPE_RETURN_IF_ERROR(OnEveryRank([&](Rank& rank) { return rank.Run(number, micro_steps); }));
  GangStep step;
  step.wall_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  step.cpu_seconds = ProcessCpuSeconds() - cpu_start;
  step.loss = ranks_[0]->result.loss;
  for (const auto& rank : ranks_) {
    for (const auto& [key, time] : rank->device->profile().Take()) {
      step.ops[{WithoutRank(key.stream), key.op, key.shape}].Add(time);
    }
  }
  return step;
}

kernels::MemoryStats RankGang::memory(int rank) const {
  return ranks_[rank]->device->allocator().stats();
}

kernels::MemoryStats RankGang::host_memory(int rank) const {
  return ranks_[rank]->device->host_allocator().stats();
}

}  // namespace upipe::bench
