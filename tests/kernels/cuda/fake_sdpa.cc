#include "tests/kernels/cuda/fake_sdpa.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "kernels/api/bfloat16.h"

namespace upipe::kernels::testing {
namespace {

// One document of a call, and one query head of it.
struct Part {
  int64_t queries, keys;
  int64_t offset[kSdpaTensors] = {};  // elements, by tensor
  int64_t head, kv_head;
};

class FakePlan final : public SdpaPlan {
 public:
  explicit FakePlan(const SdpaPlanKey& key) : key_(key) {}

  // As cuDNN 9.19 reports for Hopper, ragged batches of 8 and of 512.
  int64_t workspace_bytes() const override {
    const bool many = key_.batch > 8;
    if (!key_.backward) return !key_.ragged ? 256 : many ? 131'840 : 17'152;
    const int64_t queries = key_.ragged ? key_.total_queries : key_.queries;
    int64_t bytes = 4 * key_.heads * queries * (key_.head_dim + 1);
    bytes += !key_.ragged ? 256 : many ? 230'528 : 4736;
    if (key_.heads > key_.kv_heads) bytes += 4 * key_.heads * key_.keys * key_.head_dim;
    return bytes;
  }

  absl::Status Execute(const SdpaBound& bound, void* workspace, CudaStreamHandle) override {
    UPIPE_CHECK(bound.key == key_) << "another plan's tensors";
    std::memset(workspace, 0xFF, static_cast<size_t>(workspace_bytes()));
    for (int64_t batch = 0; batch < key_.batch; ++batch) {
      Part part = PartOf(bound, batch);
      if (part.queries == 0) continue;
      if (key_.backward) ClearKeys(bound, part);
      for (int64_t head = 0; head < key_.heads; ++head) {
        part.head = head;
        part.kv_head = head / (key_.heads / key_.kv_heads);
        for (int64_t i = 0; i < part.queries; ++i) {
          if (key_.backward) {
            Backward(bound, part, i);
          } else {
            Forward(bound, part, i);
          }
        }
      }
      if (key_.backward) StoreKeys(bound, part);
    }
    return absl::OkStatus();
  }

 private:
  Part PartOf(const SdpaBound& bound, int64_t batch) const {
    Part part = {.queries = key_.queries, .keys = key_.keys};
    if (!key_.ragged) return part;
    const auto length = [&](SdpaTensor tensor) {
      return static_cast<const int32_t*>(bound[tensor])[batch];
    };
    part.queries = length(SdpaTensor::kQueryLengths);
    part.keys = length(SdpaTensor::kKeyLengths);
    UPIPE_CHECK(part.queries <= key_.queries && part.keys <= key_.keys) << "longer than the plan";
    const auto offset = [&](SdpaTensor tensor, SdpaTensor offsets) {
      const auto* values = static_cast<const int64_t*>(bound[offsets]);
      if (values != nullptr) part.offset[static_cast<int>(tensor)] = values[batch];
    };
    offset(SdpaTensor::kQ, SdpaTensor::kQOffsets);
    offset(SdpaTensor::kK, SdpaTensor::kKOffsets);
    offset(SdpaTensor::kV, SdpaTensor::kVOffsets);
    offset(SdpaTensor::kO, SdpaTensor::kOOffsets);
    offset(SdpaTensor::kStats, SdpaTensor::kStatsOffsets);
    offset(SdpaTensor::kDout, SdpaTensor::kDoutOffsets);
    offset(SdpaTensor::kDq, SdpaTensor::kDqOffsets);
    offset(SdpaTensor::kDk, SdpaTensor::kDkOffsets);
    offset(SdpaTensor::kDv, SdpaTensor::kDvOffsets);
    return part;
  }

  BFloat16* Row(const SdpaBound& bound, const Part& part, SdpaTensor tensor, SdpaStrides strides,
                int64_t head, int64_t row) const {
    return static_cast<BFloat16*>(bound[tensor]) + part.offset[static_cast<int>(tensor)] +
           head * strides.head + row * strides.row;
  }
  float& Stats(const SdpaBound& bound, const Part& part, int64_t i) const {
    return static_cast<float*>(
        bound[SdpaTensor::kStats])[part.offset[static_cast<int>(SdpaTensor::kStats)] +
                                   part.head * key_.stats_head + i];
  }
  double Dot(const BFloat16* a, const BFloat16* b) const {
    double sum = 0;
    for (int64_t d = 0; d < key_.head_dim; ++d) sum += double{a[d].ToFloat()} * b[d].ToFloat();
    return sum;
  }

  bool Sees(const Part& part, int64_t i, int64_t j) const {
    const int64_t shift = key_.mask.bottom_right ? part.keys - part.queries : 0;
    if (key_.mask.causal && j > i + shift) return false;
    return !key_.mask.left || j > i + shift - *key_.mask.left;
  }

