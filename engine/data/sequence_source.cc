#include "engine/data/sequence_source.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/status.h"

namespace upipe::data {
namespace {

constexpr int kFeistelRounds = 6;

// splitmix64's finalizer: a bijection of 64-bit numbers whose every output bit depends on every
// input bit (Steele, Lea, Flood 2014).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A number that depends on all three arguments, uniform over 64 bits.
uint64_t Draw(uint64_t seed, uint64_t epoch, uint64_t stream) {
  constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  return Mix(Mix(Mix(seed + kGolden) + epoch + kGolden) + stream + kGolden);
}

// The image of `index` under a seeded permutation of [0, size): a balanced Feistel network over the
// smallest even number of bits that holds `size`, walked until it lands inside (at most 4 steps on
// average, since the domain of the network is at most 4 x size).
uint64_t Permute(uint64_t index, uint64_t size, uint64_t key) {
  const uint64_t half_bits = std::max<uint64_t>(1, (std::bit_width(size - 1) + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half_bits) - 1;
  do {
    uint64_t left = index >> half_bits;
    uint64_t right = index & mask;
    for (int round = 0; round < kFeistelRounds; ++round) {
      const uint64_t mixed = left ^ (Draw(key, right, round) & mask);
      left = right;
      right = mixed;
    }
    index = left << half_bits | right;
  } while (index >= size);
  return index;
}

// Streams of Draw: one per use, so that no two uses share numbers.
constexpr uint64_t kOffsetStream = 0;
constexpr uint64_t kOrderStream = 1;

}  // namespace

absl::StatusOr<SequenceSource> SequenceSource::Create(TokenShard shard, int64_t context,
                                                      uint64_t seed, LabelRule labels) {
  if (context < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("context is %d tokens, must be at least 1", context));
  }
  // Written without context + 1, which could overflow.
  if (shard.num_tokens() <= context) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s holds %d tokens, a context of %d tokens needs at least one more than that; pack more "
        "text or shorten the context",
        shard.path(), shard.num_tokens(), context));
  }
  return SequenceSource(std::move(shard), context, seed, labels);
}

SequenceSource::SequenceSource(TokenShard shard, int64_t context, uint64_t seed, LabelRule labels)
    : shard_(std::move(shard)), context_(context), seed_(seed), labels_(labels) {
  // At least `context` tokens stay over where the shard is long enough, so that an epoch can start
  // at any phase and the bounds between windows move from epoch to epoch.
  const int64_t window = context_ + 1;
  windows_ = std::max<int64_t>(1, (shard_.num_tokens() - context_) / window);
  slack_ = shard_.num_tokens() - windows_ * window;
}

SequenceWindow SequenceSource::Window(int64_t sequence_index) const {
  UPIPE_CHECK(sequence_index >= 0) << "sequence " << sequence_index;
  const int64_t epoch = sequence_index / windows_;
  const uint64_t first = Draw(seed_, epoch, kOffsetStream) % (static_cast<uint64_t>(slack_) + 1);
  const uint64_t window =
      Permute(sequence_index % windows_, windows_, Draw(seed_, epoch, kOrderStream));
  return {
      .epoch = epoch,
      .token_offset = static_cast<int64_t>(first + window * static_cast<uint64_t>(context_ + 1))};
}

absl::StatusOr<absl::Span<const uint64_t>> SequenceSource::StartsWithin(int64_t begin,
                                                                        int64_t end) const {
  const absl::Span<const uint64_t> all = shard_.document_starts();
  const auto first = std::lower_bound(all.begin(), all.end(), static_cast<uint64_t>(begin));
  auto last = first;
  while (last != all.end() && *last < static_cast<uint64_t>(end)) ++last;
  // The search trusts the order of what it looks at; what it found must at least be in order
  // itself and lie between its neighbours.
  const auto from = first == all.begin() ? first : first - 1;
  const auto to = last == all.end() ? last : last + 1;
  for (auto start = from; start != to; ++start) {
    const bool in_order = start == all.begin() ? *start == 0 : start == from || start[-1] < *start;
    if (in_order && *start < static_cast<uint64_t>(shard_.num_tokens())) continue;
    return absl::DataLossError(absl::StrFormat(
        "%s: document %u starts at token %u, out of order or past its %d tokens; pack the text "
        "again",
        shard_.path(), start - all.begin(), *start, shard_.num_tokens()));
  }
  return absl::MakeConstSpan(first, last);
}

