// Rotary frequencies and rotations against Hugging Face transformers at positions up to 5,000,000:
// a misreading of a scaling's constants, or of the hf_parity mode, hardly shows within the few
// tokens that the models of the golden files are trained on.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "tests/golden/engine/golden_file.h"
#include "tests/golden/engine/golden_job.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe {
namespace {

using golden::GoldenFile;

struct Case {
  std::string file;
  bool hf_parity = false;
};

std::string NameOf(const Case& c) {
  return absl::StrCat(c.file, c.hf_parity ? "_hf_parity" : "_exact");
}
void PrintTo(const Case& c, std::ostream* out) { *out << NameOf(c); }

class RopeGolden : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    auto file = GoldenFile::Open(golden::DataFile(GetParam().file));
    ASSERT_TRUE(file.ok()) << file.status();
    file_ = std::make_unique<GoldenFile>(*std::move(file));
    const auto plan =
        testing::MakePlan(golden::SpecOf(*file_, {.hf_parity = GetParam().hf_parity}));
    ASSERT_TRUE(plan.ok()) << plan.status();
    config_ = model::ModelConfig::From(plan->spec().model(), plan->spec().train().context()).rope;
    dim_ = file_->config().head_dim;
  }
  absl::Span<const double> Table(absl::string_view name) const {
    return *file_->Tensor<double>(
        absl::StrCat(GetParam().hf_parity ? "rope_hf_parity/" : "rope/", name));
  }

  std::unique_ptr<GoldenFile> file_;
  kernels::RopeConfig config_;
  int64_t dim_ = 0;
};

// [positions, head_dim]: where the rotation takes a head whose first half is 1 and second half 0,
// that is (cosines, sines).
std::vector<float> Rotated(const kernels::RopeConfig& config, absl::Span<const int32_t> positions,
                           int64_t dim) {
  kernels::DeviceOptions options;
  options.arena_bytes = 1 << 20;
  const auto device = *kernels::CreateDevice(options);
  const auto stream = device->CreateStream("rope");
  const auto count = static_cast<int64_t>(positions.size());
  const auto allocate = [&](int64_t bytes) {
    return *device->allocator().Allocate(kernels::MemoryTag::kWorkspace, bytes, *stream);
  };
  const auto x = allocate(count * dim * 4), p = allocate(count * 8);
  std::vector<float> host(count * dim, 0);
  for (int64_t t = 0; t < count; ++t) std::fill_n(host.begin() + t * dim, dim / 2, 1.0f);
  const std::vector<int64_t> wide(positions.begin(), positions.end());
  device->CopyFromHost(x.data(), host.data(), x.size_bytes(), *stream);
  device->CopyFromHost(p.data(), wide.data(), p.size_bytes(), *stream);
  const auto view =
      kernels::TensorView::Matrix(x.data(), kernels::DType::kFloat32, count, dim).AsTensor3();
  const kernels::RopeParams params = {
      .src = view,
      .dst = view,
      .positions = kernels::TensorView::Vector(p.data(), kernels::DType::kInt64, count),
      .config = config};
  const auto workspace = allocate(device->ops().WorkspaceBytes(params));
  EXPECT_EQ(device->ops().Enqueue(params, {workspace.data(), workspace.size_bytes()}, *stream),
            absl::OkStatus());
  device->CopyToHost(host.data(), x.data(), x.size_bytes(), *stream);
  EXPECT_EQ(stream->Synchronize(), absl::OkStatus());
  return host;
}

TEST_P(RopeGolden, InverseFrequencies) {
  const auto expected = Table("inverse_frequencies");
  const auto actual = kernels::RopeInverseFrequencies(config_, dim_);
  ASSERT_EQ(actual.size(), expected.size());
  // Rounded ones equal transformers' bit for bit, or far angles would be others.
  const double bound = GetParam().hf_parity ? 0 : 1e-14;
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_NEAR(actual[i], expected[i], bound * expected[i]) << "pair " << i;
  }
}

TEST_P(RopeGolden, RotationAtFarPositions) {
  const auto positions = *file_->Tensor<int32_t>("rope/positions");
  const auto cosines = Table("cos"), sines = Table("sin");
  const auto rotated = Rotated(config_, positions, dim_);
  const int64_t half = dim_ / 2;
  ASSERT_EQ(cosines.size(), positions.size() * half);
  constexpr double kTolerance = 2e-7;
  for (size_t t = 0; t < positions.size(); ++t) {
    for (int64_t i = 0; i < half; ++i) {
      EXPECT_NEAR(rotated[t * dim_ + i], cosines[t * half + i], kTolerance)
          << "position " << positions[t] << " pair " << i;
      EXPECT_NEAR(rotated[t * dim_ + half + i], sines[t * half + i], kTolerance)
          << "position " << positions[t] << " pair " << i;
    }
  }
}

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const char* file :
       {"tiny", "llama3_rope", "linear_rope", "dynamic_rope", "yarn_rope", "qwen3_yarn"}) {
    for (const bool hf_parity : {false, true}) cases.push_back({file, hf_parity});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Goldens, RopeGolden, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return NameOf(info.param); });

}  // namespace
}  // namespace upipe
