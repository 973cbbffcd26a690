// Against sockets that answer well, late, wrongly or not at all.
#include "client/http_get.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace upipe::client {
namespace {

using testing::HasSubstr;

// Answers one request on loopback with fixed bytes, then closes.
class OneAnswer {
 public:
  explicit OneAnswer(std::string answer) {
    socket_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    EXPECT_EQ(bind(socket_, reinterpret_cast<sockaddr*>(&address), size), 0);
    EXPECT_EQ(listen(socket_, 1), 0);
    EXPECT_EQ(getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size), 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
    thread_ = std::thread([this, answer = std::move(answer)] {
      const int peer = accept(socket_, nullptr, nullptr);
      if (peer < 0) return;
      char chunk[1024];
      while (!absl::EndsWith(request_, "\r\n\r\n")) {
        const ssize_t got = recv(peer, chunk, sizeof(chunk), 0);
        if (got <= 0) break;
        request_.append(chunk, static_cast<size_t>(got));
      }
      if (!answer.empty()) {
        send(peer, answer.data(), answer.size(), MSG_NOSIGNAL);
      } else {  // silence, until the asker leaves
        while (recv(peer, chunk, sizeof(chunk), 0) > 0) {
        }
      }
      close(peer);
    });
  }
  ~OneAnswer() {
    shutdown(socket_, SHUT_RDWR);
    thread_.join();
    close(socket_);
  }
  const std::string& address() const { return address_; }

 private:
  int socket_ = -1;
  std::string address_;
  std::string request_;
  std::thread thread_;
};

TEST(HttpGet, ReturnsTheBody) {
  OneAnswer server("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nupipe_jobs 1\n");
  const auto body = HttpGet(server.address(), "/metrics");
  ASSERT_TRUE(body.ok()) << body.status();
  EXPECT_EQ(*body, "upipe_jobs 1\n");
}

TEST(HttpGet, TakesNoMoreThanItsLimit) {
  OneAnswer server("HTTP/1.1 200 OK\r\n\r\n" + std::string(100'000, 'x'));
  const auto body = HttpGet(server.address(), "/metrics", {.bytes = 1000});
  ASSERT_TRUE(body.ok()) << body.status();
  EXPECT_EQ(body->size(), 1000u - 19u);
}

TEST(HttpGet, SaysWhatWentWrong) {
  OneAnswer wrong("HTTP/1.1 404 Not Found\r\n\r\n");
  EXPECT_THAT(std::string(HttpGet(wrong.address(), "/x").status().message()), HasSubstr("404"));
  OneAnswer other("SSH-2.0-other\r\n");
  EXPECT_FALSE(HttpGet(other.address(), "/x").ok());
  OneAnswer silent("");
  EXPECT_EQ(HttpGet(silent.address(), "/x", {.time = absl::Milliseconds(50)}).status().code(),
            absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(HttpGet("no address", "/x").ok());
  std::string gone;
  {
    OneAnswer ended("x");
    gone = ended.address();
    EXPECT_FALSE(HttpGet(gone, "/x").ok());
  }
  EXPECT_THAT(std::string(HttpGet(gone, "/x").status().message()), HasSubstr(gone));
}

}  // namespace
}  // namespace upipe::client
