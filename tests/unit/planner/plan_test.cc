// Plans of every method and axis: the schedule they carry, bytes on device and host, FLOPs of the
// mask, what is refused and in which words. The samples are planned here, so that they cannot rot.
#include "planner/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "engine/parallel/mesh.h"
#include "engine/train/rank_run.h"
#include "kernels/api/dtype.h"
#include "planner/device_file.h"
#include "planner/notes.h"
#include "planner/render.h"

namespace upipe::planner {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::HasSubstr;
using testing::Not;

constexpr char kJob[] = R"(name: plan
model: {vocab_size: 64, hidden_size: 32, num_layers: 2, num_heads: 8, num_kv_heads: 2, head_dim: 8,
  intermediate_size: 48}
data: {path: none}
parallel: {ranks: 4, method: upipe, heads_per_stage: 4}
train: {context: 256, steps: 3, eval_sequences: 1}
)";
// Makes `method` of the job above.
std::vector<std::string> With(const std::string& method, std::vector<std::string> more = {}) {
  more.insert(more.begin(),
              {absl::StrCat("parallel.method=", method), "parallel.heads_per_stage="});
  return more;
}

v1::JobSpec Spec(const std::vector<std::string>& overrides) {
  const auto spec = ParseJobSpecYaml(kJob, "job.yaml", overrides);
  UPIPE_CHECK(spec.ok()) << spec.status();
  return *spec;
}

absl::StatusOr<v1::RunPlan> TryPlan(const std::vector<std::string>& overrides,
                                    int64_t memory_per_rank = std::numeric_limits<int64_t>::max()) {
  return MakeRunPlan(Spec(overrides),
                     {.memory_per_rank_bytes = memory_per_rank, .check_data = false});
}

v1::RunPlan Plan(const std::vector<std::string>& overrides) {
  auto plan = TryPlan(overrides);
  UPIPE_CHECK(plan.ok()) << absl::StrJoin(overrides, " ") << ": " << plan.status();
  return *std::move(plan);
}

int64_t HostBytes(const v1::RunPlan& plan) {
  int64_t bytes = 0;
  for (const v1::RankPlan& rank : plan.ranks()) bytes += rank.host_memory().peak_bytes();
  return bytes;
}

TEST(Plan, EachMethodIsAPointOfTheSpace) {
  struct Case {
    std::vector<std::string> job;
    const char* mesh;
    int64_t heads_per_rank;
    int stages;
    int64_t chunks;
  };
  for (const Case& c : std::vector<Case>{
           {{}, "C 4 x R 1 x fsdp 1 x dp 1", 1, 2, 1},
           {{"parallel.heads_per_stage=8"}, "C 4 x R 1 x fsdp 1 x dp 1", 2, 1, 1},
           {With("ulysses"), "C 4 x R 1 x fsdp 1 x dp 1", 2, 1, 1},
           {With("ring"), "C 1 x R 4 x fsdp 1 x dp 1", 8, 1, 1},
           {With("usp", {"parallel.ring_ranks=2"}), "C 2 x R 2 x fsdp 1 x dp 1", 4, 1, 1},
           {With("fpdt"), "C 4 x R 1 x fsdp 1 x dp 1", 2, 1, 4},
           {{"parallel.ring_ranks=2"}, "C 2 x R 2 x fsdp 1 x dp 1", 2, 2, 1},
           {{"parallel.dp_ranks=2", "memory.query_chunks=3"}, "C 2 x R 1 x fsdp 1 x dp 2", 2, 2, 3},
           {With("ring", {"parallel.fsdp_ranks=2"}), "C 1 x R 2 x fsdp 2 x dp 1", 8, 1, 1},
       }) {
    const v1::RunPlan plan = Plan(c.job);
    EXPECT_EQ(MeshText(plan.spec().parallel()), c.mesh) << absl::StrJoin(c.job, " ");
    EXPECT_EQ(plan.schedule().heads_per_rank(), c.heads_per_rank) << absl::StrJoin(c.job, " ");
    EXPECT_EQ(plan.schedule().stages_size(), c.stages) << absl::StrJoin(c.job, " ");
    EXPECT_EQ(plan.schedule().query_chunks(), c.chunks) << absl::StrJoin(c.job, " ");
    EXPECT_EQ(plan.padded_context(), PaddedContext(plan.spec())) << absl::StrJoin(c.job, " ");
    const parallel::Mesh mesh = parallel::Mesh::From(plan.spec().parallel());
    EXPECT_EQ(plan.tokens_per_rank() * mesh.context_ranks(), plan.padded_context());
    EXPECT_EQ(plan.ranks_size(), 4);
    for (const v1::RankPlan& rank : plan.ranks()) {
      EXPECT_GT(rank.memory().peak_bytes(), 0);
      EXPECT_GT(rank.step_flops(), 0);
      EXPECT_EQ(rank.bytes_sent_to_peer_size(), 4);
    }
    EXPECT_EQ(HostBytes(plan) > 0, plan.spec().parallel().method() == v1::METHOD_FPDT);
  }
}

