// The launchers of the CUDA core. They never allocate, synchronize or throw; what they launch can be
// captured into a graph. float32 and bfloat16 banks.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/sdm.h"

namespace sdm::gpu {

// Where a kernel goes. `overlap`: it may start while the kernel before it in the stream ends
// (programmatic dependent launch); only between kernels of this core. `urgent`: its blocks come before those of other
// kernels that wait for a place on the device.
struct Launch {
  cudaStream_t stream = nullptr;
  bool overlap = false;
  bool urgent = false;
};

// Columns [begin, end) of the rows of some streams; begin is a multiple of slice_columns. Neither columns nor
// streams meet in Phase 2.
struct Range {
  int64_t begin;
  int64_t end;
  int64_t first_stream;
  int64_t streams;
};

// Chunks first_chunk .. first_chunk + count of every stream, all side by side.
cudaError_t phase1(const Forward& f, int64_t count, Launch where);
cudaError_t solve(const Forward& f, int64_t count, Launch where);
// The 16-byte records that the movers read: of written slots with k_carry, for the forward; of written slots
// with k_eff and of read slots with q_eff, for the backward.
enum class RecordsOf { writes, backward_writes, reads };
cudaError_t slot_records(const Inputs& in, const Chunks& chunks, const Shape& s, RecordsOf of, void* records,
                         int64_t count, Launch where);
// QX = QK X only, for the backward.
cudaError_t read_products(const Chunks& chunks, const Shape& s, const void* x, void* qx, int64_t count, Launch where);

// One chunk of every stream.
cudaError_t gather(const Forward& f, int64_t n, Range range, Launch where);
cudaError_t take_snapshot(const Forward& f, int64_t n, Range range, Launch where);
cudaError_t dual_matmul(const Forward& f, int64_t n, Range range, Launch where);
cudaError_t mover(const Forward& f, int64_t n, Range range, Launch where);
cudaError_t gather_gradient(const Backward& b, int64_t n, Range range, Launch where);
// du into `dv`, not yet scaled by beta.
cudaError_t du_matmul(const Backward& b, int64_t n, Range range, Launch where);
cudaError_t write_mover(const Backward& b, int64_t n, Range range, Launch where);
cudaError_t read_mover(const Backward& b, int64_t n, Range range, Launch where);

// Both at once, with the records of both lists.
cudaError_t gradient_mover(const Backward& b, int64_t n, Range range, Launch where);

// All of these of chunks first .. first + count in one kernel, for the calls that `runs_as_one_kernel` names. It counts
// in `inter`, which it leaves undefined.
bool runs_as_one_kernel(const Forward& f);
cudaError_t forward_steps(const Forward& f, int64_t first, int64_t count, Launch where);
// Only sets its counters to zero.
cudaError_t reset_steps(const Forward& f, Launch where);

// All chunks side by side: what the columns together give to A, QK and beta; scales du in `dv` to dv.
cudaError_t square_gradients(const Backward& b, Launch where);
// Adds the `parts` of the dots into part 0, in order.
cudaError_t add_parts(const Backward& b, Launch where);
cudaError_t phase1_backward(const Backward& b, Launch where);

// With `overlap` it reads all but the bank while kernels ahead of it still run, back to the last one that was launched
// without: none of them may write its tokens.
cudaError_t decode(const Decode& d, Launch where);

// float32 and bfloat16 scores, at most kMostFactors factors.
cudaError_t product_key_topk(const ProductKey& p, Launch where);
cudaError_t product_key_topk_backward(const ProductKeyBackward& p, Launch where);

// Streams on which ranges run side by side: `streams[0]` is the caller's, which all others
// start after and end before; `events` has one more than `streams`.
struct Branches {
  int count = 1;
  const cudaStream_t* streams = nullptr;
  const cudaEvent_t* events = nullptr;
};

enum Stage : int {
  kPhase1 = 1,
  kSolve = 2,
  kGather = 4,
  kDual = 8,
  kMove = 16,
  kSteps = kGather | kDual | kMove,
  kAllStages = kPhase1 | kSolve | kSteps,
};
enum BackwardStage : int { kPrepare = 1, kBackwardSteps = 2, kSquares = 4, kAddParts = 8, kPhase1Backward = 16 };

// Parts of a whole call: the stages of chunks first .. first + count. With all of its stages the forward
// takes slabs of as many chunks as the arrays hold, one after another; else kPhase1 and kSolve are those
// of the chunks that the arrays hold.
cudaError_t forward(const Forward& f, int stages, int64_t first, int64_t count, const Branches& branches);
cudaError_t backward(const Backward& b, int stages, int64_t first, int64_t count, const Branches& branches);

// Branches that a call is best split into.
int forward_branches(const Forward& f);
int backward_branches(const Backward& b);

}  // namespace sdm::gpu
