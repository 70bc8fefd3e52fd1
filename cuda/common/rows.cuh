// Loads and stores of consecutive values as floats: 16-byte vectors where rows are whole vectors
// (V = 8 bfloat16 or 4 float32), single values (V = 1) for every other width.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

namespace sdm::gpu {

using bf16 = __nv_bfloat16;

template <class T>
inline constexpr int kVector = 16 / sizeof(T);

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__device__ inline void from_float(float* p, float x) { *p = x; }
__device__ inline void from_float(bf16* p, float x) { *p = __float2bfloat16_rn(x); }

// The bits of V consecutive values of a row, as loaded.
template <class T, int V>
struct Packed {
  static constexpr int kWords = V * sizeof(T) <= 4 ? 1 : V * sizeof(T) / 4;
  uint32_t word[kWords];
};

template <class T, int V>
__device__ inline Packed<T, V> load_packed(const T* p) {
  Packed<T, V> x;
  if constexpr (V == 1) {
    if constexpr (sizeof(T) == 2) {
      x.word[0] = *reinterpret_cast<const uint16_t*>(p);
    } else {
      x.word[0] = *reinterpret_cast<const uint32_t*>(p);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Packed<T, V>::kWords / 4; ++i) {
      const uint4 q = reinterpret_cast<const uint4*>(p)[i];
      x.word[4 * i] = q.x;
      x.word[4 * i + 1] = q.y;
      x.word[4 * i + 2] = q.z;
      x.word[4 * i + 3] = q.w;
    }
  }
  return x;
}

// The same past the first-level cache: rows that another kernel may have written since this multiprocessor
// last saw them, and that are read once.
template <class T, int V>
__device__ inline Packed<T, V> load_row(const T* p) {
  Packed<T, V> x;
  if constexpr (V == 1) {
    if constexpr (sizeof(T) == 2) {
      x.word[0] = __ldcg(reinterpret_cast<const unsigned short*>(p));
    } else {
      x.word[0] = __ldcg(reinterpret_cast<const unsigned int*>(p));
    }
  } else {
#pragma unroll
    for (int i = 0; i < Packed<T, V>::kWords / 4; ++i) {
      const uint4 q = __ldcg(reinterpret_cast<const uint4*>(p) + i);
      x.word[4 * i] = q.x;
      x.word[4 * i + 1] = q.y;
      x.word[4 * i + 2] = q.z;
      x.word[4 * i + 3] = q.w;
    }
  }
  return x;
}

// Brings the 32 bytes at an address into the second-level cache, without waiting.
__device__ inline void prefetch_row(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Rows that nobody reads soon leave the cache first.
template <class T, int V>
__device__ inline void store_packed_streaming(T* p, const Packed<T, V>& x) {
  if constexpr (V == 1) {
    if constexpr (sizeof(T) == 2) {
      *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(x.word[0]);
    } else {
      *reinterpret_cast<uint32_t*>(p) = x.word[0];
    }
  } else {
#pragma unroll
    for (int i = 0; i < Packed<T, V>::kWords / 4; ++i) {
      __stcs(reinterpret_cast<uint4*>(p) + i,
             make_uint4(x.word[4 * i], x.word[4 * i + 1], x.word[4 * i + 2], x.word[4 * i + 3]));
    }
  }
}
template <class T, int V>
__device__ inline void store_packed(T* p, const Packed<T, V>& x) {
  if constexpr (V == 1) {
    store_packed_streaming<T, V>(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < Packed<T, V>::kWords / 4; ++i) {
      reinterpret_cast<uint4*>(p)[i] =
          make_uint4(x.word[4 * i], x.word[4 * i + 1], x.word[4 * i + 2], x.word[4 * i + 3]);
    }
  }
}

template <class T, int V>
__device__ inline void unpack(const Packed<T, V>& x, float (&y)[V]) {
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if constexpr (sizeof(T) == 4) {
      y[i] = __uint_as_float(x.word[i]);
    } else {
      const uint32_t w = x.word[i / 2];
      y[i] = __uint_as_float(i % 2 == 0 ? w << 16 : w & 0xffff0000u);
    }
  }
}

template <class T, int V>
__device__ inline Packed<T, V> pack(const float (&y)[V]) {
  Packed<T, V> x;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < V; ++i) x.word[i] = __float_as_uint(y[i]);
  } else if constexpr (V == 1) {
    x.word[0] = __bfloat16_as_ushort(__float2bfloat16_rn(y[0]));
  } else {
#pragma unroll
    for (int i = 0; i < V; i += 2) {
      const __nv_bfloat162 two = __floats2bfloat162_rn(y[i], y[i + 1]);
      x.word[i / 2] = *reinterpret_cast<const uint32_t*>(&two);
    }
  }
  return x;
}

