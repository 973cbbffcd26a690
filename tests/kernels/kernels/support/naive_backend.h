// The yardstick of the bound: every op in fp32, one plain loop at a time, sums in order in one fp32
// variable. Results are rounded to their storage; in bf16, attention's probabilities and score
// gradients are rounded too, as operands of its products.
#pragma once

#include <memory>

#include "kernels/api/op_table.h"

namespace upipe::kernels::testing {

std::unique_ptr<OpTable> CreateNaiveOpTable();

}  // namespace upipe::kernels::testing
