// Matrices of the rank's tokens, [tokens, columns], that live on the device or in host memory, and
// the one way to work on them whatever the place: tile by tile, host tiles copied through the
// device on the copy stream, the next while this one is worked on.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/rank_context.h"

namespace upipe::engine {

class TokenTensor {
 public:
  struct Shape {
    int64_t tokens = 0;
    int64_t columns = 0;
    kernels::DType dtype = kernels::DType::kFloat32;
  };

  TokenTensor() = default;
  // Device memory under `tag` for the context's stream, or host memory under `tag`.
  static absl::StatusOr<TokenTensor> Allocate(const RankContext& context, Place place,
                                              kernels::MemoryTag tag, const Shape& shape);
  // Device memory of somebody else.
  static TokenTensor Borrow(const kernels::TensorView& matrix);

  bool present() const { return view_.present(); }
  bool on_host() const { return place_ == Place::kHost; }
  // [tokens, columns]. In host memory only copies and host ops may touch it.
  const kernels::TensorView& view() const { return view_; }
  // [tokens, columns] of a device tensor.
  const kernels::TensorView& device() const;

 private:
  kernels::Buffer buffer_;
  kernels::TensorView view_;
  Place place_ = Place::kDevice;
};

enum class TileUse : uint8_t { kRead, kWrite, kReadWrite };

// Some columns of a tensor, as one pass over its tokens uses them.
struct TileAccess {
  const TokenTensor* tensor = nullptr;
  TileUse use = TileUse::kRead;
  int64_t first_column = 0;
  int64_t columns = 0;
};

inline TileAccess AllColumns(const TokenTensor& tensor, TileUse use) {
  return {.tensor = &tensor, .use = use, .columns = tensor.view().shape[1]};
}

// Tokens [begin, end), tile_rows at a time, ascending.
struct TileRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t tile_rows = 0;
};

// body(begin, rows, tiles): tiles[i] is [rows, columns] of accesses[i] in device memory: the tensor
// itself, or a copy of the host's (with kWrite, memory to fill). Enqueues on the context's stream;
// what the body enqueued has reached host memory when later work of the copy stream starts, and
// later work of the context's stream waits for the copies of this pass. Two tiles per host access
// (one where the range is one tile) are taken, tag workspace, for the length of the call; device
// tensors cost neither memory nor copies nor waits.
absl::Status ForEachTile(
    const RankContext& context, const TileRange& range, absl::Span<const TileAccess> accesses,
    const std::function<absl::Status(int64_t begin, int64_t rows,
                                     absl::Span<const kernels::TensorView> tiles)>& body);

// to = from over all tokens, on the copy stream, which waits for what the context's stream has
// enqueued so far. One of the two lives on the host, or both do. The context's stream does not
// wait: the event is the copy's end. The caller keeps both alive until then.
absl::StatusOr<kernels::Event> CopyTokens(const RankContext& context, const TokenTensor& from,
                                          const TokenTensor& to);

}  // namespace upipe::engine
