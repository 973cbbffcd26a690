// Tensors of one op call in a test: strided, surrounded and interleaved by sentinels that nothing
// may touch, poisoned where an op must write before it reads. The same seed builds the same call
// again.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kernels/api/op_params.h"

namespace upipe::kernels::testing {

class Memory {
 public:
  explicit Memory(uint64_t seed) : random_(seed) {}

  struct Shape {
    std::vector<int64_t> dims;  // 1 to 3
    int64_t gap = 0;            // unused elements after each row (all dims but the last)
  };
  // Read only: normal numbers times `scale`.
  TensorView Input(Shape shape, double scale = 1);
  // Written without being read: starts as NaN.
  TensorView Output(std::string name, Shape shape, DType dtype = DType::kFloat32);
  // Read and written: starts as normal numbers times `scale`.
  TensorView InOut(std::string name, Shape shape, double scale = 1, DType dtype = DType::kFloat32);
  // Read only, given values.
  TensorView Ints(const std::vector<int32_t>& values);
  TensorView Positions(const std::vector<int64_t>& values);
  TensorView Doubles(const std::vector<double>& values);
  // Takes values that a test wrote into inputs as given.
  void SealInputs();
  std::mt19937_64& random() { return random_; }

  // Name and elements of every Output and InOut, in order of creation.
  struct Result {
    std::string name;
    std::vector<double> values;
  };
  std::vector<Result> Results() const;
  // The first thing that changed though no op may change it: an input, a gap or a border. Empty
  // when none.
  std::string Damage() const;

 private:
  struct Block {
    std::string name;  // empty for inputs
    TensorView view;
    std::vector<char> bytes;
    std::vector<char> before;  // copy taken when the call was built
    std::vector<bool> writable;
  };
  TensorView Add(std::string name, const Shape& shape, DType dtype,
                 const std::function<double()>& value);

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

// Writes `value` to element (i, j, k), whatever the type.
void SetElement(const TensorView& view, int64_t i, int64_t j, int64_t k, double value);
double GetElement(const TensorView& view, int64_t i, int64_t j = 0, int64_t k = 0);

// dst = src, tensors of one shape.
void CopyElements(const TensorView& src, const TensorView& dst);

}  // namespace upipe::kernels::testing
