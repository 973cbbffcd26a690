// Before step 1 every op of the step is prepared, and the first thing that a library lacks or takes
// too much of is told.
#include "engine/train/check_workspaces.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "engine/train/measured_workspaces.h"
#include "kernels/api/scratch_table.h"
#include "kernels/host/host_device.h"
#include "kernels/reference/reference_op_table.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {
namespace {

// Of one op its library takes more than was planned, another it cannot do.
class Greedy final : public kernels::OpTable {
 public:
  Greedy(std::string greedy, std::string impossible, std::set<std::string>& prepared)
      : greedy_(std::move(greedy)), impossible_(std::move(impossible)), prepared_(prepared) {}
  int64_t WorkspaceBytes(const kernels::OpParams& params) const override {
    return reference_->WorkspaceBytes(params);
  }
  absl::StatusOr<int64_t> Prepare(const kernels::OpParams& params) override {
    prepared_.insert(NameOf(params));
    if (const auto* forward = std::get_if<kernels::AttentionFwdParams>(&params)) {
      prepared_.insert(absl::StrCat("at most ", forward->mask.documents_max, " documents of ",
                                    forward->mask.document_length_max, ", ",
                                    forward->mask.document_starts->size()));
    }
    if (NameOf(params) == impossible_) return absl::FailedPreconditionError("no such plan");
    const int64_t bytes = reference_->WorkspaceBytes(params);
    return NameOf(params) == greedy_ ? bytes + 7777 : bytes;
  }
  absl::Status Enqueue(const kernels::OpParams& params, kernels::Workspace,
                       kernels::Stream&) override {
    ADD_FAILURE() << NameOf(params) << " is run";
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<kernels::OpTable> reference_ = kernels::CreateReferenceOpTable();
  const std::string greedy_, impossible_;
  std::set<std::string>& prepared_;
};

train::WorkspaceCheck Check(const v1::RunPlan& plan, const std::string& greedy,
                            std::set<std::string>& prepared, const std::string& impossible = "") {
  const auto device =
      *kernels::HostDevice::Create({}, std::make_unique<Greedy>(greedy, impossible, prepared));
  return train::CheckWorkspaces(plan, 0, *device);
}

TEST(CheckWorkspaces, PreparesEveryOpOfTheStep) {
  std::set<std::string> prepared;
  const train::WorkspaceCheck check = Check(*MakePlan(MakeSpec({})), "", prepared);
  EXPECT_EQ(check.status, absl::OkStatus());
  EXPECT_EQ(check.measured.ops_size(), 0);
  for (const char* op :
       {"embedding_fwd", "matmul", "attention_fwd", "attention_bwd", "cross_entropy", "adamw"}) {
    EXPECT_TRUE(prepared.contains(op)) << op;
  }
}

// Every shape of that op, of every rank: of 3 heads on 2 ranks, one has two in its first stage.
TEST(CheckWorkspaces, MeasuresEveryRanksOpsWhereOneTakesMoreThanPlanned) {
  std::set<std::string> prepared;
  const v1::RunPlan plan = *MakePlan(
      MakeSpec({.ranks = 2, .num_heads = 3, .num_kv_heads = 3, .method = v1::METHOD_ULYSSES}));
  const train::WorkspaceCheck check = Check(plan, "attention_bwd", prepared);
  EXPECT_EQ(check.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(check.status.message()),
              ::testing::MatchesRegex("attention_bwd of \\[.*\\] takes 7.6 KiB \\(7777 bytes\\) of "
                                      "scratch here, 0 B \\(0 bytes\\) are planned"));
  std::set<int64_t> heads;
  for (const v1::MeasuredWorkspaces::Op& op : check.measured.ops()) {
    EXPECT_EQ(op.op(), "attention_bwd");
    EXPECT_EQ(op.measured_bytes(), op.counted_bytes() + 7777);
    heads.insert(op.shape(1));
  }
  EXPECT_EQ(heads, (std::set<int64_t>{1, 2})) << check.measured.DebugString();
}

// A plan that knows of it gives the op what it takes.
TEST(CheckWorkspaces, APlanWithWhatWasMeasuredPasses) {
  std::set<std::string> prepared;
  v1::RunPlan plan = *MakePlan(MakeSpec({.ranks = 2}));
  const train::WorkspaceCheck first = Check(plan, "attention_fwd", prepared);
  ASSERT_FALSE(first.status.ok());
  *plan.mutable_measured() = first.measured;
  const kernels::ScratchTable table = train::ScratchTableOf(plan);
  const auto device = *kernels::HostDevice::Create(
      {},
      kernels::WithMeasuredScratch(std::make_unique<Greedy>("attention_fwd", "", prepared), table));
  EXPECT_EQ(train::CheckWorkspaces(plan, 0, *device).status, absl::OkStatus());
}

// Of packed documents nothing that a library prepares depends on those of one sequence, so all that
// are to come are told of: here five, the longest of nine tokens.
TEST(CheckWorkspaces, PackedDocumentsArePreparedForTheMostThereAre) {
  std::set<std::string> prepared;
  v1::RunPlan plan = *MakePlan(MakeSpec({.documents = v1::DOCUMENTS_SEPARATE}));
  plan.set_documents_max(5);
  plan.set_document_tokens_max(9);
  EXPECT_EQ(Check(plan, "", prepared).status, absl::OkStatus());
  for (const char* way : {"at most 5 documents of 9, 3", "at most 5 documents of 9, 4"}) {
    EXPECT_TRUE(prepared.contains(way)) << way;
  }
}

// No other plan helps: nothing is measured.
TEST(CheckWorkspaces, WhatCannotBeDoneIsToldFirst) {
  std::set<std::string> prepared;
  const train::WorkspaceCheck check =
      Check(*MakePlan(MakeSpec({})), "attention_fwd", prepared, "matmul");
  EXPECT_EQ(check.status, absl::FailedPreconditionError("no such plan"));
  EXPECT_EQ(check.measured.ops_size(), 0);
}

}  // namespace
}  // namespace upipe::testing
