// The forward's loop over chunks.
#include "cuda/common/branches.h"
#include "cuda/launch.h"

namespace sdm::gpu {
namespace {

bool has_scales(Quant quant) { return quant == Quant::fp8 || quant == Quant::int4; }
bool takes_scales(const Forward& f) { return f.snapshot != nullptr && has_scales(f.quant); }

}  // namespace

int forward_branches(const Forward& f) {
  // A row's scale needs all its columns before the mover writes any.
  if (takes_scales(f) && !splits_streams(f.shape)) return 1;
  return range_branches(f.shape, f.dtype == DType::bf16 ? 2 : 4);
}

namespace {

cudaError_t steps(const Forward& f, int stages, int64_t first, int64_t count, const Branches& branches) {
  if (runs_as_one_kernel(f)) {
    const Launch where{branches.streams[0]};
    // It comes with the last stage. The others have to launch something, or XLA cannot capture them.
    if (!(stages & kMove)) return reset_steps(f, where);
    if (!takes_scales(f)) return forward_steps(f, first, count, where);
    // A row's scale needs all its columns before any is written.
    cudaError_t error = cudaSuccess;
    for (int64_t n = first; n < first + count && error == cudaSuccess; ++n) {
      error = take_snapshot(f, n, Range{0, f.shape.width, 0, f.shape.streams}, where);
      if (error == cudaSuccess) error = forward_steps(f, n, 1, where);
    }
    return error;
  }
  return for_branches(branches, f.shape, 1, [&](Range range, cudaStream_t stream) {
    bool overlap = false;
    const auto run = [&](auto launcher, auto... args) {
      // The matmul has few blocks, and everything waits for them.
      const cudaError_t error = launcher(f, args..., Launch{stream, overlap, launcher == dual_matmul});
      overlap = true;
      return error;
    };
    for (int64_t n = first; n < first + count; ++n) {
      cudaError_t error = cudaSuccess;
      if (stages & kGather) error = run(gather, n, range);
      if (error == cudaSuccess && stages & kDual) error = run(dual_matmul, n, range);
      if (error == cudaSuccess && stages & kMove && takes_scales(f)) error = run(take_snapshot, n, range);
      if (error == cudaSuccess && stages & kMove) error = run(mover, n, range);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

}  // namespace

cudaError_t forward(const Forward& whole, int stages, int64_t first, int64_t count, const Branches& branches) {
  const Launch all_columns{branches.streams[0]};
  Forward f = whole;
  Shape& s = f.shape;
  const bool slabs = (stages & kAllStages) == kAllStages;
  for (int64_t n = first; n < first + count; n += s.stored_chunks) {
    if (slabs) s.first_chunk = n;
    const int64_t held = std::min(s.stored_chunks, (slabs ? first + count : s.chunks()) - s.first_chunk);
    const int64_t taken = slabs ? held : count;
    cudaError_t error = cudaSuccess;
    if (stages & kPhase1) error = phase1(f, held, all_columns);
    if (error == cudaSuccess && stages & kPhase1) {
      error = slot_records(f.in, f.chunks, s, RecordsOf::writes, f.records, held, all_columns);
    }
    if (error == cudaSuccess && stages & kSolve) error = solve(f, held, all_columns);
    if (error == cudaSuccess && stages & kSteps) error = steps(f, stages, n, taken, branches);
    if (error != cudaSuccess || !slabs) return error;
  }
  return cudaSuccess;
}

}  // namespace sdm::gpu
