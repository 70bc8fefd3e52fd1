// Ranges of streams or columns side by side on several CUDA streams.
#pragma once

#include <algorithm>

#include "cuda/geometry.h"
#include "cuda/launch.h"

namespace sdm::gpu {

// Calls run(range, stream) for `branches.count` ranges of streams, or of columns in whole multiples of
// `slices` slices. All begin after what is on the first stream, which waits for them at the end.
template <class Run>
cudaError_t for_branches(const Branches& branches, const Shape& s, int64_t slices, Run&& run) {
  const bool by_stream = splits_streams(s);
  const int64_t units = by_stream ? s.streams : (column_slices(s) + slices - 1) / slices;
  const int count = static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(branches.count, units)));
  const cudaEvent_t fork = branches.events[branches.count];
  cudaError_t error = cudaSuccess;
  if (count > 1) error = cudaEventRecord(fork, branches.streams[0]);
  for (int i = 1; i < count && error == cudaSuccess; ++i) error = cudaStreamWaitEvent(branches.streams[i], fork, 0);
  for (int i = 0; i < count && error == cudaSuccess; ++i) {
    const int64_t begin = units * i / count, end = units * (i + 1) / count, step = slices * slice_columns(s);
    const Range range = by_stream ? Range{0, s.width, begin, end - begin}
                                  : Range{begin * step, std::min(s.width, end * step), 0, s.streams};
    error = run(range, branches.streams[i]);
  }
  for (int i = 1; i < count && error == cudaSuccess; ++i) {
    error = cudaEventRecord(branches.events[i], branches.streams[i]);
    if (error == cudaSuccess) error = cudaStreamWaitEvent(branches.streams[0], branches.events[i], 0);
  }
  return error;
}

}  // namespace sdm::gpu
