#include "tests/kernels/kernels/support/naive_backend.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/host/host_op_table.h"
#include "kernels/reference/reference_backend.h"

namespace upipe::kernels::testing {
namespace {

using reference::At;

bool Visible(const AttentionMask& mask, int64_t query, int64_t key) {
  const auto document = [&](int64_t position) {
    return std::count_if(mask.document_starts->begin(), mask.document_starts->end(),
                         [&](int64_t start) { return start <= position; });
  };
  return !(mask.causal && key > query) && !(mask.window && std::abs(query - key) >= *mask.window) &&
         document(query) == document(key);
}

float Dot(const TensorView& a, int64_t i, int64_t head_a, const TensorView& b, int64_t j,
          int64_t head_b) {
  float sum = 0;
  for (int64_t d = 0; d < a.shape[2]; ++d) sum += At(a, i, head_a, d) * At(b, j, head_b, d);
  return sum;
}

// As an operand of a product of tensors of this type.
float Operand(float value, DType storage) {
  return storage == DType::kBFloat16 ? BFloat16::From(value).ToFloat() : value;
}

// Of row (t, head).
float InverseRms(const TensorView& x, int64_t t, int64_t head, float eps) {
  float sum = 0;
  for (int64_t i = 0; i < x.shape[2]; ++i) sum += At(x, t, head, i) * At(x, t, head, i);
  return 1 / std::sqrt(sum / static_cast<float>(x.shape[2]) + eps);
}

// Ops that round at most once per element are taken from the reference.
struct NaiveBackend : reference::Backend {
  using reference::Backend::Run;

