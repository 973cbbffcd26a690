// Attention in pieces, as rings and chunks run it: any split of the keys and the queries, in any
// order, against the one call; and runs that do not meet, which must cost nothing.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/address_space.h"
#include "tests/kernels/kernels/support/attention_case.h"
#include "tests/kernels/kernels/support/attention_pieces.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

// Every way of cutting keeps the result within the bound of the one call, and the same way twice
// gives the same bits.
template <typename Build>
void ExpectCutsMatchOneCall(DType storage, const AttentionCase& c, const Build& build) {
  Memory memory(11, storage);
  const auto p = build(c, memory);
  memory.Seal();
  const Cut whole = {{p.queries}, {p.keys}};
  const auto reference = ResultsOf(Reference(), p, whole, memory);
  const auto naive = ResultsOf(Naive(), p, whole, memory);
  std::mt19937 random(5);
  for (const int64_t pieces : {2, 3, 5}) {
    Cut cut = {Split(p.queries, pieces == 3 ? 1 : 2), Split(p.keys, pieces)};
    for (const char* order : {"ascending", "descending", "shuffled"}) {
      if (order[0] == 'd') std::reverse(cut.keys.begin(), cut.keys.end());
      if (order[0] == 's') std::shuffle(cut.keys.begin(), cut.keys.end(), random);
      const std::string what = std::to_string(pieces) + " pieces, " + order;
      ExpectWithinTheBound(ResultsOf(Reference(), p, cut, memory), naive, reference, what);
      const auto expect_tested = [&](const std::string& variant) {
        ExpectWithinTheBound(ResultsOf(Tested(), p, cut, memory), naive, reference,
                             what + ", " + variant);
      };
      if (order[0] == 's') {
        ForEachVariant(expect_tested, storage);
      } else {
        expect_tested("best");
      }
      cut.threads = 3;
      const auto once = ResultsOf(Tested(), p, cut, memory);
      ExpectWithinTheBound(once, naive, reference, what + ", 3 threads");
      ExpectSameBits(once, ResultsOf(Tested(), p, cut, memory), what + ", run twice");
      cut.threads = 1;
    }
  }
}

std::vector<AttentionCase> RunCases() {
  const AttentionCase base = {
      .queries = {90, 250}, .keys = {0, 290}, .kv_slot = {0, 1, 0}, .slots = 2, .gap = 3};
  std::vector<AttentionCase> cases;
  const auto add = [&](const char* name, auto change) {
    AttentionCase c = base;
    c.name = name;
    change(c);
    cases.push_back(c);
  };
  add("Causal", [](AttentionCase&) {});
  add("CausalWindow", [](AttentionCase& c) { c.window = 37; });
  add("CausalDocuments", [](AttentionCase& c) { c.document_starts = {0, 50, 120, 121, 200}; });
  add("CausalWindowDocuments", [](AttentionCase& c) {
    c.window = 70;
    c.document_starts = {0, 95, 201};
  });
  add("Full", [](AttentionCase& c) { c.causal = false; });
  add("FullWindow", [](AttentionCase& c) {
    c.causal = false;
    c.window = 45;
  });
  add("FullDocuments", [](AttentionCase& c) {
    c.causal = false;
    c.document_starts = {0, 60, 150, 260};
  });
  add("LongHeads", [](AttentionCase& c) { c.head_dim = 72; });
  add("HugeScores", [](AttentionCase& c) { c.score_scale = 300; });
  return cases;
}

class AttentionRuns : public ::testing::TestWithParam<AttentionCase> {};

TEST_P(AttentionRuns, Peers38_MergedPiecesEqualOneCall) {
  ForEachStorage([](DType storage) {
    ExpectCutsMatchOneCall(storage, GetParam(), [](AttentionCase c, Memory& memory) {
      c.wide_output = true;
      return ForwardCall(c, memory);
    });
  });
}