// The planner and the specification each say what a context is padded to; the engine's map decides.
TEST(Plan, PaddingOfTheSpecificationIsTheMaps) {
  for (const int64_t context : {1, 7, 255, 257, 1000}) {
    for (const std::string ring : {"1", "2", "4"}) {
      for (const std::string chunks : {"1", "2", "3", "5"}) {
        const v1::RunPlan plan =
            Plan({absl::StrCat("train.context=", context), "parallel.ring_ranks=" + ring,
                  "memory.query_chunks=" + chunks});
        EXPECT_EQ(plan.padded_context(), PaddedContext(plan.spec()))
            << context << " tokens, ring " << ring << ", chunks " << chunks;
      }
    }
  }
}

TEST(Plan, PolicyMovesBytesToTheHost) {
  const v1::RunPlan device = Plan({});
  ASSERT_EQ(HostBytes(device), 0);
  for (const char* field : {"layer_inputs", "stage_kv", "optimizer", "attention_output"}) {
    const v1::RunPlan host = Plan({absl::StrCat("memory.", field, "=host")});
    for (const v1::RankPlan& rank : host.ranks()) {
      EXPECT_GT(rank.host_memory().peak_bytes(), 0) << field;
      EXPECT_GE(rank.host_memory().arena_bytes(), rank.host_memory().peak_bytes()) << field;
    }
    EXPECT_NE(host.plan_hash(), device.plan_hash()) << field;
  }
}

TEST(Plan, DataAxesMultiplySequencesNotWhatOneCosts) {
  const v1::RunPlan one = Plan({"parallel.ranks=2", "parallel.heads_per_stage=2"});
  const v1::RunPlan many =
      Plan({"parallel.ranks=8", "parallel.heads_per_stage=2", "parallel.dp_ranks=2",
            "parallel.fsdp_ranks=2", "train.gradient_accumulation=3"});
  EXPECT_EQ(many.model_flops(), 12 * one.model_flops());
  EXPECT_EQ(many.tokens_per_rank(), one.tokens_per_rank());
  EXPECT_THAT(many.notes(), Contains("a step is 12 sequences: 4 groups of 2 context ranks (dp 2 x "
                                     "fsdp 2) x 3 accumulated"));
  // Groups do alike, but for the optimizer, whose shards end in padding here and there.
  for (int rank = 2; rank < 8; ++rank) {
    EXPECT_EQ(many.ranks(rank).memory().peak_bytes(), many.ranks(rank % 2).memory().peak_bytes());
    EXPECT_NEAR(many.ranks(rank).step_flops() / many.ranks(rank % 2).step_flops(), 1, 1e-3);
  }
}

TEST(Plan, LongStepsArePricedAsIfEveryMicroStepHadRun) {
  for (const std::vector<std::string>& job : std::vector<std::vector<std::string>>{
           {}, {"parallel.dp_ranks=2", "memory.optimizer=host"}, With("fpdt"), With("ring")}) {
    std::vector<std::string> overrides = job;
    overrides.push_back("train.gradient_accumulation=9");
    const v1::RunPlan plan = Plan(overrides);
    for (const v1::RankPlan& rank : plan.ranks()) {
      const auto all = DryRunRank(plan, rank.rank());
      ASSERT_TRUE(all.ok()) << all.status();
      EXPECT_EQ(all->rank.SerializeAsString(), rank.SerializeAsString())
          << absl::StrJoin(job, " ") << " rank " << rank.rank() << "\n"
          << all->rank.DebugString() << rank.DebugString();
    }
  }
}

