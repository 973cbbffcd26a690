// The coordinator's store in the simulation: a map, changed in place, that can be copied whole as a
// backup is.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/store/store.h"

namespace upipe::sim {

class Disk : public coordinator::Store {
 public:
  absl::StatusOr<int64_t> Commit(absl::Span<const coordinator::Batch> batches) override;
  absl::StatusOr<std::vector<coordinator::Entry>> List(absl::string_view prefix) override;
  int64_t Revision() const override { return revision_; }
  absl::StatusOr<std::unique_ptr<coordinator::StoreCopy>> StartCopy(const std::string&) override {
    return absl::UnimplementedError("copy the value instead");
  }
  // Null when there is none.
  const std::string* Find(const std::string& key) const;
  // As `upipe-coordinator --restore` writes it: workers may have met later epochs.
  void MarkRestored();

 private:
  struct Cell {
    std::string value;
    int64_t revision = 0;
  };
  std::map<std::string, Cell, std::less<>> cells_;
  int64_t revision_ = 0;
};

}  // namespace upipe::sim
