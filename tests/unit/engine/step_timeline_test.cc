// Where a rank's time goes, measured on whole runs: nothing of a step is left out, every stage that
// must occur does, and what is told adds up. And samples of memory in less room than there are
// changes.
#include "engine/train/step_timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/metrics/timeline_line.h"
#include "engine/comm/inproc/inproc_communicator.h"
#include "engine/data/shard_writer.h"
#include "engine/train/rank_run.h"
#include "planner/plan.h"
#include "tests/support/engine/engine_harness.h"
#include "tests/unit/data/temp_folder.h"

namespace upipe::testing {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Gt;
using ::testing::IsSupersetOf;
using ::testing::Not;

constexpr int64_t kSteps = 3;

struct Told {
  absl::Status status;
  std::vector<v1::StepReport> reports;
  std::vector<v1::StepTimeline> timelines;
};

class StepTimelineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string text;
    for (int i = 0; i < 2000; ++i) absl::StrAppend(&text, "line ", i * i, "\n");
    for (const char* name : {data::kTrainShardName, data::kHeldOutShardName}) {
      const auto header = data::WriteByteShard(folder_.Path(name), {text});
      ASSERT_TRUE(header.ok()) << header.status();
    }
  }

  // Of every rank. Large enough that a step is work, not waiting to be told.
  std::vector<Told> Run(SmallJob job, absl::Duration every = absl::ZeroDuration()) const {
    job.vocab_size = 257;
    job.head_dim = 32;
    job.hidden_size = 256;
    job.intermediate_size = 512;
    job.num_heads = 8;
    v1::JobSpec spec = MakeSpec(job);
    spec.mutable_data()->set_path(folder_.Path(""));
    spec.mutable_train()->set_steps(kSteps);
    const auto plan = planner::MakeRunPlan(spec, {});
    EXPECT_TRUE(plan.ok()) << plan.status();
    const auto comms =
        comm::InprocGroup::Create(job.ranks, {.deadline = absl::Minutes(1), .observer = {}});
    std::vector<Told> told(job.ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < job.ranks; ++rank) {
      threads.emplace_back([&, rank] {
        const auto device = train::CreateRankDevice(*plan, rank);
        ASSERT_TRUE(device.ok()) << device.status();
        Told& mine = told[rank];
        mine.status = train::TrainRank(
            {.plan = *plan,
             .rank = rank,
             .comm = *comms[rank],
             .device = **device,
             .on_step = [&](const v1::StepReport& report) { mine.reports.push_back(report); },
             .on_timeline = [&](const v1::StepTimeline& t) { mine.timelines.push_back(t); },
             .timeline_every = every});
        EXPECT_EQ(mine.reports.back().memory().DebugString(),
                  plan->ranks(rank).memory().DebugString());
      });
    }
    for (std::thread& thread : threads) thread.join();
    return told;
  }

  data::TempFolder folder_;
};

// Nanoseconds of the step in which some lane is at work.
int64_t Covered(const v1::StepTimeline& timeline) {
  int64_t covered = 0, end = 0;
  for (const auto& slice : timeline.slices()) {  // by begin
    covered += std::max<int64_t>(0, slice.end_nanos() - std::max(end, slice.begin_nanos()));
    end = std::max(end, slice.end_nanos());
  }
  return covered;
}

// Slices of a lane do not overlap, and those of a stage add up to its seconds.
void ExpectConsistent(const v1::StepTimeline& timeline, const v1::StepReport& report) {
  std::map<int, int64_t> end;
  std::map<std::string, double> seconds;
  for (const auto& slice : timeline.slices()) {
    EXPECT_GE(slice.begin_nanos(), end[slice.lane()]) << slice.ShortDebugString();
    EXPECT_GT(slice.end_nanos(), slice.begin_nanos()) << slice.ShortDebugString();
    end[slice.lane()] = slice.end_nanos();
    seconds[timeline.stages(slice.stage_name())] +=
        1e-9 * static_cast<double>(slice.end_nanos() - slice.begin_nanos());
  }
  ASSERT_EQ(static_cast<int>(seconds.size()), report.stages_size());
  for (const auto& stage : report.stages()) {
    EXPECT_NEAR(stage.seconds(), seconds[stage.stage()], 1e-9) << stage.stage();
  }
  EXPECT_EQ(timeline.step(), report.step());
  EXPECT_EQ(timeline.dropped_slices(), 0);
  const auto back = ParseTimelineLine(FormatTimelineLine(timeline));
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->SerializeAsString(), timeline.SerializeAsString());
}

