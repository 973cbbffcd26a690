// Passes over tensors on the device and on the host give the same values wherever the tensors live
// and however the streams are delayed; what a pass costs in bytes is exact.
#include "engine/token_tensor.h"

#include <cmath>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/comm/dry/dry_communicator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/dry/dry_device.h"
#include "kernels/host/host_device.h"
#include "tests/contract/kernels/fill_ops.h"

namespace upipe::engine {
namespace {

using kernels::DType;
using kernels::ExecContext;
using kernels::MemoryTag;
using kernels::TensorView;
using testing::ElementsAre;

std::unique_ptr<kernels::Device> TestDevice(uint64_t seed) {
  auto device = kernels::HostDevice::Create(
      {.arena_bytes = 1 << 20,
       .host_bytes = 1 << 20,
       .delay = kernels::StreamDelay{.seed = seed, .longest = absl::Microseconds(100)},
       .poison_freed = true},
      std::make_unique<kernels::FillOpTable>());
  EXPECT_TRUE(device.ok()) << device.status();
  return *std::move(device);
}

// A device with what a rank's context needs.
struct Rank {
  explicit Rank(kernels::Device& device)
      : device(device), streams(RankStreams::Create(device, 0)), comm(0, 1) {}

  TokenTensor Take(Place place, int64_t tokens, int64_t columns, DType dtype = DType::kFloat32) {
    auto tensor = TokenTensor::Allocate(context, place, MemoryTag::kResidual,
                                        {.tokens = tokens, .columns = columns, .dtype = dtype});
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    return *std::move(tensor);
  }
  // All its elements, once `stream` gets here.
  std::vector<float> Read(const TokenTensor& tensor, kernels::Stream& stream) {
    std::vector<float> values(tensor.view().num_elements());
    if (tensor.on_host()) {
      stream.Submit([&values, view = tensor.view()](ExecContext&) {
        std::copy_n(view.as<float>(), values.size(), values.data());
        return absl::OkStatus();
      });
    } else {
      device.CopyToHost(values.data(), tensor.view().data, tensor.view().num_bytes(), stream);
    }
    EXPECT_TRUE(stream.Synchronize().ok());
    return values;
  }
  // Element i becomes first + i.
  void Count(const TokenTensor& tensor, float first) {
    const TileAccess all{&tensor, TileUse::kWrite, 0, tensor.view().shape[1]};
    const auto fill = [&](int64_t begin, int64_t, absl::Span<const TensorView> tiles) {
      context.stream().Submit([tile = tiles[0], begin, first](ExecContext&) {
        for (int64_t i = 0; i < tile.num_elements(); ++i)
          tile.as<float>()[i] = first + static_cast<float>(begin * tile.shape[1] + i);
        return absl::OkStatus();
      });
      return absl::OkStatus();
    };
    EXPECT_TRUE(ForEachTile(context, {0, tensor.view().shape[0], 5}, {all}, fill).ok());
  }

