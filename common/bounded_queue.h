// A first-in first-out queue between threads with a fixed capacity: what a slow reader makes a fast
// writer feel. The only way bytes pass from RPC reactors to the deciding thread.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

#include "absl/time/time.h"

namespace upipe {

// Thread-safe. After Close pushes fail and pops drain what is left, then return nothing.
template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  // Never blocks. False when full or closed; `item` is then lost.
  bool TryPush(T item) {
    std::lock_guard lock(mutex_);
    if (closed_ || items_.size() >= capacity_) return false;
    items_.push_back(std::move(item));
    not_empty_.notify_one();
    return true;
  }

  // Never blocks and takes the item even when full: for writers whose number of waiting items is
  // bounded already, such as ends of what was let in by TryPush. False when closed.
  bool PushOverCapacity(T item) {
    std::lock_guard lock(mutex_);
    if (closed_) return false;
    items_.push_back(std::move(item));
    not_empty_.notify_one();
    return true;
  }

  // Blocks while full. False when closed.
  bool Push(T item) {
    std::unique_lock lock(mutex_);
    not_full_.wait(lock, [&] { return closed_ || items_.size() < capacity_; });
    if (closed_) return false;
    items_.push_back(std::move(item));
    not_empty_.notify_one();
    return true;
  }

  // Blocks while empty. Nothing when closed and drained.
  std::optional<T> Pop() {
    std::unique_lock lock(mutex_);
    not_empty_.wait(lock, [&] { return closed_ || !items_.empty(); });
    return TakeFront();
  }

  // As Pop, but returns nothing after `timeout` too; closed() tells the two apart. Zero polls.
  std::optional<T> PopFor(absl::Duration timeout) {
    timeout = std::min(timeout, absl::Hours(24 * 365));  // beyond it the standard library overflows
    std::unique_lock lock(mutex_);
    not_empty_.wait_for(lock, absl::ToChronoNanoseconds(timeout),
                        [&] { return closed_ || !items_.empty(); });
    return TakeFront();
  }

  void Close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    not_empty_.notify_all();
    not_full_.notify_all();
  }

  bool closed() const {
    std::lock_guard lock(mutex_);
    return closed_;
  }

  size_t size() const {
    std::lock_guard lock(mutex_);
    return items_.size();
  }

 private:
  std::optional<T> TakeFront() {
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    not_full_.notify_one();
    return item;
  }

  const size_t capacity_;
  mutable std::mutex mutex_;
  std::condition_variable not_empty_;
  std::condition_variable not_full_;
  std::deque<T> items_;
  bool closed_ = false;
};

}  // namespace upipe
