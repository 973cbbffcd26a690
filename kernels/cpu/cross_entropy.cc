// Summed token losses and their gradient, which may lie over the logits. Rows run in parallel;
// their losses are kept in the workspace and added in ascending order.
#include <cmath>
#include <cstring>

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
    const float sum = SumOver(size, [=](size_t i, size_t count, VecF32 part) HWY_ATTR {
      const VecF32 e = Exp(hn::Sub(LoadFirst(block + i, count), shift));
      if (count == kLanes) return hn::Add(part, e);
      return hn::Add(part, hn::IfThenElseZero(hn::FirstN(F32(), count), e));
    });
    running_sum = running_sum * std::exp(double{running_max} - block_max) + sum;
    running_max = block_max;
  }
  *max = running_max;
  *sum = running_sum;
}

// softmax[0:n) = exp(logits - max) * inverse_sum. In ascending order, no element written before all
// below it are read: `softmax` may begin where logits does, in a type as wide or narrower.
template <typename S>
HWY_INLINE void Softmax(const float* logits, size_t n, float max, float inverse_sum, S* softmax) {
  const VecF32 shift = hn::Set(F32(), max);
  const VecF32 scale = hn::Set(F32(), inverse_sum);
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    StoreFirst(hn::Mul(Exp(hn::Sub(LoadFirst(logits + i, count), shift)), scale), softmax + i,
               count);
  });
}

// One row of d(loss)/d(logits) = softmax - one at the label.
void GradientRow(const float* logits, size_t n, int32_t label, float max, float inverse_sum,
                 void* dlogits, DType dtype) {
  float at_label;
  Softmax(logits + label, 1, max, inverse_sum, &at_label);
  WithStorageType(dtype, [=](auto tag) HWY_ATTR {
    auto* gradient = static_cast<decltype(tag)*>(dlogits);
    Softmax(logits, n, max, inverse_sum, gradient);
    StoreFirst(hn::Set(F32(), at_label - 1.0f), gradient + label, 1);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(SoftmaxStatistics);
HWY_EXPORT(GradientRow);

namespace {

// The loss of row t, and its gradient when asked.
double RowLoss(const CrossEntropyParams& p, int64_t t) {
  const int64_t vocab = p.logits.shape[1];
  const int32_t label = p.labels.as<int32_t>()[t];
  const float* logits = Ptr(p.logits, t);
  if (label < 0) {
    if (p.dlogits.present()) std::memset(p.dlogits.At(t), 0, vocab * SizeOf(p.dlogits.dtype));
    return 0;
  }
  float max;
  double sum;
  HWY_DYNAMIC_DISPATCH(SoftmaxStatistics)(logits, vocab, &max, &sum);
  const double loss = max + std::log(sum) - logits[label];
  if (p.dlogits.present()) {
    HWY_DYNAMIC_DISPATCH(GradientRow)
    (logits, vocab, label, max, static_cast<float>(1 / sum), p.dlogits.At(t), p.dlogits.dtype);
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
