// Times from counts: each rule by a case computed by hand, that parts add up to the step, that a
// faster device is never slower, and that counts of a dry step say where its cost goes.
#include "planner/step_time.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/spec/yaml_spec.h"
#include "google/protobuf/text_format.h"
#include "planner/compose.h"
#include "planner/plan.h"

namespace upipe::planner {
namespace {

using comm::TrafficKind;
using kernels::DryCalls;
using kernels::kOpIndex;
using testing::HasSubstr;

// Round numbers: products 100 FLOP/s, memory 10 bytes/s, and so on.
v1::DeviceFile Device() {
  v1::DeviceFile device;
  UPIPE_CHECK(google::protobuf::TextFormat::ParseFromString(R"(
    name: "round" backend: "cuda" attention_kernel: "own" devices_per_node: 2
    peak_flops { value: 200 }
    matmul_bf16 { flops: 100 half_rows: 10 }
    matmul_fp32 { flops: 50 half_rows: 0 }
    attention_bf16 { length: 1000 forward_flops: 10 backward_flops: 5 }
    attention_bf16 { length: 100000 forward_flops: 30 backward_flops: 25 }
    attention_fp32 { length: 1000 forward_flops: 4 backward_flops: 2 }
    memory_bandwidth { value: 10 }
    exchange_in_node { value: 20 }
    exchange_between_nodes { value: 2 }
    exchange_latency { value: 0.5 }
    host_copy { value: 4 }
    host_update { value: 3 }
    launch { value: 0 }
  )",
                                                            &device));
  return device;
}

std::map<std::string, double> Parts(const v1::StepTime& time) {
  std::map<std::string, double> parts;
  double sum = 0;
  for (const auto& part : time.parts()) {
    parts[part.name()] = part.seconds();
    sum += part.seconds();
  }
  EXPECT_DOUBLE_EQ(sum, time.seconds());
  return parts;
}

v1::StepTime Time(const StepCounts& counts, const StepShape& shape = {},
                  const v1::DeviceFile& device = Device()) {
  auto time = TimeStep(counts, shape, device);
  UPIPE_CHECK(time.ok()) << time.status();
  return *std::move(time);
}

constexpr Section kAttention = {StepPass::kForward, true};
constexpr Section kRest = {StepPass::kForward, false};

template <typename Params>
DryCalls Calls(double flops, double bytes, int64_t extent, int64_t calls,
               kernels::DType dtype = kernels::DType::kBFloat16) {
  return {.op = kOpIndex<Params>,
          .dtype = dtype,
          .cost = {flops, bytes, 0},
          .extent = extent,
          .calls = calls};
}

StepCounts One(const Section& section, const DryCalls& calls) {
  StepCounts counts;
  counts.sections[section].ops.Add(calls);
  return counts;
}

TEST(StepTime, ProductsByTheirRowsAndTheirBytes) {
  // 300 FLOP at 100 / 2 FLOP/s, where 10 rows reach half: 6 s, against 1 s for the bytes.
  EXPECT_THAT(Parts(Time(One(kAttention, Calls<kernels::MatmulParams>(300, 10, 10, 2)))),
              testing::ElementsAre(testing::Pair("projections", 12)));
  EXPECT_THAT(Parts(Time(One(kRest, Calls<kernels::MatmulParams>(300, 100, 10, 1)))),
              testing::ElementsAre(testing::Pair("mlp", 10)));
  EXPECT_THAT(
      Parts(Time(One({StepPass::kLoss, false},
                     Calls<kernels::MatmulParams>(300, 0, 1, 1, kernels::DType::kFloat32)))),
      testing::ElementsAre(testing::Pair("loss", 6)));
}

TEST(StepTime, AttentionByTheKeysItSees) {
  const auto seconds = [](int64_t keys) {
    return Parts(Time(One(kAttention, Calls<kernels::AttentionFwdParams>(600, 0, keys, 1))))
        .at("attention forward");
  };
  EXPECT_DOUBLE_EQ(seconds(10), 60);  // as 1000 keys
  EXPECT_DOUBLE_EQ(seconds(1000), 60);
  EXPECT_DOUBLE_EQ(seconds(10000), 30);  // half way in log length
  EXPECT_DOUBLE_EQ(seconds(100000), 20);
  EXPECT_DOUBLE_EQ(seconds(5000000), 20);
  const auto backward = Calls<kernels::AttentionBwdParams>(600, 0, 10000, 1);
  EXPECT_DOUBLE_EQ(Parts(Time(One(kAttention, backward))).at("attention backward"), 40);
  const auto fp32 = Calls<kernels::AttentionBwdParams>(600, 0, 10000, 1, kernels::DType::kFloat32);
  EXPECT_DOUBLE_EQ(Parts(Time(One(kAttention, fp32))).at("attention backward"), 300);
}

TEST(StepTime, EverythingElseByItsBytesAndNothingFasterThanItsLaunch) {
  StepCounts counts = One(kRest, Calls<kernels::RmsNormFwdParams>(1e9, 30, 0, 2));
  counts.AddTimes(One(kRest, Calls<kernels::SwiGluFwdParams>(0, 1, 0, 10)), 1);
  v1::DeviceFile device = Device();
  device.mutable_launch()->set_value(0.25);
  const auto parts = Parts(Time(counts, {}, device));
  EXPECT_DOUBLE_EQ(parts.at("norms and moves"), 6);
  EXPECT_DOUBLE_EQ(parts.at("mlp"), 1);
  EXPECT_DOUBLE_EQ(parts.at("launch"), 1.5);  // 10 times what 0.1 s leaves of 0.25 s
}

TEST(StepTime, OpsOnHostMemoryByAdamWThere) {
  DryCalls adamw = Calls<kernels::AdamWParams>(0, 28 * 6, 0, 1);  // 6 parameters
  adamw.on_host = true;
  EXPECT_DOUBLE_EQ(Parts(Time(One({StepPass::kOptimizer, false}, adamw))).at("optimizer"), 2);
  DryCalls squares = Calls<kernels::SumOfSquaresParams>(0, 14 * 6, 0, 1);
  squares.on_host = true;
  EXPECT_DOUBLE_EQ(Parts(Time(One({StepPass::kOptimizer, false}, squares))).at("optimizer"), 1);
}

// 40 s of attention in the pass.
StepCounts WithTraffic(const comm::DryTraffic::Where& where, const comm::TrafficCount& count) {
  StepCounts counts = One(kAttention, Calls<kernels::AttentionFwdParams>(400, 0, 1000, 1));
  counts.sections[kAttention].traffic.at(where) = count;
  return counts;
}

TEST(StepTime, CollectivesTakeTheSlowerOfTwoWaysAndTheirLatency) {
  const comm::TrafficCount count = {.collectives = 4, .bytes_in_node = 100};
  EXPECT_DOUBLE_EQ(Parts(Time(WithTraffic({}, count))).at("exchange"), 5 + 2);
  comm::TrafficCount both = count;
  both.bytes_between_nodes = 60;
  EXPECT_DOUBLE_EQ(Parts(Time(WithTraffic({.leaves_node = true}, both))).at("exchange"), 30 + 2);
  EXPECT_DOUBLE_EQ(Parts(Time(WithTraffic({.kind = TrafficKind::kReduce}, count))).at("weights"),
                   7);
}

TEST(StepTime, WhatRunsBesideComputationHidesAsFarAsItFits) {
  const comm::DryTraffic::Where exchange = {.beside_compute = true};
  comm::TrafficCount count = {.collectives = 1, .bytes_in_node = 190};  // 10 s
  v1::StepTime time = Time(WithTraffic(exchange, count), {.turns = 4});
  EXPECT_DOUBLE_EQ(Parts(time).at("exchange"), 2.5)
      << "the first turn's has nothing to hide behind";
  EXPECT_DOUBLE_EQ(time.hidden_seconds(), 7.5);
  time = Time(WithTraffic(exchange, count), {.turns = 1});
  EXPECT_DOUBLE_EQ(Parts(time).at("exchange"), 10);
  count.bytes_in_node = 1990;  // 100 s beside 40 s of attention
  time = Time(WithTraffic(exchange, count), {.turns = 4});
  EXPECT_DOUBLE_EQ(Parts(time).at("exchange"), 60);
  EXPECT_DOUBLE_EQ(time.hidden_seconds(), 40);
  const comm::DryTraffic::Where weights = {.kind = TrafficKind::kGather, .beside_compute = true};
  time = Time(WithTraffic(weights, count));
  EXPECT_DOUBLE_EQ(Parts(time).at("weights"), 60);
  EXPECT_DOUBLE_EQ(time.hidden_seconds(), 40);
}

TEST(StepTime, CopiesHideBehindTheComputationOfTheirPass) {
  StepCounts counts = One(kAttention, Calls<kernels::AttentionFwdParams>(400, 0, 1000, 1));
  counts.sections[kRest].ops.bytes_to_host = 200;  // 50 s, both ways at once
  counts.sections[kRest].ops.bytes_from_host = 160;
  v1::StepTime time = Time(counts);
  EXPECT_DOUBLE_EQ(Parts(time).at("offload"), 10);
  EXPECT_DOUBLE_EQ(time.hidden_seconds(), 40);
  StepCounts apart = One(kAttention, Calls<kernels::AttentionFwdParams>(400, 0, 1000, 1));
  apart.sections[{StepPass::kBackward, false}].ops.bytes_to_host = 200;
  time = Time(apart);
  EXPECT_DOUBLE_EQ(Parts(time).at("offload"), 50) << "another pass's computation";
}

TEST(StepTime, RatesOfAWholeStep) {
  StepCounts counts = One(kAttention, Calls<kernels::AttentionFwdParams>(400, 0, 1000, 1));
  const v1::StepTime time = Time(counts, {.ranks = 2, .tokens = 800, .model_flops = 1600});
  EXPECT_DOUBLE_EQ(time.seconds(), 40);
  EXPECT_DOUBLE_EQ(time.tokens_per_second_per_rank(), 10);
  EXPECT_DOUBLE_EQ(time.causal_mfu(), 1600.0 / 2 / 40 / 200);
  v1::DeviceFile device = Device();
  device.clear_peak_flops();
  EXPECT_EQ(Time(counts, {}, device).causal_mfu(), 0);
}

TEST(StepTime, NamesTheRateThatIsMissing) {
  v1::DeviceFile device = Device();
  device.clear_attention_bf16();
  const StepCounts counts = One(kAttention, Calls<kernels::AttentionFwdParams>(1, 1, 1, 1));
  const absl::Status status = TimeStep(counts, {}, device).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("round"), HasSubstr("attention_bf16")));
}

