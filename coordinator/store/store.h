// The seam to durable memory, shaped like etcd so that either can stand behind it: bytes in and
// out, one global revision, conditional batches, ordered keys. MemoryStore is the oracle,
// SqliteStore the real one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace upipe::coordinator {

struct Entry {
  std::string key;
  std::string value;
  int64_t revision = 0;  // of the batch that wrote it last
};

struct Write {
  std::string key;
  std::optional<std::string> value;  // none = delete
  std::optional<int64_t>
      expected_revision;  // applied only if the key has it; 0 = the key must not exist
};

// Applied whole or not at all, and given one revision.
struct Batch {
  std::vector<Write> writes;
};

inline constexpr size_t kMaxBatchWrites = 128;
inline constexpr size_t kMaxBatchBytes = size_t{1} << 20;  // keys and values together

// A consistent copy in the making, in steps small enough to go between commits. Given up when
// destroyed before it is whole. Used by the store's thread, destroyed before the store.
class StoreCopy {
 public:
  virtual ~StoreCopy() = default;
  // Copies some more. True: the copy is whole and holds the store as of now. An error ends the
  // copy and leaves the store unharmed.
  virtual absl::StatusOr<bool> Step() = 0;
};

// Used by one thread at a time.
class Store {
 public:
  virtual ~Store() = default;

  // Makes all batches durable, or none of them, in order, and returns the revision of the last one.
  // Aborted: an expected revision differs; nothing changed. InvalidArgument: a batch is empty,
  // above kMaxBatchWrites or kMaxBatchBytes, or names a key twice; nothing changed. Any other
  // error: what is durable is unknown and the store answers nothing but that error from then on;
  // the process must end and load again.
  virtual absl::StatusOr<int64_t> Commit(absl::Span<const Batch> batches) = 0;

  // Entries whose key starts with `prefix`, ordered by key.
  virtual absl::StatusOr<std::vector<Entry>> List(absl::string_view prefix) = 0;

  // Revision of the last batch; 0 for an empty store.
  virtual int64_t Revision() const = 0;

  // Begins a copy of the store into a new file at `path`. Unimplemented where the store is no file.
  virtual absl::StatusOr<std::unique_ptr<StoreCopy>> StartCopy(const std::string& path) = 0;
};

// The limits every implementation shares.
absl::Status ValidateBatch(const Batch& batch);

}  // namespace upipe::coordinator
