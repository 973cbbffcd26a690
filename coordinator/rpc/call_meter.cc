#include "coordinator/rpc/call_meter.h"

#include <string>

#include "common/clock.h"

namespace upipe::coordinator {
namespace {

using grpc::experimental::InterceptionHookPoints;

// One call. gRPC destroys it with the call: then it is over, also for those whom no status reached.
class CallMeter : public grpc::experimental::Interceptor {
 public:
  CallMeter(const char* method, const CallMeterFactory::OnCall& on_call)
      : method_(method), on_call_(on_call), begin_(SystemClock().Now()) {}
  ~CallMeter() override { on_call_(method_, code_, SystemClock().Now() - begin_); }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      code_ = static_cast<absl::StatusCode>(methods->GetSendStatus().error_code());
    }
    methods->Proceed();
  }

 private:
  const std::string method_;
  const CallMeterFactory::OnCall& on_call_;
  const BootTime begin_;
  absl::StatusCode code_ = absl::StatusCode::kCancelled;
};

}  // namespace

grpc::experimental::Interceptor* CallMeterFactory::CreateServerInterceptor(
    grpc::experimental::ServerRpcInfo* info) {
  return new CallMeter(info->method(), on_call_);
}

}  // namespace upipe::coordinator
