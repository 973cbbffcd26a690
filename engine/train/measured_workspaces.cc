#include "engine/train/measured_workspaces.h"

#include <set>
#include <string>
#include <utility>

namespace upipe::train {

kernels::ScratchTable ScratchTableOf(const v1::RunPlan& plan) {
  kernels::ScratchTable table;
  for (const v1::MeasuredWorkspaces::Op& op : plan.measured().ops()) {
    table.Add({op.op(), {op.shape().begin(), op.shape().end()}},
              {.counted = op.counted_bytes(), .measured = op.measured_bytes()});
  }
  return table;
}

v1::MeasuredWorkspaces ToMessage(const kernels::ScratchTable& table, std::string libraries) {
  std::set<std::string> exceeding;
  for (const auto& [shape, bytes] : table.bytes()) {
    if (bytes.exceeds()) exceeding.insert(shape.op);
  }
  v1::MeasuredWorkspaces measured;
  measured.set_libraries(std::move(libraries));
  // First those that take more: the others only say that theirs do not.
  for (const bool exceeds : {true, false}) {
    for (const auto& [shape, bytes] : table.bytes()) {
      if (bytes.exceeds() != exceeds || !exceeding.contains(shape.op)) continue;
      if (measured.ops_size() == kMeasuredOpsMax) return measured;
      v1::MeasuredWorkspaces::Op& op = *measured.add_ops();
      op.set_op(shape.op);
      op.mutable_shape()->Add(shape.sizes.begin(), shape.sizes.end());
      op.set_counted_bytes(bytes.counted);
      op.set_measured_bytes(bytes.measured);
    }
  }
  return measured;
}

}  // namespace upipe::train
