// Gradients of A, QK and beta, and the scaling of du to dv, for all chunks side by side (section 4 of the
// specification): nothing of it feeds the recurrence. First the products du delta^T and dY delta^T, 64 x 64
// a block on the tensor cores in three TF32 products (as accurate as float32; two where dY is
// bfloat16, whose values TF32 holds), bound by their arithmetic; then a warp a token, bound by the rows it moves.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/common/tensor.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 64;
constexpr int kDepth = 32;
constexpr int kStride = kDepth + 4;  // 16-byte loads of eight rows side by side touch all banks

struct Params {
  const float *a, *beta, *error, *delta;
  const int32_t* written;
  const void* dy;
  float *dv, *da, *dqk, *dbeta;
  int64_t width, tokens, chunks, rows;
  int chunk, tiles;
};

template <class T>
__device__ inline float4 load_four(const T* row, int64_t c, int64_t width, bool vectors) {
  float x[4] = {};
  if (vectors) {
    if (c < width) {
      if constexpr (sizeof(T) == 4) return *reinterpret_cast<const float4*>(row + c);
      const uint2 q = *reinterpret_cast<const uint2*>(row + c);
      return make_float4(__uint_as_float(q.x << 16), __uint_as_float(q.x & 0xffff0000u), __uint_as_float(q.y << 16),
                         __uint_as_float(q.y & 0xffff0000u));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = c + i < width ? to_float(row[c + i]) : 0.0f;
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}

template <class T>
__global__ void __launch_bounds__(kThreads) products_kernel(const __grid_constant__ Params a) {
  constexpr int kLeft = sizeof(T) == 4 ? 3 : 2;
  __shared__ __align__(16) float du[kRows][kStride], dy[kRows][kStride], delta[kRows][kStride];
  // Tiles on and below the diagonal, row by row.
  const int pairs = a.tiles * (a.tiles + 1) / 2;
  int pair = blockIdx.x % pairs, tile_row = 0;
  while (pair > tile_row) pair -= ++tile_row;
  const int row0 = tile_row * kRows, column0 = pair * kRows;
  const int64_t chunk_index = blockIdx.x / pairs, p = chunk_index / a.chunks, n = chunk_index % a.chunks;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(a.chunk), a.tokens - n * a.chunk));
  const int64_t token = p * a.tokens + n * a.chunk;
  const float* du_rows = a.dv + (token + row0) * a.width;
  const T* dy_rows = static_cast<const T*>(a.dy) + (token + row0) * a.width;
  const float* delta_rows = a.delta + (token + column0) * a.width;
  const bool vectors = a.width % 4 == 0;
  // A warp's 16 rows by 32 columns.
  const int warp = threadIdx.x / 32, warp_row = warp % 4 * 16, warp_column = warp / 4 * 32;
  const bool below = row0 + warp_row + 15 >= column0 + warp_column;
  float da[4][4] = {}, dqk[4][4] = {};
  for (int64_t c0 = 0; c0 < a.width; c0 += kDepth) {
    __syncthreads();
#pragma unroll
    for (int i = threadIdx.x; i < kRows * kDepth / 4; i += kThreads) {
      const int t = i / (kDepth / 4), c = i % (kDepth / 4) * 4;
      const float4 zero = make_float4(0, 0, 0, 0);
      const bool left = row0 + t < tokens, right = column0 + t < tokens;
      *reinterpret_cast<float4*>(&du[t][c]) = left ? load_four(du_rows + t * a.width, c0 + c, a.width, vectors) : zero;
      *reinterpret_cast<float4*>(&dy[t][c]) = left ? load_four(dy_rows + t * a.width, c0 + c, a.width, vectors) : zero;
      *reinterpret_cast<float4*>(&delta[t][c]) =
          right ? load_four(delta_rows + t * a.width, c0 + c, a.width, vectors) : zero;
    }
    __syncthreads();
    if (!below) continue;
    // The tensor cores cut off what they add up; a float32 addition for every piece keeps that small.
    float da_part[4][4] = {}, dqk_part[4][4] = {};
#pragma unroll
    for (int c = 0; c < kDepth; c += 8) {
      LeftPiece<3> u;
      LeftPiece<kLeft> y;
      u.load([&](int r, int d) { return du[warp_row + r][c + d]; });
      y.load([&](int r, int d) { return dy[warp_row + r][c + d]; });
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        RightPiece<3> right;
        right.load([&](int d, int t) { return delta[warp_column + 8 * j + t][c + d]; });
        multiply(da_part[j], u, right);
        if constexpr (kLeft == 3) multiply_tf32(dqk_part[j], y.low, right.high);
        multiply_tf32(dqk_part[j], y.high, right.low);
        multiply_tf32(dqk_part[j], y.high, right.high);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        da[j][i] += da_part[j][i];
        dqk[j][i] += dqk_part[j][i];
      }
    }
  }
  // da gets <du, delta> for now. Entries above the diagonal of a tile on it are zero; tiles above it are not read.
  const int64_t square = chunk_index * a.chunk * a.chunk;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int t = row0 + warp_row + sum_row(i), u = column0 + warp_column + 8 * j + sum_column(i);
      if (t >= a.chunk || u >= a.chunk) continue;
      a.da[square + static_cast<int64_t>(t) * a.chunk + u] = u < t ? da[j][i] : 0.0f;
      a.dqk[square + static_cast<int64_t>(t) * a.chunk + u] = u <= t ? dqk[j][i] : 0.0f;
    }
  }
}

