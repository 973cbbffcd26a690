#include "engine/token_tensor.h"

#include <algorithm>
#include <array>
#include <utility>

#include "common/check.h"
#include "common/status.h"
#include "engine/step_clock.h"

namespace upipe::engine {

using kernels::Buffer;
using kernels::Event;
using kernels::RowsCopy;
using kernels::Stream;
using kernels::TensorView;

absl::StatusOr<TokenTensor> TokenTensor::Allocate(const RankContext& context, Place place,
                                                  kernels::MemoryTag tag, const Shape& shape) {
  const int64_t bytes = shape.tokens * shape.columns * SizeOf(shape.dtype);
  TokenTensor tensor;
  UPIPE_ASSIGN_OR_RETURN(tensor.buffer_, place == Place::kHost ? context.AllocateHost(tag, bytes)
                                                               : context.Allocate(tag, bytes));
  tensor.view_ =
      TensorView::Matrix(tensor.buffer_.data(), shape.dtype, shape.tokens, shape.columns);
  tensor.place_ = place;
  return tensor;
}

TokenTensor TokenTensor::Borrow(const TensorView& matrix) {
  UPIPE_CHECK(matrix.rank == 2 && matrix.stride[1] == 1)
      << "a token tensor of rank " << matrix.rank << " and column stride " << matrix.stride[1];
  TokenTensor tensor;
  tensor.view_ = matrix;
  return tensor;
}

const TensorView& TokenTensor::device() const {
  UPIPE_CHECK(present() && !on_host()) << "no tensor of device memory";
  return view_;
}

namespace {

// Rows of the accessed columns, where the tensor lives.
TensorView PartOf(const TileAccess& access, int64_t begin, int64_t rows) {
  TensorView part = access.tensor->view().Rows(begin, rows);
  part.data = part.At(0, access.first_column);
  part.shape[1] = access.columns;
  return part;
}

void CheckAccess(const TileAccess& access, const TileRange& range) {
  UPIPE_CHECK(access.tensor != nullptr && access.tensor->present()) << "a tile of no tensor";
  const TensorView& view = access.tensor->view();
  UPIPE_CHECK(0 <= access.first_column && 0 <= access.columns &&
              access.first_column + access.columns <= view.shape[1])
      << "columns " << access.first_column << " + " << access.columns << " of " << view.shape[1];
  UPIPE_CHECK(range.end <= view.shape[0]) << "tokens to " << range.end << " of " << view.shape[0];
}

RowsCopy CopyOf(const TensorView& from, const TensorView& to) {
  const int64_t element_bytes = SizeOf(from.dtype);
  return {.dst = to.data,
          .dst_stride = to.stride[0] * element_bytes,
          .src = from.data,
          .src_stride = from.stride[0] * element_bytes,
          .row_bytes = from.shape[1] * element_bytes,
          .rows = from.shape[0]};
}

int64_t RowsAt(const TileRange& range, int64_t begin) {
  return std::min(range.tile_rows, range.end - begin);
}

// A pass that touches host memory. Its tile buffers belong to the copy stream: that stream fills
// them without waiting for the context's stream, and has waited for the last reader when they are
// freed.
class HostTilePass {
 public:
  HostTilePass(const RankContext& context, const TileRange& range,
               absl::Span<const TileAccess> accesses)
      : context_(context),
        copying_(context.On(*context.streams().copy)),
        copy_(copying_.stream()),
        range_(range),
        accesses_(accesses),
        tiles_(accesses.size()) {}

  ~HostTilePass() {
    copy_.Wait(context_.stream().Record());
    const Waiting waiting(context_);
    context_.stream().Wait(copy_.Record());
  }

  absl::Status AllocateTiles() {
    const int64_t rows = RowsAt(range_, range_.begin);
    const bool one_tile = range_.begin + rows == range_.end;
    for (const TileAccess& access : accesses_) {
      if (!access.tensor->on_host()) continue;
      const int64_t bytes = rows * access.columns * SizeOf(access.tensor->view().dtype);
      for (int slot = 0; slot < (one_tile ? 1 : 2); ++slot) {
        UPIPE_ASSIGN_OR_RETURN(Buffer buffer, context_.device().allocator().Allocate(
                                                  kernels::MemoryTag::kWorkspace, bytes, copy_));
        buffers_[slot].push_back(std::move(buffer));
      }
    }
    return absl::OkStatus();
  }

  // Starts the copies of what the tile reads. By then the copy stream has waited for the tile two
  // before, whose buffers these are, and has written it back.
  void Prefetch(int64_t begin) {
    UseTile(begin);
    const Timed offload(copying_, StageName::kOffload);
    for (size_t i = 0; i < accesses_.size(); ++i) {
      if (!accesses_[i].tensor->on_host() || accesses_[i].use == TileUse::kWrite) continue;
      const TensorView part = PartOf(accesses_[i], begin, RowsAt(range_, begin));
      context_.device().CopyRowsFromHost(CopyOf(part, tiles_[i]), copy_);
    }
    ready_[SlotOf(begin)] = copy_.Record();
  }

