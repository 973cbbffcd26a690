// Sine and cosine of angles in double, to 1e-15, without the memory that the library's form keeps
// for huge arguments: angles are reduced by pi / 2 in two parts, good for |angle| below 2^40.
#pragma once

#include <cuda_runtime.h>

namespace upipe::kernels::cuda {

struct SinCosPair {
  double sine, cosine;
};

__device__ inline SinCosPair SinCos(double angle) {
  // Adding 1.5 * 2^52 rounds to a whole number and leaves it in the low bits.
  constexpr double kToWhole = 6755399441055744.0;
  constexpr double kTwoOverPi = 0.63661977236758134308;
  constexpr double kHalfPi = 1.57079632679489655800;
  constexpr double kHalfPiRest = 6.12323399573676603587e-17;
  const double shifted = fma(angle, kTwoOverPi, kToWhole);
  const double quarters = shifted - kToWhole;
  const int quadrant = static_cast<int>(__double_as_longlong(shifted) & 3);
  const double r = fma(-quarters, kHalfPiRest, fma(-quarters, kHalfPi, angle));
  const double square = r * r;
  // The series of sin r / r and cos r to r^14 and r^16, |r| at most pi / 4.
  double odd = -1.0 / 1307674368000;
  odd = fma(odd, square, 1.0 / 6227020800);
  odd = fma(odd, square, -1.0 / 39916800);
  odd = fma(odd, square, 1.0 / 362880);
  odd = fma(odd, square, -1.0 / 5040);
  odd = fma(odd, square, 1.0 / 120);
  odd = fma(odd, square, -1.0 / 6);
  odd = fma(odd * square, r, r);
  double even = 1.0 / 20922789888000;
  even = fma(even, square, -1.0 / 87178291200);
  even = fma(even, square, 1.0 / 479001600);
  even = fma(even, square, -1.0 / 3628800);
  even = fma(even, square, 1.0 / 40320);
  even = fma(even, square, -1.0 / 720);
  even = fma(even, square, 1.0 / 24);
  even = fma(even, square, -0.5);
  even = fma(even, square, 1.0);
  const double sine = quadrant & 1 ? even : odd;
  const double cosine = quadrant & 1 ? odd : even;
  return {quadrant & 2 ? -sine : sine, (quadrant + 1) & 2 ? -cosine : cosine};
}

}  // namespace upipe::kernels::cuda
