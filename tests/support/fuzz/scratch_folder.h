// A folder for a parser that reads files; gone when the process ends well.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>

#include "common/check.h"

namespace upipe::fuzz {

class ScratchFolder {
 public:
  ScratchFolder() : path_(std::filesystem::temp_directory_path() / "upipe-fuzz-XXXXXX") {
    UPIPE_CHECK(mkdtemp(path_.data()) != nullptr) << path_;
  }
  ~ScratchFolder() { std::filesystem::remove_all(path_); }
  ScratchFolder(const ScratchFolder&) = delete;
  ScratchFolder& operator=(const ScratchFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace upipe::fuzz
