// The peak of every tag, on the device and on the host, of one layer's forward, MLP backward and
// attention backward, for each method and memory policy, in fp32 and bf16: a formula each
// (layer_formula.h). A buffer that outgrows its formula by a byte fails.
#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/memory/engine/layer_run.h"

namespace upipe::testing {
namespace {

using engine::Place;

void ExpectTags(const kernels::TagBytes& measured, const kernels::TagBytes& formula,
                const char* where) {
  for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
    EXPECT_EQ(measured[tag], formula[tag]) << kernels::kMemoryTagNames[tag] << " on the " << where;
  }
}

void ExpectPass(const PassMemory& measured, const LiveSet& formula, const char* pass) {
  SCOPED_TRACE(pass);
  ExpectTags(measured.device.peak_bytes, formula.device, "device");
  ExpectTags(measured.host.peak_bytes, formula.host, "host");
  EXPECT_EQ(measured.device.attention_peak_bytes, formula.Attention());
  EXPECT_EQ(measured.device.peak_total_bytes, formula.device_total);
  EXPECT_EQ(measured.host.peak_total_bytes, formula.host_total);
}

struct Case {
  const char* name;
  Point point;
};
void PrintTo(const Case& c, std::ostream* out) { *out << Describe(c.point); }

class LayerLiveSet : public ::testing::TestWithParam<Case> {};

void ExpectLayer(const Point& point, int rank, std::unique_ptr<kernels::OpTable> kernel,
                 const LayerFormula& formula) {
  const auto memory = RunLayerDry(point, rank, std::move(kernel));
  ASSERT_TRUE(memory.ok()) << memory.status();
  ExpectPass(memory->forward, formula.Forward(), "forward");
  ExpectPass(memory->mlp_backward, formula.MlpBackward(), "MLP backward");
  ExpectPass(memory->attention_backward, formula.AttentionBackward(), "attention backward");
}

TEST_P(LayerLiveSet, EveryPassIsItsFormula) {
  for (const bool bf16 : {false, true}) {
    Point point = GetParam().point;
    point.bf16 = bf16;
    for (int rank = 0; rank < point.ranks(); ++rank) {
      SCOPED_TRACE(absl::StrCat(Describe(point), ", rank ", rank));
      ExpectLayer(point, rank, OwnAttentionKernel(), LayerFormula(point, rank, kOwnKernel));
      SCOPED_TRACE("cuDNN's kernel");
      ExpectLayer(point, rank, CudnnAttentionKernel(), LayerFormula(point, rank, kCudnn));
    }
  }
}

// Llama 3 8B's shape, narrower, on eight ranks.
Point Eight(v1::Method method, int ulysses, int ring, int64_t u) {
  return {.method = method,
          .ulysses_ranks = ulysses,
          .ring_ranks = ring,
          .heads_per_stage = u,
          .num_heads = 32,
          .num_kv_heads = 8,
          .head_dim = 16,
          .hidden_size = 512,
          .intermediate_size = 1024,
          .context = 1 << 14};
}

Point Upipe(int64_t u) { return Eight(v1::METHOD_UPIPE, 8, 1, u); }
Point Ulysses() { return Eight(v1::METHOD_ULYSSES, 8, 1, 0); }
Point Ring() { return Eight(v1::METHOD_RING, 1, 8, 0); }
Point Usp() { return Eight(v1::METHOD_USP, 4, 2, 0); }
Point Hybrid(int64_t u) { return Eight(v1::METHOD_UPIPE, 4, 2, u); }
Point Fpdt() {
  Point point = Eight(v1::METHOD_FPDT, 8, 1, 0);
  point.query_chunks = 4;
  point.policy = {
      .layer_inputs = Place::kHost, .hidden_stream = Place::kHost, .stage_kv = Place::kHost};
  return point;
}

Point InputsOnHost(Point point) {
  point.policy.layer_inputs = Place::kHost;
  return point;
}
Point HiddenOnHost(Point point) {
  point.policy.hidden_stream = Place::kHost;
  return InputsOnHost(point);
}
Point Chunks(Point point, int64_t chunks) {
  point.query_chunks = chunks;
  return point;
}
Point Overlap(Point point) {
  point.policy.overlap = true;
  return point;
}
Point Keep(Point point) {
  point.policy.ring_keeps_kv = true;
  return point;
}
Point KvOnHost(Point point) {
  point.policy.stage_kv = Place::kHost;
  return point;
}
Point Heads(Point point, int64_t heads, int64_t kv_heads) {
  point.num_heads = heads;
  point.num_kv_heads = kv_heads;
  return point;
}
Point Context(Point point, int64_t context) {
  point.context = context;
  return point;
}
// The tiles after the last stage are the peak.
Point Wide(Point point) {
  point.hidden_size = 4096;
  return Context(point, 4096);
}

INSTANTIATE_TEST_SUITE_P(
    Methods, LayerLiveSet,
    ::testing::Values(Case{"upipe", Upipe(1)}, Case{"upipe_two_heads", Upipe(2)},
                      Case{"upipe_all_heads", Upipe(4)}, Case{"ulysses", Ulysses()},
                      Case{"ring", Ring()}, Case{"usp_pass", Usp()}, Case{"usp_keep", Keep(Usp())},
                      Case{"ring_keep", Keep(Ring())}, Case{"hybrid", Hybrid(1)},
                      Case{"hybrid_two_heads", Hybrid(2)}, Case{"hybrid_keep", Keep(Hybrid(1))},
                      Case{"fpdt", Fpdt()}, Case{"upipe_chunks", Chunks(Upipe(1), 4)},
                      Case{"ring_chunks", Chunks(Ring(), 2)},
                      Case{"hybrid_chunks", Chunks(Hybrid(1), 4)},
                      Case{"upipe_kv_on_host", KvOnHost(Chunks(Upipe(1), 4))},
                      Case{"kv_on_host_in_one_chunk", KvOnHost(Upipe(1))}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Policies, LayerLiveSet,
    ::testing::Values(Case{"upipe_s1", InputsOnHost(Upipe(1))},
                      Case{"upipe_s2", HiddenOnHost(Upipe(1))},
                      Case{"upipe_s3", Chunks(HiddenOnHost(Upipe(1)), 8)},
                      Case{"ulysses_s2", HiddenOnHost(Ulysses())},
                      Case{"ring_s2", HiddenOnHost(Ring())}, Case{"usp_s2", HiddenOnHost(Usp())},
                      Case{"hybrid_keep_s3", Chunks(Keep(HiddenOnHost(Hybrid(1))), 4)},
                      Case{"one_tile_on_the_host", Context(HiddenOnHost(Upipe(1)), 4096)}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Overlap, LayerLiveSet,
    ::testing::Values(
        Case{"upipe", Overlap(Upipe(1))},
        Case{"fetching_every_stage", Overlap(Heads(Upipe(1), 32, 32))},
        Case{"fetching_every_second_stage", Overlap(Heads(Upipe(1), 64, 32))},
        Case{"ulysses", Overlap(Ulysses())}, Case{"ring", Overlap(Ring())},
        Case{"hybrid", Overlap(Hybrid(1))}, Case{"hybrid_keep", Overlap(Keep(Hybrid(1)))},
        Case{"fpdt", Overlap(Fpdt())},
        Case{"hybrid_fetching_every_stage", Overlap(Heads(Hybrid(1), 32, 32))},
        Case{"keep_fetching_every_stage", Overlap(Keep(Heads(Hybrid(1), 32, 32)))},
        Case{"host_fetching_every_stage", Overlap(KvOnHost(Chunks(Heads(Upipe(1), 32, 32), 4)))},
        Case{"host_straddling_groups", Overlap(KvOnHost(Chunks(Heads(Upipe(3), 64, 16), 2)))},
        Case{"upipe_s3", Overlap(Chunks(HiddenOnHost(Upipe(1)), 4))}),
    [](const auto& info) { return info.param.name; });

INSTANTIATE_TEST_SUITE_P(
    Heads, LayerLiveSet,
    ::testing::Values(Case{"paper_64_8", Heads(Upipe(1), 64, 8)},
                      Case{"u_divides_group", Heads(Upipe(2), 64, 8)},
                      Case{"group_divides_u", Heads(Upipe(4), 32, 16)},
                      Case{"u_straddles_groups", Heads(Upipe(3), 64, 16)},
                      Case{"as_many_kv_heads", Heads(Upipe(1), 16, 16)},
                      Case{"fewer_kv_heads_than_ranks", Heads(Upipe(1), 32, 2)},
                      Case{"one_kv_head", Heads(Ulysses(), 16, 1)},
                      Case{"heads28_on_8_ranks", Heads(Upipe(3), 28, 4)},
                      Case{"heads28_on_4_by_2", Heads(Hybrid(2), 28, 4)},
                      Case{"kv_heads_not_divisible", Heads(Hybrid(2), 12, 6)},
                      Case{"ranks_without_heads", Heads(Upipe(1), 3, 3)},
                      Case{"parts_of_heads_on_the_host", HiddenOnHost(Heads(Hybrid(1), 12, 6))},
                      Case{"parts_of_heads_in_a_wide_stream", Wide(Heads(Hybrid(1), 12, 6))},
                      Case{"padded", Context(Upipe(1), 13001)},
                      Case{"padded_ring", Context(Hybrid(1), 13001)}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace upipe::testing