  // The tile's views, which the context's stream may use from here on.
  absl::Span<const TensorView> Begin(int64_t begin) {
    UseTile(begin);
    const Waiting waiting(context_);
    context_.stream().Wait(ready_[SlotOf(begin)]);
    return tiles_;
  }

  // Starts the copies of what the tile wrote.
  void End(int64_t begin) {
    copy_.Wait(context_.stream().Record());
    const Timed offload(copying_, StageName::kOffload);
    for (size_t i = 0; i < accesses_.size(); ++i) {
      if (!accesses_[i].tensor->on_host() || accesses_[i].use == TileUse::kRead) continue;
      const TensorView part = PartOf(accesses_[i], begin, RowsAt(range_, begin));
      context_.device().CopyRowsToHost(CopyOf(tiles_[i], part), copy_);
    }
  }

 private:
  int SlotOf(int64_t begin) const {
    return static_cast<int>((begin - range_.begin) / range_.tile_rows % 2);
  }

  void UseTile(int64_t begin) {
    auto buffer = buffers_[SlotOf(begin)].begin();
    for (size_t i = 0; i < accesses_.size(); ++i) {
      const TensorView part = PartOf(accesses_[i], begin, RowsAt(range_, begin));
      tiles_[i] =
          accesses_[i].tensor->on_host()
              ? TensorView::Matrix((buffer++)->data(), part.dtype, part.shape[0], part.shape[1])
              : part;
    }
  }

  const RankContext& context_;
  const RankContext copying_;
  Stream& copy_;
  const TileRange range_;
  const absl::Span<const TileAccess> accesses_;
  std::vector<TensorView> tiles_;               // of the tile in use
  std::array<std::vector<Buffer>, 2> buffers_;  // per host access, of even and odd tiles
  std::array<Event, 2> ready_;                  // the slot's tile may be used
};

using TileBody =
    std::function<absl::Status(int64_t begin, int64_t rows, absl::Span<const TensorView> tiles)>;

absl::Status ForEachHostTile(const RankContext& context, const TileRange& range,
                             absl::Span<const TileAccess> accesses, const TileBody& body) {
  HostTilePass pass(context, range, accesses);
  UPIPE_RETURN_IF_ERROR(pass.AllocateTiles());
  pass.Prefetch(range.begin);
  for (int64_t begin = range.begin; begin < range.end; begin += range.tile_rows) {
    const int64_t next = begin + range.tile_rows;
    if (next < range.end) pass.Prefetch(next);
    UPIPE_RETURN_IF_ERROR(body(begin, RowsAt(range, begin), pass.Begin(begin)));
    pass.End(begin);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ForEachTile(const RankContext& context, const TileRange& range,
                         absl::Span<const TileAccess> accesses, const TileBody& body) {
  UPIPE_CHECK(0 <= range.begin && range.begin <= range.end && range.tile_rows > 0)
      << "tokens " << range.begin << " to " << range.end << " in tiles of " << range.tile_rows;
  if (range.begin == range.end) return absl::OkStatus();
  bool any_on_host = false;
  for (const TileAccess& access : accesses) {
    CheckAccess(access, range);
    any_on_host |= access.tensor->on_host();
  }
  if (any_on_host) return ForEachHostTile(context, range, accesses, body);
  std::vector<TensorView> tiles(accesses.size());
  for (int64_t begin = range.begin; begin < range.end; begin += range.tile_rows) {
    for (size_t i = 0; i < accesses.size(); ++i) {
      tiles[i] = PartOf(accesses[i], begin, RowsAt(range, begin));
    }
    UPIPE_RETURN_IF_ERROR(body(begin, RowsAt(range, begin), tiles));
  }
  return absl::OkStatus();
}

absl::StatusOr<Event> CopyTokens(const RankContext& context, const TokenTensor& from,
                                 const TokenTensor& to) {
  UPIPE_CHECK(from.view().shape == to.view().shape && from.view().dtype == to.view().dtype)
      << "copy of " << from.view().shape[0] << " x " << from.view().shape[1] << " to "
      << to.view().shape[0] << " x " << to.view().shape[1];
  UPIPE_CHECK(from.on_host() || to.on_host()) << "a copy within device memory";
  kernels::Device& device = context.device();
  Stream& copy = *context.streams().copy;
  copy.Wait(context.stream().Record());
  const Timed offload(context.On(copy), StageName::kOffload);
  if (from.on_host() && to.on_host()) {
    Stream& host = *context.streams().host;
    host.Wait(copy.Record());
    UPIPE_RETURN_IF_ERROR(device.host_ops().Enqueue(
        kernels::StridedCopyParams{.src = from.view().AsTensor3(), .dst = to.view().AsTensor3()},
        {}, host));
    copy.Wait(host.Record());
  } else if (from.on_host()) {
    device.CopyRowsFromHost(CopyOf(from.view(), to.view()), copy);
  } else {
    device.CopyRowsToHost(CopyOf(from.view(), to.view()), copy);
  }
  return copy.Record();
}

}  // namespace upipe::engine
