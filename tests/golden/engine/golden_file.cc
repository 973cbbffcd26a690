// The one file of the golden tests that knows the byte layout and touches JSON.
#include "tests/golden/engine/golden_file.h"

#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <type_traits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/status.h"

namespace upipe::golden {
namespace {

using Json = nlohmann::json;

constexpr absl::string_view kMagic = "UPGOLD01";
constexpr int64_t kPrefixBytes = 16;  // magic and header length

template <typename T>
constexpr absl::string_view kDtype = std::is_same_v<T, float>    ? "f32"
                                     : std::is_same_v<T, double> ? "f64"
                                                                 : "i32";

RopeScaling RopeScalingFrom(const Json& json) {
  RopeScaling rope;
  json.at("type").get_to(rope.type);
  json.at("factor").get_to(rope.factor);
  if (rope.type != "linear") json.at("original_context").get_to(rope.original_context);
  if (rope.type == "llama3") {
    json.at("low_freq_factor").get_to(rope.low_freq_factor);
    json.at("high_freq_factor").get_to(rope.high_freq_factor);
  }
  if (rope.type == "yarn") {
    json.at("beta_fast").get_to(rope.beta_fast);
    json.at("beta_slow").get_to(rope.beta_slow);
    json.at("truncate").get_to(rope.truncate);
    const Json& factor = json.at("attention_factor");
    if (!factor.is_null()) rope.attention_factor = factor.get<double>();
  }
  return rope;
}

GoldenConfig ConfigFrom(const std::string& name, const Json& json) {
  GoldenConfig config;
  config.name = name;
  json.at("layers").get_to(config.layers);
  json.at("hidden_size").get_to(config.hidden_size);
  json.at("heads").get_to(config.heads);
  json.at("kv_heads").get_to(config.kv_heads);
  json.at("head_dim").get_to(config.head_dim);
  json.at("intermediate_size").get_to(config.intermediate_size);
  json.at("vocab_size").get_to(config.vocab_size);
  json.at("context_tokens").get_to(config.context_tokens);
  json.at("tied_embeddings").get_to(config.tied_embeddings);
  json.at("rms_norm_eps").get_to(config.rms_norm_eps);
  json.at("rope_theta").get_to(config.rope_theta);
  json.at("qk_norm").get_to(config.qk_norm);
  json.at("qkv_bias").get_to(config.qkv_bias);
  if (const Json& scaling = json.at("rope_scaling"); !scaling.is_null()) {
    config.rope_scaling = RopeScalingFrom(scaling);
  }
  return config;
}

GoldenTraining TrainingFrom(const Json& json) {
  GoldenTraining training;
  json.at("steps").get_to(training.steps);
  json.at("warmup_steps").get_to(training.warmup_steps);
  json.at("peak_lr").get_to(training.peak_lr);
  json.at("min_lr").get_to(training.min_lr);
  json.at("beta1").get_to(training.beta1);
  json.at("beta2").get_to(training.beta2);
  json.at("eps").get_to(training.eps);
  json.at("weight_decay").get_to(training.weight_decay);
  json.at("clip_norm").get_to(training.clip_norm);
  json.at("clip_eps").get_to(training.clip_eps);
  return training;
}

// The product of `shape`, or -1 where a dim is negative or the product exceeds `limit`.
int64_t NumElements(const std::vector<int64_t>& shape, int64_t limit) {
  int64_t product = 1;
  for (int64_t dim : shape) {
    if (dim < 0 || (dim > 0 && product > limit / dim)) return -1;
    product *= dim;
  }
  return product;
}

}  // namespace

absl::StatusOr<GoldenFile> GoldenFile::Open(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  std::ostringstream content;
  if (!stream || !(content << stream.rdbuf())) {
    return absl::NotFoundError(absl::StrCat("cannot read golden file ", path,
                                            "; tests/golden/make/README.md says how to make it"));
  }
  GoldenFile file;
  file.path_ = path;
  UPIPE_RETURN_IF_ERROR(file.Parse(content.str()));
  return file;
}

absl::Status GoldenFile::Parse(absl::string_view content) {
  const int64_t size = static_cast<int64_t>(content.size());
  if (size < kPrefixBytes || content.substr(0, kMagic.size()) != kMagic) {
    return absl::DataLossError(
        absl::StrCat(path_, " is no golden file: it does not start with ", kMagic));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, content.data() + kMagic.size(), sizeof(header_bytes));
  if (header_bytes > static_cast<uint64_t>(size - kPrefixBytes)) {
    return absl::DataLossError(absl::StrCat(path_, ": a header of ", header_bytes,
                                            " bytes does not fit a file of ", size, " bytes"));
  }
  absl::string_view data = content.substr(kPrefixBytes + header_bytes);
  data_.resize((data.size() + sizeof(double) - 1) / sizeof(double));
  std::memcpy(data_.data(), data.data(), data.size());
  return ParseHeader(content.substr(kPrefixBytes, header_bytes), static_cast<int64_t>(data.size()));
}

absl::Status GoldenFile::ParseHeader(absl::string_view text, int64_t data_bytes) {
  try {
    const Json header = Json::parse(text.begin(), text.end());
    config_ = ConfigFrom(header.at("name").get<std::string>(), header.at("config"));
    training_ = TrainingFrom(header.at("training"));
    for (const auto& [dtype, errors] : header.at("pytorch_errors").items()) {
      for (const auto& [name, error] : errors.items()) {
        pytorch_errors_[absl::StrCat(dtype, "/", name)] = error.get<double>();
      }
    }
    for (const Json& tensor : header.at("tensors")) {
      const std::string name = tensor.at("name").get<std::string>();
      Entry entry;
      tensor.at("dtype").get_to(entry.dtype);
      tensor.at("shape").get_to(entry.shape);
      tensor.at("offset").get_to(entry.offset_bytes);
      if (entry.dtype != "f32" && entry.dtype != "f64" && entry.dtype != "i32") {
        return absl::DataLossError(
            absl::StrCat(path_, ": tensor ", name, " has the unknown type ", entry.dtype));
      }
      const int64_t element_bytes = entry.dtype == "f64" ? 8 : 4;
      entry.num_elements = NumElements(entry.shape, data_bytes / element_bytes);
      if (entry.num_elements < 0 || entry.offset_bytes < 0 || entry.offset_bytes % 8 != 0 ||
          entry.offset_bytes > data_bytes - entry.num_elements * element_bytes) {
        return absl::DataLossError(absl::StrCat(path_, ": tensor ", name, " at byte ",
                                                entry.offset_bytes, " does not fit the ",
                                                data_bytes, " bytes of data"));
      }
      absl::string_view parameter = name;
      if (absl::ConsumePrefix(&parameter, "weight/")) parameters_.emplace_back(parameter);
      entries_[name] = std::move(entry);
    }
  } catch (const Json::exception& error) {
    return absl::DataLossError(absl::StrCat(path_, ": the header is malformed: ", error.what()));
  }
  return absl::OkStatus();
}

absl::StatusOr<const GoldenFile::Entry*> GoldenFile::Find(absl::string_view name) const {
  const auto entry = entries_.find(name);
  if (entry == entries_.end()) {
    return absl::NotFoundError(absl::StrCat(path_, " holds no tensor named ", name));
  }
  return &entry->second;
}

template <typename T>
absl::StatusOr<absl::Span<const T>> GoldenFile::Tensor(absl::string_view name) const {
  UPIPE_ASSIGN_OR_RETURN(const Entry* entry, Find(name));
  if (entry->dtype != kDtype<T>) {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": tensor ", name, " is stored as ",
                                                   entry->dtype, ", not ", kDtype<T>));
  }
  const char* bytes = reinterpret_cast<const char*>(data_.data()) + entry->offset_bytes;
  return absl::Span<const T>(reinterpret_cast<const T*>(bytes), entry->num_elements);
}

template absl::StatusOr<absl::Span<const float>> GoldenFile::Tensor(absl::string_view) const;
template absl::StatusOr<absl::Span<const double>> GoldenFile::Tensor(absl::string_view) const;
template absl::StatusOr<absl::Span<const int32_t>> GoldenFile::Tensor(absl::string_view) const;

absl::StatusOr<std::vector<int64_t>> GoldenFile::Shape(absl::string_view name) const {
  UPIPE_ASSIGN_OR_RETURN(const Entry* entry, Find(name));
  return entry->shape;
}

absl::StatusOr<double> GoldenFile::PytorchError(absl::string_view dtype,
                                                absl::string_view name) const {
  const auto error = pytorch_errors_.find(absl::StrCat(dtype, "/", name));
  if (error == pytorch_errors_.end()) {
    return absl::NotFoundError(absl::StrCat(path_, " states no ", dtype, " error of ", name));
  }
  return error->second;
}

}  // namespace upipe::golden
