// Op names, as errors, traces and the dry device's counts print them.
#include "kernels/api/op_name.h"

#include <iterator>
#include <variant>

#include "kernels/api/op_table.h"

namespace upipe::kernels {
namespace {

constexpr const char* kNames[] = {
    "embedding_fwd", "embedding_bwd", "rms_norm_fwd", "rms_norm_bwd",  "matmul",
    "column_sum",    "rope",          "strided_copy", "attention_fwd", "attention_bwd",
    "row_dot",       "swiglu_fwd",    "swiglu_bwd",   "cross_entropy", "sum_of_squares",
    "clip_scale",    "adamw",         "fill",         "random_normal"};
static_assert(std::size(kNames) == std::variant_size_v<OpParams>);

}  // namespace

const char* NameOf(const OpParams& params) { return kNames[params.index()]; }

const char* NameOfOp(int index) { return kNames[index]; }

}  // namespace upipe::kernels
