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
constexpr int kStride = kDepth + 8;  // pairs of four rows side by side touch all banks
constexpr int kStages = 3;           // pieces of kDepth columns on chip or on their way

struct Params {
  const float *a, *beta, *error, *delta;
  const int32_t* written;
  const void* dy;
  float *dv, *da, *dqk, *dbeta;
  int64_t width, tokens, chunks, rows;
  int chunk, tiles;
};

// A piece of kRows rows, as it lies in memory.
template <class T>
struct Piece {
  T value[kRows][kStride];

  // Columns c and c + 1 of a row; c is even.
  __device__ float2 pair(int row, int c) const {
    if constexpr (sizeof(T) == 4) {
      return *reinterpret_cast<const float2*>(&value[row][c]);
    } else {
      const uint32_t both = *reinterpret_cast<const uint32_t*>(&value[row][c]);
      return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000u));
    }
  }
};

// Where the pieces come from: rows from `from` on, of which `rows` are those of the chunk. A thread copies the same
// columns of every kBetween-th row.
template <class T>
struct Source {
  static constexpr int kEach = kVector<T>, kVectors = kDepth / kEach, kBetween = kThreads / kVectors;
  const T* from;  // the thread's first
  int row, column, rows;

  __device__ Source(const T* from, int rows, int64_t width)
      : row(static_cast<int>(threadIdx.x) / kVectors),
        column(static_cast<int>(threadIdx.x) % kVectors * kEach),
        rows(rows) {
    this->from = from + row * width + column;
  }
  // Columns c0 .. c0 + kDepth; zeros below the rows and past `width`.
  __device__ void fetch(Piece<T>& to, int c0, int width) const {
    const T* at = from + c0;
    const int64_t stride = static_cast<int64_t>(kBetween) * width;
    const bool vectors = width % kEach == 0;
#pragma unroll
    for (int t = 0; t < kRows; t += kBetween, at += stride) {
      T* copy = &to.value[row + t][column];
      if (vectors) {
        const bool inside = row + t < rows && c0 + column < width;
        copy_async(reinterpret_cast<float*>(copy), reinterpret_cast<const float*>(at), inside);
      } else {
        for (int k = 0; k < kEach; ++k) copy[k] = row + t < rows && c0 + column + k < width ? at[k] : T(0.0f);
      }
    }
  }
};

template <class T>
struct Pieces {
  Piece<float> du, delta;
  Piece<T> dy;
};

