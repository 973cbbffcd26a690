// A planner for the coordinator's tests, told by the job's name what to do: "crash" aborts,
// "refuse" refuses, "loop" never ends, anything else plans 1 MiB per rank.
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "upipe/v1/plan.pb.h"

int main(int argc, char** argv) {
  std::string spec_path, output_path;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--spec") == 0) spec_path = argv[i + 1];
    if (std::strcmp(argv[i], "--output") == 0) output_path = argv[i + 1];
  }
  std::ifstream input(spec_path, std::ios::binary);
  upipe::v1::JobSpec spec;
  if (!spec.ParseFromIstream(&input)) return 2;
  if (spec.name() == "crash") std::abort();
  for (volatile bool looping = spec.name() == "loop"; looping;) {
  }
  upipe::v1::PlanResult result;
  if (spec.name() == "refuse") {
    result.mutable_refusal()->set_code(8);
    result.mutable_refusal()->set_message("rank 0 needs 12345 bytes");
  } else {
    upipe::v1::RunPlan& plan = *result.mutable_plan();
    *plan.mutable_spec() = spec;
    plan.set_plan_hash(77);
    for (int r = 0; r < spec.parallel().ranks(); ++r) {
      plan.add_ranks()->set_rank(r);
      plan.mutable_ranks(r)->mutable_memory()->set_arena_bytes(1 << 20);
    }
  }
  std::ofstream output(output_path, std::ios::binary);
  return result.SerializeToOstream(&output) ? 0 : 3;
}
