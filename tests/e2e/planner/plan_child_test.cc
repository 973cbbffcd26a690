// upipe-plan as the coordinator's child: a JobSpec in, a PlanResult out. For any backend, whatever
// this machine has; and once more, with what a worker measured.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/spec/yaml_spec.h"
#include "tests/support/cluster/cluster.h"
#include "upipe/v1/plan.pb.h"

namespace upipe {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr char kJob[] = R"(name: plan
model: {vocab_size: 64, hidden_size: 32, num_layers: 2, num_heads: 8, num_kv_heads: 2, head_dim: 8,
  intermediate_size: 48}
data: {path: none}
parallel: {ranks: 2, method: upipe, heads_per_stage: 2}
train: {context: 8K, steps: 3, dtype: bf16}
)";

std::string Child() { return absl::StrCat(std::getenv("UPIPE_BIN_DIR"), "/upipe-plan"); }

class PlanChild : public ::testing::Test {
 protected:
  PlanChild() : folder_(absl::StrCat(::testing::TempDir(), "upipe-plan-child-", getpid())) {
    std::filesystem::create_directories(folder_);
  }
  ~PlanChild() override { std::filesystem::remove_all(folder_); }

  std::string Write(const std::string& name, const google::protobuf::Message& message) {
    const std::string path = absl::StrCat(folder_, "/", name);
    std::ofstream out(path, std::ios::binary);
    UPIPE_CHECK(message.SerializeToOstream(&out));
    return path;
  }
  v1::PlanResult Plan(const std::vector<std::string>& overrides, const std::string& bytes,
                      const v1::RunPlan* earlier = nullptr) {
    const auto spec = ParseJobSpecYaml(kJob, "job.yaml", overrides);
    UPIPE_CHECK(spec.ok()) << spec.status();
    const std::string output = absl::StrCat(folder_, "/plan");
    std::vector<std::string> command = {Child(),
                                        "--spec",
                                        Write("spec", WithDefaults(*spec)),
                                        "--without-data",
                                        "--memory-per-rank",
                                        bytes,
                                        "--output",
                                        output};
    if (earlier != nullptr) {
      command.insert(command.end(), {"--earlier", Write("earlier", *earlier)});
    }
    const testing::CommandResult result = testing::RunCommand(command);
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    v1::PlanResult plan;
    std::ifstream in(output, std::ios::binary);
    EXPECT_TRUE(plan.ParseFromIstream(&in));
    return plan;
  }

  const std::string folder_;
};

int64_t ArenaOf(const v1::RunPlan& plan) { return plan.ranks(0).memory().arena_bytes(); }

// The attention backward of `plan` as a worker might measure it.
v1::RunPlan WithMeasured(v1::RunPlan plan, int64_t bytes) {
  v1::MeasuredWorkspaces::Op& op = *plan.mutable_measured()->add_ops();
  op.set_op("attention_bwd");
  for (const int64_t size : {8192, 1, 8, 8192, 1, 4}) op.add_shape(size);  // 4: bf16
  op.set_counted_bytes(1000);
  op.set_measured_bytes(bytes);
  return plan;
}

TEST_F(PlanChild, PlansForGpusWhereThereAreNone) {
  const v1::PlanResult result = Plan({"parallel.backend=cuda"}, "80GiB");
  ASSERT_TRUE(result.has_plan()) << result.refusal().message();
  EXPECT_EQ(result.plan().attention_kernel(), "cuda cudnn 9.19 bf16");
}

// Neither code of devices nor what it links is in the program.
TEST_F(PlanChild, NeedsNoDevicesLibrary) {
  const auto words = [](const std::string& command) {
    const testing::CommandResult result =
        testing::RunCommand({"/bin/sh", "-c", absl::StrCat(command, " ", Child())});
    EXPECT_EQ(result.exit_code, 0) << result.errors;
    return result.output;
  };
  const std::string symbols = words("nm -C");
  EXPECT_THAT(symbols, HasSubstr("upipe::kernels::CreateDryDevice("));
  EXPECT_THAT(symbols, Not(HasSubstr("upipe::kernels::CreateDevice(")));
  const std::string libraries = words("readelf -d");
  EXPECT_THAT(libraries, HasSubstr("NEEDED"));
  EXPECT_THAT(libraries, Not(HasSubstr("cublas")));
  EXPECT_THAT(libraries, Not(HasSubstr("nccl")));
}

TEST_F(PlanChild, OnceMoreIsTheSamePointWithWhatWasMeasured) {
  const std::vector<std::string> job = {"parallel.heads_per_stage=auto", "memory.policy=auto"};
  const v1::RunPlan first = Plan(job, "1GiB").plan();
  const v1::RunPlan measured = WithMeasured(first, int64_t{64} << 20);
  const v1::RunPlan again = Plan(job, "1GiB", &measured).plan();
  EXPECT_EQ(again.spec().SerializeAsString(), first.spec().SerializeAsString());
  EXPECT_EQ(again.measured().ops_size(), 1);
  EXPECT_NE(again.plan_hash(), first.plan_hash());
}

TEST_F(PlanChild, OnceMoreIsRefusedWithItsSentenceWhereItDoesNotFit) {
  const v1::RunPlan first = Plan({}, "1GiB").plan();
  ASSERT_GT(ArenaOf(first), 0);
  const v1::RunPlan measured = WithMeasured(first, int64_t{2} << 30);
  const v1::PlanResult refused = Plan({}, "1GiB", &measured);
  ASSERT_TRUE(refused.has_refusal()) << refused.plan().DebugString();
  EXPECT_THAT(refused.refusal().message(), HasSubstr("may take 1.0 GiB"));
}

// Where it no longer fits and something was left to the planner, another point is found.
TEST_F(PlanChild, OnceMoreIsAnotherPointWhereSomethingIsAuto) {
  const std::vector<std::string> job = {"parallel.method=auto",
                                        "parallel.heads_per_stage=", "memory.policy=auto"};
  const v1::RunPlan first = Plan(job, "1GiB").plan();
  v1::RunPlan measured = first;
  v1::MeasuredWorkspaces::Op& op = *measured.mutable_measured()->add_ops();
  op.set_op("attention_bwd");
  // As the first plan's stages are: all query heads of a rank at once.
  const int64_t heads = first.schedule().heads_per_rank();
  for (const int64_t size :
       std::initializer_list<int64_t>{8192, heads, 8, 8192, heads / 4 + (heads % 4 > 0), 4}) {
    op.add_shape(size);
  }
  op.set_counted_bytes(0);
  op.set_measured_bytes(int64_t{2} << 30);
  const v1::PlanResult again = Plan(job, "1GiB", &measured);
  ASSERT_TRUE(again.has_plan()) << again.refusal().message();
  EXPECT_NE(again.plan().spec().SerializeAsString(), first.spec().SerializeAsString());
  EXPECT_LT(ArenaOf(again.plan()), int64_t{1} << 30);
}

}  // namespace
}  // namespace upipe
