#include "kernels/cpu/onednn_product.h"

#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "oneapi/dnnl/dnnl.hpp"

extern "C" void omp_set_num_threads(int count);  // libgomp, which oneDNN runs on

namespace upipe::kernels::cpu {
namespace {

using DataType = dnnl::memory::data_type;

// Everything a compiled product depends on.
struct Key {
  int64_t m, n, k, a_stride, b_stride, c_stride;
  bool transpose_a, transpose_b, has_bias;
  DType c_type;
  float alpha, beta;

  auto operator<=>(const Key&) const = default;
};

struct Compiled {
  dnnl::matmul::primitive_desc desc;
  dnnl::matmul primitive;
  int64_t scratch_bytes;
};

// One engine and every product compiled so far. Kept to the end of the process.
class Products {
 public:
  static Products& Get() {
    static Products& products = *new Products;
    return products;
  }

  // Forgets all of them once there are thousands.
  std::shared_ptr<const Compiled> Find(const Key& key) {
    {
      const std::shared_lock lock(mutex_);
      const auto found = compiled_.find(key);
      if (found != compiled_.end()) return found->second;
    }
    std::shared_ptr<const Compiled> compiled = Compile(key);
    const std::unique_lock lock(mutex_);
    if (compiled_.size() >= kMostProducts) compiled_.clear();
    return compiled_.emplace(key, std::move(compiled)).first->second;
  }

  const dnnl::engine& engine() const { return engine_; }

 private:
  static constexpr size_t kMostProducts = 4096;  // a job has tens

  // Without the cap a processor with AMX would give other bits under the same instruction set name.
  Products() : engine_(CappedCpu()) {}
  static dnnl::engine CappedCpu() {
    UPIPE_CHECK(dnnl::set_max_cpu_isa(dnnl::cpu_isa::avx512_core_bf16) == dnnl::status::success)
        << "oneDNN was used before its instruction set was capped";
    return dnnl::engine(dnnl::engine::kind::cpu, 0);
  }

  std::shared_ptr<const Compiled> Compile(const Key& key) const {
    const auto strides = [](bool transpose, int64_t stride) {
      return transpose ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
    };
    const DataType c_type = key.c_type == DType::kFloat32 ? DataType::f32 : DataType::bf16;
    const dnnl::memory::desc a({key.m, key.k}, DataType::bf16,
                               strides(key.transpose_a, key.a_stride));
    const dnnl::memory::desc b({key.k, key.n}, DataType::bf16,
                               strides(key.transpose_b, key.b_stride));
    const dnnl::memory::desc c({key.m, key.n}, c_type, strides(false, key.c_stride));
    const dnnl::memory::desc bias({1, key.n}, DataType::bf16, dnnl::memory::dims{key.n, 1});
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    if (key.alpha != 1) attributes.set_output_scales(0, {key.alpha});
    if (key.beta != 0) {
      dnnl::post_ops sum;
      sum.append_sum(key.beta);
      attributes.set_post_ops(sum);
    }
    const dnnl::matmul::primitive_desc desc(
        key.has_bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c), attributes,
        engine_);
    return std::make_shared<const Compiled>(Compiled{
        desc, dnnl::matmul(desc), static_cast<int64_t>(desc.scratchpad_desc().get_size())});
  }

  const dnnl::engine engine_;
  std::shared_mutex mutex_;
  std::map<Key, std::shared_ptr<const Compiled>> compiled_;
};

bool Multiply(const OnednnProduct& p, void* scratch, int64_t scratch_bytes) {
  Products& products = Products::Get();
  const std::shared_ptr<const Compiled> compiled =
      products.Find({p.m, p.n, p.k, p.a_stride, p.b_stride, p.c_stride, p.transpose_a,
                     p.transpose_b, p.bias != nullptr, p.c_type, p.alpha, p.beta});
  if (compiled->scratch_bytes > scratch_bytes) return false;
  const auto memory = [&](const dnnl::memory::desc& desc, const void* data) {
    return dnnl::memory(desc, products.engine(), const_cast<void*>(data));
  };
  std::unordered_map<int, dnnl::memory> arguments = {
      {DNNL_ARG_SRC, memory(compiled->desc.src_desc(), p.a)},
      {DNNL_ARG_WEIGHTS, memory(compiled->desc.weights_desc(), p.b)},
      {DNNL_ARG_DST, memory(compiled->desc.dst_desc(), p.c)},
      {DNNL_ARG_SCRATCHPAD, memory(compiled->desc.scratchpad_desc(), scratch)}};
  if (p.bias != nullptr) {
    arguments.emplace(DNNL_ARG_BIAS, memory(compiled->desc.bias_desc(), p.bias));
  }
  dnnl::stream stream(products.engine());
  compiled->primitive.execute(stream, arguments);
  stream.wait();
  return true;
}

}  // namespace

absl::StatusOr<bool> MultiplyOnednn(const OnednnProduct& product, void* scratch,
                                    int64_t scratch_bytes) {
  omp_set_num_threads(1);  // of the calling thread: compiled for one, and no team ever starts
  try {
    return Multiply(product, scratch, scratch_bytes);
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat("oneDNN refuses a bf16 product of m = ", product.m,
                                            ", n = ", product.n, ", k = ", product.k, ": ",
                                            error.what()));
  }
}

}  // namespace upipe::kernels::cpu
