#include "benchmarks/kernels/matmul_rows.h"

#include <string>

#include "kernels/cpu/isa.h"

namespace upipe::kernels {
namespace {

struct Product {
  const char* name;
  int64_t m, n, k;
  bool transpose_a, transpose_b;
  bool fp32_sum;  // c is fp32 and added to: a weight gradient
};

// Square, then those of a block 512 wide with an MLP of 1536 on 4096 tokens.
constexpr Product kProducts[] = {
    {"square", 2048, 2048, 2048, false, false, false},
    {"projection", 4096, 512, 512, false, true, false},
    {"mlp up", 4096, 1536, 512, false, true, false},
    {"mlp down", 4096, 512, 1536, false, true, false},
    {"input gradient", 4096, 512, 1536, false, false, false},
    {"weight gradient", 1536, 512, 4096, true, false, true},
};

MatmulParams Call(CpuBench& bench, const Product& product, DType dtype) {
  const auto [name, m, n, k, transpose_a, transpose_b, fp32_sum] = product;
  MatmulParams p = {
      .transpose_a = transpose_a, .transpose_b = transpose_b, .beta = fp32_sum ? 1.0f : 0.0f};
  p.a = bench.Random(dtype, transpose_a ? std::vector{k, m} : std::vector{m, k});
  p.b = bench.Random(dtype, transpose_b ? std::vector{n, k} : std::vector{k, n});
  p.c = bench.Random(fp32_sum ? DType::kFloat32 : dtype, {m, n});
  return p;
}

}  // namespace

void AppendMatmulRows(CpuBench& bench, int repeats, nlohmann::ordered_json& rows) {
  const bool native = HasBf16Products();
  for (const Product& product : kProducts) {
    const double gflop = 2e-9 * product.m * product.n * product.k;
    const MatmulParams fp32 = Call(bench, product, DType::kFloat32);
    const MatmulParams bf16 = Call(bench, product, DType::kBFloat16);
    const auto rate = [&](const MatmulParams& p) { return gflop / bench.Seconds(p); };
    const auto append = [&](const char* path, const MatmulParams& p) {
      rows.push_back(RatioRow(
          {{"op", "matmul"},
           {"dtype", NameOf(p.a.dtype)},
           {"path", path},
           {"product", product.name},
           {"m", product.m},
           {"n", product.n},
           {"k", product.k},
           {"yardstick", "the same product in fp32"}},
          "gflops", repeats, [&] { return rate(p); }, [&] { return rate(fp32); }));
    };
    append("fp32", fp32);
    if (native) append("native", bf16);
    SetBf16ProductsForTest(false);
    append("converted", bf16);
    SetBf16ProductsForTest(native);
  }
}

}  // namespace upipe::kernels
