// A fuzzer's bytes as a sequence of events. Events are parted by a mark, not by lengths, so that
// what a mutation cuts, doubles or moves is still a sequence of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"

namespace upipe::fuzz {

inline constexpr absl::string_view kEventMark = "\n~\n";
inline constexpr size_t kEventsMax = 64;

struct Event {
  char kind = 0;
  uint8_t argument = 0;
  absl::string_view payload;
};

// The first kEventsMax events: kind, argument, payload, mark. Those without a kind are left out.
inline std::vector<Event> ReadEvents(const uint8_t* data, size_t size) {
  absl::string_view rest(reinterpret_cast<const char*>(data), size);
  std::vector<Event> events;
  while (!rest.empty() && events.size() < kEventsMax) {
    const absl::string_view bytes = rest.substr(0, rest.find(kEventMark));
    rest.remove_prefix(std::min(rest.size(), bytes.size() + kEventMark.size()));
    if (bytes.empty()) continue;
    events.push_back({.kind = bytes[0],
                      .argument = bytes.size() > 1 ? static_cast<uint8_t>(bytes[1]) : uint8_t{0},
                      .payload = bytes.substr(std::min<size_t>(2, bytes.size()))});
  }
  return events;
}

// False when the payload is no such message.
template <typename Message>
bool Parse(const Event& event, Message& message) {
  return message.ParseFromArray(event.payload.data(), static_cast<int>(event.payload.size()));
}

}  // namespace upipe::fuzz