  kernels::Device& device;
  const RankStreams streams;
  comm::DryCommunicator comm;
  const RankContext context{
      {.device = device, .streams = streams, .comm = comm, .storage = DType::kFloat32, .mesh = {}}};
};

// A matrix on this thread, and the arithmetic of a pass over its rows.
struct Access {
  int tensor = 0;
  TileUse use = TileUse::kRead;
  int64_t first_column = 0;
  int64_t columns = 0;
};

// Row `token` of every access: writers get numbers made of the token and of all that was read.
void WorkOnRow(const std::vector<Access>& accesses, int64_t token, float salt,
               const std::vector<float*>& rows) {
  float sum = salt + static_cast<float>(token);
  for (size_t i = 0; i < rows.size(); ++i) {
    if (accesses[i].use == TileUse::kWrite) continue;
    for (int64_t c = 0; c < accesses[i].columns; ++c)
      sum = std::fmod(sum * 3 + rows[i][c], 4093.0f);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    if (accesses[i].use == TileUse::kRead) continue;
    for (int64_t c = 0; c < accesses[i].columns; ++c) {
      const float old = accesses[i].use == TileUse::kReadWrite ? rows[i][c] : 0.0f;
      rows[i][c] = std::fmod(old + sum + static_cast<float>(c), 4093.0f);
    }
  }
}

// A seeded sequence of passes over a few tensors, on two streams, run by ForEachTile and by a loop
// over rows of plain vectors.
class RandomPasses {
 public:
  RandomPasses(uint32_t seed, uint64_t delay_seed)
      : random_(seed), device_(TestDevice(delay_seed)), rank_(*device_) {
    tokens_ = 1 + random_() % 40;
    for (int i = 0; i < 5; ++i) {
      columns_.push_back(1 + random_() % 9);
      tensors_.push_back(
          rank_.Take(random_() % 3 == 0 ? Place::kDevice : Place::kHost, tokens_, columns_[i]));
      const float first = static_cast<float>(i) * 100;
      rank_.Count(tensors_[i], first);
      expected_.emplace_back(tokens_ * columns_[i]);
      for (size_t e = 0; e < expected_[i].size(); ++e)
        expected_[i][e] = first + static_cast<float>(e);
    }
  }

  void Execute() {
    for (int pass = 0; pass < 8; ++pass) {
      const bool on_side = random_() % 2 == 0;
      kernels::Stream& stream = on_side ? *rank_.streams.side : *rank_.streams.compute;
      stream.Wait(on_side ? rank_.streams.compute->Record() : rank_.streams.side->Record());
      RunPass(rank_.context.On(stream), static_cast<float>(pass));
      if (random_() % 3 == 0) Compare(random_() % 2 == 0 ? stream : *rank_.streams.copy);
    }
    rank_.streams.copy->Wait(rank_.streams.compute->Record());
    rank_.streams.copy->Wait(rank_.streams.side->Record());
    Compare(*rank_.streams.copy);
  }

 private:
  std::vector<Access> RandomAccesses() {
    std::vector<Access> accesses;
    for (int tensor = 0; tensor < 5; ++tensor) {
      if (random_() % 2 == 0) continue;
      const auto use = static_cast<TileUse>(random_() % 3);
      const auto first = static_cast<int64_t>(random_() % columns_[tensor]);
      const auto columns = static_cast<int64_t>(1 + random_() % (columns_[tensor] - first));
      accesses.push_back({tensor, use, first, columns});
    }
    return accesses;
  }

  void RunPass(const RankContext& context, float salt) {
    const auto accesses = RandomAccesses();
    const auto begin = static_cast<int64_t>(random_() % tokens_);
    const auto end = static_cast<int64_t>(begin + random_() % (tokens_ - begin + 1));
    const auto tile_rows = static_cast<int64_t>(1 + random_() % 12);
    std::vector<TileAccess> tiles;
    for (const Access& a : accesses)
      tiles.push_back({&tensors_[a.tensor], a.use, a.first_column, a.columns});
    int64_t next = begin;
    const auto body = [&](int64_t from, int64_t rows, absl::Span<const TensorView> views) {
      EXPECT_EQ(from, next);
      EXPECT_EQ(rows, std::min(tile_rows, end - from));
      next += rows;
      for (size_t i = 0; i < accesses.size(); ++i) {
        EXPECT_THAT(views[i].shape, ElementsAre(rows, accesses[i].columns, 1));
      }
      context.stream().Submit(
          [accesses, from, rows, salt,
           tiles = std::vector<TensorView>(views.begin(), views.end())](ExecContext&) {
            for (int64_t row = 0; row < rows; ++row) {
              std::vector<float*> pointers;
              for (const TensorView& tile : tiles)
                pointers.push_back(static_cast<float*>(tile.At(row)));
              WorkOnRow(accesses, from + row, salt, pointers);
            }
            return absl::OkStatus();
          });
      return absl::OkStatus();
    };
    EXPECT_TRUE(ForEachTile(context, {begin, end, tile_rows}, tiles, body).ok());
    EXPECT_EQ(next, end);
    for (int64_t token = begin; token < end; ++token) {
      std::vector<float*> pointers;
      for (const Access& a : accesses)
        pointers.push_back(&expected_[a.tensor][token * columns_[a.tensor] + a.first_column]);
      WorkOnRow(accesses, token, salt, pointers);
    }
  }

