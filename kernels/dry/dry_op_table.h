// The op table that counts: validates and prices each call, computes nothing.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/api/op_table.h"
#include "kernels/dry/dry_counts.h"

namespace upipe::kernels {

// Not thread-safe: one host thread enqueues.
class DryOpTable final : public OpTable {
 public:
  // Answers WorkspaceBytes as `stands_for` does; adds every call to **counts. Borrows both.
  // `on_host`: its ops work on host memory.
  DryOpTable(const OpTable& stands_for, DryCounts* const* counts, bool on_host)
      : stands_for_(stands_for), counts_(counts), on_host_(on_host) {}

  int64_t WorkspaceBytes(const OpParams& params) const override {
    return stands_for_.WorkspaceBytes(params);
  }
  int64_t CountedBytes(const OpParams& params) const override {
    return stands_for_.CountedBytes(params);
  }
  bool AttentionBwdReadsOutput() const override { return stands_for_.AttentionBwdReadsOutput(); }
  absl::Status Enqueue(const OpParams& params, Workspace workspace, Stream& stream) override;

 private:
  const OpTable& stands_for_;
  DryCounts* const* const counts_;
  const bool on_host_;
};

}  // namespace upipe::kernels
