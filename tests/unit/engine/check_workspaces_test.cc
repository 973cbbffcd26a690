// Before step 1 every op of the step is prepared, and the first thing that a library lacks or takes
// too much of is told.
#include "engine/train/check_workspaces.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "kernels/host/host_device.h"
#include "kernels/reference/reference_op_table.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

// Says of one op that its library takes more than was planned.
class Greedy final : public kernels::OpTable {
 public:
  Greedy(std::string greedy, std::set<std::string>& prepared)
      : greedy_(std::move(greedy)), prepared_(prepared) {}
  int64_t WorkspaceBytes(const kernels::OpParams& params) const override {
    return reference_->WorkspaceBytes(params);
  }
  absl::Status Prepare(const kernels::OpParams& params) override {
    prepared_.insert(NameOf(params));
    if (NameOf(params) != greedy_) return absl::OkStatus();
    return absl::ResourceExhaustedError(greedy_ + " takes 7 bytes of scratch, 5 are planned");
  }
  absl::Status Enqueue(const kernels::OpParams& params, kernels::Workspace,
                       kernels::Stream&) override {
    ADD_FAILURE() << NameOf(params) << " is run";
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<kernels::OpTable> reference_ = kernels::CreateReferenceOpTable();
  const std::string greedy_;
  std::set<std::string>& prepared_;
};

absl::Status Check(const std::string& greedy, std::set<std::string>& prepared) {
  const v1::RunPlan plan = *MakePlan(MakeSpec({}));
  const auto device = *kernels::HostDevice::Create({}, std::make_unique<Greedy>(greedy, prepared));
  return train::CheckWorkspaces(plan, 0, *device);
}

TEST(CheckWorkspaces, PreparesEveryOpOfTheStep) {
  std::set<std::string> prepared;
  EXPECT_EQ(Check("", prepared), absl::OkStatus());
  for (const char* op :
       {"embedding_fwd", "matmul", "attention_fwd", "attention_bwd", "cross_entropy", "adamw"}) {
    EXPECT_TRUE(prepared.contains(op)) << op;
  }
}

TEST(CheckWorkspaces, TellsTheFirstThatTakesMoreThanPlanned) {
  std::set<std::string> prepared;
  const absl::Status status = Check("attention_bwd", prepared);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "attention_bwd takes 7 bytes of scratch, 5 are planned");
}

}  // namespace
}  // namespace upipe::testing