  // For what is on the host, nothing but the passes has made the copy stream wait for them.
  void Compare(kernels::Stream& stream) {
    const bool on_copy = &stream == rank_.streams.copy.get();
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!tensors_[i].on_host() && on_copy) {
        stream.Wait(rank_.streams.compute->Record());
        stream.Wait(rank_.streams.side->Record());
      }
      EXPECT_EQ(rank_.Read(tensors_[i], stream), expected_[i]) << "tensor " << i;
    }
  }

  std::mt19937 random_;
  const std::unique_ptr<kernels::Device> device_;
  Rank rank_;
  int64_t tokens_ = 0;
  std::vector<int64_t> columns_;
  std::vector<TokenTensor> tensors_;
  std::vector<std::vector<float>> expected_;
};

TEST(ForEachTile, GivesTheSameValuesWhereverTensorsLiveAndHoweverStreamsAreDelayed) {
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    RandomPasses(seed, seed * 7).Execute();
    if (HasFailure()) return;
  }
}

// x on the host, doubled in place on one stream, then squared in place on another.
TEST(ForEachTile, InPlacePassesOnDifferentStreamsChain) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const auto device = TestDevice(seed);
    Rank rank(*device);
    const TokenTensor x = rank.Take(Place::kHost, 23, 3);
    rank.Count(x, 1);
    const auto apply = [&](const RankContext& context, const TileRange& range, auto&& function) {
      const TileAccess in_place{&x, TileUse::kReadWrite, 0, 3};
      EXPECT_TRUE(ForEachTile(context, range, {in_place},
                              [&](int64_t, int64_t, absl::Span<const TensorView> tiles) {
                                context.stream().Submit([tile = tiles[0], function](ExecContext&) {
                                  for (int64_t i = 0; i < tile.num_elements(); ++i)
                                    tile.as<float>()[i] = function(tile.as<float>()[i]);
                                  return absl::OkStatus();
                                });
                                return absl::OkStatus();
                              })
                      .ok());
    };
    apply(rank.context, {0, 23, 4}, [](float value) { return 2 * value; });
    rank.streams.side->Wait(rank.context.stream().Record());
    apply(rank.context.On(*rank.streams.side), {0, 23, 7},
          [](float value) { return value * value; });
    const auto values = rank.Read(x, *rank.streams.copy);
    for (size_t i = 0; i < values.size(); ++i) {
      const float twice = 2 * static_cast<float>(i + 1);
      ASSERT_EQ(values[i], twice * twice) << "seed " << seed << " element " << i;
    }
  }
}

// Passes copies on; after each one from the host a task on the same stream keeps a promise.
class PromisingDevice final : public kernels::Device {
 public:
  explicit PromisingDevice(kernels::Device& device) : device_(device) {}

  std::string name() const override { return device_.name(); }
  kernels::Allocator& allocator() override { return device_.allocator(); }
  kernels::OpTable& ops() override { return device_.ops(); }
  std::unique_ptr<kernels::Stream> CreateStream(std::string name) override {
    return device_.CreateStream(std::move(name));
  }
  kernels::Allocator& host_allocator() override { return device_.host_allocator(); }
  kernels::OpTable& host_ops() override { return device_.host_ops(); }
  std::unique_ptr<kernels::Stream> CreateHostStream(std::string name) override {
    return device_.CreateHostStream(std::move(name));
  }
  void CopyRowsToHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override {
    device_.CopyRowsToHost(copy, stream);
  }
  void CopyRowsFromHost(const kernels::RowsCopy& copy, kernels::Stream& stream) override {
    device_.CopyRowsFromHost(copy, stream);
    stream.Submit([promise = copied[num_copies++]](ExecContext&) {
      promise->set_value();
      return absl::OkStatus();
    });
  }

