// JobSpec -> RunPlan: what is auto is searched for (search.h), the rest is dry runs of the job's
// own step, put together where it repeats itself (compose.h). The bytes come from the same code
// that will allocate them; nothing here estimates. Time is told by a device description
// (step_time.h).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>

#include "absl/status/statusor.h"
#include "planner/dry_run.h"
#include "upipe/v1/device.pb.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::planner {

// Told while a search goes on: one line for people.
using Progress = std::function<void(const std::string& line)>;

struct PlanLimits {
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

  // What a rank may take from the machine; the job's own train.memory_per_rank lowers it. Unlimited
  // means the device description's memory on cuda.
  int64_t memory_per_rank_bytes = kUnlimited;
  // Of a node, for what its ranks keep on the host; 0 = the device description's. Not looked at on
  // cpu, where device and host memory are one.
  int64_t host_memory_bytes = 0;
  // Opens the packed data and checks that it holds a sequence of the context and fits the
  // vocabulary.
  bool check_data = true;
  // Refuses backends that this build only plans for.
  bool must_run = true;
  // A refusal names the nearest change that fits, which is priced first: as long as many plans.
  bool advise = true;
  // What workers' libraries take beyond what formulas say; part of the plan.
  v1::MeasuredWorkspaces measured;
  const v1::DeviceFile* device = nullptr;  // instead of the one parallel.device names; borrowed
  std::string device_folder;               // of device files beside the known ones
  int num_threads = 1;
  Progress progress = nullptr;
};

// Pure but for reading the data's headers and device files. InvalidArgument with every violation of
// the spec; NotFound, DataLoss or InvalidArgument about the data or the device description;
// FailedPrecondition for a backend that cannot run; ResourceExhausted naming rank, largest
// category, bytes asked and available, and the nearest change that fits.
absl::StatusOr<v1::RunPlan> MakeRunPlan(const v1::JobSpec& spec, const PlanLimits& limits);

// Of MakeRunPlan what takes no dry run: spec, schedule, tokens, parameters and FLOPs. `spec` has no
// violations and nothing auto.
absl::StatusOr<v1::RunPlan> PlanShape(const v1::JobSpec& spec);

}  // namespace upipe::planner
