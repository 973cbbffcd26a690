// The libFuzzer target of the token shard's reader: the bytes as they are, and with their checksums
// put right, for without them nothing comes past the header.
#include "tests/fuzz/data/fuzz_shard_header.h"
#include "tests/unit/data/shard_bytes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  upipe::data::FuzzShardHeader(data, size);
  if (size < sizeof(upipe::data::ShardHeader)) return 0;
  std::string sealed(reinterpret_cast<const char*>(data), size);
  upipe::data::SealShard(sealed);
  upipe::data::FuzzShardHeader(reinterpret_cast<const uint8_t*>(sealed.data()), sealed.size());
  return 0;
}
