// Attention calls for tests: shapes, runs and masks in one struct, forward and backward made from
// it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/api/op_params.h"
#include "tests/kernels/kernels/support/memory.h"

namespace upipe::kernels::testing {

struct AttentionCase {
  std::string name;
  PositionRun queries;
  PositionRun keys;
  int64_t head_dim = 16;
  std::vector<int32_t> kv_slot = {0};
  int64_t slots = 1;
  bool causal = true;
  std::optional<int64_t> window;
  std::vector<int64_t> document_starts = {0};
  double score_scale = 1;  // multiplies q: large makes huge scores
  bool negative_scale = false;
  int64_t gap = 0;
  bool accumulate_dq = false;
  bool wide_output = false;  // o is W
  bool merge = false;        // o, W, and lse hold a result, some queries' that of no keys
};

void PrintTo(const AttentionCase& c, std::ostream* out);

// The shapes, runs and masks every attention kernel must survive.
std::vector<AttentionCase> AttentionCases();

AttentionFwdParams ForwardCall(const AttentionCase& c, Memory& memory);
// lse and delta come from the reference; dk and dv have other slots than k and v.
AttentionBwdParams BackwardCall(const AttentionCase& c, Memory& memory);

}  // namespace upipe::kernels::testing
