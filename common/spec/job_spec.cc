#include "common/spec/job_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/rounding.h"
#include "common/spec/model_rules.h"
#include "common/spec/spec_checker.h"
#include "common/units.h"

namespace upipe {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 62;  // of any product the engine forms

// Legal U (SCHEDULE "Legal U"): multiples of the ranks up to the first at or above the heads.
std::string LegalHeadsPerStage(int64_t num_heads, int64_t ranks) {
  const int64_t last = RoundUp(num_heads, ranks);
  std::vector<int64_t> legal;
  if (last / ranks > 8) {
    return absl::StrCat("multiples of ", ranks, " from ", ranks, " to ", FormatCount(last));
  }
  for (int64_t value = ranks; value <= last; value += ranks) legal.push_back(value);
  return absl::StrJoin(legal, ", ");
}

void CheckName(const std::string& name, SpecChecker& checker) {
  constexpr absl::string_view kRule =
      "1 to 63 lower-case letters, digits and '-', beginning with a letter or digit";
  if (name.empty()) {
    checker.Fail("name", absl::StrCat("is required: ", kRule));
    return;
  }
  const bool legal =
      name.size() <= 63 && name[0] != '-' && std::all_of(name.begin(), name.end(), [](char c) {
        return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-';
      });
  if (!legal) {
    checker.Fail("name", absl::StrCat("must be ", kRule, "; it has ", name.size(), " characters: '",
                                      name.substr(0, 80), "'"));
  }
}

void CheckHeadsPerStage(const v1::ParallelSpec& parallel, int64_t num_heads, SpecChecker& checker) {
  constexpr absl::string_view kField = "parallel.heads_per_stage";
  const std::string legal =
      absl::StrCat("legal values for ", num_heads, " heads on ", parallel.ranks(),
                   " ranks: ", LegalHeadsPerStage(num_heads, parallel.ranks()));
  if (parallel.method() == v1::METHOD_ULYSSES) {
    if (parallel.has_heads_per_stage()) {
      checker.Fail(kField,
                   absl::StrCat(parallel.heads_per_stage(), " given, but method ulysses runs all ",
                                num_heads, " heads in one stage: remove it or use method upipe"));
    }
    return;
  }
  if (!parallel.has_heads_per_stage()) {
    checker.Fail(kField, absl::StrCat("is required for method upipe; ", legal));
    return;
  }
  const int64_t value = parallel.heads_per_stage();
  if (value < parallel.ranks()) {
    checker.Fail(kField, absl::StrCat(value, " is below the ", parallel.ranks(),
                                      " ranks and would idle some of them; ", legal));
  } else if (value % parallel.ranks() != 0) {
    checker.Fail(kField, absl::StrCat(value, " is not a multiple of the ", parallel.ranks(),
                                      " ranks; ", legal));
  } else if (value > RoundUp(num_heads, parallel.ranks())) {
    checker.Fail(kField,
                 absl::StrCat(value, " is above what ", num_heads, " heads can fill; ", legal));
  }
}

void CheckParallel(const v1::ParallelSpec& parallel, int64_t num_heads, SpecChecker& checker) {
  const bool ranks = checker.Required("parallel.ranks", parallel.ranks(), 1, 1024);
  bool method = parallel.method() == v1::METHOD_UPIPE || parallel.method() == v1::METHOD_ULYSSES;
  if (!method) checker.Fail("parallel.method", "is required: upipe or ulysses");
  if (ranks && method && num_heads >= 1 && num_heads <= 1024) {
    CheckHeadsPerStage(parallel, num_heads, checker);
  }
  checker.InRange("parallel.threads_per_rank", parallel.threads_per_rank(), 1, 64);
  if (!std::all_of(parallel.isa_cap().begin(), parallel.isa_cap().end(),
                   [](char c) { return absl::ascii_isalnum(c) || c == '_'; })) {
    checker.Fail("parallel.isa_cap",
                 absl::StrCat("'", parallel.isa_cap().substr(0, 80),
                              "' is no instruction set name such as AVX2 or AVX3"));
  }
  if (parallel.backend() != "cpu" && parallel.backend() != "reference") {
    checker.Fail("parallel.backend", absl::StrCat("'", parallel.backend().substr(0, 80),
                                                  "' is unknown; backends: cpu, reference"));
  }
}

void CheckOptimizer(const v1::OptimizerSpec& optimizer, SpecChecker& checker) {
  const bool peak = checker.PositiveFloat("optimizer.learning_rate", optimizer.learning_rate());
  const double floor = optimizer.min_learning_rate();
  if (!(std::isfinite(floor) && floor >= 0)) {
    checker.Fail("optimizer.min_learning_rate",
                 absl::StrCat(floor, " is not a finite number from 0"));
  } else if (peak && floor > optimizer.learning_rate()) {
    checker.Fail(
        "optimizer.min_learning_rate",
        absl::StrCat(floor, " is above the peak learning_rate ", optimizer.learning_rate()));
  }
  checker.InRange("optimizer.warmup_steps", optimizer.warmup_steps(), 0, int64_t{1} << 31);
  checker.Fraction("optimizer.beta1", optimizer.beta1());
  checker.Fraction("optimizer.beta2", optimizer.beta2());
  checker.PositiveFloat("optimizer.eps", optimizer.eps());
  if (!(std::isfinite(optimizer.weight_decay()) && optimizer.weight_decay() >= 0)) {
    checker.Fail("optimizer.weight_decay",
                 absl::StrCat(optimizer.weight_decay(), " is not a finite number from 0"));
  }
  if (!(optimizer.clip_norm() > 0)) {
    checker.Fail("optimizer.clip_norm", absl::StrCat(optimizer.clip_norm(),
                                                     " is not above 0; .inf "
                                                     "means no clipping"));
  }
  checker.InRange("optimizer.max_skipped_steps", optimizer.max_skipped_steps(), 1,
                  std::numeric_limits<int32_t>::max());
}

void CheckTrain(const v1::TrainSpec& train, SpecChecker& checker) {
  checker.Required("train.context", train.context(), 1, kMaxContext);
  checker.Required("train.steps", train.steps(), 1, int64_t{1} << 31);
  checker.InRange("train.eval_every", train.eval_every(), 0, int64_t{1} << 31);
  checker.InRange("train.eval_sequences", train.eval_sequences(), 0, int64_t{1} << 31);
  if (train.has_memory_per_rank()) {
    checker.InRange("train.memory_per_rank", train.memory_per_rank(), 1, kMaxSize);
  }
  if (train.dtype() != v1::DTYPE_FP32 && train.dtype() != v1::DTYPE_BF16) {
    checker.Fail("train.dtype",
                 absl::StrCat(static_cast<int>(train.dtype()), " is neither fp32 nor bf16"));
  }
}

}  // namespace

