// Device descriptions as files: YAML to v1.DeviceFile and back, what a description must hold, and
// where one is found by its name. How they are made and written by hand: docs/devices.md.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/spec/violation.h"
#include "upipe/v1/device.pb.h"

namespace upipe::planner {

// Largest device file accepted; bounds nodes and time.
inline constexpr size_t kMaxDeviceFileBytes = 64 * 1024;

// A description that CheckDeviceFile accepts; or InvalidArgument with everything that is wrong, a
// line each: "<filename>:<line>: <field path>: <what is wrong>".
absl::StatusOr<v1::DeviceFile> ParseDeviceFile(absl::string_view text, absl::string_view filename);
// The same of a file. NotFound or PermissionDenied names the path and the reason.
absl::StatusOr<v1::DeviceFile> ReadDeviceFile(const std::string& path);

// Everything that is missing, out of its range or without a source.
std::vector<Violation> CheckDeviceFile(const v1::DeviceFile& device);

// Whether `name` may be one: 1 to 64 letters, digits, '.', '-', the first a letter or digit.
bool IsDeviceName(absl::string_view name);

// The fields that are set, in the form ParseDeviceFile reads back to an equal message.
std::string DeviceFileToYaml(const v1::DeviceFile& device);

// Those that ship with this build, by the order of their files.
const std::vector<v1::DeviceFile>& KnownDevices();

// The description called `name`: of NAME.yaml in `folder` where that is there, else the known one.
// An empty `folder` is none. InvalidArgument when the name cannot be one or the file is wrong;
// NotFound lists the names there are.
absl::StatusOr<v1::DeviceFile> FindDevice(const std::string& name, const std::string& folder);

}  // namespace upipe::planner
