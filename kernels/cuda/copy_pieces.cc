#include "kernels/cuda/copy_pieces.h"

#include <algorithm>

namespace upipe::kernels {
namespace {

// Rows [first, first + rows), bytes [from, from + row_bytes) of each.
RowsCopy Part(const RowsCopy& copy, int64_t first, int64_t rows, int64_t from, int64_t row_bytes) {
  RowsCopy part = copy;
  part.dst = static_cast<char*>(copy.dst) + first * copy.dst_stride + from;
  part.src = static_cast<const char*>(copy.src) + first * copy.src_stride + from;
  part.rows = rows;
  part.row_bytes = row_bytes;
  return part;
}

class Cutter {
 public:
  Cutter(const RowsCopy& copy, bool host_is_dst, const HostBlocks& blocks, int64_t stride_max)
      : copy_(copy),
        host_(static_cast<const char*>(host_is_dst ? copy.dst : copy.src)),
        host_stride_(host_is_dst ? copy.dst_stride : copy.src_stride),
        blocks_(blocks),
        one_by_one_(std::max(copy.dst_stride, copy.src_stride) > stride_max) {}

  std::vector<RowsCopy> Cut() {
    for (int64_t row = 0; row < copy_.rows;) {
      const char* begin = host_ + row * host_stride_;
      const int64_t room = BytesToTheNextBlock(begin);
      if (copy_.row_bytes > room) {
        CutRow(row, room);
        ++row;
        continue;
      }
      int64_t rows = 1;
      if (!one_by_one_) {
        rows = copy_.rows - row;
        // The last row that ends in this block, for rows that do not begin beyond it.
        if (host_stride_ > 0) rows = std::min(rows, (room - copy_.row_bytes) / host_stride_ + 1);
      }
      pieces_.push_back(Part(copy_, row, rows, 0, copy_.row_bytes));
      row += rows;
    }
    return std::move(pieces_);
  }

 private:
  int64_t BytesToTheNextBlock(const char* begin) const {
    if (blocks_.base == nullptr) return INT64_MAX;
    const int64_t offset = begin - static_cast<const char*>(blocks_.base);
    return blocks_.block_bytes - offset % blocks_.block_bytes;
  }

  void CutRow(int64_t row, int64_t room) {
    for (int64_t from = 0; from < copy_.row_bytes;) {
      const int64_t bytes = std::min(copy_.row_bytes - from, room);
      pieces_.push_back(Part(copy_, row, 1, from, bytes));
      from += bytes;
      room = blocks_.block_bytes;
    }
  }

  const RowsCopy copy_;
  const char* const host_;
  const int64_t host_stride_;
  const HostBlocks blocks_;
  const bool one_by_one_;
  std::vector<RowsCopy> pieces_;
};

}  // namespace

std::vector<RowsCopy> CopyPieces(const RowsCopy& copy, bool host_is_dst, const HostBlocks& blocks,
                                 int64_t row_stride_bytes_max) {
  if (copy.bytes() == 0) return {};
  RowsCopy whole = copy;
  if (copy.rows > 1 && copy.dst_stride == copy.row_bytes && copy.src_stride == copy.row_bytes) {
    whole.row_bytes = copy.bytes();
    whole.rows = 1;
  }
  if (whole.rows == 1) whole.dst_stride = whole.src_stride = whole.row_bytes;
  // One row has no stride to be too long.
  return Cutter(whole, host_is_dst, blocks, whole.rows == 1 ? INT64_MAX : row_stride_bytes_max)
      .Cut();
}

}  // namespace upipe::kernels
