// Matrix products as cuBLASLt is asked for them: the calls, carried out in columns by plain loops,
// give what the row-major product is; keys tell apart what an algorithm depends on; nothing passes
// 2^31.
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/matmul_calls.h"
#include "kernels/host/host_device.h"
#include "kernels/reference/reference_op_table.h"

namespace upipe::kernels {
namespace {

// c' = alpha * op(first) op(second) + beta * c' + bias, as cuBLASLt documents it, fp32.
void Carry(const MatmulCall& call) {
  const MatmulKey& key = call.key;
  const auto* first = static_cast<const float*>(call.first);
  const auto* second = static_cast<const float*>(call.second);
  auto* out = static_cast<float*>(call.out);
  for (int64_t j = 0; j < key.columns; ++j) {
    for (int64_t i = 0; i < key.rows; ++i) {
      double sum = 0;
      for (int64_t k = 0; k < key.depth; ++k) {
        const float a =
            first[key.first_transposed ? k + i * key.first_stride : i + k * key.first_stride];
        const float b =
            second[key.second_transposed ? j + k * key.second_stride : k + j * key.second_stride];
        sum += double{a} * b;
      }
      float& c = out[i + j * key.out_stride];
      double value = call.alpha * sum + (call.beta == 0 ? 0 : double{call.beta} * c);
      if (key.bias) value += static_cast<const float*>(call.bias)[i];
      c = static_cast<float>(value);
    }
  }
}

struct Problem {
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  float alpha, beta;
  bool bias;
};

void ExpectReferenceResult(const Problem& problem) {
  std::mt19937 random(7);
  const auto numbers = [&](int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(random() % 17) - 8;
    return values;
  };
  const int64_t gap = 3;
  const auto matrix = [&](std::vector<float>& memory, int64_t rows, int64_t columns) {
    memory = numbers(rows * (columns + gap) + 1);
    return TensorView::Matrix(memory.data(), DType::kFloat32, rows, columns, columns + gap);
  };
  std::vector<float> a, b, c, bias = numbers(problem.n), zeros(1024, 0.0f);
  MatmulParams p = {.transpose_a = problem.transpose_a,
                    .transpose_b = problem.transpose_b,
                    .alpha = problem.alpha,
                    .beta = problem.beta};
  p.a = problem.transpose_a ? matrix(a, problem.k, problem.m) : matrix(a, problem.m, problem.k);
  p.b = problem.transpose_b ? matrix(b, problem.n, problem.k) : matrix(b, problem.k, problem.n);
  p.c = matrix(c, problem.m, problem.n);
  if (problem.bias) p.bias = TensorView::Vector(bias.data(), DType::kFloat32, problem.n);
  std::vector<float> expected = c;
  MatmulParams q = p;
  q.c.data = expected.data();
  const auto device = *HostDevice::Create({}, CreateReferenceOpTable());
  const auto stream = device->CreateStream("reference");
  std::vector<char> scratch(static_cast<size_t>(device->ops().WorkspaceBytes(q)) + 1);
  ASSERT_TRUE(device->ops()
                  .Enqueue(q, {scratch.data(), static_cast<int64_t>(scratch.size())}, *stream)
                  .ok());
  ASSERT_TRUE(stream->Synchronize().ok());
  const MatmulCalls calls = CallsOf(p, zeros.data());
  EXPECT_LE(calls.zero_bytes, static_cast<int64_t>(zeros.size() * sizeof(float)));
  EXPECT_EQ(calls.zero_bytes > 0, problem.k == 0);
  EXPECT_FALSE(calls.bias_after);
  for (const MatmulCall& call : calls.calls) Carry(call);
  EXPECT_EQ(c, expected) << problem.m << " " << problem.n << " " << problem.k << " "
                         << problem.transpose_a << problem.transpose_b;
}

TEST(MatmulCalls, AreTheRowMajorProduct) {
  for (const bool transpose_a : {false, true}) {
    for (const bool transpose_b : {false, true}) {
      ExpectReferenceResult({5, 7, 3, transpose_a, transpose_b, 1, 0, false});
      ExpectReferenceResult({4, 2, 9, transpose_a, transpose_b, 0.5f, 1, true});
      ExpectReferenceResult({1, 6, 4, transpose_a, transpose_b, 1, -2, true});
      ExpectReferenceResult({6, 1, 1, transpose_a, transpose_b, 2, 0, true});
      ExpectReferenceResult({3, 5, 0, transpose_a, transpose_b, 1, 3, true});
      ExpectReferenceResult({3, 5, 0, transpose_a, transpose_b, 1, 0, false});
      ExpectReferenceResult({0, 5, 2, transpose_a, transpose_b, 1, 0, true});
    }
  }
}

char* const kAnywhere = reinterpret_cast<char*>(uintptr_t{1} << 44);

MatmulParams Large(int64_t m, int64_t n, int64_t k, bool transpose_a, DType storage, DType out) {
  MatmulParams p = {.transpose_a = transpose_a};
  p.a = transpose_a ? TensorView::Matrix(kAnywhere, storage, k, m)
                    : TensorView::Matrix(kAnywhere, storage, m, k);
  p.b = TensorView::Matrix(kAnywhere, storage, k, n);
  p.c = TensorView::Matrix(kAnywhere, out, m, n);
  return p;
}

TEST(MatmulCalls, CutRowsThatPass2To31Elements) {
  constexpr int64_t kRows = 5 << 20;
  const MatmulParams p = Large(kRows, 1024, 4096, false, DType::kBFloat16, DType::kBFloat16);
  const MatmulCalls calls = CallsOf(p, nullptr);
  ASSERT_EQ(calls.calls.size(), 10u);  // 20 Gi elements of a
  int64_t row = 0;
  for (const MatmulCall& call : calls.calls) {
    EXPECT_LE(call.key.columns * call.key.second_stride, kMatmulElementsMax);
    EXPECT_EQ(call.second, kAnywhere + row * 4096 * 2);
    EXPECT_EQ(call.out, kAnywhere + row * 1024 * 2);
    EXPECT_EQ(call.beta, 0);
    row += call.key.columns;
  }
  EXPECT_EQ(row, kRows);
  EXPECT_EQ(calls.calls[0].key, calls.calls[8].key) << "pieces share a plan";
}

TEST(MatmulCalls, CutTheDepthOfAWeightGradient) {
  constexpr int64_t kTokens = 3 << 20;
  MatmulParams p = Large(2048, 512, kTokens, true, DType::kBFloat16, DType::kFloat32);
  p.beta = 0.25f;
  p.bias = TensorView::Vector(kAnywhere, DType::kBFloat16, 512);
  const MatmulCalls calls = CallsOf(p, nullptr);
  ASSERT_EQ(calls.calls.size(), 3u);
  EXPECT_TRUE(calls.bias_after) << "a bf16 bias into an fp32 c";
  EXPECT_EQ(calls.calls[0].beta, 0.25f);
  EXPECT_EQ(calls.calls[1].beta, 1);
  EXPECT_EQ(calls.calls[2].second, kAnywhere + (int64_t{2} << 20) * 2048 * 2);
  // A bf16 c would be rounded once more per piece.
  EXPECT_EQ(CallsOf(Large(2048, 512, kTokens, true, DType::kBFloat16, DType::kBFloat16), nullptr)
                .calls.size(),
            1u);
}

TEST(MatmulCalls, KeysTellApartWhatAnAlgorithmDependsOn) {
  const MatmulParams p = Large(64, 32, 16, false, DType::kBFloat16, DType::kFloat32);
  std::set<MatmulKey> keys;
  const auto add = [&](MatmulParams q) { keys.insert(CallsOf(q, nullptr).calls.at(0).key); };
  add(p);
  add(p);
  EXPECT_EQ(keys.size(), 1u);
  MatmulParams q = p;
  q.alpha = 3;
  q.beta = 1;
  q.a.data = kAnywhere + 4096;
  add(q);
  EXPECT_EQ(keys.size(), 1u) << "numbers and places";
  q = p;
  q.a.data = kAnywhere + 8;
  add(q);
  EXPECT_EQ(keys.rbegin()->second_alignment, 16);
  EXPECT_EQ(keys.begin()->second_alignment, 8);
  q = p;
  q.b.stride[0] = 33;  // rows of 66 bytes
  add(q);
  q = p;
  q.c.dtype = DType::kBFloat16;
  add(q);
  q = Large(64, 32, 16, true, DType::kBFloat16, DType::kFloat32);
  add(q);
  q = Large(32, 64, 16, false, DType::kBFloat16, DType::kFloat32);
  add(q);
  q = Large(64, 32, 16, false, DType::kFloat32, DType::kFloat32);
  add(q);
  q.bias = TensorView::Vector(kAnywhere, DType::kFloat32, 32);
  add(q);
  EXPECT_EQ(keys.size(), 8u);
}

TEST(MatmulCalls, ASingleRowHasAStrideThatCublasTakes) {
  MatmulParams p = Large(1, 32, 16, false, DType::kFloat32, DType::kFloat32);
  p.a.stride[0] = 0;
  const MatmulKey key = CallsOf(p, nullptr).calls.at(0).key;
  EXPECT_EQ(key.second_stride, 16);
}

}  // namespace
}  // namespace upipe::kernels
