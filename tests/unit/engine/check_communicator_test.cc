// What NCCL, played, took of a device against what a plan leaves for it: the run ends before step 1
// with both numbers where it is too much.
#include "engine/train/check_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "engine/comm/nccl/nccl_context.h"
#include "tests/support/engine/fake_nccl.h"
#include "tests/support/engine/host_comm_device.h"

namespace upipe::train {
namespace {

using ::testing::HasSubstr;

// Of the communicator of a single rank.
int64_t BytesTaken() {
  auto context =
      comm::NcclContext::Create(std::make_shared<comm::FakeNccl>(comm::NewFakeNcclWorld()),
                                std::make_shared<comm::HostCommDevice>("GPU-0"), /*rank=*/0, {});
  EXPECT_TRUE(context.ok()) << context.status();
  comm::PeerGroup group{.rank = 0, .addresses = {(*context)->address()}, .node_ids = {"node"}};
  const auto comm = (*context)->Connect(group, {});
  EXPECT_TRUE(comm.ok()) << comm.status();
  return (*context)->device_bytes();
}

// A plan whose arena leaves `unused` bytes of its budget.
v1::RunPlan PlanOf(int64_t reserved, int64_t unused) {
  constexpr int64_t kArena = 1000;
  v1::RunPlan plan;
  plan.set_device("h200");
  plan.mutable_spec()->mutable_parallel()->set_ranks(1);
  plan.add_ranks()->mutable_memory()->set_arena_bytes(kArena);
  plan.mutable_budget()->set_reserved_bytes(reserved);
  plan.mutable_budget()->set_device_bytes(kArena + unused);
  return plan;
}

TEST(CheckCommunicator, RefusesWhatThePlanLeavesNoRoomFor) {
  const int64_t taken = BytesTaken();
  ASSERT_EQ(taken, 32);
  EXPECT_EQ(CheckCommunicatorMemory(PlanOf(taken, 0), 0, taken), absl::OkStatus());
  EXPECT_EQ(CheckCommunicatorMemory(PlanOf(taken - 8, 8), 0, taken), absl::OkStatus());
  // An arena larger than the budget leaves nothing, and takes nothing of what is reserved.
  EXPECT_EQ(CheckCommunicatorMemory(PlanOf(taken, -8), 0, taken), absl::OkStatus());
  const absl::Status refused = CheckCommunicatorMemory(PlanOf(taken - 8, 7), 0, taken);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("(32 bytes) of device memory"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("(31 bytes) for it"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("device h200"));
}

TEST(CheckCommunicator, APlanThatReservesNothingSetsNoLimit) {
  EXPECT_EQ(CheckCommunicatorMemory(PlanOf(0, 0), 0, int64_t{1} << 40), absl::OkStatus());
}

}  // namespace
}  // namespace upipe::train