constexpr char kJob[] = R"(name: timed
model: {vocab_size: 64, hidden_size: 32, num_layers: 3, num_heads: 8, num_kv_heads: 2, head_dim: 8,
  intermediate_size: 48}
data: {path: none}
parallel: {ranks: 4, ranks_per_node: 2, method: upipe, heads_per_stage: 2, ring_ranks: 2,
  backend: cuda}
memory: {layer_inputs: host, hidden_stream: host, overlap: true, optimizer: host}
train: {context: 512, steps: 3, dtype: bf16}
)";

v1::RunPlan Shape(const std::vector<std::string>& overrides) {
  const auto spec = ParseJobSpecYaml(kJob, "job.yaml", overrides);
  UPIPE_CHECK(spec.ok()) << spec.status();
  auto plan = PlanShape(*spec);
  UPIPE_CHECK(plan.ok()) << plan.status();
  return *std::move(plan);
}

RankDryRun DryRun(const v1::RunPlan& plan, const char* attention = "own") {
  auto dry = ComposeRank(plan, 0, attention);
  UPIPE_CHECK(dry.ok()) << dry.status();
  return *std::move(dry);
}

TEST(StepTime, AFasterDeviceIsNeverSlower) {
  const v1::RunPlan plan = Shape({});
  const StepCounts counts = DryRun(plan).counts;
  const StepShape shape = StepShape::From(plan);
  const double before = Time(counts, shape).seconds();
  const auto after = [&](const std::function<void(v1::DeviceFile&)>& change) {
    v1::DeviceFile device = Device();
    change(device);
    return Time(counts, shape, device).seconds();
  };
  const auto faster = [](v1::DeviceFile::Number& number) { number.set_value(2 * number.value()); };
  // Every rate of the device matters to this step.
  EXPECT_LT(after([&](auto& d) { d.mutable_matmul_bf16()->set_flops(200); }), before);
  EXPECT_LT(after([&](auto& d) { d.mutable_matmul_bf16()->set_half_rows(5); }), before);
  EXPECT_LT(after([&](auto& d) { d.mutable_attention_bf16(0)->set_forward_flops(20); }), before);
  EXPECT_LT(after([&](auto& d) { d.mutable_attention_bf16(0)->set_backward_flops(9); }), before);
  EXPECT_LT(after([&](auto& d) { faster(*d.mutable_memory_bandwidth()); }), before);
  EXPECT_LT(after([&](auto& d) { faster(*d.mutable_exchange_in_node()); }), before);
  EXPECT_LT(after([&](auto& d) { faster(*d.mutable_exchange_between_nodes()); }), before);
  EXPECT_LT(after([&](auto& d) { d.mutable_exchange_latency()->set_value(0.1); }), before);
  EXPECT_LE(after([&](auto& d) { faster(*d.mutable_host_copy()); }), before);
  EXPECT_LT(after([&](auto& d) { faster(*d.mutable_host_update()); }), before);
  EXPECT_GT(after([&](auto& d) { d.mutable_launch()->set_value(1e5); }), before);
}

