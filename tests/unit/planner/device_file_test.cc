// Device files: what they say, what is refused and on which line, and that those which ship are
// whole.
#include "planner/device_file.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "common/check.h"
#include "planner/known_device_files.h"

namespace upipe::planner {
namespace {

using google::protobuf::util::MessageDifferencer;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

constexpr char kLegal[] = R"(name: h100
backend: cuda
attention_kernel: cudnn 9.19
memory: {bytes: 79.6GiB, source: specification}
devices_per_node: 8
context: {bytes: 0, source: none}
fragmentation: {value: 0.05, source: paper}
peak_flops: {value: 989e12, source: specification}
matmul_bf16: {flops: 700e12, half_rows: 0, source: paper}
attention_bf16:
  - {length: 1K, forward_flops: 3e14, backward_flops: 2e14, source: paper}
  - length: 1M
    forward_flops: 6e14
    backward_flops: 5e14
    source: paper
memory_bandwidth: {value: 2.8e12, source: paper}
exchange_in_node: {value: 350e9, source: paper}
launch: {value: 5e-6, source: paper}
notes:
  - "a: b"
  - plain words
)";

std::string Replaced(absl::string_view from, absl::string_view to) {
  const std::string text = absl::StrReplaceAll(kLegal, {{from, to}});
  EXPECT_NE(text, kLegal) << from;
  return text;
}

std::vector<std::string> ErrorsOf(absl::string_view text) {
  const auto device = ParseDeviceFile(text, "d.yaml");
  if (device.ok()) return {};
  EXPECT_EQ(device.status().code(), absl::StatusCode::kInvalidArgument);
  return absl::StrSplit(device.status().message(), '\n');
}

TEST(DeviceFile, ReadsEveryKindOfField) {
  const auto device = ParseDeviceFile(kLegal, "d.yaml");
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_EQ(device->name(), "h100");
  EXPECT_EQ(device->attention_kernel(), "cudnn 9.19");
  EXPECT_EQ(device->memory().bytes(), 85469849190);  // 79.6 x 2^30, to the nearest
  EXPECT_TRUE(device->context().has_bytes());
  EXPECT_EQ(device->context().bytes(), 0);
  EXPECT_EQ(device->fragmentation().value(), 0.05);
  EXPECT_EQ(device->matmul_bf16().flops(), 700e12);
  EXPECT_TRUE(device->matmul_bf16().has_half_rows());
  ASSERT_EQ(device->attention_bf16_size(), 2);
  EXPECT_EQ(device->attention_bf16(0).length(), 1024);
  EXPECT_EQ(device->attention_bf16(1).length(), 1 << 20);
  EXPECT_EQ(device->attention_bf16(1).backward_flops(), 5e14);
  EXPECT_EQ(device->launch().source(), "paper");
  EXPECT_THAT(device->notes(), ElementsAre("a: b", "plain words"));
  EXPECT_FALSE(device->has_host_memory());
}

struct Case {
  const char* from;
  const char* to;
  std::vector<const char*> errors;  // exactly these lines, as prefixes
};

const Case kCases[] = {
    {"name: h100", "name: ../h100", {"d.yaml:1: name: must be 1 to 64 letters, digits, '.' or"}},
    {"backend: cuda", "backend: rocm", {"d.yaml:2: backend: must be cpu or cuda"}},
    {"kernel: cudnn 9.19", "kernel: flash", {"d.yaml:3: attention_kernel: must be own, or cudnn"}},
    {"attention_kernel: cudnn 9.19\n",
     "attention_kernel: own\nattention_own_bf16: [{length: 1K, forward_flops: 1, backward_flops: "
     "1, "
     "source: s}]\n",
     {"d.yaml:4: attention_own_bf16: is for devices whose attention_kernel is another"}},
    {"kernel: cudnn 9.19", "kernel: cudnn 9.", {"d.yaml:3: attention_kernel: must be own, or"}},
    {"bytes: 79.6GiB", "bytes: 79.6GB", {"d.yaml:4: memory.bytes: '79.6GB' is not a number of"}},
    {"bytes: 79.6GiB", "bytes: 0", {"d.yaml:4: memory.bytes: 0 is outside 1 to 1024TiB"}},
    {"bytes: 79.6GiB", "bytes: 1025TiB", {"d.yaml:4: memory.bytes: 1126999418470400 is outside 1"}},
    {"bytes: 79.6GiB, ", "", {"d.yaml:4: memory.bytes: is required, such as 80GiB"}},
    {"79.6GiB, source: specification",
     "79.6GiB",
     {"d.yaml:4: memory.source: is required: say where the number is from"}},
    {"79.6GiB, source: specification",
     "79.6GiB, source: \"\"",
     {"d.yaml:4: memory.source: is required"}},
    {"memory: {bytes: 79.6GiB, source: specification}\n", "", {"d.yaml:1: memory: is required"}},
    {"backend: cuda", "backend: cpu", {"d.yaml:4: memory.bytes: must be 0 for backend cpu"}},
    {"per_node: 8", "per_node: 0", {"d.yaml:5: devices_per_node: is required: a whole number"}},
    {"per_node: 8", "per_node: 9999", {"d.yaml:5: devices_per_node: 9,999 is outside 1 to 1,024"}},
    {"context: {bytes: 0", "context: {bytes: -1", {"d.yaml:6: context.bytes: -1 is outside 0 to"}},
    {"value: 0.05", "value: 1", {"d.yaml:7: fragmentation.value: 1 is outside 0 (included)"}},
    {"value: 0.05", "value: -1", {"d.yaml:7: fragmentation.value: -1 is not a finite number"}},
    {"value: 989e12", "value: 0", {"d.yaml:8: peak_flops.value: 0 is not a finite number above"}},
    {"value: 989e12, ", "", {"d.yaml:8: peak_flops.value: is required"}},
    {"value: 989e12", "value: .inf", {"d.yaml:8: peak_flops.value: inf is not a finite number"}},
    {"flops: 700e12", "flops: -1", {"d.yaml:9: matmul_bf16.flops: -1 is not a finite number"}},
    {"half_rows: 0, ", "", {"d.yaml:9: matmul_bf16.half_rows: is required; 0 where the rate"}},
    {"half_rows: 0", "half_rows: -2", {"d.yaml:9: matmul_bf16.half_rows: -2 is not a finite"}},
    {"length: 1K", "length: 1k", {"d.yaml:11: attention_bf16[0].length: '1k' is not a whole"}},
    {"length: 1K", "length: 0", {"d.yaml:11: attention_bf16[0].length: is 0; give a number"}},
    {"length: 1M", "length: 1K", {"d.yaml:12: attention_bf16[1].length: 1K follows 1K; lengths"}},
    {"    forward_flops: 6e14\n",
     "",
     {"d.yaml:12: attention_bf16[1].forward_flops: 0 is not a finite number above 0"}},
    {"    source: paper\n", "", {"d.yaml:12: attention_bf16[1].source: is required"}},
    {"    backward_flops: 5e14",
     "    backward_flop: 5e14",
     {"d.yaml:12: attention_bf16[1].backward_flops: 0 is not",
      "d.yaml:14: attention_bf16[1].backward_flop: unknown field; did you mean"}},
    {"matmul_bf16:",
     "matmul_fp32:",
     {"d.yaml:1: attention_fp32: is required: rates of matmul and"}},
    {"matmul_bf16: {flops: 700e12, half_rows: 0, source: paper}\n",
     "",
     {"d.yaml:1: matmul_bf16: is required: rates of matmul and of attention of one"}},
    {"memory_bandwidth: {value: 2.8e12, source: paper}\n",
     "",
     {"d.yaml:1: memory_bandwidth: is required"}},
    {"exchange_in_node: {value: 350e9, source: paper}\n",
     "",
     {"d.yaml:1: exchange_in_node: is required where a node has 8 devices"}},
    {"launch: {value: 5e-6", "launch: {value: 5us", {"d.yaml:18: launch.value: '5us' is not a"}},
    {"launch:", "lauch:", {"d.yaml:18: lauch: unknown field; did you mean 'launch'?"}},
    {"  - \"a: b\"", "  - [a, b]", {"d.yaml:20: notes[0]: a single value is expected, but a list"}},
    {"  - \"a: b\"", "  - ~", {"d.yaml:20: notes[0]: a single value is expected, but nothing"}},
    {"  - plain words",
     "  - &a plain words\n  - *a",
     {"d.yaml:22: aliases (*name) are not accepted"}},
    {"notes:\n  - \"a: b\"\n  - plain words", "notes: words", {"d.yaml:19: notes: a list is exp"}},
    {"notes:\n", "notes:\n  - x\nnotes:\n", {"d.yaml:21: notes: given twice; first on line 19"}},
    {"  - plain words\n",
     "---\nname: a\n",
     {"d.yaml:21: a second document begins; one file is one "
      "device"}},
};

TEST(DeviceFile, EachViolationNamesLinePathAndReason) {
  for (const Case& c : kCases) {
    const std::vector<std::string> errors = ErrorsOf(Replaced(c.from, c.to));
    ASSERT_EQ(errors.size(), c.errors.size()) << c.to << "\n" << testing::PrintToString(errors);
    for (size_t i = 0; i < errors.size(); ++i) EXPECT_THAT(errors[i], StartsWith(c.errors[i]));
  }
}

TEST(DeviceFile, ZeroIsAValueWhereItMeansSomething) {
  const auto device =
      ParseDeviceFile(absl::StrReplaceAll(kLegal, {{"79.6GiB", "0"},
                                                   {"backend: cuda", "backend: cpu"},
                                                   {"value: 0.05", "value: 0"},
                                                   {"value: 5e-6", "value: 0"}}),
                      "d.yaml");
  ASSERT_TRUE(device.ok()) << device.status();
  EXPECT_TRUE(device->memory().has_bytes());
  EXPECT_TRUE(device->launch().has_value());
}

TEST(DeviceFile, AFileIsBounded) {
  EXPECT_THAT(ErrorsOf(std::string(kMaxDeviceFileBytes + 1, '#')),
              ElementsAre(HasSubstr("a device file has at most 65536")));
  std::string items;
  for (int i = 0; i < 65; ++i) absl::StrAppend(&items, "  - {}\n");
  EXPECT_THAT(ErrorsOf(absl::StrCat(kLegal, "attention_fp32:\n", items)),
              ElementsAre(StartsWith("d.yaml:22: attention_fp32: has 65 items; at most 64")));
}

TEST(DeviceFile, WhatIsWrittenReadsBackEqual) {
  v1::DeviceFile device = *ParseDeviceFile(kLegal, "d.yaml");
  device.add_notes("\"quoted\" \\ \x01 \xe2\x82\xac: #x");
  device.add_notes("");
  device.mutable_launch()->set_value(0.1 + 0.2);
  device.mutable_host_memory()->set_bytes(int64_t{2} << 40);
  device.mutable_host_memory()->set_source("2 TiB - [a list?]");
  const std::string text = DeviceFileToYaml(device);
  const auto again = ParseDeviceFile(text, "written");
  ASSERT_TRUE(again.ok()) << again.status() << "\n" << text;
  EXPECT_TRUE(MessageDifferencer::Equals(*again, device)) << text;
  EXPECT_THAT(text, HasSubstr("context:\n  bytes: 0\n  source: none\n"));
  EXPECT_THAT(text, HasSubstr("  - length: 1M\n    forward_flops: 6e+14\n"));
}

std::string Folder() {
  const std::string folder = absl::StrCat(testing::TempDir(), "/devices");
  std::filesystem::create_directories(folder);
  return folder;
}

void Write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

TEST(DeviceFile, AMissingFileIsNamed) {
  const auto device = ReadDeviceFile("/nonexistent/d.yaml");
  EXPECT_EQ(device.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(device.status().message()),
              HasSubstr("the device file /nonexistent/d.yaml"));
}

std::filesystem::path Source() { return std::getenv("UPIPE_SOURCE_DIR"); }

TEST(KnownDevices, AreTheFilesOfTheRepository) {
  const std::filesystem::path folder = Source() / "deploy/devices";
  std::set<std::string> names;
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    ASSERT_EQ(entry.path().extension(), ".yaml") << entry.path();
    ++files;
    const auto device = ReadDeviceFile(entry.path().string());
    ASSERT_TRUE(device.ok()) << device.status();
    names.insert(device->name());
    const auto known = FindDevice(device->name(), "");
    ASSERT_TRUE(known.ok()) << known.status();
    EXPECT_TRUE(MessageDifferencer::Equals(*known, *device)) << entry.path();
  }
  EXPECT_EQ(KnownDevices().size(), files);
  EXPECT_EQ(names.size(), files) << "two files describe devices of one name";
  EXPECT_TRUE(names.contains("cpu")) << "what jobs on the backend cpu are timed for";
}

