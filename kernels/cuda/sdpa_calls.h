// An attention call as calls of cuDNN's scaled dot-product attention: which rows and heads go
// together, and which mask describes them. Pure; no CUDA headers.
//
// cuDNN knows causal masks whose diagonal begins in the top left or ends in the bottom right
// corner, a left bound beside them, and batches of documents that lie behind one another in memory
// (ragged). Runs of queries and keys at any two places are cut until that is enough. Where the mask
// bounds the documents to come, every call is ragged, and its plan is the same whatever documents
// there are; but for the rectangles of a window that does not begin at its run's end. Windows
// without causality, and what is not bf16, are left to the own kernel.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/api/op_params.h"

namespace upipe::kernels {

// Half-open ranges of rows of q and of k.
struct SdpaPiece {
  int64_t query = 0;
  int64_t query_end = 0;
  int64_t key = 0;
  int64_t key_end = 0;

  int64_t queries() const { return query_end - query; }
  int64_t keys() const { return key_end - key; }
  bool operator==(const SdpaPiece&) const = default;
};

// Row i of a piece sees its key j: not causal, all; causal, j <= i + shift, where shift is 0 or,
// with bottom_right, keys - queries. With left, only j > i + shift - left.
struct SdpaMask {
  bool causal = false;
  bool bottom_right = false;
  std::optional<int64_t> left;

  auto operator<=>(const SdpaMask&) const = default;
};

// Query heads [head, head + heads) over K/V heads [kv_head, kv_head + kv_heads) of a list of those
// that the op reads, in order; kv_slots[i] is where the i-th of them lies.
struct SdpaHeads {
  int head = 0;
  int heads = 1;
  std::vector<int32_t> kv_slots;  // evenly spaced
  int64_t slot_step() const { return kv_slots.size() > 1 ? kv_slots[1] - kv_slots[0] : 1; }
};

struct SdpaCall {
  SdpaMask mask;
  SdpaHeads heads;
  std::vector<SdpaPiece> pieces;  // ascending
  bool ragged = false;            // a batch of the pieces, lengths in device memory
};

// How one attention op is done.
struct SdpaCalls {
  std::vector<SdpaCall> calls;  // no query head has a row in two of them
  // Ranges of rows of q, the same for every head: those in some piece, and those that see no key.
  struct Rows {
    int64_t begin = 0;
    int64_t end = 0;
    bool operator==(const Rows&) const = default;
  };
  std::vector<Rows> seeing, blind;
};

// Documents of one ragged call. More are several calls.
inline constexpr int64_t kSdpaDocumentsMax = 512;
// Device memory for their lengths and offsets.
inline constexpr int64_t kSdpaTableBytes = int64_t{48} << 10;

// Whether cuDNN takes the call; otherwise the own kernel does.
bool SdpaTakes(const AttentionFwdParams& p);
bool SdpaTakes(const AttentionBwdParams& p);

SdpaCalls SdpaCallsOf(const AttentionFwdParams& p);
SdpaCalls SdpaCallsOf(const AttentionBwdParams& p);

// The smallest of a few sizes that holds `count`: batches and lengths of ragged plans, so that
// packed documents need few of them.
int64_t SdpaBatch(int64_t documents);
int64_t SdpaLength(int64_t longest, int64_t rows);

}  // namespace upipe::kernels
