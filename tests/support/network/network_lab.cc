#include "tests/support/network/network_lab.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"

namespace upipe::testing {
namespace {

std::string PathOf(int descriptor) { return absl::StrCat("/proc/", getpid(), "/fd/", descriptor); }

// On a thread of its own: a thread that has moved to another namespace cannot be used further.
void OnThread(const std::function<void()>& work) { std::thread(work).join(); }

absl::StatusOr<int> MakeNamespace() {
  int descriptor = -1;
  int error = 0;
  OnThread([&] {
    if (unshare(CLONE_NEWNET) == 0)
      descriptor = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    error = errno;
  });
  if (descriptor >= 0) return descriptor;
  return absl::UnavailableError(
      absl::StrCat("cannot make a network namespace (", std::strerror(error), "); root can"));
}

std::string ReadAll(int descriptor) {
  std::string text;
  char buffer[4096];
  lseek(descriptor, 0, SEEK_SET);
  for (ssize_t count; (count = read(descriptor, buffer, sizeof buffer)) > 0;)
    text.append(buffer, static_cast<size_t>(count));
  return text;
}

// Runs commands of the program `ip`, one a line, inside the namespace.
absl::Status Ip(int name_space, const std::string& commands) {
  const int in = memfd_create("commands", MFD_CLOEXEC);
  const int out = memfd_create("output", MFD_CLOEXEC);
  if (in < 0 || out < 0 || write(in, commands.data(), commands.size()) < 0)
    return absl::UnavailableError("no memory files");
  lseek(in, 0, SEEK_SET);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    if (setns(name_space, CLONE_NEWNET) == 0) execlp("ip", "ip", "-batch", "-", nullptr);
    _exit(127);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  const std::string said = ReadAll(out);
  close(in);
  close(out);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return absl::OkStatus();
  return absl::UnavailableError(
      WIFEXITED(status) && WEXITSTATUS(status) == 127
          ? "cannot run `ip` in a network namespace; the package iproute2 has it"
          : absl::StrCat("`ip` failed:\n", commands, "with: ", said));
}

std::string Port(int host, int network) { return absl::StrCat("port", host, "n", network); }

std::string Hardware(int host, int network) {
  return absl::StrFormat("02:00:00:00:%02x:%02x", network, host);
}

}  // namespace

absl::StatusOr<std::unique_ptr<NetworkLab>> NetworkLab::Create(int num_hosts, int num_networks) {
  std::unique_ptr<NetworkLab> lab(new NetworkLab);
  UPIPE_RETURN_IF_ERROR(lab->Build(num_hosts, num_networks));
  return lab;
}

NetworkLab::~NetworkLab() {
  for (int host : hosts_) close(host);
  if (switch_ >= 0) close(switch_);
}

absl::Status NetworkLab::Build(int num_hosts, int num_networks) {
  UPIPE_ASSIGN_OR_RETURN(switch_, MakeNamespace());
  std::string commands;
  for (int network = 0; network < num_networks; ++network) {
    absl::StrAppend(&commands, "link add bridge", network, " type bridge\n", "link set bridge",
                    network, " up\n");
  }
  UPIPE_RETURN_IF_ERROR(Ip(switch_, commands));
  for (int host = 0; host < num_hosts; ++host) {
    UPIPE_ASSIGN_OR_RETURN(const int name_space, MakeNamespace());
    hosts_.push_back(name_space);
    std::string inside = "link set lo up\n";
    for (int network = 0; network < num_networks; ++network) {
      const std::string port = Port(host, network);
      UPIPE_RETURN_IF_ERROR(
          Ip(switch_,
             absl::StrCat("link add ", port, " type veth peer name net", network, " address ",
                          Hardware(host, network), " netns ", PathOf(name_space), "\n", "link set ",
                          port, " master bridge", network, "\n", "link set ", port, " up\n")));
      absl::StrAppend(&inside, "addr add ", Address(host, network), "/24 dev net", network, "\n",
                      "link set net", network, " up\n");
      for (int peer = 0; peer < num_hosts; ++peer) {
        if (peer == host) continue;
        absl::StrAppend(&inside, "neigh add ", Address(peer, network), " lladdr ",
                        Hardware(peer, network), " dev net", network, "\n");
      }
    }
    UPIPE_RETURN_IF_ERROR(Ip(name_space, inside));
  }
  return absl::OkStatus();
}

std::string NetworkLab::Address(int host, int network) {
  return absl::StrCat("10.77.", network, ".", host + 1);
}

std::vector<std::string> NetworkLab::On(int host) const {
  return {"nsenter", absl::StrCat("--net=", PathOf(hosts_[host])),     "unshare", "--mount", "sh",
          "-c",      "mount -t sysfs sysfs /sys && exec \"$0\" \"$@\""};
}

absl::Status NetworkLab::Cut(int host, int network) const {
  return Ip(switch_, absl::StrCat("link set ", Port(host, network), " nomaster\n"));
}

absl::Status NetworkLab::Join(int host, int network) const {
  return Ip(switch_,
            absl::StrCat("link set ", Port(host, network), " master bridge", network, "\n"));
}

int64_t NetworkLab::BytesSent(int host, int network) const {
  const std::string name = absl::StrCat("net", network, ":");
  int64_t bytes = 0;
  OnThread([&] {
    if (setns(hosts_[host], CLONE_NEWNET) != 0) return;
    std::ifstream table("/proc/thread-self/net/dev");
    for (std::string line; std::getline(table, line);) {
      std::istringstream words(line);
      std::string word;
      if (!(words >> word) || word != name) continue;
      constexpr int kSentColumn = 8;  // of the numbers, from 0
      for (int column = 0; column < kSentColumn; ++column) words >> word;
      words >> bytes;
    }
  });
  return bytes;
}

}  // namespace upipe::testing
