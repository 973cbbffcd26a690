// What attention demands of its params: the longest part of Validate.
#pragma once

#include "kernels/api/op_params.h"
#include "kernels/api/param_check.h"

namespace upipe::kernels {

void CheckAttentionFwd(const AttentionFwdParams& p, ParamCheck& check);
void CheckAttentionBwd(const AttentionBwdParams& p, ParamCheck& check);

}  // namespace upipe::kernels
