// A console over the scripted coordinator, and a folder of the test's own.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "client/commands.h"
#include "tests/unit/client/fake_coordinator.h"

namespace upipe::client {

class ConsoleTest : public ::testing::Test {
 protected:
  ConsoleTest() : folder_(std::filesystem::temp_directory_path() / "upipe-client-XXXXXX") {
    EXPECT_NE(mkdtemp(folder_.data()), nullptr);
  }
  ~ConsoleTest() override { std::filesystem::remove_all(folder_); }

  static std::string ReadText(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  }
  static void WriteText(const std::string& path, absl::string_view text) {
    std::filesystem::create_directories(std::filesystem::path(path).parent_path());
    std::ofstream(path, std::ios::binary) << text;
  }
  // Names in the folder.
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    return names;
  }

  std::string folder_;
  FakeCoordinator coordinator_;
  ManualClock clock_;
  std::ostringstream out_, err_;
  std::vector<absl::Duration> pauses_;
  Console console_{coordinator_,
                   out_,
                   err_,
                   clock_,
                   [this](absl::Duration d) {
                     pauses_.push_back(d);
                     clock_.now += d;
                   },
                   std::nullopt};
};

}  // namespace upipe::client
