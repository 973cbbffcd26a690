// The profile of a step is the plan seen moment by moment: its highest moment is the plan's peak,
// tag by tag.
#include "tools/report/step_profile.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "planner/plan.h"
#include "tools/report/run_record.h"

namespace upipe::report {
namespace {

v1::JobSpec Spec() {
  v1::JobSpec spec;
  spec.set_name("tiny");
  v1::ModelSpec& model = *spec.mutable_model();
  model.set_vocab_size(257);
  model.set_hidden_size(32);
  model.set_num_layers(2);
  model.set_num_heads(8);
  model.set_num_kv_heads(2);
  model.set_head_dim(8);
  model.set_intermediate_size(64);
  spec.mutable_data()->set_path("nowhere");
  spec.mutable_parallel()->set_ranks(4);
  spec.mutable_parallel()->set_method(v1::METHOD_UPIPE);
  spec.mutable_parallel()->set_heads_per_stage(4);
  spec.mutable_train()->set_context(1024);
  spec.mutable_train()->set_steps(2);
  spec.mutable_train()->set_eval_sequences(0);
  return spec;
}

v1::RunPlan Plan(const v1::JobSpec& spec) {
  planner::PlanLimits limits;
  limits.check_data = false;
  const absl::StatusOr<v1::RunPlan> plan = planner::MakeRunPlan(spec, limits);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *plan;
}

const ProfileMoment& Fullest(const std::vector<ProfileMoment>& profile) {
  return *std::max_element(profile.begin(), profile.end(), [](const auto& a, const auto& b) {
    return a.total_bytes < b.total_bytes;
  });
}

TEST(StepProfile, ItsHighestMomentIsThePlansPeak) {
  for (const v1::JobSpec& spec : {Spec(), AsUlysses(Spec())}) {
    const v1::RunPlan plan = Plan(spec);
    const auto profile = ProfileStep(plan, 1);
    ASSERT_TRUE(profile.ok()) << profile.status();
    const ProfileMoment& fullest = Fullest(*profile);
    const v1::MemoryUsage& planned = PlannedMemory(plan, 1);
    EXPECT_EQ(fullest.total_bytes, planned.peak_bytes());
    EXPECT_EQ(fullest.moment, planned.peak_moment());
    for (int tag = 0; tag < kernels::kNumMemoryTags; ++tag) {
      const v1::TagBytes* bytes = FindTag(planned, kernels::kMemoryTagNames[tag]);
      EXPECT_EQ(fullest.bytes[tag], bytes == nullptr ? 0 : bytes->at_peak_bytes())
          << kernels::kMemoryTagNames[tag];
    }
  }
}

TEST(StepProfile, ThinningKeepsThePeakAndEveryPass) {
  const v1::RunPlan plan = Plan(Spec());
  const auto profile = ProfileStep(plan, 0);
  ASSERT_TRUE(profile.ok()) << profile.status();
  const std::vector<ProfileMoment> thin = Thin(*profile, 12);
  EXPECT_LT(thin.size(), profile->size());
  EXPECT_EQ(Fullest(thin).total_bytes, Fullest(*profile).total_bytes);
  for (const ProfileMoment& moment : *profile) {
    const std::string pass = moment.moment.substr(0, moment.moment.find(" stage"));
    EXPECT_TRUE(std::any_of(thin.begin(), thin.end(), [&pass](const ProfileMoment& kept) {
      return kept.moment.starts_with(pass);
    })) << pass;
  }
}

}  // namespace
}  // namespace upipe::report
