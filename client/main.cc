// upipe: the command line. Reads the arguments and the environment, then calls one command; `run`,
// `plan`, `calibrate`, `data` and `verify` are programs of their own beside this one.
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/command_line.h"
#include "client/commands.h"

namespace upipe::client {
namespace {

std::string EnvironmentValue(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// Of `upipe local`.
std::string StateDir() {
  std::string state = EnvironmentValue("XDG_STATE_HOME");
  if (state.empty()) state = absl::StrCat(EnvironmentValue("HOME"), "/.local/state");
  return absl::StrCat(state, "/upipe/local");
}

// The folder this program lies in.
std::string BinaryDir() {
  std::error_code error;
  return std::filesystem::read_symlink("/proc/self/exe", error).parent_path().string();
}

std::optional<TerminalSize> SizeOfTerminal() {
  winsize size = {};
  if (isatty(STDOUT_FILENO) == 0 || EnvironmentValue("TERM") == "dumb") return std::nullopt;
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col < 20) return TerminalSize();
  return TerminalSize{size.ws_col, size.ws_row == 0 ? TerminalSize().lines : size.ws_row};
}

std::optional<size_t> TerminalWidth() {
  const std::optional<TerminalSize> size = SizeOfTerminal();
  return size ? std::optional<size_t>(size->columns) : std::nullopt;
}

int Execute(const std::string& verb, const std::vector<std::string>& arguments) {
  const std::string path = absl::StrCat(BinaryDir(), "/upipe-", verb);
  std::vector<char*> argv = {const_cast<char*>(path.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  execv(path.c_str(), argv.data());
  std::cerr << "upipe: cannot run " << path << ": " << std::strerror(errno) << "\n";
  return kExitFailed;
}

// Of somebody at a terminal.
std::optional<std::string> Ask(const std::string& sentence) {
  std::cerr << sentence << std::flush;
  std::string line;
  if (!std::getline(std::cin, line)) return std::nullopt;
  return line;
}

}  // namespace
}  // namespace upipe::client

int main(int argc, char** argv) {
  using namespace upipe::client;
  CommandLine command_line({UPIPE_VERSION, EnvironmentValue("UPIPE_COORDINATOR"), StateDir(),
                            BinaryDir(), TerminalWidth(), std::cout, std::cerr, ConnectCoordinator,
                            Execute,
                            isatty(STDIN_FILENO) != 0
                                ? std::function<std::optional<std::string>(const std::string&)>(Ask)
                                : nullptr,
                            SizeOfTerminal});
  return command_line.Run({argv + 1, argv + argc});
}
