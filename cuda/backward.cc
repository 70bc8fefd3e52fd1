// The backward's loop over chunks, last to first.
#include "cuda/common/branches.h"
#include "cuda/launch.h"

namespace sdm::gpu {

int backward_branches(const Backward& b) { return range_branches(b.shape, b.dtype == DType::bf16 ? 2 : 4); }

cudaError_t backward(const Backward& b, int stages, int64_t first, int64_t count, const Branches& branches) {
  const Shape& s = b.shape;
  const Launch whole{branches.streams[0]};
  cudaError_t error = cudaSuccess;
  if (stages & kPrepare) error = read_products(b.chunks, s, b.x, b.qx, s.chunks(), whole);
  if (error == cudaSuccess && stages & kPrepare) {
    error = slot_records(b.in, b.chunks, s, RecordsOf::backward_writes, b.write_records, s.chunks(), whole);
  }
  if (error == cudaSuccess && stages & kPrepare) {
    error = slot_records(b.in, b.chunks, s, RecordsOf::reads, b.read_records, s.chunks(), whole);
  }
  if (error == cudaSuccess && stages & kBackwardSteps) {
    error = for_branches(branches, s, part_slices(s, b.parts), [&](Range range, cudaStream_t stream) {
      bool overlap = false;
      for (int64_t n = first + count - 1; n >= first; --n) {
        for (const auto launcher : {gather_gradient, du_matmul, gradient_mover}) {
          // The matmul has few blocks, and everything waits for them.
          const cudaError_t e = launcher(b, n, range, Launch{stream, overlap, launcher == du_matmul});
          if (e != cudaSuccess) return e;
          overlap = true;
        }
      }
      return cudaSuccess;
    });
  }
  if (error == cudaSuccess && stages & kSquares) error = square_gradients(b, whole);
  if (error == cudaSuccess && stages & kAddParts) error = add_parts(b, whole);
  if (error == cudaSuccess && stages & kPhase1Backward) error = phase1_backward(b, whole);
  return error;
}

}  // namespace sdm::gpu
