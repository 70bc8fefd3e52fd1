// How values of a snapshot row are stored and restored (section 5 of the specification).
#pragma once

#include <cuda_fp8.h>

#include "cuda/common/rows.cuh"
#include "cuda/sdm.h"

namespace sdm::gpu {

inline int64_t snapshot_row_bytes(Quant quant, int64_t element_bytes, int64_t width) {
  switch (quant) {
    case Quant::none:
      return element_bytes * width;
    case Quant::bf16:
      return 2 * width;
    case Quant::fp8:
      return width;
    case Quant::int4:
      return (width + 1) / 2;
  }
  return 0;
}

// What "bf16" means for a bfloat16 bank.
inline Quant effective(Quant quant, DType bank) {
  return quant == Quant::bf16 && bank == DType::bf16 ? Quant::none : quant;
}

__device__ inline float decode_e4m3(uint32_t code) {
  const uint32_t body = code & 0x7fu;
  const float magnitude = body < 8 ? static_cast<float>(body) * 0x1p-9f : __uint_as_float((body << 20) + (120u << 23));
  return code & 0x80u ? -magnitude : magnitude;
}
__device__ inline float decode_int4(uint32_t nibble) { return static_cast<float>(static_cast<int>(nibble ^ 8u) - 8); }
__device__ inline uint32_t encode_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
__device__ inline uint32_t encode_int4(float x) {
  return static_cast<uint32_t>(static_cast<int>(rintf(fminf(fmaxf(x, -8.0f), 7.0f)))) & 15u;
}

// The restored values of columns [column, column + V) of a stored row, as the bank then holds them.
template <class T, int V, Quant Q>
__device__ inline Packed<T, V> restore(const void* stored, float scale, int64_t column) {
  if constexpr (Q == Quant::none) {
    return load_packed<T, V>(static_cast<const T*>(stored) + column);
  } else {
    const uint8_t* bytes = static_cast<const uint8_t*>(stored);
    float x[V];
    if constexpr (Q == Quant::bf16) {
      const uint16_t* halves = static_cast<const uint16_t*>(stored) + column;
      uint16_t h[V];
      if constexpr (V == 4) {
        *reinterpret_cast<uint2*>(h) = *reinterpret_cast<const uint2*>(halves);
      } else {
#pragma unroll
        for (int i = 0; i < V; ++i) h[i] = halves[i];
      }
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] = __uint_as_float(static_cast<uint32_t>(h[i]) << 16);
    } else if constexpr (Q == Quant::fp8) {
      uint32_t word[V > 4 ? 2 : 1];
      if constexpr (V == 8) {
        *reinterpret_cast<uint2*>(word) = *reinterpret_cast<const uint2*>(bytes + column);
      } else if constexpr (V == 4) {
        word[0] = *reinterpret_cast<const uint32_t*>(bytes + column);
      } else {
        word[0] = bytes[column];
      }
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] = decode_e4m3(word[i / 4] >> (8 * (i % 4)) & 0xffu) * scale;
    } else {
      uint32_t word;
      if constexpr (V == 8) {
        word = *reinterpret_cast<const uint32_t*>(bytes + column / 2);
      } else if constexpr (V == 4) {
        word = *reinterpret_cast<const uint16_t*>(bytes + column / 2);
      } else {
        word = column % 2 ? bytes[column / 2] >> 4 : bytes[column / 2];
      }
#pragma unroll
      for (int i = 0; i < V; ++i) x[i] = decode_int4(word >> (4 * i) & 15u) * scale;
    }
    return pack<T, V>(x);
  }
}

}  // namespace sdm::gpu