// Pairs counted one by one.
double AttentionFlops(int64_t context, bool causal, int64_t window) {
  int64_t pairs = 0;
  for (int64_t q = 0; q < context; ++q) {
    for (int64_t k = 0; k < context; ++k) {
      if ((!causal || k <= q) && std::abs(q - k) < window) ++pairs;
    }
  }
  return 2.0 * 12 * 8 * 8 * static_cast<double>(pairs);  // layers, 12, H, D
}

TEST(Plan, ModelFlopsAreOfThePairsTheMaskLeaves) {
  const double causal = Plan({}).model_flops();
  const double weights = causal - AttentionFlops(256, true, 256);
  EXPECT_EQ(weights, 6.0 * 256 * (2 * (32 * 64 * 2 + 32 * 32 + 3 * 32 * 48) + 32 * 64));
  EXPECT_EQ(Plan({"model.window=17"}).model_flops(), weights + AttentionFlops(256, true, 17));
  EXPECT_EQ(Plan({"model.window=1K"}).model_flops(), causal);
  EXPECT_EQ(Plan({"model.causal=false"}).model_flops(), weights + AttentionFlops(256, false, 256));
  EXPECT_EQ(Plan({"model.causal=false", "model.window=17"}).model_flops(),
            weights + AttentionFlops(256, false, 17));
}

TEST(Plan, DeviceAndHostMustFitTogether) {
  const v1::RunPlan plan = Plan(With("fpdt"));
  int64_t needed = 0;
  for (const v1::RankPlan& rank : plan.ranks()) {
    needed = std::max(needed, rank.memory().arena_bytes() + rank.host_memory().arena_bytes());
  }
  EXPECT_TRUE(TryPlan(With("fpdt"), needed).ok());
  const absl::Status status = TryPlan(With("fpdt"), needed - 1).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(absl::StrCat("(", needed, " bytes, ")), HasSubstr(" as the device's"),
                    HasSubstr(absl::StrCat("(", needed - 1, " bytes)")), HasSubstr("would fit")));
}

int64_t Needed(const v1::RunPlan& plan) {
  int64_t needed = 0;
  for (const v1::RankPlan& rank : plan.ranks()) {
    needed = std::max(needed, rank.memory().arena_bytes() + rank.host_memory().arena_bytes());
  }
  return needed;
}

// "memory.overlap: false would fit, .." of a refusal: "memory.overlap=false".
std::vector<std::string> ChangeOf(const absl::Status& refusal) {
  const std::vector<std::string> clauses = absl::StrSplit(refusal.message(), "; ");
  const std::string change = clauses.back().substr(0, clauses.back().find(" would fit"));
  std::vector<std::string> overrides;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(change, " with "))) {
    const std::vector<std::string> field = absl::StrSplit(part, ": ");
    UPIPE_CHECK(field.size() == 2) << refusal;
    overrides.push_back(
        absl::StrCat(absl::StrContains(field[0], '.') ? "" : "parallel.", field[0], "=", field[1]));
  }
  return overrides;
}

// What a refusal says would fit does, with the room that was refused.
TEST(Plan, TheNearestChangeOfARefusalFits) {
  const std::vector<std::vector<std::string>> jobs = {
      {"memory.attention_output=device", "train.context=8K"},
      {"memory.overlap=on", "train.context=8K"},
      {"parallel.heads_per_stage=8", "train.context=8K"},
      {"parallel.ring_ranks=2", "memory.ring_kv=keep", "train.context=8K"},
      {"parallel.dp_ranks=2", "parallel.heads_per_stage=2"},
  };
  for (const std::vector<std::string>& job : jobs) {
    const int64_t room = Needed(Plan(job)) - 1;
    const absl::Status status = TryPlan(job, room).status();
    ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    std::vector<std::string> changed = job;
    for (std::string& change : ChangeOf(status)) changed.push_back(std::move(change));
    EXPECT_TRUE(TryPlan(changed, room).ok()) << status << "\n" << TryPlan(changed, room).status();
  }
}

TEST(Plan, ARefusalWithoutASingleChangeNamesALongerOne) {
  const auto refusal = [](int64_t room) {
    return std::string(TryPlan({"train.context=64K"}, room).status().message());
  };
  EXPECT_THAT(refusal(2 << 20), HasSubstr("would fit, about the longest for 4 ranks"));
  EXPECT_THAT(refusal(1000), HasSubstr("no shorter context would fit either"));
}

