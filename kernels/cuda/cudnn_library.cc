#include "kernels/cuda/cudnn_library.h"

#include <cuda_runtime_api.h>
#include <cudnn_frontend.h>
#include <dlfcn.h>

#include <array>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/status.h"
#include "kernels/cuda/cuda_status.h"

// Of the library that the frontend calls; it leaves the definition to its user.
void* cudnn_frontend::cudnn_dlhandle = nullptr;

namespace upipe::kernels {
namespace {

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

constexpr size_t kOldestVersion = 90500;

std::string Describe(const SdpaPlanKey& key) {
  return absl::StrCat(
      key.heads, " heads over ", key.kv_heads, " of ", key.head_dim, ", ", key.queries,
      " queries, ", key.keys, " keys", key.ragged ? absl::StrCat(", batch ", key.batch) : "",
      key.mask.causal ? ", causal" : "", key.mask.bottom_right ? " from the end" : "",
      key.mask.left ? absl::StrCat(", window ", *key.mask.left) : "");
}

std::string OneLine(std::string text) {
  absl::StripAsciiWhitespace(&text);
  return absl::StrReplaceAll(text, {{"\n", " "}});
}

absl::Status StatusOf(fe::error_t error, const SdpaPlanKey& key) {
  if (error.is_good()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(key.backward ? "attention_bwd" : "attention_fwd", ": cuDNN has no plan for ",
                   Describe(key), ": ", error.get_message(), "; take attention kernel own"));
}

// Adds the tensors of one plan to its graph.
class Builder {
 public:
  Builder(const SdpaPlanKey& key, fe::graph::Graph& graph) : key_(key), graph_(graph) {
    if (key.ragged) {
      query_lengths_ = Vector(SdpaTensor::kQueryLengths, key.batch, fe::DataType_t::INT32);
      key_lengths_ = Vector(SdpaTensor::kKeyLengths, key.batch, fe::DataType_t::INT32);
    }
  }

  void Forward() {
    const Tensor q = Queries(SdpaTensor::kQ, key_.q, SdpaTensor::kQOffsets);
    const Tensor k = Keys(SdpaTensor::kK, key_.k, SdpaTensor::kKOffsets);
    const Tensor v = Keys(SdpaTensor::kV, key_.v, SdpaTensor::kVOffsets);
    auto attributes = fe::graph::SDPA_attributes();
    attributes.set_name("attention").set_generate_stats(true);
    SetCommon(attributes);
    auto [o, stats] = graph_.sdpa(q, k, v, attributes);
    SetQueries(*o, SdpaTensor::kO, key_.o, SdpaTensor::kOOffsets);
    o->set_output(true);
    SetStats(*stats);
    stats->set_output(true);
  }

  void Backward() {
    const Tensor q = Queries(SdpaTensor::kQ, key_.q, SdpaTensor::kQOffsets);
    const Tensor k = Keys(SdpaTensor::kK, key_.k, SdpaTensor::kKOffsets);
    const Tensor v = Keys(SdpaTensor::kV, key_.v, SdpaTensor::kVOffsets);
    const Tensor o = Queries(SdpaTensor::kO, key_.o, SdpaTensor::kOOffsets);
    const Tensor dout = Queries(SdpaTensor::kDout, key_.dout, SdpaTensor::kDoutOffsets);
    auto stats_attributes = fe::graph::Tensor_attributes();
    SetStats(stats_attributes);
    const Tensor stats = graph_.tensor(stats_attributes);
    auto attributes = fe::graph::SDPA_backward_attributes();
    attributes.set_name("attention");
    SetCommon(attributes);
    if (key_.ragged) {
      attributes.set_max_total_seq_len_q(key_.total_queries);
      attributes.set_max_total_seq_len_kv(key_.total_keys);
    }
    auto [dq, dk, dv] = graph_.sdpa_backward(q, k, v, o, dout, stats, attributes);
    SetQueries(*dq, SdpaTensor::kDq, key_.dq, SdpaTensor::kDqOffsets);
    SetKeys(*dk, SdpaTensor::kDk, key_.dk, SdpaTensor::kDkOffsets);
    SetKeys(*dv, SdpaTensor::kDv, key_.dv, SdpaTensor::kDvOffsets);
    for (const Tensor& gradient : {dq, dk, dv}) gradient->set_output(true);
  }