// A warp a row of da, of all chunks: dbeta, and the scaling by beta.
__global__ void __launch_bounds__(kThreads) rows_kernel(const __grid_constant__ Params a) {
  const int lane = threadIdx.x & 31;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (index >= a.rows) return;
  const int64_t chunk_index = index / a.chunk, p = chunk_index / a.chunks, n = chunk_index % a.chunks;
  const int t = static_cast<int>(index % a.chunk);
  float* da = a.da + index * a.chunk;
  float* dqk = a.dqk + index * a.chunk;
  const int first_above = (t / kRows + 1) * kRows;  // columns that no tile wrote
  for (int j = first_above + lane; j < a.chunk; j += 32) da[j] = dqk[j] = 0.0f;
  if (n * a.chunk + t >= a.tokens) return;
  const int64_t token = p * a.tokens + n * a.chunk + t;
  const bool written = a.written[token] > 0;
  const float beta = written ? a.beta[token] : 0.0f;
  float* dv = a.dv + token * a.width;
  const float* error = a.error + token * a.width;
  const float* square = a.a + index * a.chunk;
  float total = 0;
  if (a.width % 4 == 0) {
    for (int64_t c = lane * 4; c < a.width; c += 128) {
      float4 u = *reinterpret_cast<float4*>(dv + c);
      const float4 e = *reinterpret_cast<const float4*>(error + c);
      total += e.x * u.x + e.y * u.y + e.z * u.z + e.w * u.w;
      u = written ? make_float4(beta * u.x, beta * u.y, beta * u.z, beta * u.w) : make_float4(0, 0, 0, 0);
      *reinterpret_cast<float4*>(dv + c) = u;
    }
  } else {
    for (int64_t c = lane; c < a.width; c += 32) {
      const float u = dv[c];
      total += error[c] * u;
      dv[c] = written ? beta * u : 0.0f;
    }
  }
  for (int j = lane; j < t; j += 32) {
    const float product = da[j];
    total -= square[j] * product;
    da[j] = written ? -beta * product : 0.0f;
  }
  total = warp_sum(total);
  if (lane == 0) a.dbeta[token] = written ? total : 0.0f;
}

struct Sum {
  float* values;
  int64_t count;  // of a part
  int parts;
};

__global__ void __launch_bounds__(kThreads) add_parts_kernel(const __grid_constant__ Sum a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.count) return;
  float sum = a.values[i];
#pragma unroll 4
  for (int part = 1; part < a.parts; ++part) sum += a.values[part * a.count + i];
  a.values[i] = sum;
}

}  // namespace

cudaError_t square_gradients(const Backward& b, Launch where) {
  const Shape& s = b.shape;
  Params a = {};
  a.a = static_cast<const float*>(b.chunks.a);
  a.beta = static_cast<const float*>(b.in.beta);
  a.error = static_cast<const float*>(b.error);
  a.delta = static_cast<const float*>(b.delta);
  a.written = b.chunks.writes;
  a.dy = b.dy;
  a.dv = static_cast<float*>(b.dv);
  a.da = static_cast<float*>(b.da);
  a.dqk = static_cast<float*>(b.dqk);
  a.dbeta = static_cast<float*>(b.dbeta);
  a.width = s.width;
  a.tokens = s.tokens;
  a.chunks = s.chunks();
  a.chunk = static_cast<int>(s.chunk);
  a.tiles = static_cast<int>(div_up(s.chunk, kRows));
  a.rows = s.streams * a.chunks * s.chunk;
  const cudaError_t error = launch(b.dtype == DType::bf16 ? products_kernel<bf16> : products_kernel<float>,
                                   dim3(s.streams * a.chunks * (a.tiles * (a.tiles + 1) / 2)), kThreads, 0, where, a);
  if (error != cudaSuccess) return error;
  return launch(rows_kernel, dim3(div_up(a.rows, kThreads / 32)), kThreads, 0, where, a);
}

cudaError_t add_parts(const Backward& b, Launch where) {
  const Shape& s = b.shape;
  if (b.parts <= 1) return cudaSuccess;
  const auto add = [&](void* values, int64_t count) {
    const Sum sum{static_cast<float*>(values), count, static_cast<int>(b.parts)};
    return launch(add_parts_kernel, dim3(div_up(count, kThreads)), kThreads, 0, where, sum);
  };
  const cudaError_t errors[] = {
      add(b.dk_eff, s.streams * s.tokens * s.writes),
      add(b.dk_carry, s.streams * s.tokens * s.writes),
      add(b.dq_eff, s.streams * s.tokens * s.reads),
      add(b.ddecay, s.streams * s.stored_chunks * s.write_slots),
  };
  for (const cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace sdm::gpu
