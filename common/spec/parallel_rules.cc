#include "common/spec/parallel_rules.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/rounding.h"
#include "common/units.h"
#include "common/utf8.h"

namespace upipe {
namespace {

constexpr int64_t kMaxRanks = 1024;
constexpr int64_t kMaxHeads = 1024;
constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxQueryChunks = 1024;

// Legal U (SCHEDULE "Legal U"): multiples of the Ulysses ranks up to the first at or above the
// heads.
std::string LegalHeadsPerStage(int64_t num_heads, int64_t ulysses) {
  const int64_t last = RoundUp(num_heads, ulysses);
  std::vector<int64_t> legal;
  if (last / ulysses > 8) {
    return absl::StrCat("multiples of ", ulysses, " from ", ulysses, " to ", FormatCount(last));
  }
  for (int64_t value = ulysses; value <= last; value += ulysses) legal.push_back(value);
  return absl::StrJoin(legal, ", ");
}

// How many ranks share one sequence; 0 when the ranks do not split into equal groups.
int64_t ContextRankCount(const v1::ParallelSpec& parallel) {
  const int64_t groups = int64_t{parallel.fsdp_ranks()} * parallel.dp_ranks();
  if (parallel.ranks() < 1 || parallel.fsdp_ranks() < 1 || parallel.dp_ranks() < 1) return 0;
  return parallel.ranks() % groups == 0 ? parallel.ranks() / groups : 0;
}

bool CheckDataAxes(const v1::ParallelSpec& parallel, SpecChecker& checker) {
  const bool fsdp = checker.InRange("parallel.fsdp_ranks", parallel.fsdp_ranks(), 1, kMaxRanks);
  const bool dp = checker.InRange("parallel.dp_ranks", parallel.dp_ranks(), 1, kMaxRanks);
  if (!fsdp || !dp) return false;
  const int64_t groups = int64_t{parallel.fsdp_ranks()} * parallel.dp_ranks();
  if (parallel.ranks() % groups == 0) return true;
  const int64_t above = RoundUp(parallel.ranks(), groups);
  const int64_t below = above - groups;
  std::vector<int64_t> legal;
  if (below > 0) legal.push_back(below);
  if (above <= kMaxRanks) legal.push_back(above);
  return checker.Fail(
      "parallel.ranks",
      absl::StrCat(parallel.ranks(), " does not divide by dp_ranks ", parallel.dp_ranks(),
                   " x fsdp_ranks ", parallel.fsdp_ranks(), " = ", groups,
                   legal.empty() ? "; lower one of them"
                                 : absl::StrCat("; ", absl::StrJoin(legal, " or "), " would")));
}

// `context` ranks share a sequence.
bool CheckRing(const v1::ParallelSpec& parallel, int64_t context, SpecChecker& checker) {
  constexpr absl::string_view kField = "parallel.ring_ranks";
  const std::string method = MethodName(parallel.method());
  const int64_t ring = parallel.ring_ranks();
  switch (parallel.method()) {
    case v1::METHOD_AUTO:
      return !parallel.has_ring_ranks() ||
             checker.Fail(kField, absl::StrCat(ring,
                                               " given, but with method auto the planner "
                                               "chooses it: remove it or use upipe or usp"));
    case v1::METHOD_RING:
      return ring == context ||
             checker.Fail(kField,
                          absl::StrCat(ring, " given, but with method ring the ring is all ",
                                       context, " context ranks: remove it or use usp"));
    case v1::METHOD_ULYSSES:
    case v1::METHOD_FPDT:
      return ring == 1 || checker.Fail(kField, absl::StrCat(ring, " given, but method ", method,
                                                            " has no ring: remove it or use usp"));
    case v1::METHOD_USP:
      if (context == 1) {
        return checker.Fail(kField,
                            "method usp needs two context ranks or more and has 1: use ulysses");
      }
      if (parallel.has_ring_ranks() && ring == 0) return true;  // auto
      if (!parallel.has_ring_ranks() || ring == 1) {
        return checker.Fail(kField,
                            absl::StrCat(parallel.has_ring_ranks() ? "1 is no ring" : "is required",
                                         " for method usp; legal values for ", context,
                                         " context ranks: ", DivisorsOf(context, 2)));
      }
      break;
    default:
      if (ring == 0) return true;  // auto
      break;
  }
  if (!checker.InRange(kField, ring, 1, kMaxRanks)) return false;
  return context % ring == 0 ||
         checker.Fail(kField, absl::StrCat(ring, " does not divide the ", context,
                                           " context ranks; legal values: ", DivisorsOf(context)));
}

void CheckHeadsPerStage(const v1::ParallelSpec& parallel, int64_t num_heads, int64_t ulysses,
                        SpecChecker& checker) {
  constexpr absl::string_view kField = "parallel.heads_per_stage";
  const std::string ranks =
      absl::StrCat(ulysses, parallel.ranks() == ulysses ? " ranks" : " Ulysses ranks");
  const std::string legal = absl::StrCat("legal values for ", num_heads, " heads on ", ranks, ": ",
                                         LegalHeadsPerStage(num_heads, ulysses));
  if (!parallel.has_heads_per_stage()) {
    checker.Fail(kField, absl::StrCat("is required for method upipe; ", legal, ", or auto"));
    return;
  }
  const int64_t value = parallel.heads_per_stage();
  if (value == 0) return;  // auto
  if (value < ulysses) {
    checker.Fail(kField, absl::StrCat(value, " is below the ", ranks,
                                      " and would idle some of them; ", legal));
  } else if (value % ulysses != 0) {
    checker.Fail(kField, absl::StrCat(value, " is not a multiple of the ", ranks, "; ", legal));
  } else if (value > RoundUp(num_heads, ulysses)) {
    checker.Fail(kField,
                 absl::StrCat(value, " is above what ", num_heads, " heads can fill; ", legal));
  }
}

// How heads and tokens are spread over the ranks, whose number and method are legal.
void CheckSplit(const v1::JobSpec& spec, SpecChecker& checker) {
  const v1::ParallelSpec& parallel = spec.parallel();
  const int64_t heads = spec.model().num_heads();
  const bool heads_known = heads >= 1 && heads <= kMaxHeads;
  const bool upipe = parallel.method() == v1::METHOD_UPIPE;
  if (!upipe && parallel.has_heads_per_stage()) {
    const std::string why = parallel.method() == v1::METHOD_AUTO
                                ? std::string("auto chooses it")
                                : absl::StrCat(MethodName(parallel.method()), " runs all ", heads,
                                               " heads in one stage");
    checker.Fail("parallel.heads_per_stage",
                 absl::StrCat(parallel.heads_per_stage(), " given, but method ", why,
                              ": remove it or use method upipe"));
  }
  if (!CheckDataAxes(parallel, checker)) return;
  const int64_t context = ContextRankCount(parallel);
  if (!CheckRing(parallel, context, checker)) return;
  if (upipe && heads_known && parallel.ring_ranks() > 0) {
    CheckHeadsPerStage(parallel, heads, context / parallel.ring_ranks(), checker);
  }
}

// What the plan is timed on.
void CheckNode(const v1::ParallelSpec& parallel, SpecChecker& checker) {
  const std::string& device = parallel.device();
  const bool legal = !device.empty() && device.size() <= 63 && device[0] != '.' &&
                     std::all_of(device.begin(), device.end(), [](char c) {
                       return absl::ascii_isalnum(c) || c == '.' || c == '-';
                     });
  if (!legal) {
    checker.Fail("parallel.device", absl::StrCat("'", ToUtf8(device, 80),
                                                 "' is no name of a device description: 1 to 63 "
                                                 "letters, digits, '.' and '-'"));
  }
  if (!parallel.has_ranks_per_node()) return;
  if (checker.InRange("parallel.ranks_per_node", parallel.ranks_per_node(), 1, kMaxRanks) &&
      parallel.ranks() % parallel.ranks_per_node() != 0) {
    checker.Fail("parallel.ranks_per_node",
                 absl::StrCat(parallel.ranks_per_node(), " does not divide the ", parallel.ranks(),
                              " ranks; legal values: ", DivisorsOf(parallel.ranks())));
  }
}

// Fails unless `place` is one.
bool CheckPlace(absl::string_view field, v1::Place place, SpecChecker& checker) {
  return place == v1::PLACE_DEVICE || place == v1::PLACE_HOST ||
         checker.Fail(field, absl::StrCat(static_cast<int>(place), " is neither device nor host"));
}

// What makes fpdt what it is.
void CheckFpdt(const v1::MemorySpec& memory, SpecChecker& checker) {
  const auto host = [&checker](absl::string_view field, v1::Place place) {
    if (place != v1::PLACE_DEVICE) return;
    checker.Fail(
        field,
        "device given, but waiting in host memory is what makes it fpdt: remove it, or use "
        "method ulysses, where it is the default");
  };
  host("memory.layer_inputs", memory.layer_inputs());
  host("memory.hidden_stream", memory.hidden_stream());
  host("memory.stage_kv", memory.stage_kv());
  if (memory.query_chunks() == 1) {
    checker.Fail("memory.query_chunks",
                 "1 given, but two chunks or more are what makes it fpdt: raise it, or use method "
                 "ulysses");
  }
}

// Places that need each other. All of them are legal by themselves.
void CheckPlacesTogether(const v1::JobSpec& spec, SpecChecker& checker) {
  const v1::MemorySpec& memory = spec.memory();
  const bool hidden_on_host = memory.hidden_stream() == v1::PLACE_HOST;
  if (memory.attention_output() == v1::ATTENTION_OUTPUT_DEVICE && hidden_on_host) {
    checker.Fail(
        "memory.attention_output",
        "device would put back on the device what hidden_stream: host takes away; use host "
        "or recompute");
  }
  if (spec.parallel().method() == v1::METHOD_FPDT) {
    CheckFpdt(memory, checker);
    return;
  }
  if (hidden_on_host && memory.layer_inputs() != v1::PLACE_HOST) {
    checker.Fail("memory.hidden_stream",
                 "host needs layer_inputs: host, where each layer's hidden states come from and go "
                 "to");
  }
  const std::optional<ContextRanks> ranks = ContextRanksOf(spec.parallel());
  if (memory.stage_kv() == v1::PLACE_HOST && ranks.has_value() && ranks->ring > 1) {
    checker.Fail("memory.stage_kv",
                 absl::StrCat("host needs ring_ranks 1 and there are ", ranks->ring,
                              ": round a ring, keys and values travel already; use device"));
  }
}

// "parallel.ring_ranks 2 (C = 4 x R = 2) divides them evenly", or nothing when no split does.
std::string ExactSplit(const v1::ParallelSpec& parallel, int64_t heads, int64_t context) {
  int64_t ulysses = context;
  while (context % ulysses != 0 || heads % ulysses != 0) --ulysses;
  const int64_t ring = context / ulysses;
  const bool has_ring =
      parallel.method() == v1::METHOD_UPIPE || parallel.method() == v1::METHOD_USP;
  const std::string how = has_ring       ? absl::StrCat("parallel.ring_ranks ", ring)
                          : ulysses == 1 ? "method ring"
                                         : absl::StrCat("method usp with ring_ranks ", ring);
  return absl::StrCat("; ", how, " (C = ", ulysses, " x R = ", ring, ") is exact");
}

void WarnOfHeads(const v1::JobSpec& spec, const ContextRanks& ranks,
                 std::vector<std::string>& warnings) {
  const int64_t heads = spec.model().num_heads();
  if (heads % ranks.ulysses == 0) return;
  const std::string exact = ExactSplit(spec.parallel(), heads, ranks.total());
  if (heads < ranks.ulysses) {
    warnings.push_back(absl::StrCat("model.num_heads ", heads, " is below the ", ranks.ulysses,
                                    " Ulysses ranks: ", ranks.ulysses - heads,
                                    " ranks idle during attention", exact));
    return;
  }
  warnings.push_back(absl::StrCat(
      "model.num_heads ", heads, " does not divide by the ", ranks.ulysses,
      " Ulysses ranks: the busiest rank does ", CeilDiv(heads, ranks.ulysses), " heads against ",
      absl::SixDigits(static_cast<double>(heads) / static_cast<double>(ranks.ulysses)),
      " in balance", exact));
}

void WarnOfRing(const v1::JobSpec& spec, std::vector<std::string>& warnings) {
  const v1::ModelSpec& model = spec.model();
  std::string mask;
  if (!model.causal()) mask = "model.causal false";
  if (model.has_window() && model.window() < spec.train().context()) {
    mask = absl::StrCat("model.window ", FormatCount(model.window()));
  }
  if (spec.data().documents() != v1::DOCUMENTS_JOIN) mask = "separate documents";
  if (mask.empty()) return;
  warnings.push_back(absl::StrCat("zigzag order balances only a full causal mask: with ", mask,
                                  ", the ring ranks of a sequence may do unequal work and wait for "
                                  "each other"));
}

void WarnOfOverlap(const v1::JobSpec& spec, const ContextRanks& ranks,
                   std::vector<std::string>& warnings) {
  if (ranks.ulysses == 1) {
    warnings.push_back(
        "memory.overlap has nothing to overlap: with one Ulysses rank no stage is exchanged");
  } else if (spec.parallel().heads_per_stage() ==
                 RoundUp(spec.model().num_heads(), ranks.ulysses) ||
             spec.parallel().method() != v1::METHOD_UPIPE) {
    warnings.push_back(
        "memory.overlap has nothing to overlap: with all heads in one stage there is no next one");
  }
}

}  // namespace

bool HasAuto(const v1::JobSpec& spec) {
  const v1::ParallelSpec& parallel = spec.parallel();
  return parallel.method() == v1::METHOD_AUTO ||
         (parallel.has_heads_per_stage() && parallel.heads_per_stage() == 0) ||
         (parallel.has_ring_ranks() && parallel.ring_ranks() == 0) ||
         spec.memory().policy() == v1::POLICY_CHOICE_AUTO;
}

std::string MethodName(v1::Method method) {
  switch (method) {
    case v1::METHOD_UPIPE:
      return "upipe";
    case v1::METHOD_ULYSSES:
      return "ulysses";
    case v1::METHOD_RING:
      return "ring";
    case v1::METHOD_USP:
      return "usp";
    case v1::METHOD_FPDT:
      return "fpdt";
    case v1::METHOD_AUTO:
      return "auto";
    default:
      return "unspecified";
  }
}

v1::ParallelSpec WithParallelDefaults(const v1::ParallelSpec& given) {
  v1::ParallelSpec parallel = given;
  if (!parallel.has_threads_per_rank()) parallel.set_threads_per_rank(1);
  if (!parallel.has_isa_cap()) parallel.set_isa_cap("");
  if (!parallel.has_backend()) parallel.set_backend("cpu");
  if (!parallel.has_fsdp_ranks()) parallel.set_fsdp_ranks(1);
  if (!parallel.has_dp_ranks()) parallel.set_dp_ranks(1);
  if (!parallel.has_device())
    parallel.set_device(parallel.backend() == "cuda" ? "h100-80gb" : "cpu");
  if (!parallel.has_ring_ranks() && parallel.method() != v1::METHOD_USP &&
      parallel.method() != v1::METHOD_AUTO) {
    const bool ring = parallel.method() == v1::METHOD_RING;
    parallel.set_ring_ranks(ring ? static_cast<int32_t>(ContextRankCount(parallel)) : 1);
  }
  return parallel;
}

v1::MemorySpec WithMemoryDefaults(const v1::MemorySpec& given, v1::Method method) {
  v1::MemorySpec memory = given;
  if (!memory.has_policy()) memory.set_policy(v1::POLICY_CHOICE_WRITTEN);
  if (memory.policy() == v1::POLICY_CHOICE_AUTO || method == v1::METHOD_AUTO) return memory;
  const bool fpdt = method == v1::METHOD_FPDT;
  const v1::Place place = fpdt ? v1::PLACE_HOST : v1::PLACE_DEVICE;
  if (!memory.has_attention_output()) memory.set_attention_output(v1::ATTENTION_OUTPUT_RECOMPUTE);
  if (!memory.has_layer_inputs()) memory.set_layer_inputs(place);
  if (!memory.has_checkpoint_stride()) memory.set_checkpoint_stride(1);
  if (!memory.has_hidden_stream()) memory.set_hidden_stream(place);
  if (!memory.has_stage_kv()) memory.set_stage_kv(place);
  if (!memory.has_query_chunks()) memory.set_query_chunks(fpdt ? 4 : 1);
  if (!memory.has_overlap()) memory.set_overlap(false);
  if (!memory.has_ring_kv()) memory.set_ring_kv(v1::RING_KV_PASS);
  if (!memory.has_optimizer()) memory.set_optimizer(v1::PLACE_DEVICE);
  return memory;
}

std::optional<ContextRanks> ContextRanksOf(const v1::ParallelSpec& parallel) {
  const int64_t context = ContextRankCount(parallel);
  const int64_t ring = parallel.ring_ranks();
  if (context == 0 || ring < 1 || context % ring != 0) return std::nullopt;
  return ContextRanks{.ulysses = context / ring, .ring = ring};
}

int64_t PaddingUnit(const ContextRanks& ranks, int64_t query_chunks) {
  const int64_t unit = ranks.total() * query_chunks;
  return ranks.ring > 1 ? std::lcm(unit, 2 * ranks.ring) : unit;
}

void CheckParallel(const v1::JobSpec& spec, SpecChecker& checker) {
  const v1::ParallelSpec& parallel = spec.parallel();
  const bool ranks = checker.Required("parallel.ranks", parallel.ranks(), 1, kMaxRanks);
  bool method = parallel.method() != v1::METHOD_UNSPECIFIED &&
                v1::Method_IsValid(static_cast<int>(parallel.method()));
  if (!method) {
    checker.Fail("parallel.method", "is required: upipe, ulysses, ring, usp, fpdt or auto");
  }
  if (ranks && method) CheckSplit(spec, checker);
  checker.InRange("parallel.threads_per_rank", parallel.threads_per_rank(), 1, 64);
  if (!std::all_of(parallel.isa_cap().begin(), parallel.isa_cap().end(),
                   [](char c) { return absl::ascii_isalnum(c) || c == '_'; })) {
    checker.Fail("parallel.isa_cap",
                 absl::StrCat("'", ToUtf8(parallel.isa_cap(), 80),
                              "' is no instruction set name such as AVX2 or AVX3"));
  }
  if (parallel.backend() != "cpu" && parallel.backend() != "reference" &&
      parallel.backend() != "cuda") {
    checker.Fail("parallel.backend", absl::StrCat("'", ToUtf8(parallel.backend(), 80),
                                                  "' is unknown; backends: cpu, reference, cuda"));
  }
  CheckNode(parallel, checker);
}

void CheckMemory(const v1::JobSpec& spec, SpecChecker& checker) {
  // What the planner chooses is looked at when it has: only what is written can be wrong.
  v1::MemorySpec memory = spec.memory();
  const bool chosen =
      memory.policy() == v1::POLICY_CHOICE_AUTO || spec.parallel().method() == v1::METHOD_AUTO;
  memory.set_policy(v1::POLICY_CHOICE_WRITTEN);
  memory = WithMemoryDefaults(memory, v1::METHOD_UNSPECIFIED);
  bool places = true;
  const v1::AttentionOutput kept = memory.attention_output();
  if (kept != v1::ATTENTION_OUTPUT_RECOMPUTE && kept != v1::ATTENTION_OUTPUT_DEVICE &&
      kept != v1::ATTENTION_OUTPUT_HOST) {
    places =
        checker.Fail("memory.attention_output",
                     absl::StrCat(static_cast<int>(kept), " is none of recompute, device, host"));
  }
  places &= CheckPlace("memory.layer_inputs", memory.layer_inputs(), checker);
  const int64_t layers = spec.model().num_layers();
  checker.InRange("memory.checkpoint_stride", memory.checkpoint_stride(), 1,
                  layers >= 1 && layers <= kMaxLayers ? layers : kMaxLayers);
  places &= CheckPlace("memory.hidden_stream", memory.hidden_stream(), checker);
  places &= CheckPlace("memory.stage_kv", memory.stage_kv(), checker);
  checker.InRange("memory.query_chunks", memory.query_chunks(), 1, kMaxQueryChunks);
  const std::optional<ContextRanks> ranks = ContextRanksOf(spec.parallel());
  if (memory.ring_kv() != v1::RING_KV_PASS && memory.ring_kv() != v1::RING_KV_KEEP) {
    checker.Fail("memory.ring_kv",
                 absl::StrCat(static_cast<int>(memory.ring_kv()), " is neither pass nor keep"));
  } else if (memory.ring_kv() == v1::RING_KV_KEEP && ranks.has_value() && ranks->ring == 1) {
    checker.Fail("memory.ring_kv",
                 "keep given, but without a ring (ring_ranks 1) nothing is gathered: remove it");
  }
  CheckPlace("memory.optimizer", memory.optimizer(), checker);
  if (spec.memory().policy() != v1::POLICY_CHOICE_WRITTEN &&
      spec.memory().policy() != v1::POLICY_CHOICE_AUTO) {
    checker.Fail("memory.policy", absl::StrCat(static_cast<int>(spec.memory().policy()),
                                               " is neither written nor auto"));
  }
  if (places && !chosen) CheckPlacesTogether(spec, checker);
}

std::vector<std::string> ParallelWarnings(const v1::JobSpec& spec) {
  std::vector<std::string> warnings;
  const ContextRanks ranks = *ContextRanksOf(spec.parallel());
  WarnOfHeads(spec, ranks, warnings);
  const int64_t context = spec.train().context();
  const int64_t chunks = spec.memory().query_chunks();
  const int64_t unit = PaddingUnit(ranks, chunks);
  const int64_t padding = RoundUp(context, unit) - context;
  if (padding > 0) {
    warnings.push_back(absl::StrCat("train.context ", FormatCount(context), " is padded by ",
                                    FormatCount(padding), " tokens to a multiple of ",
                                    FormatCount(unit), " (", ranks.total(), " context ranks",
                                    chunks > 1 ? absl::StrCat(" x ", chunks, " query chunks") : "",
                                    ranks.ring > 1 ? ", half-blocks of the ring" : "", ")"));
  }
  if (ranks.ring > 1) WarnOfRing(spec, warnings);
  if (spec.memory().overlap()) WarnOfOverlap(spec, ranks, warnings);
  return warnings;
}

}  // namespace upipe
