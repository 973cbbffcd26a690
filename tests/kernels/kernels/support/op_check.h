// Holds a backend to the reference: *the bound* of the project's style, bit identity, untouched
// inputs, poison. Which backend is a matter of linking: every op test runs over that of the
// tested_*.cc beside its program.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/api/op_table.h"
#include "tests/kernels/kernels/support/memory.h"
#include "tests/kernels/kernels/support/tested_backend.h"

namespace upipe::kernels::testing {

// Builds the tensors and the params of one call.
using BuildCall = std::function<OpParams(Memory&)>;

OpTable& Reference();
OpTable& Naive();  // the same-precision yardstick: plain loops

// Runs the call on its own stream with `num_threads` loop threads. The workspace is exactly as
// large as asked for and full of NaN. Damage to anything but results is a test failure.
absl::Status RunCall(OpTable& ops, const OpParams& params, const Memory& memory,
                     int num_threads = 1);

// In fp32 and in bf16 storage: the tested backend against reference within 3 times the error of
// naive plus half an epsilon of the result's dtype (norms taken per result over `seeds` calls, of
// which every other has tensors that begin at 16 bytes): in every variant, and in the best one with
// 3 threads; there the same run twice has the same bits.
void ExpectMatchesReference(const BuildCall& build, int seeds = 4);
// The same in one storage type.
void ExpectMatchesReferenceIn(DType storage, const BuildCall& build, int seeds = 4);
// The same bits as the reference in fp32 and in bf16 storage, with 1 and 3 threads.
void ExpectEqualsReference(const BuildCall& build);
// Every element becomes an integer of [-limit, limit]: sums of them are exact in any order.
void SetSmallIntegers(const TensorView& view, int limit, Memory& memory);
// Reference and tested backend refuse the call while it runs, with this code.
void ExpectBothFail(const BuildCall& build, absl::StatusCode code);

// Every result within *the bound*: 3 times the error of naive plus half an epsilon of its dtype.
void ExpectWithinTheBound(const std::vector<Memory::Result>& results,
                          const std::vector<Memory::Result>& naive,
                          const std::vector<Memory::Result>& reference, const std::string& what);
void ExpectSameBits(const std::vector<Memory::Result>& a, const std::vector<Memory::Result>& b,
                    const std::string& what);

// Calls body() with each storage type.
void ForEachStorage(const std::function<void(DType storage)>& body);

// ||a - b|| / ||b|| over finite elements of b; infinity when any other element differs.
double RelativeError(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace upipe::kernels::testing