// The sums of the collectives are the totals.
void ExpectTraffic(const v1::StepReport& report) {
  int64_t by_peer = 0, by_operation = 0;
  double seconds = 0;
  for (const int64_t bytes : report.bytes_sent_to_peer()) by_peer += bytes;
  for (const auto& use : report.comm()) {
    by_operation += use.bytes_sent();
    seconds += use.seconds();
    EXPECT_GT(use.calls(), 0) << use.operation();
  }
  EXPECT_EQ(by_operation, by_peer);
  EXPECT_NEAR(seconds, report.comm_seconds(), 1e-9);
}

std::set<std::string> StagesOf(const v1::StepReport& report) {
  std::set<std::string> names;
  for (const auto& stage : report.stages()) names.insert(stage.stage());
  return names;
}

std::set<std::string> OperationsOf(const v1::StepReport& report) {
  std::set<std::string> names;
  for (const auto& use : report.comm()) names.insert(use.operation());
  return names;
}

std::set<int> LanesOf(const v1::StepTimeline& timeline) {
  std::set<int> lanes;
  for (const auto& slice : timeline.slices()) lanes.insert(slice.lane());
  return lanes;
}

const std::vector<std::string> kAlways = {"projection", "attention", "return",    "mlp",
                                          "loss",       "embedding", "gradients", "optimizer"};

// Shares of the steps that slices cover. What they leave is the machine's: threads that hand work
// to each other. (step_work_test sees to it that no work is left.)
std::vector<double> ExpectConsistent(const std::vector<Told>& told) {
  std::vector<double> shares;
  for (const Told& rank : told) {
    EXPECT_TRUE(rank.status.ok()) << rank.status;
    EXPECT_EQ(rank.reports.size(), static_cast<size_t>(kSteps));
    EXPECT_EQ(rank.timelines.size(), rank.reports.size());
    for (size_t step = 0; step < rank.timelines.size(); ++step) {
      ExpectConsistent(rank.timelines[step], rank.reports[step]);
      ExpectTraffic(rank.reports[step]);
      EXPECT_THAT(StagesOf(rank.reports[step]), IsSupersetOf(kAlways));
      EXPECT_FALSE(rank.timelines[step].memory().empty());
      const double covered = 1e-9 * static_cast<double>(Covered(rank.timelines[step]));
      EXPECT_LE(covered, rank.reports[step].step_seconds());
      shares.push_back(covered / rank.reports[step].step_seconds());
    }
  }
  return shares;
}

TEST_F(StepTimelineTest, OneStreamOfComputeIsTheStep) {
  const auto told = Run({.ranks = 1, .context = 1024});
  EXPECT_THAT(ExpectConsistent(told), Contains(Gt(0.9)));
  for (const v1::StepReport& report : told[0].reports) {
    EXPECT_THAT(StagesOf(report), Not(Contains("exchange")));
    EXPECT_EQ(report.hidden_seconds(), 0);
  }
  EXPECT_THAT(LanesOf(told[0].timelines[0]), ElementsAre(v1::StepTimeline::LANE_COMPUTE));
}