TEST(StepCounts, AreTheWholeStepWhereverItGoes) {
  const v1::RunPlan plan = Shape({});
  const RankDryRun dry = DryRun(plan);
  comm::DryTraffic traffic;
  std::map<StepPass, double> flops;
  for (const auto& [section, counts] : dry.counts.sections) {
    flops[section.pass] += counts.ops.total().cost.flops;
    traffic.AddTimes(counts.traffic, 1);
  }
  double sum = 0;
  for (const auto& [pass, of_pass] : flops) sum += of_pass;
  EXPECT_NEAR(sum, dry.rank.step_flops(), 1e-6 * sum);
  EXPECT_GT(flops[StepPass::kBackward], 2 * flops[StepPass::kForward]) << "with recomputation";
  EXPECT_GT(flops[StepPass::kLoss], 0);
  EXPECT_GT(flops[StepPass::kOptimizer], 0);
  int64_t in_node = 0, between = 0;
  for (int kind = 0; kind < comm::kNumTrafficKinds; ++kind) {
    for (const bool beside : {false, true}) {
      for (const bool leaves : {false, true}) {
        const auto& count = traffic.at({static_cast<TrafficKind>(kind), beside, leaves});
        in_node += count.bytes_in_node;
        between += count.bytes_between_nodes;
        EXPECT_EQ(leaves, count.bytes_between_nodes > 0 || (leaves && count.collectives == 0));
      }
    }
  }
  const auto& sent = dry.rank.bytes_sent_to_peer();  // of rank 0: 0 and 1 share a node
  EXPECT_EQ(in_node, sent[1]);
  EXPECT_EQ(between, sent[2] + sent[3]);
  const auto& exchange = traffic.at({TrafficKind::kExchange, /*beside_compute=*/true, false});
  EXPECT_GT(exchange.collectives, 0) << "overlap puts them beside attention";
  EXPECT_EQ(traffic.at({TrafficKind::kExchange, false, false}).collectives, 0);
}

