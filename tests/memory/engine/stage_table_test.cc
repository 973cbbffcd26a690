// The table "A stage, by method" of docs/memory.md against the formulas that
// layer_live_set_test.cc proves: as many q and kv as the document says.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "tests/memory/engine/layer_formula.h"

namespace upipe::testing {
namespace {

using engine::Place;
using kernels::MemoryTag;

// Llama 3 8B on eight ranks.
Point Eight(v1::Method method, int ulysses, int ring, int64_t chunks = 1) {
  return {.method = method,
          .ulysses_ranks = ulysses,
          .ring_ranks = ring,
          .heads_per_stage = 1,
          .query_chunks = chunks,
          .num_heads = 32,
          .num_kv_heads = 8,
          .head_dim = 128,
          .hidden_size = 4096,
          .intermediate_size = 14336,
          .context = 1 << 20,
          .bf16 = true};
}
Point Keep(Point point) {
  point.policy.ring_keeps_kv = true;
  return point;
}
Point KvOnHost(Point point) {
  point.policy.layer_inputs = point.policy.hidden_stream = point.policy.stage_kv = Place::kHost;
  return point;
}
Point TwoHeads(Point point) {
  point.heads_per_stage = 2;
  return point;
}

// A method and its cells in the document, and what they say of `point`: multiples of q and of kv.
struct Row {
  const char* name;
  const char* method;
  const char* cells;
  Point point;
  int64_t forward_q, forward_kv;
  int64_t backward_q, backward_kv;
  bool kv_in_parts = false;  // kv by chunks, too
};
void PrintTo(const Row& row, std::ostream* out) { *out << row.cells; }

class StageTable : public ::testing::TestWithParam<Row> {};

TEST_P(StageTable, IsWhatTheLayerHolds) {
  const Row& row = GetParam();
  const Point& p = row.point;
  const int rank = p.ranks() - 1;
  const LayerFormula layer(p, rank);
  const int64_t chunks = p.query_chunks;
  const int64_t q = p.StageQuery() / chunks;
  const int64_t kv =
      p.Stored() * p.M() * p.StageKvHeads() * p.head_dim / (row.kv_in_parts ? chunks : 1);
  const int64_t own_block = q / p.ulysses_ranks;  // written as if it were staged, unless C = 1
  const int64_t staged = p.ulysses_ranks > 1 ? own_block : 0;
  const bool on_device = p.policy.hidden_stream == Place::kDevice;
  const int64_t output = p.LogSumExp(rank % p.ulysses_ranks) + (on_device ? p.HeadsOut() : 0);
  const auto stage = [](LiveSet set) {
    return set.of(MemoryTag::kAttnQ) + set.of(MemoryTag::kAttnKv) +
           set.of(MemoryTag::kAttnExchange) + set.of(MemoryTag::kAttnOut) +
           set.of(MemoryTag::kAttnGrad);
  };
  EXPECT_EQ(stage(layer.Forward()) - output + staged, row.forward_q * q + row.forward_kv * kv);
  const int64_t kept = output + layer.Delta() + (on_device ? layer.ReturnedKv() : 0);
  const int64_t backward = stage(layer.AttentionBackward()) - kept;
  EXPECT_EQ(backward + staged, row.backward_q * q + row.backward_kv * kv);
  LiveSet cudnn = LayerFormula(p, rank, kCudnn).AttentionBackward();
  EXPECT_EQ(stage(cudnn) - kept - backward + cudnn.of(MemoryTag::kWorkspace), 2 * q + 2 * kv);
}

TEST_P(StageTable, IsInTheDocument) {
  const Row& row = GetParam();
  std::ifstream in(std::string(std::getenv("UPIPE_SOURCE_DIR")) + "/docs/memory.md");
  bool found = false;
  for (std::string line; std::getline(in, line);) {
    found |= line.starts_with("| " + std::string(row.method) + " |") && line.ends_with(row.cells);
  }
  EXPECT_TRUE(found) << row.method << " " << row.cells;
}

constexpr auto kUpipe = v1::METHOD_UPIPE;
INSTANTIATE_TEST_SUITE_P(
    Methods, StageTable,
    ::testing::Values(Row{"upipe", "`upipe`", "| 3q + 2kv | 5q + 6kv | 2q + 2kv |",
                          Eight(kUpipe, 8, 1), 3, 2, 5, 6},
                      Row{"upipe_two_heads", "`upipe`", "| 3q + 2kv | 5q + 6kv | 2q + 2kv |",
                          TwoHeads(Eight(kUpipe, 8, 1)), 3, 2, 5, 6},
                      Row{"ulysses", "`ulysses`", "| 3q + 2kv | 5q + 6kv | 2q + 2kv |",
                          Eight(v1::METHOD_ULYSSES, 8, 1), 3, 2, 5, 6},
                      Row{"ring", "`ring`", "| 3q + 4kv | 4q + 12kv | 2q + 2kv |",
                          Eight(v1::METHOD_RING, 1, 8), 3, 4, 4, 12},
                      Row{"usp", "`usp`", "| 4q + 4kv | 5q + 12kv | 2q + 2kv |",
                          Eight(v1::METHOD_USP, 4, 2), 4, 4, 5, 12},
                      Row{"hybrid", "`upipe` with a ring", "| 4q + 4kv | 5q + 12kv | 2q + 2kv |",
                          Eight(kUpipe, 4, 2), 4, 4, 5, 12},
                      Row{"usp_keep", "either, `ring_kv: keep`",
                          "| 4q + 2R kv | 5q + 6R kv | 2q + 2kv |",
                          Keep(Eight(v1::METHOD_USP, 4, 2)), 4, 2 * 2, 5, 6 * 2},
                      Row{"hybrid_keep", "either, `ring_kv: keep`",
                          "| 4q + 2R kv | 5q + 6R kv | 2q + 2kv |", Keep(Eight(kUpipe, 4, 2)), 4,
                          2 * 2, 5, 6 * 2},
                      Row{"fpdt", "`fpdt`", "| (4q + 4kv)/n | (5q + 12kv)/n | (2q + 2kv)/n |",
                          KvOnHost(Eight(v1::METHOD_FPDT, 8, 1, 4)), 4, 4, 5, 12, true},
                      Row{"chunks", "`upipe`, n chunks", "| 3q/n + 2kv | 5q/n + 6kv | 2q/n + 2kv |",
                          Eight(kUpipe, 8, 1, 4), 3, 2, 5, 6},
                      Row{"chunks_kv_on_host", "the same, `stage_kv: host`",
                          "| (4q + 4kv)/n | (5q + 12kv)/n | (2q + 2kv)/n |",
                          KvOnHost(Eight(kUpipe, 8, 1, 4)), 4, 4, 5, 12, true}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace upipe::testing
