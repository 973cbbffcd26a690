// SCHEDULE's table of live sets, H = 32, K = 8, C = 8, u = 1 in bf16, in units of X: S1, S2 and S3
// with the own attention kernel and with cuDNN's; and the paper's two shapes against Ulysses. What
// the engine takes on the dry device, at a million tokens, to the byte.
#include <gtest/gtest.h>

#include <iostream>

#include "absl/strings/str_format.h"
#include "common/units.h"
#include "tests/memory/engine/layer_run.h"

namespace upipe::testing {
namespace {

using engine::Place;
using kernels::MemoryTag;

int64_t PeakOf(const PassMemory& pass, MemoryTag tag) {
  return pass.device.peak_bytes[static_cast<int>(tag)];
}

Point Llama8B() {
  return {.ulysses_ranks = 8,
          .heads_per_stage = 1,
          .num_heads = 32,
          .num_kv_heads = 8,
          .head_dim = 128,
          .hidden_size = 4096,
          .intermediate_size = 14336,
          .context = 1 << 20,
          .bf16 = true,
          .policy = {.layer_inputs = Place::kHost}};
}
Point S1() { return Llama8B(); }
Point S2() {
  Point point = S1();
  point.policy.hidden_stream = Place::kHost;
  return point;
}
Point S3(int64_t chunks) {
  Point point = S2();
  point.query_chunks = chunks;
  return point;
}

// A row of the table: quarters of X that stay and, of S3, quarters of X of which one chunk is held.
struct Row {
  const char* name;
  Point point;
  int64_t forward, forward_chunk;
  int64_t own, own_chunk;
  int64_t cudnn, cudnn_chunk;
};

// SCHEDULE's sums, in q = X / 4, O and dh being 4q and dk, dv of the own tokens 2q:
//   forward   q o staging, k v       S1 adds X O
//   backward  q dO dq(2) staging, k v dk(2) dv(2); cuDNN O dq, dk dv   S1 adds dh O dk,dv
Row RowS1() { return {"S1", S1(), 13, 0, 21, 0, 25, 0}; }  // 5.25 X, 6.25 X
Row RowS2() { return {"S2", S2(), 5, 0, 11, 0, 15, 0}; }   // 2.75 X, 3.75 X
Row RowS3() { return {"S3", S3(16), 2, 3, 6, 5, 8, 7}; }   // 1.5 X, 2 X + a chunk

class ScheduleTable : public ::testing::TestWithParam<Row (*)()> {};

// Of SCHEDULE's units but for what they leave out: log-sum-exp and delta (4 bytes of 2 D), tiles
// whose size does not grow with the context, and the own block, which is not staged (ADR 7).
int64_t Beside(const Point& p, bool backward) {
  const int64_t own_block = p.StageQuery() / p.ulysses_ranks / p.query_chunks;
  const int64_t delta_of_a_head = 4 * p.ChunkTokens();
  const int64_t delta = delta_of_a_head * (2 * p.ulysses_ranks - 1) / p.ulysses_ranks;
  return p.LogSumExp(0) + (backward ? delta : 0) - own_block;
}

double InX(const Point& point, int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(point.X());
}

TEST_P(ScheduleTable, IsWhatTheEngineTakes) {
  const Row row = GetParam()();
  const Point& p = row.point;
  const int64_t quarter = p.X() / 4, chunk = quarter / p.query_chunks;
  const auto own = RunLayerDry(p, 0, OwnAttentionKernel());
  const auto cudnn = RunLayerDry(p, 0, CudnnAttentionKernel());
  ASSERT_TRUE(own.ok() && cudnn.ok()) << own.status() << cudnn.status();
  // The moment of the forward peak at long contexts is a stage: the MLP's tiles are less.
  const int64_t tiles = PeakOf(own->attention_backward, MemoryTag::kWorkspace);
  EXPECT_LT(InX(p, tiles), 0.08);
  const int64_t forward =
      own->forward.device.attention_peak_bytes + PeakOf(own->forward, MemoryTag::kResidual);
  EXPECT_EQ(forward - Beside(p, false), row.forward * quarter + row.forward_chunk * chunk);
  const int64_t backward = own->attention_backward.device.attention_peak_bytes +
                           PeakOf(own->attention_backward, MemoryTag::kResidual);
  EXPECT_EQ(backward - Beside(p, true), row.own * quarter + row.own_chunk * chunk);
  // What the kernel takes beside its operands is the largest workspace by far.
  const int64_t with_cudnn = cudnn->attention_backward.device.peak_total_bytes;
  EXPECT_EQ(with_cudnn - Beside(p, true), row.cudnn * quarter + row.cudnn_chunk * chunk);
  std::cout << absl::StrFormat(
      "%s, H 32, K 8, C 8, u 1, n %d, 1M tokens, bf16, X %s: forward %.3f X; attention backward "
      "%.3f X with the own kernel (%.3f X with its tiles), %.3f X with cuDNN's; host %.3f X\n",
      row.name, p.query_chunks, FormatBytes(p.X()), InX(p, forward), InX(p, backward),
      InX(p, own->attention_backward.device.peak_total_bytes), InX(p, with_cudnn),
      InX(p, own->attention_backward.host.peak_total_bytes));
}

INSTANTIATE_TEST_SUITE_P(Rows, ScheduleTable, ::testing::Values(&RowS1, &RowS2, &RowS3),
                         [](const auto& info) { return info.param().name; });

// "MLP backward: O and dy; x streamed from its checkpoint": nothing else grows with the context.
TEST(MlpBackward, HoldsTheOutputAndItsGradient) {
  for (const auto& [point, x_units] : {std::pair(S1(), 2), std::pair(S2(), 0)}) {
    const auto memory = RunLayerDry(point, 0, OwnAttentionKernel());
    ASSERT_TRUE(memory.ok()) << memory.status();
    const PassMemory& pass = memory->mlp_backward;
    EXPECT_EQ(pass.device.peak_total_bytes - PeakOf(pass, MemoryTag::kMlp) -
                  PeakOf(pass, MemoryTag::kWorkspace),
              x_units * point.X() + point.LogSumExp(0));
    EXPECT_EQ(pass.host.peak_total_bytes, (3 - x_units) * point.X());
  }
}

// Host bytes of S2 and S3 in the attention backward: the layer's input, dh, O/dq, dk and dv.
TEST(HostBytes, AreTheHiddenStreamAndWhatIsStreamedWithIt) {
  for (const Point& point : {S2(), S3(16)}) {
    const auto memory = RunLayerDry(point, 0, OwnAttentionKernel());
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(memory->attention_backward.host.peak_total_bytes, point.X() * 7 / 2);
    EXPECT_EQ(memory->forward.host.peak_total_bytes, 2 * point.X());
  }
}

// "own stage 3 + 1 + 2 + 4 + 1 = 11q" in bf16, and "in an fp32 engine every fp32 item counts once:
// 8q", at u = 1.
TEST(Stage, OfTheBackwardIsElevenQInBf16AndEightInFp32) {
  for (const bool bf16 : {true, false}) {
    Point point = S2();
    point.bf16 = bf16;
    const auto memory = RunLayerDry(point, 0, OwnAttentionKernel());
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(memory->attention_backward.device.attention_peak_bytes - Beside(point, true),
              (bf16 ? 11 : 8) * point.StageQuery());
  }
}

// "With overlap on ... one more set of the next stage's inputs (q, and k, v when it fetches; in
// backward dO too)", and delta, which comes with dO. Every stage fetches here.
TEST(Overlap, TakesOneMoreSetOfTheNextStagesInputs) {
  for (const bool bf16 : {true, false}) {
    Point point = S2();
    point.num_kv_heads = point.num_heads;
    point.bf16 = bf16;
    const auto off = RunLayerDry(point, 0, OwnAttentionKernel());
    point.policy.overlap = true;
    const auto on = RunLayerDry(point, 0, OwnAttentionKernel());
    ASSERT_TRUE(off.ok() && on.ok()) << off.status() << on.status();
    const int64_t q = point.StageQuery(), delta = 4 * point.M();
    EXPECT_EQ(on->forward.device.attention_peak_bytes - off->forward.device.attention_peak_bytes,
              3 * q);
    EXPECT_EQ(on->attention_backward.device.attention_peak_bytes -
                  off->attention_backward.device.attention_peak_bytes,
              4 * q + delta);
  }
}

// "Released dK, dV return to a [N, 2*K*D] bf16 buffer; a head released by several ranks keeps an
// fp32 slot of 2*N*D until its last release": 12 heads in 6 groups on 4 ranks, two groups of which
// are cut: 24 + 16 bytes of N D.
TEST(ReturnedKv, IsOfTheStorageTypeWithFp32SlotsForHeadsInParts) {
  Point point = S2();
  point.ulysses_ranks = 4;
  point.num_heads = 12;
  point.num_kv_heads = 6;
  const auto memory = RunLayerDry(point, 0, OwnAttentionKernel());
  ASSERT_TRUE(memory.ok()) << memory.status();
  const auto grad = static_cast<int>(MemoryTag::kAttnGrad);
  EXPECT_EQ(memory->attention_backward.host.peak_bytes[grad], 40 * point.N() * point.head_dim);
}

// The paper's claim on this engine's own numbers: the query-sized buffers of a stage shrink by
// 1 - U/H. The resident [N, H * D] output, which both methods hold, is not one of them.
struct Stage {
  int64_t q, o, k_and_v, dout_and_dq;
  int64_t QuerySized() const { return 2 * q + o + dout_and_dq; }  // forward q, o; q, dO, dq
  int64_t Forward() const { return q + k_and_v + o; }
};

Stage StageOf(v1::Method method, int64_t heads) {
  Point point = Llama8B();
  point.method = method;
  point.num_heads = heads;
  point.bf16 = false;  // every item counts once
  const auto memory = RunLayerDry(point, 0, OwnAttentionKernel());
  EXPECT_TRUE(memory.ok()) << memory.status();
  const PassMemory &forward = memory->forward, &backward = memory->attention_backward;
  const int64_t k_and_v = PeakOf(forward, MemoryTag::kAttnKv);
  const int64_t returned = 4 * 2 * point.N() * point.num_kv_heads * point.head_dim;
  return {.q = PeakOf(forward, MemoryTag::kAttnQ),
          .o = PeakOf(forward, MemoryTag::kAttnOut) - point.HeadsOut() - point.LogSumExp(0),
          .k_and_v = k_and_v,
          .dout_and_dq = PeakOf(backward, MemoryTag::kAttnGrad) - returned - k_and_v};
}

void ExpectSavings(int64_t heads, double query_sized_percent, double forward_percent) {
  const Stage upipe = StageOf(v1::METHOD_UPIPE, heads);
  const Stage ulysses = StageOf(v1::METHOD_ULYSSES, heads);
  const auto saved = [](int64_t ours, int64_t theirs) {
    return 100 * (1 - static_cast<double>(ours) / static_cast<double>(theirs));
  };
  EXPECT_DOUBLE_EQ(saved(upipe.QuerySized(), ulysses.QuerySized()), query_sized_percent);
  EXPECT_DOUBLE_EQ(saved(upipe.Forward(), ulysses.Forward()), forward_percent);
  std::cout << absl::StrFormat(
      "H %d, K 8, C 8, 1M tokens, own fp32 kernel: query-sized stage buffers (forward q, o; "
      "backward q, dO, dq) of UPipe %s, of Ulysses %s: %.1f %% less; forward q, k, v, o %s and "
      "%s: %.1f %% less\n",
      heads, FormatBytes(upipe.QuerySized()), FormatBytes(ulysses.QuerySized()),
      saved(upipe.QuerySized(), ulysses.QuerySized()), FormatBytes(upipe.Forward()),
      FormatBytes(ulysses.Forward()), saved(upipe.Forward(), ulysses.Forward()));
}

// 1 - 8/64; q, k, v, o are 4 blocks of eight heads against 8 + 1 + 1 + 8.
TEST(PaperShapes, SixtyFourHeadsSave87PercentOfQuerySizedBuffers) {
  ExpectSavings(64, 100 * (1 - 8.0 / 64), 100 * (1 - 4.0 / 18));
}
// 1 - 8/32; against 4 + 1 + 1 + 4.
TEST(PaperShapes, ThirtyTwoHeadsSave75PercentOfQuerySizedBuffers) {
  ExpectSavings(32, 100 * (1 - 8.0 / 32), 100 * (1 - 4.0 / 10));
}

}  // namespace
}  // namespace upipe::testing
