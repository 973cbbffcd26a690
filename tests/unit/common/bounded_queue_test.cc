#include "common/bounded_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace upipe {
namespace {

TEST(BoundedQueue, IsFifoAndBounded) {
  BoundedQueue<int> queue(2);
  EXPECT_TRUE(queue.TryPush(1));
  EXPECT_TRUE(queue.TryPush(2));
  EXPECT_FALSE(queue.TryPush(3));
  EXPECT_EQ(queue.size(), 2u);
  EXPECT_EQ(queue.Pop(), 1);
  EXPECT_EQ(queue.Pop(), 2);
}

TEST(BoundedQueue, CloseFailsPushesAndDrains) {
  BoundedQueue<std::unique_ptr<int>> queue(2);
  EXPECT_TRUE(queue.Push(std::make_unique<int>(7)));
  queue.Close();
  EXPECT_FALSE(queue.Push(std::make_unique<int>(8)));
  EXPECT_FALSE(queue.TryPush(std::make_unique<int>(8)));
  const auto item = queue.Pop();
  ASSERT_TRUE(item.has_value());
  EXPECT_EQ(**item, 7);
  EXPECT_FALSE(queue.Pop().has_value());
}

TEST(BoundedQueue, TimedPopReturnsNothingWhileOpen) {
  BoundedQueue<int> queue(1);
  EXPECT_FALSE(queue.PopFor(absl::Milliseconds(1)).has_value());
  EXPECT_FALSE(queue.closed());
  queue.Push(5);
  EXPECT_EQ(queue.PopFor(absl::InfiniteDuration()), 5);
}

TEST(BoundedQueue, CloseWakesBlockedThreads) {
  BoundedQueue<int> empty(1), full(1);
  full.Push(1);
  std::thread popper([&] { EXPECT_FALSE(empty.Pop().has_value()); });
  std::thread timed([&] { EXPECT_FALSE(empty.PopFor(absl::InfiniteDuration()).has_value()); });
  std::thread pusher([&] { EXPECT_FALSE(full.Push(2)); });
  empty.Close();
  full.Close();
  popper.join();
  timed.join();
  pusher.join();
}

TEST(BoundedQueue, NothingIsLostBetweenManyThreads) {
  constexpr int kThreads = 3, kItems = 2000;
  BoundedQueue<int> queue(4);
  std::atomic<int64_t> sum{0};
  std::vector<std::thread> producers, consumers;
  for (int t = 0; t < kThreads; ++t) {
    producers.emplace_back([&] {
      for (int i = 1; i <= kItems; ++i) EXPECT_TRUE(queue.Push(i));
    });
    consumers.emplace_back([&] {
      while (const auto item = queue.Pop()) sum += *item;
    });
  }
  for (std::thread& thread : producers) thread.join();
  queue.Close();
  for (std::thread& thread : consumers) thread.join();
  EXPECT_EQ(sum.load(), int64_t{kThreads} * kItems * (kItems + 1) / 2);
}

TEST(BoundedQueue, WhatMayNotBeRefusedIsTakenOverTheCapacityInOrder) {
  BoundedQueue<int> queue(1);
  EXPECT_TRUE(queue.TryPush(1));
  EXPECT_TRUE(queue.PushOverCapacity(2));
  EXPECT_FALSE(queue.TryPush(3));
  EXPECT_EQ(queue.Pop(), 1);
  EXPECT_FALSE(queue.TryPush(3));  // still full
  EXPECT_EQ(queue.Pop(), 2);
  queue.Close();
  EXPECT_FALSE(queue.PushOverCapacity(4));
}

}  // namespace
}  // namespace upipe
