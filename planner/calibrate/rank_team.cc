#include "planner/calibrate/rank_team.h"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <thread>
#include <utility>

#include "common/check.h"
#include "common/cpu_placement.h"
#include "common/status.h"
#include "kernels/device_factory.h"

namespace upipe::planner {
namespace {

using Clock = std::chrono::steady_clock;
using kernels::MemoryTag;
using kernels::TensorView;

TensorView Gapless(void* data, kernels::DType dtype, const std::vector<int64_t>& shape) {
  TensorView view = {.data = data, .dtype = dtype, .rank = static_cast<int>(shape.size())};
  view.shape = {1, 1, 1};
  int64_t stride = 1;
  for (int dim = view.rank - 1; dim >= 0; --dim) {
    view.shape[dim] = shape[dim];
    view.stride[dim] = stride;
    stride *= shape[dim];
  }
  return view;
}

}  // namespace

kernels::Buffer TeamRank::Allocate(int64_t bytes) {
  absl::StatusOr<kernels::Buffer> buffer = context_->Allocate(MemoryTag::kWorkspace, bytes);
  UPIPE_CHECK_OK(buffer.status());  // the arena is sized for what is measured
  return *std::move(buffer);
}

TensorView TeamRank::Random(kernels::DType dtype, const std::vector<int64_t>& shape, float scale) {
  const int64_t elements = Gapless(nullptr, dtype, shape).num_elements();
  kernels::Buffer drawn = Allocate(elements * static_cast<int64_t>(sizeof(float)));
  const TensorView numbers = TensorView::Vector(drawn.data(), kernels::DType::kFloat32, elements);
  UPIPE_CHECK_OK(
      context_->Run(kernels::RandomNormalParams{.dst = numbers, .seed = seed_++, .stddev = scale}));
  if (dtype != kernels::DType::kFloat32) {
    kernels::Buffer rounded = Allocate(elements * SizeOf(dtype));
    const TensorView stored = TensorView::Vector(rounded.data(), dtype, elements);
    UPIPE_CHECK_OK(context_->Run(
        kernels::StridedCopyParams{.src = numbers.AsTensor3(), .dst = stored.AsTensor3()}));
    drawn = std::move(rounded);
  }
  UPIPE_CHECK_OK(context_->stream().Synchronize());
  buffers_.push_back(std::move(drawn));
  return Gapless(buffers_.back().data(), dtype, shape);
}

TensorView TeamRank::Filled(kernels::DType dtype, const std::vector<int64_t>& shape, double value) {
  const int64_t elements = Gapless(nullptr, dtype, shape).num_elements();
  buffers_.push_back(Allocate(elements * SizeOf(dtype)));
  const TensorView view = Gapless(buffers_.back().data(), dtype, shape);
  UPIPE_CHECK_OK(context_->Run(kernels::FillParams{.dst = view, .value = value}));
  UPIPE_CHECK_OK(context_->stream().Synchronize());
  return view;
}

TensorView TeamRank::FilledOnHost(kernels::DType dtype, int64_t elements, double value) {
  absl::StatusOr<kernels::Buffer> buffer = device_->host_allocator().Allocate(
      MemoryTag::kWorkspace, elements * SizeOf(dtype), *streams_.host);
  UPIPE_CHECK_OK(buffer.status());
  buffers_.push_back(*std::move(buffer));
  const TensorView view = TensorView::Vector(buffers_.back().data(), dtype, elements);
  UPIPE_CHECK_OK(context_->RunOnHost(kernels::FillParams{.dst = view, .value = value}));
  UPIPE_CHECK_OK(streams_.host->Synchronize());
  return view;
}

void TeamRank::Clear() {
  buffers_.clear();
  UPIPE_CHECK_OK(context_->Settle());
}

absl::StatusOr<std::unique_ptr<RankTeam>> RankTeam::Create(
    std::vector<std::unique_ptr<comm::Communicator>> comms, const TeamOptions& options) {
  std::unique_ptr<RankTeam> team(new RankTeam);
  team->cpus_ = options.cpus;
  for (size_t i = 0; i < comms.size(); ++i) {
    auto rank = std::make_unique<TeamRank>();
    UPIPE_ASSIGN_OR_RETURN(
        rank->device_, kernels::CreateDevice(
                           {.backend = "cpu",
                            .arena_bytes = options.arena_bytes,
                            .host_bytes = options.host_bytes,
                            .num_threads = options.threads_per_rank,
                            .cpus = options.cpus.empty() ? std::vector<int>() : options.cpus[i]}));
    rank->comm_ = std::move(comms[i]);
    rank->streams_ = engine::RankStreams::Create(*rank->device_, static_cast<int>(i));
    rank->context_.emplace(
        engine::RankContextParams{.device = *rank->device_,
                                  .streams = rank->streams_,
                                  .comm = *rank->comm_,
                                  .storage = kernels::DType::kBFloat16,
                                  .mesh = {.ulysses_ranks = static_cast<int>(comms.size())}});
    team->ranks_.push_back(std::move(rank));
  }
  return team;
}

// Communicators part all at once, as processes would: each says farewell to the others.
RankTeam::~RankTeam() {
  std::vector<std::thread> threads;
  for (const auto& rank : ranks_) {
    rank->buffers_.clear();
    threads.emplace_back([&rank] { rank->comm_.reset(); });
  }
  for (std::thread& thread : threads) thread.join();
}

absl::StatusOr<double> RankTeam::Time(const std::function<absl::Status(TeamRank&)>& body) {
  std::vector<absl::Status> statuses(ranks_.size());
  std::vector<Clock::time_point> starts(ranks_.size()), ends(ranks_.size());
  std::barrier together(static_cast<std::ptrdiff_t>(ranks_.size()));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks_.size(); ++i) {
    threads.emplace_back([&, i] {
      if (!cpus_.empty()) PlaceThisThread(cpus_[i]).IgnoreError();  // slower, but not wrong
      together.arrive_and_wait();
      starts[i] = Clock::now();
      statuses[i] = body(*ranks_[i]);
      ends[i] = Clock::now();
      if (!statuses[i].ok()) ranks_[i]->comm_->Abort(statuses[i]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) UPIPE_RETURN_IF_ERROR(status);
  const auto first = *std::min_element(starts.begin(), starts.end());
  const auto last = *std::max_element(ends.begin(), ends.end());
  return std::chrono::duration<double>(last - first).count();
}

}  // namespace upipe::planner
