// The own attention kernels on the emulator against the reference: with rows that 16-byte copies
// take, bf16 runs on tiles and tensor cores; with others, and in fp32, the plain kernels run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "tests/kernels/kernels/support/address_space.h"
#include "tests/kernels/kernels/support/attention_case.h"
#include "tests/kernels/kernels/support/attention_pieces.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

using Alignment = Memory::Alignment;

// Number of loop threads with which the emulated table gives threads their turns from the last to
// the first.
constexpr int kDescending = 2;

// Of calls whose errors are taken together: plain kernels round too little to need many.
uint64_t SeedsOf(Alignment alignment) { return alignment == Alignment::kElement ? 1 : 2; }

// What a test runs on: fp32, bf16 that only plain kernels take, bf16 in tiles.
struct Rows {
  DType storage;
  Alignment alignment;
};
void ForEachRows(const std::function<void(Rows)>& body) {
  for (const Rows rows :
       {Rows{DType::kFloat32, Alignment::kElement}, Rows{DType::kBFloat16, Alignment::kElement},
        Rows{DType::kBFloat16, Alignment::kSixteenBytes}}) {
    SCOPED_TRACE(std::string(NameOf(rows.storage)) +
                 (rows.alignment == Alignment::kElement ? ", plain" : ", in tiles"));
    body(rows);
  }
}

// Within the bound of the reference, and the same bits again.
void ExpectMatchesReferenceOn(Rows rows, const BuildCall& build, uint64_t seeds = 1) {
  std::vector<Memory::Result> reference, naive, emulated;
  const auto append = [](std::vector<Memory::Result>& all, std::vector<Memory::Result> more) {
    if (all.empty()) return void(all = std::move(more));
    for (size_t i = 0; i < more.size(); ++i) {
      all[i].values.insert(all[i].values.end(), more[i].values.begin(), more[i].values.end());
    }
  };
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    Memory memory(seed, rows.storage, rows.alignment);
    const OpParams params = build(memory);
    memory.Seal();
    const auto results = [&](OpTable& ops, int threads = 1) {
      memory.Restore();
      EXPECT_EQ(RunCall(ops, params, memory, threads), absl::OkStatus());
      return memory.Results();
    };
    append(reference, results(Reference()));
    append(naive, results(Naive()));
    const std::vector<Memory::Result> once = results(Tested());
    if (seed == 1) ExpectSameBits(results(Tested(), kDescending), once, "run twice");
    append(emulated, once);
  }
  ExpectWithinTheBound(emulated, naive, reference, "emulated");
}

class CudaAttentionCases : public ::testing::TestWithParam<AttentionCase> {
 protected:
  // As in the cpu kernels' test: where o is wide, the bound needs scores of a few hundred.
  static AttentionCase Modest(AttentionCase c, DType storage) {
    if (storage == DType::kBFloat16) c.score_scale = std::min(c.score_scale, 300.0);
    return c;
  }
};

TEST_P(CudaAttentionCases, ForwardWithinTheBound) {
  ForEachRows([](Rows rows) {
    ExpectMatchesReferenceOn(
        rows, [](Memory& memory) { return ForwardCall(GetParam(), memory); },
        SeedsOf(rows.alignment));
  });
}

TEST_P(CudaAttentionCases, WideOutputWithinTheBound) {
  const Rows rows = {DType::kBFloat16, Alignment::kSixteenBytes};
  AttentionCase c = Modest(GetParam(), rows.storage);
  c.wide_output = true;
  ExpectMatchesReferenceOn(rows, [&](Memory& memory) { return ForwardCall(c, memory); });
}

TEST_P(CudaAttentionCases, MergeWithinTheBound) {
  ForEachRows([](Rows rows) {
    AttentionCase c = Modest(GetParam(), rows.storage);
    c.merge = true;
    ExpectMatchesReferenceOn(rows, [&](Memory& memory) { return ForwardCall(c, memory); });
  });
}

TEST_P(CudaAttentionCases, BackwardWithinTheBound) {
  ForEachRows([](Rows rows) {
    ExpectMatchesReferenceOn(
        rows, [](Memory& memory) { return BackwardCall(GetParam(), memory); },
        SeedsOf(rows.alignment));
  });
}

INSTANTIATE_TEST_SUITE_P(Each, CudaAttentionCases, ::testing::ValuesIn(AttentionCases()),
                         [](const auto& info) { return info.param.name; });

