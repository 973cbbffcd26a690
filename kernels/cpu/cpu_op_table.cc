#include "kernels/cpu/cpu_op_table.h"

#include <cblas.h>

#include "kernels/cpu/blas_buffers.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/host/host_op_table.h"

namespace upipe::kernels {
namespace {

class CpuOpTable final : public OpTable {
 public:
  explicit CpuOpTable(int num_threads) : blas_buffers_(num_threads) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return ops_.WorkspaceBytes(params);
  }
  absl::Status Enqueue(const OpParams& params, Workspace workspace, Stream& stream) override {
    return ops_.Enqueue(params, workspace, stream);
  }

 private:
  HostOpTable<cpu::Backend> ops_;
  const cpu::BlasBuffers blas_buffers_;
};

}  // namespace

std::unique_ptr<OpTable> CreateCpuOpTable(int num_threads) {
  openblas_set_num_threads(1);
  return std::make_unique<CpuOpTable>(num_threads);
}

}  // namespace upipe::kernels
