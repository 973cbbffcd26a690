#include "kernels/reference/reference_op_table.h"

#include "kernels/host/host_op_table.h"
#include "kernels/reference/reference_backend.h"

namespace upipe::kernels {

std::unique_ptr<OpTable> CreateReferenceOpTable() {
  return std::make_unique<HostOpTable<reference::Backend>>();
}

}  // namespace upipe::kernels
