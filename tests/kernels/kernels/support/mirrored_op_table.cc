#include "tests/kernels/kernels/support/mirrored_op_table.h"

#include <algorithm>
#include <cstring>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kernels/api/workspace_check.h"

namespace upipe::kernels::testing {
namespace {

std::vector<TensorView*> TensorsOf(EmbeddingFwdParams& p) { return {&p.tokens, &p.table, &p.out}; }
std::vector<TensorView*> TensorsOf(EmbeddingBwdParams& p) {
  return {&p.tokens, &p.dout, &p.dtable};
}
std::vector<TensorView*> TensorsOf(RmsNormFwdParams& p) {
  return {&p.x, &p.weight, &p.y, &p.residual, &p.sum};
}
std::vector<TensorView*> TensorsOf(RmsNormBwdParams& p) {
  return {&p.x, &p.weight, &p.dy, &p.dx, &p.dweight};
}
std::vector<TensorView*> TensorsOf(MatmulParams& p) { return {&p.a, &p.b, &p.c, &p.bias}; }
std::vector<TensorView*> TensorsOf(ColumnSumParams& p) { return {&p.x, &p.out}; }
std::vector<TensorView*> TensorsOf(RopeParams& p) { return {&p.src, &p.dst, &p.positions}; }
std::vector<TensorView*> TensorsOf(StridedCopyParams& p) { return {&p.src, &p.dst}; }
std::vector<TensorView*> TensorsOf(AttentionFwdParams& p) {
  return {&p.q, &p.k, &p.v, &p.o, &p.lse};
}
std::vector<TensorView*> TensorsOf(AttentionBwdParams& p) {
  return {&p.q, &p.k, &p.v, &p.o, &p.dout, &p.lse, &p.delta, &p.dq, &p.dk, &p.dv};
}
std::vector<TensorView*> TensorsOf(RowDotParams& p) { return {&p.a, &p.b, &p.out}; }
std::vector<TensorView*> TensorsOf(SwiGluFwdParams& p) { return {&p.gate, &p.up, &p.out}; }
std::vector<TensorView*> TensorsOf(SwiGluBwdParams& p) { return {&p.dout, &p.gate, &p.up}; }
std::vector<TensorView*> TensorsOf(CrossEntropyParams& p) {
  return {&p.logits, &p.labels, &p.dlogits, &p.loss_and_count};
}
std::vector<TensorView*> TensorsOf(SumOfSquaresParams& p) { return {&p.x, &p.out}; }
std::vector<TensorView*> TensorsOf(ClipScaleParams& p) {
  return {&p.sum_of_squares, &p.loss_and_count, &p.grad_norm, &p.scale, &p.skip};
}
std::vector<TensorView*> TensorsOf(AdamWParams& p) {
  return {&p.param, &p.grad, &p.m, &p.v, &p.scale, &p.skip};
}
std::vector<TensorView*> TensorsOf(FillParams& p) { return {&p.dst}; }
std::vector<TensorView*> TensorsOf(RandomNormalParams& p) { return {&p.dst}; }

// Bytes before and after what is copied, which no kernel may write.
constexpr int64_t kGuardBytes = 4096;
// A longer stretch is copied row by row: most of it is not memory at all.
constexpr int64_t kStretchBytesMax = int64_t{256} << 20;

// Host memory that tensors of a call lie in, one piece, and its copy on the device.
struct Stretch {
  char* begin = nullptr;
  char* end = nullptr;
  Buffer buffer;
  char* copy = nullptr;  // of begin; as far from a multiple of 256 as that is
  bool whole() const { return end - begin <= kStretchBytesMax; }
};

char* EndOf(const TensorView& view) {
  const TensorView t = view.AsTensor3();
  return static_cast<char*>(t.At(t.shape[0] - 1, t.shape[1] - 1, t.shape[2] - 1)) +
         SizeOf(view.dtype);
}

// Tensors that overlap, or whose rows lie between each other's, share a stretch.
std::vector<Stretch> StretchesOf(const std::vector<TensorView*>& tensors) {
  std::vector<Stretch> all;
  for (const TensorView* view : tensors) {
    if (!view->present() || view->num_elements() == 0) continue;
    Stretch& stretch = all.emplace_back();
    stretch.begin = static_cast<char*>(view->data);
    stretch.end = EndOf(*view);
  }
  std::sort(all.begin(), all.end(),
            [](const Stretch& a, const Stretch& b) { return a.begin < b.begin; });
  std::vector<Stretch> merged;
  for (Stretch& stretch : all) {
    if (!merged.empty() && stretch.begin < merged.back().end) {
      merged.back().end = std::max(merged.back().end, stretch.end);
    } else {
      merged.push_back(std::move(stretch));
    }
  }
  return merged;
}

class MirroredCall {
 public:
  MirroredCall(Device& device, OpParams params)
      : device_(device), stream_(device.CreateStream("mirrored")), params_(std::move(params)) {
    tensors_ = std::visit([](auto& p) { return TensorsOf(p); }, params_);
    for (const TensorView* view : tensors_) host_.push_back(*view);
    stretches_ = StretchesOf(tensors_);
  }