// Rows the one call gets by several launches: more heads, heads of a slot and documents than one
// launch takes, documents shorter than a tile.
TEST(CudaAttentionLaunches, ManyHeadsAndDocumentsWithinTheBound) {
  AttentionCase heads = {.queries = {0, 6}, .keys = {0, 6}, .slots = 2};
  for (int i = 0; i < 70; ++i) heads.kv_slot.push_back(i % 20 == 0 ? 1 : 0);
  AttentionCase documents = {.queries = {0, 350}, .keys = {3, 345}, .causal = false};
  for (int64_t i = 1; i < 330; ++i) documents.document_starts.push_back(i);
  for (const AttentionCase& c : {heads, documents}) {
    ForEachRows([&](Rows rows) {
      ExpectMatchesReferenceOn(rows, [&](Memory& memory) { return ForwardCall(c, memory); });
      ExpectMatchesReferenceOn(rows, [&](Memory& memory) { return BackwardCall(c, memory); });
    });
  }
}

// Rings and chunks: any split of queries and keys, in any order, within the bound of the one call.
TEST(CudaAttentionPieces, WithinTheBoundOfOneCall) {
  AttentionCase c = {.queries = {90, 250},
                     .keys = {0, 290},
                     .kv_slot = {0, 1, 0},
                     .slots = 2,
                     .document_starts = {0, 50, 120, 121, 200},
                     .gap = 3};
  c.wide_output = true;
  const auto expect = [](const auto& p, Memory& memory) {
    memory.Seal();
    const Cut whole = {{p.queries}, {p.keys}};
    const auto reference = ResultsOf(Reference(), p, whole, memory);
    const auto naive = ResultsOf(Naive(), p, whole, memory);
    Cut cut = {Split(p.queries, 2), Split(p.keys, 3)};
    ExpectWithinTheBound(ResultsOf(Tested(), p, cut, memory), naive, reference, "ascending");
    std::reverse(cut.keys.begin(), cut.keys.end());
    const auto descending = ResultsOf(Tested(), p, cut, memory);
    ExpectWithinTheBound(descending, naive, reference, "descending");
    ExpectSameBits(ResultsOf(Tested(), p, cut, memory), descending, "run twice");
  };
  for (const bool causal : {true, false}) {
    c.causal = causal;
    ForEachRows([&](Rows rows) {
      Memory forward(11, rows.storage, rows.alignment), backward(11, rows.storage, rows.alignment);
      expect(ForwardCall(c, forward), forward);
      expect(BackwardCall(c, backward), backward);
    });
  }
}

// 40 queries, 80 keys in two runs of 40 whose scores are all `first` and all `second`.
AttentionFwdParams TwoScores(double first, double second, Memory& memory) {
  AttentionFwdParams p = ForwardCall(
      {.queries = {80, 120}, .keys = {0, 80}, .head_dim = 16, .wide_output = true}, memory);
  p.scale = 1;
  for (int64_t e = 0; e < 16; ++e) {
    for (int64_t i = 0; i < 40; ++i) SetElement(p.q, i, 0, e, 25);
    for (int64_t j = 0; j < 80; ++j) SetElement(p.k, j, 0, e, (j < 40 ? first : second) / 400);
  }
  memory.Seal();
  return p;
}

// e^10000 is no number of any kind: the run of low scores leaves no trace, whichever comes first.
TEST(CudaAttentionPieces, LowScoresLeaveNoTraceBesideHugeOnes) {
  ForEachRows([](Rows rows) {
    Memory memory(2, rows.storage, rows.alignment);
    const AttentionFwdParams p = TwoScores(1e4, -1e4, memory);
    const auto alone = ResultsOf(Tested(), p, {{p.queries}, {{0, 40}}}, memory);
    EXPECT_NEAR(alone[1].values[0], 1e4 + std::log(40), 1e4 * 0x1p-22);
    ExpectSameBits(ResultsOf(Tested(), p, {{p.queries}, {{0, 40}, {40, 80}}}, memory), alone,
                   "low scores last");
    ExpectSameBits(ResultsOf(Tested(), p, {{p.queries}, {{40, 80}, {0, 40}}}, memory), alone,
                   "low scores first");
  });
}

