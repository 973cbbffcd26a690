#include "engine/data/pack.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "common/status.h"
#include "engine/data/byte_tokenizer.h"
#include "engine/data/shard_writer.h"
#include "engine/data/text_files.h"
#include "engine/data/token_shard.h"

namespace upipe::data {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

absl::Status CheckOptions(const PackOptions& options) {
  if (options.inputs.empty()) {
    return absl::InvalidArgumentError("0 inputs were named, at least 1 file or folder is needed");
  }
  // Written so that not-a-number fails, too.
  if (!(options.held_out > 0 && options.held_out < 1)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the held-out share is %g, must be above 0 and below 1", options.held_out));
  }
  if (options.max_bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the most bytes to pack are %d, must be at least 1", options.max_bytes));
  }
  return absl::OkStatus();
}

absl::Status CheckOutput(const std::string& output) {
  if (output.empty())
    return absl::InvalidArgumentError("the output folder's name has 0 characters");
  std::error_code error;
  const fs::file_status status = fs::symlink_status(output, error);
  if (status.type() == fs::file_type::not_found) return absl::OkStatus();
  if (!error && status.type() != fs::file_type::directory) {
    return absl::AlreadyExistsError(absl::StrCat(output, " exists and is no folder"));
  }
  const bool empty = !error && fs::is_empty(output, error);
  if (error) return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot look into ", output));
  if (empty) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat(output, " exists and is not empty; remove it or name another folder"));
}

struct SplitTexts {
  Split split = Split::kByDocument;
  std::vector<absl::string_view> train;
  std::vector<absl::string_view> held_out;
};

bool IsHeldOut(const TextDocument& document, const PackOptions& options) {
  const uint64_t hash =
      XXH64(document.relative_path.data(), document.relative_path.size(), options.seed);
  constexpr double kHashRange = 0x1p64;
  return static_cast<double>(hash) / kHashRange < options.held_out;
}

SplitTexts SplitByDocument(const TextCollection& collection, const PackOptions& options,
                           int64_t& held_out_bytes) {
  SplitTexts texts{.split = Split::kByDocument};
  held_out_bytes = 0;
  for (const TextDocument& document : collection.documents) {
    const bool held_out = IsHeldOut(document, options);
    (held_out ? texts.held_out : texts.train).push_back(document.text);
    if (held_out) held_out_bytes += static_cast<int64_t>(document.text.size());
  }
  return texts;
}

SplitTexts SplitTails(const TextCollection& collection, const PackOptions& options) {
  SplitTexts texts{.split = Split::kTailOfEachDocument};
  for (const TextDocument& document : collection.documents) {
    const absl::string_view text = document.text;
    const auto tail = static_cast<size_t>(static_cast<double>(text.size()) * options.held_out);
    texts.train.push_back(text.substr(0, text.size() - tail));
    if (tail > 0) texts.held_out.push_back(text.substr(text.size() - tail));
  }
  return texts;
}

absl::StatusOr<SplitTexts> SplitCollection(const TextCollection& collection,
                                           const PackOptions& options) {
  int64_t held_out_bytes = 0;
  SplitTexts texts = SplitByDocument(collection, options, held_out_bytes);
  const double wanted = static_cast<double>(collection.bytes) * options.held_out;
  const auto reached = static_cast<double>(held_out_bytes);
  const bool near = reached >= wanted / 2 && reached <= wanted * 2;
  if (near && !texts.train.empty() && !texts.held_out.empty()) return texts;
  texts = SplitTails(collection, options);
  if (texts.held_out.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d bytes of text in %d files leave nothing to hold out at a share of %g; pack more text "
        "or raise --held-out",
        collection.bytes, collection.documents.size(), options.held_out));
  }
  return texts;
}

// Writes one shard, reads it back through the reader's own checks and measures it.
absl::StatusOr<CorpusStats> WriteAndMeasure(const std::string& path,
                                            const std::vector<absl::string_view>& texts,
                                            uint64_t& xxh64) {
  UPIPE_RETURN_IF_ERROR(WriteByteShard(path, texts).status());
  UPIPE_ASSIGN_OR_RETURN(const TokenShard shard, TokenShard::Open(path));
  UPIPE_RETURN_IF_ERROR(shard.Verify());
  xxh64 = shard.payload_xxh64();
  return MeasureCorpus(shard);
}

absl::Status WriteManifest(const std::string& path, const std::string& json) {
  std::ofstream file(path, std::ios::binary);
  file << json;
  file.close();
  if (file.fail()) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  return absl::OkStatus();
}