 private:
  template <typename Attributes>
  void SetCommon(Attributes& attributes) {
    attributes.set_attn_scale(key_.scale);
    const SdpaMask& mask = key_.mask;
    if (mask.causal || mask.left) {
      attributes.set_diagonal_alignment(mask.bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                          : fe::DiagonalAlignment_t::TOP_LEFT);
    }
    if (mask.causal) attributes.set_diagonal_band_right_bound(0);
    if (mask.left) attributes.set_diagonal_band_left_bound(static_cast<int>(*mask.left));
    if (key_.ragged) {
      attributes.set_padding_mask(true).set_seq_len_q(query_lengths_).set_seq_len_kv(key_lengths_);
    }
  }

  Tensor Vector(SdpaTensor tensor, int64_t count, fe::DataType_t type) {
    return graph_.tensor(fe::graph::Tensor_attributes()
                             .set_name(absl::StrCat("tensor", static_cast<int64_t>(tensor)))
                             .set_uid(static_cast<int64_t>(tensor))
                             .set_dim({count, 1, 1, 1})
                             .set_stride({1, 1, 1, 1})
                             .set_data_type(type));
  }

  void Set(fe::graph::Tensor_attributes& attributes, SdpaTensor tensor,
           const std::array<int64_t, 4>& dims, SdpaStrides strides, SdpaTensor offsets) {
    attributes.set_name(absl::StrCat("tensor", static_cast<int64_t>(tensor)))
        .set_uid(static_cast<int64_t>(tensor))
        .set_dim({dims[0], dims[1], dims[2], dims[3]})
        // A batch of one, or one whose places the offsets say.
        .set_stride({dims[2] * strides.row, strides.head, strides.row, 1});
    if (!key_.ragged) return;
    attributes.set_ragged_offset(Vector(offsets, key_.batch + 1, fe::DataType_t::INT64));
  }
  void SetQueries(fe::graph::Tensor_attributes& attributes, SdpaTensor tensor, SdpaStrides strides,
                  SdpaTensor offsets) {
    attributes.set_data_type(fe::DataType_t::BFLOAT16);
    Set(attributes, tensor, {key_.batch, key_.heads, key_.queries, key_.head_dim}, strides,
        offsets);
  }
  void SetKeys(fe::graph::Tensor_attributes& attributes, SdpaTensor tensor, SdpaStrides strides,
               SdpaTensor offsets) {
    attributes.set_data_type(fe::DataType_t::BFLOAT16);
    Set(attributes, tensor, {key_.batch, key_.kv_heads, key_.keys, key_.head_dim}, strides,
        offsets);
  }
  void SetStats(fe::graph::Tensor_attributes& attributes) {
    attributes.set_data_type(fe::DataType_t::FLOAT);
    Set(attributes, SdpaTensor::kStats, {key_.batch, key_.heads, key_.queries, 1},
        {.head = key_.stats_head, .row = 1}, SdpaTensor::kStatsOffsets);
  }
  Tensor Queries(SdpaTensor tensor, SdpaStrides strides, SdpaTensor offsets) {
    auto attributes = fe::graph::Tensor_attributes();
    SetQueries(attributes, tensor, strides, offsets);
    return graph_.tensor(attributes);
  }
  Tensor Keys(SdpaTensor tensor, SdpaStrides strides, SdpaTensor offsets) {
    auto attributes = fe::graph::Tensor_attributes();
    SetKeys(attributes, tensor, strides, offsets);
    return graph_.tensor(attributes);
  }

  const SdpaPlanKey& key_;
  fe::graph::Graph& graph_;
  Tensor query_lengths_, key_lengths_;
};

class Plan final : public SdpaPlan {
 public:
  Plan(const SdpaPlanKey& key, cudnnHandle_t library) : key_(key), library_(library) {}

  absl::Status Build() {
    graph_.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    Builder builder(key_, graph_);
    if (key_.backward) {
      builder.Backward();
    } else {
      builder.Forward();
    }
    UPIPE_RETURN_IF_ERROR(StatusOf(graph_.build(library_, {fe::HeurMode_t::A}), key_));
    return StatusOf(graph_.get_workspace_size(workspace_bytes_), key_);
  }

