// A real worker of a node with devices, as a file describes them: what it says of them, and which
// of them a rank gets.
#include <stdlib.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/ids.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/fault/worker/fake_coordinator.h"
#include "tests/fault/worker/worker_process.h"

namespace upipe::worker {
namespace {

using ::testing::HasSubstr;

class WorkerDevices : public ::testing::Test {
 protected:
  WorkerDevices() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "worker-devices-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    std::filesystem::create_directories(root_ + "/state");
    setenv("UPIPE_FAKE_NVML", (root_ + "/devices").c_str(), 1);
    // Says which device it sees, and stays.
    std::ofstream(root_ + "/trainer")
        << "#!/bin/sh\necho \"$CUDA_VISIBLE_DEVICES $NCCL_ALGO $NCCL_PROTO\" > " << root_
        << "/seen.$UPIPE_RANK.new\nmv " << root_ << "/seen.$UPIPE_RANK.new " << root_
        << "/seen.$UPIPE_RANK\nexec sleep 60\n";
    chmod((root_ + "/trainer").c_str(), 0700);
  }
  ~WorkerDevices() override {
    worker_.reset();
    unsetenv("UPIPE_FAKE_NVML");
    unsetenv("CUDA_VISIBLE_DEVICES");
    std::filesystem::remove_all(root_);
  }
  void Describe(const std::string& devices) const {
    std::ofstream(root_ + "/devices.new") << devices;
    std::filesystem::rename(root_ + "/devices.new", root_ + "/devices");
  }
  void StartWorker(std::vector<std::string> more = {}) {
    more.insert(more.end(), {"--backend", "cuda", "--nvml-library", FAKE_NVML});
    worker_ = std::make_unique<WorkerProcess>(
        WorkerProcess::Options{.coordinator = coordinator_.address(),
                               .root = root_,
                               .trainer_binary = root_ + "/trainer",
                               .more = more});
  }
  std::string Read(const std::string& file) const {
    std::stringstream text;
    text << std::ifstream(root_ + "/" + file).rdbuf();
    return text.str();
  }

  std::string root_;
  FakeCoordinator coordinator_;
  std::unique_ptr<WorkerProcess> worker_;
};

TEST_F(WorkerDevices, AreToldAndGivenToRanksBySlot) {
  Describe("uuid=GPU-a memory=2000 links=18 ecc=1 name=NVIDIA_H200\nuuid=GPU-b\nuuid=GPU-c\n");
  setenv("CUDA_VISIBLE_DEVICES", "2,GPU-a", 1);
  StartWorker();
  ASSERT_TRUE(coordinator_.WaitUntil([&] { return !coordinator_.hellos.empty(); }))
      << Read("worker.log");
  const v1::Hello& hello = coordinator_.hellos[0];
  EXPECT_EQ(hello.backend(), "cuda");
  ASSERT_EQ(hello.devices_size(), 2);
  EXPECT_EQ(hello.devices(0).uuid(), "GPU-c");
  EXPECT_EQ(hello.devices(1).uuid(), "GPU-a");
  EXPECT_EQ(hello.devices(1).name(), "NVIDIA H200");
  EXPECT_THAT(Read("worker.log"),
              HasSubstr("devices =  GPU-c (0 B, 0 NVLinks, ECC off); NVIDIA H200 GPU-a (2.0 KiB, "
                        "18 NVLinks, ECC on)"));
  const std::string nonce = RandomNonce();
  coordinator_.Start("", 1, nonce, 0, 1, 2);
  coordinator_.Start("", 1, nonce, 1, 0, 2);
  ASSERT_TRUE(Eventually([&] { return !Read("seen.0").empty() && !Read("seen.1").empty(); }));
  EXPECT_EQ(Read("seen.0"), "GPU-a Ring Simple\n");
  EXPECT_EQ(Read("seen.1"), "GPU-c Ring Simple\n");
}

TEST_F(WorkerDevices, OneThatFallsSickIsToldWithTheHeartbeat) {
  Describe("uuid=GPU-a\nuuid=GPU-b\n");
  StartWorker();
  ASSERT_TRUE(coordinator_.WaitUntil([&] { return coordinator_.devices.size() == 2; }));
  Describe("uuid=GPU-a\nuuid=GPU-b xids=79\n");
  ASSERT_TRUE(coordinator_.WaitUntil([&] { return !coordinator_.devices[1].sick().empty(); }));
  EXPECT_THAT(coordinator_.devices[1].sick(), HasSubstr("XID 79"));
  EXPECT_EQ(coordinator_.devices[0].sick(), "");
  EXPECT_TRUE(Eventually([&] {
    return Read("worker.log").find("the device of slot 1 is sick: XID 79") != std::string::npos;
  }));
}

TEST_F(WorkerDevices, MoreSlotsThanDevicesAreRefused) {
  Describe("uuid=GPU-a\n");
  StartWorker();
  EXPECT_EQ(WEXITSTATUS(worker_->Wait()), 2);
  EXPECT_THAT(Read("worker.log"),
              HasSubstr("--slots 2 on 1 devices: every rank needs one of its own"));
}

TEST_F(WorkerDevices, WithoutTheLibrarySlotsAreOrdinals) {
  unsetenv("UPIPE_FAKE_NVML");
  StartWorker();
  ASSERT_TRUE(coordinator_.WaitUntil([&] { return !coordinator_.hellos.empty(); }));
  EXPECT_EQ(coordinator_.hellos[0].devices_size(), 0);
  EXPECT_THAT(Read("worker.log"), HasSubstr("the health of devices is not known: nvmlInit"));
  coordinator_.Start("", 1, RandomNonce(), 0, 1, 1);
  ASSERT_TRUE(Eventually([&] { return !Read("seen.0").empty(); }));
  EXPECT_EQ(Read("seen.0"), "1 Ring Simple\n");
}

}  // namespace
}  // namespace upipe::worker