// A run without a key for a query leaves its o and lse bit for bit, even where they hold nothing
// that attention would write; a query with lse = -infinity takes the run's result whatever o held.
TEST(CudaAttentionPieces, UnseenRunsKeepEveryBitAndNoKeysYetIsNoWeight) {
  ForEachRows([](Rows rows) {
    Memory memory(3, rows.storage, rows.alignment);
    AttentionFwdParams p = ForwardCall(
        {.queries = {0, 90}, .keys = {40, 130}, .head_dim = 24, .wide_output = true}, memory);
    const auto alone = ResultsOf(Tested(), p, {{p.queries}, {p.keys}}, memory);
    memory.Restore();
    for (int64_t t = 0; t < 90; ++t) {
      SetElement(p.lse, 0, t, 0, t < 40 ? 0.1 * static_cast<double>(t) : -INFINITY);
      for (int64_t e = 0; e < 24; ++e) SetElement(p.o, t, 0, e, t < 40 ? -1e-41 * e : NAN);
    }
    memory.Seal();
    auto expected = memory.Results();
    for (size_t i = 40 * 24; i < 90 * 24; ++i) expected[0].values[i] = alone[0].values[i];
    for (size_t t = 40; t < 90; ++t) expected[1].values[t] = alone[1].values[t];
    p.merge = true;
    ASSERT_EQ(RunCall(Tested(), p, memory), absl::OkStatus());
    ExpectSameBits(memory.Results(), expected, "merged");
  });
}

// Equal scores of 2^n keys: o is an exact mean but for its one rounding. Scale 0 makes them equal
// too, without a NaN.
TEST(CudaAttention, MeansOfPowersOfTwoRoundOnce) {
  ForEachRows([](Rows rows) {
    for (const bool zero_scale : {false, true}) {
      std::vector<std::vector<double>> means;
      for (OpTable* ops : {&Reference(), &Tested()}) {
        Memory memory(1, rows.storage, rows.alignment);
        AttentionFwdParams p = ForwardCall(
            {.queries = {0, 128}, .keys = {0, 128}, .score_scale = zero_scale ? 1.0 : 0.0}, memory);
        if (zero_scale) p.scale = 0;
        SetSmallIntegers(p.v, 255, memory);
        ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
        std::vector<double>& values = means.emplace_back();
        for (int64_t t : {0, 1, 3, 7, 15, 31, 63, 127}) {
          for (int64_t e = 0; e < 16; ++e) values.push_back(GetElement(p.o, t, 0, e));
        }
      }
      EXPECT_EQ(means[0], means[1]);
    }
  });
}

// A NaN must reach the loss: it may not vanish in a maximum.
TEST(CudaAttention, NanReachesTheOutputOfQueriesThatSeeIt) {
  ForEachRows([](Rows rows) {
    Memory memory(1, rows.storage, rows.alignment);
    const AttentionFwdParams p = ForwardCall({.queries = {0, 100}, .keys = {0, 100}}, memory);
    SetElement(p.k, 10, 0, 0, std::nan(""));
    memory.Seal();
    ASSERT_EQ(RunCall(Tested(), p, memory), absl::OkStatus());
    EXPECT_TRUE(std::isfinite(GetElement(p.o, 9, 0, 0)));
    EXPECT_TRUE(std::isnan(GetElement(p.o, 10, 0, 0)));
    EXPECT_TRUE(std::isnan(GetElement(p.o, 99, 0, 0)));
    EXPECT_TRUE(std::isnan(GetElement(p.lse, 0, 99)));
  });
}

// Whatever is in the keys of the same tile.
TEST(CudaAttention, QueriesThatSeeNoKeyGetZeroBesideNan) {
  ForEachRows([](Rows rows) {
    Memory memory(1, rows.storage, rows.alignment);
    const AttentionFwdParams p = ForwardCall({.queries = {0, 40}, .keys = {30, 70}}, memory);
    SetElement(p.v, 0, 0, 3, std::nan(""));
    memory.Seal();
    ASSERT_EQ(RunCall(Tested(), p, memory), absl::OkStatus());
    for (int64_t t = 0; t < 30; ++t) {
      EXPECT_EQ(GetElement(p.lse, 0, t), -INFINITY);
      for (int64_t e = 0; e < 16; ++e) EXPECT_EQ(GetElement(p.o, t, 0, e), 0.0);
    }
    EXPECT_TRUE(std::isnan(GetElement(p.o, 30, 0, 3)));
  });
}

