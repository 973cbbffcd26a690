#include "tests/kernels/kernels/support/attention_case.h"

#include <cmath>
#include <ostream>

#include "common/check.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

int64_t Length(PositionRun run) { return run.end - run.begin; }

AttentionMask MaskOf(const AttentionCase& c) {
  const int64_t total = std::max({c.queries.end, c.keys.end, c.document_starts.back() + 1});
  return {c.causal, c.window, std::make_shared<const std::vector<int64_t>>(c.document_starts),
          total};
}

float ScaleOf(const AttentionCase& c) {
  const double scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  return static_cast<float>(c.negative_scale ? -scale : scale);
}

// Head sizes, head groups, scores.
std::vector<AttentionCase> ShapeCases() {
  return {
      // Many heads, so that a norm over their results means something.
      {.name = "OneToken",
       .queries = {0, 1},
       .keys = {0, 1},
       .head_dim = 20,
       .kv_slot = std::vector<int32_t>(32)},
      {.name = "HeadDim1", .queries = {0, 37}, .keys = {0, 37}, .head_dim = 1},
      {.name = "HeadDim13", .queries = {0, 70}, .keys = {0, 70}, .head_dim = 13},
      {.name = "HeadDim64", .queries = {0, 300}, .keys = {0, 300}, .head_dim = 64},
      {.name = "HeadDim80", .queries = {0, 150}, .keys = {0, 150}, .head_dim = 80},
      {.name = "HeadDim128", .queries = {0, 257}, .keys = {0, 257}, .head_dim = 128},
      {.name = "HeadDim200", .queries = {0, 90}, .keys = {0, 90}, .head_dim = 200},
      {.name = "HeadDim256", .queries = {0, 90}, .keys = {0, 90}, .head_dim = 256},
      {.name = "Full", .queries = {0, 130}, .keys = {0, 130}, .causal = false},
      {.name = "GroupedHeadsWithGaps",
       .queries = {0, 90},
       .keys = {0, 90},
       .kv_slot = {1, 0, 1, 3, 1},
       .slots = 4,
       .gap = 3},
      {.name = "NegativeScale", .queries = {0, 70}, .keys = {0, 70}, .negative_scale = true},
      {.name = "HugeScores", .queries = {0, 100}, .keys = {0, 100}, .score_scale = 1e4},
      {.name = "NoHeads", .queries = {0, 4}, .keys = {0, 4}, .kv_slot = {}},
  };
}

// Runs of one document, windows.
std::vector<AttentionCase> RunCases() {
  return {
      {.name = "LaterQueries", .queries = {100, 165}, .keys = {0, 140}},
      {.name = "EarlierQueriesSeeNothing", .queries = {0, 65}, .keys = {65, 100}},
      {.name = "SomeQueriesSeeNothing", .queries = {20, 120}, .keys = {70, 200}},
      {.name = "Window", .queries = {0, 300}, .keys = {0, 300}, .window = 50},
      {.name = "WindowOfOne", .queries = {0, 70}, .keys = {0, 70}, .window = 1},
      {.name = "WindowBothWays",
       .queries = {0, 200},
       .keys = {0, 200},
       .causal = false,
       .window = 33},
      {.name = "WindowLeavesKeysBehind", .queries = {150, 260}, .keys = {0, 180}, .window = 60},
      {.name = "EndlessWindow", .queries = {0, 40}, .keys = {0, 40}, .window = INT64_MAX},
      {.name = "NoQueries", .queries = {5, 5}, .keys = {0, 10}},
      {.name = "NoKeys", .queries = {0, 40}, .keys = {3, 3}},
      {.name = "KeysBeforeTheWindow", .queries = {200, 260}, .keys = {0, 100}, .window = 50},
      {.name = "OneQueryOfMany",
       .queries = {700, 701},
       .keys = {0, 300},
       .head_dim = 24,
       .kv_slot = std::vector<int32_t>(8)},
      {.name = "AccumulateDq", .queries = {0, 80}, .keys = {10, 60}, .accumulate_dq = true},
  };
}

std::vector<AttentionCase> DocumentCases() {
  return {
      {.name = "Documents",
       .queries = {0, 260},
       .keys = {0, 260},
       .document_starts = {0, 1, 2, 66, 130, 131, 250}},
      {.name = "DocumentsFull",
       .queries = {0, 200},
       .keys = {0, 200},
       .causal = false,
       .document_starts = {0, 64, 65, 190}},
      {.name = "DocumentsAndRuns",
       .queries = {50, 170},
       .keys = {30, 130},
       .window = 40,
       .document_starts = {0, 45, 100, 101, 160}},
      {.name = "DocumentsOneEach",
       .queries = {0, 40},
       .keys = {0, 40},
       .causal = false,
       .document_starts =
           [] {
             std::vector<int64_t> starts(40);
             for (int64_t i = 0; i < 40; ++i) starts[i] = i;
             return starts;
           }()},
      {.name = "DisjointDocuments",
       .queries = {40, 110},
       .keys = {0, 40},
       .causal = false,
       .document_starts = {0, 40}},
      {.name = "OneQueryAtTheEndOfItsDocument",
       .queries = {99, 100},
       .keys = {70, 140},
       .kv_slot = std::vector<int32_t>(8),
       .causal = false,
       .document_starts = {0, 77, 100}},
      {.name = "FullRunsWithDocumentsInside",
       .queries = {70, 203},
       .keys = {150, 299},
       .causal = false,
       .document_starts = {0, 100, 180, 260}},
      {.name = "FullRunsWithWindow",
       .queries = {70, 203},
       .keys = {150, 280},
       .causal = false,
       .window = 64,
       .document_starts = {0, 160}},
      {.name = "Peers26_PaddingAloneMeetsItself",
       .queries = {96, 128},
       .keys = {64, 128},
       .document_starts = {0, 90}},
      {.name = "Peers41_PositionsBeyond32Bits",
       .queries = {(int64_t{1} << 33) + 5, (int64_t{1} << 33) + 75},
       .keys = {(int64_t{1} << 33) - 60, (int64_t{1} << 33) + 30},
       .window = 50,
       .document_starts = {0, int64_t{1} << 32, (int64_t{1} << 33) - 20}},
  };
}

}  // namespace

