// cuDNN's attention by plain loops over the tensors and tables it is given, and as strict as cuDNN
// is.
#pragma once

#include <memory>
#include <vector>

#include "kernels/cuda/sdpa_library.h"

namespace upipe::kernels::testing {

class FakeSdpa final : public SdpaLibrary {
 public:
  absl::StatusOr<std::unique_ptr<SdpaPlan>> Make(const SdpaPlanKey& key) override;
  absl::StatusOr<char*> TableOf(CudaStreamHandle) override { return table_.data(); }
  absl::Status Upload(const std::vector<char>& table, CudaStreamHandle) override;

  const std::vector<SdpaPlanKey>& made() const { return made_; }

 private:
  std::vector<char> table_ = std::vector<char>(kSdpaTableBytes);
  std::vector<SdpaPlanKey> made_;
};

}  // namespace upipe::kernels::testing