  std::vector<std::shared_ptr<std::promise<void>>> copied;
  size_t num_copies = 0;

 private:
  kernels::Device& device_;
};

TEST(ForEachTile, CopiesTheNextTileWhileOneIsWorkedOnAndNoLaterOne) {
  const auto plain = TestDevice(1);
  PromisingDevice device(*plain);
  Rank rank(device);
  const TokenTensor x = rank.Take(Place::kHost, 12, 2);
  rank.Count(x, 0);
  for (int i = 0; i < 4; ++i) device.copied.push_back(std::make_shared<std::promise<void>>());
  std::vector<std::shared_future<void>> copied;
  for (const auto& promise : device.copied) copied.push_back(promise->get_future().share());
  const TileAccess in_place{&x, TileUse::kReadWrite, 0, 2};
  EXPECT_TRUE(ForEachTile(rank.context, {0, 12, 3}, {in_place},
                          [&](int64_t begin, int64_t, absl::Span<const TensorView>) {
                            const size_t tile = begin / 3;
                            rank.context.stream().Submit([&copied, tile](ExecContext&) {
                              const auto done = [](const std::shared_future<void>& copy, int s) {
                                return copy.wait_for(std::chrono::seconds(s)) ==
                                       std::future_status::ready;
                              };
                              EXPECT_TRUE(tile == 3 || done(copied[tile + 1], 20)) << tile;
                              EXPECT_FALSE(tile < 2 && done(copied[tile + 2], 0)) << tile;
                              return absl::OkStatus();
                            });
                            return absl::OkStatus();
                          })
                  .ok());
  EXPECT_TRUE(rank.context.stream().Synchronize().ok());
}

TEST(ForEachTile, AnErrorOfTheBodyEndsThePassInOrder) {
  const auto device = *kernels::HostDevice::Create(
      {.arena_bytes = 1 << 20, .host_bytes = 1 << 20, .poison_freed = true},
      std::make_unique<kernels::FillOpTable>());
  Rank rank(*device);
  const TokenTensor x = rank.Take(Place::kHost, 9, 4);
  rank.Count(x, 1);
  std::vector<float> seen;
  std::promise<void> gate;
  const TileAccess read{&x, TileUse::kRead, 1, 2};
  const absl::Status status = ForEachTile(
      rank.context, {2, 9, 3}, {read},
      [&](int64_t begin, int64_t, absl::Span<const TensorView> tiles) -> absl::Status {
        rank.context.stream().Submit([&, tile = tiles[0], begin](ExecContext&) {
          if (begin == 5) gate.get_future().wait();
          seen.insert(seen.end(), tile.as<float>(), tile.as<float>() + tile.num_elements());
          return absl::OkStatus();
        });
        return begin == 5 ? absl::ResourceExhaustedError("no room for tile 2") : absl::OkStatus();
      });
  EXPECT_EQ(status.message(), "no room for tile 2");
  // The tiles are freed by now, and will be poisoned; the last body must find its own all the same.
  const kernels::Event poisoned = rank.streams.copy->Record();
  for (int poll = 0; poll < 1000 && !poisoned.Done(); ++poll) std::this_thread::yield();
  EXPECT_FALSE(poisoned.Done());
  gate.set_value();
  ASSERT_TRUE(rank.context.stream().Synchronize().ok());
  EXPECT_THAT(seen, ElementsAre(10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31));
  EXPECT_TRUE(rank.streams.copy->Synchronize().ok());
}

TEST(ForEachTile, AFailedCopyReachesTheContextsStream) {
  const auto device = TestDevice(4);
  Rank rank(*device);
  const TokenTensor x = rank.Take(Place::kHost, 4, 4);
  rank.streams.copy->Submit([](ExecContext&) { return absl::InternalError("copy engine"); });
  const TileAccess read{&x, TileUse::kRead, 0, 4};
  EXPECT_TRUE(ForEachTile(rank.context, {0, 4, 2}, {read}, [](auto, auto, auto) {
                return absl::OkStatus();
              }).ok());
  EXPECT_EQ(rank.context.stream().Synchronize().message(), "copy engine");
}

