// What a dry run adds up instead of computing.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "kernels/api/op_table.h"

namespace upipe::kernels {

struct DryOpCount {
  int64_t calls = 0;
  OpCost cost;

  void Add(const OpCost& call) {
    ++calls;
    cost.flops += call.flops;
    cost.bytes_read += call.bytes_read;
    cost.bytes_written += call.bytes_written;
  }
};

struct DryCounts {
  std::map<std::string, DryOpCount> by_op;  // by NameOf(params)
  DryOpCount total;
  int64_t copies_to_host = 0;
  int64_t bytes_to_host = 0;
  int64_t copies_from_host = 0;
  int64_t bytes_from_host = 0;
};

}  // namespace upipe::kernels