// A score of minus infinity is a key not seen, alone or where something is merged.
TEST(CudaAttention, KeysOfMinusInfinityAreNotSeen) {
  ForEachRows([](Rows rows) {
    for (const bool merge : {false, true}) {
      std::vector<std::vector<Memory::Result>> results;
      for (OpTable* ops : {&Reference(), &Tested()}) {
        Memory memory(1, rows.storage, rows.alignment);
        const AttentionFwdParams p = ForwardCall(
            {.queries = {0, 40}, .keys = {0, 40}, .wide_output = true, .merge = merge}, memory);
        for (int64_t t = 0; t < 40; ++t) {
          for (int64_t e = 0; e < 16; ++e) {
            SetElement(p.q, t, 0, e, 1);
            SetElement(p.k, t, 0, e, -INFINITY);
          }
        }
        memory.Seal();
        ASSERT_EQ(RunCall(*ops, p, memory), absl::OkStatus());
        results.push_back(memory.Results());
      }
      ExpectSameBits(results[1], results[0], "unseen");
    }
  });
}

// Runs that do not meet are not looked at, nor with merge or accumulate_dq anything else.
TEST(CudaAttentionApart, RunsThatDoNotMeetAreNotTouched) {
  const std::vector<AttentionCase> cases = {
      {.name = "KeysAfterQueries", .queries = {0, 300}, .keys = {300, 600}},
      {.name = "OtherDocuments",
       .queries = {300, 600},
       .keys = {0, 300},
       .causal = false,
       .document_starts = {0, 100, 300}},
      {.name = "KeysBeforeTheWindow", .queries = {350, 600}, .keys = {0, 300}, .window = 51},
      {.name = "KeysBeyondTheWindow",
       .queries = {0, 250},
       .keys = {300, 600},
       .causal = false,
       .window = 51},
  };
  for (const AttentionCase& c : cases) {
    SCOPED_TRACE(c.name);
    ForEachRows([&](Rows rows) {
      Memory memory(1, rows.storage, rows.alignment);
      FarMemory far;
      AttentionFwdParams fwd = ForwardCall(c, memory);
      for (TensorView* view : {&fwd.q, &fwd.k, &fwd.v}) *view = far.Forbidden(*view);
      ASSERT_EQ(RunCall(Tested(), fwd, memory), absl::OkStatus());
      const std::vector<Memory::Result> results = memory.Results();
      for (const double o : results[0].values) ASSERT_EQ(o, 0);
      for (const double lse : results[1].values) ASSERT_EQ(lse, -INFINITY);
      fwd.o.dtype = kW;
      fwd.o = far.Forbidden(fwd.o);
      fwd.lse = far.Forbidden(fwd.lse);
      fwd.merge = true;
      ASSERT_EQ(RunCall(Tested(), fwd, memory), absl::OkStatus());

      AttentionBwdParams bwd = BackwardCall(c, memory);
      for (TensorView* view :
           {&bwd.q, &bwd.k, &bwd.v, &bwd.dout, &bwd.lse, &bwd.delta, &bwd.dk, &bwd.dv}) {
        *view = far.Forbidden(*view);
      }
      ASSERT_EQ(RunCall(Tested(), bwd, memory), absl::OkStatus());
      const Memory::Result dq = memory.Results().back();
      for (const double element : dq.values) ASSERT_EQ(element, 0);
      bwd.dq = far.Forbidden(bwd.dq);
      bwd.accumulate_dq = true;
      ASSERT_EQ(RunCall(Tested(), bwd, memory), absl::OkStatus());
    });
  }
}

