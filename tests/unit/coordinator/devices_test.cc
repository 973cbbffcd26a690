// Slots that are devices: jobs and workers of one backend find each other, and a sick device takes
// no new ranks while the rest of its node does.
#include "coordinator/core/view.h"
#include "coordinator/core/waiting.h"
#include "tests/unit/coordinator/scene.h"

namespace upipe::coordinator {
namespace {

using ::testing::HasSubstr;

class Devices : public Scene {
 protected:
  // Workers `a` and `b`, two devices each.
  void GpuWorkers() {
    for (const auto& [session, worker] : {std::pair<SessionId, const char*>(1, "a"), {2, "b"}}) {
      v1::Hello hello = HelloOf(worker, 2);
      hello.set_backend("cuda");
      for (int slot = 0; slot < 2; ++slot)
        hello.add_devices()->set_uuid(absl::StrCat("GPU-", worker, slot));
      core_.Do(HelloReceived{session, hello});
    }
  }
  // A heartbeat of worker `a`.
  void TellDevices(const std::string& sick_of_slot_1) {
    HeartbeatReceived event{1, 1};
    for (int slot = 0; slot < 2; ++slot)
      event.heartbeat.add_devices()->set_uuid(absl::StrCat("GPU-a", slot));
    event.heartbeat.mutable_devices(1)->set_sick(sick_of_slot_1);
    core_.Do(event);
  }
  static v1::JobSpec OnCuda(int ranks) {
    v1::JobSpec spec = SpecOf(ranks);
    spec.mutable_parallel()->set_backend("cuda");
    return spec;
  }
  std::vector<std::string> PlacesOf(const std::string& id = "j") {
    std::vector<std::string> places;
    for (const v1::RankRecord& rank : core_.job(id).attempt->record.ranks())
      places.push_back(absl::StrCat(rank.worker(), rank.slot()));
    return places;
  }
  v1::Slot SlotOf(const std::string& worker, int slot) {
    const v1::ListNodesResponse nodes = ListNodes(core_.state(), core_.now().boot);
    for (const v1::Node& node : nodes.nodes()) {
      if (node.worker() == worker) return node.slots(slot);
    }
    return {};
  }
};

TEST_F(Devices, ASickOneIsLeftOutAlone) {
  GpuWorkers();
  TellDevices("XID 79");
  EXPECT_EQ(SlotOf("a", 0).state(), v1::SLOT_STATE_FREE);
  EXPECT_EQ(SlotOf("a", 0).device().uuid(), "GPU-a0");
  EXPECT_EQ(SlotOf("a", 1).state(), v1::SLOT_STATE_SICK);
  EXPECT_EQ(SlotOf("a", 1).device().sick(), "XID 79");
  SubmitSpec(OnCuda(3));
  Plan(3);
  EXPECT_THAT(PlacesOf(), ::testing::UnorderedElementsAre("a0", "b0", "b1"));
}

TEST_F(Devices, AJobThatNeedsASickOneWaitsUntilItIsWell) {
  GpuWorkers();
  TellDevices("XID 79");
  SubmitSpec(OnCuda(4));
  Plan(4);
  ASSERT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_QUEUED);
  const auto why = Why(core_.state(), "j", core_.now());
  ASSERT_TRUE(why.ok());
  EXPECT_EQ(why->reason(), v1::WAIT_REASON_CORDONED);
  EXPECT_EQ(why->message(), "needs 4 slots, 3 of 4 are free, 1 have a sick device");
  TellDevices("");
  core_.Do(Tick{});
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_STARTING);
}

TEST_F(Devices, OneThatFallsSickKeepsItsRankAndTakesNoOther) {
  GpuWorkers();
  SubmitSpec(OnCuda(4));
  Plan(4);
  Meet();
  TellDevices("3 uncorrectable memory errors");
  EXPECT_EQ(core_.JobStateOf("j"), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(SlotOf("a", 1).state(), v1::SLOT_STATE_BUSY);
  GangGone();
  EXPECT_EQ(SlotOf("a", 0).state(), v1::SLOT_STATE_FREE);
  EXPECT_EQ(SlotOf("a", 1).state(), v1::SLOT_STATE_SICK);
}

TEST_F(Devices, AHelloTellsThemToo) {
  GpuWorkers();
  TellDevices("XID 79");
  v1::Hello again = HelloOf("a", 2);
  again.set_backend("cuda");
  again.set_session_number(2);
  again.add_devices()->set_sick("XID 48");
  core_.Do(HelloReceived{7, again});
  EXPECT_EQ(SlotOf("a", 0).state(), v1::SLOT_STATE_SICK);
  EXPECT_EQ(SlotOf("a", 1).state(), v1::SLOT_STATE_FREE);
  for (int i = 0; i < 3; ++i) again.add_devices();
  again.set_session_number(3);
  core_.Do(HelloReceived{8, again});
  EXPECT_EQ(core_.state().nodes.at("a").session, 7u) << "four devices of two slots";
}

TEST_F(Devices, JobsRunOnTheirBackendOnly) {
  core_.Do(HelloReceived{3, HelloOf("cpus", 8)});
  SubmitSpec(OnCuda(4), "early");
  EXPECT_FALSE(core_.state().jobs.contains("early")) << "refused: no device is known";
  GpuWorkers();
  SubmitSpec(OnCuda(4));
  Plan(4);
  EXPECT_THAT(PlacesOf(), ::testing::UnorderedElementsAre("a0", "a1", "b0", "b1"));
  Submit(5, "on-cpus");
  Plan(5, "on-cpus");
  EXPECT_THAT(PlacesOf("on-cpus"),
              ::testing::ElementsAre("cpus0", "cpus1", "cpus2", "cpus3", "cpus4"));
  SubmitSpec(OnCuda(5), "too-many");
  EXPECT_FALSE(core_.state().jobs.contains("too-many"));
}

TEST_F(Devices, HostMemoryIsNoneOfTheDevices) {
  v1::RunPlan plan = PlanOf(1).plan();
  plan.mutable_ranks(0)->mutable_host_memory()->set_arena_bytes(5000);
  EXPECT_EQ(PlannedBytesPerRank(plan), 5100);
  plan.mutable_spec()->mutable_parallel()->set_backend("cuda");
  EXPECT_EQ(PlannedBytesPerRank(plan), 100);
}

}  // namespace
}  // namespace upipe::coordinator
