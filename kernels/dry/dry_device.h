// A device without memory or arithmetic: addresses, peaks and costs of a step at any size, in
// milliseconds.
#pragma once

#include <memory>
#include <string>

#include "kernels/api/device.h"
#include "kernels/dry/dry_counts.h"
#include "kernels/dry/dry_op_table.h"

namespace upipe::kernels {

// Not thread-safe: one host thread drives it. Tasks submitted to its streams are dropped, its
// events are always reached.
class DryDevice final : public Device {
 public:
  // Stands in for a device of this backend name and these ops; on host memory for `host`, or the
  // same where there is none.
  DryDevice(std::string backend, std::unique_ptr<OpTable> stands_for,
            std::unique_ptr<OpTable> host = nullptr);

  std::string name() const override { return "dry(" + backend_ + ")"; }
  Allocator& allocator() override { return allocator_; }
  OpTable& ops() override { return ops_; }
  std::unique_ptr<Stream> CreateStream(std::string name) override;
  Allocator& host_allocator() override { return host_allocator_; }
  OpTable& host_ops() override { return host_ops_; }
  std::unique_ptr<Stream> CreateHostStream(std::string name) override;
  void CopyRowsToHost(const RowsCopy& copy, Stream& stream) override;
  void CopyRowsFromHost(const RowsCopy& copy, Stream& stream) override;

  // Of all ops, on the device and on the host, but for those counted elsewhere.
  const DryCounts& counts() const { return own_counts_; }
  void ResetCounts() { own_counts_ = DryCounts(); }
  // From here on everything is counted there, which must live as long; null: in counts() again.
  void CountInto(DryCounts* counts) { counts_ = counts != nullptr ? counts : &own_counts_; }

 private:
  const std::string backend_;
  const std::unique_ptr<OpTable> stands_for_, host_;
  DryCounts own_counts_;
  DryCounts* counts_ = &own_counts_;
  DryOpTable ops_, host_ops_;
  Allocator allocator_;
  Allocator host_allocator_;
};

}  // namespace upipe::kernels
