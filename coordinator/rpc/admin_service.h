// The operator's calls on the coordinator itself.
#pragma once

#include "coordinator/runtime/backup.h"
#include "upipe/v1/node_service.grpc.pb.h"

namespace upipe::coordinator {

class AdminServiceReactors : public v1::AdminService::CallbackService {
 public:
  explicit AdminServiceReactors(BackupThread& backups) : backups_(backups) {}
  grpc::ServerWriteReactor<v1::BackupResponse>* Backup(grpc::CallbackServerContext* context,
                                                       const v1::BackupRequest* request) override;

 private:
  BackupThread& backups_;
};

}  // namespace upipe::coordinator
