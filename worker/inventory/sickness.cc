#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "worker/inventory/device_inventory.h"

namespace upipe::worker {
namespace {

// Errors of the driver after which a device works no more, or not for long; those that a program
// can cause by itself are not among them.
struct FatalXid {
  int xid;
  const char* meaning;
};
constexpr FatalXid kFatalXids[] = {
    {46, "the device stopped processing"},
    {48, "an uncorrectable memory error"},
    {62, "its controller halted"},
    {64, "a bad row of memory was not replaced"},
    {74, "an NVLink error"},
    {79, "the device fell off the bus"},
    {95, "an uncontained memory error"},
    {110, "a security fault"},
    {119, "its system processor does not answer"},
    {120, "its system processor failed"},
    {140, "an unrecovered memory error"},
    {143, "the device did not initialise"},
    {154, "the driver asks for a reset"},
};

const FatalXid* Fatal(int xid) {
  const auto found = std::find_if(std::begin(kFatalXids), std::end(kFatalXids),
                                  [xid](const FatalXid& fatal) { return fatal.xid == xid; });
  return found == std::end(kFatalXids) ? nullptr : found;
}

}  // namespace

bool IsFatalXid(int xid) { return Fatal(xid) != nullptr; }

std::string SicknessOf(const v1::SlotDevice& device) {
  if (const FatalXid* fatal = Fatal(device.last_xid()); fatal != nullptr) {
    return absl::StrCat("XID ", fatal->xid, ", ", fatal->meaning,
                        "; reset it, then start the worker again");
  }
  if (device.remap_failed()) return "a bad row of its memory could not be replaced; change it";
  if (device.uncorrectable_errors() > 0) {
    return absl::StrCat(device.uncorrectable_errors(),
                        " uncorrectable memory errors since the driver was loaded; reset it");
  }
  if (device.remap_pending()) return "a bad row of its memory waits to be replaced; reset it";
  return "";
}

}  // namespace upipe::worker
