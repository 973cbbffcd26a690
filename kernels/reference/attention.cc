// Scaled dot-product attention, one query at a time. Probabilities and sums stay fp64 whatever the
// storage.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Index of the document that holds `position`.
int64_t DocumentOf(const AttentionMask& mask, int64_t position) {
  const std::vector<int64_t>& starts = *mask.document_starts;
  return std::upper_bound(starts.begin(), starts.end(), position) - starts.begin();
}

bool Visible(const AttentionMask& mask, int64_t query, int64_t key) {
  if (mask.causal && key > query) return false;
  if (mask.window && std::abs(query - key) >= *mask.window) return false;
  return DocumentOf(mask, query) == DocumentOf(mask, key);
}

double Dot(const TensorView& a, int64_t i, int64_t head_a, const TensorView& b, int64_t j,
           int64_t head_b) {
  double sum = 0;
  for (int64_t d = 0; d < a.shape[2]; ++d) sum += double{At(a, i, head_a, d)} * At(b, j, head_b, d);
  return sum;
}

void Store(const AttentionFwdParams& p, int64_t head, int64_t i, const std::vector<double>& out,
           double lse) {
  for (int64_t d = 0; d < p.o.shape[2]; ++d) At(p.o, i, head, d) = out[d];
  At(p.lse, head, i) = lse;
}

// The result of this run joins the one that o and lse hold.
void Merge(const AttentionFwdParams& p, int64_t head, int64_t i, std::vector<double>& out,
           double lse) {
  const double before = At(p.lse, head, i);
  if (lse == -kInfinity) return;
  if (before == -kInfinity) return Store(p, head, i, out, lse);
  const double max = std::max(lse, before);
  const double kept = std::exp(before - max), fresh = std::exp(lse - max), total = kept + fresh;
  for (int64_t d = 0; d < p.o.shape[2]; ++d) {
    out[d] = (kept * At(p.o, i, head, d) + fresh * out[d]) / total;
  }
  Store(p, head, i, out, max + std::log(total));
}

}  // namespace

absl::Status Backend::Run(const AttentionFwdParams& p, Workspace, ExecContext&) {
  const int64_t head_dim = p.q.shape[2];
  std::vector<double> scores(p.k.shape[0]), out(head_dim);
  for (int64_t head = 0; head < p.q.shape[1]; ++head) {
    const int32_t slot = p.kv_slot[head];
    for (int64_t i = 0; i < p.q.shape[0]; ++i) {
      double max = -kInfinity, sum = 0;
      for (int64_t j = 0; j < p.k.shape[0]; ++j) {
        scores[j] = Visible(p.mask, p.queries.begin + i, p.keys.begin + j)
                        ? p.scale * Dot(p.q, i, head, p.k, j, slot)
                        : -kInfinity;
        max = std::max(max, scores[j]);
      }
      std::fill(out.begin(), out.end(), 0.0);
      for (int64_t j = 0; j < p.k.shape[0]; ++j) {
        if (scores[j] == -kInfinity) continue;
        const double weight = std::exp(scores[j] - max);
        sum += weight;
        for (int64_t d = 0; d < head_dim; ++d) out[d] += weight * At(p.v, j, slot, d);
      }
      const double lse = sum == 0 ? -kInfinity : max + std::log(sum);
      for (double& element : out) element = sum == 0 ? 0.0 : element / sum;
      if (p.merge) {
        Merge(p, head, i, out, lse);
      } else {
        Store(p, head, i, out, lse);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Backend::Run(const AttentionBwdParams& p, Workspace, ExecContext&) {
  const int64_t head_dim = p.q.shape[2], keys = p.k.shape[0];
  std::vector<double> dq(head_dim), dk(keys * head_dim), dv(keys * head_dim);
  for (int64_t slot = 0; slot < p.dk.shape[1]; ++slot) {
    std::fill(dk.begin(), dk.end(), 0.0);
    std::fill(dv.begin(), dv.end(), 0.0);
    for (int64_t head = 0; head < p.q.shape[1]; ++head) {
      const int32_t kv = p.kv_slot[head];
      for (int64_t i = 0; p.grad_slot[head] == slot && i < p.q.shape[0]; ++i) {
        std::fill(dq.begin(), dq.end(), 0.0);
        for (int64_t j = 0; j < keys; ++j) {
          if (!Visible(p.mask, p.queries.begin + i, p.keys.begin + j)) continue;
          const double probability =
              std::exp(p.scale * Dot(p.q, i, head, p.k, j, kv) - At(p.lse, head, i));
          const double dscore =
              p.scale * probability * (Dot(p.dout, i, head, p.v, j, kv) - At(p.delta, i, head));
          for (int64_t d = 0; d < head_dim; ++d) {
            dq[d] += dscore * At(p.k, j, kv, d);
            dk[j * head_dim + d] += dscore * At(p.q, i, head, d);
            dv[j * head_dim + d] += probability * At(p.dout, i, head, d);
          }
        }
        for (int64_t d = 0; d < head_dim; ++d) {
          At(p.dq, i, head, d) = (p.accumulate_dq ? At(p.dq, i, head, d) : 0.0) + dq[d];
        }
      }
    }
    for (int64_t j = 0; j < keys; ++j) {
      for (int64_t d = 0; d < head_dim; ++d) {
        At(p.dk, j, slot, d) += dk[j * head_dim + d];
        At(p.dv, j, slot, d) += dv[j * head_dim + d];
      }
    }
  }
  return absl::OkStatus();
}

// delta of the backward, and any other row-wise dot product.
absl::Status Backend::Run(const RowDotParams& p, Workspace, ExecContext&) {
  for (int64_t t = 0; t < p.a.shape[0]; ++t) {
    for (int64_t h = 0; h < p.a.shape[1]; ++h) At(p.out, t, h) = Dot(p.a, t, h, p.b, t, h);
  }
  return absl::OkStatus();
}

}  // namespace upipe::kernels::reference
