#include "client/tar_gzip.h"

#include <zlib.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/status.h"

namespace upipe::client {
namespace {

constexpr size_t kBlockBytes = 512;
constexpr int kGzipWindowBits = 15 + 16;  // the largest window, with gzip's header and checksum
constexpr int kMemoryLevel = 8;           // zlib's default

using Header = std::array<char, kBlockBytes>;

void Put(Header& header, size_t offset, absl::string_view text) {
  std::memcpy(header.data() + offset, text.data(), text.size());
}

// The header block of a regular file; offsets are those of POSIX.1-1988 ustar.
Header HeaderOf(const std::string& path, size_t size, absl::Time time) {
  size_t name_at = 0;
  if (path.size() > 100) {
    name_at = path.find('/', path.size() - 101) + 1;
    UPIPE_CHECK(name_at > 0 && name_at <= 156 && name_at < path.size()) << path;
  }
  Header header = {};
  Put(header, 0, path.substr(name_at));
  Put(header, 100, "0000600");
  Put(header, 108, "0000000");
  Put(header, 116, "0000000");
  Put(header, 124, absl::StrFormat("%011o", size));
  Put(header, 136, absl::StrFormat("%011o", absl::ToUnixSeconds(time)));
  Put(header, 148, "        ");  // the checksum counts as spaces while it is summed
  header[156] = '0';
  Put(header, 257,
      absl::string_view("ustar\0"
                        "00",
                        8));
  if (name_at > 0) Put(header, 345, path.substr(0, name_at - 1));
  uint32_t sum = 0;
  for (const char c : header) sum += static_cast<unsigned char>(c);
  Put(header, 148, absl::StrFormat("%06o", sum));
  header[154] = '\0';
  return header;
}

}  // namespace

struct TarGzip::Stream {
  z_stream z = {};
};

TarGzip::TarGzip(absl::Time time, Sink sink)
    : time_(time), sink_(std::move(sink)), stream_(std::make_unique<Stream>()) {
  UPIPE_CHECK(deflateInit2(&stream_->z, Z_DEFAULT_COMPRESSION, Z_DEFLATED, kGzipWindowBits,
                           kMemoryLevel, Z_DEFAULT_STRATEGY) == Z_OK);
}

TarGzip::~TarGzip() { deflateEnd(&stream_->z); }

absl::Status TarGzip::Deflate(absl::string_view bytes, bool last) {
  if (!status_.ok()) return status_;
  z_stream& z = stream_->z;
  z.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  z.avail_in = static_cast<uInt>(bytes.size());
  std::array<char, 16 << 10> out;
  do {
    z.next_out = reinterpret_cast<Bytef*>(out.data());
    z.avail_out = out.size();
    UPIPE_CHECK(deflate(&z, last ? Z_FINISH : Z_NO_FLUSH) != Z_STREAM_ERROR);
    status_ = sink_(absl::string_view(out.data(), out.size() - z.avail_out));
  } while (status_.ok() && z.avail_out == 0);
  return status_;
}

absl::Status TarGzip::Add(const std::string& path, absl::string_view content) {
  const Header header = HeaderOf(path, content.size(), time_);
  UPIPE_RETURN_IF_ERROR(Deflate(absl::string_view(header.data(), header.size()), false));
  UPIPE_RETURN_IF_ERROR(Deflate(content, false));
  const size_t tail = content.size() % kBlockBytes;
  return tail == 0 ? absl::OkStatus() : Deflate(std::string(kBlockBytes - tail, '\0'), false);
}

absl::Status TarGzip::Finish() { return Deflate(std::string(2 * kBlockBytes, '\0'), true); }

}  // namespace upipe::client