  static absl::Status Run(const RmsNormFwdParams& p, Workspace, ExecContext&) {
    const bool add = p.residual.present();
    const TensorView x = p.x.AsTensor3(), y = p.y.AsTensor3(), residual = p.residual.AsTensor3();
    const TensorView h = add ? p.sum.AsTensor3() : x;
    for (int64_t t = 0; t < x.shape[0]; ++t) {
      for (int64_t head = 0; head < x.shape[1]; ++head) {
        for (int64_t i = 0; add && i < x.shape[2]; ++i) {
          At(h, t, head, i) = At(x, t, head, i) + At(residual, t, head, i);
        }
        const float rstd = InverseRms(h, t, head, p.eps);
        for (int64_t i = 0; i < x.shape[2]; ++i) {
          At(y, t, head, i) = At(h, t, head, i) * rstd * At(p.weight, i);
        }
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Run(const RmsNormBwdParams& p, Workspace, ExecContext&) {
    const TensorView x = p.x.AsTensor3(), dy = p.dy.AsTensor3(), dx = p.dx.AsTensor3();
    const int64_t d = x.shape[2];
    std::vector<float> dweight(d);
    for (int64_t t = 0; t < x.shape[0]; ++t) {
      for (int64_t head = 0; head < x.shape[1]; ++head) {
        const float rstd = InverseRms(x, t, head, p.eps);
        float sum = 0;
        for (int64_t i = 0; i < d; ++i) {
          const float n = At(x, t, head, i) * rstd;
          dweight[i] += At(dy, t, head, i) * n;
          sum += At(dy, t, head, i) * At(p.weight, i) * n;
        }
        const float mean = sum / static_cast<float>(d);
        for (int64_t i = 0; i < d; ++i) {
          const float gradient =
              rstd * (At(dy, t, head, i) * At(p.weight, i) - At(x, t, head, i) * rstd * mean);
          At(dx, t, head, i) = (p.accumulate ? At(dx, t, head, i) : 0.0f) + gradient;
        }
      }
    }
    for (int64_t i = 0; i < d; ++i) At(p.dweight, i) += dweight[i];
    return absl::OkStatus();
  }

  static absl::Status Run(const MatmulParams& p, Workspace, ExecContext&) {
    const int64_t depth = p.transpose_a ? p.a.shape[0] : p.a.shape[1];
    for (int64_t i = 0; i < p.c.shape[0]; ++i) {
      for (int64_t j = 0; j < p.c.shape[1]; ++j) {
        float sum = 0;
        for (int64_t k = 0; k < depth; ++k) {
          const float a = p.transpose_a ? At(p.a, k, i) : At(p.a, i, k);
          const float b = p.transpose_b ? At(p.b, j, k) : At(p.b, k, j);
          sum += a * b;
        }
        At(p.c, i, j) = p.alpha * sum + (p.beta == 0 ? 0.0f : p.beta * At(p.c, i, j)) +
                        (p.bias.present() ? At(p.bias, j) : 0.0f);
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Run(const ColumnSumParams& p, Workspace, ExecContext&) {
    for (int64_t j = 0; j < p.x.shape[1]; ++j) {
      for (int64_t t = 0; t < p.x.shape[0]; ++t) At(p.out, j) += At(p.x, t, j);
    }
    return absl::OkStatus();
  }

  // The angle stays exact; its cosine and sine are fp32, and so is the rotation.
  static absl::Status Run(const RopeParams& p, Workspace, ExecContext&) {
    const float magnitude = static_cast<float>(RopeMagnitude(p.config));
    const int64_t half = p.src.shape[2] / 2;
    const std::vector<double> frequencies = RopeInverseFrequencies(p.config, p.src.shape[2]);
    for (int64_t t = 0; t < p.src.shape[0]; ++t) {
      const int64_t position = p.positions.as<int64_t>()[t];
      for (int64_t h = 0; h < p.src.shape[1]; ++h) {
        for (int64_t i = 0; i < half; ++i) {
          const double angle =
              p.config.hf_parity ? static_cast<float>(position) * static_cast<float>(frequencies[i])
                                 : static_cast<double>(position) * frequencies[i];
          const float c = static_cast<float>(std::cos(angle)) * magnitude;
          const float s =
              static_cast<float>(p.inverse ? -std::sin(angle) : std::sin(angle)) * magnitude;
          const float x = At(p.src, t, h, i), y = At(p.src, t, h, i + half);
          At(p.dst, t, h, i) = (p.accumulate ? At(p.dst, t, h, i) : 0.0f) + (x * c - y * s);
          At(p.dst, t, h, i + half) =
              (p.accumulate ? At(p.dst, t, h, i + half) : 0.0f) + (y * c + x * s);
        }
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Run(const AttentionFwdParams& p, Workspace, ExecContext&) {
    std::vector<float> weights(p.k.shape[0]);
    for (int64_t head = 0; head < p.q.shape[1]; ++head) {
      for (int64_t i = 0; i < p.q.shape[0]; ++i) {
        float max = -INFINITY, sum = 0;
        for (int64_t j = 0; j < p.k.shape[0]; ++j) {
          weights[j] = Visible(p.mask, p.queries.begin + i, p.keys.begin + j)
                           ? p.scale * Dot(p.q, i, head, p.k, j, p.kv_slot[head])
                           : -INFINITY;
          max = std::max(max, weights[j]);
        }
        for (float& weight : weights)
          sum += weight = weight == -INFINITY ? 0 : std::exp(weight - max);
        const float before = p.merge ? At(p.lse, head, i) : -INFINITY;
        const float lse = sum == 0 ? -INFINITY : max + std::log(sum);
        const float larger = std::max(before, lse);
        const float kept = before == -INFINITY ? 0 : std::exp(before - larger);
        const float fresh = lse == -INFINITY ? 0 : std::exp(lse - larger);
        At(p.lse, head, i) = larger + std::log(kept + fresh);
        for (int64_t d = 0; d < p.q.shape[2]; ++d) {
          float out = 0;
          for (int64_t j = 0; j < p.k.shape[0]; ++j)
            out += Operand(weights[j], p.v.dtype) * At(p.v, j, p.kv_slot[head], d);
          out = sum == 0 ? 0 : out / sum;
          if (kept != 0) out = (kept * At(p.o, i, head, d) + fresh * out) / (kept + fresh);
          At(p.o, i, head, d) = out;
        }
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Run(const AttentionBwdParams& p, Workspace, ExecContext&) {
    const int64_t head_dim = p.q.shape[2];
    for (int64_t head = 0; head < p.q.shape[1]; ++head) {
      const int32_t slot = p.kv_slot[head], grad_slot = p.grad_slot[head];
      for (int64_t i = 0; i < p.q.shape[0]; ++i) {
        std::vector<float> dq(head_dim);
        for (int64_t j = 0; j < p.k.shape[0]; ++j) {
          if (!Visible(p.mask, p.queries.begin + i, p.keys.begin + j)) continue;
          const float probability =
              std::exp(p.scale * Dot(p.q, i, head, p.k, j, slot) - At(p.lse, head, i));
          const float ds = Operand(
              p.scale * probability * (Dot(p.dout, i, head, p.v, j, slot) - At(p.delta, i, head)),
              p.k.dtype);
          for (int64_t d = 0; d < head_dim; ++d) {
            dq[d] += ds * At(p.k, j, slot, d);
            At(p.dk, j, grad_slot, d) += ds * At(p.q, i, head, d);
            At(p.dv, j, grad_slot, d) +=
                Operand(probability, p.dout.dtype) * At(p.dout, i, head, d);
          }
        }
        for (int64_t d = 0; d < head_dim; ++d) {
          At(p.dq, i, head, d) = (p.accumulate_dq ? At(p.dq, i, head, d) : 0.0f) + dq[d];
        }
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Run(const RowDotParams& p, Workspace, ExecContext&) {
    for (int64_t t = 0; t < p.a.shape[0]; ++t) {
      for (int64_t h = 0; h < p.a.shape[1]; ++h) At(p.out, t, h) = Dot(p.a, t, h, p.b, t, h);
    }
    return absl::OkStatus();
  }

  static absl::Status Run(const SwiGluFwdParams& p, Workspace, ExecContext&) {
    for (int64_t t = 0; t < p.gate.shape[0]; ++t) {
      for (int64_t i = 0; i < p.gate.shape[1]; ++i) {
        const float gate = At(p.gate, t, i);
        At(p.out, t, i) = gate / (1 + std::exp(-gate)) * At(p.up, t, i);
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Run(const SwiGluBwdParams& p, Workspace, ExecContext&) {
    for (int64_t t = 0; t < p.gate.shape[0]; ++t) {
      for (int64_t i = 0; i < p.gate.shape[1]; ++i) {
        const float gate = At(p.gate, t, i), up = At(p.up, t, i), dout = At(p.dout, t, i);
        const float sigmoid = 1 / (1 + std::exp(-gate));
        At(p.dout, t, i) = gate / (1 + std::exp(-gate)) * up;
        At(p.gate, t, i) = dout * up * sigmoid * (1 + gate * (1 - sigmoid));
        At(p.up, t, i) = dout * gate * sigmoid;
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Run(const CrossEntropyParams& p, Workspace, ExecContext&) {
    for (int64_t t = 0; t < p.logits.shape[0]; ++t) {
      const int32_t label = p.labels.as<int32_t>()[t];
      float max = -INFINITY, sum = 0;
      for (int64_t i = 0; i < p.logits.shape[1]; ++i)
        max = std::max<float>(max, At(p.logits, t, i));
      for (int64_t i = 0; i < p.logits.shape[1]; ++i) sum += std::exp(At(p.logits, t, i) - max);
      if (label >= 0) {
        p.loss_and_count.as<double>()[0] += max + std::log(sum) - At(p.logits, t, label);
        p.loss_and_count.as<double>()[1] += 1;
      }
      for (int64_t i = 0; p.dlogits.present() && i < p.logits.shape[1]; ++i) {
        const float gradient =
            std::exp(At(p.logits, t, i) - max) / sum - (i == label ? 1.0f : 0.0f);
        At(p.dlogits, t, i) = label >= 0 ? gradient : 0;
      }
    }
    return absl::OkStatus();
  }

  static absl::Status Run(const AdamWParams& p, Workspace, ExecContext&) {
    if (*p.skip.as<int32_t>() != 0) return absl::OkStatus();
    const float step = static_cast<float>(p.step);
    const float correction1 = 1 - std::pow(p.beta1, step),
                correction2 = 1 - std::pow(p.beta2, step);
    for (int64_t i = 0; i < p.param.shape[0]; ++i) {
      const float grad = At(p.grad, i) * *p.scale.as<float>();
      At(p.m, i) = p.beta1 * At(p.m, i) + (1 - p.beta1) * grad;
      At(p.v, i) = p.beta2 * At(p.v, i) + (1 - p.beta2) * grad * grad;
      const float update = At(p.m, i) / correction1 / (std::sqrt(At(p.v, i) / correction2) + p.eps);
      At(p.param, i) = At(p.param, i) - p.lr * (update + p.weight_decay * At(p.param, i));
    }
    return absl::OkStatus();
  }
};

}  // namespace

std::unique_ptr<OpTable> CreateNaiveOpTable() {
  return std::make_unique<HostOpTable<NaiveBackend>>();
}

}  // namespace upipe::kernels::testing
