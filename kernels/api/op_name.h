// Op names by OpParams::index(), for what keeps ops without their params.
#pragma once

namespace upipe::kernels {

const char* NameOfOp(int index);

}  // namespace upipe::kernels
