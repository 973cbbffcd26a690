// Reader of tests/golden/data/*.golden: a tiny model's weights, batch, gradients and 20 AdamW steps
// as an independent implementation computed them in float64. tests/golden/make/ makes the files and
// says what each holds; the byte layout is in make/golden_format.py.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace upipe::golden {

// Fields as in a Hugging Face config; those that `type` does not have are absent or 0.
struct RopeScaling {
  std::string type;  // "llama3", "linear", "dynamic", "yarn"
  double factor = 0;
  int64_t original_context = 0;
  double low_freq_factor = 0, high_freq_factor = 0;  // llama3
  double beta_fast = 0, beta_slow = 0;               // yarn
  std::optional<double> attention_factor;            // yarn
  bool truncate = false;                             // yarn
};

struct GoldenConfig {
  std::string name;
  int64_t layers = 0;
  int64_t hidden_size = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate_size = 0;
  int64_t vocab_size = 0;
  int64_t context_tokens = 0;
  bool tied_embeddings = false;  // the head is model.embed_tokens.weight; no lm_head.weight then
  double rms_norm_eps = 0;
  double rope_theta = 0;
  std::optional<RopeScaling> rope_scaling;
  bool qk_norm = false;   // Qwen3
  bool qkv_bias = false;  // Qwen2.5
};

// AdamW with decoupled decay on tensors of two or more dims; gradients times
// min(1, clip_norm / (norm + clip_eps)); learning rate of step 1 .. steps: peak_lr * step /
// warmup_steps up to warmup_steps, then half a cosine to min_lr (tensor "train/learning_rates").
struct GoldenTraining {
  int64_t steps = 0;
  int64_t warmup_steps = 0;
  double peak_lr = 0;
  double min_lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double eps = 0;
  double weight_decay = 0;
  double clip_norm = 0;
  double clip_eps = 0;
};

// A golden file held in memory. Immutable, so safe from any thread; spans live as long as the file.
class GoldenFile {
 public:
  // Blocking. NotFound when the file cannot be read, DataLoss naming the file when it is malformed.
  static absl::StatusOr<GoldenFile> Open(const std::string& path);

  const GoldenConfig& config() const { return config_; }
  const GoldenTraining& training() const { return training_; }

  // Hugging Face names ("model.norm.weight", ...) in model order. Each has the tensors
  // "weight/NAME", "grad/NAME" and "train/delta/NAME" of one shape.
  const std::vector<std::string>& parameters() const { return parameters_; }

  // Elements in row-major order. T is float, double or int32_t as stored: InvalidArgument if the
  // tensor has another type, NotFound if there is none of that name.
  template <typename T>
  absl::StatusOr<absl::Span<const T>> Tensor(absl::string_view name) const;

  absl::StatusOr<std::vector<int64_t>> Shape(absl::string_view name) const;

  // ||delta|| / ||reference|| of PyTorch's own run with `dtype` "fp32" or "bf16" for "loss",
  // "logits", "grad/NAME", "train/losses", "train/grad_norms" or "train/delta/NAME".
  absl::StatusOr<double> PytorchError(absl::string_view dtype, absl::string_view name) const;

 private:
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    int64_t num_elements = 0;
    int64_t offset_bytes = 0;  // into data_
  };

  GoldenFile() = default;
  absl::Status Parse(absl::string_view content);
  absl::Status ParseHeader(absl::string_view text, int64_t data_bytes);
  absl::StatusOr<const Entry*> Find(absl::string_view name) const;

  std::string path_;
  GoldenConfig config_;
  GoldenTraining training_;
  std::vector<std::string> parameters_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, double, std::less<>> pytorch_errors_;  // by "dtype/name"
  std::vector<double> data_;  // of doubles, so that every stored type is aligned
};

}  // namespace upipe::golden
