// Solve: X = (I + diag(beta) tril(A, -1))^-1, and QX = QK X (section 3 of the specification), by tiles of 64 tokens.
// First the tiles on the diagonal, by forward substitution in float32; then those below them, column by column,
// X_ij = -X_ii beta_i sum_k A_ik X_kj; then QX_ij = sum_k QK_ik X_kj. The products are made on the tensor cores in
// three TF32 products, which is as accurate as float32. Bound by the memory that the matrices take, and in long chunks
// by arithmetic.
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor.cuh"

namespace sdm::gpu {
namespace {

constexpr int kTile = 64;
constexpr int kDiagonalThreads = kTile;  // a thread a column
constexpr int kThreads = 128;            // of a product: four warps, each 32 by 32
// Strides at which the pieces of a warp touch all banks.
constexpr int kLeftStride = kTile + 4;
constexpr int kRightStride = kTile + 8;
constexpr int kProducts = 3;  // TF32 products for one of float32

struct Params {
  const float *a, *qk, *beta;
  const int32_t* written;
  float *x, *qx;
  int64_t tokens, stored_tokens, stored_chunks, first_chunk;
  int chunk, chunks, tiles;
};

// One chunk's matrices.
struct Chunk {
  int64_t square;  // where they begin
  int tokens;
  const float* beta;
  const int32_t* written;
  __device__ Chunk(const Params& s, int task) {
    const int64_t p = task / s.chunks, index = task % s.chunks, n = s.first_chunk + index;
    square = (p * s.stored_chunks + index) * s.chunk * s.chunk;
    tokens = static_cast<int>(min(static_cast<int64_t>(s.chunk), s.tokens - n * s.chunk));
    beta = s.beta + p * s.tokens + n * s.chunk;
    written = s.written + p * s.stored_tokens + index * s.chunk;
  }
  // beta of a token that writes, else 0.
  __device__ float strength(int t) const { return t < tokens && written[t] > 0 ? beta[t] : 0.0f; }
};

// M[row0 .. row0 + 64, column0 .. column0 + 64) of an [ld][ld] matrix, zeros outside it, without waiting.
template <int Stride, int Threads>
__device__ inline void load_tile(float* to, const float* matrix, int ld, int row0, int column0) {
  if (ld % 4 == 0) {
#pragma unroll 8
    for (int i = threadIdx.x; i < kTile * kTile / 4; i += Threads) {
      const int t = i / (kTile / 4), c = i % (kTile / 4) * 4;
      const bool inside = row0 + t < ld && column0 + c < ld;
      copy_async(to + t * Stride + c, inside ? matrix + static_cast<int64_t>(row0 + t) * ld + column0 + c : matrix,
                 inside);
    }
  } else {
    for (int i = threadIdx.x; i < kTile * kTile; i += Threads) {
      const int t = i / kTile, c = i % kTile;
      const bool inside = row0 + t < ld && column0 + c < ld;
      to[t * Stride + c] = inside ? matrix[static_cast<int64_t>(row0 + t) * ld + column0 + c] : 0.0f;
    }
  }
}

// Zeros right of the tile on the diagonal, in its rows.
template <int Threads>
__device__ inline void clear_above(float* matrix, int ld, int row0) {
  const int width = ld - row0 - kTile;
  if (width <= 0) return;
  for (int i = threadIdx.x; i < kTile * width; i += Threads) {
    matrix[static_cast<int64_t>(row0 + i / width) * ld + row0 + kTile + i % width] = 0.0f;
  }
}

// The thread's column of a tile of X on the diagonal, rows Begin and later; what is above them is zero.
template <int Begin>
__device__ inline void substitute(const float (&rows)[kTile][kTile], const float (&strength)[kTile], int count,
                                  bool inside, float* x, int ld) {
  float column[kTile];
#pragma unroll
  for (int t = Begin; t < kTile; ++t) {
    if (t % 16 == 0 && t >= count) break;
    float sums[4] = {};
#pragma unroll
    for (int i = Begin; i < t; i += 4) {
      const float4 row = *reinterpret_cast<const float4*>(&rows[t][i]);
      sums[0] += row.x * column[i];
      if (i + 1 < t) sums[1] += row.y * column[i + 1];
      if (i + 2 < t) sums[2] += row.z * column[i + 2];
      if (i + 3 < t) sums[3] += row.w * column[i + 3];
    }
    const float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    column[t] = t == static_cast<int>(threadIdx.x) ? 1.0f : 0.0f;
    if (strength[t] != 0.0f) column[t] -= strength[t] * sum;
    if (inside && t < count) x[static_cast<int64_t>(t) * ld] = column[t];
  }
}

__global__ void __launch_bounds__(kDiagonalThreads) diagonal_kernel(const __grid_constant__ Params s) {
  __shared__ __align__(16) float rows[kTile][kTile];
  __shared__ float strength[kTile];
  let_next_start();
  const Chunk chunk(s, blockIdx.x / s.tiles);
  const int row0 = blockIdx.x % s.tiles * kTile, count = min(kTile, s.chunk - row0), column = threadIdx.x;
  wait_for_previous();
  load_tile<kTile, kDiagonalThreads>(rows[0], s.a + chunk.square, s.chunk, row0, row0);
  strength[column] = column < count ? chunk.strength(row0 + column) : 0.0f;
  clear_above<kDiagonalThreads>(s.x + chunk.square, s.chunk, row0);
  wait_for_copies();
  __syncthreads();
  float* x = s.x + chunk.square + static_cast<int64_t>(row0) * s.chunk + row0 + column;
  const bool inside = column < count;
  if (column < kTile / 2) {
    substitute<0>(rows, strength, count, inside, x, s.chunk);
  } else {
    for (int t = 0; t < min(kTile / 2, count); ++t) {
      if (inside) x[static_cast<int64_t>(t) * s.chunk] = 0.0f;
    }
    substitute<kTile / 2>(rows, strength, count, inside, x, s.chunk);
  }
}

struct Tiles {
  float left[kTile * kLeftStride];
  float right[kTile * kRightStride];
};

// A warp's 32 by 32 of a tile: two rows of products by four.
struct Sums {
  float value[2][4][4];
  // Calls put(row, column, a, b) for two columns side by side.
  template <class Put>
  __device__ void each(Put put) const {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          put(warp_row() + 16 * m + sum_row(i), warp_column() + 8 * n + sum_column(i), value[m][n][i],
              value[m][n][i + 1]);
        }
      }
    }
  }
  __device__ static int warp_row() { return static_cast<int>(threadIdx.x) / 64 * 32; }
  __device__ static int warp_column() { return static_cast<int>(threadIdx.x) / 32 % 2 * 32; }
};

