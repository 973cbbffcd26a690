// What Validate demands of a rotary configuration.
#pragma once

#include <cstdint>

#include "kernels/api/param_check.h"

namespace upipe::kernels {

void CheckRopeConfig(const RopeConfig& config, int64_t head_dim, ParamCheck& check);

}  // namespace upipe::kernels
