#include "kernels/cuda/cublaslt_matmul.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <map>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/matmul_calls.h"

#define UPIPE_RETURN_IF_CUBLAS(call) UPIPE_RETURN_IF_ERROR(CublasStatus(call, #call))

namespace upipe::kernels {
namespace {

absl::Status CublasStatus(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  // What the device has to say comes first.
  UPIPE_RETURN_IF_ERROR(CudaStatus(cudaPeekAtLastError(), call));
  return absl::InternalError(absl::StrCat(cublasLtGetStatusName(status), ": ",
                                          cublasLtGetStatusString(status), " (", call, ")"));
}

template <auto destroy>
struct Destroyer {
  template <typename T>
  void operator()(T* object) const {
    destroy(object);
  }
};
template <typename Handle, auto destroy>
using Owned = std::unique_ptr<std::remove_pointer_t<Handle>, Destroyer<destroy>>;

using Library = Owned<cublasLtHandle_t, cublasLtDestroy>;
using Description = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

cudaDataType_t TypeOf(DType dtype) { return dtype == DType::kBFloat16 ? CUDA_R_16BF : CUDA_R_32F; }

std::string Describe(const MatmulKey& key) {
  return absl::StrCat("[", key.columns, ", ", key.depth, "] x [", key.depth, ", ", key.rows, "] ",
                      NameOf(key.storage), " to ", NameOf(key.out));
}

struct Plan {
  Description description;
  Layout first, second, out;
  cublasLtMatmulAlgo_t algorithm;
};

absl::StatusOr<Layout> MakeLayout(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  UPIPE_RETURN_IF_CUBLAS(cublasLtMatrixLayoutCreate(
      &layout, TypeOf(dtype), static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), stride));
  return Layout(layout);
}

absl::StatusOr<Description> MakeDescription(const MatmulKey& key) {
  cublasLtMatmulDesc_t made = nullptr;
  UPIPE_RETURN_IF_CUBLAS(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  Description description(made);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, const auto& value) {
    return cublasLtMatmulDescSetAttribute(made, attribute, &value, sizeof(value));
  };
  const auto operation = [](bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; };
  UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_DESC_TRANSA, operation(key.first_transposed)));
  UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_DESC_TRANSB, operation(key.second_transposed)));
  if (key.bias) {
    UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS));
    // Some versions have no algorithm for a bias that lies nowhere. Each call says where it does.
    const auto anywhere = uintptr_t{256};
    UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, anywhere));
  }
  return description;
}

absl::StatusOr<Preference> MakePreference(const MatmulKey& key) {
  cublasLtMatmulPreference_t made = nullptr;
  UPIPE_RETURN_IF_CUBLAS(cublasLtMatmulPreferenceCreate(&made));
  Preference preference(made);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    return cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value));
  };
  // Parts of a split inner dim meet in fp32 in the workspace, in a fixed order, or there is no
  // split.
  const uint32_t reductions =
      CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  const auto workspace_bytes = static_cast<uint64_t>(key.workspace_bytes);
  const auto first = static_cast<uint32_t>(key.first_alignment);
  const auto second = static_cast<uint32_t>(key.second_alignment);
  const auto out = static_cast<uint32_t>(key.out_alignment);
  UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes));
  UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reductions));
  UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, first));
  UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, second));
  UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out));
  UPIPE_RETURN_IF_CUBLAS(set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out));
  return preference;
}

class Products final : public CublasLtMatmul {
 public:
  explicit Products(Library library) : library_(std::move(library)) {}

  absl::Status Run(const MatmulParams& p, Workspace workspace,
                   const cuda::LaunchContext& context) override {
    const MatmulCalls calls = CallsOf(p, workspace.data);
    if (calls.zero_bytes > 0) {
      UPIPE_RETURN_IF_ERROR(CudaStatus(
          cudaMemsetAsync(workspace.data, 0, static_cast<size_t>(calls.zero_bytes), context.stream),
          "cudaMemsetAsync"));
    }
    for (const MatmulCall& call : calls.calls) {
      UPIPE_RETURN_IF_ERROR(Run(call, workspace, context.stream));
    }
    if (calls.bias_after) {
      const int64_t rows = p.c.shape[0], columns = p.c.shape[1];
      cuda::Run(StridedCopyParams{.src = TensorView::Tensor3(p.bias.data, p.bias.dtype,
                                                             {rows, 1, columns}, 0, columns),
                                  .dst = p.c.AsTensor3(),
                                  .accumulate = true},
                {}, context);
    }
    return absl::OkStatus();
  }

