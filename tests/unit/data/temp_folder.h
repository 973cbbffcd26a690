// A folder that lives as long as the object, and files in it; a limit on the size of files.
#pragma once

#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "common/check.h"
#include "gtest/gtest.h"

namespace upipe::data {

class TempFolder {
 public:
  TempFolder() : path_(::testing::TempDir() + "upipe-data-XXXXXX") {
    UPIPE_CHECK(mkdtemp(path_.data()) != nullptr) << path_;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string Path(const std::string& name) const { return path_ + "/" + name; }

  // Creates the folders in between, too. Returns the path.
  std::string Write(const std::string& name, const std::string& content) const {
    std::filesystem::create_directories(std::filesystem::path(Path(name)).parent_path());
    std::ofstream(Path(name), std::ios::binary) << content;
    return Path(name);
  }

  std::string Read(const std::string& name) const {
    std::ostringstream content;
    content << std::ifstream(Path(name), std::ios::binary).rdbuf();
    return content.str();
  }

  int CountEntries() const {
    const std::filesystem::directory_iterator entries(path_);
    return static_cast<int>(std::distance(begin(entries), end(entries)));
  }

 private:
  std::string path_;
};

// While it lives, this process cannot write a file beyond `bytes`: the write fails as on a full
// disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(signal(SIGXFSZ, SIG_IGN)) {
    UPIPE_CHECK(getrlimit(RLIMIT_FSIZE, &before_) == 0);
    const rlimit limit = {.rlim_cur = bytes, .rlim_max = before_.rlim_max};
    UPIPE_CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0) << bytes << " bytes";
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_;
  sighandler_t handler_;
};

}  // namespace upipe::data