TEST(Plan, WhatIsAutoIsChosenAndNoLongerAuto) {
  const v1::RunPlan plan =
      Plan({"parallel.method=auto", "parallel.heads_per_stage=", "memory.policy=auto",
            "train.context=8K"});
  EXPECT_FALSE(HasAuto(plan.spec()));
  EXPECT_EQ(plan.spec().memory().policy(), v1::POLICY_CHOICE_WRITTEN);
  EXPECT_GT(plan.candidates_size(), 3);
  EXPECT_EQ(plan.candidates(0).verdict(), "the fastest that fits");
  EXPECT_GT(plan.searched(), plan.candidates_size() / 2);
  EXPECT_GT(plan.step_time().seconds(), 0);
  double sum = 0;
  for (const v1::StepTime::Part& part : plan.step_time().parts()) sum += part.seconds();
  EXPECT_NEAR(sum, plan.step_time().seconds(), 1e-9 * sum);
  // The same as a job that names what was chosen.
  v1::JobSpec named = plan.spec();
  const auto again = MakeRunPlan(named, {.check_data = false});
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(Needed(*again), Needed(plan));
}

// With half the room of the fastest plan, a slower one that fits.
TEST(Plan, LessRoomIsALeanerPlanThatFits) {
  const std::vector<std::string> job = {"parallel.method=auto",
                                        "parallel.heads_per_stage=", "memory.policy=auto",
                                        "train.context=32K"};
  const v1::RunPlan fast = Plan(job);
  const int64_t room = Needed(fast) * 2 / 3;
  const auto lean = TryPlan(job, room);
  ASSERT_TRUE(lean.ok()) << lean.status();
  EXPECT_LE(Needed(*lean), room);
  EXPECT_GE(lean->step_time().seconds(), fast.step_time().seconds());
}

