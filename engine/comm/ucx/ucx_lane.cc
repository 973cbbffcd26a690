#include "engine/comm/ucx/ucx_lane.h"

#include <dlfcn.h>
#include <net/if.h>
#include <signal.h>
#include <ucs/debug/debug.h>

#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/status.h"

namespace upipe::comm {
namespace {

struct ConfigRelease {
  void operator()(ucp_config_t* config) const { ucp_config_release(config); }
};
using Config = std::unique_ptr<ucp_config_t, ConfigRelease>;

// Everything that decides where bytes go is set here, over whatever the environment says.
absl::StatusOr<Config> MakeConfig(const UcxLane::Options& options) {
  ucp_config_t* raw = nullptr;
  if (ucs_status_t status = ucp_config_read(nullptr, nullptr, &raw); status != UCS_OK) {
    return UcxError("reading UCX's defaults", status);
  }
  Config config(raw);
  std::vector<std::pair<const char*, std::string>> settings = {
      {"TLS", options.transports},
      {"NET_DEVICES", options.devices},
      {"RNDV_THRESH", "16k"},
  };
  if (options.reports_peer_errors) {
    // Or reaching a peer that is not there blocks this thread for minutes, each.
    settings.emplace_back("CONN_NB", "y");
    // One event at a time: of several at once, the first may close what a later one is about, and
    // UCX ends the process in an assertion.
    settings.emplace_back("MAX_POLL", "1");
  }
  for (const auto& [name, value] : settings) {
    if (ucs_status_t status = ucp_config_modify(config.get(), name, value.c_str());
        status != UCS_OK) {
      return UcxError(absl::StrCat("setting UCX_", name, "=", value), status);
    }
  }
  return config;
}

// UCX prints what is wrong with a device; we return it.
absl::Status CheckInterfaces(const std::string& devices) {
  if (devices == "all") return absl::OkStatus();
  for (const absl::string_view name : absl::StrSplit(devices, ',')) {
    if (if_nametoindex(std::string(name).c_str()) != 0) continue;
    std::vector<std::string> known;
    struct if_nameindex* const table = if_nameindex();
    for (auto* entry = table; entry != nullptr && entry->if_index != 0; ++entry)
      known.push_back(entry->if_name);
    if_freenameindex(table);
    return absl::InvalidArgumentError(
        absl::StrCat("no network interface \"", name,
                     "\" here for tcp between nodes; there are: ", absl::StrJoin(known, ", ")));
  }
  return absl::OkStatus();
}

// A crash is the process's own to report. UCX hooked these while it was being loaded, unless it was
// told not to.
void RestoreSignalHandlers() {
  for (int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) {
    struct sigaction now = {};
    Dl_info library = {};
    sigaction(signal, nullptr, &now);
    const bool hooked = dladdr(reinterpret_cast<void*>(now.sa_sigaction), &library) != 0 &&
                        absl::StrContains(library.dli_fname, "libucs");
    if (hooked) ucs_debug_disable_signal(signal);
  }
}

}  // namespace

absl::Status UcxError(const std::string& what, ucs_status_t status) {
  return absl::UnavailableError(absl::StrCat(what, ": ", ucs_status_string(status)));
}

absl::StatusOr<std::unique_ptr<UcxLane>> UcxLane::Create(const Options& options) {
  std::unique_ptr<UcxLane> lane(new UcxLane(options));
  UPIPE_RETURN_IF_ERROR(lane->Open());
  return lane;
}

absl::Status UcxLane::Open() {
  const std::string wires =
      absl::StrCat("UCX over ", options_.transports, " (devices ", options_.devices, ")");
  UPIPE_RETURN_IF_ERROR(CheckInterfaces(options_.devices));
  UPIPE_ASSIGN_OR_RETURN(Config config, MakeConfig(options_));
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
  if (ucs_status_t status = ucp_init(&params, config.get(), &context_); status != UCS_OK) {
    return UcxError(absl::StrCat(wires, ": opening a context"), status);
  }
  // Once for all ranks of a process: they open their lanes at the same time.
  static std::once_flag restored;
  std::call_once(restored, RestoreSignalHandlers);
  ucp_worker_params_t worker_params = {};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  if (ucs_status_t status = ucp_worker_create(context_, &worker_params, &worker_);
      status != UCS_OK) {
    return UcxError(absl::StrCat(wires, ": creating a worker"), status);
  }
  if (ucs_status_t status = ucp_worker_get_efd(worker_, &event_fd_); status != UCS_OK) {
    return UcxError(absl::StrCat(wires, ": getting the event descriptor"), status);
  }
  ucp_address_t* address = nullptr;
  size_t length = 0;
  if (ucs_status_t status = ucp_worker_get_address(worker_, &address, &length); status != UCS_OK) {
    return UcxError(absl::StrCat(wires, ": getting the address"), status);
  }
  address_.assign(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker_, address);
  return absl::OkStatus();
}

UcxLane::~UcxLane() {
  if (worker_ != nullptr) ucp_worker_destroy(worker_);
  if (context_ != nullptr) ucp_cleanup(context_);
}

absl::StatusOr<ucp_ep_h> UcxLane::Connect(const std::string& address, ucp_err_handler_cb_t on_error,
                                          void* argument) {
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_NONE;
  if (options_.reports_peer_errors) {
    params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    params.err_handler = {on_error, argument};
  }
  ucp_ep_h endpoint = nullptr;
  if (ucs_status_t status = ucp_ep_create(worker_, &params, &endpoint); status != UCS_OK) {
    return UcxError(absl::StrCat("connecting over ", options_.transports), status);
  }
  return endpoint;
}

}  // namespace upipe::comm
