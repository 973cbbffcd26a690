#include "engine/parallel/plan_hash.h"

#include <gtest/gtest.h>

namespace upipe::parallel {
namespace {

v1::RunPlan Plan() {
  v1::RunPlan plan;
  plan.mutable_spec()->set_name("job");
  plan.mutable_spec()->mutable_train()->set_context(8192);
  plan.mutable_schedule()->add_stages()->add_ranks()->add_query_heads(3);
  plan.add_ranks()->mutable_memory()->set_arena_bytes(1 << 20);
  return plan;
}

TEST(PlanHash, CoversEverythingButItself) {
  v1::RunPlan plan = Plan();
  const uint64_t hash = HashOf(plan);
  plan.set_plan_hash(hash);
  EXPECT_EQ(HashOf(plan), hash);

  v1::RunPlan context = Plan();
  context.mutable_spec()->mutable_train()->set_context(8193);
  v1::RunPlan head = Plan();
  head.mutable_schedule()->mutable_stages(0)->mutable_ranks(0)->set_query_heads(0, 2);
  v1::RunPlan arena = Plan();
  arena.mutable_ranks(0)->mutable_memory()->set_arena_bytes((1 << 20) + 1);
  for (const v1::RunPlan& changed : {context, head, arena}) EXPECT_NE(HashOf(changed), hash);
}

TEST(PlanHash, SurvivesTheWire) {
  v1::RunPlan received;
  ASSERT_TRUE(received.ParseFromString(Plan().SerializeAsString()));
  EXPECT_EQ(HashOf(received), HashOf(Plan()));
}

}  // namespace
}  // namespace upipe::parallel
