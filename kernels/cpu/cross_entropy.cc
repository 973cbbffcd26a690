// Summed token losses and their gradient in place of the logits. Rows run in parallel; their losses
// are kept in the workspace and added in ascending order.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/cpu_backend.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/cross_entropy.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

// One pass: blocks that stay in cache give their maximum, then their sum of exponentials under the
// running maximum.
void SoftmaxStatistics(const float* logits, size_t n, float* max, double* sum) {
  constexpr size_t kBlock = 1024;
  float running_max = logits[0];
  double running_sum = 0;
  for (size_t begin = 0; begin < n; begin += kBlock) {
    const size_t size = HWY_MIN(kBlock, n - begin);
    const float* block = logits + begin;
    VecF32 maxima = hn::Set(F32(), running_max);
    ForEachVector(size, [&](size_t i, size_t count) HWY_ATTR {
      const VecF32 v = count == kLanes ? hn::LoadU(F32(), block + i) : hn::Set(F32(), block[i]);
      maxima = hn::Max(maxima, v);
    });
    float block_max = hn::GetLane(hn::MaxOfLanes(F32(), maxima));
    for (size_t i = size - size % kLanes; i < size; ++i) block_max = HWY_MAX(block_max, block[i]);
    const VecF32 shift = hn::Set(F32(), block_max);
    VecF32 sums = hn::Zero(F32());
    ForEachVector(size, [&](size_t i, size_t count) HWY_ATTR {
      const VecF32 e = Exp(hn::Sub(LoadFirst(block + i, count), shift));
      sums = hn::Add(sums, hn::IfThenElseZero(hn::FirstN(F32(), count), e));
    });
    running_sum = running_sum * std::exp(double{running_max} - block_max) +
                  hn::GetLane(hn::SumOfLanes(F32(), sums));
    running_max = block_max;
  }
  *max = running_max;
  *sum = running_sum;
}

// logits = exp(logits - max) * inverse_sum.
void SoftmaxRow(float* logits, size_t n, float max, float inverse_sum) {
  const VecF32 shift = hn::Set(F32(), max);
  const VecF32 scale = hn::Set(F32(), inverse_sum);
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    StoreFirst(hn::Mul(Exp(hn::Sub(LoadFirst(logits + i, count), shift)), scale), logits + i,
               count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(SoftmaxStatistics);
HWY_EXPORT(SoftmaxRow);

namespace {

// The loss of row t; its logits become the gradient when asked.
double RowLoss(const CrossEntropyParams& p, int64_t t) {
  const int64_t vocab = p.logits.shape[1];
  const int32_t label = p.labels.as<int32_t>()[t];
  float* logits = Ptr(p.logits, t);
  if (label < 0) {
    if (p.write_gradient) std::fill(logits, logits + vocab, 0.0f);
    return 0;
  }
  float max;
  double sum;
  HWY_DYNAMIC_DISPATCH(SoftmaxStatistics)(logits, vocab, &max, &sum);
  const double loss = max + std::log(sum) - logits[label];
  if (p.write_gradient) {
    HWY_DYNAMIC_DISPATCH(SoftmaxRow)(logits, vocab, max, static_cast<float>(1 / sum));
    logits[label] -= 1.0f;
  }
  return loss;
}

}  // namespace

int64_t Backend::WorkspaceBytes(const CrossEntropyParams& p) {
  return p.logits.shape[0] * sizeof(double);
}

absl::Status Backend::Run(const CrossEntropyParams& p, Workspace workspace, ExecContext& context) {
  const int64_t tokens = p.logits.shape[0];
  const int32_t* labels = p.labels.as<int32_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    if (labels[t] >= p.logits.shape[1]) {
      return absl::OutOfRangeError(absl::StrCat("cross_entropy: label ", labels[t], " at row ", t,
                                                " is outside the vocabulary [0, ",
                                                p.logits.shape[1], ")"));
    }
  }
  double* loss = static_cast<double*>(workspace.data);
  context.parallel.Run(tokens, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) loss[t] = RowLoss(p, t);
  });
  double* loss_and_count = p.loss_and_count.as<double>();
  for (int64_t t = 0; t < tokens; ++t) {
    if (labels[t] < 0) continue;
    loss_and_count[0] += loss[t];
    loss_and_count[1] += 1;
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
