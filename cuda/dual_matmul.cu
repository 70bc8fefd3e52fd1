// Dual matmul of a chunk: delta = X u and y = inter + QX u (section 3 of the specification), and the
// backward's du = QX^T dY + X^T carried (section 4). A block makes 16 tokens by 32 columns of one product on
// the tensor cores, in three TF32 products, which is as accurate as float32; its warps share the depth, and add up
// what they got in a fixed order. Few operations a step: bound by latency. So operands go from memory into registers,
// without shared memory and barriers between; the matrices and dY, which do not change while steps run, before the
// kernel that makes u or `carried` has ended, and all of u or `carried` at once after it.
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor.cuh"

namespace sdm::gpu {
namespace {

constexpr int kRows = 16;
constexpr int kColumns = 32;
constexpr int kDepth = 16;  // of a unit; a block's units go round its warps
constexpr int kSumStride = kColumns + 4;
constexpr int kAdders = kRows * kColumns / 4;  // threads that add up the warps' sums

// TF32 products for one of float32.
constexpr int kProducts = 3;

// The warps of a block, and the most units that each of them takes.
template <int Warps, int Units>
struct Sizes {
  static constexpr int warps = Warps, units = Units, threads = 32 * Warps;
  static_assert(threads >= kAdders);
  // Where in the depth unit `i` of this warp begins.
  __device__ static int depth(int i) { return (i * Warps + static_cast<int>(threadIdx.x) / 32) * kDepth; }
  using SharedSums = float[Warps][kRows * kSumStride];
};

// A lane's values of a unit. Lane 4g + t has depths 4t .. 4t + 3 and columns 4g .. 4g + 3, which lie side by side in
// memory; the order of the depth is free as long as both sides agree, that of the columns as long as the sums do.
struct MatrixUnit {
  float value[2][4];  // two rows, four depths
};
struct RowsUnit {
  float value[4][4];  // four depths, four columns
};
// A warp's 16 by 32 sums: of column 8t + n of the tile, and of column 8t + 4 + n, two rows each.
struct Sums {
  float value[kColumns / 8][4];
};

// The row of the tile that a lane's half h (0 or 1) of a matrix unit and of the sums belongs to.
template <bool Transposed>
__device__ inline int tile_row(int h) {
  const int g = static_cast<int>(threadIdx.x & 31) / 4;
  return Transposed ? 2 * g + h : g + 8 * h;
}

// M[row0 .. row0 + 16, k0 .. k0 + 16) of an [ld][ld] matrix, or M^T; zeros at and past depth `end`.
template <bool Transposed>
__device__ inline void load_matrix(MatrixUnit& unit, const float* matrix, int ld, int row0, int k0, int end) {
  const int k = k0 + static_cast<int>(threadIdx.x & 3) * 4, row = row0 + tile_row<Transposed>(0);
  unit = {};
  if constexpr (Transposed) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float* from = matrix + static_cast<int64_t>(k + j) * ld + row;
      if (k + j >= end) continue;
      if (ld % 4 == 0) {
        const float2 two = row < ld ? *reinterpret_cast<const float2*>(from) : make_float2(0, 0);
        unit.value[0][j] = two.x;
        unit.value[1][j] = two.y;
      } else {
        if (row < ld) unit.value[0][j] = from[0];
        if (row + 1 < ld) unit.value[1][j] = from[1];
      }
    }
  } else {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row0 + tile_row<false>(h);
      const float* from = matrix + static_cast<int64_t>(r) * ld + k;
      if (r >= ld) continue;
      if (ld % 4 == 0) {
        // What is past `end` is multiplied by zero rows.
        const float4 four = k < end ? *reinterpret_cast<const float4*>(from) : make_float4(0, 0, 0, 0);
        unit.value[h][0] = four.x;
        unit.value[h][1] = four.y;
        unit.value[h][2] = four.z;
        unit.value[h][3] = four.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (k + j < end) unit.value[h][j] = from[j];
        }
      }
    }
  }
}

