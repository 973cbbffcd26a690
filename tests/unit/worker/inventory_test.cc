// What a worker finds of its devices through NVML, here the one that a file describes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "worker/inventory/device_inventory.h"

namespace upipe::worker {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kWell[] = "memory=150754820096 links=18 ecc=1 name=NVIDIA_H200";

class Inventory : public ::testing::Test {
 protected:
  Inventory() { setenv("UPIPE_FAKE_NVML", path_.c_str(), 1); }
  ~Inventory() override {
    unsetenv("UPIPE_FAKE_NVML");
    std::filesystem::remove(path_);
  }
  // Whole at once, for the library reads it at any time.
  void Describe(const std::vector<std::string>& devices) const {
    std::ofstream file(path_ + ".new");
    for (const std::string& device : devices) file << device << "\n";
    file.close();
    std::filesystem::rename(path_ + ".new", path_);
  }
  static std::shared_ptr<DeviceInventory> Open(const std::vector<std::string>& visible = {}) {
    auto inventory = OpenNvmlInventory(FAKE_NVML, visible);
    EXPECT_TRUE(inventory.ok()) << inventory.status();
    return inventory.ok() ? *inventory : nullptr;
  }
  static std::vector<std::string> UuidsOf(DeviceInventory& inventory) {
    std::vector<std::string> uuids;
    for (const v1::SlotDevice& device : inventory.Read()) uuids.push_back(device.uuid());
    return uuids;
  }

  const std::string path_ =
      (std::filesystem::temp_directory_path() / absl::StrCat("inventory-", getpid())).string();
};

TEST_F(Inventory, TellsWhatADeviceIs) {
  Describe({absl::StrCat("uuid=GPU-a ", kWell), "uuid=GPU-b name=NVIDIA_L4 memory=1000"});
  const std::vector<v1::SlotDevice> devices = Open()->Read();
  ASSERT_EQ(devices.size(), 2u);
  EXPECT_EQ(devices[0].name(), "NVIDIA H200");
  EXPECT_EQ(devices[0].uuid(), "GPU-a");
  EXPECT_EQ(devices[0].memory_bytes(), 150754820096);
  EXPECT_EQ(devices[0].nvlinks(), 18);
  EXPECT_TRUE(devices[0].ecc());
  EXPECT_EQ(devices[0].uncorrectable_errors(), 0);
  EXPECT_EQ(devices[0].last_xid(), 0);
  EXPECT_EQ(devices[0].sick(), "");
  EXPECT_EQ(devices[1].nvlinks(), 0);
  EXPECT_FALSE(devices[1].ecc());
  EXPECT_EQ(devices[1].sick(), "");
}

TEST_F(Inventory, OffersWhatIsVisibleInThatOrder) {
  Describe({"uuid=GPU-a", "uuid=GPU-b", "uuid=GPU-c"});
  EXPECT_THAT(UuidsOf(*Open()), ElementsAre("GPU-a", "GPU-b", "GPU-c"));
  EXPECT_THAT(UuidsOf(*Open({"2", "GPU-a"})), ElementsAre("GPU-c", "GPU-a"));
  const auto none = OpenNvmlInventory(FAKE_NVML, {"3"});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(none.status().message(), "'3' is none of this machine's 3 devices");
}

TEST_F(Inventory, NothingThereIsUnavailable) {
  const auto library = OpenNvmlInventory("libno-such-library.so.1", {});
  EXPECT_EQ(library.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(library.status().message(), HasSubstr("no NVML: libno-such-library.so.1"));
  EXPECT_THAT(OpenNvmlInventory("libm.so.6", {}).status().message(),
              HasSubstr("libm.so.6 lacks nvmlInit_v2, nvmlShutdown"));
  EXPECT_EQ(OpenNvmlInventory(FAKE_NVML, {}).status().message(),
            "NVML knows no device on this machine");
  unsetenv("UPIPE_FAKE_NVML");
  const auto driver = OpenNvmlInventory(FAKE_NVML, {});
  EXPECT_EQ(driver.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(driver.status().message(), "nvmlInit: Driver Not Loaded");
}

TEST_F(Inventory, ASickDeviceSaysWhyAndTheOthersAreWell) {
  const std::pair<std::string, std::string> sick[] = {{"errors=3", "3 uncorrectable memory errors"},
                                                      {"pending=1", "waits to be replaced"},
                                                      {"failed=1", "could not be replaced"},
                                                      {"result=15", "NVML says: GPU is lost"}};
  for (const auto& [what, says] : sick) {
    Describe({absl::StrCat("uuid=GPU-a ", kWell), absl::StrCat("uuid=GPU-b ", what, " ", kWell)});
    const std::vector<v1::SlotDevice> devices = Open()->Read();
    EXPECT_EQ(devices.at(0).sick(), "") << what;
    EXPECT_THAT(devices.at(1).sick(), HasSubstr(says));
  }
}

TEST_F(Inventory, FatalErrorsOfTheDriverStay) {
  Describe({absl::StrCat("uuid=GPU-a xids=79,31 ", kWell)});
  const auto inventory = Open();
  EXPECT_EQ(inventory->Read().at(0).sick(), "");  // not yet told
  EXPECT_TRUE(inventory->AwaitNews(absl::Seconds(10)));
  EXPECT_THAT(inventory->Read().at(0).sick(), HasSubstr("XID 79, the device fell off the bus"));
  EXPECT_TRUE(inventory->AwaitNews(absl::Seconds(10)));
  EXPECT_EQ(inventory->Read().at(0).last_xid(), 79);
  EXPECT_FALSE(inventory->AwaitNews(absl::Milliseconds(1)));
}

TEST(Sickness, ProgramsCauseSomeErrorsThemselves) {
  for (const int xid : {0, 8, 13, 31, 43, 45, 63, 68, 94}) EXPECT_FALSE(IsFatalXid(xid)) << xid;
  for (const int xid : {48, 64, 74, 79, 95, 119, 140}) EXPECT_TRUE(IsFatalXid(xid)) << xid;
}

TEST_F(Inventory, TheWatchTellsOfAChangeAtOnce) {
  Describe({absl::StrCat("uuid=GPU-a ", kWell), absl::StrCat("uuid=GPU-b ", kWell)});
  const auto inventory = Open();
  std::vector<v1::SlotDevice> known = inventory->Read();
  known.resize(1);  // the first is offered
  std::mutex mutex;
  std::condition_variable told;
  std::vector<std::vector<v1::SlotDevice>> changes;
  const DeviceWatch watch(inventory, known, [&](std::vector<v1::SlotDevice> devices) {
    std::lock_guard lock(mutex);
    changes.push_back(std::move(devices));
    told.notify_one();
  });
  Describe({absl::StrCat("uuid=GPU-a xids=13,48 ", kWell), absl::StrCat("uuid=GPU-b ", kWell)});
  std::unique_lock lock(mutex);
  ASSERT_TRUE(told.wait_for(lock, std::chrono::seconds(10), [&] { return changes.size() == 2; }));
  ASSERT_EQ(changes[0].size(), 1u);
  EXPECT_EQ(changes[0][0].last_xid(), 13);
  EXPECT_EQ(changes[0][0].sick(), "");
  EXPECT_THAT(changes[1][0].sick(), HasSubstr("XID 48"));
}

}  // namespace
}  // namespace upipe::worker
