// Room kept on the state disk for the transitions of jobs that live already: a file of zeros given
// back when the disk runs full. While it is not whole, new submits are refused.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace upipe::coordinator {

// Used by one thread.
class Ballast {
 public:
  // `dir` exists; a ballast that an earlier process left there is taken over. Nothing is written
  // until Check.
  Ballast(std::string dir, int64_t bytes);

  // Looks at the disk. OK: the ballast is whole and as much again is free. ResourceExhausted, with
  // the numbers: it is not; when free space is under a quarter of the ballast the file has been
  // given back, and it is made again once the space is there. Called before the
  // first write and before each commit.
  absl::Status Check();

 private:
  absl::Status Allocate();

  const std::string dir_;
  const std::string path_;
  const int64_t bytes_;
  bool held_ = false;
};

}  // namespace upipe::coordinator
