// Solve: X = (I + diag(beta) tril(A, -1))^-1 by forward substitution, and QX = QK X (section 3 of the
// specification), in full precision. A block solves 64 columns of one chunk's X in shared memory; four
// lanes share the sums of a column, so columns never wait for each other. Bound by that chain.
#include "cuda/common/launch.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 64;
constexpr int kLanes = 4;              // that share a column
constexpr int kStride = kColumns + 8;  // so that a warp's 8 columns of 4 rows lie in distinct banks
constexpr int kMostRows = 32;          // rows of A or QK staged at a time

struct Params {
  const float *a, *qk, *beta;
  const int32_t* written;
  float *x, *qx;
  int64_t tokens, stored_tokens, stored_chunks, first_chunk;
  int chunk, chunks, tiles, rows;  // rows staged at a time
};

template <bool Solve>
__global__ void __launch_bounds__(kThreads) solve_kernel(Params s) {
  extern __shared__ __align__(16) float shared[];
  const int chunk = s.chunk, tile = blockIdx.x % s.tiles, task = blockIdx.x / s.tiles;
  const int64_t p = task / s.chunks, index = task % s.chunks;
  const int64_t n = s.first_chunk + index;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(chunk), s.tokens - n * chunk));
  const int64_t square = (p * s.stored_chunks + index) * chunk * chunk;
  const float* beta = s.beta + p * s.tokens + n * chunk;
  const int32_t* written = s.written + p * s.stored_tokens + index * chunk;
  float* x = shared;                        // [C][kStride]
  float* rows = shared + chunk * kStride;   // [s.rows][C]
  float* strength = rows + s.rows * chunk;  // [C] beta of the tokens that write, else 0
  const int j0 = tile * kColumns, width = min(kColumns, chunk - j0);
  const int column = threadIdx.x / kLanes, part = threadIdx.x % kLanes;

  // row[j0 .. end) times the column of X, summed by the four lanes in a fixed order.
  const auto dot = [&](const float* row, int end) {
    float sum = 0, other = 0;
    int i = j0 + part;
#pragma unroll 2
    for (; i + kLanes < end; i += 2 * kLanes) {
      sum += row[i] * x[i * kStride + column];
      other += row[i + kLanes] * x[(i + kLanes) * kStride + column];
    }
    if (i < end) sum += row[i] * x[i * kStride + column];
    sum += other;
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    return sum;
  };
  if constexpr (Solve) {
    for (int t = threadIdx.x; t < chunk; t += kThreads) strength[t] = t < tokens && written[t] > 0 ? beta[t] : 0.0f;
  }
  const auto stage = [&](const float* matrix, int t0) {
    __syncthreads();
    const int count = min(s.rows, chunk - t0) * chunk;
    for (int i = threadIdx.x; i < count; i += kThreads) rows[i] = matrix[square + static_cast<int64_t>(t0) * chunk + i];
    __syncthreads();
  };

  if constexpr (Solve) {
    for (int t0 = 0; t0 < chunk; t0 += s.rows) {
      stage(s.a, t0);
      for (int t = t0; t < min(chunk, t0 + s.rows); ++t) {
        float value = t == j0 + column ? 1.0f : 0.0f;
        if (t > j0 && strength[t] != 0.0f) value -= strength[t] * dot(rows + (t - t0) * chunk, t);
        if (part == 0) x[t * kStride + column] = value;
        __syncwarp();
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < chunk * width; i += kThreads) {
      const int t = i / width, c = i % width;
      s.x[square + static_cast<int64_t>(t) * chunk + j0 + c] = x[t * kStride + c];
    }
  } else {
    for (int i = threadIdx.x; i < chunk * width; i += kThreads) {
      const int t = i / width, c = i % width;
      x[t * kStride + c] = s.x[square + static_cast<int64_t>(t) * chunk + j0 + c];
    }
  }
  for (int t0 = 0; t0 < chunk; t0 += s.rows) {
    stage(s.qk, t0);
#pragma unroll 4
    for (int t = t0; t < min(chunk, t0 + s.rows); ++t) {
      const float value = t < tokens ? dot(rows + (t - t0) * chunk, t + 1) : 0.0f;
      if (part == 0 && column < width) s.qx[square + static_cast<int64_t>(t) * chunk + j0 + column] = value;
    }
  }
}

template <bool Solve>
cudaError_t run(const Chunks& chunks, const Shape& shape, const void* beta, const void* x, void* qx, int64_t count,
                Launch where) {
  const auto shared_bytes = [&](int rows) { return sizeof(float) * shape.chunk * (kStride + rows + 1); };
  const int rows = shared_bytes(kMostRows) <= shared_limit() ? kMostRows : kMostRows / 2;
  const Params params{static_cast<const float*>(chunks.a),
                      static_cast<const float*>(chunks.qk),
                      static_cast<const float*>(beta),
                      chunks.writes,
                      static_cast<float*>(const_cast<void*>(x)),
                      static_cast<float*>(qx),
                      shape.tokens,
                      shape.stored_tokens,
                      shape.stored_chunks,
                      shape.first_chunk,
                      static_cast<int>(shape.chunk),
                      static_cast<int>(count),
                      static_cast<int>(div_up(shape.chunk, kColumns)),
                      rows};
  return launch(solve_kernel<Solve>, dim3(shape.streams * count * params.tiles), kThreads, shared_bytes(rows), where,
                params);
}

}  // namespace

cudaError_t solve(const Forward& f, int64_t count, Launch where) {
  return run<true>(f.chunks, f.shape, f.in.beta, f.x, f.qx, count, where);
}

cudaError_t read_products(const Chunks& chunks, const Shape& s, const void* x, void* qx, int64_t count, Launch where) {
  return run<false>(chunks, s, nullptr, x, qx, count, where);
}

}  // namespace sdm::gpu
