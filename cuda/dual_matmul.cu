// Dual matmul of a chunk: delta = X u and y = inter + QX u (section 3 of the specification), and the
// backward's du = QX^T dY + X^T carried (section 4). A block makes 64 tokens by 32 columns of one product on
// the tensor cores, in three TF32 products, which is as accurate as float32. Few operations a step: bound by
// latency. The matrices and dY do not change while steps run, so they are loaded before the
// kernel that makes u or `carried` has ended.
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kRows = 64;
constexpr int kColumns = 32;
constexpr int kDepth = 64;
// Strides at which the pieces of a warp touch all banks.
constexpr int kMatrixStride = kDepth + 4;
constexpr int kTransposedStride = kRows + 8;
constexpr int kRowStride = kColumns + 8;

struct TileMemory {
  float matrix[kDepth * kTransposedStride];  // [t][kMatrixStride], or [k][kTransposedStride]
  float rows[kDepth * kRowStride];
};

// TF32 products for one of float32.
constexpr int kProducts = 3;

// A warp's 16 rows of the tile.
struct Sums {
  float value[kColumns / 8][4];
};

// M[row0 .. row0 + 64, k0 .. k0 + 64) of an [ld][ld] matrix, or M^T.
template <bool Transposed>
__device__ inline void load_matrix(TileMemory& memory, const float* matrix, int ld, int row0, int k0, int end) {
  const int outer0 = Transposed ? k0 : row0, outer_end = Transposed ? end : ld;
  const int inner0 = Transposed ? row0 : k0, inner_end = Transposed ? ld : end;
  constexpr int kStride = Transposed ? kTransposedStride : kMatrixStride;
  if (ld % 4 == 0) {
#pragma unroll
    for (int i = threadIdx.x; i < 64 * 16; i += kThreads) {
      const int o = i / 16, in = i % 16 * 4;
      // Values past `inner_end` in a row are multiplied by zero rows, or never stored.
      const bool inside = outer0 + o < outer_end && inner0 + in < ld;
      copy_async(memory.matrix + o * kStride + in,
                 inside ? matrix + static_cast<int64_t>(outer0 + o) * ld + inner0 + in : matrix, inside);
    }
  } else {
    for (int i = threadIdx.x; i < 64 * 64; i += kThreads) {
      const int o = i / 64, in = i % 64;
      memory.matrix[o * kStride + in] = outer0 + o < outer_end && inner0 + in < inner_end
                                            ? matrix[static_cast<int64_t>(outer0 + o) * ld + inner0 + in]
                                            : 0.0f;
    }
  }
}

// Rows k0 .. k0 + 64 of 32 columns, zeros past the last row and column.
template <class T>
__device__ inline void load_rows(TileMemory& memory, const T* from, int64_t width, int k0, int end, int columns) {
  if (width % 4 == 0) {
#pragma unroll
    for (int i = threadIdx.x; i < kDepth * kColumns / 4; i += kThreads) {
      const int k = i / (kColumns / 4), c = i % (kColumns / 4) * 4;
      const bool inside = k0 + k < end && c < columns;
      float* to = memory.rows + k * kRowStride + c;
      if constexpr (sizeof(T) == 4) {
        copy_async(to, inside ? from + (k0 + k) * width + c : from, inside);
      } else {
        uint2 q = make_uint2(0, 0);
        if (inside) q = *reinterpret_cast<const uint2*>(from + (k0 + k) * width + c);
        *reinterpret_cast<float4*>(to) = make_float4(__uint_as_float(q.x << 16), __uint_as_float(q.x & 0xffff0000u),
                                                     __uint_as_float(q.y << 16), __uint_as_float(q.y & 0xffff0000u));
      }
    }
  } else {
    for (int i = threadIdx.x; i < kDepth * kColumns; i += kThreads) {
      const int k = i / kColumns, c = i % kColumns;
      memory.rows[k * kRowStride + c] = k0 + k < end && c < columns ? to_float(from[(k0 + k) * width + c]) : 0.0f;
    }
  }
}

// sums += the tile in memory, of whose depth [begin, end) is not zero for this warp.
template <bool Transposed, int Products>
__device__ inline void multiply_tile(Sums& sums, const TileMemory& memory, int begin, int end) {
  const int row0 = static_cast<int>(threadIdx.x) / 32 * 16;
  // The tensor cores cut off what they add up; a float32 addition for every 32 of the depth keeps that small.
  for (int k0 = begin; k0 < end; k0 += 32) {
    Sums part = {};
#pragma unroll 2
    for (int k = k0; k < min(end, k0 + 32); k += 8) {
      LeftPiece<Products> left;
      left.load([&](int r, int d) {
        return Transposed ? memory.matrix[(k + d) * kTransposedStride + row0 + r]
                          : memory.matrix[(row0 + r) * kMatrixStride + k + d];
      });
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        RightPiece<Products> right;
        right.load([&](int d, int c) { return memory.rows[(k + d) * kRowStride + n * 8 + c]; });
        multiply(part.value[n], left, right);
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.value[n][i] += part.value[n][i];
    }
  }
}