std::string MethodName(v1::Method method) {
  switch (method) {
    case v1::METHOD_UPIPE:
      return "upipe";
    case v1::METHOD_ULYSSES:
      return "ulysses";
    default:
      return "unspecified";
  }
}

int64_t PaddedContext(const v1::JobSpec& spec) {
  return RoundUp(spec.train().context(), spec.parallel().ranks());
}

v1::JobSpec WithDefaults(const v1::JobSpec& spec) {
  v1::JobSpec full = spec;
  *full.mutable_model() = WithModelDefaults(spec.model());
  v1::ParallelSpec& parallel = *full.mutable_parallel();
  if (!parallel.has_threads_per_rank()) parallel.set_threads_per_rank(1);
  if (!parallel.has_isa_cap()) parallel.set_isa_cap("");
  if (!parallel.has_backend()) parallel.set_backend("cpu");
  v1::OptimizerSpec& optimizer = *full.mutable_optimizer();
  if (!optimizer.has_learning_rate()) optimizer.set_learning_rate(3e-4);
  if (!optimizer.has_min_learning_rate()) {
    optimizer.set_min_learning_rate(optimizer.learning_rate() / 10);
  }
  if (!optimizer.has_warmup_steps()) optimizer.set_warmup_steps(0);
  if (!optimizer.has_beta1()) optimizer.set_beta1(0.9);
  if (!optimizer.has_beta2()) optimizer.set_beta2(0.95);
  if (!optimizer.has_eps()) optimizer.set_eps(1e-8);
  if (!optimizer.has_weight_decay()) optimizer.set_weight_decay(0.1);
  if (!optimizer.has_clip_norm()) optimizer.set_clip_norm(1.0);
  if (!optimizer.has_max_skipped_steps()) optimizer.set_max_skipped_steps(10);
  v1::TrainSpec& train = *full.mutable_train();
  if (!train.has_seed()) train.set_seed(1);
  if (!train.has_eval_every()) train.set_eval_every(0);
  if (!train.has_eval_sequences()) train.set_eval_sequences(1);
  if (!train.has_dtype()) train.set_dtype(v1::DTYPE_FP32);
  v1::MemorySpec& memory = *full.mutable_memory();
  if (!memory.has_attention_output()) memory.set_attention_output(v1::ATTENTION_OUTPUT_RECOMPUTE);
  return full;
}

