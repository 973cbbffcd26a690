#include "client/local/cluster_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace upipe::client {
namespace {

std::string PathIn(const std::string& state_dir) {
  return absl::StrCat(state_dir, "/cluster.json");
}

}  // namespace

std::string ClusterToJson(const LocalCluster& cluster) {
  nlohmann::json daemons = nlohmann::json::array();
  for (const LocalDaemon& daemon : cluster.daemons) {
    daemons.push_back({{"name", daemon.name},
                       {"pid", daemon.process.pid},
                       {"start_ticks", daemon.process.start_ticks},
                       {"boot_id", daemon.process.boot_id},
                       {"log", daemon.log_path}});
  }
  const nlohmann::json json = {{"address", cluster.address}, {"daemons", daemons}};
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

absl::StatusOr<LocalCluster> ClusterFromJson(absl::string_view text) {
  LocalCluster cluster;
  try {
    const nlohmann::json json = nlohmann::json::parse(text.begin(), text.end());
    cluster.address = json.at("address").get<std::string>();
    for (const nlohmann::json& daemon : json.at("daemons")) {
      cluster.daemons.push_back(
          {daemon.at("name").get<std::string>(),
           {daemon.at("pid").get<int>(), daemon.at("start_ticks").get<int64_t>(),
            daemon.at("boot_id").get<std::string>()},
           daemon.at("log").get<std::string>()});
    }
  } catch (const nlohmann::json::exception& error) {
    return absl::DataLossError(absl::StrCat("is no cluster file: ", error.what()));
  }
  return cluster;
}

absl::StatusOr<LocalCluster> ReadCluster(const std::string& state_dir) {
  errno = 0;
  std::ifstream file(PathIn(state_dir));
  if (!file.is_open()) return absl::ErrnoToStatus(errno, PathIn(state_dir));
  absl::StatusOr<LocalCluster> cluster =
      ClusterFromJson(std::string(std::istreambuf_iterator<char>(file), {}));
  if (!cluster.ok()) {
    return absl::Status(cluster.status().code(),
                        absl::StrCat(PathIn(state_dir), " ", cluster.status().message()));
  }
  return cluster;
}

absl::Status WriteCluster(const std::string& state_dir, const LocalCluster& cluster) {
  const std::string path = PathIn(state_dir), next = path + ".next";
  std::ofstream file(next, std::ios::trunc);
  file << ClusterToJson(cluster);
  file.close();
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", next));
  if (rename(next.c_str(), path.c_str()) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot rename to ", path));
  return absl::OkStatus();
}

absl::Status RemoveCluster(const std::string& state_dir) {
  std::error_code error;
  std::filesystem::remove(PathIn(state_dir), error);
  if (error)
    return absl::UnavailableError(
        absl::StrCat("cannot remove ", PathIn(state_dir), ": ", error.message()));
  return absl::OkStatus();
}

}  // namespace upipe::client
