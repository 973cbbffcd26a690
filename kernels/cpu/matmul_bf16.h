// Products of bf16 matrices, block by block: by the processor's own instructions where it has them,
// otherwise the operands become fp32 and OpenBLAS multiplies them. Sums are fp32 either way and
// rounded once.
#pragma once

#include <cstdint>

#include "kernels/api/op_params.h"

namespace upipe::kernels::cpu {

// Rows [i, i + rows) and columns [j, j + columns) of c.
struct MatmulPiece {
  int64_t i = 0, rows = 0;
  int64_t j = 0, columns = 0;
};

// Pieces that may run at once, and the workspace they share in equal parts. Both depend on shapes
// alone, so that a plan holds on machines with other processors and threads.
int64_t Bf16PiecesMost(const MatmulParams& p);
int64_t Bf16WorkspaceBytes(const MatmulParams& p);

// c of the piece, on the calling thread; the inner dim is at least 1. The scratch is one of at most
// Bf16PiecesMost equal parts of the workspace; a larger one is faster.
void MultiplyBf16(const MatmulParams& p, const MatmulPiece& piece, void* scratch,
                  int64_t scratch_bytes);

}  // namespace upipe::kernels::cpu