  void Forward(const SdpaBound& bound, const Part& part, int64_t i) const {
    const BFloat16* q = Row(bound, part, SdpaTensor::kQ, key_.q, part.head, i);
    std::vector<double> out(key_.head_dim, 0.0);
    double max = -INFINITY, sum = 0;
    const auto score = [&](int64_t j) {
      return key_.scale * Dot(q, Row(bound, part, SdpaTensor::kK, key_.k, part.kv_head, j));
    };
    for (int64_t j = 0; j < part.keys; ++j) {
      if (Sees(part, i, j)) max = std::max(max, score(j));
    }
    UPIPE_CHECK(max > -INFINITY) << "query " << i << " sees no key; cuDNN says nothing of it";
    for (int64_t j = 0; j < part.keys; ++j) {
      if (!Sees(part, i, j)) continue;
      const double weight = std::exp(score(j) - max);
      const BFloat16* v = Row(bound, part, SdpaTensor::kV, key_.v, part.kv_head, j);
      sum += weight;
      for (int64_t d = 0; d < key_.head_dim; ++d) out[d] += weight * v[d].ToFloat();
    }
    BFloat16* o = Row(bound, part, SdpaTensor::kO, key_.o, part.head, i);
    for (int64_t d = 0; d < key_.head_dim; ++d) {
      o[d] = BFloat16::From(static_cast<float>(out[d] / sum));
    }
    Stats(bound, part, i) = static_cast<float>(max + std::log(sum));
  }

  void ClearKeys(const SdpaBound&, const Part& part) {
    dk_.assign(part.keys * key_.kv_heads * key_.head_dim, 0.0);
    dv_ = dk_;
  }
  void StoreKeys(const SdpaBound& bound, const Part& part) const {
    for (int64_t j = 0; j < part.keys; ++j) {
      for (int64_t head = 0; head < key_.kv_heads; ++head) {
        BFloat16* dk = Row(bound, part, SdpaTensor::kDk, key_.dk, head, j);
        BFloat16* dv = Row(bound, part, SdpaTensor::kDv, key_.dv, head, j);
        const int64_t from = (j * key_.kv_heads + head) * key_.head_dim;
        for (int64_t d = 0; d < key_.head_dim; ++d) {
          dk[d] = BFloat16::From(static_cast<float>(dk_[from + d]));
          dv[d] = BFloat16::From(static_cast<float>(dv_[from + d]));
        }
      }
    }
  }

  void Backward(const SdpaBound& bound, const Part& part, int64_t i) {
    const BFloat16* q = Row(bound, part, SdpaTensor::kQ, key_.q, part.head, i);
    const BFloat16* dout = Row(bound, part, SdpaTensor::kDout, key_.dout, part.head, i);
    const double delta = Dot(dout, Row(bound, part, SdpaTensor::kO, key_.o, part.head, i));
    std::vector<double> dq(key_.head_dim, 0.0);
    for (int64_t j = 0; j < part.keys; ++j) {
      if (!Sees(part, i, j)) continue;
      const BFloat16* k = Row(bound, part, SdpaTensor::kK, key_.k, part.kv_head, j);
      const BFloat16* v = Row(bound, part, SdpaTensor::kV, key_.v, part.kv_head, j);
      const double probability = std::exp(key_.scale * Dot(q, k) - Stats(bound, part, i));
      const double dscore = key_.scale * probability * (Dot(dout, v) - delta);
      const int64_t to = (j * key_.kv_heads + part.kv_head) * key_.head_dim;
      for (int64_t d = 0; d < key_.head_dim; ++d) {
        dq[d] += dscore * k[d].ToFloat();
        dk_[to + d] += dscore * q[d].ToFloat();
        dv_[to + d] += probability * dout[d].ToFloat();
      }
    }
    BFloat16* out = Row(bound, part, SdpaTensor::kDq, key_.dq, part.head, i);
    for (int64_t d = 0; d < key_.head_dim; ++d) {
      out[d] = BFloat16::From(static_cast<float>(dq[d]));
    }
  }

  const SdpaPlanKey key_;
  std::vector<double> dk_, dv_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SdpaPlan>> FakeSdpa::Make(const SdpaPlanKey& key) {
  const auto refuse = [](const char* why) { return absl::FailedPreconditionError(why); };
  if (key.heads % key.kv_heads != 0) return refuse("query heads do not divide over K/V heads");
  if (key.queries == 1 && key.keys == 1) return refuse("one query and one key");
  if (key.head_dim % 8 != 0 || key.head_dim > 256) return refuse("head size");
  if (!key.ragged && key.queries > key.keys && (key.mask.bottom_right || key.mask.left)) {
    return refuse("more queries than keys with a diagonal from the end, or a window");
  }
  if (key.mask.left && *key.mask.left <= 0) return refuse("a window of nothing");
  if (key.ragged && key.heads > 1) return refuse("ragged heads together: too much scratch");
  if (!key.ragged && key.batch != 1) return refuse("a batch without lengths");
  made_.push_back(key);
  return std::make_unique<FakePlan>(key);
}

absl::Status FakeSdpa::Upload(const std::vector<char>& table, CudaStreamHandle) {
  UPIPE_CHECK(table.size() <= table_.size()) << "a table of " << table.size() << " bytes";
  std::memcpy(table_.data(), table.data(), table.size());
  return absl::OkStatus();
}

}  // namespace upipe::kernels::testing
