// One point of the space that every method lives in (method x axes x heads x context x mask x
// memory policy x storage type), what it computes, and the reference it is held to: one rank of the
// reference backend in fp32, every sequence by itself.
//
// The bound is STYLE's, of every tensor: three times the error of the plain run of the same
// precision (one rank, one stage, nothing on the host), plus half an epsilon of the storage type.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "tests/support/engine/engine_harness.h"

namespace upipe::testing {

// Where the documents of a sequence begin, when they are separate.
enum class DocumentBounds : uint8_t {
  kUneven,    // documents of one token and of many, bounds anywhere
  kOnShards,  // every bound where another rank's tokens, or another query chunk, begin
};

struct MethodCase {
  SmallJob job;
  DocumentBounds bounds = DocumentBounds::kUneven;
};

// The sequences of one step, in the order of train::SequenceOf: no two alike, nor their documents.
std::vector<Sequence> SequencesOf(const MethodCase& c);

// What one step computes from given weights.
struct Outcome {
  double loss = 0;
  double valid_tokens = 0;
  double grad_norm = 0;
  optim::StepScalars::ByPosition by_position;
  Tensors tensors;  // summed gradients by name, and the logits of sequence i as "logits i"
};
// Bit for bit. (`loss` stands for by_position, whose type has no comparison.)
bool SameBits(const Outcome& a, const Outcome& b);

// Device options beyond what the plan says.
using Adjust = std::function<void(int rank, kernels::DeviceOptions&)>;
// A device that delays tasks by a seeded time and fills freed memory with NaN.
Adjust Hostile(uint64_t seed);

// Evaluates every sequence for its logits, then runs one step. Internal when two ranks report
// unlike results.
absl::StatusOr<Outcome> RunOnce(const SmallJob& job, absl::Span<const Sequence> sequences,
                                const Adjust& adjust = {});
inline absl::StatusOr<Outcome> RunOnce(const MethodCase& c, const Adjust& adjust = {}) {
  return RunOnce(c.job, SequencesOf(c), adjust);
}

struct Reference {
  Outcome exact;
  // ||plain - exact|| / ||exact|| of every tensor of the exact outcome; of the loss that of all
  // token losses, of the norm that of all gradients: one number may be exact by luck.
  std::map<std::string, double> plain_errors;
  double plain_loss_error = 0;
  double plain_norm_error = 0;
  double half_epsilon = 0;  // of the storage type
  // A plain run that is off by more is wrong, not rounded, and its bound would say nothing.
  double largest_plain_error = 0;

  double Bound(double plain_error) const { return 3 * plain_error + half_epsilon; }
};
// Made once per model, sequences, mask and storage type of this process.
absl::StatusOr<const Reference*> ReferenceOf(const SmallJob& job,
                                             absl::Span<const Sequence> sequences);

// Loss, norm, number of valid tokens, logits and every gradient.
void ExpectWithinBound(const Outcome& outcome, const Reference& reference);
// Runs the case and compares.
void ExpectMatchesOneRank(const SmallJob& job, absl::Span<const Sequence> sequences);
inline void ExpectMatchesOneRank(const MethodCase& c) {
  ExpectMatchesOneRank(c.job, SequencesOf(c));
}

}  // namespace upipe::testing