// sums += M[row0 .., begin .. end) times rows. The first piece of the matrix is loaded before `ready`.
template <bool Transposed, int Products, class T, class Ready>
__device__ inline void multiply_all(Sums& sums, TileMemory& memory, const float* matrix, int ld, int row0, int begin,
                                    int end, const T* rows, int64_t width, int columns, Ready ready) {
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * 16;
  for (int k0 = begin; k0 < end; k0 += kDepth) {
    __syncthreads();
    load_matrix<Transposed>(memory, matrix, ld, row0, k0, end);
    if (k0 == begin) ready();
    load_rows(memory, rows, width, k0, end, columns);
    wait_for_copies();
    __syncthreads();
    // Below the diagonal block every depth counts, in it those on this side of the diagonal.
    const bool diagonal = k0 == row0;
    const int from = Transposed && diagonal ? warp_row : 0;
    const int to = !Transposed && diagonal ? warp_row + 16 : kDepth;
    multiply_tile<Transposed, Products>(sums, memory, from, to);
  }
}

// Calls put(row, column, a, b) for the warp's sums, two columns side by side.
template <class Put>
__device__ inline void for_sums(const Sums& sums, Put put) {
  const int row0 = static_cast<int>(threadIdx.x) / 32 * 16;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) {
    put(row0 + sum_row(0), n * 8 + sum_column(0), sums.value[n][0], sums.value[n][1]);
    put(row0 + sum_row(2), n * 8 + sum_column(2), sums.value[n][2], sums.value[n][3]);
  }
}

struct Dual {
  const float *x, *qx, *u, *inter;
  float* delta;
  void* y;
  int64_t width, begin, square_stride, delta_stride, one_chunk_stride, y_stride;
  int64_t first_stream;
  int chunk, tokens, columns, column_tiles, row_tiles;
};

template <class T>
__global__ void __launch_bounds__(kThreads) dual_matmul_kernel(const __grid_constant__ Dual a) {
  __shared__ __align__(16) TileMemory memory;
  let_next_start();
  int block = blockIdx.x;
  const int column0 = block % a.column_tiles * kColumns;
  block /= a.column_tiles;
  const bool reads = block % 2 == 1;  // y, else delta
  block /= 2;
  const int row0 = (a.row_tiles - 1 - block % a.row_tiles) * kRows;  // the longest sums first
  const int64_t p = a.first_stream + block / a.row_tiles;
  const int columns = a.columns - column0;
  const int64_t first = a.begin + column0;
  const bool vectors = a.width % 2 == 0;
  Sums sums = {};
  multiply_all<false, kProducts>(sums, memory, (reads ? a.qx : a.x) + p * a.square_stride, a.chunk, row0, 0,
                                 min(a.tokens, row0 + kRows), a.u + p * a.one_chunk_stride + first, a.width, columns,
                                 wait_for_previous);
  for_sums(sums, [&](int t, int c, float left, float right) {
    t += row0;
    if (t >= a.tokens || c >= columns) return;
    const int64_t at = t * a.width + first + c;
    const bool both = c + 1 < columns;
    if (reads) {
      const float* inter = a.inter + p * a.one_chunk_stride + at;
      store_two(static_cast<T*>(a.y) + p * a.y_stride + at, inter[0] + left, both ? inter[1] + right : 0.0f, both,
                vectors);
    } else {
      store_two(a.delta + p * a.delta_stride + at, left, right, both, vectors);
    }
  });
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
  int chunk, tokens, columns, column_tiles, row_tiles;
};

template <class T>
__global__ void __launch_bounds__(kThreads) du_matmul_kernel(const __grid_constant__ Du a) {
  __shared__ __align__(16) TileMemory memory;
  let_next_start();
  int block = blockIdx.x;
  const int column0 = block % a.column_tiles * kColumns;
  block /= a.column_tiles;
  const int row0 = block % a.row_tiles * kRows;
  const int64_t p = a.first_stream + block / a.row_tiles;
  const int columns = a.columns - column0;
  const int64_t first = a.begin + column0;
  const bool vectors = a.width % 2 == 0;
  Sums sums = {};
  multiply_all<true, kProducts>(sums, memory, a.qx + p * a.square_stride, a.chunk, row0, row0, a.tokens,
                                static_cast<const T*>(a.dy) + p * a.row_stride + first, a.width, columns, [] {});
  multiply_all<true, kProducts>(sums, memory, a.x + p * a.square_stride, a.chunk, row0, row0, a.tokens,
                                a.carried + p * a.carried_stride + first, a.width, columns, wait_for_previous);
  for_sums(sums, [&](int t, int c, float left, float right) {
    t += row0;
    if (t >= a.tokens || c >= columns) return;
    store_two(a.du + p * a.row_stride + t * a.width + first + c, left, right, c + 1 < columns, vectors);
  });
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
  return launch(bf ? dual_matmul_kernel<bf16> : dual_matmul_kernel<float>,
                dim3(range.streams * a.row_tiles * 2 * a.column_tiles), kThreads, 0, where, a);
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
  a.row_tiles = static_cast<int>(div_up(c.tokens, kRows));
  return launch(bf ? du_matmul_kernel<bf16> : du_matmul_kernel<float>,
                dim3(range.streams * a.row_tiles * a.column_tiles), kThreads, 0, where, a);
}

}  // namespace sdm::gpu