// Four values, or `count` (fewer where rows are no whole vectors), past the first-level cache.
__device__ inline void load_four(const float* from, int count, bool vectors, float (&to)[4]) {
  if (vectors) {
    const float4 four = count > 0 ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0, 0, 0, 0);
    to[0] = four.x;
    to[1] = four.y;
    to[2] = four.z;
    to[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = i < count ? __ldcg(from + i) : 0.0f;
  }
}
__device__ inline void load_four(const bf16* from, int count, bool vectors, float (&to)[4]) {
  if (vectors) {
    const uint2 four = count > 0 ? __ldcg(reinterpret_cast<const uint2*>(from)) : make_uint2(0, 0);
    to[0] = __uint_as_float(four.x << 16);
    to[1] = __uint_as_float(four.x & 0xffff0000u);
    to[2] = __uint_as_float(four.y << 16);
    to[3] = __uint_as_float(four.y & 0xffff0000u);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = i < count ? to_float(from[i]) : 0.0f;
  }
}

// Rows k0 .. k0 + 16 of 32 columns, zeros past the last row and column.
template <class T>
__device__ inline void load_rows(RowsUnit& unit, const T* from, int64_t width, int k0, int end, int columns) {
  const int k = k0 + static_cast<int>(threadIdx.x & 3) * 4, c = static_cast<int>(threadIdx.x & 31) / 4 * 4;
  from += k * width + c;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    load_four(from + j * width, k + j < end ? columns - c : 0, width % 4 == 0, unit.value[j]);
  }
}

__device__ inline void multiply_unit(Sums& sums, const MatrixUnit& matrix, const RowsUnit& rows) {
  // The tensor cores cut off what they add up; a float32 addition for every unit keeps that small.
  Sums part = {};
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    LeftPiece<kProducts> left;
    left.set({matrix.value[0][j], matrix.value[1][j], matrix.value[0][j + 1], matrix.value[1][j + 1]});
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      RightPiece<kProducts> right;
      right.set({rows.value[j][n], rows.value[j + 1][n]});
      multiply(part.value[n], left, right);
    }
  }
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums.value[n][i] += part.value[n][i];
  }
}

// The sums of all warps: each of the first kAdders threads gets those of four columns, from 4 (threadIdx.x % 8), of row
// threadIdx.x / 8.
template <bool Transposed, int Warps>
__device__ inline float4 add_warps(float (&shared)[Warps][kRows * kSumStride], const Sums& sums) {
  const int t = static_cast<int>(threadIdx.x & 3);
  float* mine = shared[threadIdx.x / 32];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const auto& v = sums.value;
      *reinterpret_cast<float4*>(mine + tile_row<Transposed>(h) * kSumStride + 8 * t + 4 * i) =
          make_float4(v[0][2 * h + i], v[1][2 * h + i], v[2][2 * h + i], v[3][2 * h + i]);
    }
  }
  __syncthreads();
  float4 total = make_float4(0, 0, 0, 0);
  if (threadIdx.x >= kAdders) return total;
#pragma unroll
  for (int w = 0; w < Warps; ++w) {
    const float4 x = *reinterpret_cast<const float4*>(shared[w] + threadIdx.x / 8 * kSumStride + threadIdx.x % 8 * 4);
    total.x += x.x;
    total.y += x.y;
    total.z += x.z;
    total.w += x.w;
  }
  return total;
}

// Stores four columns, or the `count` that there are.
template <class T>
__device__ inline void store_four(T* to, float4 x, int count, bool vectors) {
  if (count > 0) store_two(to, x.x, x.y, count > 1, vectors);
  if (count > 2) store_two(to + 2, x.z, x.w, count > 3, vectors);
}

struct Dual {
  const float *x, *qx, *u, *inter;
  float* delta;
  void* y;
  int64_t width, begin, square_stride, delta_stride, one_chunk_stride, y_stride;
  int64_t first_stream;
  int streams, chunk, tokens, columns, column_tiles, row_tiles;
};

