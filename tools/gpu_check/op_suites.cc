// Test suites of the project, compiled into this program as they are, run on the device: every op
// against the reference, cuDNN's attention against it, and the invariance of training over ranks.
#include <gtest/gtest.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/device_factory.h"
#include "tests/kernels/kernels/support/tested_mirrored.h"
#include "tests/support/engine/engine_harness.h"
#include "tools/gpu_check/parts.h"

namespace upipe::gpu_check {
namespace {

// Left out on a device: what forbids the host's memory to be touched, spans more address space than
// a GPU has memory, or is about the cpu backend's threads and variants.
constexpr char kNotOnDevice[] =
    "*Apart*:*MatmulRefusesRowStrides*:*AttentionBackwardBeyond32BitOffsets*:"
    "*OffsetsBeyond32BitsGiveTheSameBits*";
constexpr char kOps[] =
    "AdamW*:ClipScale*:ColumnSum*:*CrossEntropy*:*Embedding*:Fill*:*/Matmul.*:Matmul.*:Peers41.*:"
    "RandomNormal*:*RmsNorm*:*Rope*:RowDot*:*StridedCopy*:SumOfSquares*:*SwiGlu*:*CudaAttention*";
constexpr char kSmallOps[] = "AdamW*:Fill*:RowDot*:Matmul.IntegersAreExact*:*/HeadDim64";
constexpr char kLibraryCases[] = "*LibraryAttention*";
constexpr char kSmallLibraryCases[] = "*LibraryAttention.Forward*/HeadDim64";
constexpr char kInvariance[] = "*Invariance.*:*Documents.*:*Methods.*bf16";
constexpr char kSmallInvariance[] = "*Documents.Peers13*/upipe*";
constexpr char kTiming[] = "*Bits.TheSameTwiceUnderAnyTiming*";
constexpr char kSmallTiming[] = "*Bits.TheSameTwiceUnderAnyTiming/upipeC2R1_*";

// Tells each test's outcome to the findings.
class Teller final : public ::testing::EmptyTestEventListener {
 public:
  explicit Teller(Findings& findings) : findings_(findings) {}

 private:
  void OnTestEnd(const ::testing::TestInfo& test) override {
    const ::testing::TestResult& result = *test.result();
    const std::string name = absl::StrCat(test.test_suite_name(), ".", test.name());
    std::string first;
    for (int i = 0; i < result.total_part_count() && first.empty(); ++i) {
      const ::testing::TestPartResult& part = result.GetTestPartResult(i);
      if (part.failed() || part.skipped()) first = part.message();
    }
    std::replace(first.begin(), first.end(), '\n', ' ');
    if (result.Skipped()) {
      findings_.Skipped(absl::StrCat(name, ": ", first));
    } else {
      findings_.Expect(result.Passed(), name, first);
    }
  }

  Findings& findings_;
};

// Once in a process.
void RunTests(const std::string& filter, Findings& findings) {
  std::string program = "upipe-gpu-check", flag = "--gtest_filter=" + filter;
  std::vector<char*> argv = {program.data(), flag.data(), nullptr};
  int argc = static_cast<int>(argv.size()) - 1;
  ::testing::InitGoogleTest(&argc, argv.data());
  ::testing::UnitTest::GetInstance()->listeners().Append(new Teller(findings));
  if (RUN_ALL_TESTS() != 0) return;  // each failure was told
  if (::testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    findings.Failed("no test has a name like " + filter);
  }
}

absl::Status RunOpTests(const Settings& settings, const std::string& attention_kernel,
                        const std::string& filter, Findings& findings) {
  kernels::DeviceOptions options = {
      .backend = settings.backend,
      .arena_bytes = settings.small ? int64_t{64} << 20 : int64_t{112} << 30,
      .host_bytes = 1 << 20};
  if (settings.backend == "cuda") options.attention_kernel = attention_kernel;
  UPIPE_ASSIGN_OR_RETURN(const auto device, kernels::CreateDevice(options));
  kernels::testing::SetTestedDevice(*device);
  RunTests(filter, findings);
  return absl::OkStatus();
}

absl::Status RunTrainingTests(const Settings& settings, const std::string& filter,
                              Findings& findings) {
  testing::TestedBackend() = settings.backend;
  // Without a GPU no test need try.
  const kernels::DeviceOptions tiny = {
      .backend = settings.backend, .arena_bytes = 1 << 20, .host_bytes = 1 << 20};
  UPIPE_RETURN_IF_ERROR(kernels::CreateDevice(tiny).status());
  RunTests(filter, findings);
  return absl::OkStatus();
}

}  // namespace

Part OpSuitePart(const Settings& settings) {
  const std::string filter = absl::StrCat(settings.small ? kSmallOps : kOps, "-", kNotOnDevice);
  return {.name = "ops",
          .what = "every op against the reference",
          .budget = absl::Seconds(55),
          .cases = {"tests " + filter},
          .run = [=](Findings& f) { return RunOpTests(settings, "own", filter, f); }};
}

Part LibrarySuitePart(const Settings& settings) {
  const std::string filter = settings.small ? kSmallLibraryCases : kLibraryCases;
  return {.name = "library_attention",
          .what = "cuDNN's attention against the reference",
          .budget = absl::Seconds(30),
          .cases = {"tests " + filter},
          .run = [=](Findings& f) { return RunOpTests(settings, "cudnn 9.19", filter, f); }};
}

Part InvariancePart(const Settings& settings) {
  const std::string filter = settings.small ? kSmallInvariance : kInvariance;
  return {.name = "invariance",
          .what = "any method on any number of ranks, all on this device, gives one rank's numbers",
          .budget = absl::Seconds(45),
          .cases = {"tests " + filter},
          .run = [=](Findings& f) { return RunTrainingTests(settings, filter, f); }};
}

Part TimingPart(const Settings& settings) {
  const std::string filter = settings.small ? kSmallTiming : kTiming;
  return {.name = "timing",
          .what = "delayed streams and poisoned memory change no bit of a training step",
          .budget = absl::Seconds(30),
          .cases = {"tests " + filter},
          .run = [=](Findings& f) { return RunTrainingTests(settings, filter, f); }};
}

}  // namespace upipe::gpu_check
