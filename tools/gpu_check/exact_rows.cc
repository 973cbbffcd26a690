#include "tools/gpu_check/exact_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/status.h"
#include "kernels/api/bfloat16.h"
#include "tools/gpu_check/exact_row_sums.h"
#include "tools/gpu_check/on_device.h"

namespace upipe::gpu_check {
namespace {

using kernels::AttentionBwdParams;
using kernels::AttentionFwdParams;
using kernels::Buffer;
using kernels::Device;
using kernels::MemoryTag;
using kernels::Stream;

// Fills a GPU with a few hundred rows. The plain loop of a row is one loop.
constexpr int kPieces = 32;

template <typename Params>
RowSums SumsOf(const Params& p, Precision precision) {
  RowSums sums = {};
  sums.q = p.q.data;
  sums.k = p.k.At(0, p.kv_slot[0]);
  sums.v = p.v.At(0, p.kv_slot[0]);
  sums.q_stride = p.q.stride[0];
  sums.k_stride = p.k.stride[0];
  sums.v_stride = p.v.stride[0];
  sums.queries = p.q.shape[0];
  sums.keys = p.k.shape[0];
  sums.query_begin = p.queries.begin;
  sums.key_begin = p.keys.begin;
  // Beyond every distance of this call.
  const int64_t furthest = std::max(p.queries.end, p.keys.end);
  sums.window = std::min(p.mask.window.value_or(furthest), furthest);
  sums.head_dim = static_cast<int32_t>(p.q.shape[2]);
  sums.scale = p.scale;
  sums.plain = precision == Precision::kPlain;
  sums.num_pieces = sums.plain ? 1 : kPieces;
  return sums;
}

RowSums SumsOfBackward(const AttentionBwdParams& p, Precision precision) {
  RowSums sums = SumsOf(p, precision);
  sums.dout = p.dout.data;
  sums.dout_stride = p.dout.stride[0];
  sums.lse = p.lse.as<const float>();
  sums.delta = p.delta.as<const float>();
  sums.delta_stride = p.delta.stride[0];
  return sums;
}

// [rows][pieces][width].
class PieceSums {
 public:
  PieceSums(std::vector<double> values, int64_t pieces, int64_t width)
      : values_(std::move(values)), pieces_(pieces), width_(width) {}
  const double* Of(int64_t row, int64_t piece) const {
    return values_.data() + (row * pieces_ + piece) * width_;
  }
  int64_t pieces() const { return pieces_; }
  // Sum over pieces of [begin, begin + count).
  std::vector<double> Sum(int64_t row, int64_t begin, int64_t count) const {
    std::vector<double> sum(count);
    for (int64_t piece = 0; piece < pieces_; ++piece) {
      for (int64_t i = 0; i < count; ++i) sum[i] += Of(row, piece)[begin + i];
    }
    return sum;
  }

 private:
  std::vector<double> values_;
  int64_t pieces_, width_;
};

absl::StatusOr<PieceSums> Launch(void (*launch)(const RowSums&, CUstream_st*), RowSums sums,
                                 const std::vector<int64_t>& rows, int64_t width, Device& device,
                                 Stream& stream) {
  const auto num_rows = static_cast<int64_t>(rows.size());
  std::vector<double> values(num_rows * sums.num_pieces * width);
  const int64_t row_bytes = num_rows * static_cast<int64_t>(sizeof(int64_t));
  const auto out_bytes = static_cast<int64_t>(values.size() * sizeof(double));
  UPIPE_ASSIGN_OR_RETURN(const Buffer row_buffer,
                         device.allocator().Allocate(MemoryTag::kWorkspace, row_bytes, stream));
  UPIPE_ASSIGN_OR_RETURN(const Buffer out,
                         device.allocator().Allocate(MemoryTag::kWorkspace, out_bytes, stream));
  sums.rows = static_cast<const int64_t*>(row_buffer.data());
  sums.num_rows = static_cast<int32_t>(num_rows);
  sums.out = static_cast<double*>(out.data());
  device.CopyFromHost(row_buffer.data(), rows.data(), row_bytes, stream);
  Issue(
      "exact rows of attention",
      [=](CUstream_st* handle) {
        launch(sums, handle);
        return absl::OkStatus();
      },
      stream);
  device.CopyToHost(values.data(), out.data(), out_bytes, stream);
  UPIPE_RETURN_IF_ERROR(stream.Synchronize());
  return PieceSums(std::move(values), sums.num_pieces, width);
}

double Rounded(double x) { return kernels::BFloat16::From(static_cast<float>(x)).ToFloat(); }

}  // namespace

absl::StatusOr<ExactForward> ExactForwardRows(const AttentionFwdParams& p,
                                              const std::vector<int64_t>& rows, Precision precision,
                                              Device& device, Stream& stream) {
  const RowSums sums = SumsOf(p, precision);
  const int64_t dim = sums.head_dim;
  UPIPE_ASSIGN_OR_RETURN(const PieceSums pieces,
                         Launch(LaunchForwardRows, sums, rows, dim + 2, device, stream));
  ExactForward result;
  for (size_t row = 0; row < rows.size(); ++row) {
    double largest = -std::numeric_limits<double>::infinity(), total = 0;
    const auto index = static_cast<int64_t>(row);
    for (int64_t i = 0; i < pieces.pieces(); ++i) {
      largest = std::max(largest, pieces.Of(index, i)[0]);
    }
    std::vector<double> o(dim);
    for (int64_t i = 0; i < pieces.pieces(); ++i) {
      const double* piece = pieces.Of(index, i);
      if (piece[1] == 0) continue;
      const double weight = std::exp(piece[0] - largest);
      total += weight * piece[1];
      for (int64_t e = 0; e < dim; ++e) o[e] += weight * piece[2 + e];
    }
    for (double& element : o) {
      if (total > 0) element /= total;
      if (precision == Precision::kPlain) element = Rounded(element);
    }
    result.o.push_back(std::move(o));
    const double lse = total > 0 ? largest + std::log(total) : largest;
    result.lse.push_back(precision == Precision::kPlain ? static_cast<float>(lse) : lse);
  }
  return result;
}

absl::StatusOr<ExactRows> ExactQueryGradient(const AttentionBwdParams& p,
                                             const std::vector<int64_t>& rows, Precision precision,
                                             Device& device, Stream& stream) {
  const RowSums sums = SumsOfBackward(p, precision);
  UPIPE_ASSIGN_OR_RETURN(const PieceSums pieces, Launch(LaunchQueryGradientRows, sums, rows,
                                                        sums.head_dim, device, stream));
  ExactRows result;
  for (size_t row = 0; row < rows.size(); ++row) {
    result.push_back(pieces.Sum(static_cast<int64_t>(row), 0, sums.head_dim));
  }
  return result;
}

absl::StatusOr<ExactKeyGradients> ExactKeyGradientRows(const AttentionBwdParams& p,
                                                       const std::vector<int64_t>& rows,
                                                       Precision precision, Device& device,
                                                       Stream& stream) {
  const RowSums sums = SumsOfBackward(p, precision);
  const int64_t dim = sums.head_dim;
  UPIPE_ASSIGN_OR_RETURN(const PieceSums pieces,
                         Launch(LaunchKeyGradientRows, sums, rows, 2 * dim, device, stream));
  ExactKeyGradients result;
  for (size_t row = 0; row < rows.size(); ++row) {
    result.dk.push_back(pieces.Sum(static_cast<int64_t>(row), 0, dim));
    result.dv.push_back(pieces.Sum(static_cast<int64_t>(row), dim, dim));
  }
  return result;
}

}  // namespace upipe::gpu_check
