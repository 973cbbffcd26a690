// NCCL itself behind the table of its calls. In builds with UPIPE_WITH_CUDA.
#pragma once

#include <memory>

#include "engine/comm/nccl/nccl_api.h"

namespace upipe::comm {

// Streams given to it are CUDA streams; communicators are on the device that is current where
// CommInit is called.
std::shared_ptr<NcclApi> OpenNccl();

}  // namespace upipe::comm
