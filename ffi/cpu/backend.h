// The launchers of the CPU: which tasks run side by side, for each custom call.
#pragma once

#include "ffi/buffers.h"
#include "ffi/cpu/kernels.h"
#include "xla/ffi/api/ffi.h"

namespace sdm::cpu {

struct Backend {
  using Context = xla::ffi::ThreadPool;
  using Error = xla::ffi::Error;
  static constexpr bool kOnDevice = false;

  static Error copy(Context& pool, const Copy& copy);
  static Error phase1(Context& pool, const Forward& f);
  static Error solve(Context& pool, const Forward& f);
  static Error gather(Context& pool, const Forward& f);
  static Error take_snapshot(Context& pool, const Forward& f);
  static Error dual_matmul(Context& pool, const Forward& f);
  static Error mover(Context& pool, const Forward& f);
  static Error gather_gradient(Context& pool, const Backward& b);
  static Error du_matmul(Context& pool, const Backward& b);
  static Error write_mover(Context& pool, const Backward& b);
  static Error read_mover(Context& pool, const Backward& b);
  static Error phase1_backward(Context& pool, const Backward& b);
  // `parts`: column ranges that run side by side.
  static Error forward(Context& pool, const Forward& f, int64_t parts);
  static Error backward(Context& pool, const Backward& b);
  static Error decode(Context& pool, const Decode& d);
  static Error product_key_topk(Context& pool, const ProductKey& p);
  static Error product_key_topk_backward(Context& pool, const ProductKeyBackward& p);
};

}  // namespace sdm::cpu