TEST(FindDevice, AFileStandsBeforeAKnownDevice) {
  const std::string folder = Folder();
  const std::string own = absl::StrReplaceAll(
      kLegal, {{"name: h100", "name: cpu"}, {"backend: cuda", "backend: cpu"}, {"79.6GiB", "0"}});
  Write(folder + "/cpu.yaml", own);
  const auto mine = FindDevice("cpu", folder);
  ASSERT_TRUE(mine.ok()) << mine.status();
  EXPECT_EQ(mine->devices_per_node(), 8);
  std::filesystem::remove(folder + "/cpu.yaml");
  const auto known = FindDevice("cpu", folder);
  ASSERT_TRUE(known.ok()) << known.status();
  EXPECT_FALSE(MessageDifferencer::Equals(*known, *mine));
}

TEST(FindDevice, SaysWhatThereIs) {
  const std::string folder = Folder();
  Write(folder + "/mine-1.0.yaml", Replaced("name: h100", "name: mine-1.0"));
  Write(folder + "/broken.yaml", Replaced("name: h100", "nam: broken"));
  Write(folder + "/other.yaml", kLegal);
  EXPECT_TRUE(FindDevice("mine-1.0", folder).ok());

  const absl::Status unknown = FindDevice("h900", folder).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(unknown.message()),
              StartsWith("no device is called h900; there are broken, "));
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("cpu"));
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("mine-1.0, other"));

  EXPECT_THAT(FindDevice("broken", folder).status().message(), HasSubstr("did you mean 'name'?"));
  EXPECT_THAT(FindDevice("other", folder).status().message(),
              HasSubstr("describes h100; a device"));
  for (const char* name : {"", "../cpu", "a/b", ".", "a b"}) {
    EXPECT_EQ(FindDevice(name, folder).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
}

// The page for people: its example is read, what it says of a wrong one is what is said, and no
// field is missing.
TEST(DevicesPage, IsTrue) {
  std::ifstream file(Source() / "docs/devices.md");
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  const std::string fence = "```yaml\n";
  const size_t begin = page.find(fence) + fence.size();
  const std::string example = page.substr(begin, page.find("```", begin) - begin);
  const auto device = ParseDeviceFile(example, "my-card.yaml");
  ASSERT_TRUE(device.ok()) << device.status();

  const std::string wrong =
      absl::StrReplaceAll(example, {{", source: \"measured: cublasLt, 8192 x 8192\"", ""}});
  const absl::Status refusal = ParseDeviceFile(wrong, "my-card.yaml").status();
  EXPECT_THAT(page, HasSubstr(absl::StrCat("```\n", refusal.message(), "\n```")));

  const auto& fields = *v1::DeviceFile::descriptor();
  for (int i = 0; i < fields.field_count(); ++i) {
    EXPECT_THAT(page, HasSubstr(absl::StrCat("`", fields.field(i)->name(), "`")));
  }
}

}  // namespace
}  // namespace upipe::planner
