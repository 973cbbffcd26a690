// What commands say on the error stream: sentences for a person, or, with -o json, one JSON object
// a line, so that a program reads errors as surely as answers.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/commands.h"

namespace upipe::client {

// {"error":{"code","reason","domain","message","metadata":{},"field_violations":[]}} on one line.
std::string ErrorJson(const absl::Status& error);

// "upipe: <message>", or what is wrong with the job file or the request, one field a line.
std::string ErrorText(const absl::Status& error);

// Says `error` on `console.err`. Returns the exit code: 2 when the request is wrong, else 1.
int Report(Console& console, const absl::Status& error);

// A remark that ends nothing: "warning: <text>" or "<text>"; {"warning": ..}, {"note": ..} in JSON.
void Warn(Console& console, absl::string_view text);
void Note(Console& console, absl::string_view text);

}  // namespace upipe::client