TEST(Plan, CudaIsPlannedAndNotRun) {
  const v1::JobSpec spec = Spec({"parallel.backend=cuda", "train.dtype=bf16"});
  EXPECT_EQ(MakeRunPlan(spec, {.check_data = false}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const auto plan = MakeRunPlan(spec, {.check_data = false, .must_run = false});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->device(), "h100-80gb");
  EXPECT_EQ(plan->attention_kernel(), "cuda cudnn 9.19 bf16");
  EXPECT_EQ(plan->peak_flops(), 989.4e12);
  EXPECT_GT(plan->budget().reserved_bytes(), 0);
  EXPECT_GT(plan->budget().host_bytes(), 0);
}

v1::RunPlan CudaPlan(std::vector<std::string> overrides, PlanLimits limits = {}) {
  overrides.insert(overrides.begin(), {"parallel.backend=cuda", "train.dtype=bf16"});
  limits.check_data = false;
  limits.must_run = false;
  const auto plan = MakeRunPlan(Spec(overrides), limits);
  UPIPE_CHECK(plan.ok()) << plan.status();
  return *plan;
}

// On cuda a choice between bits and time; the plan counts the kernel that will run, and says which
// promise holds.
TEST(Plan, DeterministicOnCudaIsAnotherKernelWithoutScratch) {
  const v1::RunPlan fast = CudaPlan({"train.context=64K"});
  EXPECT_FALSE(fast.spec().train().deterministic());
  EXPECT_FALSE(fast.bit_identical());
  EXPECT_THAT(fast.notes(),
              Contains(HasSubstr("within the same-precision bound, not bit for bit")));
  const v1::RunPlan exact = CudaPlan({"train.context=64K", "train.deterministic=true"});
  EXPECT_EQ(exact.attention_kernel(), "cuda cudnn 9.19, own backward bf16");
  EXPECT_EQ(train::AttentionKernelOf(exact), "cudnn 9.19, own backward") << "what the rank runs";
  EXPECT_TRUE(exact.bit_identical());
  EXPECT_NE(exact.plan_hash(), fast.plan_hash());
  EXPECT_LT(Needed(exact), Needed(fast)) << "no dQ in fp32, no bf16 gradients beside";
  EXPECT_THAT(exact.notes(), Contains(AllOf(HasSubstr("bit-identical on equal GPU model"),
                                            HasSubstr("its rate is not known on h100-80gb"))));
  const v1::RunPlan fp32 = CudaPlan({"train.dtype=fp32"});
  EXPECT_TRUE(fp32.bit_identical()) << "the own kernel does it anyway";
}

TEST(Plan, TheCpuKeepsTheBitsEitherWay) {
  const v1::RunPlan plan = Plan({});
  EXPECT_TRUE(plan.spec().train().deterministic());
  EXPECT_TRUE(plan.bit_identical());
  const v1::RunPlan off = Plan({"train.deterministic=false"});
  EXPECT_TRUE(off.bit_identical());
  EXPECT_EQ(Needed(off), Needed(plan));
  EXPECT_THAT(off.notes(), Contains(HasSubstr("nothing here is faster for giving it up")));
}

// A deterministic job's backward is timed at the own kernel's rate where a description has it.
TEST(Plan, TheOwnKernelsTimeIsToldWhereItIsKnown) {
  v1::DeviceFile device = *FindDevice("h100-80gb", "");
  const auto backward = [&](const std::string& deterministic) {
    const v1::RunPlan plan = CudaPlan({"train.context=64K", "train.deterministic=" + deterministic},
                                      {.device = &device});
    for (const auto& part : plan.step_time().parts()) {
      if (part.name() == "attention backward") return part.seconds();
    }
    return 0.0;
  };
  const double library = backward("false");
  EXPECT_EQ(backward("true"), library) << "not known: a bound from below";
  v1::DeviceFile::AttentionRate& rate = *device.add_attention_own_bf16();
  rate.set_length(1024);
  rate.set_forward_flops(1e12);
  rate.set_backward_flops(1e12);
  EXPECT_EQ(backward("false"), library);
  EXPECT_GT(backward("true"), 10 * library);
}

constexpr int64_t kBf16 = static_cast<int64_t>(kernels::DType::kBFloat16);

// What a worker measured beyond the formulas is planned with, op by op and shape by shape.
TEST(Plan, MeasuredScratchIsCounted) {
  const v1::RunPlan before = CudaPlan({"train.context=64K"});
  PlanLimits limits;
  v1::MeasuredWorkspaces::Op& op = *limits.measured.add_ops();
  op.set_op("attention_bwd");
  // Queries, heads, head size, keys, K/V heads, storage type.
  for (const int64_t size : std::initializer_list<int64_t>{64 << 10, 1, 8, 64 << 10, 1, kBf16}) {
    op.add_shape(size);
  }
  op.set_counted_bytes(1000);
  op.set_measured_bytes(int64_t{1} << 30);
  limits.measured.set_libraries("NVIDIA H200, cuDNN 9.25.0");
  const v1::RunPlan after = CudaPlan({"train.context=64K"}, limits);
  EXPECT_NE(after.plan_hash(), before.plan_hash());
  EXPECT_GE(Needed(after), int64_t{1} << 30);
  EXPECT_LT(Needed(before), int64_t{1} << 29);
  EXPECT_EQ(after.measured().ops_size(), 1);
  EXPECT_THAT(after.notes(),
              Contains(AllOf(HasSubstr("NVIDIA H200, cuDNN 9.25.0: attention_bwd takes 1.0 GiB"),
                             HasSubstr("where 1000 B were counted"))));
}

// No node has more devices than the description says, and every node as many.
TEST(Plan, RanksAreSharedOutOverWholeNodes) {
  for (const auto& [ranks, per_node] :
       {std::pair(4, 4), {8, 8}, {12, 6}, {16, 8}, {7, 7}, {11, 1}}) {
    const v1::JobSpec spec =
        Spec({"parallel.backend=cuda", "train.dtype=bf16", "parallel.method=ring",
              "parallel.heads_per_stage=", absl::StrCat("parallel.ranks=", ranks)});
    const auto plan = MakeRunPlan(spec, {.check_data = false, .must_run = false});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->spec().parallel().ranks_per_node(), per_node) << ranks;
  }
}

TEST(Plan, DevicesThatAreUnknownOrOfAnotherBackendAreNamed) {
  EXPECT_THAT(std::string(TryPlan({"parallel.device=h300"}).status().message()),
              HasSubstr("h100-80gb"));
  EXPECT_THAT(std::string(TryPlan({"parallel.device=h200"}).status().message()),
              HasSubstr("device h200 is of backend cuda and parallel.backend is cpu"));
}

// The description's is of bf16, and that of the cpu has none.
TEST(Plan, ThePeakIsToldWhereItIsKnown) {
  EXPECT_EQ(Plan({}).peak_flops(), 0);
  EXPECT_EQ(Plan({"train.dtype=bf16"}).peak_flops(), 0);
  const auto fp32 = MakeRunPlan(Spec({"parallel.backend=cuda", "train.dtype=fp32"}),
                                {.check_data = false, .must_run = false});
  EXPECT_EQ(fp32.ok() ? fp32->peak_flops() : 0, 0);
}

