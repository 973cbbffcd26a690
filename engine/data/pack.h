// Packs text into a folder that training reads: a train shard, a held-out shard and a manifest.
// The same inputs and options give the same bytes on every machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/data/corpus_stats.h"

namespace upipe::data {

struct PackOptions {
  std::vector<std::string> inputs;        // text files and folders, at least one
  std::string output;                     // folder: absent or empty
  double held_out = 0.05;                 // share of the text kept from training, above 0, below 1
  int64_t max_bytes = int64_t{64} << 20;  // of text, at least 1; all of it is held in memory
  uint64_t seed = 0;                      // of the choice of held-out documents
};

// How train and held-out text were separated.
enum class Split {
  // A document is held out when the hash of its relative path and the seed says so. Chosen when it
  // gives between half and twice the bytes that were asked for.
  kByDocument,
  // The last `held_out` share of every document's bytes. For one file, or few, or very unlike ones.
  kTailOfEachDocument,
};

// What was packed.
struct PackSummary {
  PackOptions options;
  Split split = Split::kByDocument;
  int64_t documents = 0;  // files read
  int64_t bytes = 0;      // of their text
  bool reached_max_bytes = false;
  int64_t skipped_binary = 0;
  int64_t skipped_empty = 0;
  int64_t skipped_special = 0;
  int64_t skipped_duplicate = 0;
  CorpusStats train;
  CorpusStats held_out;
  uint64_t train_xxh64 = 0;
  uint64_t held_out_xxh64 = 0;
};

// Writes the three files (names in token_shard.h) into a new folder beside `output` and renames it
// into place once they are complete and verified; on error nothing is left behind. The manifest is
// PackSummaryJson. InvalidArgument for options or inputs to fix, AlreadyExists for an output folder
// with something in it, otherwise what the file system said; each names the path or the number.
absl::StatusOr<PackSummary> Pack(const PackOptions& options);

// One JSON object, indented, with a newline at the end; no times and no host names.
std::string PackSummaryJson(const PackSummary& summary);

// {"train": .., "held_out": ..} with the numbers of both, in the manifest's form.
std::string CorpusStatsJson(const CorpusStats& train, const CorpusStats& held_out);

}  // namespace upipe::data