TEST_F(StepTimelineTest, UpipeOverTheRing) {
  const auto told = Run({.ranks = 4, .context = 1024, .ring_ranks = 2});
  EXPECT_THAT(ExpectConsistent(told), Contains(Gt(0.9)));
  for (const Told& rank : told) {
    EXPECT_THAT(StagesOf(rank.reports[1]), IsSupersetOf({"exchange", "weights"}));
    EXPECT_THAT(OperationsOf(rank.reports[1]),
                ElementsAre("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "ring"));
    EXPECT_THAT(LanesOf(rank.timelines[1]),
                ElementsAre(v1::StepTimeline::LANE_COMPUTE, v1::StepTimeline::LANE_GATHER));
  }
}

TEST_F(StepTimelineTest, OverlapHidesExchanges) {
  const auto told =
      Run({.ranks = 4, .num_layers = 1, .context = 2048, .ring_ranks = 2, .overlap = true});
  ExpectConsistent(told);
  for (const Told& rank : told) {
    EXPECT_THAT(LanesOf(rank.timelines[1]),
                IsSupersetOf({static_cast<int>(v1::StepTimeline::LANE_SIDE),
                              static_cast<int>(v1::StepTimeline::LANE_RING)}));
    EXPECT_GT(rank.reports[1].hidden_seconds(), 0);
    // Every head-chunk stage of every layer, both ways.
    std::set<std::tuple<std::string, int, int>> attended;
    for (const auto& slice : rank.timelines[1].slices()) {
      if (rank.timelines[1].stages(slice.stage_name()) == "attention") {
        attended.insert({slice.pass(), slice.layer(), slice.stage()});
      }
    }
    EXPECT_EQ(attended.size(), size_t{2 * 4});
  }
}

TEST_F(StepTimelineTest, FpdtCopies) {
  const auto told =
      Run({.ranks = 2, .context = 1024, .method = v1::METHOD_FPDT, .optimizer = v1::PLACE_HOST});
  ExpectConsistent(told);
  for (const Told& rank : told) {
    EXPECT_THAT(StagesOf(rank.reports[1]), IsSupersetOf({"exchange", "offload"}));
    EXPECT_THAT(LanesOf(rank.timelines[1]),
                IsSupersetOf({static_cast<int>(v1::StepTimeline::LANE_COPY),
                              static_cast<int>(v1::StepTimeline::LANE_HOST)}));
    EXPECT_GT(rank.reports[1].hidden_seconds(), 0);
    const auto& memory = rank.timelines[1].memory();
    EXPECT_TRUE(std::any_of(memory.begin(), memory.end(), [](const auto& s) { return s.host(); }));
  }
}

TEST_F(StepTimelineTest, TheFirstStepAndThenOneInAWhile) {
  const auto told = Run({.ranks = 1, .context = 1024}, absl::Hours(1));
  ASSERT_TRUE(told[0].status.ok()) << told[0].status;
  ASSERT_EQ(told[0].timelines.size(), 1u);
  EXPECT_EQ(told[0].timelines[0].step(), 1);
  EXPECT_THAT(StagesOf(told[0].reports[2]), IsSupersetOf(kAlways));
}

// Nanosecond at which the last slice of a pass ends on the compute lane.
int64_t EndOfPass(const v1::StepTimeline& timeline, const std::string& pass) {
  int64_t end = 0;
  for (const auto& slice : timeline.slices()) {
    if (slice.lane() == v1::StepTimeline::LANE_COMPUTE && slice.pass() == pass) {
      end = std::max(end, slice.end_nanos());
    }
  }
  return end;
}

// The host enqueues a step long before its streams get there; memory is told at their time.
TEST_F(StepTimelineTest, MemoryIsToldWhereItIsUsed) {
  for (const bool overlap : {false, true}) {
    const auto told = Run({.ranks = 2, .context = 1024, .overlap = overlap});
    for (const Told& rank : told) {
      ASSERT_TRUE(rank.status.ok()) << rank.status;
      const v1::StepTimeline& timeline = rank.timelines[1];
      const int64_t forward = EndOfPass(timeline, "forward"), loss = EndOfPass(timeline, "loss");
      ASSERT_LT(forward, loss);
      int64_t before = 0;
      std::map<std::string, v1::StepTimeline::MemorySample> last;
      std::map<std::string, int64_t> held;  // nanoseconds with bytes
      for (const auto& sample : timeline.memory()) {
        const std::string& tag = timeline.tags(sample.tag());
        EXPECT_GE(sample.nanos(), before) << tag;
        before = sample.nanos();
        if (last[tag].bytes() > 0) held[tag] += sample.nanos() - last[tag].nanos();
        last[tag] = sample;
        if (sample.bytes() == 0) continue;
        if (tag == "logits") {
          EXPECT_GE(sample.nanos(), forward);
          EXPECT_LE(sample.nanos(), loss);
        }
        if (tag == "attn_grad") {
          EXPECT_GE(sample.nanos(), loss);
        }
      }
      for (const char* tag : {"logits", "mlp", "attn_q", "attn_grad"}) {
        EXPECT_GT(held[tag], 0) << tag;
        EXPECT_LT(held[tag], EndOfPass(timeline, "optimizer")) << tag;
      }
    }
  }
}

class MemorySamplesTest : public ::testing::Test {
 protected:
  static std::unique_ptr<kernels::Device> NewDevice() {
    auto device = kernels::CreateDevice({.backend = "cpu", .arena_bytes = 1 << 20});
    EXPECT_TRUE(device.ok()) << device.status();
    return *std::move(device);
  }
  const std::unique_ptr<kernels::Device> device_ = NewDevice();
};

TEST_F(MemorySamplesTest, BeginWithWhatIsHeldAndFollowChanges) {
  const auto stream = device_->CreateStream("compute");
  const auto held = device_->allocator().Allocate(kernels::MemoryTag::kWeights, 1000, *stream);
  train::MemorySamples samples(*device_);
  samples.Begin();
  device_->allocator().Allocate(kernels::MemoryTag::kMlp, 300, *stream)->Free();
  samples.End();
  device_->allocator().Allocate(kernels::MemoryTag::kMlp, 300, *stream)->Free();
  std::vector<std::pair<kernels::MemoryTag, int64_t>> seen;
  for (const auto& sample : samples.samples()) seen.push_back({sample.tag, sample.bytes});
  EXPECT_THAT(seen, ElementsAre(std::pair(kernels::MemoryTag::kWeights, 1000),
                                std::pair(kernels::MemoryTag::kMlp, 300),
                                std::pair(kernels::MemoryTag::kMlp, 0)));
}

TEST_F(MemorySamplesTest, FewerSamplesKeepTheLargestAndTheLast) {
  constexpr int kRoom = 100;
  constexpr int64_t kPeakAt = 7777;
  train::MemorySamples samples(*device_, kRoom);
  samples.Begin();
  // Up and down by one, with one high peak, and beside it another category that stays.
  samples.Add(0, kernels::MemoryTag::kWeights, false, 42);
  for (int64_t i = 1; i < 20'000; ++i) {
    const int64_t change = i == kPeakAt ? 1000 : i == kPeakAt + 1 ? -1000 : i % 2 == 1 ? 1 : -1;
    samples.Add(i, kernels::MemoryTag::kMlp, false, change);
  }
  EXPECT_LE(samples.samples().size(), static_cast<size_t>(kRoom));
  EXPECT_GE(samples.samples().size(), static_cast<size_t>(kRoom / 8));
  int64_t peak = 0, last = 0, weights = 0, before = 0;
  for (const auto& sample : samples.samples()) {
    EXPECT_GE(sample.nanos, before);
    before = sample.nanos;
    if (sample.tag == kernels::MemoryTag::kWeights) {
      weights = sample.bytes;
      continue;
    }
    if (sample.bytes > peak) {
      peak = sample.bytes;
      if (peak == 1000) {
        EXPECT_EQ(sample.nanos, kPeakAt);
      }
    }
    last = sample.bytes;
  }
  EXPECT_EQ(peak, 1000);
  EXPECT_EQ(last, 1);
  EXPECT_EQ(weights, 42);
}

}  // namespace
}  // namespace upipe::testing