std::vector<Violation> ValidateJobSpec(const v1::JobSpec& spec) {
  const v1::JobSpec full = WithDefaults(spec);
  SpecChecker checker;
  CheckName(full.name(), checker);
  const auto present = [&](absl::string_view section, bool has) {
    return has || checker.Fail(section, "this section is required");
  };
  if (present("model", spec.has_model())) {
    CheckModel(full.model(), full.train().context(), checker);
  }
  if (present("data", spec.has_data())) {
    if (full.data().path().empty()) {
      checker.Fail("data.path", "is required: a folder written by `upipe data pack`");
    } else if (full.data().path().find('\0') != std::string::npos) {
      checker.Fail("data.path", "contains a NUL character");
    }
  }
  if (present("parallel", spec.has_parallel())) {
    CheckParallel(full.parallel(), full.model().num_heads(), checker);
  }
  CheckOptimizer(full.optimizer(), checker);
  if (present("train", spec.has_train())) CheckTrain(full.train(), checker);
  const v1::AttentionOutput kept = full.memory().attention_output();
  if (kept != v1::ATTENTION_OUTPUT_RECOMPUTE && kept != v1::ATTENTION_OUTPUT_DEVICE) {
    checker.Fail("memory.attention_output",
                 absl::StrCat(static_cast<int>(kept), " is neither recompute nor device"));
  }
  return checker.Take();
}

std::vector<std::string> JobSpecWarnings(const v1::JobSpec& given) {
  const v1::JobSpec spec = WithDefaults(given);
  std::vector<std::string> warnings = PositionWarnings(spec.model(), spec.train().context());
  const int64_t heads = spec.model().num_heads();
  const int64_t ranks = spec.parallel().ranks();
  if (heads < ranks) {
    warnings.push_back(absl::StrCat("model.num_heads ", heads, " is below parallel.ranks ", ranks,
                                    ": ", ranks - heads, " ranks idle during attention"));
  } else if (heads % ranks != 0) {
    warnings.push_back(absl::StrCat(
        "model.num_heads ", heads, " does not divide by parallel.ranks ", ranks,
        ": the busiest rank does ", (heads + ranks - 1) / ranks, " heads against ",
        absl::SixDigits(static_cast<double>(heads) / static_cast<double>(ranks)), " in balance"));
  }
  const int64_t padding = PaddedContext(spec) - spec.train().context();
  if (padding > 0) {
    warnings.push_back(absl::StrCat("train.context ", FormatCount(spec.train().context()),
                                    " is padded by ", padding, " tokens to a multiple of ", ranks,
                                    " ranks"));
  }
  if (spec.optimizer().warmup_steps() >= spec.train().steps()) {
    warnings.push_back(absl::StrCat("optimizer.warmup_steps ", spec.optimizer().warmup_steps(),
                                    " is not below train.steps ", spec.train().steps(),
                                    ": the peak learning rate is never left"));
  }
  return warnings;
}

}  // namespace upipe
