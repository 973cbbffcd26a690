// Tensors of one op call in a test: strided, surrounded and interleaved by sentinels that nothing
// may touch, poisoned where an op must write before it reads. The same seed builds the same call
// again.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "kernels/api/op_params.h"

namespace upipe::kernels::testing {

inline constexpr DType kW = DType::kFloat32;  // as in op_params.h

class Memory {
 public:
  // How rows of tensors begin: aligned to their elements and no more, or to 16 bytes where the last
  // dim is a multiple of that; gaps are rounded up to it then.
  enum class Alignment { kElement, kSixteenBytes };
  // `storage` is what op_params.h calls S.
  explicit Memory(uint64_t seed, DType storage = DType::kFloat32,
                  Alignment alignment = Alignment::kElement)
      : random_(seed), storage_(storage), alignment_(alignment) {}
  DType storage() const { return storage_; }

  struct Shape {
    std::vector<int64_t> dims;  // 1 to 3
    int64_t gap = 0;            // unused elements after each row (all dims but the last)
  };
  // A tensor is S where no dtype is given. Read only: normal numbers times `scale`.
  TensorView Input(Shape shape, double scale = 1, std::optional<DType> dtype = {});
  // Written without being read: starts as NaN.
  TensorView Output(std::string name, Shape shape, std::optional<DType> dtype = {});
  // Read and written: starts as normal numbers times `scale`.
  TensorView InOut(std::string name, Shape shape, double scale = 1,
                   std::optional<DType> dtype = {});
  // Read only, given values.
  TensorView Ints(const std::vector<int32_t>& values);
  TensorView Positions(const std::vector<int64_t>& values);
  TensorView Doubles(const std::vector<double>& values);
  // As Input, but the op may leave anything there, such as a result the test names by AddResult.
  TensorView Consumed(Shape shape, double scale = 1, std::optional<DType> dtype = {});
  void AddResult(std::string name, const TensorView& view);
  // Takes values that a test wrote into tensors as those it was built with; Restore puts them back.
  void Seal();
  void Restore();
  std::mt19937_64& random() { return random_; }

  // Name, dtype and elements of every Output, InOut and AddResult, in order of creation.
  struct Result {
    std::string name;
    DType dtype;
    std::vector<double> values;
  };
  std::vector<Result> Results() const;
  // The first thing that changed though no op may change it: an input, a gap or a border. Empty
  // when none.
  std::string Damage() const;

 private:
  struct Block {
    TensorView view;
    std::vector<char> bytes;
    std::vector<char> before;  // copy taken when the call was built
    std::vector<bool> writable;
  };
  TensorView Add(const Shape& shape, DType dtype, bool writable,
                 const std::function<double()>& value);

  std::mt19937_64 random_;
  const DType storage_;
  const Alignment alignment_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::vector<std::pair<std::string, TensorView>> results_;
};

// Writes `value` to element (i, j, k), whatever the type.
void SetElement(const TensorView& view, int64_t i, int64_t j, int64_t k, double value);
double GetElement(const TensorView& view, int64_t i, int64_t j = 0, int64_t k = 0);

// dst = src, tensors of one shape.
void CopyElements(const TensorView& src, const TensorView& dst);

}  // namespace upipe::kernels::testing
