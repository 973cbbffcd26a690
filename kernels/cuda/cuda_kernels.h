// Our own kernels as functions of the op params: what the CUDA op table calls, and in tests the
// emulated one. Params have been validated, the workspace is as large as workspace_bytes.h says.
// Each returns when its kernels are on the stream. Rows of 16-byte aligned addresses and strides
// take the fast path, any others a scalar one with the same results but for the order of sums.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "kernels/api/op_params.h"
#include "kernels/api/workspace.h"

namespace upipe::kernels::cuda {

// Where a kernel is started.
struct LaunchContext {
  cudaStream_t stream;
  int multiprocessors;
  int64_t* fault;  // two words of device memory, see fault.h
};

void Run(const EmbeddingFwdParams& p, Workspace, const LaunchContext& context);
void Run(const EmbeddingBwdParams& p, Workspace, const LaunchContext& context);
void Run(const RmsNormFwdParams& p, Workspace, const LaunchContext& context);
void Run(const RmsNormBwdParams& p, Workspace workspace, const LaunchContext& context);
void Run(const ColumnSumParams& p, Workspace workspace, const LaunchContext& context);
void Run(const RopeParams& p, Workspace, const LaunchContext& context);
void Run(const StridedCopyParams& p, Workspace, const LaunchContext& context);
// The own kernel: no scratch. Slots of heads and document bounds travel as kernel parameters, so
// the lists in p may go once Run returns; more than fit one launch take several
// (attention_launch.h).
void Run(const AttentionFwdParams& p, Workspace, const LaunchContext& context);
void Run(const AttentionBwdParams& p, Workspace, const LaunchContext& context);
void Run(const RowDotParams& p, Workspace, const LaunchContext& context);
void Run(const SwiGluFwdParams& p, Workspace, const LaunchContext& context);
void Run(const SwiGluBwdParams& p, Workspace, const LaunchContext& context);
void Run(const CrossEntropyParams& p, Workspace workspace, const LaunchContext& context);
void Run(const SumOfSquaresParams& p, Workspace workspace, const LaunchContext& context);
void Run(const ClipScaleParams& p, Workspace, const LaunchContext& context);
void Run(const AdamWParams& p, Workspace, const LaunchContext& context);
void Run(const FillParams& p, Workspace, const LaunchContext& context);
void Run(const RandomNormalParams& p, Workspace, const LaunchContext& context);

}  // namespace upipe::kernels::cuda