// sums += left * right, of which either may be lower triangular; what is stored above the diagonal of `left` is not
// looked at.
__device__ inline void multiply_tiles(Sums& sums, const Tiles& tiles, bool left_triangular, bool right_triangular) {
  const int row0 = Sums::warp_row(), column0 = Sums::warp_column();
  const int above = left_triangular ? 0 : kTile;
#pragma unroll 1
  for (int k = right_triangular ? column0 : 0; k < (left_triangular ? row0 + 32 : kTile); k += 8) {
    LeftPiece<kProducts> left[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      left[m].load([&](int r, int d) {
        r += row0 + 16 * m;
        return k + d <= r + above ? tiles.left[r * kLeftStride + k + d] : 0.0f;
      });
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      RightPiece<kProducts> right;
      right.load([&](int d, int c) { return tiles.right[(k + d) * kRightStride + column0 + 8 * n + c]; });
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        // The tensor cores cut off what they add up, so the sums are added in float32.
        float part[4] = {};
        multiply(part, left[m], right);
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.value[m][n][i] += part[i];
      }
    }
  }
}

// sums += left_ik right_kj over the tiles k of first .. last of two [ld][ld] matrices.
__device__ inline void multiply_row(Sums& sums, Tiles& tiles, const float* left, const float* right, int ld, int i,
                                    int j, int first, int last) {
  for (int k = first; k <= last; ++k) {
    __syncthreads();
    load_tile<kLeftStride, kThreads>(tiles.left, left, ld, i * kTile, k * kTile);
    load_tile<kRightStride, kThreads>(tiles.right, right, ld, k * kTile, j * kTile);
    wait_for_copies();
    __syncthreads();
    multiply_tiles(sums, tiles, k == i, k == j);
  }
}