  absl::Status Prepare(const MatmulParams& p) override {
    for (const MatmulCall& call : CallsOf(p, nullptr).calls) {
      UPIPE_RETURN_IF_ERROR(PlanFor(call.key).status());
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Run(const MatmulCall& call, Workspace workspace, cudaStream_t stream) {
    UPIPE_ASSIGN_OR_RETURN(const Plan* plan, PlanFor(call.key));
    if (call.bias != nullptr) {
      UPIPE_RETURN_IF_CUBLAS(cublasLtMatmulDescSetAttribute(plan->description.get(),
                                                            CUBLASLT_MATMUL_DESC_BIAS_POINTER,
                                                            &call.bias, sizeof(call.bias)));
    }
    const bool scratch = call.key.workspace_bytes > 0;
    return CublasStatus(
        cublasLtMatmul(library_.get(), plan->description.get(), &call.alpha, call.first,
                       plan->first.get(), call.second, plan->second.get(), &call.beta, call.out,
                       plan->out.get(), call.out, plan->out.get(), &plan->algorithm,
                       scratch ? workspace.data : nullptr,
                       static_cast<size_t>(call.key.workspace_bytes), stream),
        "cublasLtMatmul");
  }

  absl::StatusOr<const Plan*> PlanFor(const MatmulKey& key) {
    std::unique_ptr<Plan>& plan = plans_[key];
    if (plan == nullptr) {
      UPIPE_ASSIGN_OR_RETURN(plan, MakePlan(key));
    }
    return plan.get();
  }

  absl::StatusOr<std::unique_ptr<Plan>> MakePlan(const MatmulKey& key) {
    auto plan = std::make_unique<Plan>();
    const auto dims = [](bool transposed, int64_t rows, int64_t columns) {
      return transposed ? std::pair(columns, rows) : std::pair(rows, columns);
    };
    const auto first = dims(key.first_transposed, key.rows, key.depth);
    const auto second = dims(key.second_transposed, key.depth, key.columns);
    UPIPE_ASSIGN_OR_RETURN(plan->description, MakeDescription(key));
    UPIPE_ASSIGN_OR_RETURN(plan->first,
                           MakeLayout(key.storage, first.first, first.second, key.first_stride));
    UPIPE_ASSIGN_OR_RETURN(plan->second,
                           MakeLayout(key.storage, second.first, second.second, key.second_stride));
    UPIPE_ASSIGN_OR_RETURN(plan->out, MakeLayout(key.out, key.rows, key.columns, key.out_stride));
    UPIPE_ASSIGN_OR_RETURN(const Preference preference, MakePreference(key));
    cublasLtMatmulHeuristicResult_t best = {};
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        library_.get(), plan->description.get(), plan->first.get(), plan->second.get(),
        plan->out.get(), plan->out.get(), preference.get(), 1, &best, &found);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && found == 0)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "matmul: cuBLASLt has no algorithm for ", Describe(key), ", rows ", key.second_stride,
          ", ", key.first_stride, " and ", key.out_stride, " elements apart, aligned to ",
          key.second_alignment, ", ", key.first_alignment, " and ", key.out_alignment, " bytes"));
    }
    UPIPE_RETURN_IF_CUBLAS(status);
    plan->algorithm = best.algo;
    return plan;
  }

  const Library library_;
  std::map<MatmulKey, std::unique_ptr<Plan>> plans_;
};

}  // namespace

std::string CublasLtVersion() {
  const size_t number = cublasLtGetVersion();  // 130100
  return absl::StrCat(number / 10000, ".", number / 100 % 100, ".", number % 100);
}

absl::StatusOr<std::unique_ptr<CublasLtMatmul>> CublasLtMatmul::Create() {
  cublasLtHandle_t made = nullptr;
  UPIPE_RETURN_IF_CUBLAS(cublasLtCreate(&made));
  return std::make_unique<Products>(Library(made));
}

}  // namespace upipe::kernels
