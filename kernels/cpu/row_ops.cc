#include "kernels/cpu/row_ops.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/row_ops.cc"
#include "hwy/foreach_target.h"  // includes this file once per target
#include "kernels/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace upipe::kernels::cpu {
namespace HWY_NAMESPACE {

template <typename From, typename To>
HWY_INLINE void CastOrAdd(const From* from, To* to, size_t n, bool accumulate) {
  if (accumulate) {
    ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
      StoreFirst(hn::Add(LoadFirst(to + i, count), LoadFirst(from + i, count)), to + i, count);
    });
  } else {
    ForEachVector(n, [=](size_t i, size_t count)
                         HWY_ATTR { StoreFirst(LoadFirst(from + i, count), to + i, count); });
  }
}

void CastOrAddRow(const void* from, DType from_type, void* to, DType to_type, size_t n,
                  bool accumulate) {
  WithStorageType(from_type, [=](auto from_tag) HWY_ATTR {
    WithStorageType(to_type, [=](auto to_tag) HWY_ATTR {
      CastOrAdd(static_cast<const decltype(from_tag)*>(from), static_cast<decltype(to_tag)*>(to), n,
                accumulate);
    });
  });
}

template <typename Bias, typename C>
HWY_INLINE void Finish(const ProductRow& row, const Bias* bias, C* c, size_t n) {
  const VecF32 beta = hn::Set(F32(), row.beta);
  const float* product = row.product;
  const bool keep = row.beta != 0;
  ForEachVector(n, [=](size_t i, size_t count) HWY_ATTR {
    VecF32 sum = hn::Zero(F32());
    if (product != nullptr) sum = LoadFirst(product + i, count);
    if (bias != nullptr) sum = hn::Add(sum, LoadFirst(bias + i, count));
    if (keep) sum = hn::MulAdd(beta, LoadFirst(c + i, count), sum);
    StoreFirst(sum, c + i, count);
  });
}

void FinishProductRowOnTarget(const ProductRow& row, size_t n) {
  WithStorageType(row.bias_type, [&](auto bias_tag) HWY_ATTR {
    WithStorageType(row.c_type, [&](auto c_tag) HWY_ATTR {
      Finish(row, static_cast<const decltype(bias_tag)*>(row.bias),
             static_cast<decltype(c_tag)*>(row.c), n);
    });
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace upipe::kernels::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace upipe::kernels::cpu {

HWY_EXPORT(CastOrAddRow);
HWY_EXPORT(FinishProductRowOnTarget);

void CopyRow(const void* from, DType from_type, void* to, DType to_type, int64_t n,
             bool accumulate) {
  if (n == 0) return;
  if (from_type == to_type && !accumulate) {
    std::memcpy(to, from, n * SizeOf(to_type));
  } else {
    HWY_DYNAMIC_DISPATCH(CastOrAddRow)(from, from_type, to, to_type, n, accumulate);
  }
}

void FinishProductRow(const ProductRow& row, int64_t n) {
  HWY_DYNAMIC_DISPATCH(FinishProductRowOnTarget)(row, n);
}

}  // namespace upipe::kernels::cpu
#endif  // HWY_ONCE
