// Training on a GPU that is played: our CUDA kernels run whole steps of every method on the
// emulator, held to one rank of the reference, to their own bits, and to the bytes planned for
// them.
#include <gtest/gtest.h>

#include <ostream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "tests/invariance/engine/method_space.h"
#include "tests/support/cuda_emulator/emulated_device.h"

namespace upipe::testing {
namespace {

const bool kPlayed = [] {
  PlayBackend("cuda", kernels::CreateEmulatedCudaDevice);
  return true;
}();

// A model as small as one with everything in it can be.
SmallJob Tiny(v1::Method method, int ranks) {
  return {.ranks = ranks,
          .num_heads = 4,
          .num_kv_heads = 2,
          .head_dim = 8,
          .hidden_size = 16,
          .intermediate_size = 16,
          .vocab_size = 19,
          .num_layers = 1,
          .context = 21,
          .method = method,
          .backend = "cuda"};
}

std::vector<NamedCase> Cases() {
  std::vector<NamedCase> cases;
  const auto add = [&](const char* name, SmallJob job) { cases.push_back({name, {job}}); };
  SmallJob one = Tiny(v1::METHOD_UPIPE, 1);
  add("one_rank", one);
  one.bf16 = true;
  one.qk_norm = true;
  add("one_rank_bf16", one);
  SmallJob upipe = Tiny(v1::METHOD_UPIPE, 2);
  upipe.qkv_bias = true;
  upipe.tie_embeddings = true;
  add("upipe", upipe);
  upipe.bf16 = true;
  upipe.documents = v1::DOCUMENTS_RESTART;
  upipe.overlap = true;
  add("upipe_bf16_packed_overlap", upipe);
  SmallJob usp = Tiny(v1::METHOD_USP, 4);
  usp.ring_ranks = 2;
  usp.bf16 = true;
  add("usp_bf16", usp);
  SmallJob ring = Tiny(v1::METHOD_RING, 3);
  ring.documents = v1::DOCUMENTS_SEPARATE;
  ring.window = 9;
  add("ring_packed_window", ring);
  SmallJob fpdt = Tiny(v1::METHOD_FPDT, 2);
  fpdt.query_chunks = 2;
  fpdt.num_layers = 2;
  fpdt.stride = 2;
  fpdt.optimizer = v1::PLACE_HOST;
  add("fpdt_offload", fpdt);
  fpdt.bf16 = true;
  fpdt.documents = v1::DOCUMENTS_RESTART;
  fpdt.attention_output = v1::ATTENTION_OUTPUT_HOST;
  add("fpdt_offload_bf16_packed", fpdt);
  SmallJob data = Tiny(v1::METHOD_ULYSSES, 4);
  data.fsdp_ranks = 2;
  data.accumulation = 2;
  data.bf16 = true;
  add("ulysses_fsdp_bf16", data);
  return cases;
}

class EmulatedCuda : public ::testing::TestWithParam<NamedCase> {};

// The threads of a block take turns in the other order, too.
Adjust HostileAndDescending(uint64_t seed) {
  return [hostile = Hostile(seed)](int rank, kernels::DeviceOptions& options) {
    hostile(rank, options);
    options.num_threads = 2;
  };
}

TEST_P(EmulatedCuda, TrainsAsOneRankOfTheReference) {
  const MethodCase& c = GetParam().test;
  const std::vector<Sequence> sequences = SequencesOf(c);
  SmallJob on_cpu = c.job;
  on_cpu.backend = "cpu";
  const auto reference = ReferenceOf(on_cpu, sequences);
  ASSERT_TRUE(reference.ok()) << reference.status();
  const auto outcome = RunOnce(c);
  ASSERT_TRUE(outcome.ok()) << outcome.status();
  ExpectWithinBound(*outcome, **reference);
  const auto again = RunOnce(c, HostileAndDescending(3));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(SameBits(*again, *outcome)) << "with delays, poison and threads in the other order";
}

void ExpectAsPlanned(const kernels::MemoryStats& measured, const v1::MemoryUsage& planned) {
  EXPECT_EQ(measured.peak_total_bytes, planned.peak_bytes());
  EXPECT_EQ(measured.arena_high_water_bytes, planned.arena_bytes());
  EXPECT_EQ(measured.attention_peak_bytes, planned.attention_peak_bytes());
  for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
    EXPECT_EQ(measured.peak_bytes[tag], planned.tags(tag).peak_bytes())
        << kernels::kMemoryTagNames[tag];
  }
}

// In arenas of exactly the bytes of the plan, which the stand-in for a CUDA device counted.
TEST_P(EmulatedCuda, TakesTheBytesThatWerePlanned) {
  const MethodCase& c = GetParam().test;
  const auto plan = MakePlan(MakeSpec(c.job));
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->attention_kernel(), c.job.bf16 ? "cuda own bf16" : "cuda own fp32");
  const std::vector<Sequence> sequences = SequencesOf(c);
  const absl::Status status = RunRanks({.plan = *plan}, [&](Rank rank) -> absl::Status {
    UPIPE_RETURN_IF_ERROR(RunStep(rank, 1, sequences).status());
    kernels::Device& device = rank.context.device();
    const v1::RankPlan& planned = plan->ranks(rank.rank);
    ExpectAsPlanned(device.allocator().stats(), planned.memory());
    ExpectAsPlanned(device.host_allocator().stats(), planned.host_memory());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(EveryMethod, EmulatedCuda, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace upipe::testing
