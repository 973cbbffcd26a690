// The op table that counts: validates and prices each call, computes nothing.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "kernels/api/op_table.h"
#include "kernels/dry/dry_counts.h"

namespace upipe::kernels {

// Not thread-safe: one host thread enqueues.
class DryOpTable final : public OpTable {
 public:
  // Answers WorkspaceBytes as `stands_for` does; adds every call to *counts, which must outlive it.
  DryOpTable(std::unique_ptr<OpTable> stands_for, DryCounts* counts);

  int64_t WorkspaceBytes(const OpParams& params) const override;
  bool AttentionBwdReadsOutput() const override { return stands_for_->AttentionBwdReadsOutput(); }
  absl::Status Enqueue(const OpParams& params, Workspace workspace, Stream& stream) override;

 private:
  const std::unique_ptr<OpTable> stands_for_;
  DryCounts* const counts_;
};

}  // namespace upipe::kernels
