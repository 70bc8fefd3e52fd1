// Dual matmul of a chunk: delta = X u and y = inter + QX u with u = beta error (section 3 of the
// specification), and the backward's du = QX^T dY + X^T carried (section 4). A block makes 64 tokens by
// 32 columns of one product in IEEE float32. Few operations a step: bound by latency.
#include "cuda/common/launch.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 64;
constexpr int kColumns = 32;
constexpr int kDepth = 32;

// A 64 x 32 tile of sums, 4 x 4 a thread: rows 4 * (thread / 8) + i, columns 4 * (thread % 8) + j.
struct Tile {
  float sum[4][4];
  __device__ static int row(int i) { return static_cast<int>(threadIdx.x) / 8 * 4 + i; }
  __device__ static int column(int j) { return static_cast<int>(threadIdx.x) % 8 * 4 + j; }
};

struct TileMemory {
  float matrix[kDepth][kRows + 4];
  float rows[kDepth][kColumns];
};

// tile += M[row0 .. row0 + 64, begin .. end) times the rows value(k, c); M is [ld][ld], transposed on demand.
template <bool Transposed, class Value>
__device__ inline void multiply(Tile& tile, TileMemory& memory, const float* matrix, int ld, int row0, int begin,
                                int end, Value value) {
  for (int k0 = begin; k0 < end; k0 += kDepth) {
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kDepth * kRows; i += kThreads) {
      if constexpr (Transposed) {
        const int k = i / kRows, t = i % kRows;
        memory.matrix[k][t] =
            k0 + k < end && row0 + t < ld ? matrix[static_cast<int64_t>(k0 + k) * ld + row0 + t] : 0.0f;
      } else {
        const int t = i / kDepth, k = i % kDepth;
        memory.matrix[k][t] =
            k0 + k < end && row0 + t < ld ? matrix[static_cast<int64_t>(row0 + t) * ld + k0 + k] : 0.0f;
      }
    }
#pragma unroll
    for (int i = threadIdx.x; i < kDepth * kColumns; i += kThreads) {
      const int k = i / kColumns, c = i % kColumns;
      memory.rows[k][c] = k0 + k < end ? value(k0 + k, c) : 0.0f;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      const float4 m = *reinterpret_cast<const float4*>(&memory.matrix[k][Tile::row(0)]);
      const float4 r = *reinterpret_cast<const float4*>(&memory.rows[k][Tile::column(0)]);
      const float left[4] = {m.x, m.y, m.z, m.w}, right[4] = {r.x, r.y, r.z, r.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) tile.sum[i][j] += left[i] * right[j];
      }
    }
  }
}

struct Dual {
  const float *x, *qx, *beta, *error, *inter;
  const int32_t* written;
  float* delta;
  void* y;
  int64_t width, begin, square_stride, beta_stride, written_stride, row_stride, inter_stride, y_stride;
  int chunk, tokens, columns, column_tiles, row_tiles;
};

template <class T>
__global__ void __launch_bounds__(kThreads) dual_matmul_kernel(const __grid_constant__ Dual a) {
  __shared__ __align__(16) TileMemory memory;
  int block = blockIdx.x;
  const int column0 = block % a.column_tiles * kColumns;
  block /= a.column_tiles;
  const bool reads = block % 2 == 1;  // y, else delta
  block /= 2;
  const int row0 = (a.row_tiles - 1 - block % a.row_tiles) * kRows;  // the longest sums first
  const int64_t p = block / a.row_tiles;
  const float* error = a.error + p * a.row_stride + a.begin;
  const float* beta = a.beta + p * a.beta_stride;
  const int32_t* written = a.written + p * a.written_stride;
  wait_for_previous();
  Tile tile = {};
  multiply<false>(tile, memory, (reads ? a.qx : a.x) + p * a.square_stride, a.chunk, row0, 0,
                  min(a.tokens, row0 + kRows), [&](int k, int c) {
                    if (column0 + c >= a.columns || written[k] <= 0) return 0.0f;
                    return beta[k] * error[k * a.width + column0 + c];
                  });
  let_next_start();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int t = row0 + Tile::row(i);
    if (t >= a.tokens) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = column0 + Tile::column(j);
      if (c >= a.columns) break;
      const int64_t at = t * a.width + a.begin + c;
      if (reads) {
        from_float(static_cast<T*>(a.y) + p * a.y_stride + at, a.inter[p * a.inter_stride + at] + tile.sum[i][j]);
      } else {
        a.delta[p * a.row_stride + at] = tile.sum[i][j];
      }
    }
  }
}

// error = v - retrieved where a token writes.
struct Errors {
  const void* v;
  const float* retrieved;
  const int32_t* written;
  float* error;
  int64_t width, count;
};

template <class T>
__global__ void __launch_bounds__(256) errors_kernel(const __grid_constant__ Errors a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= a.count) return;
  a.error[i] = a.written[i / a.width] > 0 ? to_float(static_cast<const T*>(a.v)[i]) - a.retrieved[i] : 0.0f;
}

struct Du {
  const float *x, *qx, *carried;
  const void* dy;
  float* du;
  int64_t width, begin, square_stride, carried_stride, row_stride;
  int chunk, tokens, columns, column_tiles, row_tiles;
};