template <class T, class S>
__global__ void __launch_bounds__(S::threads, 16 / S::warps) dual_matmul_kernel(const __grid_constant__ Dual a) {
  __shared__ __align__(16) typename S::SharedSums shared;
  let_next_start();
  int block = blockIdx.x;
  const int column0 = block % a.column_tiles * kColumns;
  block /= a.column_tiles;
  const bool reads = block % 2 == 1;  // y, else delta
  block /= 2;
  const int64_t p = a.first_stream + block % a.streams;
  const int row0 = (a.row_tiles - 1 - block / a.streams) * kRows;  // the longest sums first
  const int columns = a.columns - column0, end = min(a.tokens, row0 + kRows);
  const int64_t first = a.begin + column0;
  const float* matrix = (reads ? a.qx : a.x) + p * a.square_stride;
  MatrixUnit left[S::units];
#pragma unroll
  for (int i = 0; i < S::units; ++i) load_matrix<false>(left[i], matrix, a.chunk, row0, S::depth(i), end);
  const int t = row0 + static_cast<int>(threadIdx.x) / 8, c = static_cast<int>(threadIdx.x) % 8 * 4;
  const int count = threadIdx.x < kAdders && t < a.tokens ? columns - c : 0;
  const int64_t at = t * a.width + first + c;
  const bool vectors = a.width % 4 == 0;

  wait_for_previous();
  const float* u = a.u + p * a.one_chunk_stride + first;
  RowsUnit right[S::units];
#pragma unroll
  for (int i = 0; i < S::units; ++i) load_rows(right[i], u, a.width, S::depth(i), end, columns);
  float inter[4] = {};
  if (reads) load_four(a.inter + p * a.one_chunk_stride + at, count, vectors, inter);
  Sums sums = {};
#pragma unroll
  for (int i = 0; i < S::units; ++i) {
    if (S::depth(i) < end) multiply_unit(sums, left[i], right[i]);
  }
  float4 total = add_warps<false>(shared, sums);
  if (reads) {
    total = make_float4(inter[0] + total.x, inter[1] + total.y, inter[2] + total.z, inter[3] + total.w);
    store_four(static_cast<T*>(a.y) + p * a.y_stride + at, total, count, vectors);
  } else {
    store_four(a.delta + p * a.delta_stride + at, total, count, vectors);
  }
}

// error = v - retrieved where a token writes, u = beta error.
struct Errors {
  const void* v;
  const float *retrieved, *beta;
  const int32_t* written;
  float *error, *u;
  int64_t width, count;
};

template <class T>
__global__ void __launch_bounds__(256) errors_kernel(const __grid_constant__ Errors a) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= a.count) return;
  const int64_t t = i / a.width;
  const bool written = a.written[t] > 0;
  const float error = written ? to_float(static_cast<const T*>(a.v)[i]) - a.retrieved[i] : 0.0f;
  a.error[i] = error;
  a.u[i] = written ? a.beta[t] * error : 0.0f;
}

struct Du {
  const float *x, *qx, *carried;
  const void* dy;
  float* du;
  int64_t width, begin, square_stride, carried_stride, row_stride;
  int64_t first_stream;
  int streams, chunk, tokens, columns, column_tiles;
};

template <class T, class S>
__global__ void __launch_bounds__(S::threads, 16 / S::warps) du_matmul_kernel(const __grid_constant__ Du a) {
  __shared__ __align__(16) typename S::SharedSums shared;
  let_next_start();
  int block = blockIdx.x;
  const int column0 = block % a.column_tiles * kColumns;
  block /= a.column_tiles;
  const int64_t p = a.first_stream + block % a.streams;
  const int row0 = block / a.streams * kRows;  // the longest sums first
  const int columns = a.columns - column0;
  const int64_t first = a.begin + column0;
  const float *x = a.x + p * a.square_stride, *qx = a.qx + p * a.square_stride;
  const T* dy = static_cast<const T*>(a.dy) + p * a.row_stride + first;
  MatrixUnit left[S::units];
  RowsUnit right[S::units];
  Sums sums = {};
#pragma unroll
  for (int i = 0; i < S::units; ++i) {
    load_matrix<true>(left[i], qx, a.chunk, row0, row0 + S::depth(i), a.tokens);
    load_rows(right[i], dy, a.width, row0 + S::depth(i), a.tokens, columns);
  }
#pragma unroll
  for (int i = 0; i < S::units; ++i) {
    if (row0 + S::depth(i) < a.tokens) multiply_unit(sums, left[i], right[i]);
    load_matrix<true>(left[i], x, a.chunk, row0, row0 + S::depth(i), a.tokens);
  }

  wait_for_previous();
  const float* carried = a.carried + p * a.carried_stride + first;
#pragma unroll
  for (int i = 0; i < S::units; ++i) {
    load_rows(right[i], carried, a.width, row0 + S::depth(i), a.tokens, columns);
  }
#pragma unroll
  for (int i = 0; i < S::units; ++i) {
    if (row0 + S::depth(i) < a.tokens) multiply_unit(sums, left[i], right[i]);
  }
  const float4 total = add_warps<true>(shared, sums);
  const int t = row0 + static_cast<int>(threadIdx.x) / 8, c = static_cast<int>(threadIdx.x) % 8 * 4;
  const int count = threadIdx.x < kAdders && t < a.tokens ? columns - c : 0;
  store_four(a.du + p * a.row_stride + t * a.width + first + c, total, count, a.width % 4 == 0);
}