  int64_t workspace_bytes() const override { return workspace_bytes_; }

  absl::Status Execute(const SdpaBound& bound, void* workspace, CudaStreamHandle stream) override {
    if (fe::detail::set_stream(library_, stream) != CUDNN_STATUS_SUCCESS) {
      return absl::InternalError("cuDNN did not take the stream");
    }
    std::unordered_map<int64_t, void*> by_id;
    for (int64_t id = 1; id < kSdpaTensors; ++id) {
      if (bound.tensors[id] != nullptr) by_id[id] = bound.tensors[id];
    }
    fe::error_t error = graph_.execute(library_, by_id, workspace);
    if (error.is_good()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(key_.backward ? "attention_bwd" : "attention_fwd",
                                            ": cuDNN did not start ", Describe(key_), ": ",
                                            OneLine(error.get_message())));
  }

 private:
  const SdpaPlanKey key_;
  const cudnnHandle_t library_;
  fe::graph::Graph graph_;
  int64_t workspace_bytes_ = 0;
};

class CudnnLibrary final : public SdpaLibrary {
 public:
  explicit CudnnLibrary(cudnnHandle_t library) : library_(library) {}
  ~CudnnLibrary() override {
    fe::detail::destroy_handle(library_);
    for (const auto& [stream, table] : tables_) cudaFree(table);
  }

  absl::StatusOr<std::unique_ptr<SdpaPlan>> Make(const SdpaPlanKey& key) override {
    auto plan = std::make_unique<Plan>(key, library_);
    try {
      UPIPE_RETURN_IF_ERROR(plan->Build());
    } catch (const std::exception& error) {
      return absl::FailedPreconditionError(
          absl::StrCat("cuDNN cannot make a plan for ", Describe(key), ": ", error.what()));
    }
    return plan;
  }

  absl::StatusOr<char*> TableOf(CudaStreamHandle stream) override {
    void*& table = tables_[stream];
    if (table == nullptr) {
      UPIPE_RETURN_IF_ERROR(CudaStatus(cudaMalloc(&table, kSdpaTableBytes), "cudaMalloc"));
    }
    return static_cast<char*>(table);
  }

  // Not above 64 KiB: the runtime has taken such ordinary memory when it returns.
  absl::Status Upload(const std::vector<char>& table, CudaStreamHandle stream) override {
    return CudaStatus(cudaMemcpyAsync(tables_[stream], table.data(), table.size(),
                                      cudaMemcpyHostToDevice, stream),
                      "cudaMemcpyAsync");
  }

 private:
  const cudnnHandle_t library_;
  std::map<CudaStreamHandle, void*> tables_;
};

// Loads the library once; the frontend calls what was loaded.
absl::Status LoadLibrary() {
  if (fe::cudnn_dlhandle != nullptr) return absl::OkStatus();
  fe::cudnn_dlhandle = dlopen("libcudnn.so.9", RTLD_NOW | RTLD_GLOBAL);
  if (fe::cudnn_dlhandle != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("cuDNN 9 cannot be loaded: ", dlerror(),
                   "; put its folder into LD_LIBRARY_PATH, or take attention kernel own"));
}

}  // namespace

std::string CudnnVersion() {
  const size_t number = fe::detail::get_backend_version();
  return absl::StrCat(number / 10000, ".", number / 100 % 100, ".", number % 100);
}

absl::StatusOr<std::unique_ptr<SdpaLibrary>> OpenCudnn() {
  UPIPE_RETURN_IF_ERROR(LoadLibrary());
  if (fe::detail::get_backend_version() < kOldestVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("this machine has cuDNN ", CudnnVersion(),
                     ", which has no 64-bit offsets of packed documents; install 9.5 or a later 9 "
                     "(9.19 is what plans know), or take attention kernel own"));
  }
  cudnnHandle_t library = nullptr;
  const cudnnStatus_t status = fe::detail::create_handle(&library);
  if (status != CUDNN_STATUS_SUCCESS) {
    return absl::InternalError(
        absl::StrCat("cuDNN does not start: ", fe::detail::get_error_string(status)));
  }
  return std::make_unique<CudnnLibrary>(library);
}

}  // namespace upipe::kernels
