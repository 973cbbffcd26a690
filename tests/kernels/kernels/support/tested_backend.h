// The backend that the op tests of a program hold to the reference: tested_cpu.cc or
// tested_cuda.cc.
#pragma once

#include <functional>
#include <string>

#include "kernels/api/op_table.h"

namespace upipe::kernels::testing {

OpTable& Tested();

// Calls body() with the backend in each of its variants in turn. Of cpu: held to each instruction
// set of this machine; for fp32 calls not also to the processor's bf16 products. Of CUDA: emulated.
void ForEachVariant(const std::function<void(const std::string& variant)>& body,
                    DType storage = DType::kBFloat16);

}  // namespace upipe::kernels::testing
