// Building blocks of Validate: each call checks one thing of one field and remembers the first
// violation, as a sentence naming op, field and values.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/api/op_params.h"

namespace upipe::kernels {

// What the dtype of a field must be: one dtype, or a letter of op_params.h.
struct ElementType {
  enum class Rule { kExactly, kStorage, kStorageOrWide, kFloating };
  constexpr ElementType(DType dtype) : rule(Rule::kExactly), dtype(dtype) {}  // NOLINT: implicit
  constexpr explicit ElementType(Rule rule) : rule(rule) {}

  Rule rule;
  DType dtype = DType::kFloat32;  // of kExactly
};
inline constexpr ElementType kS{ElementType::Rule::kStorage};  // the one storage type of the call
inline constexpr ElementType kW{DType::kFloat32};
inline constexpr ElementType kSOrW{ElementType::Rule::kStorageOrWide};
inline constexpr ElementType kFloating{ElementType::Rule::kFloating};  // fp32 or bf16, by itself

class ParamCheck {
 public:
  explicit ParamCheck(const char* op) : op_(op) {}

  // The first violation, or OK.
  const absl::Status& status() const { return status_; }

  // A readable tensor: present, of this element type and rank, last dim contiguous, strides not
  // negative, address aligned to the dtype. Zero elements need no address. The first S field of a
  // call sets what S is; later S, and S or W, are held to it.
  void Input(const char* field, const TensorView& view, int rank, ElementType type);
  // As Input, and no two elements share an address.
  void Output(const char* field, const TensorView& view, int rank, ElementType type);
  // Output of any dtype and rank.
  void AnyOutput(const char* field, const TensorView& view);
  void Gapless(const char* field, const TensorView& view);
  // shape[dim] == expected; `meaning` says where the expected value comes from.
  void Dim(const char* field, const TensorView& view, int dim, int64_t expected,
           absl::string_view meaning);
  void SameShape(const char* field, const TensorView& view, const char* other_field,
                 const TensorView& other);
  // shape[dim] >= 1.
  void NotEmpty(const char* field, const TensorView& view, int dim);
  // The two tensors do not begin at one address.
  void Distinct(const char* field, const TensorView& view, const char* other_field,
                const TensorView& other);
  // Distinct, or the very same elements: address, dtype and strides.
  void DistinctOrSame(const char* field, const TensorView& view, const char* other_field,
                      const TensorView& other);
  // `ok` says the scalar field is in range; the sentence is "FIELD = VALUE, must be RULE", whose
  // parts are put together only when it is needed.
  template <typename Value, typename... Rule>
  void Scalar(bool ok, const char* field, Value value, const Rule&... rule) {
    if (!ok) Fail(absl::StrCat(field, " = ", value, ", must be ", rule...));
  }
  void Fail(absl::string_view sentence);

 private:
  void Element(const char* field, DType dtype, ElementType type);
  void Layout(const char* field, const TensorView& view);
  void NoSelfOverlap(const char* field, const TensorView& view);

  const char* op_;
  absl::Status status_;
  // The first S field and its dtype.
  const char* storage_field_ = nullptr;
  DType storage_ = DType::kFloat32;
};

}  // namespace upipe::kernels
