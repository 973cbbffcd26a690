// Early-return macros over absl::Status. Errors a user or the environment can cause are Status
// values; broken invariants are UPIPE_CHECK (common/check.h).
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define UPIPE_STATUS_CONCAT_INNER(a, b) a##b
#define UPIPE_STATUS_CONCAT(a, b) UPIPE_STATUS_CONCAT_INNER(a, b)

// Evaluates `expr` (an absl::Status); returns it from the enclosing function unless OK.
#define UPIPE_RETURN_IF_ERROR(expr)                \
  do {                                             \
    absl::Status upipe_status_ = (expr);           \
    if (!upipe_status_.ok()) return upipe_status_; \
  } while (false)

// UPIPE_ASSIGN_OR_RETURN(auto x, F()): binds the value of a StatusOr or returns its status.
#define UPIPE_ASSIGN_OR_RETURN(lhs, expr) \
  UPIPE_ASSIGN_OR_RETURN_INNER(UPIPE_STATUS_CONCAT(upipe_statusor_, __LINE__), lhs, expr)
#define UPIPE_ASSIGN_OR_RETURN_INNER(var, lhs, expr) \
  auto var = (expr);                                 \
  if (!var.ok()) return std::move(var).status();     \
  lhs = *std::move(var)
