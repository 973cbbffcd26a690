#include "tests/kernels/kernels/support/attention_pieces.h"

#include "gtest/gtest.h"
#include "tests/kernels/kernels/support/op_check.h"

namespace upipe::kernels::testing {
namespace {

// Columns [begin, begin + count) of every row.
TensorView Columns(TensorView view, int64_t begin, int64_t count) {
  view.data = view.At(0, begin);
  view.shape[1] = count;
  return view;
}

}  // namespace

std::vector<PositionRun> Split(PositionRun run, int64_t pieces) {
  std::vector<PositionRun> runs;
  const int64_t length = run.end - run.begin;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t begin = i == 0 ? run.begin : runs.back().end;
    const int64_t end = run.begin + length * (i + 1) / pieces + (i % 2 == 0 ? 3 : -5);
    runs.push_back({begin, i + 1 == pieces ? run.end : end});
  }
  return runs;
}

AttentionFwdParams PieceOf(const AttentionFwdParams& p, PositionRun queries, PositionRun keys) {
  AttentionFwdParams piece = p;
  const int64_t first = queries.begin - p.queries.begin, count = queries.end - queries.begin;
  piece.q = p.q.Rows(first, count);
  piece.o = p.o.Rows(first, count);
  piece.lse = Columns(p.lse, first, count);
  piece.k = p.k.Rows(keys.begin - p.keys.begin, keys.end - keys.begin);
  piece.v = p.v.Rows(keys.begin - p.keys.begin, keys.end - keys.begin);
  piece.queries = queries;
  piece.keys = keys;
  return piece;
}

AttentionBwdParams PieceOf(const AttentionBwdParams& p, PositionRun queries, PositionRun keys) {
  AttentionBwdParams piece = p;
  const int64_t first = queries.begin - p.queries.begin, count = queries.end - queries.begin;
  const int64_t key = keys.begin - p.keys.begin, num_keys = keys.end - keys.begin;
  for (TensorView* view : {&piece.q, &piece.dout, &piece.dq, &piece.delta}) {
    *view = view->Rows(first, count);
  }
  piece.lse = Columns(p.lse, first, count);
  for (TensorView* view : {&piece.k, &piece.v, &piece.dk, &piece.dv}) {
    *view = view->Rows(key, num_keys);
  }
  piece.queries = queries;
  piece.keys = keys;
  return piece;
}

void Run(OpTable& ops, const AttentionFwdParams& p, const Cut& cut, const Memory& memory) {
  for (const PositionRun queries : cut.queries) {
    for (size_t i = 0; i < cut.keys.size(); ++i) {
      AttentionFwdParams piece = PieceOf(p, queries, cut.keys[i]);
      piece.merge = i > 0;
      ASSERT_EQ(RunCall(ops, piece, memory, cut.threads), absl::OkStatus());
    }
  }
}

void Run(OpTable& ops, const AttentionBwdParams& p, const Cut& cut, const Memory& memory) {
  for (size_t i = 0; i < cut.keys.size(); ++i) {
    for (const PositionRun queries : cut.queries) {
      AttentionBwdParams piece = PieceOf(p, queries, cut.keys[i]);
      piece.accumulate_dq = i > 0;
      ASSERT_EQ(RunCall(ops, piece, memory, cut.threads), absl::OkStatus());
    }
  }
}

}  // namespace upipe::kernels::testing
