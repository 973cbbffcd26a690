// A timeline is the plan seen moment by moment: its peaks are the plan's, tag by tag, its work adds
// up to the plan's, and merging loses neither.
#include "planner/timeline.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "google/protobuf/text_format.h"
#include "planner/moment_seconds.h"
#include "planner/step_time.h"
#include "tests/unit/planner/tiny_plan.h"

namespace upipe::planner {
namespace {

Timeline Record(const v1::RunPlan& plan, int rank, const PriceMoment& price = nullptr) {
  auto timeline = RecordTimeline(plan, rank, {.price = price});
  UPIPE_CHECK(timeline.ok()) << timeline.status();
  return *std::move(timeline);
}

std::vector<std::vector<std::string>> Jobs() {
  const auto method = [](const std::string& name, std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"parallel.method=" + name, "parallel.heads_per_stage="});
    return more;
  };
  return {{},
          {"parallel.ring_ranks=2", "memory.overlap=true"},
          {"memory.attention_output=host", "memory.layer_inputs=host", "memory.optimizer=host"},
          {"memory.checkpoint_stride=2", "memory.query_chunks=3", "train.dtype=bf16"},
          {"train.gradient_accumulation=6", "train.eval_sequences=0"},
          {"model.vocab_size=4096", "parallel.dp_ranks=2", "model.tie_embeddings=true"},
          {"train.context=2048", "memory.stage_kv=host", "memory.hidden_stream=host",
           "memory.layer_inputs=host"},
          method("ulysses"),
          method("ring", {"parallel.fsdp_ranks=2"}),
          method("usp", {"parallel.ring_ranks=2", "memory.ring_kv=keep"}),
          method("fpdt")};
}

size_t IndexOf(const std::string& tag) {
  const auto& names = kernels::kMemoryTagNames;
  return std::find(names.begin(), names.end(), tag) - names.begin();
}

void ExpectPeak(const TimelineMoment& moment, const PoolMoment& pool,
                const v1::MemoryUsage& planned) {
  EXPECT_EQ(pool.total_bytes, planned.peak_bytes());
  if (planned.peak_bytes() == 0) return;
  EXPECT_EQ(NameOf(moment.at), planned.peak_moment());
  for (const v1::TagBytes& tag : planned.tags()) {
    EXPECT_EQ(pool.bytes[IndexOf(tag.tag())], tag.at_peak_bytes()) << tag.tag();
  }
}

TEST(Timeline, ItsPeaksAreThePlans) {
  for (const auto& job : Jobs()) {
    const v1::RunPlan plan = TinyPlan(job);
    for (const int rank : {0, 3}) {
      SCOPED_TRACE(absl::StrCat(absl::StrJoin(job, " "), ", rank ", rank));
      const Timeline timeline = Record(plan, rank);
      const v1::RankPlan& planned = plan.ranks(rank);
      const TimelineMoment& device = timeline.moments[FullestOnDevice(timeline.moments)];
      const TimelineMoment& host = timeline.moments[FullestOnHost(timeline.moments)];
      ExpectPeak(device, device.device, planned.memory());
      ExpectPeak(host, host.host, planned.host_memory());
      EXPECT_EQ(timeline.arena_bytes, planned.memory().arena_bytes());
      EXPECT_EQ(timeline.host_pool_bytes, planned.host_memory().arena_bytes());
    }
  }
}

bool OfTheStep(const TimelineMoment& moment) {
  return moment.at.pass != StepPass::kStarting && moment.at.pass != StepPass::kEvaluate;
}

TEST(Timeline, ItsWorkIsTheSteps) {
  for (const auto& job : Jobs()) {
    const v1::RunPlan plan = TinyPlan(job);
    if (plan.spec().train().gradient_accumulation() > kMostMicroSteps) continue;
    double flops = 0;
    for (const TimelineMoment& moment : Record(plan, 1).moments) {
      if (OfTheStep(moment)) flops += moment.flops;
    }
    EXPECT_DOUBLE_EQ(flops, plan.ranks(1).step_flops()) << absl::StrJoin(job, " ");
  }
}

// Moments one after the other, their parts together.
std::vector<std::string> Names(const Timeline& timeline) {
  std::vector<std::string> names;
  for (const TimelineMoment& moment : timeline.moments) {
    if (names.empty() || names.back() != NameOf(moment.at)) names.push_back(NameOf(moment.at));
  }
  return names;
}

