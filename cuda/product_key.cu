// Product-key top-k and its backward (section 6 of the specification). A warp ranks a row in shared memory, by
// the networks of comparisons of ffi/cpu/product_key.h, so that the results have the same bits. Bound by the
// latency of shared memory, which many rows on a multiprocessor hide.
#include <climits>

#include "cuda/common/launch.cuh"
#include "cuda/common/rows.cuh"

namespace sdm::gpu {
namespace {

constexpr int kWarps = 4;  // rows of a block
constexpr int kThreads = 32 * kWarps;
constexpr int kMostPairs = 1600;  // of k <= 256: the sum of floor(k / i) is 1567

struct Params {
  const void* scores;
  void* values;
  int32_t* ids;
  int64_t rows;
  int32_t columns, num_factors, k, size;  // size: the power of two from k on
  int32_t factors[kMostFactors];
};

// A key has a candidate's score in its upper half, which compares as the specification orders scores; its
// lower half says which candidate it is, the larger winning on ties.
__device__ int64_t make_key(float score, int64_t low) {
  const int bits = score == score ? __float_as_int(score) : static_cast<int>(0xff800000u);  // NaN is -inf
  return (static_cast<int64_t>(bits ^ ((bits >> 31) & 0x7fffffff)) << 32) | low;
}
__device__ float score_of(int64_t key) {
  const int bits = static_cast<int>(key >> 32);
  return __int_as_float(bits ^ ((bits >> 31) & 0x7fffffff));
}

__device__ void exchange(int64_t& a, int64_t& b) {
  const int64_t x = a, y = b;
  if (y > x) {
    a = y;
    b = x;
  }
}

// Networks of one warp; sizes are powers of two, the largest keys come first. `first`: the stride to begin with.
__device__ void clean(int64_t* x, int size, int first, int lane) {
  for (int stride = first; stride > 0; stride /= 2) {
    for (int t = lane; t < size / 2; t += 32) {
      const int i = 2 * t - (t & (stride - 1));
      exchange(x[i], x[i + stride]);
    }
    __syncwarp();
  }
}
__device__ void sort_keys(int64_t* x, int size, int lane) {
  for (int length = 2; length <= size; length *= 2) {
    const int half = length / 2;
    for (int t = lane; t < size / 2; t += 32) {
      const int i = t & (half - 1), part = 2 * (t - i);
      exchange(x[part + i], x[part + length - 1 - i]);
    }
    __syncwarp();
    clean(x, size, length / 4, lane);
  }
}

// The largest `size` of `count` keys into `best`, sorted. `make(i)` is key i; `block` has room for `size` keys.
template <class Make>
__device__ void largest(int count, int size, int64_t* best, int64_t* block, int lane, Make make) {
  for (int begin = 0; begin < count; begin += size) {
    int64_t* keys = begin == 0 ? best : block;
    for (int i = lane; i < size; i += 32) keys[i] = begin + i < count ? make(begin + i) : LLONG_MIN;
    __syncwarp();
    sort_keys(keys, size, lane);
    if (begin == 0) continue;
    for (int i = lane; i < size; i += 32) best[i] = max(best[i], block[size - 1 - i]);
    __syncwarp();
    clean(best, size, size / 2, lane);
  }
}

__host__ __device__ constexpr size_t row_bytes(int size) { return (4 * sizeof(int64_t) + 2 * sizeof(int32_t)) * size; }

template <class T>
__global__ void __launch_bounds__(kThreads) topk_kernel(const __grid_constant__ Params a) {
  extern __shared__ __align__(16) char shared[];
  __shared__ uint16_t pair_i[kMostPairs], pair_j[kMostPairs];
  __shared__ int num_pairs;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  const bool writes = row < a.rows;
  const T* scores = static_cast<const T*>(a.scores) + (writes ? row : 0) * a.columns;
  int64_t* best = reinterpret_cast<int64_t*>(shared + warp * row_bytes(a.size));
  int64_t *next = best + a.size, *merged = next + a.size, *block = merged + a.size;
  int32_t *slots = reinterpret_cast<int32_t*>(block + a.size), *merged_slots = slots + a.size;

  int start = 0, count = 1;  // column of the factor; slots in `best`
  for (int m = 0; m < a.num_factors; ++m) {
    const int n = a.factors[m], ranked = min(n, a.k);
    largest(n, a.size, m == 0 ? best : next, block, lane,
            [&](int c) { return make_key(to_float(scores[start + c]), c); });
    start += n;
    if (m == 0) {
      count = ranked;
      for (int i = lane; i < count; i += 32) slots[i] = static_cast<int32_t>(best[i]);
      __syncwarp();
      continue;
    }
    // Of the ranks i so far and j of this factor, only pairs with (i + 1) (j + 1) <= k can win. Ties go to
    // the larger i + j, then to the larger i. All rows have the same pairs.
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += kThreads) {
      int at = 0;
      for (int b = 0; b < i; ++b) at += min(ranked, a.k / (b + 1));
      const int of_i = min(ranked, a.k / (i + 1));
      for (int j = 0; j < of_i; ++j) {
        pair_i[at + j] = static_cast<uint16_t>(i);
        pair_j[at + j] = static_cast<uint16_t>(j);
      }
      if (i == count - 1) num_pairs = at + of_i;
    }
    __syncthreads();
    largest(num_pairs, a.size, merged, block, lane, [&](int q) {
      const int i = pair_i[q], j = pair_j[q];
      float sum = score_of(best[i]) + score_of(next[j]);
      if constexpr (sizeof(T) == 2) sum = __bfloat162float(__float2bfloat16_rn(sum));
      return make_key(sum, (static_cast<int64_t>(i + j) << 16) | i);
    });
    count = min(num_pairs, a.k);
    for (int rank = lane; rank < count; rank += 32) {
      const int low = static_cast<int>(merged[rank]), i = low & 0xffff, j = (low >> 16) - i;
      merged_slots[rank] = slots[i] * n + static_cast<int32_t>(next[j]);
    }
    __syncwarp();
    int64_t* const keys = best;
    best = merged;
    merged = keys;
    int32_t* const numbers = slots;
    slots = merged_slots;
    merged_slots = numbers;
  }

