#include "engine/parallel/plan_hash.h"

#include <string>

#include "xxhash.h"

namespace upipe::parallel {

uint64_t HashOf(const v1::RunPlan& plan) {
  v1::RunPlan unhashed = plan;
  unhashed.clear_plan_hash();
  const std::string bytes = unhashed.SerializeAsString();
  return XXH64(bytes.data(), bytes.size(), 0);
}

}  // namespace upipe::parallel
