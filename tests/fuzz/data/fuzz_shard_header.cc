#include "tests/fuzz/data/fuzz_shard_header.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "common/check.h"
#include "engine/data/corpus_stats.h"
#include "engine/data/sequence_source.h"
#include "engine/data/token_shard.h"

namespace upipe::data {
namespace {

// A copy of the bytes that ends, but for alignment to 8, where an unreadable page begins.
std::shared_ptr<const uint8_t> CopyBeforeGuardPage(const uint8_t* data, size_t size) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t readable = (size + page - 1) / page * page;
  const size_t total = readable + page;
  void* mapping = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  UPIPE_CHECK(mapping != MAP_FAILED) << total << " bytes";
  auto* bytes = static_cast<uint8_t*>(mapping);
  uint8_t* start = bytes + readable - (size + 7) / 8 * 8;
  if (size > 0) std::memcpy(start, data, size);
  UPIPE_CHECK(mprotect(bytes + readable, page, PROT_NONE) == 0);
  return {start, [bytes, total](const uint8_t*) { munmap(bytes, total); }};
}

// Positions where documents begin must ascend from 0 within the sequence.
void CheckDocuments(const std::vector<int64_t>& starts, int64_t context) {
  UPIPE_CHECK(!starts.empty() && starts.front() == 0);
  UPIPE_CHECK(std::is_sorted(starts.begin(), starts.end(), std::less_equal<>()) &&
              starts.back() < context);
  std::vector<int64_t> positions(context);
  RotaryPositions(starts, {.begin = 0, .end = context}, positions.data());
  for (int64_t i = 0; i < context; ++i) UPIPE_CHECK(positions[i] >= 0 && positions[i] <= i) << i;
}

// Reads whole sequences of one context length; every one must read when the shard is verified.
void ReadSequences(const TokenShard& shard, int64_t context, LabelRule rule, bool verified) {
  const auto source = SequenceSource::Create(shard, context, /*seed=*/1, rule);
  UPIPE_CHECK(source.ok() == (shard.num_tokens() > context)) << source.status();
  if (!source.ok()) return;
  std::vector<int32_t> tokens(context);
  std::vector<int32_t> labels(context);
  const int64_t no_label = rule == LabelRule::kWithinDocuments ? -1 : 0;
  for (int64_t i = 0; i < std::min<int64_t>(3, source->sequences_per_epoch()); ++i) {
    const auto documents = source->Documents(i);
    UPIPE_CHECK(documents.ok() || !verified) << documents.status();
    if (documents.ok()) CheckDocuments(*documents, context);
    const absl::Status read = source->Read(i, 0, context, tokens.data(), labels.data());
    UPIPE_CHECK(read.ok() || !verified) << read;
    if (!read.ok()) continue;
    for (const int32_t label : labels) {
      UPIPE_CHECK(label >= no_label && label < static_cast<int64_t>(shard.vocab_size())) << label;
    }
  }
}

}  // namespace

ShardVerdict FuzzShardHeader(const uint8_t* data, size_t size) {
  const auto shard = TokenShard::FromBytes(CopyBeforeGuardPage(data, size), size, "fuzzed");
  if (!shard.ok()) return ShardVerdict::kRefused;
  const bool verified = shard->Verify().ok();
  if (verified) {
    for (const uint64_t start : shard->document_starts()) {
      UPIPE_CHECK(start < shard->tokens().size()) << start;
    }
  }
  if (shard->vocab_size() <= 300) {
    UPIPE_CHECK(MeasureCorpus(*shard).ok() || !verified);
  }
  for (const int64_t context : {int64_t{1}, int64_t{5}, shard->num_tokens() - 1}) {
    if (context < 1) continue;
    ReadSequences(*shard, context, LabelRule::kEveryToken, verified);
    ReadSequences(*shard, context, LabelRule::kWithinDocuments, verified);
  }
  return verified ? ShardVerdict::kVerified : ShardVerdict::kOpened;
}

}  // namespace upipe::data
