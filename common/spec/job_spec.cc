#include "common/spec/job_spec.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/rounding.h"
#include "common/spec/checkpoint_rules.h"
#include "common/spec/model_rules.h"
#include "common/spec/restart_rules.h"
#include "common/spec/spec_checker.h"
#include "common/utf8.h"

namespace upipe {
namespace {

constexpr int64_t kMaxSize = int64_t{1} << 62;  // of any product the engine forms

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
                                      ToUtf8(name, 80), "'"));
  }
}

void CheckData(const v1::DataSpec& data, SpecChecker& checker) {
  if (data.path().empty()) {
    checker.Fail("data.path", "is required: a folder written by `upipe data pack`");
  } else if (data.path().find('\0') != std::string::npos) {
    checker.Fail("data.path", "contains a NUL character");
  }
  if (data.documents() == v1::DOCUMENTS_UNSPECIFIED ||
      !v1::Documents_IsValid(static_cast<int>(data.documents()))) {
    checker.Fail("data.documents", absl::StrCat(static_cast<int>(data.documents()),
                                                " is none of join, separate, restart"));
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
  checker.InRange("train.gradient_accumulation", train.gradient_accumulation(), 1, 1 << 20);
}

}  // namespace

int64_t PaddedContext(const v1::JobSpec& spec) {
  const v1::JobSpec full = WithDefaults(spec);
  const std::optional<ContextRanks> ranks = ContextRanksOf(full.parallel());
  UPIPE_CHECK(ranks.has_value()) << "the ranks of the spec do not split";
  return RoundUp(full.train().context(), PaddingUnit(*ranks, full.memory().query_chunks()));
}

v1::JobSpec WithDefaults(const v1::JobSpec& spec) {
  v1::JobSpec full = spec;
  *full.mutable_model() = WithModelDefaults(spec.model());
  if (!spec.data().has_documents()) full.mutable_data()->set_documents(v1::DOCUMENTS_JOIN);
  *full.mutable_parallel() = WithParallelDefaults(spec.parallel());
  *full.mutable_memory() = WithMemoryDefaults(spec.memory(), spec.parallel().method());
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
  if (!train.has_gradient_accumulation()) train.set_gradient_accumulation(1);
  if (!train.has_selfcheck()) train.set_selfcheck(false);
  if (!train.has_deterministic()) train.set_deterministic(full.parallel().backend() != "cuda");
  if (spec.has_checkpoint()) {
    *full.mutable_checkpoint() = WithCheckpointDefaults(spec.checkpoint());
  }
  *full.mutable_restarts() = WithRestartDefaults(spec.restarts());
  if (!spec.has_priority()) full.set_priority(0);
  return full;
}

std::vector<Violation> ValidateJobSpec(const v1::JobSpec& spec) {
  const v1::JobSpec full = WithDefaults(spec);
  SpecChecker checker;
  CheckName(full.name(), checker);
  const auto present = [&](absl::string_view section, bool has) {
    return has || checker.Fail(section, "this section is required");
  };
  if (present("model", spec.has_model())) CheckModel(full.model(), checker);
  if (present("data", spec.has_data())) CheckData(full.data(), checker);
  if (present("parallel", spec.has_parallel())) CheckParallel(full, checker);
  CheckOptimizer(full.optimizer(), checker);
  if (present("train", spec.has_train())) CheckTrain(full.train(), checker);
  CheckMemory(full, checker);
  CheckCheckpoint(full.checkpoint(), checker);
  CheckRestarts(full, checker);
  return checker.Take();
}

std::vector<std::string> JobSpecWarnings(const v1::JobSpec& given) {
  const v1::JobSpec spec = WithDefaults(given);
  std::vector<std::string> warnings = ModelWarnings(spec.model(), spec.train().context());
  if (!HasAuto(spec)) {
    for (std::string& warning : ParallelWarnings(spec)) warnings.push_back(std::move(warning));
  }
  if (spec.optimizer().warmup_steps() >= spec.train().steps()) {
    warnings.push_back(absl::StrCat("optimizer.warmup_steps ", spec.optimizer().warmup_steps(),
                                    " is not below train.steps ", spec.train().steps(),
                                    ": the peak learning rate is never left"));
  }
  return warnings;
}

}  // namespace upipe