void PrintTo(const AttentionCase& c, std::ostream* out) { *out << c.name; }

std::vector<AttentionCase> AttentionCases() {
  std::vector<AttentionCase> cases = ShapeCases();
  for (const std::vector<AttentionCase>& more : {RunCases(), DocumentCases()}) {
    cases.insert(cases.end(), more.begin(), more.end());
  }
  return cases;
}

AttentionFwdParams ForwardCall(const AttentionCase& c, Memory& memory) {
  const int64_t heads = c.kv_slot.size(), d = c.head_dim, q = Length(c.queries), k = Length(c.keys);
  AttentionFwdParams p = {.q = memory.Input({{q, heads, d}, c.gap}, c.score_scale),
                          .k = memory.Input({{k, c.slots, d}, c.gap}),
                          .v = memory.Input({{k, c.slots, d}, c.gap}),
                          .kv_slot = c.kv_slot,
                          .queries = c.queries,
                          .keys = c.keys,
                          .mask = MaskOf(c),
                          .scale = ScaleOf(c),
                          .merge = c.merge};
  const Memory::Shape o = {{q, heads, d}, c.gap}, lse = {{heads, q}, c.gap};
  if (!c.merge) {
    p.o = memory.Output("o", o, c.wide_output ? kW : memory.storage());
    p.lse = memory.Output("lse", lse, kW);
    return p;
  }
  p.o = memory.InOut("o", o, 1, kW);
  p.lse = memory.InOut("lse", lse, 3, kW);
  for (int64_t t = 0; t < q; t += 3) {
    for (int64_t h = 0; h < heads; ++h) {
      SetElement(p.lse, h, t, 0, -INFINITY);
      for (int64_t e = 0; e < d; ++e) SetElement(p.o, t, h, e, 0);
    }
  }
  return p;
}

AttentionBwdParams BackwardCall(const AttentionCase& c, Memory& memory) {
  const int64_t heads = c.kv_slot.size(), d = c.head_dim, q = Length(c.queries), k = Length(c.keys);
  AttentionBwdParams p = {.q = memory.Input({{q, heads, d}, c.gap}, c.score_scale),
                          .k = memory.Input({{k, c.slots, d}, c.gap}),
                          .v = memory.Input({{k, c.slots, d}, c.gap}),
                          .dout = memory.Input({{q, heads, d}, c.gap}),
                          .dk = memory.InOut("dk", {{k, c.slots + 1, d}, c.gap}, 1, kW),
                          .dv = memory.InOut("dv", {{k, c.slots + 1, d}, c.gap}, 1, kW),
                          .kv_slot = c.kv_slot,
                          .queries = c.queries,
                          .keys = c.keys,
                          .mask = MaskOf(c),
                          .scale = ScaleOf(c),
                          .accumulate_dq = c.accumulate_dq};
  for (int32_t slot : c.kv_slot) p.grad_slot.push_back(static_cast<int32_t>(c.slots) - slot);
  const Memory::Shape dq = {{q, heads, d}, c.gap};
  p.dq = c.accumulate_dq ? memory.InOut("dq", dq, 1, kW) : memory.Output("dq", dq, kW);
  // The forward that came before, in memory of its own.
  Memory forward(0, memory.storage());
  const TensorView o = forward.Output("o", {{q, heads, d}}),
                   lse = forward.Output("lse", {{heads, q}}, kW);
  const TensorView delta = forward.Output("delta", {{q, heads}}, kW);
  UPIPE_CHECK_OK(RunCall(
      Reference(),
      AttentionFwdParams{p.q, p.k, p.v, o, lse, p.kv_slot, p.queries, p.keys, p.mask, p.scale},
      forward));
  UPIPE_CHECK_OK(RunCall(Reference(), RowDotParams{p.dout, o, delta}, forward));
  p.lse = memory.Input({{heads, q}, c.gap}, 1, kW);
  p.delta = memory.Input({{q, heads}, c.gap}, 1, kW);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < q; ++t) {
      SetElement(p.lse, h, t, 0, GetElement(lse, h, t));
      SetElement(p.delta, t, h, 0, GetElement(delta, t, h));
    }
  }
  if (Tested().AttentionBwdReadsOutput()) {
    p.o = memory.Input({{q, heads, d}, c.gap});
    CopyElements(o, p.o);
  }
  memory.Seal();
  return p;
}

}  // namespace upipe::kernels::testing
