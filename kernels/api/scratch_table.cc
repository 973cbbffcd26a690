#include "kernels/api/scratch_table.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

namespace upipe::kernels {
namespace {

int64_t NumberOf(DType dtype) { return static_cast<int64_t>(dtype); }

int64_t Distinct(const std::vector<int32_t>& slots) {
  return static_cast<int64_t>(std::set<int32_t>(slots.begin(), slots.end()).size());
}

template <typename Params>
std::vector<int64_t> AttentionSizes(const Params& p) {
  return {p.q.shape[0], p.q.shape[1],        p.q.shape[2],
          p.k.shape[0], Distinct(p.kv_slot), NumberOf(p.q.dtype)};
}

template <typename Params>
std::vector<int64_t> SizesOf(const Params&) {
  return {};
}
std::vector<int64_t> SizesOf(const MatmulParams& p) {
  const int64_t depth = p.transpose_a ? p.a.shape[0] : p.a.shape[1];
  return {p.c.shape[0], p.c.shape[1], depth, NumberOf(p.a.dtype), NumberOf(p.c.dtype)};
}
std::vector<int64_t> SizesOf(const AttentionFwdParams& p) {
  std::vector<int64_t> sizes = AttentionSizes(p);
  sizes.insert(sizes.end(), {NumberOf(p.o.dtype), p.merge ? 1 : 0});
  return sizes;
}
std::vector<int64_t> SizesOf(const AttentionBwdParams& p) { return AttentionSizes(p); }

class MeasuredOps final : public OpTable {
 public:
  MeasuredOps(std::unique_ptr<OpTable> ops, ScratchTable table)
      : ops_(std::move(ops)), table_(std::move(table)) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return table_.BytesFor(params, ops_->WorkspaceBytes(params));
  }
  int64_t CountedBytes(const OpParams& params) const override { return ops_->CountedBytes(params); }
  bool AttentionBwdReadsOutput() const override { return ops_->AttentionBwdReadsOutput(); }
  std::string libraries() const override { return ops_->libraries(); }
  absl::StatusOr<int64_t> Prepare(const OpParams& params) override { return ops_->Prepare(params); }
  absl::Status Enqueue(const OpParams& params, Workspace workspace, Stream& stream) override {
    return ops_->Enqueue(params, workspace, stream);
  }

 private:
  const std::unique_ptr<OpTable> ops_;
  const ScratchTable table_;
};

}  // namespace

std::optional<ScratchShape> ScratchShapeOf(const OpParams& params) {
  std::vector<int64_t> sizes = std::visit([](const auto& p) { return SizesOf(p); }, params);
  if (sizes.empty()) return std::nullopt;
  return ScratchShape{NameOf(params), std::move(sizes)};
}

void ScratchTable::Add(const ScratchShape& shape, const Bytes& bytes) {
  Bytes& known = bytes_[shape];
  known.counted = std::max(known.counted, bytes.counted);
  known.measured = std::max(known.measured, bytes.measured);
  if (!known.exceeds() || known.counted == 0) return;
  double& worst = worst_[shape.op];
  worst = std::max(worst, static_cast<double>(known.measured) / static_cast<double>(known.counted));
}

int64_t ScratchTable::BytesFor(const OpParams& params, int64_t counted) const {
  if (bytes_.empty()) return counted;
  const std::optional<ScratchShape> shape = ScratchShapeOf(params);
  if (!shape.has_value()) return counted;
  if (const auto found = bytes_.find(*shape); found != bytes_.end()) {
    return std::max(counted, found->second.measured);
  }
  const auto worst = worst_.find(shape->op);
  if (worst == worst_.end()) return counted;
  return static_cast<int64_t>(std::ceil(static_cast<double>(counted) * worst->second));
}

std::unique_ptr<OpTable> WithMeasuredScratch(std::unique_ptr<OpTable> ops, ScratchTable table) {
  if (table.empty()) return ops;
  return std::make_unique<MeasuredOps>(std::move(ops), std::move(table));
}

}  // namespace upipe::kernels