TEST(Timeline, HasEveryPassLayerAndStageInOrder) {
  EXPECT_EQ(absl::StrJoin(Names(Record(TinyPlan({"model.num_layers=1"}), 0)), ", "),
            "starting, embed, forward layer 0 stage 0, forward layer 0 stage 1, forward layer 0, "
            "loss, backward layer 0 stage 0, backward layer 0 stage 1, backward layer 0, "
            "backward layer 0 stage 0, backward layer 0 stage 1, embed, optimizer, evaluate, "
            "evaluate layer 0 stage 0, evaluate layer 0 stage 1, evaluate layer 0, evaluate");
}

TEST(Timeline, DoesNotGrowWithChunksOrContext) {
  const std::vector<std::string> names = Names(Record(TinyPlan({}), 0));
  for (const char* larger : {"memory.query_chunks=16", "train.context=64K"}) {
    const Timeline timeline = Record(TinyPlan({larger}), 0);
    EXPECT_EQ(Names(timeline), names);
    EXPECT_LE(timeline.moments.size(), 4 * names.size());
  }
}

// The loss is fullest when its gradients are summed; before, its logits show.
TEST(Timeline, WhatRisesAndFallsWithinAMomentShows) {
  const Timeline timeline = Record(TinyPlan({}), 0);
  int64_t logits = 0;
  const auto tag = static_cast<size_t>(kernels::MemoryTag::kLogits);
  for (const TimelineMoment& moment : timeline.moments) {
    if (moment.at.pass == StepPass::kLoss) logits = std::max(logits, moment.device.bytes[tag]);
  }
  EXPECT_GT(logits, 0);
  EXPECT_EQ(logits, timeline.device_peaks[tag]);
}

TEST(Timeline, CategoriesHaveTheirOwnPeaks) {
  for (const auto& job : Jobs()) {
    const v1::RunPlan plan = TinyPlan(job);
    const Timeline timeline = Record(plan, 0);
    for (const auto& [peaks, usage] :
         {std::pair{timeline.device_peaks, plan.ranks(0).memory()},
          std::pair{timeline.host_peaks, plan.ranks(0).host_memory()}}) {
      for (const v1::TagBytes& tag : usage.tags()) {
        EXPECT_EQ(peaks[IndexOf(tag.tag())], tag.peak_bytes()) << tag.tag();
      }
    }
  }
}

// A whole moment: its parts together.
TimelineMoment WholeAt(const Timeline& timeline, size_t begin, size_t* end) {
  TimelineMoment whole = timeline.moments[begin];
  for (*end = begin + 1; *end < timeline.moments.size(); ++*end) {
    if (timeline.moments[*end].at != whole.at) break;
    Absorb(whole, timeline.moments[*end]);
  }
  return whole;
}

TEST(Timeline, MomentsArePricedByTheirOwnWork) {
  const PriceMoment price = [](const MomentWork& work) {
    MomentSeconds seconds;
    seconds.elapsed = static_cast<double>(work.counts.ops.total().calls);
    seconds.compute = static_cast<double>(work.at.stage);
    seconds.copies =
        static_cast<double>(work.counts.ops.bytes_to_host + work.counts.ops.bytes_from_host);
    return seconds;
  };
  const Timeline timeline = Record(TinyPlan({"memory.layer_inputs=host"}), 2, price);
  EXPECT_TRUE(timeline.timed);
  for (size_t next, i = 0; i < timeline.moments.size(); i = next) {
    const TimelineMoment whole = WholeAt(timeline, i, &next);
    EXPECT_DOUBLE_EQ(whole.seconds.elapsed, static_cast<double>(whole.ops)) << NameOf(whole.at);
    EXPECT_DOUBLE_EQ(whole.seconds.compute, whole.at.stage);
    EXPECT_DOUBLE_EQ(whole.seconds.copies,
                     static_cast<double>(whole.bytes_to_host + whole.bytes_from_host));
  }
}

TEST(Timeline, ItsTrafficIsTheSteps) {
  for (const auto& job : Jobs()) {
    const v1::RunPlan plan = TinyPlan(job);
    if (plan.spec().train().gradient_accumulation() > kMostMicroSteps) continue;
    int64_t sent = 0, planned = 0;
    for (const TimelineMoment& moment : Record(plan, 2).moments) {
      if (OfTheStep(moment)) sent += moment.bytes_sent;
    }
    for (const int64_t bytes : plan.ranks(2).bytes_sent_to_peer()) planned += bytes;
    // The vote before the step is the plan's and no moment of the step's: a few doubles per peer.
    EXPECT_LE(sent, planned);
    EXPECT_GE(sent, planned - 2 * 4 * 4 * int64_t{sizeof(double)});
  }
}