  // By slot, with the score's bits below it.
  for (int i = lane; i < a.size; i += 32) {
    const int64_t bits = static_cast<uint32_t>(__float_as_int(score_of(best[i])));
    best[i] = i < a.k ? (static_cast<int64_t>(~slots[i]) << 32) | bits : LLONG_MIN;
  }
  __syncwarp();
  sort_keys(best, a.size, lane);
  if (!writes) return;
  for (int i = lane; i < a.k; i += 32) {
    a.ids[row * a.k + i] = ~static_cast<int32_t>(best[i] >> 32);
    from_float(static_cast<T*>(a.values) + row * a.k + i, __int_as_float(static_cast<int>(best[i])));
  }
}

struct BackwardParams {
  const void* d_values;
  const int32_t* ids;
  void* d_scores;
  int32_t columns, num_factors, k;
  int32_t factors[kMostFactors];
};

// A block a row, a thread a column: each column adds up its own slots, in their order.
template <class T>
__global__ void __launch_bounds__(kThreads) backward_kernel(const __grid_constant__ BackwardParams a) {
  extern __shared__ int32_t columns_of[];  // [num_factors][k]
  float* d = reinterpret_cast<float*>(columns_of + a.num_factors * a.k);
  const int64_t row = blockIdx.x;
  for (int i = threadIdx.x; i < a.k; i += kThreads) {
    int32_t slot = a.ids[row * a.k + i];
    d[i] = to_float(static_cast<const T*>(a.d_values)[row * a.k + i]);
    for (int m = a.num_factors - 1; m >= 0; --m) {
      columns_of[m * a.k + i] = slot % a.factors[m];
      slot /= a.factors[m];
    }
  }
  __syncthreads();
  int start = 0;
  for (int m = 0; m < a.num_factors; ++m) {
    for (int c = threadIdx.x; c < a.factors[m]; c += kThreads) {
      float sum = 0;
      for (int i = 0; i < a.k; ++i) {
        if (columns_of[m * a.k + i] == c) sum += d[i];
      }
      from_float(static_cast<T*>(a.d_scores) + row * a.columns + start + c, sum);
    }
    start += a.factors[m];
  }
}

template <class From, class To>
void copy_factors(const From& p, To& a) {
  a.columns = static_cast<int32_t>(p.columns);
  a.num_factors = static_cast<int32_t>(p.num_factors);
  a.k = static_cast<int32_t>(p.k);
  for (int m = 0; m < a.num_factors; ++m) a.factors[m] = static_cast<int32_t>(p.factors[m]);
}

}  // namespace

cudaError_t product_key_topk(const ProductKey& p, Launch where) {
  Params a = {};
  copy_factors(p, a);
  a.scores = p.scores;
  a.values = p.values;
  a.ids = p.ids;
  a.rows = p.rows;
  a.size = 1;
  while (a.size < a.k) a.size *= 2;
  const auto kernel = p.dtype == DType::bf16 ? topk_kernel<bf16> : topk_kernel<float>;
  return launch(kernel, dim3(div_up(p.rows, kWarps)), kThreads, kWarps * row_bytes(a.size), where, a);
}

cudaError_t product_key_topk_backward(const ProductKeyBackward& p, Launch where) {
  BackwardParams a = {};
  copy_factors(p, a);
  a.d_values = p.d_values;
  a.ids = p.ids;
  a.d_scores = p.d_scores;
  const size_t bytes = (p.num_factors + 1) * p.k * sizeof(int32_t);
  const auto kernel = p.dtype == DType::bf16 ? backward_kernel<bf16> : backward_kernel<float>;
  return launch(kernel, dim3(static_cast<unsigned>(p.rows)), kThreads, bytes, where, a);
}

}  // namespace sdm::gpu