absl::Status Nothing(int64_t, int64_t, absl::Span<const TensorView>) { return absl::OkStatus(); }

TEST(ForEachTile, TakesTwoTilesPerHostAccessAndCopiesWhatIsUsed) {
  kernels::DryDevice device("cpu", std::make_unique<kernels::FillOpTable>());
  Rank rank(device);
  const TokenTensor x = rank.Take(Place::kHost, 1000, 64, DType::kBFloat16);
  const TokenTensor y = rank.Take(Place::kHost, 1000, 32);
  const TokenTensor z = rank.Take(Place::kHost, 1000, 16);
  const TokenTensor d = rank.Take(Place::kDevice, 1000, 8);
  EXPECT_EQ(device.host_allocator().stats().current_total_bytes, 1000 * (64 * 2 + 32 * 4 + 16 * 4));
  EXPECT_EQ(device.allocator().stats().current_total_bytes, 1000 * 8 * 4);
  const auto peak = [&](const TileRange& range, const std::vector<TileAccess>& accesses) {
    device.allocator().ResetPeaks();
    device.ResetCounts();
    EXPECT_TRUE(ForEachTile(rank.context, range, accesses, Nothing).ok());
    const kernels::MemoryStats stats = device.allocator().stats();
    EXPECT_EQ(stats.current_total_bytes, 1000 * 8 * 4);
    EXPECT_EQ(stats.peak_total_bytes - 1000 * 8 * 4,
              stats.peak_bytes[static_cast<int>(MemoryTag::kWorkspace)]);
    return stats.peak_bytes[static_cast<int>(MemoryTag::kWorkspace)];
  };
  const std::vector<TileAccess> all = {{&x, TileUse::kReadWrite, 8, 40},
                                       {&y, TileUse::kRead, 0, 32},
                                       {&z, TileUse::kWrite, 15, 1},
                                       {&d, TileUse::kReadWrite, 0, 8}};
  EXPECT_EQ(peak({100, 1000, 128}, all), 2 * 128 * (40 * 2 + 32 * 4 + 1 * 4));
  EXPECT_EQ(device.counts().bytes_from_host, 900 * (40 * 2 + 32 * 4));
  EXPECT_EQ(device.counts().bytes_to_host, 900 * (40 * 2 + 1 * 4));
  EXPECT_EQ(device.counts().copies_from_host, 2 * 8);
  EXPECT_EQ(device.counts().copies_to_host, 2 * 8);
  EXPECT_EQ(peak({100, 200, 100}, all), 100 * (40 * 2 + 32 * 4 + 1 * 4)) << "one tile";
  EXPECT_EQ(peak({0, 1000, 128}, {all[3]}), 0);
  EXPECT_EQ(device.counts().copies_from_host + device.counts().copies_to_host, 0);
  EXPECT_EQ(peak({500, 500, 128}, all), 0);
}

TEST(ForEachTile, DeviceTensorsAreGivenThemselves) {
  const auto device = TestDevice(1);
  Rank rank(*device);
  const TokenTensor x = rank.Take(Place::kDevice, 10, 6);
  const TokenTensor part = TokenTensor::Borrow(
      TensorView::Matrix(x.view().At(0, 2), DType::kFloat32, 10, 3, /*row_stride=*/6));
  const TileAccess access{&part, TileUse::kReadWrite, 1, 2};
  std::vector<void*> seen;
  EXPECT_TRUE(ForEachTile(rank.context, {3, 10, 4}, {access},
                          [&](int64_t, int64_t, absl::Span<const TensorView> tiles) {
                            EXPECT_EQ(tiles[0].stride[0], 6);
                            seen.push_back(tiles[0].data);
                            return absl::OkStatus();
                          })
                  .ok());
  EXPECT_THAT(seen, ElementsAre(x.device().At(3, 3), x.device().At(7, 3)));
}

