// Messages that wait for a stream's one outstanding write. gRPC aborts the process on a second
// StartWrite, so every stream of the worker writes through one of these.
#pragma once

#include <deque>
#include <optional>
#include <string>
#include <utility>

namespace upipe::worker {

// Not thread-safe: the stream's mutex guards it.
template <typename Message>
class SendQueue {
 public:
  explicit SendQueue(size_t capacity) : capacity_(capacity) {}

  // A waiting message with the same non-empty `conflate` key is replaced. False when full.
  bool Push(Message message, const std::string& conflate = "") {
    if (!conflate.empty()) {
      for (auto& [key, waiting] : waiting_) {
        if (key != conflate) continue;
        waiting = std::move(message);
        return true;
      }
    }
    if (waiting_.size() >= capacity_) return false;
    waiting_.emplace_back(conflate, std::move(message));
    return true;
  }

  // Only while something waits, so after Push said it is full.
  void ReplaceNewest(Message message) { waiting_.back().second = std::move(message); }

  // The message to write now; nullptr while one is being written or none waits. It stays valid
  // until WriteDone.
  const Message* Next() {
    if (in_flight_.has_value() || waiting_.empty()) return nullptr;
    in_flight_ = std::move(waiting_.front().second);
    waiting_.pop_front();
    return &*in_flight_;
  }

  void WriteDone() { in_flight_.reset(); }
  bool idle() const { return !in_flight_.has_value() && waiting_.empty(); }

 private:
  const size_t capacity_;
  std::optional<Message> in_flight_;
  std::deque<std::pair<std::string, Message>> waiting_;
};

}  // namespace upipe::worker