// Of runs that meet in part, only the keys that some query sees are touched, and in backward only
// the queries that see some key; rows lie a page apart here.
TEST(CudaAttentionApart, OnlyWhatMeetsIsTouched) {
  struct Partial {
    AttentionCase c;
    PositionRun seen_keys, seen_queries;
  };
  const std::vector<Partial> partials = {
      {{.queries = {100, 300}, .keys = {200, 500}}, {0, 100}, {100, 200}},
      {{.queries = {300, 500}, .keys = {100, 400}, .window = 61}, {140, 300}, {0, 160}},
      {{.queries = {300, 350}, .keys = {0, 600}, .causal = false, .window = 21},
       {280, 370},
       {0, 50}},
      {{.queries = {300, 500}, .keys = {0, 600}, .causal = false, .document_starts = {0, 277, 533}},
       {277, 533},
       {0, 200}},
  };
  for (const auto& [c, keys, queries] : partials) {
    ForEachRows([&](Rows rows) {
      Memory memory(1, rows.storage, rows.alignment), back(1, rows.storage, rows.alignment);
      FarMemory far;
      AttentionFwdParams fwd = ForwardCall(c, memory);
      for (TensorView* view : {&fwd.k, &fwd.v}) *view = far.Guarded(*view, keys.begin, keys.end);
      ASSERT_EQ(RunCall(Tested(), fwd, memory), absl::OkStatus());
      AttentionBwdParams bwd = BackwardCall(c, back);
      bwd.accumulate_dq = true;
      for (TensorView* view : {&bwd.k, &bwd.v, &bwd.dk, &bwd.dv}) {
        *view = far.Guarded(*view, keys.begin, keys.end);
      }
      for (TensorView* view : {&bwd.q, &bwd.dout, &bwd.dq}) {
        *view = far.Guarded(*view, queries.begin, queries.end);
      }
      ASSERT_EQ(RunCall(Tested(), bwd, back), absl::OkStatus());
    });
  }
}

bool SameElements(const TensorView& a, const TensorView& b) {
  for (int64_t i = 0; i < a.shape[0]; ++i) {
    for (int64_t j = 0; j < a.shape[1]; ++j) {
      if (std::memcmp(a.At(i, j), b.At(i, j), a.shape[2] * SizeOf(a.dtype)) != 0) return false;
    }
  }
  return true;
}

// Row 18 lies beyond 2^31 elements, row 36 beyond 2^32; head 1 beyond 2^31, head 2 beyond 2^32.
TEST(CudaAttention, OffsetsBeyond32BitsGiveTheSameBits) {
  constexpr int64_t kFirst = int64_t{1} << 33, kTokens = 41;
  constexpr int64_t kRowStride = ((int64_t{1} << 32) / 36 / 8 + 101) * 8;
  constexpr int64_t kHeadStride = (int64_t{1} << 31) + 1000;
  const AttentionCase c = {.queries = {kFirst, kFirst + kTokens},
                           .keys = {kFirst - 10, kFirst - 10 + kTokens},
                           .head_dim = 24,
                           .kv_slot = {0, 2, 1},
                           .slots = 3,
                           .window = 30,
                           .accumulate_dq = true};
  const auto expect = [](Rows rows, const auto& build, const auto& views_of, const auto& rest_of) {
    // An odd stride keeps what is plain plain.
    const int64_t odd = rows.alignment == Alignment::kElement ? 1 : 0;
    for (const int dim : {0, 1}) {
      Memory near_memory(1, rows.storage, rows.alignment),
          far_memory(1, rows.storage, rows.alignment);
      FarMemory space;
      auto near = build(near_memory), far = build(far_memory);
      for (TensorView* view : views_of(far)) {
        *view = space.Copy(*view, dim, (dim == 0 ? kRowStride : kHeadStride) + odd);
      }
      for (TensorView* view : rest_of(far)) *view = space.Copy(*view, 0, kHeadStride);
      ASSERT_EQ(RunCall(Tested(), near, near_memory), absl::OkStatus());
      ASSERT_EQ(RunCall(Tested(), far, far_memory), absl::OkStatus());
      const auto near_views = views_of(near), far_views = views_of(far);
      for (size_t i = 0; i < near_views.size(); ++i) {
        EXPECT_TRUE(SameElements(*near_views[i], *far_views[i]))
            << "tensor " << i << ", dim " << dim;
      }
    }
  };
  ForEachRows([&](Rows rows) {
    expect(
        rows, [&](Memory& memory) { return ForwardCall(c, memory); },
        [](AttentionFwdParams& p) {
          return std::vector{&p.q, &p.k, &p.v, &p.o};
        },
        [](AttentionFwdParams& p) { return std::vector{&p.lse}; });
    expect(
        rows, [&](Memory& memory) { return BackwardCall(c, memory); },
        [](AttentionBwdParams& p) {
          return std::vector{&p.q, &p.k, &p.v, &p.dout, &p.dq, &p.dk, &p.dv};
        },
        [](AttentionBwdParams& p) {
          return std::vector{&p.lse, &p.delta};
        });
  });
}

}  // namespace
}  // namespace upipe::kernels::testing
