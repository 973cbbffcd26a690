// Before a long run: do the ranks of a job, over a short sequence, compute what one of them
// computes alone? A few steps at CP = N and at CP = 1 on the job's own ranks, from the same
// weights; whether a document's or a later token's content reaches where it must not; and whether
// the allocators measure what a dry run of the same steps planned. One verdict, the same on every
// rank. What it can and cannot see: docs/selfcheck.md.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/comm/communicator.h"
#include "kernels/device_factory.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

struct SelfCheckOptions {
  int64_t steps = 3;               // 1 to 1,000
  std::optional<int64_t> context;  // tokens; absent: chosen, at most 4,096 and at most the job's
  // What a rank may take from the machine where that is more than the job's own arenas.
  std::optional<int64_t> memory_bytes;
};

// Borrowed for the length of the check. The same plan and options on every rank.
struct SelfCheckRun {
  const v1::RunPlan& plan;
  int rank = 0;
  comm::Communicator& comm;
  std::vector<int> cpus = {};  // where the threads of its devices run; none = anywhere
  SelfCheckOptions options = {};
  std::function<absl::StatusOr<std::unique_ptr<kernels::Device>>(const kernels::DeviceOptions&)>
      create_device = kernels::CreateDevice;
};

// A number of CP = 1, the same of CP = N, how far apart they are relative to the first, and how far
// they may be. The bound is STYLE's: three times what rounding alone changes (CP = 1 once more, its
// tokens at other places of every tile) plus half an epsilon of the storage type.
struct Compared {
  std::string what;  // "loss of step 2"
  double alone = 0;  // of a tensor: its norm
  double job = 0;    // of a tensor: absent, 0
  double error = 0;
  double bound = 0;
  bool holds() const { return error <= bound; }  // false for NaN
};

// Bytes of a pool of one rank on one side.
struct PlannedAndMeasured {
  std::string what;  // "CP = 4, device: arena"
  int64_t planned = 0;
  int64_t measured = 0;
};

struct SelfCheckReport {
  int context_ranks = 1;  // N
  int64_t context = 0;    // tokens of a sequence
  int64_t documents = 1;  // of a sequence
  int64_t sequences = 0;  // of a step
  int64_t steps = 0;
  std::vector<Compared> numbers;           // valid tokens, loss and gradient norm of each step
  std::vector<Compared> gradients;         // of step 1, in the order the backward pass makes them
  std::vector<std::string> probes;         // what was changed, and reached nothing it must not
  std::vector<PlannedAndMeasured> memory;  // peaks and arenas of this rank
  int64_t bytes = 0;                       // most this rank took, kept gradient included
  std::string failure;                     // the first thing that differs; empty = none
  bool passed() const { return failure.empty(); }
};
// "PASS: .." or "FAIL: ..", one sentence.
std::string VerdictOf(const SelfCheckReport& report);

// Blocking, collective. Makes devices of its own, one after the other, each gone when it returns:
// call it before the job's device takes the machine's memory. A rank takes at most the arenas of
// the job's plan, or `memory_bytes` where that is more: weights, gradients and moments of its shard
// as in the job, activations of the short sequence, and one copy of the gradient shard (4 bytes a
// parameter and rank) in ordinary memory; the sequence is shortened until it fits. Errors, after
// which the communicator is good for nothing but Abort: InvalidArgument about the options,
// ResourceExhausted with the bytes asked and there, whatever device or communicator fail with. What
// differs is no error but the report's.
absl::StatusOr<SelfCheckReport> RunSelfCheck(const SelfCheckRun& run);

}  // namespace upipe::train
