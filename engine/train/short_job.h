// The short job that a self check trains: the job's own model, axes, policy and storage type over a
// few synthetic tokens, as the job holds a sequence and with all of it on one rank. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/train/step.h"
#include "upipe/v1/plan.pb.h"

namespace upipe::train {

struct ShortJob {
  const v1::RunPlan& job;  // borrowed; any whose spec, schedule and schedule_hash are there
  int64_t context = 0;     // tokens of one sequence
  int64_t steps = 0;
};

// Who holds a sequence.
enum class Side : uint8_t {
  kAlone,   // CP = 1: the first of the job's context ranks holds all of it, the others a token that
            // has no label (docs/adr/0019); no exchange, one stage, everything on the device
  kScaled,  // the same model written with other numbers (WeightScale), its labels in parts: what
            // rounding alone changes
  kJob,     // CP = N: as the job does
};

// A context that uses every stage, query chunk and ring hop of the job, its padding included where
// the job pads: the multiple `units` of what contexts are padded to.
int64_t ContextOf(const v1::RunPlan& job, int64_t units);
// `units` of the longest context a check takes by itself: at most the job's.
int64_t MostUnits(const v1::RunPlan& job);

// spec, schedule and schedule_hash of `side` as `rank` runs it: the ranks share parameters as the
// job's do, so that each holds the same shard on every side.
absl::StatusOr<v1::RunPlan> PlanOf(const ShortJob& job, Side side, int rank);

// What kScaled multiplies a parameter by, and with it divides its gradient: the hidden states grow
// by kScale and nothing else changes, for every layer begins with an RMSNorm, whose epsilon PlanOf
// lets grow too. In exact arithmetic the loss is the same; every rounding is another.
inline constexpr double kScale = 1.375;
double WeightScale(const std::string& tensor, bool tied_embeddings);

// A whole sequence, without padding.
struct ShortSequence {
  std::vector<int32_t> tokens, labels;         // [tokens]; -1 = no label
  std::vector<int64_t> positions;              // [tokens] rotary
  std::vector<int64_t> document_starts = {0};  // ascending from 0
};
// Sequence `number` of the job's synthetic data. Several documents, one of a single token, where
// the job keeps documents apart.
ShortSequence MakeShortSequence(const ShortJob& job, int64_t number);

// A rank's part of a sequence, in the order it holds it.
struct RankTokens {
  std::vector<int32_t> tokens, labels;  // [N]
  std::vector<int64_t> positions;       // [N]
  std::vector<int64_t> document_starts;
  HostTokens host() const;  // borrows
};
RankTokens PartOf(const ShortJob& job, const ShortSequence& sequence, Side side, int rank);
// The same with every label but those of part `part` of kLossParts taken off. One loss may be right
// by luck, that of every part is not; and gradients of parts are sums in another order.
inline constexpr int kLossParts = 4;
RankTokens WithLabelsOf(int part, const RankTokens& tokens);
// What the micro-steps of one step (1-based) train on: a sequence each, or of kScaled a part of its
// labels.
std::vector<RankTokens> PartsOfStep(const ShortJob& job, int64_t step, Side side, int rank);

int64_t SequencesOfStep(const ShortJob& job);
// Labels of all sequences of a step.
int64_t NumLabels(const ShortJob& job, int64_t step);

// What may not reach a loss: the labels left are those of tokens that must not see the changed
// ones.
struct LeakProbe {
  std::string what;  // "in document 3 of 5", "at positions from 512 on"
  ShortSequence before, changed;
};
// Documents kept apart reach no other; later tokens reach no earlier one where attention is causal.
// Empty where a sequence is one document that everything in it sees.
std::vector<LeakProbe> LeakProbesOf(const ShortJob& job);

}  // namespace upipe::train
