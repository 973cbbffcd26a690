// Draining and what else an operator says of workers.
#include "client/node_commands.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

#include "tests/unit/client/console_test.h"

namespace upipe::client {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

class NodeCommandsTest : public ConsoleTest {
 protected:
  static v1::ListNodesResponse WithSlot(v1::SlotState state, const std::string& job) {
    v1::ListNodesResponse nodes;
    v1::Node& node = *nodes.add_nodes();
    node.set_worker("a");
    node.set_state(v1::NODE_STATE_READY);
    node.set_cordoned(true);
    v1::Slot& slot = *node.add_slots();
    slot.set_state(state);
    slot.set_job_id(job);
    return nodes;
  }
};

TEST_F(NodeCommandsTest, DrainTellsWhoWasAskedToLeave) {
  coordinator_.nodes = WithSlot(v1::SLOT_STATE_BUSY, "demo-abcdef");
  EXPECT_EQ(Drain(console_, {.worker = "a", .reason = "disk"}), kExitDone);
  EXPECT_EQ(out_.str(), "a  READY, cordoned  1 BUSY\ntold to leave: demo-abcdef\n");
  ASSERT_THAT(coordinator_.drained, SizeIs(1));
  EXPECT_FALSE(coordinator_.drained[0].has_grace_millis());
  EXPECT_THAT(pauses_, SizeIs(0));
}

TEST_F(NodeCommandsTest, DrainWaitsUntilNothingIsLeft) {
  coordinator_.nodes = WithSlot(v1::SLOT_STATE_BUSY, "demo-abcdef");
  coordinator_.node_answers = {coordinator_.nodes, absl::UnavailableError("away"),
                               coordinator_.nodes, WithSlot(v1::SLOT_STATE_FREE, "")};
  EXPECT_EQ(Drain(console_, {.worker = "a", .wait = true, .timeout = absl::Minutes(1)}), kExitDone);
  EXPECT_EQ(out_.str(), "a  READY, cordoned  1 FREE\n");
  EXPECT_EQ(err_.str(), "told to leave: demo-abcdef\n");
  EXPECT_THAT(pauses_, SizeIs(3));
}

TEST_F(NodeCommandsTest, DrainGivesUpAndNamesWhatIsLeft) {
  coordinator_.nodes = WithSlot(v1::SLOT_STATE_BUSY, "demo-abcdef");
  EXPECT_EQ(Drain(console_, {.worker = "a", .wait = true, .timeout = absl::Seconds(2)}),
            kExitTimeout);
  EXPECT_THAT(err_.str(), AllOf(HasSubstr("a was not drained within 2.0 s"),
                                HasSubstr("rank 0 of demo-abcdef")));
}

// Only its worker's end frees it, and that is what the drain is for.
TEST_F(NodeCommandsTest, DrainDoesNotWaitForAQuarantinedSlot) {
  coordinator_.nodes = WithSlot(v1::SLOT_STATE_QUARANTINED, "demo-abcdef");
  EXPECT_EQ(Drain(console_, {.worker = "a", .wait = true, .timeout = absl::Seconds(2)}), kExitDone);
  EXPECT_THAT(out_.str(), HasSubstr("1 QUARANTINED"));
}

TEST_F(NodeCommandsTest, DrainInJsonIsOneMessage) {
  coordinator_.nodes = WithSlot(v1::SLOT_STATE_BUSY, "demo-abcdef");
  console_.json = true;
  EXPECT_EQ(Drain(console_, {.worker = "a"}), kExitDone);
  const auto json = nlohmann::json::parse(out_.str());
  EXPECT_EQ(json.at("job_ids").at(0), "demo-abcdef");
  EXPECT_EQ(json.at("node").at("cordoned"), true);
}

TEST_F(NodeCommandsTest, AnUnknownWorkerIsAWrongRequest) {
  EXPECT_EQ(Drain(console_, {.worker = "b"}), kExitWrongRequest);
  EXPECT_EQ(Cordon(console_, "b", ""), kExitWrongRequest);
  EXPECT_EQ(Uncordon(console_, "b"), kExitWrongRequest);
  EXPECT_EQ(FenceNode(console_, {.worker = "b", .yes = true}), kExitWrongRequest);
  EXPECT_EQ(ForgetNode(console_, {.worker = "b", .yes = true}), kExitWrongRequest);
  EXPECT_THAT(err_.str(), HasSubstr("no worker b"));
}

}  // namespace
}  // namespace upipe::client