template <class T>
__global__ void __launch_bounds__(kThreads) du_matmul_kernel(const __grid_constant__ Du a) {
  __shared__ __align__(16) TileMemory memory;
  int block = blockIdx.x;
  const int column0 = block % a.column_tiles * kColumns;
  block /= a.column_tiles;
  const int row0 = block % a.row_tiles * kRows;
  const int64_t p = block / a.row_tiles;
  const T* dy = static_cast<const T*>(a.dy) + p * a.row_stride + a.begin + column0;
  const float* carried = a.carried + p * a.carried_stride + a.begin + column0;
  const int columns = a.columns - column0;
  Tile tile = {};
  // dY does not depend on the step before.
  multiply<true>(tile, memory, a.qx + p * a.square_stride, a.chunk, row0, row0, a.tokens,
                 [&](int k, int c) { return c < columns ? to_float(dy[k * a.width + c]) : 0.0f; });
  wait_for_previous();
  multiply<true>(tile, memory, a.x + p * a.square_stride, a.chunk, row0, row0, a.tokens,
                 [&](int k, int c) { return c < columns ? carried[k * a.width + c] : 0.0f; });
  let_next_start();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int t = row0 + Tile::row(i);
    if (t >= a.tokens) break;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = Tile::column(j);
      if (c >= columns) break;
      a.du[p * a.row_stride + t * a.width + a.begin + column0 + c] = tile.sum[i][j];
    }
  }
}

}  // namespace

cudaError_t dual_matmul(const Forward& f, int64_t n, Columns columns, Launch where) {
  const Shape& s = f.shape;
  const ChunkAt c(s, n);
  const bool bf = f.dtype == DType::bf16;
  const int64_t square = c.stored_chunk * s.chunk * s.chunk, row = c.token * s.width;
  if (f.retrieved != nullptr) {
    const Errors errors{f.in.v, static_cast<const float*>(f.retrieved), f.chunks.writes, static_cast<float*>(f.error),
                        s.width, s.streams * s.chunk * s.width};
    const cudaError_t error = launch(bf ? errors_kernel<bf16> : errors_kernel<float>, dim3(div_up(errors.count, 256)),
                                     256, 0, where, errors);
    if (error != cudaSuccess) return error;
  }
  Dual a = {};
  a.x = at<float>(f.x, square);
  a.qx = at<float>(f.qx, square);
  a.beta = at<float>(f.in.beta, c.token);
  a.error = at<float>(f.error, f.row_offset(n));
  a.inter = static_cast<const float*>(f.inter);
  a.written = f.chunks.writes + c.stored_token;
  a.delta = at<float>(f.delta, f.row_offset(n));
  a.y = bf ? static_cast<void*>(at<bf16>(f.y, row)) : static_cast<void*>(at<float>(f.y, row));
  a.width = s.width;
  a.begin = columns.begin;
  a.square_stride = s.stored_chunks * s.chunk * s.chunk;
  a.beta_stride = s.tokens;
  a.written_stride = s.stored_tokens;
  a.row_stride = f.row_stride();
  a.inter_stride = s.chunk * s.width;
  a.y_stride = s.tokens * s.width;
  a.chunk = static_cast<int>(s.chunk);
  a.tokens = c.tokens;
  a.columns = static_cast<int>(columns.end - columns.begin);
  a.column_tiles = static_cast<int>(div_up(a.columns, kColumns));
  a.row_tiles = static_cast<int>(div_up(c.tokens, kRows));
  return launch(bf ? dual_matmul_kernel<bf16> : dual_matmul_kernel<float>,
                dim3(s.streams * a.row_tiles * 2 * a.column_tiles), kThreads, 0, where, a);
}

cudaError_t du_matmul(const Backward& b, int64_t n, Columns columns, Launch where) {
  const Shape& s = b.shape;
  const ChunkAt c(s, n);
  const bool bf = b.dtype == DType::bf16;
  const int64_t square = c.stored_chunk * s.chunk * s.chunk, row = c.token * s.width;
  Du a = {};
  a.x = at<float>(b.x, square);
  a.qx = at<float>(b.qx, square);
  a.carried = static_cast<const float*>(b.carried);
  a.dy = bf ? static_cast<const void*>(at<bf16>(b.dy, row)) : static_cast<const void*>(at<float>(b.dy, row));
  a.du = at<float>(b.dv, row);
  a.width = s.width;
  a.begin = columns.begin;
  a.square_stride = s.stored_chunks * s.chunk * s.chunk;
  a.carried_stride = s.chunk * s.width;
  a.row_stride = s.tokens * s.width;
  a.chunk = static_cast<int>(s.chunk);
  a.tokens = c.tokens;
  a.columns = static_cast<int>(columns.end - columns.begin);
  a.column_tiles = static_cast<int>(div_up(a.columns, kColumns));
  a.row_tiles = static_cast<int>(div_up(c.tokens, kRows));
  return launch(bf ? du_matmul_kernel<bf16> : du_matmul_kernel<float>, dim3(s.streams * a.row_tiles * a.column_tiles),
                kThreads, 0, where, a);
}

}  // namespace sdm::gpu
