#include "ffi/cuda/backend.h"

#include <algorithm>
#include <string>

#include "ffi/cuda/side_streams.h"

namespace sdm::cuda {
namespace {

using xla::ffi::Error;

Error status(cudaError_t error) {
  if (error == cudaSuccess) return Error::Success();
  return Error::Internal(std::string("sdm_jax: a CUDA launch failed: ") + cudaGetErrorString(error));
}

// The current device is the stream's while this lives.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    cudaGetDevice(&before_);
    if (device != before_) cudaSetDevice(device);
    changed_ = device != before_;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

template <class Params, class F>
Error run(const Backend::Context& context, const Params& params, F&& f) {
  if (params.dtype == DType::f64) {
    return Error::InvalidArgument("sdm_jax: the CUDA kernels serve float32 and bfloat16 banks");
  }
  const OnDevice device(context.device);
  return status(f(gpu::Launch{context.stream}));
}

Error too_many_factors() {
  return Error::InvalidArgument("sdm_jax: the CUDA kernels take at most " + std::to_string(kMostFactors) + " factors");
}

gpu::Range everything(const Shape& s) { return {0, s.width, 0, s.streams}; }

cudaError_t zero(void* values, int64_t count, gpu::Launch where) {
  return cudaMemsetAsync(values, 0, static_cast<size_t>(count) * sizeof(float), where.stream);
}

}  // namespace

Error Backend::copy(const Context& context, const Copy& copy) {
  const OnDevice device(context.device);
  return status(cudaMemcpyAsync(copy.to, copy.from, copy.bytes, cudaMemcpyDeviceToDevice, context.stream));
}

Error Backend::phase1(const Context& context, const Forward& f) {
  return run(context, f, [&](gpu::Launch where) { return gpu::phase1(f, f.shape.stored_chunks, where); });
}

Error Backend::solve(const Context& context, const Forward& f) {
  return run(context, f, [&](gpu::Launch where) { return gpu::solve(f, f.shape.stored_chunks, where); });
}

Error Backend::gather(const Context& context, const Forward& f) {
  return run(context, f, [&](gpu::Launch where) { return gpu::gather(f, 0, everything(f.shape), where); });
}

Error Backend::take_snapshot(const Context& context, const Forward& f) {
  return run(context, f, [&](gpu::Launch where) { return gpu::take_snapshot(f, 0, everything(f.shape), where); });
}

Error Backend::dual_matmul(const Context& context, const Forward& f) {
  return run(context, f, [&](gpu::Launch where) { return gpu::dual_matmul(f, 0, everything(f.shape), where); });
}

Error Backend::mover(const Context& context, const Forward& f) {
  return run(context, f, [&](gpu::Launch where) { return gpu::mover(f, 0, everything(f.shape), where); });
}

Error Backend::gather_gradient(const Context& context, const Backward& b) {
  return run(context, b, [&](gpu::Launch where) { return gpu::gather_gradient(b, 0, everything(b.shape), where); });
}

Error Backend::du_matmul(const Context& context, const Backward& b) {
  return run(context, b, [&](gpu::Launch where) {
    cudaError_t error = gpu::read_products(b.chunks, b.shape, b.x, b.qx, 1, where);
    if (error == cudaSuccess) error = gpu::du_matmul(b, 0, everything(b.shape), where);
    if (error == cudaSuccess) error = gpu::square_gradients(b, where);
    return error;
  });
}

Error Backend::write_mover(const Context& context, const Backward& b) {
  return run(context, b, [&](gpu::Launch where) {
    const Shape& s = b.shape;
    // Entries and slots that no list names.
    cudaError_t error = zero(b.dk_eff, s.streams * s.tokens * s.writes, where);
    if (error == cudaSuccess) error = zero(b.dk_carry, s.streams * s.tokens * s.writes, where);
    if (error == cudaSuccess) error = zero(b.ddecay, s.streams * s.write_slots, where);
    if (error == cudaSuccess) error = gpu::write_mover(b, 0, everything(s), where);
    return error;
  });
}

Error Backend::read_mover(const Context& context, const Backward& b) {
  return run(context, b, [&](gpu::Launch where) {
    const Shape& s = b.shape;
    cudaError_t error = zero(b.dq_eff, s.streams * s.tokens * s.reads, where);
    if (error == cudaSuccess) error = gpu::read_mover(b, 0, everything(s), where);
    return error;
  });
}

Error Backend::phase1_backward(const Context& context, const Backward& b) {
  return run(context, b, [&](gpu::Launch where) { return gpu::phase1_backward(b, where); });
}

Error Backend::decode(const Context& context, const Decode& d) {
  return run(context, d, [&](gpu::Launch where) { return gpu::decode(d, where); });
}

Error Backend::product_key_topk(const Context& context, const ProductKey& p) {
  if (p.num_factors > kMostFactors) return too_many_factors();
  return run(context, p, [&](gpu::Launch where) { return gpu::product_key_topk(p, where); });
}

Error Backend::product_key_topk_backward(const Context& context, const ProductKeyBackward& p) {
  if (p.num_factors > kMostFactors) return too_many_factors();
  return run(context, p, [&](gpu::Launch where) { return gpu::product_key_topk_backward(p, where); });
}

Error Backend::forward(const Context& context, const Forward& f, int64_t stages, int64_t first, int64_t count) {
  return run(context, f, [&](gpu::Launch where) {
    const BorrowedStreams side(context.device, where.stream);
    if (side.error() != cudaSuccess) return side.error();
    const gpu::Branches branches{std::min(kMostBranches, gpu::forward_branches(f)), side.streams(), side.events()};
    return gpu::forward(f, static_cast<int>(stages), first, count, branches);
  });
}

Error Backend::backward(const Context& context, const Backward& b, int64_t stages, int64_t first, int64_t count) {
  return run(context, b, [&](gpu::Launch where) {
    const BorrowedStreams side(context.device, where.stream);
    if (side.error() != cudaSuccess) return side.error();
    const gpu::Branches branches{std::min(kMostBranches, gpu::backward_branches(b)), side.streams(), side.events()};
    return gpu::backward(b, static_cast<int>(stages), first, count, branches);
  });
}

}  // namespace sdm::cuda