TEST(Timeline, AnErrorOfThePriceIsTheResult) {
  const PriceMoment price = [](const MomentWork& work) -> absl::StatusOr<MomentSeconds> {
    if (work.at.pass == StepPass::kLoss) return absl::InvalidArgumentError("no such rate");
    return MomentSeconds();
  };
  EXPECT_EQ(RecordTimeline(TinyPlan({}), 0, {.price = price}).status(),
            absl::InvalidArgumentError("no such rate"));
}

v1::DeviceFile Device() {
  v1::DeviceFile device;
  UPIPE_CHECK(google::protobuf::TextFormat::ParseFromString(
      R"(name: "round" matmul_fp32 { flops: 1e9 } attention_fp32 { length: 1 forward_flops: 1e8
      backward_flops: 5e7 } memory_bandwidth { value: 1e8 } exchange_in_node { value: 2e7 }
      exchange_latency { value: 1e-5 } host_copy { value: 1e7 } host_update { value: 1e7 })",
      &device));
  return device;
}

// A moment hides behind its own computation only, a step behind all of a pass's: little more.
TEST(MomentSeconds, AddUpToTheStep) {
  const v1::DeviceFile device = Device();
  for (const char* policy : {"device", "host"}) {
    const v1::RunPlan plan = TinyPlan({absl::StrCat("memory.layer_inputs=", policy)});
    const Timeline timeline = Record(plan, 0, PriceBy(plan, device));
    double elapsed = 0, compute = 0, exchange = 0, copies = 0;
    for (const TimelineMoment& moment : timeline.moments) {
      if (!OfTheStep(moment)) continue;
      elapsed += moment.seconds.elapsed;
      compute += moment.seconds.compute;
      exchange += moment.seconds.exchange;
      copies += moment.seconds.copies;
    }
    const auto dry = DryRunRank(plan, 0);
    ASSERT_TRUE(dry.ok()) << dry.status();
    const auto step = TimeStep(dry->counts, StepShape::From(plan), device);
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_GE(elapsed, 0.99 * step->seconds()) << policy;
    EXPECT_LE(elapsed, 1.05 * step->seconds()) << policy;
    EXPECT_GT(exchange, 0);
    EXPECT_LE(compute, elapsed);
    EXPECT_GT(copies, 0) << "tokens come from the host at least";
  }
}

TEST(Timeline, ThinningKeepsPeaksSumsAndPasses) {
  const std::vector<TimelineMoment> all =
      Record(TinyPlan({"memory.layer_inputs=host", "model.num_layers=20"}), 0).moments;
  for (const size_t most : {1, 7, 50, 1000}) {
    const std::vector<TimelineMoment> thin = Thin(all, most);
    EXPECT_LE(thin.size(), most + 9) << "starting, embed, forward, loss, backward, embed, ..";
    EXPECT_EQ(NameOf(thin[FullestOnDevice(thin)].at), NameOf(all[FullestOnDevice(all)].at));
    EXPECT_EQ(thin[FullestOnDevice(thin)].device.bytes, all[FullestOnDevice(all)].device.bytes);
    EXPECT_EQ(thin[FullestOnHost(thin)].host.bytes, all[FullestOnHost(all)].host.bytes);
    int64_t ops = 0, to_host = 0;
    std::vector<StepPass> passes, kept;
    for (const TimelineMoment& moment : all) {
      ops += moment.ops;
      to_host += moment.bytes_to_host;
      if (passes.empty() || passes.back() != moment.at.pass) passes.push_back(moment.at.pass);
    }
    for (const TimelineMoment& moment : thin) {
      ops -= moment.ops;
      to_host -= moment.bytes_to_host;
      if (kept.empty() || kept.back() != moment.at.pass) kept.push_back(moment.at.pass);
    }
    EXPECT_EQ(ops, 0);
    EXPECT_EQ(to_host, 0);
    EXPECT_EQ(kept, passes);
  }
  EXPECT_EQ(Thin(all, 1000).size(), all.size());
}

TEST(Timeline, IsBounded) {
  // One rank, 16 stages of one head: 50 moments a layer.
  const v1::RunPlan plan =
      TinyPlan({"parallel.ranks=1", "parallel.heads_per_stage=1", "model.num_heads=16",
                "model.num_layers=200", "train.context=16"});
  const Timeline timeline = Record(plan, 0);
  EXPECT_LE(timeline.moments.size(), kMostMoments + 9);
  EXPECT_EQ(timeline.moments[FullestOnDevice(timeline.moments)].device.total_bytes,
            plan.ranks(0).memory().peak_bytes());
}

}  // namespace
}  // namespace upipe::planner
