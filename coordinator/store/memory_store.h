// The store in a map: the oracle of the contract suite, and the disk of the simulator.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "coordinator/store/store.h"

namespace upipe::coordinator {

class MemoryStore : public Store {
 public:
  absl::StatusOr<int64_t> Commit(absl::Span<const Batch> batches) override;
  absl::StatusOr<std::vector<Entry>> List(absl::string_view prefix) override;
  int64_t Revision() const override { return revision_; }
  absl::StatusOr<std::unique_ptr<StoreCopy>> StartCopy(const std::string& path) override;

 private:
  struct Cell {
    std::string value;
    int64_t revision = 0;
  };
  std::map<std::string, Cell, std::less<>> cells_;
  int64_t revision_ = 0;
};

}  // namespace upipe::coordinator
