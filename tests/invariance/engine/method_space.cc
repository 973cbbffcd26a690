#include "tests/invariance/engine/method_space.h"

#include <ostream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/spec/job_spec.h"
#include "engine/parallel/head_schedule.h"
#include "tests/invariance/engine/pairwise.h"

namespace upipe::testing {
namespace {

constexpr int kMostRanks = 12;

Choice Heads(int64_t heads, int64_t kv_heads, int64_t head_dim) {
  return {absl::StrCat("H", heads, "K", kv_heads), [=](MethodCase& c) {
            c.job.num_heads = heads;
            c.job.num_kv_heads = kv_heads;
            c.job.head_dim = head_dim;
          }};
}

// C Ulysses x R ring ranks.
Choice Axes(v1::Method method, const char* name, int ulysses, int ring) {
  return {absl::StrCat(name, "C", ulysses, "R", ring), [=](MethodCase& c) {
            c.job.method = method;
            c.job.ranks = ulysses * ring;
            c.job.ring_ranks = method == v1::METHOD_RING ? 1 : ring;
          }};
}
Choice Upipe(int ulysses, int ring = 1) { return Axes(v1::METHOD_UPIPE, "upipe", ulysses, ring); }
Choice Ulysses(int ranks) { return Axes(v1::METHOD_ULYSSES, "ulysses", ranks, 1); }
Choice Ring(int ranks) { return Axes(v1::METHOD_RING, "ring", 1, ranks); }
Choice Usp(int ulysses, int ring) { return Axes(v1::METHOD_USP, "usp", ulysses, ring); }
Choice Fpdt(int ranks) { return Axes(v1::METHOD_FPDT, "fpdt", ranks, 1); }

// 0: all of a rank's heads, which goes without saying for all methods but upipe.
Choice StageHeads(int64_t heads_per_rank) {
  return {heads_per_rank == 0 ? "" : absl::StrCat("u", heads_per_rank), [=](MethodCase& c) {
            c.job.heads_per_rank = heads_per_rank;
            if (heads_per_rank > 0) return;
            const int ulysses = c.job.ranks / c.job.ring_ranks;
            c.job.heads_per_rank = parallel::UlyssesHeadsPerRank(c.job.num_heads, ulysses);
          }};
}

Choice Chunks(int64_t n) {
  return {absl::StrCat("n", n), [=](MethodCase& c) { c.job.query_chunks = n; }};
}

Choice Context(int64_t tokens) {
  return {absl::StrCat("L", tokens), [=](MethodCase& c) { c.job.context = tokens; }};
}

Choice Mask(const char* name, bool causal, std::optional<int64_t> window) {
  return {name, [=](MethodCase& c) {
            c.job.causal = causal;
            c.job.window = window;
          }};
}

Choice Documents(const char* name, v1::Documents documents, DocumentBounds bounds) {
  return {name, [=](MethodCase& c) {
            c.job.documents = documents;
            c.bounds = bounds;
          }};
}

// fsdp ranks, dp ranks, sequences per rank and step.
Choice DataAxes(int fsdp, int dp, int64_t accumulation) {
  std::string name;
  if (fsdp > 1) absl::StrAppend(&name, "fsdp", fsdp);
  if (dp > 1) absl::StrAppend(&name, "dp", dp);
  if (accumulation > 1) absl::StrAppend(&name, "acc", accumulation);
  return {name, [=](MethodCase& c) {
            c.job.ranks *= fsdp * dp;
            c.job.fsdp_ranks = fsdp;
            c.job.dp_ranks = dp;
            c.job.accumulation = accumulation;
          }};
}

Choice Flag(const char* name, bool SmallJob::*field) {
  return {name, [=](MethodCase& c) { c.job.*field = true; }};
}

void Nothing(MethodCase&) {}

Dimension Policies() {
  return {
      "policy",
      {{"", Nothing},
       {"inputsHost", [](MethodCase& c) { c.job.layer_inputs = v1::PLACE_HOST; }},
       {"stride2",
        [](MethodCase& c) {
          c.job.num_layers = 3;
          c.job.stride = 2;
        }},
       {"stride3inputsHost",
        [](MethodCase& c) {
          c.job.num_layers = 3;
          c.job.stride = 3;
          c.job.layer_inputs = v1::PLACE_HOST;
        }},
       {"outputDevice",
        [](MethodCase& c) { c.job.attention_output = v1::ATTENTION_OUTPUT_DEVICE; }},
       {"outputHost", [](MethodCase& c) { c.job.attention_output = v1::ATTENTION_OUTPUT_HOST; }},
       {"S2",
        [](MethodCase& c) {
          c.job.layer_inputs = v1::PLACE_HOST;
          c.job.hidden_stream = v1::PLACE_HOST;
        }},
       {"S3",
        [](MethodCase& c) {
          c.job.layer_inputs = v1::PLACE_HOST;
          c.job.hidden_stream = v1::PLACE_HOST;
          if (c.job.query_chunks == 1) c.job.query_chunks = 2;
        }},
       {"kvHost", [](MethodCase& c) { c.job.stage_kv = v1::PLACE_HOST; }},
       {"optimizerHost", [](MethodCase& c) { c.job.optimizer = v1::PLACE_HOST; }},
       {"allHost", [](MethodCase& c) {
          c.job.num_layers = 3;
          c.job.stride = 2;
          c.job.layer_inputs = c.job.hidden_stream = c.job.optimizer = v1::PLACE_HOST;
          c.job.attention_output = v1::ATTENTION_OUTPUT_HOST;
          const bool ring = c.job.ring_ranks > 1 || c.job.method == v1::METHOD_RING;
          if (!ring) c.job.stage_kv = v1::PLACE_HOST;
        }}}};
}

std::vector<Dimension> MakeDimensions() {
  constexpr auto kUneven = DocumentBounds::kUneven, kOnShards = DocumentBounds::kOnShards;
  return {
      {"heads",
       {Heads(8, 2, 8),   // K < C at 4 and 8 ranks
        Heads(6, 3, 6),   // K and H not divisible by 4 or 8
        Heads(7, 1, 10),  // multi-query, odd heads
        Heads(5, 5, 4),   // multi-head, H < C at 8 ranks
        Heads(14, 2, 8),  // groups of 7 straddle stages
        Heads(28, 4, 4),  // 3.5 heads per rank at 8
        Heads(12, 4, 16)}},
      {"context", {Context(48), Context(45), Context(61), Context(5)}},
      {"axes", {Upipe(1),    Upipe(2),    Upipe(3),    Upipe(4),  Upipe(5),    Upipe(8),
                Ulysses(2),  Ulysses(4),  Ulysses(8),  Ring(2),   Ring(3),     Ring(4),
                Ring(8),     Usp(2, 2),   Usp(4, 2),   Usp(2, 3), Upipe(2, 2), Upipe(4, 2),
                Upipe(2, 3), Upipe(3, 2), Upipe(1, 3), Fpdt(1),   Fpdt(2),     Fpdt(4)}},
      {"stage", {StageHeads(1), StageHeads(2), StageHeads(0)}},
      {"data",
       {DataAxes(1, 1, 1), DataAxes(2, 1, 1), DataAxes(1, 2, 1), DataAxes(1, 1, 3),
        DataAxes(2, 2, 2)}},
      {"chunks", {Chunks(1), Chunks(2), Chunks(3)}},
      {"ring_kv", {{"", Nothing}, Flag("keep", &SmallJob::ring_keep)}},
      {"mask",
       {Mask("causal", true, {}), Mask("window", true, 9), Mask("full", false, {}),
        Mask("fullWindow", false, 6)}},
      {"documents",
       {Documents("", v1::DOCUMENTS_JOIN, kUneven),
        Documents("separate", v1::DOCUMENTS_SEPARATE, kUneven),
        Documents("restart", v1::DOCUMENTS_RESTART, kUneven),
        Documents("separateOnShards", v1::DOCUMENTS_SEPARATE, kOnShards),
        Documents("restartOnShards", v1::DOCUMENTS_RESTART, kOnShards)}},
      Policies(),
      {"overlap", {{"", Nothing}, Flag("overlap", &SmallJob::overlap)}},
      {"model",
       {{"", Nothing},
        Flag("tied", &SmallJob::tie_embeddings),
        Flag("norm", &SmallJob::qk_norm),
        Flag("bias", &SmallJob::qkv_bias)}},
      {"dtype", {{"", Nothing}, Flag("bf16", &SmallJob::bf16)}},
  };
}

MethodCase CaseOf(const Row& row) {
  MethodCase c;
  for (size_t i = 0; i < row.size(); ++i) Dimensions()[i].choices[row[i]].apply(c);
  return c;
}

const Choice& ChoiceOf(const Row& row, const std::string& dimension) {
  size_t i = 0;
  while (Dimensions()[i].name != dimension) ++i;
  return Dimensions()[i].choices[row[i]];
}

bool IsLegal(const Row& row) {
  const MethodCase c = CaseOf(row);
  if (c.job.ranks > kMostRanks) return false;
  if (c.job.method != v1::METHOD_UPIPE && !ChoiceOf(row, "stage").name.empty()) return false;
  return ValidateJobSpec(MakeSpec(c.job)).empty();
}

std::string NameOf(const Row& row) {
  std::string name;
  for (size_t i = 0; i < row.size(); ++i) {
    const std::string& part = Dimensions()[i].choices[row[i]].name;
    if (!part.empty()) absl::StrAppend(&name, name.empty() ? "" : "_", part);
  }
  return name;
}

}  // namespace

const std::vector<Dimension>& Dimensions() {
  static const std::vector<Dimension> dimensions = MakeDimensions();
  return dimensions;
}

const std::vector<NamedCase>& PairwiseCases() {
  static const std::vector<NamedCase> cases = [] {
    std::vector<int> sizes;
    for (const Dimension& dimension : Dimensions()) {
      sizes.push_back(static_cast<int>(dimension.choices.size()));
    }
    std::vector<NamedCase> made;
    for (const Row& row : EveryPair(sizes, IsLegal)) {
      made.push_back({NameOf(row), CaseOf(row)});
    }
    return made;
  }();
  return cases;
}

std::vector<NamedCase> OneCasePerMethod() {
  const SmallJob job{.num_heads = 6, .num_kv_heads = 3, .head_dim = 6, .context = 45};
  std::vector<NamedCase> cases;
  const auto add = [&](const Choice& axes, int64_t heads_per_rank, int64_t chunks,
                       bool keep = false) {
    MethodCase c{.job = job};
    axes.apply(c);
    StageHeads(heads_per_rank).apply(c);
    c.job.query_chunks = chunks;
    c.job.ring_keep = keep;
    cases.push_back(
        {absl::StrCat(axes.name, "_u", c.job.heads_per_rank, "_n", chunks, keep ? "_keep" : ""),
         c});
  };
  add(Upipe(4), 1, 1);
  add(Upipe(2), 2, 1);
  add(Ulysses(4), 0, 1);
  add(Ring(4), 0, 1);
  add(Ring(3), 0, 1, true);
  add(Usp(2, 2), 0, 1);
  add(Upipe(2, 2), 1, 1);
  add(Upipe(2, 3), 1, 1, true);
  add(Upipe(2, 2), 2, 2);
  add(Fpdt(2), 0, 2);
  add(Upipe(3), 1, 3);
  return cases;
}

void PrintTo(const NamedCase& c, std::ostream* out) { *out << c.name; }

}  // namespace upipe::testing
