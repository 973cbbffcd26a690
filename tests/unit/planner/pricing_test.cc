// What a search goes by is near what the plan then says.
#include "planner/pricing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"

namespace upipe::planner {
namespace {

v1::JobSpec Spec(const std::vector<std::string>& overrides) {
  constexpr char kJob[] = R"(name: estimate
model: {preset: llama3-8b}
data: {path: none}
parallel: {ranks: 8, method: upipe, backend: cuda}
train: {context: 4M, steps: 1, dtype: bf16}
)";
  const auto spec = ParseJobSpecYaml(kJob, "job.yaml", overrides);
  UPIPE_CHECK(spec.ok()) << spec.status();
  return WithDefaults(*spec);
}

double Ratio(int64_t estimate, int64_t exact) {
  return exact == 0 ? 1 + static_cast<double>(estimate)
                    : static_cast<double>(estimate) / static_cast<double>(exact);
}

TEST(Estimate, IsNearThePlan) {
  const std::vector<std::vector<std::string>> points = {
      {"parallel.heads_per_stage=8"},
      {"parallel.heads_per_stage=4", "parallel.ring_ranks=8", "memory.query_chunks=4",
       "memory.hidden_stream=host", "memory.layer_inputs=host"},
      {"parallel.method=usp", "parallel.ring_ranks=2", "memory.query_chunks=16",
       "memory.layer_inputs=host", "memory.checkpoint_stride=2", "memory.optimizer=host"},
      {"parallel.heads_per_stage=16", "memory.overlap=true", "memory.attention_output=host",
       "memory.layer_inputs=host", "parallel.ring_ranks=2", "memory.ring_kv=keep"},
  };
  for (const std::vector<std::string>& point : points) {
    const v1::JobSpec spec = Spec(point);
    const auto pricing = Pricing::For(spec, {.must_run = false});
    UPIPE_CHECK(pricing.ok()) << pricing.status();
    const auto estimate = pricing->Estimate(spec);
    const auto exact = pricing->Of(spec);
    UPIPE_CHECK(estimate.ok() && exact.ok()) << estimate.status() << exact.status();
    const std::string name = absl::StrJoin(point, " ");
    EXPECT_NEAR(Ratio(estimate->device_bytes, exact->device_bytes), 1, 0.06) << name;
    EXPECT_NEAR(Ratio(estimate->host_bytes, exact->host_bytes), 1, 0.001) << name;
    EXPECT_NEAR(estimate->seconds / exact->seconds, 1, 0.005) << name;
  }
}

}  // namespace
}  // namespace upipe::planner
