// Nothing a rank's streams do in a step is outside a slice of their lane: every task is watched
// where it runs.
#include <gtest/gtest.h>

#include <ostream>
#include <thread>
#include <utility>
#include <vector>

#include "common/status.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/step_clock.h"
#include "engine/train/rank_run.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

using engine::Slice;

struct Work {
  int64_t begin_nanos = 0;
  int64_t end_nanos = 0;
};

class WatchedStream final : public kernels::Stream {
 public:
  explicit WatchedStream(std::unique_ptr<kernels::Stream> stream) : stream_(std::move(stream)) {}
  const std::string& name() const override { return stream_->name(); }
  void Submit(kernels::Task task) override {
    stream_->Submit([this, task = std::move(task)](kernels::ExecContext& context) {
      const int64_t begin = kernels::SteadyNanos();
      const absl::Status status = task(context);
      work_.push_back({begin, kernels::SteadyNanos()});
      return status;
    });
  }
  kernels::Event Record() override { return stream_->Record(); }
  void Wait(const kernels::Event& event) override { stream_->Wait(event); }
  void Stamp(kernels::TimeStamp* stamp) override { stream_->Stamp(stamp); }
  // While the stream is idle.
  std::vector<Work> TakeWork() { return std::exchange(work_, {}); }

 private:
  std::vector<Work> work_;  // of the stream's thread
  const std::unique_ptr<kernels::Stream> stream_;
};

class WatchedDevice final : public kernels::Device {
 public:
  explicit WatchedDevice(kernels::Device& device) : device_(device) {}
  std::string name() const override { return device_.name(); }
  kernels::Allocator& allocator() override { return device_.allocator(); }
  kernels::OpTable& ops() override { return device_.ops(); }
  std::unique_ptr<kernels::Stream> CreateStream(std::string name) override {
    return std::make_unique<WatchedStream>(device_.CreateStream(std::move(name)));
  }
  kernels::Allocator& host_allocator() override { return device_.host_allocator(); }
  kernels::OpTable& host_ops() override { return device_.host_ops(); }
  std::unique_ptr<kernels::Stream> CreateHostStream(std::string name) override {
    return std::make_unique<WatchedStream>(device_.CreateHostStream(std::move(name)));
  }
  void CopyRowsToHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override {
    device_.CopyRowsToHost(copy, stream);
  }
  void CopyRowsFromHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override {
    device_.CopyRowsFromHost(copy, stream);
  }

 private:
  kernels::Device& device_;
};

// How many pieces of work there were.
int64_t ExpectWithinSlices(const engine::RankStreams& streams, const engine::StepClock& clock) {
  kernels::Stream* const lanes[engine::kNumLanes] = {streams.compute.get(), streams.side.get(),
                                                     streams.ring.get(),    streams.copy.get(),
                                                     streams.host.get(),    streams.gather.get()};
  int64_t seen = 0;
  for (int lane = 0; lane < engine::kNumLanes; ++lane) {
    for (const Work& work : static_cast<WatchedStream*>(lanes[lane])->TakeWork()) {
      ++seen;
      const Slice* before = nullptr;
      for (const Slice& slice : clock.slices()) {
        if (static_cast<int>(slice.lane) == lane && slice.begin_nanos <= work.begin_nanos) {
          before = &slice;
        }
      }
      const bool within = before != nullptr && work.end_nanos <= before->end_nanos;
      EXPECT_TRUE(within) << "lane " << lane << " works for " << work.end_nanos - work.begin_nanos
                          << " ns outside slices, after "
                          << (before == nullptr ? "none" : NameOf(before->name)) << " of "
                          << (before == nullptr ? "nothing" : NameOf(before->moment));
      if (!within) return seen;
    }
  }
  return seen;
}

absl::Status RunRank(const v1::RunPlan& plan, int rank, comm::Communicator& comm) {
  UPIPE_ASSIGN_OR_RETURN(const auto device, train::CreateRankDevice(plan, rank));
  WatchedDevice watched(*device);
  engine::StepClock clock;
  const auto streams = engine::RankStreams::Create(watched, rank);
  clock.Watch(streams);
  const engine::RankContext context = MakeContext(plan, watched, streams, comm, &clock);
  UPIPE_ASSIGN_OR_RETURN(const auto step, train::TrainStep::Create(context, plan));
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < train::SequencesPerStep(plan.spec()); ++i) {
    sequences.push_back(MakeSequence(plan.spec(), i));
  }
  UPIPE_RETURN_IF_ERROR(context.Settle());
  for (const auto* stream : {&streams.compute, &streams.copy, &streams.host, &streams.gather}) {
    static_cast<WatchedStream&>(**stream).TakeWork();  // what set up the step
  }
  for (int64_t number = 1; number <= 2; ++number) {
    clock.BeginStep(/*keep_slices=*/true);
    UPIPE_RETURN_IF_ERROR(RunStep({rank, context, *step}, number, sequences).status());
    UPIPE_RETURN_IF_ERROR(clock.EndStep());
    EXPECT_EQ(clock.times().dropped_slices, 0);
    EXPECT_GT(ExpectWithinSlices(streams, clock), 50);
  }
  return absl::OkStatus();
}

struct Case {
  const char* name;
  SmallJob job;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class StepWork : public ::testing::TestWithParam<Case> {};

TEST_P(StepWork, IsAllWithinSlices) {
  const auto plan = MakePlan(MakeSpec(GetParam().job));
  ASSERT_TRUE(plan.ok()) << plan.status();
  const int ranks = GetParam().job.ranks;
  const auto comms =
      comm::InprocGroup::Create(ranks, {.deadline = absl::Minutes(1), .observer = {}});
  std::vector<absl::Status> statuses(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      statuses[rank] = RunRank(*plan, rank, *comms[rank]);
      if (!statuses[rank].ok()) comms[rank]->Abort(statuses[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(
    Jobs, StepWork,
    ::testing::Values(
        Case{"one_rank", {}}, Case{"accumulation", {.ranks = 2, .accumulation = 2}},
        Case{"upipe_bf16", {.ranks = 2, .qk_norm = true, .bf16 = true}},
        Case{"ring_overlap", {.ranks = 4, .ring_ranks = 2, .overlap = true}},
        Case{"ring_keep", {.ranks = 4, .ring_ranks = 2, .ring_keep = true}},
        Case{"replicas_on_host", {.ranks = 4, .dp_ranks = 2, .optimizer = v1::PLACE_HOST}},
        Case{"all_on_host",
             {.ranks = 2,
              .bf16 = true,
              .attention_output = v1::ATTENTION_OUTPUT_HOST,
              .layer_inputs = v1::PLACE_HOST,
              .hidden_stream = v1::PLACE_HOST,
              .stage_kv = v1::PLACE_HOST,
              .optimizer = v1::PLACE_HOST,
              .query_chunks = 2,
              .overlap = true}},
        Case{"stride", {.ranks = 2, .num_layers = 4, .layer_inputs = v1::PLACE_HOST, .stride = 2}},
        Case{"fpdt", {.ranks = 2, .method = v1::METHOD_FPDT}}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace upipe::testing