// The pieces of tensors that AdamW updates differ with the model; everything else is linear.
TEST(StepCounts, OfManyLayersAreThoseOfFewer) {
  const std::string method = "memory.optimizer=device";
  const auto at = [&](int layers) {
    return DryRun(Shape({method, absl::StrCat("model.num_layers=", layers)})).counts;
  };
  StepCounts composed = at(2);
  const StepCounts two = composed, one = at(1), five = at(5);
  composed.AddTimes(two, 3);
  composed.AddTimes(one, -3);
  composed.sections.erase({StepPass::kOptimizer, false});
  StepCounts whole = five;
  whole.sections.erase({StepPass::kOptimizer, false});
  EXPECT_TRUE(composed == whole);
  EXPECT_FALSE(two == whole);
}

TEST(StepCounts, MicroStepsCount) {
  const v1::RunPlan plan = Shape({"train.gradient_accumulation=7"});
  const RankDryRun priced = DryRun(plan);
  const auto run = DryRunRank(plan, 0);
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_TRUE(priced.counts == run->counts);
  EXPECT_EQ(priced.rank.bytes_to_host(), run->rank.bytes_to_host());
  EXPECT_GT(priced.rank.bytes_to_host(), 0);
  EXPECT_EQ(StepShape::From(plan).tokens, 7 * 512);
}

// cuDNN reads the output in backward, so it is sent again.
TEST(StepCounts, SayWhatTheAttentionKernelCosts) {
  const v1::RunPlan plan = Shape({});
  const RankDryRun own = DryRun(plan), cudnn = DryRun(plan, "cudnn 9.19");
  EXPECT_GT(cudnn.rank.bytes_sent_to_peer(1), own.rank.bytes_sent_to_peer(1));
  EXPECT_GT(cudnn.rank.memory().peak_bytes(), own.rank.memory().peak_bytes());
  EXPECT_EQ(cudnn.counts.ops().by_op().at("matmul").calls,
            own.counts.ops().by_op().at("matmul").calls);
}

}  // namespace
}  // namespace upipe::planner
