// The launchers of the CUDA core as the handlers call them.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/launch.h"
#include "ffi/buffers.h"
#include "xla/ffi/api/ffi.h"

namespace sdm::cuda {

struct Backend {
  struct Context {
    cudaStream_t stream;
    int device;
  };
  using Error = xla::ffi::Error;
  static constexpr bool kOnDevice = true;

  static Error copy(const Context& context, const Copy& copy);
  static Error phase1(const Context& context, const Forward& f);
  static Error solve(const Context& context, const Forward& f);
  static Error gather(const Context& context, const Forward& f);
  static Error take_snapshot(const Context& context, const Forward& f);
  static Error dual_matmul(const Context& context, const Forward& f);
  static Error mover(const Context& context, const Forward& f);
  static Error gather_gradient(const Context& context, const Backward& b);
  static Error du_matmul(const Context& context, const Backward& b);
  static Error write_mover(const Context& context, const Backward& b);
  static Error read_mover(const Context& context, const Backward& b);
  static Error phase1_backward(const Context& context, const Backward& b);
  static Error decode(const Context& context, const Decode& d);
  static Error product_key_topk(const Context& context, const ProductKey& p);
  static Error product_key_topk_backward(const Context& context, const ProductKeyBackward& p);

  // Stages (sdm::gpu::Stage, BackwardStage) of the chunks first .. first + count of a whole call.
  static Error forward(const Context& context, const Forward& f, int64_t stages, int64_t first, int64_t count);
  static Error backward(const Context& context, const Backward& b, int64_t stages, int64_t first, int64_t count);
};

}  // namespace sdm::cuda