TEST(Plan, ItsOwnLimitCountsToo) {
  const absl::Status status = TryPlan({"train.memory_per_rank=1KiB"}).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("may take 1.0 KiB (1024 bytes)"));
}

TEST(Plan, NotesSayMaskPolicyAndBalance) {
  const auto notes = [](const std::vector<std::string>& job) {
    const v1::RunPlan plan = Plan(job);
    return absl::StrJoin(plan.notes(), "\n");
  };
  EXPECT_THAT(notes({}), AllOf(HasSubstr("mask: causal\n"),
                               HasSubstr("policy: attention outputs computed again\n"),
                               Not(HasSubstr("busiest")), Not(HasSubstr("host"))));
  EXPECT_THAT(notes({"model.window=64", "data.documents=restart"}),
              AllOf(HasSubstr("mask: causal within 64 positions, inside each document, whose "
                              "positions begin at 0"),
                    HasSubstr("FLOPs are of sequences that are one document")));
  EXPECT_THAT(notes({"model.causal=false", "data.documents=separate"}),
              HasSubstr("mask: full, inside each document\n"));
  EXPECT_THAT(
      notes({"memory.layer_inputs=host", "memory.checkpoint_stride=2", "memory.query_chunks=2",
             "memory.optimizer=host", "memory.overlap=on", "memory.attention_output=host"}),
      AllOf(HasSubstr("policy: attention outputs kept on the host; layer inputs, optimizer "
                      "on the host; the input of every 2 layers kept; 2 query chunks; "
                      "stages overlapped\n"),
            HasSubstr("backend cpu has no memory but the host's")));
  EXPECT_THAT(
      notes({"model.num_heads=7", "model.num_kv_heads=1"}),
      AllOf(HasSubstr("is busiest: it computes 1."), HasSubstr("(C = 1 x R = 4) is exact")));
}

TEST(Plan, TextShowsMeshScheduleAndHostBytes) {
  const std::string plain = RenderPlan(Plan({}));
  EXPECT_THAT(plain,
              AllOf(HasSubstr("method     upipe, 4 ranks: C 4 x R 1 x fsdp 1 x dp 1\n"),
                    HasSubstr("schedule   2 stages of 1 query head per rank, 1 query chunk, 64 "
                              "tokens per rank\n"),
                    Not(HasSubstr("\nhost "))));
  const std::string fpdt = RenderPlan(Plan(With("fpdt")));
  EXPECT_THAT(fpdt, AllOf(HasSubstr("1 stage of 2 query heads per rank, 4 query chunks"),
                          HasSubstr("\nhost       peak "), HasSubstr("\n  residual ")));
}

TEST(Plan, SpecsThatCannotBePlannedSayAllOfIt) {
  v1::JobSpec spec = Spec({});
  spec.mutable_parallel()->set_ring_ranks(3);
  spec.mutable_memory()->set_query_chunks(0);
  const absl::Status status = MakeRunPlan(spec, {.check_data = false}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("parallel.ring_ranks: 3 does not divide the 4 context ranks"),
                    HasSubstr("memory.query_chunks: 0 is outside")));
}

TEST(Plan, EverySampleCanBePlannedAndAllMethodsHaveOne) {
  const char* source = std::getenv("UPIPE_SOURCE_DIR");
  ASSERT_NE(source, nullptr) << "run through ctest";
  std::vector<std::string> methods;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat(source, "/deploy/samples"))) {
    if (entry.path().extension() != ".yaml") continue;
    auto spec = ReadJobSpecFile(entry.path().string());
    ASSERT_TRUE(spec.ok()) << spec.status();
    // The plan's time grows with the tokens of a rank, what can be refused does not.
    spec->mutable_train()->set_context(std::min<int64_t>(spec->train().context(), 16384));
    const auto plan = MakeRunPlan(*spec, {.check_data = false});
    ASSERT_TRUE(plan.ok()) << entry.path() << ": " << plan.status();
    methods.push_back(MethodName(spec->parallel().method()));
  }
  for (const char* method : {"upipe", "ulysses", "ring", "usp", "fpdt"}) {
    EXPECT_THAT(methods, Contains(method));
  }
}

}  // namespace
}  // namespace upipe::planner
