// Vectors of accumulators, and loads and stores of bank rows of any dtype and any width.
//
// Every source that includes this is compiled once for each instruction set, inside a namespace of
// its own (SDM_ISA), so nothing here may have linkage across them.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#ifndef SDM_ISA
#error "SDM_ISA names the instruction set that this file is compiled for"
#endif

namespace sdm::cpu::SDM_ISA {

#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

struct bf16 {
  uint16_t bits;
};

template <class T>
struct AccOf {
  using type = float;
};
template <>
struct AccOf<double> {
  using type = double;
};
template <class T>
using Acc = typename AccOf<T>::type;

typedef float VecF __attribute__((vector_size(kVectorBytes)));
typedef double VecD __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VecU32 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t VecU16 __attribute__((vector_size(kVectorBytes / 2)));

template <class A>
struct VecOf;
template <>
struct VecOf<float> {
  using type = VecF;
};
template <>
struct VecOf<double> {
  using type = VecD;
};
template <class A>
using Vec = typename VecOf<A>::type;

template <class A>
inline constexpr int kLanes = kVectorBytes / sizeof(A);

// ---- one value

inline float to_acc(float x) { return x; }
inline double to_acc(double x) { return x; }
inline float to_acc(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

// ---- one vector

inline VecF load(const float* p) {
  VecF x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline VecD load(const double* p) {
  VecD x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
inline VecF load(const bf16* p) {
  VecU16 x;
  std::memcpy(&x, p, sizeof x);
  return (VecF)(__builtin_convertvector(x, VecU32) << 16);
}

inline void store(float* p, VecF x) { std::memcpy(p, &x, sizeof x); }
inline void store(double* p, VecD x) { std::memcpy(p, &x, sizeof x); }
inline void store(bf16* p, VecF x) {
  const VecU32 bits = (VecU32)x;
  // Round to nearest even; a NaN keeps its sign and becomes quiet.
  const VecU32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const VecU32 nan = (bits >> 16) | 0x40u;
  const VecU32 is_nan = (VecU32)(x != x);
  const VecU16 y = __builtin_convertvector((is_nan & nan) | (~is_nan & rounded), VecU16);
  std::memcpy(p, &y, sizeof y);
}

// A store past the caches, for what is not read again soon. `p` lies on a multiple of the vector's size.
// Another thread may read it only after `finish_streaming`.
inline void stream(void* p, VecF x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(static_cast<float*>(p), (__m512)x);
#elif defined(__AVX__)
  _mm256_stream_ps(static_cast<float*>(p), (__m256)x);
#elif defined(__SSE2__)
  _mm_stream_ps(static_cast<float*>(p), (__m128)x);
#else
  std::memcpy(p, &x, sizeof x);
#endif
}
inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// The last vector of a row whose width is no multiple of the lanes: `n` values, the rest zero.
template <class T>
inline Vec<Acc<T>> load(const T* p, int64_t n) {
  T part[kLanes<Acc<T>>] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}
template <class T>
inline void store(T* p, Vec<Acc<T>> x, int64_t n) {
  T part[kLanes<Acc<T>>];
  store(part, x);
  std::memcpy(p, part, n * sizeof(T));
}

// The sum of a vector's values, by halves: a fixed order. Shuffles, because a vector whose address is
// taken would live in memory wherever it is added to.
template <class V, int... I>
inline V rotated(V x, [[maybe_unused]] int by, std::integer_sequence<int, I...>) {
  constexpr int kSize = sizeof...(I);
  using Index = std::conditional_t<sizeof(x[0]) == 4, int32_t, int64_t>;
  typedef Index Mask __attribute__((vector_size(kVectorBytes)));
#if defined(__clang__)
  V y;
  for (int i = 0; i < kSize; ++i) y[i] = x[(i + by) % kSize];
  return y;
#else
  return __builtin_shuffle(x, Mask{static_cast<Index>((I + by) % kSize)...});
#endif
}
template <class A>
inline A sum(Vec<A> x) {
  constexpr int kSize = kLanes<A>;
  using Indices = std::make_integer_sequence<int, kSize>;
  if constexpr (kSize >= 16) x += rotated(x, 8, Indices{});
  if constexpr (kSize >= 8) x += rotated(x, 4, Indices{});
  if constexpr (kSize >= 4) x += rotated(x, 2, Indices{});
  x += rotated(x, 1, Indices{});
  return x[0];
}

// ---- rows, in tiles that stay in registers

// Calls f(first column, tile) for tiles that cover `width` columns: as many whole tiles of `K`
// vectors as fit, then single vectors, then the rest. `tile.size` vectors; `tile.load`, `tile.store`
// move the row's part at a pointer to its first column.
template <int K, class A>
struct WholeTile {
  static constexpr int size = K;
  template <class T>
  Vec<A> load(const T* p, int k) const {
    return SDM_ISA::load(p + k * kLanes<A>);
  }
  template <class T>
  void store(T* p, int k, Vec<A> x) const {
    SDM_ISA::store(p + k * kLanes<A>, x);
  }
};

template <class A>
struct PartTile {
  static constexpr int size = 1;
  int64_t columns;
  template <class T>
  Vec<A> load(const T* p, int) const {
    return SDM_ISA::load(p, columns);
  }
  template <class T>
  void store(T* p, int, Vec<A> x) const {
    SDM_ISA::store(p, x, columns);
  }
};

template <int K, class A, class F>
inline __attribute__((always_inline)) void for_tiles(int64_t width, F&& f) {
  int64_t c = 0;
  for (; c + K * kLanes<A> <= width; c += K * kLanes<A>) f(c, WholeTile<K, A>{});
  for (; c + kLanes<A> <= width; c += kLanes<A>) f(c, WholeTile<1, A>{});
  if (c < width) f(c, PartTile<A>{width - c});
}

// Adds up f(first column, tile, sums) over a row's vectors: f receives the sums so far and returns the
// new ones. Passed by value, they stay in registers.
template <class A, int N>
struct Sums {
  Vec<A> v[N] = {};
};
template <class A, int N, class F>
inline __attribute__((always_inline)) Sums<A, N> sum_tiles(int64_t width, F&& f) {
  Sums<A, N> sums;
  int64_t c = 0;
  for (; c + kLanes<A> <= width; c += kLanes<A>) sums = f(c, WholeTile<1, A>{}, sums);
  if (c < width) sums = f(c, PartTile<A>{width - c}, sums);
  return sums;
}

}  // namespace sdm::cpu::SDM_ISA