TEST_P(AttentionRuns, Peers27_GradientsOfPiecesEqualOneCall) {
  ForEachStorage([](DType storage) {
    ExpectCutsMatchOneCall(storage, GetParam(), [](const AttentionCase& c, Memory& memory) {
      return BackwardCall(c, memory);
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Masks, AttentionRuns, ::testing::ValuesIn(RunCases()),
                         [](const auto& info) { return info.param.name; });

// Every element of the row = value.
void FillRow(const TensorView& view, int64_t i, double value) {
  for (int64_t j = 0; j < view.shape[1]; ++j) {
    for (int64_t e = 0; e < view.shape[2]; ++e) SetElement(view, i, j, e, value);
  }
}

// A score is rounded about four times on its way into lse: products, scale, maximum, result.
constexpr double kScoreRounding = 4 * 0x1p-24;

// 40 queries, 80 keys in two runs of 40 whose scores are all `first` and all `second`.
AttentionFwdParams TwoScores(double first, double second, Memory& memory) {
  AttentionFwdParams p = ForwardCall(
      {.queries = {80, 120}, .keys = {0, 80}, .head_dim = 16, .wide_output = true}, memory);
  p.scale = 1;
  for (int64_t i = 0; i < 40; ++i) FillRow(p.q, i, 25);
  for (int64_t j = 0; j < 80; ++j) FillRow(p.k, j, (j < 40 ? first : second) / (25 * 16));
  memory.Seal();
  return p;
}

// e^10000 is no number of any kind: the run of low scores leaves no trace, whichever comes first.
TEST(AttentionMerge, Peers39_MergeDoesNotOverflow) {
  ForEachStorage([](DType storage) {
    ForEachVariant([&](const std::string&) {
      for (OpTable* ops : {&Reference(), &Tested()}) {
        Memory memory(2, storage);
        const AttentionFwdParams p = TwoScores(1e4, -1e4, memory);
        const auto alone = ResultsOf(*ops, p, {{p.queries}, {{0, 40}}}, memory);
        EXPECT_NEAR(alone[1].values[0], 1e4 + std::log(40), 1e4 * kScoreRounding);
        const auto low_last = ResultsOf(*ops, p, {{p.queries}, {{0, 40}, {40, 80}}}, memory);
        ExpectSameBits(low_last, alone, "low scores last");
        const auto low_first = ResultsOf(*ops, p, {{p.queries}, {{40, 80}, {0, 40}}}, memory);
        ExpectSameBits(low_first, alone, "low scores first");
      }
    });
  });
}

// Both runs count the same: o is the mean of all values but for the rounding of lse at 10000, half
// of 2^-10, by which weights may be off.
TEST(AttentionMerge, Peers39_HugeScoresOnBothSidesShareTheWeight) {
  ForEachStorage([](DType storage) {
    for (const double score : {1e4, -1e4}) {
      for (OpTable* ops : {&Reference(), &Tested()}) {
        Memory memory(2, storage);
        const AttentionFwdParams p = TwoScores(score, score, memory);
        const auto merged = ResultsOf(*ops, p, {{p.queries}, {{0, 40}, {40, 80}}}, memory);
        const auto one_call = ResultsOf(Reference(), p, {{p.queries}, {p.keys}}, memory);
        EXPECT_LE(RelativeError(merged[0].values, one_call[0].values), 0x1p-10);
        EXPECT_LE(RelativeError(merged[1].values, one_call[1].values), kScoreRounding);
      }
    }
  });
}

// A run without a key for a query leaves its o and lse bit for bit, even where they hold nothing
// that attention would write; a query with lse = -infinity takes the run's result whatever o held.
TEST(AttentionMerge, UnseenRunsKeepEveryBitAndNoKeysYetIsNoWeight) {
  ForEachStorage([](DType storage) {
    ForEachVariant([&](const std::string&) {
      for (OpTable* ops : {&Reference(), &Tested()}) {
        Memory memory(3, storage);
        AttentionFwdParams p = ForwardCall(
            {.queries = {0, 90}, .keys = {40, 130}, .head_dim = 19, .wide_output = true}, memory);
        const auto alone = ResultsOf(*ops, p, {{p.queries}, {p.keys}}, memory);
        memory.Restore();
        for (int64_t t = 0; t < 90; ++t) {
          SetElement(p.lse, 0, t, 0, t < 40 ? 0.1 * static_cast<double>(t) : -INFINITY);
          for (int64_t e = 0; e < 19; ++e) SetElement(p.o, t, 0, e, t < 40 ? -1e-41 * e : NAN);
        }
        memory.Seal();
        auto expected = memory.Results();
        for (size_t i = 40 * 19; i < 90 * 19; ++i) expected[0].values[i] = alone[0].values[i];
        for (size_t t = 40; t < 90; ++t) expected[1].values[t] = alone[1].values[t];
        p.merge = true;
        ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
        ExpectSameBits(memory.Results(), expected, "merged");
      }
    });
  });
}

// A NaN of either side must reach the result.
TEST(AttentionMerge, NanOfEitherSideStaysNan) {
  ForEachStorage([](DType storage) {
    ForEachVariant([&](const std::string&) {
      for (const bool of_run : {false, true}) {
        Memory memory(4, storage);
        const AttentionFwdParams p =
            ForwardCall({.queries = {0, 60}, .keys = {0, 60}, .merge = true}, memory);
        if (of_run) {
          SetElement(p.k, 10, 0, 0, NAN);
        } else {
          SetElement(p.lse, 0, 10, 0, NAN);
        }
        memory.Seal();
        ASSERT_EQ(RunCall(Tested(), p, memory), absl::OkStatus());
        EXPECT_TRUE(std::isfinite(GetElement(p.o, 9, 0, 0)));
        EXPECT_TRUE(std::isnan(GetElement(p.o, 10, 0, 0)));
        EXPECT_TRUE(std::isnan(GetElement(p.lse, 0, 10)));
      }
    });
  });
}

// Error of o against the one call in fp64, after merging so many pieces; o is rounded to bf16 after
// each piece where asked.
double ErrorOfPieces(int64_t pieces, bool round_partials, DType storage) {
  Memory memory(6, storage);
  const AttentionFwdParams p = ForwardCall({.queries = {0, 64},
                                            .keys = {0, 1024},
                                            .head_dim = 32,
                                            .kv_slot = {0, 0, 0, 0},
                                            .causal = false,
                                            .wide_output = true},
                                           memory);
  const std::vector<double> reference =
      ResultsOf(Reference(), p, {{p.queries}, {p.keys}}, memory)[0].values;
  memory.Restore();
  for (int64_t i = 0; i < pieces; ++i) {
    AttentionFwdParams piece = PieceOf(p, p.queries, {1024 * i / pieces, 1024 * (i + 1) / pieces});
    piece.merge = i > 0;
    EXPECT_EQ(RunCall(Tested(), piece, memory), absl::OkStatus());
    if (!round_partials) continue;
    Memory rounded(1, DType::kBFloat16);
    const TensorView narrow = rounded.Output("o", {{64, 4, 32}});
    CopyElements(p.o, narrow);
    CopyElements(narrow, p.o);
  }
  return RelativeError(memory.Results()[0].values, reference);
}

// What fp32 partial results are for: 16 pieces are as good as one up to a few roundings of fp32,
// where bf16 partial results lose three decimal digits more with every ring.
TEST(AttentionMerge, Peers38_ErrorDoesNotGrowWithPieces) {
  constexpr double kRounding = 0x1p-24;
  ForEachStorage([](DType storage) {
    const double one = ErrorOfPieces(1, false, storage);
    const double bound = 1.1 * one + 16 * kRounding;
    EXPECT_LE(ErrorOfPieces(16, false, storage), bound);
    EXPECT_GT(ErrorOfPieces(16, true, storage), bound) << "the test would not notice";
  });
}

// Runs that do not meet are not looked at: no page of K or V may be touched, nor with merge or
// accumulate_dq any page of anything.
TEST(AttentionRunsApart, Peers26_CostNothing) {
  const std::vector<AttentionCase> cases = {
      {.name = "KeysAfterQueries", .queries = {0, 300}, .keys = {300, 600}},
      {.name = "OtherDocuments",
       .queries = {300, 600},
       .keys = {0, 300},
       .causal = false,
       .document_starts = {0, 100, 300}},
      {.name = "AllPadding",
       .queries = {0, 300},
       .keys = {500, 600},
       .causal = false,
       .document_starts = {0, 450}},
      {.name = "PaddingQueries",
       .queries = {450, 600},
       .keys = {0, 300},
       .document_starts = {0, 450}},
      {.name = "KeysBeforeTheWindow", .queries = {350, 600}, .keys = {0, 300}, .window = 51},
      {.name = "KeysBeyondTheWindow",
       .queries = {0, 250},
       .keys = {300, 600},
       .causal = false,
       .window = 51},
  };
  for (const AttentionCase& c : cases) {
    SCOPED_TRACE(c.name);
    ForEachStorage([&](DType storage) {
      ForEachVariant(
          [&](const std::string&) {
            Memory memory(1, storage);
            FarMemory far;
            AttentionFwdParams fwd = ForwardCall(c, memory);
            fwd.q = far.Forbidden(fwd.q);
            fwd.k = far.Forbidden(fwd.k);
            fwd.v = far.Forbidden(fwd.v);
            ASSERT_EQ(RunCall(Tested(), fwd, memory, 3), absl::OkStatus());
            const std::vector<Memory::Result> results = memory.Results();
            for (const double o : results[0].values) ASSERT_EQ(o, 0);
            for (const double lse : results[1].values) ASSERT_EQ(lse, -INFINITY);
            fwd.o.dtype = kW;
            fwd.o = far.Forbidden(fwd.o);
            fwd.lse = far.Forbidden(fwd.lse);
            fwd.merge = true;
            ASSERT_EQ(RunCall(Tested(), fwd, memory, 3), absl::OkStatus());

            AttentionBwdParams bwd = BackwardCall(c, memory);
            for (TensorView* view :
                 {&bwd.q, &bwd.k, &bwd.v, &bwd.dout, &bwd.lse, &bwd.delta, &bwd.dk, &bwd.dv}) {
              *view = far.Forbidden(*view);
            }
            ASSERT_EQ(RunCall(Tested(), bwd, memory, 3), absl::OkStatus());
            const Memory::Result dq = memory.Results().back();
            for (const double element : dq.values) ASSERT_EQ(element, 0);
            bwd.dq = far.Forbidden(bwd.dq);
            bwd.accumulate_dq = true;
            ASSERT_EQ(RunCall(Tested(), bwd, memory, 3), absl::OkStatus());
          },
          storage);
    });
  }
}

// Of runs that meet in part, only the keys that some query sees are touched, and in backward only
// the queries that see some key; `seen_keys` and `seen_queries` are those, from 0 in their tensors.
struct Partial {
  AttentionCase c;
  PositionRun seen_keys;
  PositionRun seen_queries;
};

TEST(AttentionRunsApart, TouchOnlyWhatMeets) {
  const std::vector<Partial> partials = {
      {{.name = "Causal", .queries = {100, 300}, .keys = {200, 500}}, {0, 100}, {100, 200}},
      {{.name = "Window", .queries = {300, 500}, .keys = {100, 400}, .window = 61},
       {140, 300},
       {0, 160}},
      {{.name = "FullWindow",
        .queries = {300, 350},
        .keys = {0, 600},
        .causal = false,
        .window = 21},
       {280, 370},
       {0, 50}},
      {{.name = "Document",
        .queries = {300, 500},
        .keys = {0, 600},
        .causal = false,
        .document_starts = {0, 277, 533}},
       {277, 533},
       {0, 200}},
      {{.name = "OneQuery", .queries = {300, 301}, .keys = {0, 600}, .window = 7},
       {294, 301},
       {0, 1}},
  };
  for (const Partial& partial : partials) {
    SCOPED_TRACE(partial.c.name);
    const auto [begin, end] = partial.seen_keys;
    const auto [first, last] = partial.seen_queries;
    ForEachStorage([&](DType storage) {
      ForEachVariant(
          [&](const std::string&) {
            Memory memory(1, storage), back(1, storage);
            FarMemory far;
            AttentionFwdParams fwd = ForwardCall(partial.c, memory);
            ASSERT_EQ(RunCall(Tested(), fwd, memory), absl::OkStatus());
            const auto near = memory.Results();
            memory.Restore();
            fwd.k = far.Guarded(fwd.k, begin, end);
            fwd.v = far.Guarded(fwd.v, begin, end);
            ASSERT_EQ(RunCall(Tested(), fwd, memory, 3), absl::OkStatus());
            ExpectSameBits(memory.Results(), near, "forward");

            AttentionBwdParams bwd = BackwardCall(partial.c, back);
            bwd.accumulate_dq = true;
            for (TensorView* view : {&bwd.k, &bwd.v, &bwd.dk, &bwd.dv}) {
              *view = far.Guarded(*view, begin, end);
            }
            for (TensorView* view : {&bwd.q, &bwd.dout, &bwd.dq}) {
              *view = far.Guarded(*view, first, last);
            }
            ASSERT_EQ(RunCall(Tested(), bwd, back, 3), absl::OkStatus());
          },
          storage);
    });
  }
}

}  // namespace
}  // namespace upipe::kernels::testing
