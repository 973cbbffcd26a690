// Training sequences cut from a token shard, in an order that is a pure function of (seed, index):
// every rank, and every restart, reads any part of any sequence without state or coordination.
//
// An epoch lays non-overlapping windows of context + 1 tokens from a seeded offset and visits each
// once in a seeded order (a Feistel permutation: constant memory for any shard). Windows are laid
// without regard to documents: one may begin and end inside a document, and tells where the others
// begin.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/data/token_shard.h"
#include "kernels/api/op_params.h"

namespace upipe::data {

// Where a sequence lies in its shard.
struct SequenceWindow {
  int64_t epoch;         // how many times the shard was gone through before
  int64_t token_offset;  // of the first of its context + 1 tokens
};

// What follows the last token of a document.
enum class LabelRule : uint8_t {
  kEveryToken,       // the first token of the next one: a sequence is one document
  kWithinDocuments,  // no label, -1: none crosses a document boundary
};

// Immutable, so every method may be called from any thread. Keeps the shard mapped.
class SequenceSource {
 public:
  // `context` is the length of a sequence in tokens, at least 1. InvalidArgument when the shard
  // holds fewer than context + 1 tokens.
  static absl::StatusOr<SequenceSource> Create(TokenShard shard, int64_t context, uint64_t seed,
                                               LabelRule labels = LabelRule::kEveryToken);

  int64_t context() const { return context_; }
  uint32_t vocab_size() const { return shard_.vocab_size(); }
  // Sequences of one epoch, at least 1. Epoch e is the indices [e, e + 1) x this number.
  int64_t sequences_per_epoch() const { return windows_; }

  // Sequence `sequence_index`, any number from 0 upwards.
  SequenceWindow Window(int64_t sequence_index) const;

  // Positions, ascending, at which the documents of a sequence begin, within its `context` tokens:
  // the first is 0, where the window may begin inside a document. Logarithmic in the documents of
  // the shard, linear in those of the sequence. Blocks on disk as Read. InvalidArgument for a
  // negative index, DataLoss where the shard's starts are out of order.
  absl::StatusOr<std::vector<int64_t>> Documents(int64_t sequence_index) const;

  // Writes positions [begin, begin + count) of a sequence: tokens_out[i] is the token at position
  // begin + i, labels_out[i] the token that follows it (of position context - 1, too: the window is
  // one token longer than the sequence), or -1 where the rule of labels says so. Each must have
  // room for `count` values. Blocks on disk when the pages are cold. InvalidArgument for a range
  // outside [0, context) or a negative index, DataLoss for a token outside the vocabulary and, when
  // labels stay within documents, for starts out of order; the outputs are then undefined.
  absl::Status Read(int64_t sequence_index, int64_t begin, int64_t count, int32_t* tokens_out,
                    int32_t* labels_out) const;

 private:
  SequenceSource(TokenShard shard, int64_t context, uint64_t seed, LabelRule labels);

  // Those of the shard's document starts that lie in [begin, end), its tokens' indices.
  absl::StatusOr<absl::Span<const uint64_t>> StartsWithin(int64_t begin, int64_t end) const;

  TokenShard shard_;
  int64_t context_;
  uint64_t seed_;
  LabelRule labels_;
  int64_t windows_;  // per epoch
  int64_t slack_;    // tokens left over; an epoch's first window starts at 0 .. slack_
};

// Of the documents of any `context` tokens that follow one another in a shard.
struct DocumentBounds {
  int64_t documents_max = 0;  // of which some of them are a part
  int64_t tokens_max = 0;     // the longest of these parts
};
// Linear in the documents of the shard. Blocks on disk as Read; what lies out of order is told
// nowhere, and by Documents when it is met.
DocumentBounds DocumentBoundsOf(const TokenShard& shard, int64_t context);

// out[i] = how far position run.begin + i lies behind the start of its document. `document_starts`
// as Documents gives them; the run may reach past the context. `out` has room for the run.
void RotaryPositions(absl::Span<const int64_t> document_starts, kernels::PositionRun run,
                     int64_t* out);

}  // namespace upipe::data
