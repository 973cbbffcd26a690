#include "kernels/cpu/isa.h"

#include <cstdlib>

#include "gtest/gtest.h"

namespace upipe::kernels {
namespace {

TEST(Isa, NamesWhatRuns) {
  EXPECT_NE(DispatchedIsa(), "Unknown");
  EXPECT_NE(MatmulCore(), "");
}

TEST(Isa, UnknownNameIsRefusedWithTheKnownOnes) {
  const absl::Status status = CapIsa("AVX9");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("SSE4"), std::string::npos) << status;
}

TEST(Isa, Bf16ProductsAreTheirOwnInstructionSet) {
  EXPECT_TRUE(CheckIsaName("AVX3_BF16").ok());
  EXPECT_EQ(DispatchedIsa() == "AVX3_BF16", HasBf16Products());
  SetBf16ProductsForTest(false);
  EXPECT_FALSE(HasBf16Products());
  EXPECT_NE(DispatchedIsa(), "AVX3_BF16");
  EXPECT_EQ(CapIsa("AVX3_BF16").code(), absl::StatusCode::kFailedPrecondition);
  SetBf16ProductsForTest(true);
}

// A cap lasts for the process, so a child sets it.
TEST(IsaDeathTest, CapBelowTurnsBf16ProductsOff) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const std::string cap = HasBf16Products() ? "AVX3" : "SSE4";
        const bool capped = CapIsa(cap).ok();
        std::exit(capped && !HasBf16Products() && DispatchedIsa() == cap ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

TEST(IsaDeathTest, CapLowersAndCannotBeRaised) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        const std::string best = DispatchedIsa();
        const bool capped = CapIsa("SSE4").ok() && DispatchedIsa() == "SSE4";
        const bool raised = best != "SSE4" && CapIsa(best).ok();
        std::exit(capped && !raised ? 0 : 1);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace upipe::kernels
