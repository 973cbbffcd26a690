# What tests any backend's ops: the same sources over cpu, the emulator and a GPU (tools/gpu_check).
set(op_tests adamw_test.cc clip_scale_test.cc column_sum_test.cc cross_entropy_test.cc embedding_test.cc fill_test.cc
  offsets_64bit_test.cc random_normal_test.cc rms_norm_test.cc rope_test.cc row_dot_test.cc strided_copy_test.cc
  sum_of_squares_test.cc swiglu_test.cc
  support/address_space.cc support/attention_case.cc support/finite_difference.cc support/memory.cc
  support/naive_backend.cc support/op_check.cc)
