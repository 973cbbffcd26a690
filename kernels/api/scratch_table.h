// What libraries behind ops were found to take as scratch, by op and shape, where that is not what
// their formulas say: another version than the formulas are of. Dry and real device answer
// WorkspaceBytes by the same table. Pure.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/api/op_table.h"

namespace upipe::kernels {

// Calls of one op that a library needs as much scratch for: names and sizes, no addresses.
struct ScratchShape {
  std::string op;
  std::vector<int64_t> sizes;
  auto operator<=>(const ScratchShape&) const = default;
};

// Of an op that a library may do: a matrix product, [m, n, k, storage, out], or an attention,
// [queries, heads, head_dim, keys, K/V heads, storage], forward also [.., out, merge]. Nothing for
// the others, whose scratch our own code takes.
std::optional<ScratchShape> ScratchShapeOf(const OpParams& params);

class ScratchTable {
 public:
  struct Bytes {
    int64_t counted = 0;   // by the formulas, in the call that takes most
    int64_t measured = 0;  // the most over all calls of the shape
    bool exceeds() const { return measured > counted; }
  };

  void Add(const ScratchShape& shape, const Bytes& bytes);
  // Scratch to give a call that formulas count `counted` for, never less than that: what was
  // measured for its shape; for a shape nobody measured, as much more as the worst of its op took.
  int64_t BytesFor(const OpParams& params, int64_t counted) const;

  bool empty() const { return bytes_.empty(); }
  const std::map<ScratchShape, Bytes>& bytes() const { return bytes_; }

 private:
  std::map<ScratchShape, Bytes> bytes_;
  std::map<std::string, double> worst_;  // by op: measured over counted, where more
};

// `ops` with scratch by the table, or `ops` itself where that is empty.
std::unique_ptr<OpTable> WithMeasuredScratch(std::unique_ptr<OpTable> ops, ScratchTable table);

}  // namespace upipe::kernels