// Calls f(T{}, Sizes<..>{}): few units a warp, because it takes them one after another.
template <class F>
cudaError_t for_sizes(DType dtype, int64_t chunk, F&& f) {
  const auto with_type = [&](auto type) {
    if (chunk <= 4 * kDepth) return f(type, Sizes<4, 1>{});
    if (chunk <= 8 * kDepth) return f(type, Sizes<8, 1>{});
    return f(type, Sizes<8, 2>{});
  };
  return dtype == DType::bf16 ? with_type(bf16{}) : with_type(float{});
}

}  // namespace

cudaError_t dual_matmul(const Forward& f, int64_t n, Range range, Launch where) {
  const Shape& s = f.shape;
  const ChunkAt c(s, n);
  const bool bf = f.dtype == DType::bf16;
  const int64_t square = c.stored_chunk * s.chunk * s.chunk, row = c.token * s.width;
  if (f.retrieved != nullptr) {
    const Errors errors{f.in.v,          static_cast<const float*>(f.retrieved), static_cast<const float*>(f.in.beta),
                        f.chunks.writes, static_cast<float*>(f.error),           static_cast<float*>(f.u),
                        s.width,         s.streams * s.chunk * s.width};
    const cudaError_t error =
        launch(bf ? errors_kernel<bf16> : errors_kernel<float>, dim3(div_up(errors.count, 256)), 256, 0, where, errors);
    if (error != cudaSuccess) return error;
  }
  Dual a = {};
  a.first_stream = range.first_stream;
  a.x = at<float>(f.x, square);
  a.qx = at<float>(f.qx, square);
  a.u = static_cast<const float*>(f.u);
  a.inter = static_cast<const float*>(f.inter);
  a.delta = at<float>(f.delta, f.row_offset(n));
  a.y = bf ? static_cast<void*>(at<bf16>(f.y, row)) : static_cast<void*>(at<float>(f.y, row));
  a.width = s.width;
  a.begin = range.begin;
  a.square_stride = s.stored_chunks * s.chunk * s.chunk;
  a.delta_stride = f.row_stride();
  a.one_chunk_stride = s.chunk * s.width;
  a.y_stride = s.tokens * s.width;
  a.chunk = static_cast<int>(s.chunk);
  a.tokens = c.tokens;
  a.columns = static_cast<int>(range.end - range.begin);
  a.column_tiles = static_cast<int>(div_up(a.columns, kColumns));
  a.row_tiles = static_cast<int>(div_up(c.tokens, kRows));
  a.streams = static_cast<int>(range.streams);
  return for_sizes(f.dtype, s.chunk, [&](auto type, auto sizes) {
    return launch(dual_matmul_kernel<decltype(type), decltype(sizes)>,
                  dim3(range.streams * a.row_tiles * 2 * a.column_tiles), sizes.threads, 0, where, a);
  });
}

cudaError_t du_matmul(const Backward& b, int64_t n, Range range, Launch where) {
  const Shape& s = b.shape;
  const ChunkAt c(s, n);
  const bool bf = b.dtype == DType::bf16;
  const int64_t square = c.stored_chunk * s.chunk * s.chunk, row = c.token * s.width;
  Du a = {};
  a.first_stream = range.first_stream;
  a.x = at<float>(b.x, square);
  a.qx = at<float>(b.qx, square);
  a.carried = static_cast<const float*>(b.carried);
  a.dy = bf ? static_cast<const void*>(at<bf16>(b.dy, row)) : static_cast<const void*>(at<float>(b.dy, row));
  a.du = at<float>(b.dv, row);
  a.width = s.width;
  a.begin = range.begin;
  a.square_stride = s.stored_chunks * s.chunk * s.chunk;
  a.carried_stride = s.chunk * s.width;
  a.row_stride = s.tokens * s.width;
  a.chunk = static_cast<int>(s.chunk);
  a.tokens = c.tokens;
  a.columns = static_cast<int>(range.end - range.begin);
  a.column_tiles = static_cast<int>(div_up(a.columns, kColumns));
  a.streams = static_cast<int>(range.streams);
  return for_sizes(b.dtype, s.chunk, [&](auto type, auto sizes) {
    return launch(du_matmul_kernel<decltype(type), decltype(sizes)>,
                  dim3(div_up(c.tokens, kRows) * range.streams * a.column_tiles), sizes.threads, 0, where, a);
  });
}

}  // namespace sdm::gpu