// A block makes the tiles of X below one on the diagonal, from top to bottom.
__global__ void __launch_bounds__(kThreads, 4) below_kernel(const __grid_constant__ Params s) {
  __shared__ __align__(16) Tiles tiles;
  __shared__ float strength[kTile];
  let_next_start();
  const int j = blockIdx.x % (s.tiles - 1);  // the longest first
  const Chunk chunk(s, blockIdx.x / (s.tiles - 1));
  const float* a = s.a + chunk.square;
  float* x = s.x + chunk.square;
  wait_for_previous();
  for (int i = j + 1; i < s.tiles; ++i) {
    if (threadIdx.x < kTile) strength[threadIdx.x] = chunk.strength(i * kTile + threadIdx.x);
    Sums sums = {};
    multiply_row(sums, tiles, a, x, s.chunk, i, j, j, i - 1);
    __syncthreads();
    load_tile<kLeftStride, kThreads>(tiles.left, x, s.chunk, i * kTile, i * kTile);
    sums.each([&](int t, int c, float a, float b) {
      const bool writes = strength[t] != 0.0f;
      *reinterpret_cast<float2*>(tiles.right + t * kRightStride + c) =
          writes ? make_float2(strength[t] * a, strength[t] * b) : make_float2(0, 0);
    });
    wait_for_copies();
    __syncthreads();
    Sums result = {};
    multiply_tiles(result, tiles, true, false);
    result.each([&](int t, int c, float a, float b) {
      t += i * kTile;
      if (t >= s.chunk) return;
      store_two(x + static_cast<int64_t>(t) * s.chunk + j * kTile + c, 0.0f - a, 0.0f - b, true, s.chunk % 2 == 0);
    });
  }
}

// A block makes a tile of QX.
__global__ void __launch_bounds__(kThreads, 4) read_products_kernel(const __grid_constant__ Params s) {
  __shared__ __align__(16) Tiles tiles;
  const int pairs = s.tiles * (s.tiles + 1) / 2;
  int i = s.tiles - 1, j = blockIdx.x % pairs;  // the longest first
  while (j > i) j -= i-- + 1;
  const Chunk chunk(s, blockIdx.x / pairs);
  float* qx = s.qx + chunk.square;
  if (i == j) clear_above<kThreads>(qx, s.chunk, i * kTile);
  wait_for_previous();
  Sums sums = {};
  multiply_row(sums, tiles, s.qk + chunk.square, s.x + chunk.square, s.chunk, i, j, j, i);
  sums.each([&](int t, int c, float a, float b) {
    t += i * kTile;
    c += j * kTile;
    if (t >= s.chunk || c >= s.chunk) return;
    const bool on = t < chunk.tokens;
    store_two(qx + static_cast<int64_t>(t) * s.chunk + c, on && c <= t ? a : 0.0f, on && c < t ? b : 0.0f,
              c + 1 < s.chunk, s.chunk % 2 == 0);
  });
}

Params make_params(const Chunks& chunks, const Shape& shape, const void* beta, const void* x, void* qx, int64_t count) {
  return {static_cast<const float*>(chunks.a),
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
          static_cast<int>(div_up(shape.chunk, kTile))};
}

cudaError_t launch_read_products(const Params& s, int64_t tasks, Launch where) {
  return launch(read_products_kernel, dim3(tasks * (s.tiles * (s.tiles + 1) / 2)), kThreads, 0, where, s);
}

}  // namespace

cudaError_t solve(const Forward& f, int64_t count, Launch where) {
  const Params s = make_params(f.chunks, f.shape, f.in.beta, f.x, f.qx, count);
  const int64_t tasks = f.shape.streams * count;
  const Launch next{where.stream, true};
  cudaError_t error = launch(diagonal_kernel, dim3(tasks * s.tiles), kDiagonalThreads, 0, where, s);
  if (error == cudaSuccess) error = launch(below_kernel, dim3(tasks * (s.tiles - 1)), kThreads, 0, next, s);
  if (error == cudaSuccess) error = launch_read_products(s, tasks, next);
  return error;
}

cudaError_t read_products(const Chunks& chunks, const Shape& s, const void* x, void* qx, int64_t count, Launch where) {
  return launch_read_products(make_params(chunks, s, nullptr, x, qx, count), s.streams * count, where);
}

}  // namespace sdm::gpu