template <class T, int V>
__device__ inline void load(const T* p, float (&y)[V]) {
  unpack<T, V>(load_packed<T, V>(p), y);
}
template <class T, int V>
__device__ inline void store(T* p, const float (&y)[V]) {
  store_packed<T, V>(p, pack<T, V>(y));
}

// To a row in global memory, in whole 16-byte accesses: the compiler makes four of one where it is only assigned, in
// some kernels.
template <class T, int V>
__device__ inline void store_packed_row(T* p, const Packed<T, V>& x) {
  if constexpr (V == 1) {
    store_packed_streaming<T, V>(p, x);
  } else {
#pragma unroll
    for (int i = 0; i < Packed<T, V>::kWords / 4; ++i) {
      __stcg(reinterpret_cast<uint4*>(p) + i,
             make_uint4(x.word[4 * i], x.word[4 * i + 1], x.word[4 * i + 2], x.word[4 * i + 3]));
    }
  }
}
template <class T, int V>
__device__ inline void store_row(T* p, const float (&y)[V]) {
  store_packed_row<T, V>(p, pack<T, V>(y));
}

// The same column `row` rows further, each `bytes` long.
template <class T>
__device__ inline T* row_at(T* first, int row, int bytes) {
  using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
  return reinterpret_cast<T*>(reinterpret_cast<Byte*>(first) + static_cast<int64_t>(row) * bytes);
}

// Two values side by side, or one where `both` is false; `vectors`: pairs are aligned.
__device__ inline void store_two(float* p, float a, float b, bool both, bool vectors) {
  if (vectors) {
    *reinterpret_cast<float2*>(p) = make_float2(a, b);
  } else {
    p[0] = a;
    if (both) p[1] = b;
  }
}
__device__ inline void store_two(bf16* p, float a, float b, bool both, bool vectors) {
  if (vectors) {
    *reinterpret_cast<__nv_bfloat162*>(p) = __floats2bfloat162_rn(a, b);
  } else {
    from_float(p, a);
    if (both) from_float(p + 1, b);
  }
}

// How the movers split a row: slices of kSlice or kWideSlice columns (geometry.h), each worked on by `lanes` threads
// that hold `steps` pieces of V columns.
template <int V, int Columns>
struct SliceLanes {
  static constexpr int lanes = V == 1 ? 32 : Columns / V;
  static constexpr int steps = V == 1 ? Columns / 32 : 1;
  __device__ static int column(int lane, int step) { return (step * lanes + lane) * V; }
};

// Lanes of this thread's team of `Lanes`, for shuffles that other teams of the warp take no part in.
template <int Lanes>
__device__ inline unsigned team_mask() {
  return (0xffffffffu >> (32 - Lanes)) << (threadIdx.x % 32 / Lanes * Lanes);
}

// Sum over a team, in a fixed order; every lane gets it.
template <int Lanes>
__device__ inline float team_sum(float x, unsigned mask) {
#pragma unroll
  for (int offset = Lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(mask, x, offset);
  return x;
}

// The sums over a team of N values (a power of two): lane l of the team gets that of value l / (Lanes / N). By the
// whole warp.
template <int Lanes, int N>
__device__ inline float team_sums(float (&x)[N]) {
  static_assert(N <= Lanes);
  int offset = Lanes / 2;
#pragma unroll
  for (int m = N; m > 1; m /= 2, offset /= 2) {
    const bool upper = threadIdx.x & offset;
#pragma unroll
    for (int i = 0; i < m / 2; ++i) {
      const float keep = upper ? x[i + m / 2] : x[i], give = upper ? x[i] : x[i + m / 2];
      x[i] = keep + __shfl_xor_sync(0xffffffffu, give, offset);
    }
  }
#pragma unroll
  for (; offset > 0; offset /= 2) x[0] += __shfl_xor_sync(0xffffffffu, x[0], offset);
  return x[0];
}

// Division of a position below 2^16 by the entries of a token, as a multiplication.
struct Divider {
  uint32_t magic = 0;
  Divider() = default;
  explicit Divider(int64_t d) : magic(d > 1 ? static_cast<uint32_t>(((uint64_t{1} << 32) + d - 1) / d) : 0) {}
  __device__ int operator()(int position) const {
    return magic == 0 ? position : static_cast<int>(__umulhi(static_cast<uint32_t>(position), magic));
  }
};

}  // namespace sdm::gpu
