#include "kernels/cpu/attention_merge.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/cpu/attention_tiles.h"
#include "kernels/cpu/cpu_backend.h"

namespace upipe::kernels::cpu {
namespace {

constexpr float kNoKeys = -std::numeric_limits<float>::infinity();

}  // namespace

RowWeights FinishRow(const AttentionFwdParams& p, int64_t head, int64_t token, float max,
                     float sum) {
  float& lse = *Ptr(p.lse, head, token);
  if (sum == 0) {
    if (p.merge) return {.kept = 1};
    lse = kNoKeys;
    return {};
  }
  const double run = max * kLn2 + std::log(double{sum});
  if (!p.merge) {
    lse = static_cast<float>(run);
    return {.fresh = 1.0f / sum};
  }
  const double before = lse, larger = std::max(run, before);
  const double kept = std::exp(before - larger), fresh = std::exp(run - larger);
  const double total = kept + fresh;
  lse = static_cast<float>(larger + std::log(total));
  return {.kept = static_cast<float>(kept / total),
          .fresh = static_cast<float>(fresh / (total * sum))};
}

void FinishUnseen(const AttentionFwdParams& p, int64_t head, int64_t first, int64_t count) {
  if (p.merge) return;
  for (int64_t token = first; token < first + count; ++token) {
    std::memset(p.o.At(token, head), 0, p.o.shape[2] * SizeOf(p.o.dtype));
    *Ptr(p.lse, head, token) = kNoKeys;
  }
}

}  // namespace upipe::kernels::cpu
