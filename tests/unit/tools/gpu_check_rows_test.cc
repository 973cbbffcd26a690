// Rows in double precision against the reference at sizes it gets through, and what the check does
// with tensors, over the cpu device with the check's own kernels on the emulator.
#include <gtest/gtest.h>

#include <cmath>

#include "tools/gpu_check/exact_rows.h"
#include "tools/gpu_check/sized_calls.h"

namespace upipe::gpu_check {
namespace {

// Rows in fp32 of what sums in double.
constexpr double kFp32 = 1e-6;

double ErrorOf(const ExactRows& rows, const ExactRows& exact) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    for (size_t e = 0; e < exact[i].size(); ++e) {
      error += std::pow(rows[i][e] - exact[i][e], 2);
      norm += std::pow(exact[i][e], 2);
    }
  }
  return std::sqrt(error / norm);
}

struct RowCase {
  const char* name;
  AttentionShape shape;
};
void PrintTo(const RowCase& c, std::ostream* out) { *out << c.name; }

class ExactRowsTest : public ::testing::TestWithParam<RowCase> {
 protected:
  void SetUp() override {
    auto device = CheckDevice::Create({.backend = "cpu", .small = true}, 64 << 20);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
    auto calls = MakeAttention(GetParam().shape, *device_);
    ASSERT_TRUE(calls.ok()) << calls.status();
    calls_ = *std::move(calls);
    // Not rounded to bf16.
    auto& p = calls_.forward;
    p.o = *device_->Tensor(kernels::DType::kFloat32, {p.q.shape[0], 1, p.q.shape[2]});
    ASSERT_EQ(device_->RunToEnd(*device_->library(), p), absl::OkStatus());
  }

  static std::vector<int64_t> Sampled(int64_t rows) { return {0, 1, rows / 2, rows - 2, rows - 1}; }

  template <typename Check>
  void WithBoth(const Check& check) {
    check(Precision::kDouble, kFp32);
    // bf16 operands.
    check(Precision::kPlain, 0x1p-6);
  }

  std::unique_ptr<CheckDevice> device_;
  AttentionCalls calls_;
};

TEST_P(ExactRowsTest, ForwardIsTheReferences) {
  const auto& p = calls_.forward;
  const std::vector<int64_t> rows = Sampled(p.q.shape[0]);
  const auto o = device_->Rows(p.o, rows), lse = device_->Rows(p.lse, rows);
  ASSERT_TRUE(o.ok() && lse.ok());
  WithBoth([&](Precision precision, double bound) {
    const auto exact = ExactForwardRows(p, rows, precision, device_->device(), device_->stream());
    ASSERT_TRUE(exact.ok()) << exact.status();
    EXPECT_LE(ErrorOf(*o, exact->o), bound);
    for (size_t i = 0; i < rows.size(); ++i) {
      EXPECT_NEAR((*lse)[i][0], exact->lse[i], kFp32 * (1 + std::abs(exact->lse[i])));
    }
  });
}

TEST_P(ExactRowsTest, GradientsAreTheReferences) {
  const auto& b = calls_.backward;
  calls_.delta.b = calls_.backward.dout;  // any delta is a delta
  ASSERT_EQ(device_->RunToEnd(device_->own(), calls_.delta), absl::OkStatus());
  ASSERT_EQ(device_->RunToEnd(*device_->library(), b), absl::OkStatus());
  const std::vector<int64_t> queries = Sampled(b.q.shape[0]), keys = Sampled(b.k.shape[0]);
  const auto dq = device_->Rows(b.dq, queries), dk = device_->Rows(b.dk, keys),
             dv = device_->Rows(b.dv, keys);
  ASSERT_TRUE(dq.ok() && dk.ok() && dv.ok());
  WithBoth([&](Precision precision, double bound) {
    const auto exact_dq =
        ExactQueryGradient(b, queries, precision, device_->device(), device_->stream());
    const auto exact =
        ExactKeyGradientRows(b, keys, precision, device_->device(), device_->stream());
    ASSERT_TRUE(exact_dq.ok() && exact.ok()) << exact_dq.status() << exact.status();
    EXPECT_LE(ErrorOf(*dq, *exact_dq), bound);
    EXPECT_LE(ErrorOf(*dk, exact->dk), bound);
    EXPECT_LE(ErrorOf(*dv, exact->dv), bound);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, ExactRowsTest,
    ::testing::Values(
        RowCase{"LateQueries", {.queries = {300, 340}, .keys = {0, 340}, .head_dim = 40}},
        RowCase{"FewKeys", {.queries = {0, 300}, .keys = {0, 17}, .head_dim = 136}},
        RowCase{"Window", {.queries = {0, 330}, .keys = {0, 330}, .head_dim = 8, .window = 37}},
        RowCase{"KeysApart", {.queries = {50, 90}, .keys = {40, 260}, .head_dim = 16}}),
    [](const auto& info) { return info.param.name; });

TEST(CheckDevice, DifferencesAreOfEveryElement) {
  auto device = CheckDevice::Create({.backend = "cpu", .small = true}, 64 << 20);
  ASSERT_TRUE(device.ok()) << device.status();
  CheckDevice& check = **device;
  for (const kernels::DType dtype : {kernels::DType::kFloat32, kernels::DType::kBFloat16}) {
    const kernels::TensorView a = *check.Tensor(dtype, {50, 2, 16});
    const kernels::TensorView b = *check.Tensor(dtype, {50, 2, 16});
    ASSERT_EQ(check.FillNormal(a, 3), absl::OkStatus());
    ASSERT_EQ(check.FillNormal(b, 3), absl::OkStatus());
    EXPECT_EQ(*check.Difference(a, b), 0);
    ASSERT_EQ(check.Fill(b, 2), absl::OkStatus());
    ASSERT_EQ(check.Fill(a, 2), absl::OkStatus());
    const kernels::TensorView last = b.Rows(49, 1);
    ASSERT_EQ(check.Fill(last, 3), absl::OkStatus());
    // 32 of 1600 elements are off by 1.
    EXPECT_NEAR(*check.Difference(b, a), std::sqrt(32 / (1600 * 4.0)), 1e-12);
    ASSERT_EQ(check.Fill(last, NAN), absl::OkStatus());
    EXPECT_EQ(*check.Difference(b, a), INFINITY);
  }
  const kernels::TensorView lse = *check.Tensor(kernels::DType::kFloat32, {2, 75});
  ASSERT_EQ(check.Fill(lse, 5), absl::OkStatus());
  EXPECT_EQ(*check.Difference(lse, lse), 0);
}

}  // namespace
}  // namespace upipe::gpu_check