// Makes the folder that is filled beside `output`; the caller removes it. Returns its path.
absl::StatusOr<std::string> MakePartialFolder(const std::string& output) {
  const fs::path parent = fs::path(output).parent_path();
  std::error_code error;
  if (!parent.empty()) fs::create_directories(parent, error);
  if (error) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot create ", parent.string()));
  }
  std::string partial = absl::StrCat(output, ".partial-XXXXXX");
  if (mkdtemp(partial.data()) == nullptr) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", partial));
  }
  return partial;
}

// Fills `folder` (which it creates) and the shard numbers of `summary`.
absl::Status WriteFolder(const std::string& folder, const SplitTexts& texts, PackSummary& summary) {
  if (mkdir(folder.c_str(), 0777) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot create ", folder));
  }
  const auto file = [&folder](const char* name) { return absl::StrCat(folder, "/", name); };
  UPIPE_ASSIGN_OR_RETURN(summary.train,
                         WriteAndMeasure(file(kTrainShardName), texts.train, summary.train_xxh64));
  UPIPE_ASSIGN_OR_RETURN(summary.held_out, WriteAndMeasure(file(kHeldOutShardName), texts.held_out,
                                                           summary.held_out_xxh64));
  return WriteManifest(file(kManifestName), PackSummaryJson(summary));
}

Json StatsJson(const CorpusStats& stats) {
  return {{"tokens", stats.tokens},
          {"documents", stats.documents},
          {"unigram_nats", stats.unigram_nats},
          {"bigram_nats", stats.bigram_nats}};
}

Json ShardJson(const CorpusStats& stats, const char* file, uint64_t xxh64) {
  Json json = {{"file", file}};
  json.update(StatsJson(stats));
  json["payload_xxh64"] = absl::StrFormat("%016x", xxh64);
  return json;
}

std::string Print(const Json& json) {
  // Paths may hold any bytes: those outside UTF-8 are replaced, never thrown over.
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace

absl::StatusOr<PackSummary> Pack(const PackOptions& options) {
  UPIPE_RETURN_IF_ERROR(CheckOptions(options));
  UPIPE_RETURN_IF_ERROR(CheckOutput(options.output));
  UPIPE_ASSIGN_OR_RETURN(const TextCollection collection,
                         CollectTexts(options.inputs, options.max_bytes));
  UPIPE_ASSIGN_OR_RETURN(const SplitTexts texts, SplitCollection(collection, options));
  PackSummary summary{
      .options = options,
      .split = texts.split,
      .documents = static_cast<int64_t>(collection.documents.size()),
      .bytes = collection.bytes,
      .reached_max_bytes = collection.reached_max_bytes,
      .skipped_binary = collection.skipped_binary,
      .skipped_empty = collection.skipped_empty,
      .skipped_special = collection.skipped_special,
      .skipped_duplicate = collection.skipped_duplicate,
  };
  std::string output = options.output;
  while (output.size() > 1 && output.back() == '/') output.pop_back();
  UPIPE_ASSIGN_OR_RETURN(const std::string partial, MakePartialFolder(output));
  const absl::Cleanup remove = [&partial] {
    std::error_code ignored;
    fs::remove_all(partial, ignored);
  };
  // One level below, so that the folder renamed has the caller's umask and not mkdtemp's 0700.
  const std::string folder = absl::StrCat(partial, "/packed");
  UPIPE_RETURN_IF_ERROR(WriteFolder(folder, texts, summary));
  if (std::rename(folder.c_str(), output.c_str()) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot put the packed folder at ", output));
  }
  return summary;
}

std::string PackSummaryJson(const PackSummary& summary) {
  const Json json = {
      {"format_version", kShardVersion},
      {"tokenizer", "bytes"},
      {"vocab_size", kByteVocabSize},
      {"options",
       {{"inputs", summary.options.inputs},
        {"held_out", summary.options.held_out},
        {"max_bytes", summary.options.max_bytes},
        {"seed", summary.options.seed}}},
      {"source",
       {{"documents", summary.documents},
        {"bytes", summary.bytes},
        {"reached_max_bytes", summary.reached_max_bytes},
        {"skipped_binary", summary.skipped_binary},
        {"skipped_empty", summary.skipped_empty},
        {"skipped_special", summary.skipped_special},
        {"skipped_duplicate", summary.skipped_duplicate}}},
      {"split", summary.split == Split::kByDocument ? "by_document" : "tail_of_each_document"},
      {"train", ShardJson(summary.train, kTrainShardName, summary.train_xxh64)},
      {"held_out", ShardJson(summary.held_out, kHeldOutShardName, summary.held_out_xxh64)},
  };
  return Print(json);
}

std::string CorpusStatsJson(const CorpusStats& train, const CorpusStats& held_out) {
  return Print({{"train", StatsJson(train)}, {"held_out", StatsJson(held_out)}});
}

}  // namespace upipe::data
