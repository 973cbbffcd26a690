#include "kernels/cpu/cpu_op_table.h"

#include <cblas.h>

#include "kernels/cpu/cpu_backend.h"
#include "kernels/host/host_op_table.h"

namespace upipe::kernels {

std::unique_ptr<OpTable> CreateCpuOpTable() {
  openblas_set_num_threads(1);
  return std::make_unique<HostOpTable<cpu::Backend>>();
}

}  // namespace upipe::kernels