  absl::Status Run() {
    for (Stretch& stretch : stretches_) UPIPE_RETURN_IF_ERROR(Place(stretch));
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (host_[i].present() && host_[i].num_elements() > 0) {
        tensors_[i]->data = OnDevice(host_[i].data);
        CopyRows(host_[i], *tensors_[i], /*to_host=*/false);
      }
    }
    const int64_t bytes = device_.ops().WorkspaceBytes(params_);
    UPIPE_ASSIGN_OR_RETURN(
        Buffer scratch,
        device_.allocator().Allocate(MemoryTag::kWorkspace, bytes + 2 * kGuardBytes, *stream_));
    poison_.assign(bytes + 2 * kGuardBytes, '\xff');
    device_.CopyFromHost(scratch.data(), poison_.data(), scratch.size_bytes(), *stream_);
    UPIPE_RETURN_IF_ERROR(device_.ops().Enqueue(
        params_, {static_cast<char*>(scratch.data()) + kGuardBytes, bytes}, *stream_));
    UPIPE_RETURN_IF_ERROR(stream_->Synchronize());
    for (const Stretch& stretch : stretches_) {
      if (stretch.whole()) Copy(stretch.begin, stretch.copy, stretch.end - stretch.begin, true);
    }
    for (size_t i = 0; i < tensors_.size(); ++i) CopyRows(host_[i], *tensors_[i], true);
    UPIPE_RETURN_IF_ERROR(CheckGuard("its scratch", scratch.data()));
    UPIPE_RETURN_IF_ERROR(
        CheckGuard("its scratch", static_cast<char*>(scratch.data()) + kGuardBytes + bytes));
    for (const Stretch& stretch : stretches_) {
      UPIPE_RETURN_IF_ERROR(CheckGuard("a tensor", stretch.copy - kGuardBytes));
      UPIPE_RETURN_IF_ERROR(CheckGuard("a tensor", stretch.copy + (stretch.end - stretch.begin)));
    }
    return stream_->Synchronize();
  }

 private:
  void Copy(char* host, char* device, int64_t bytes, bool to_host) {
    if (to_host) {
      device_.CopyToHost(host, device, bytes, *stream_);
    } else {
      device_.CopyFromHost(device, host, bytes, *stream_);
    }
  }

  absl::Status Place(Stretch& stretch) {
    const int64_t bytes = stretch.end - stretch.begin;
    const int64_t shift = reinterpret_cast<uintptr_t>(stretch.begin) % Allocator::kAlignmentBytes;
    UPIPE_ASSIGN_OR_RETURN(stretch.buffer,
                           device_.allocator().Allocate(MemoryTag::kWorkspace,
                                                        shift + bytes + 2 * kGuardBytes, *stream_));
    stretch.copy = static_cast<char*>(stretch.buffer.data()) + shift + kGuardBytes;
    Copy(guard_.data(), stretch.copy - kGuardBytes, kGuardBytes, false);
    Copy(guard_.data(), stretch.copy + bytes, kGuardBytes, false);
    if (stretch.whole()) Copy(stretch.begin, stretch.copy, bytes, false);
    return absl::OkStatus();
  }

  char* OnDevice(void* host) const {
    char* const address = static_cast<char*>(host);
    for (const Stretch& stretch : stretches_) {
      if (address >= stretch.begin && address < stretch.end) {
        return stretch.copy + (address - stretch.begin);
      }
    }
    return nullptr;
  }

  // Nothing of a stretch that is copied as a whole.
  void CopyRows(const TensorView& host, const TensorView& device, bool to_host) {
    if (!host.present() || host.num_elements() == 0) return;
    const char* const begin = static_cast<char*>(host.data);
    for (const Stretch& stretch : stretches_) {
      if (begin >= stretch.begin && begin < stretch.end && stretch.whole()) return;
    }
    const TensorView from = host.AsTensor3(), to = device.AsTensor3();
    for (int64_t i = 0; i < from.shape[0]; ++i) {
      for (int64_t j = 0; j < from.shape[1]; ++j) {
        Copy(static_cast<char*>(from.At(i, j)), static_cast<char*>(to.At(i, j)),
             from.shape[2] * SizeOf(from.dtype), to_host);
      }
    }
  }

  absl::Status CheckGuard(const char* what, void* guard) {
    std::vector<char> now(kGuardBytes);
    device_.CopyToHost(now.data(), guard, kGuardBytes, *stream_);
    UPIPE_RETURN_IF_ERROR(stream_->Synchronize());
    for (const char byte : now) {
      if (byte != '\xff') {
        return absl::InternalError(absl::StrCat(NameOf(params_), " wrote beside ", what));
      }
    }
    return absl::OkStatus();
  }

  Device& device_;
  std::vector<char> guard_ =
      std::vector<char>(kGuardBytes, '\xff');  // copied until the stream ends
  std::vector<char> poison_;
  const std::unique_ptr<Stream> stream_;  // outlives the buffers
  OpParams params_;
  std::vector<TensorView*> tensors_;  // of params_
  std::vector<TensorView> host_;      // what they were
  std::vector<Stretch> stretches_;
};

class MirroredOpTable final : public OpTable {
 public:
  explicit MirroredOpTable(Device& device) : device_(device) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return device_.ops().WorkspaceBytes(params);
  }
  bool AttentionBwdReadsOutput() const override { return device_.ops().AttentionBwdReadsOutput(); }
  absl::Status Enqueue(const OpParams& params, Workspace workspace, Stream& stream) override {
    UPIPE_RETURN_IF_ERROR(Validate(params));
    UPIPE_RETURN_IF_ERROR(CheckWorkspace(params, workspace, WorkspaceBytes(params)));
    stream.Submit([this, params](ExecContext&) { return MirroredCall(device_, params).Run(); });
    return absl::OkStatus();
  }

 private:
  Device& device_;
};

}  // namespace

std::unique_ptr<OpTable> CreateMirroredOpTable(Device& device) {
  return std::make_unique<MirroredOpTable>(device);
}

}  // namespace upipe::kernels::testing
