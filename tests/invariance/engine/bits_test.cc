// What must not change a single bit of loss, logits or gradients: when threads run, where memory
// lies and how soon it is reused, overlap, where things wait. And what may only change where sums
// are rounded: the ways of the ring.
#include <gtest/gtest.h>

#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"
#include "tests/invariance/engine/method_space.h"

namespace upipe::testing {

namespace {

Outcome Must(absl::StatusOr<Outcome> outcome) {
  EXPECT_TRUE(outcome.ok()) << outcome.status();
  return outcome.ok() ? *std::move(outcome) : Outcome();
}

class Bits : public ::testing::TestWithParam<NamedCase> {
 protected:
  static MethodCase Packed(DocumentBounds bounds = DocumentBounds::kUneven) {
    MethodCase c = GetParam().test;
    c.job.documents = v1::DOCUMENTS_RESTART;
    c.bounds = bounds;
    return c;
  }
  // The same numbers with another memory policy, on a device that hides nothing.
  static void ExpectSamePolicies(const MethodCase& base,
                                 const std::vector<std::pair<const char*, SmallJob>>& policies) {
    const Outcome plain = Must(RunOnce(base));
    for (const auto& [name, job] : policies) {
      if (!ValidateJobSpec(MakeSpec(job)).empty()) continue;
      EXPECT_TRUE(SameBits(Must(RunOnce(job, SequencesOf(base), Hostile(3))), plain)) << name;
    }
  }
};

TEST_P(Bits, TheSameTwiceUnderAnyTiming) {
  for (const bool overlap : {false, true}) {
    MethodCase c = Packed();
    c.job.overlap = overlap;
    c.job.bf16 = overlap;
    if (!overlap) c.job.accumulation = 2;
    if (!overlap && c.job.ranks <= 4) {
      c.job.ranks *= 2;
      c.job.dp_ranks = 2;
    }
    const Outcome once = Must(RunOnce(c));
    EXPECT_GT(once.loss, 0);
    EXPECT_TRUE(SameBits(Must(RunOnce(c)), once)) << "a second run";
    for (uint64_t seed : {1, 2}) {
      EXPECT_TRUE(SameBits(Must(RunOnce(c, Hostile(seed))), once)) << "delays of seed " << seed;
    }
  }
}

TEST_P(Bits, OverlapChangesNothing) {
  for (const bool bf16 : {false, true}) {
    MethodCase c = Packed();
    c.job.bf16 = bf16;
    const Outcome off = Must(RunOnce(c));
    c.job.overlap = true;
    EXPECT_TRUE(SameBits(Must(RunOnce(c, Hostile(5))), off)) << (bf16 ? "bf16" : "fp32");
  }
}

TEST_P(Bits, WhereThingsLiveChangesNothing) {
  MethodCase base = Packed(DocumentBounds::kOnShards);
  base.job.num_layers = 3;
  const bool fpdt = base.job.method == v1::METHOD_FPDT;
  SmallJob inputs = base.job, output = base.job, output_host = base.job, hidden = base.job,
           optimizer = base.job, stride = base.job;
  inputs.layer_inputs = v1::PLACE_HOST;
  if (!fpdt) output.attention_output = v1::ATTENTION_OUTPUT_DEVICE;
  output_host.attention_output = v1::ATTENTION_OUTPUT_HOST;
  hidden.layer_inputs = hidden.hidden_stream = v1::PLACE_HOST;
  optimizer.optimizer = v1::PLACE_HOST;
  stride.stride = 2;
  SmallJob all = hidden;
  all.attention_output = v1::ATTENTION_OUTPUT_HOST;
  all.optimizer = v1::PLACE_HOST;
  all.stride = 3;
  all.overlap = true;
  ExpectSamePolicies(base, {{"layer inputs on the host", inputs},
                            {"attention output kept", output},
                            {"attention output on the host", output_host},
                            {"hidden stream on the host", hidden},
                            {"optimizer on the host", optimizer},
                            {"stride 2", stride},
                            {"all together, stride 3, overlap", all}});
}

INSTANTIATE_TEST_SUITE_P(OnePerMethod, Bits, ::testing::ValuesIn(OneCasePerMethod()),
                         [](const auto& info) { return info.param.name; });

// Every stage fetches and releases: under overlap, slots of keys and values, of gradients, rooms of
// the ring and parts on the device pass from stage to stage while the side stream still sends.
TEST(Overlap, ChangesNothingWhereEveryStageFetches) {
  struct Layout {
    const char* name;
    int ulysses, ring;
    int64_t chunks;
    bool keep = false;
    std::optional<v1::Place> stage_kv = {};
    std::optional<int64_t> window = {};  // chunks are seen last by one that is not the last
  };
  for (const Layout& layout : {Layout{"whole", 2, 1, 1},
                               {"whole, chunks", 2, 1, 2},
                               {"pass", 2, 2, 1},
                               {"pass, chunks", 1, 3, 2},
                               {"keep", 2, 2, 1, true},
                               {"host", 2, 1, 3, false, v1::PLACE_HOST},
                               {"host, one chunk", 2, 1, 1, false, v1::PLACE_HOST},
                               {"host, window", 2, 1, 4, false, v1::PLACE_HOST, 5}}) {
    for (const bool bf16 : {false, true}) {
      SCOPED_TRACE(absl::StrCat(layout.name, bf16 ? ", bf16" : ", fp32"));
      MethodCase c{.job = {.ranks = layout.ulysses * layout.ring,
                           .num_heads = 6,
                           .num_kv_heads = 6,
                           .context = 45,
                           .bf16 = bf16,
                           .ring_ranks = layout.ring}};
      c.job.query_chunks = layout.chunks;
      c.job.ring_keep = layout.keep;
      c.job.stage_kv = layout.stage_kv;
      c.job.window = layout.window;
      const Outcome off = Must(RunOnce(c));
      c.job.overlap = true;
      for (const uint64_t seed : {6, 7}) {
        EXPECT_TRUE(SameBits(Must(RunOnce(c, Hostile(seed))), off)) << "delays of seed " << seed;
      }
      ExpectMatchesOneRank(c);
    }
  }
}

// Forward, K/V that pass and K/V that are kept meet the queries in the same order.
TEST(RingKv, PassAndKeepGiveTheSameForwardBits) {
  for (const auto& [ulysses, ring] : {std::pair{1, 2}, {2, 2}, {2, 3}, {1, 4}}) {
    for (const int64_t chunks : {1, 2}) {
      MethodCase c{.job = {.ranks = ulysses * ring,
                           .num_heads = 6,
                           .num_kv_heads = 3,
                           .context = 61,
                           .ring_ranks = ring,
                           .query_chunks = chunks}};
      const Outcome pass = Must(RunOnce(c));
      c.job.ring_keep = true;
      const Outcome keep = Must(RunOnce(c));
      EXPECT_EQ(keep.loss, pass.loss) << ulysses << " x " << ring << ", n " << chunks;
      EXPECT_EQ(keep.tensors.at("logits 0"), pass.tensors.at("logits 0"));
      ExpectMatchesOneRank(c);
    }
  }
}

// One stage is a stage: ulysses is the upipe point u = ceil(H / C), ring the one C = 1, usp both.
TEST(MethodNames, ArePointsOfOneSpace) {
  struct Named {
    v1::Method method;
    int ulysses, ring;
  };
  for (const Named& n :
       {Named{v1::METHOD_ULYSSES, 4, 1}, {v1::METHOD_RING, 1, 3}, {v1::METHOD_USP, 2, 2}}) {
    for (const bool bf16 : {false, true}) {
      MethodCase named{.job = {.ranks = n.ulysses * n.ring,
                               .num_heads = 7,
                               .num_kv_heads = 1,
                               .context = 45,
                               .method = n.method,
                               .qk_norm = bf16,
                               .qkv_bias = !bf16,
                               .bf16 = bf16,
                               .ring_ranks = n.method == v1::METHOD_USP ? n.ring : 1}};
      MethodCase point = named;
      point.job.method = v1::METHOD_UPIPE;
      point.job.ring_ranks = n.ring;
      point.job.heads_per_rank = (7 + n.ulysses - 1) / n.ulysses;
      EXPECT_TRUE(SameBits(Must(RunOnce(named)), Must(RunOnce(point))))
          << n.ulysses << " x " << n.ring << " ranks";
    }
  }
}

// fpdt is ulysses in chunks with everything waiting on the host.
TEST(MethodNames, FpdtIsUlyssesInChunksOnTheHost) {
  MethodCase c{.job = {.ranks = 2, .num_heads = 4, .num_kv_heads = 2, .context = 45}};
  c.job.query_chunks = 3;
  c.job.method = v1::METHOD_FPDT;
  const Outcome fpdt = Must(RunOnce(c));
  c.job.method = v1::METHOD_ULYSSES;
  c.job.layer_inputs = c.job.hidden_stream = c.job.stage_kv = v1::PLACE_HOST;
  EXPECT_TRUE(SameBits(Must(RunOnce(c)), fpdt));
}

}  // namespace
}  // namespace upipe::testing