// sum += left * right^T of a warp's 32 rows and 32 rows of a piece. kWhole: all of it is below the diagonal; else its
// 16 x 8 tiles are where their last row is not above their first column, `below` rows from the first of the warp's.
template <int kLeft, bool kWhole, class L>
__device__ inline void multiply_pieces(float (&sum)[2][4][4], const Piece<L>& left, const Piece<float>& right, int row0,
                                       int column0, int below) {
  const int g = (threadIdx.x & 31) / 4, t = threadIdx.x % 4 * 2;
  // The tensor cores cut off what they add up; a float32 addition for every piece keeps that small.
  float part[2][4][4] = {};
#pragma unroll
  for (int c = 0; c < kDepth; c += 8) {
    // In what order the depth is added up is free: a lane takes neighbours.
    uint32_t high[2][4], low[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float2 upper = left.pair(row0 + 16 * m + g, c + t), lower = left.pair(row0 + 16 * m + 8 + g, c + t);
      const float x[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kLeft == 3) {
          split_tf32(x[i], high[m][i], low[m][i]);
        } else {
          high[m][i] = __float_as_uint(x[i]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (!kWhole && below + 31 < 8 * j) continue;
      const float2 x = right.pair(column0 + 8 * j + g, c + t);
      uint32_t right_high[2], right_low[2];
      split_tf32(x.x, right_high[0], right_low[0]);
      split_tf32(x.y, right_high[1], right_low[1]);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (!kWhole && below + 16 * m + 15 < 8 * j) continue;
        if constexpr (kLeft == 3) multiply_tf32(part[m][j], low[m], right_high);
        multiply_tf32(part[m][j], high[m], right_low);
        multiply_tf32(part[m][j], high[m], right_high);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][j][i] += part[m][j][i];
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) products_kernel(const __grid_constant__ Params a) {
  constexpr int kLeft = sizeof(T) == 4 ? 3 : 2;
  extern __shared__ __align__(16) unsigned char shared[];
  Pieces<T>* pieces = reinterpret_cast<Pieces<T>*>(shared);
  // Tiles on and below the diagonal, row by row.
  const int pairs = a.tiles * (a.tiles + 1) / 2;
  int pair = blockIdx.x % pairs, tile_row = 0;
  while (pair > tile_row) pair -= ++tile_row;
  const int row0 = tile_row * kRows, column0 = pair * kRows;
  const int64_t chunk_index = blockIdx.x / pairs, p = chunk_index / a.chunks, n = chunk_index % a.chunks;
  const int tokens = static_cast<int>(min(static_cast<int64_t>(a.chunk), a.tokens - n * a.chunk));
  const int64_t token = p * a.tokens + n * a.chunk;
  const Source<float> du(a.dv + (token + row0) * a.width, tokens - row0, a.width);
  const Source<float> delta(a.delta + (token + column0) * a.width, tokens - column0, a.width);
  const Source<T> dy(static_cast<const T*>(a.dy) + (token + row0) * a.width, tokens - row0, a.width);
  const int width = static_cast<int>(a.width), steps = (width + kDepth - 1) / kDepth;
  const auto fetch = [&](int step) {
    if (step < steps) {
      Pieces<T>& to = pieces[step % kStages];
      du.fetch(to.du, step * kDepth, width);
      delta.fetch(to.delta, step * kDepth, width);
      dy.fetch(to.dy, step * kDepth, width);
    }
    end_copies();
  };
  // 32 x 32 of du delta^T for each of the first four warps, of dY delta^T for the others, in an order that gives the
  // four parts of a multiprocessor about the same work on the diagonal.
  const int warp = threadIdx.x / 32, quarter = warp % 4;
  const bool of_dy = warp >= 4;
  const int warp_row = (of_dy ? quarter % 2 : quarter / 2) * 32, warp_column = (of_dy ? quarter / 2 : quarter % 2) * 32;
  const int below = row0 + warp_row - column0 - warp_column;
  float sum[2][4][4] = {};
  for (int step = 0; step < kStages - 1; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    wait_for_older_copies<kStages - 2>();
    __syncthreads();
    fetch(step + kStages - 1);  // over the piece of the step before, which all have left
    if (below + 31 < 0) continue;
    const Pieces<T>& now = pieces[step % kStages];
    const bool whole = below >= 31;
    if (of_dy && whole) multiply_pieces<kLeft, true>(sum, now.dy, now.delta, warp_row, warp_column, below);
    if (of_dy && !whole) multiply_pieces<kLeft, false>(sum, now.dy, now.delta, warp_row, warp_column, below);
    if (!of_dy && whole) multiply_pieces<3, true>(sum, now.du, now.delta, warp_row, warp_column, below);
    if (!of_dy && !whole) multiply_pieces<3, false>(sum, now.du, now.delta, warp_row, warp_column, below);
  }
  // da gets <du, delta> for now. Entries above the diagonal of a tile on it are zero; tiles above it are not read.
  float* to = (of_dy ? a.dqk : a.da) + chunk_index * a.chunk * a.chunk;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int t = row0 + warp_row + 16 * m + sum_row(i), u = column0 + warp_column + 8 * j + sum_column(i);
        if (t < a.chunk && u < a.chunk) to[t * a.chunk + u] = u < t || (of_dy && u == t) ? sum[m][j][i] : 0.0f;
      }
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

// Arrays [parts, count] whose parts are added up.
struct Sums {
  static constexpr int kArrays = 4;
  float* values[kArrays];
  int64_t count[kArrays];
  int parts;
};

// The sum of x[i], x[i + count], ... into the first, in order.
template <class V, class Add>
__device__ void add_up(V* values, int64_t i, int64_t count, int parts, Add add) {
  constexpr int kEach = 5;  // loads side by side: 15 in three rounds
  V sum = values[i];
  for (int part = 1; part < parts; part += kEach) {
    V next[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (part + k < parts) next[k] = __ldcs(values + (part + k) * count + i);
    }
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      if (part + k < parts) sum = add(sum, next[k]);
    }
  }
  values[i] = sum;
}

__global__ void __launch_bounds__(kThreads) add_parts_kernel(const __grid_constant__ Sums a) {
  float* values = a.values[blockIdx.y];
  const int64_t count = a.count[blockIdx.y], first = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
  if (first >= count) return;
  if (count % 4 == 0) {
    add_up(reinterpret_cast<float4*>(values), first / 4, count / 4, a.parts,
           [](float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); });
  } else {
    for (int64_t i = first; i < min(first + 4, count); ++i) {
      add_up(values, i, count, a.parts, [](float x, float y) { return x + y; });
    }
  }
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
  const bool wide = b.dtype == DType::f32;
  const cudaError_t error = launch(wide ? products_kernel<float> : products_kernel<bf16>,
                                   dim3(s.streams * a.chunks * (a.tiles * (a.tiles + 1) / 2)), kThreads,
                                   kStages * (wide ? sizeof(Pieces<float>) : sizeof(Pieces<bf16>)), where, a);
  if (error != cudaSuccess) return error;
  return launch(rows_kernel, dim3(div_up(a.rows, kThreads / 32)), kThreads, 0, where, a);
}

cudaError_t add_parts(const Backward& b, Launch where) {
  const Shape& s = b.shape;
  if (b.parts <= 1) return cudaSuccess;
  const int64_t writes = s.streams * s.tokens * s.writes, reads = s.streams * s.tokens * s.reads;
  const int64_t slots = s.streams * s.stored_chunks * s.write_slots, most = std::max({writes, reads, slots});
  const Sums sums{{static_cast<float*>(b.dk_eff), static_cast<float*>(b.dk_carry), static_cast<float*>(b.dq_eff),
                   static_cast<float*>(b.ddecay)},
                  {writes, writes, reads, slots},
                  static_cast<int>(b.parts)};
  return launch(add_parts_kernel, dim3(static_cast<unsigned>(div_up(most, kThreads * 4)), Sums::kArrays), kThreads, 0,
                where, sums);
}

}  // namespace sdm::gpu