absl::StatusOr<std::vector<int64_t>> SequenceSource::Documents(int64_t sequence_index) const {
  if (sequence_index < 0) {
    return absl::InvalidArgumentError(absl::StrFormat("sequence %d is below 0", sequence_index));
  }
  const int64_t offset = Window(sequence_index).token_offset;
  UPIPE_ASSIGN_OR_RETURN(const absl::Span<const uint64_t> starts,
                         StartsWithin(offset + 1, offset + context_));
  std::vector<int64_t> positions = {0};
  for (const uint64_t start : starts) positions.push_back(static_cast<int64_t>(start) - offset);
  return positions;
}

absl::Status SequenceSource::Read(int64_t sequence_index, int64_t begin, int64_t count,
                                  int32_t* tokens_out, int32_t* labels_out) const {
  if (sequence_index < 0 || begin < 0 || count < 0 || begin > context_ ||
      count > context_ - begin) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "sequence %d, positions from %d, %d of them: outside a context of %d tokens",
        sequence_index, begin, count, context_));
  }
  const int64_t offset = Window(sequence_index).token_offset + begin;
  const absl::Span<const uint16_t> tokens = shard_.tokens().subspan(offset, count + 1);
  const uint16_t largest = *std::max_element(tokens.begin(), tokens.end());
  if (largest >= shard_.vocab_size()) {
    return absl::DataLossError(
        absl::StrFormat("%s: a token between %d and %d is %u, the vocabulary has %u; pack the text "
                        "again",
                        shard_.path(), offset, offset + count, largest, shard_.vocab_size()));
  }
  std::copy(tokens.begin(), tokens.end() - 1, tokens_out);
  std::copy(tokens.begin() + 1, tokens.end(), labels_out);
  if (labels_ == LabelRule::kEveryToken) return absl::OkStatus();
  UPIPE_ASSIGN_OR_RETURN(const absl::Span<const uint64_t> starts,
                         StartsWithin(offset + 1, offset + count + 1));
  for (const uint64_t start : starts) labels_out[static_cast<int64_t>(start) - offset - 1] = -1;
  return absl::OkStatus();
}

DocumentBounds DocumentBoundsOf(const TokenShard& shard, int64_t context) {
  const absl::Span<const uint64_t> starts = shard.document_starts();
  DocumentBounds bounds;
  size_t first = 0;
  for (size_t last = 0; last < starts.size(); ++last) {
    // With this start as its last, a window may begin as early as in the document before `first`.
    while (starts[first] + static_cast<uint64_t>(context) <= starts[last]) ++first;
    const auto within = static_cast<int64_t>(last - first + 1);
    bounds.documents_max = std::max(bounds.documents_max, within + (first > 0 ? 1 : 0));
    const uint64_t end =
        last + 1 < starts.size() ? starts[last + 1] : static_cast<uint64_t>(shard.num_tokens());
    if (end > starts[last]) {
      bounds.tokens_max = std::max(bounds.tokens_max, static_cast<int64_t>(end - starts[last]));
    }
  }
  bounds.documents_max = std::min(bounds.documents_max, context);
  bounds.tokens_max = std::min(bounds.tokens_max, context);
  return bounds;
}

void RotaryPositions(absl::Span<const int64_t> document_starts, kernels::PositionRun run,
                     int64_t* out) {
  UPIPE_CHECK(!document_starts.empty() && document_starts.front() <= run.begin)
      << "no document holds position " << run.begin;
  auto next = std::upper_bound(document_starts.begin(), document_starts.end(), run.begin);
  for (int64_t position = run.begin; position < run.end; ++position) {
    if (next != document_starts.end() && *next == position) ++next;
    out[position - run.begin] = position - next[-1];
  }
}

}  // namespace upipe::data