TEST(ForEachTile, AFullArenaIsAnError) {
  auto device = kernels::HostDevice::Create({.arena_bytes = 1024, .host_bytes = 1 << 16},
                                            std::make_unique<kernels::FillOpTable>());
  ASSERT_TRUE(device.ok());
  Rank rank(**device);
  const TokenTensor x = rank.Take(Place::kHost, 100, 16);
  const absl::Status status =
      ForEachTile(rank.context, {0, 100, 50}, {{&x, TileUse::kRead, 0, 16}}, Nothing);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ((*device)->allocator().stats().current_total_bytes, 0);
}

TEST(CopyTokens, CopiesAcrossAndWithinHostMemoryBehindTheContextsStream) {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const auto device = TestDevice(seed);
    Rank rank(*device);
    const RankContext side = rank.context.On(*rank.streams.side);
    const TokenTensor from = rank.Take(Place::kDevice, 17, 5);
    const TokenTensor first = rank.Take(Place::kHost, 17, 5);
    const TokenTensor second = rank.Take(Place::kHost, 17, 5);
    const TokenTensor to = rank.Take(Place::kDevice, 17, 5);
    rank.Count(from, 3);
    ASSERT_TRUE(CopyTokens(rank.context, from, first).ok());
    ASSERT_TRUE(CopyTokens(side, first, second).ok());
    const auto end = CopyTokens(side, second, to);
    ASSERT_TRUE(end.ok()) << end.status();
    rank.Count(first, 500);
    side.stream().Wait(*end);
    std::vector<float> expected(17 * 5);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] = 3 + static_cast<float>(i);
    EXPECT_EQ(rank.Read(to, side.stream()), expected) << "seed " << seed;
  }
}

TEST(CopyTokens, KeepsTheGapsOfABorrowedMatrix) {
  const auto device = TestDevice(1);
  Rank rank(*device);
  const TokenTensor x = rank.Take(Place::kDevice, 4, 5);
  const TokenTensor host = rank.Take(Place::kHost, 4, 2);
  rank.Count(x, 0);
  const TokenTensor columns =
      TokenTensor::Borrow(TensorView::Matrix(x.view().At(0, 1), DType::kFloat32, 4, 2, 5));
  ASSERT_TRUE(CopyTokens(rank.context, columns, host).ok());
  EXPECT_THAT(rank.Read(host, *rank.streams.copy), ElementsAre(1, 2, 6, 7, 11, 12, 16, 17));
}

TEST(TokenTensorDeathTest, RefusesWhatCannotBe) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  kernels::DryDevice device("cpu", std::make_unique<kernels::FillOpTable>());
  Rank rank(device);
  const TokenTensor host = rank.Take(Place::kHost, 4, 5);
  const TokenTensor here = rank.Take(Place::kDevice, 4, 5);
  const TokenTensor other = rank.Take(Place::kDevice, 4, 4);
  EXPECT_DEATH(host.device(), "no tensor of device memory");
  EXPECT_DEATH(TokenTensor().device(), "no tensor of device memory");
  EXPECT_DEATH((void)CopyTokens(rank.context, here, here), "a copy within device memory");
  EXPECT_DEATH((void)CopyTokens(rank.context, other, host), "copy of 4 x 4 to 4 x 5");
  const auto pass = [&](const TileAccess& access, const TileRange& range) {
    (void)ForEachTile(rank.context, range, {access}, Nothing);
  };
  EXPECT_DEATH(pass({&host, TileUse::kRead, 1, 5}, {0, 4, 2}), "columns 1 \\+ 5 of 5");
  EXPECT_DEATH(pass({&host, TileUse::kRead, 0, 5}, {0, 5, 2}), "tokens to 5 of 4");
  EXPECT_DEATH(pass({&host, TileUse::kRead, 0, 5}, {0, 4, 0}), "tiles of 0");
}

}  // namespace
}  // namespace upipe::engine
