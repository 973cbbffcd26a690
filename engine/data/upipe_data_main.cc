// upipe-data: packs text for training and describes what was packed.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/parse_arguments.h"
#include "common/status.h"
#include "common/units.h"
#include "engine/data/corpus_stats.h"
#include "engine/data/pack.h"
#include "engine/data/token_shard.h"

namespace upipe::data {
namespace {

void AddFormatOption(CLI::App& command, std::string& format) {
  command.add_option("-o,--format", format, "How to print the result: text or json")
      ->check(CLI::IsMember({"text", "json"}))
      ->option_text("text|json");
}

std::string StatsText(const CorpusStats& train, const CorpusStats& held_out) {
  const auto line = [](const char* name, const CorpusStats& stats) {
    return absl::StrFormat("  %-9s %14s tokens %8s documents   unigram %.4f, bigram %.4f nats\n",
                           name, FormatCount(stats.tokens), FormatCount(stats.documents),
                           stats.unigram_nats, stats.bigram_nats);
  };
  return absl::StrCat(line("train", train), line("held out", held_out));
}

std::string SummaryText(const PackSummary& summary) {
  std::string text =
      absl::StrFormat("packed %s documents, %s of text, from %s into %s\n",
                      FormatCount(summary.documents), FormatBytes(summary.bytes),
                      absl::StrJoin(summary.options.inputs, ", "), summary.options.output);
  absl::StrAppend(&text, StatsText(summary.train, summary.held_out));
  absl::StrAppend(&text, "  split     ",
                  summary.split == Split::kByDocument ? "whole documents, by hash and seed "
                                                      : "the tail of every document, seed unused ",
                  "(share asked for: ", summary.options.held_out, ")\n");
  absl::StrAppend(&text, "  skipped   ", summary.skipped_binary, " binary, ", summary.skipped_empty,
                  " empty, ", summary.skipped_special, " links and special files, ",
                  summary.skipped_duplicate, " duplicates\n");
  if (summary.reached_max_bytes) {
    absl::StrAppend(&text, "  stopped at --max-bytes (", FormatBytes(summary.options.max_bytes),
                    "); text beyond it is left out\n");
  }
  return text;
}

absl::Status RunPack(PackOptions options, const std::string& max_bytes, const std::string& format) {
  UPIPE_ASSIGN_OR_RETURN(options.max_bytes, ParseBytes(max_bytes));
  UPIPE_ASSIGN_OR_RETURN(const PackSummary summary, Pack(options));
  std::fputs((format == "json" ? PackSummaryJson(summary) : SummaryText(summary)).c_str(), stdout);
  return absl::OkStatus();
}

absl::StatusOr<CorpusStats> MeasureFile(const std::string& path) {
  UPIPE_ASSIGN_OR_RETURN(const TokenShard shard, TokenShard::Open(path));
  UPIPE_RETURN_IF_ERROR(shard.Verify());
  return MeasureCorpus(shard);
}

absl::Status RunStats(const std::string& folder, const std::string& format) {
  UPIPE_ASSIGN_OR_RETURN(const CorpusStats train,
                         MeasureFile(absl::StrCat(folder, "/", kTrainShardName)));
  UPIPE_ASSIGN_OR_RETURN(const CorpusStats held_out,
                         MeasureFile(absl::StrCat(folder, "/", kHeldOutShardName)));
  const std::string text = format == "json"
                               ? CorpusStatsJson(train, held_out)
                               : absl::StrCat(folder, "\n", StatsText(train, held_out));
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

// 0 done, 1 refused (one sentence on standard error), 2 wrong usage.
int Main(int argc, char** argv) {
  CLI::App app("Packs text into token shards for training.", "upipe-data");
  app.require_subcommand(1);
  std::string format = "text";

  PackOptions options;
  CLI::App* pack = app.add_subcommand("pack", "Pack text files and folders into a new folder");
  pack->add_option("INPUT", options.inputs, "Text files and folders (walked recursively)")
      ->required();
  pack->add_option("--output", options.output, "Folder to create; absent or empty")->required();
  pack->add_option("--held-out", options.held_out, "Share of the text kept from training")
      ->capture_default_str();
  std::string max_bytes = "64MiB";
  pack->add_option("--max-bytes", max_bytes, "Most text to pack, all of it held in memory")
      ->option_text("SIZE=64MiB");
  pack->add_option("--seed", options.seed, "Seed of the choice of held-out documents")
      ->capture_default_str();
  AddFormatOption(*pack, format);

  std::string folder;
  CLI::App* stats = app.add_subcommand("stats", "Verify a packed folder and measure its entropies");
  stats->add_option("DIR", folder, "Packed folder")->required();
  AddFormatOption(*stats, format);

  if (const std::optional<int> over = ParseArguments(app, argc, argv)) return *over;
  const absl::Status status =
      *pack ? RunPack(options, max_bytes, format) : RunStats(folder, format);
  if (status.ok()) return 0;
  std::fprintf(stderr, "upipe-data: %s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace
}  // namespace upipe::data

int main(int argc, char** argv) { return upipe::data::Main(argc, argv); }
