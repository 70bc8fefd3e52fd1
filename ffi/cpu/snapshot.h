// How a snapshot row is stored and restored (section 5 of the specification).
#pragma once

#include "ffi/cpu/chunk_view.h"
#include "ffi/cpu/kernels.h"

namespace sdm::cpu::SDM_ISA {

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
// Nearest integer, ties to even, for |x| < 2^22.
inline float round_even(float x) {
  const float magic = 0x1.8p23f;
  volatile float shifted = x + magic;  // volatile: the sum must be rounded before it is taken apart
  return shifted - magic;
}

inline float round_to_bf16(float x) {
  const uint32_t bits = float_to_bits(x);
  return bits_to_float((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u);
}

// float8_e4m3fn, nearest even, saturating. x must not be NaN.
inline uint8_t encode_e4m3(float x) {
  const uint32_t sign = (float_to_bits(x) >> 24) & 0x80u;
  float magnitude = bits_to_float(float_to_bits(x) & 0x7fffffffu);
  if (magnitude > 448.0f) magnitude = 448.0f;
  uint32_t code;
  if (magnitude < 0x1p-6f) {
    code = static_cast<uint32_t>(round_even(magnitude * 512.0f));  // subnormal: units of 2^-9
  } else {
    const uint32_t bits = float_to_bits(magnitude);
    code = ((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(sign | code);
}
inline float decode_e4m3(uint8_t code) {
  const uint32_t body = code & 0x7fu;
  const float magnitude = body < 8 ? static_cast<float>(body) * 0x1p-9f : bits_to_float((body << 20) + (120u << 23));
  return code & 0x80u ? -magnitude : magnitude;
}

inline int encode_int4(float x) {
  if (x > 7.0f) return 7;
  if (x < -8.0f) return -8;
  return static_cast<int>(round_even(x));
}

// The scale of a row: bf16(max(largest magnitude / levels, 1e-12)), NaN for a row that is not finite.
template <class T>
float row_scale(const T* row, int64_t width, float levels) {
  float largest = 0;
  bool finite = true;
  for (int64_t c = 0; c < width; ++c) {
    const uint32_t bits = float_to_bits(static_cast<float>(to_acc(row[c]))) & 0x7fffffffu;
    finite &= bits < 0x7f800000u;
    const float magnitude = bits_to_float(bits);
    largest = magnitude > largest ? magnitude : largest;
  }
  if (!finite) return bits_to_float(0x7fc00000u);
  const float scale = largest / levels;
  return round_to_bf16(scale > 1e-12f ? scale : 1e-12f);
}

// Copies bits that nobody reads soon: past the caches, where the place allows it.
inline void store_bits(void* target, const void* source, int64_t bytes) {
  if (reinterpret_cast<uintptr_t>(target) % kVectorBytes || bytes % kVectorBytes) {
    std::memcpy(target, source, bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += kVectorBytes) {
    VecF x;
    std::memcpy(&x, static_cast<const char*>(source) + i, sizeof x);
    stream(static_cast<char*>(target) + i, x);
  }
}

// Stores columns [begin, end) of a bank row. A mode with scales needs the whole row at once.
template <class T>
void store_snapshot_row(Quant quant, const T* row, void* stored, float* scale, int64_t begin, int64_t end) {
  using A = Acc<T>;
  const int64_t width = end - begin;
  switch (quant) {
    case Quant::none:
      store_bits(static_cast<T*>(stored) + begin, row + begin, width * sizeof(T));
      return;
    case Quant::bf16: {
      bf16* out = static_cast<bf16*>(stored) + begin;
      if constexpr (sizeof(A) == 4) {
        for_tiles<4, A>(width, [&](int64_t c, auto tile) __attribute__((always_inline)) {
          for (int k = 0; k < tile.size; ++k) tile.store(out + c, k, tile.load(row + begin + c, k));
        });
      } else {
        for (int64_t c = 0; c < width; ++c) {
          store(out + c, VecF{} + static_cast<float>(to_acc(row[begin + c])), 1);
        }
      }
      return;
    }
    case Quant::fp8: {
      const float s = *scale = row_scale(row, end, 448.0f);
      uint8_t* out = static_cast<uint8_t*>(stored);
      for (int64_t c = 0; c < end; ++c) {
        out[c] = s == s ? encode_e4m3(static_cast<float>(to_acc(row[c])) / s) : 0;
      }
      return;
    }
    case Quant::int4: {
      const float s = *scale = row_scale(row, end, 7.0f);
      uint8_t* out = static_cast<uint8_t*>(stored);
      const auto nibble = [&](int64_t c) {
        return c < end && s == s ? encode_int4(static_cast<float>(to_acc(row[c])) / s) & 15 : 0;
      };
      for (int64_t c = 0; c < end; c += 2) out[c / 2] = static_cast<uint8_t>(nibble(c) | nibble(c + 1) << 4);
      return;
    }
  }
}

// Writes columns [begin, end) of a stored row into the bank row; bits go past the caches if asked.
template <class T>
void restore_snapshot_row(Quant quant, const void* stored, float scale, T* row, int64_t begin, int64_t end,
                          bool past_caches) {
  if (quant == Quant::none) {  // the bits, NaN payloads included
    const T* bits = static_cast<const T*>(stored) + begin;
    const int64_t bytes = (end - begin) * sizeof(T);
    if (past_caches) {
      store_bits(row + begin, bits, bytes);
    } else {
      std::memcpy(row + begin, bits, bytes);
    }
    return;
  }
  const uint8_t* bytes = static_cast<const uint8_t*>(stored);
  constexpr int kBlock = kLanes<Acc<T>>;
  for (int64_t c = begin; c < end; c += kBlock) {
    const int64_t count = end - c < kBlock ? end - c : kBlock;
    Acc<T> values[kBlock] = {};
    for (int64_t i = 0; i < count; ++i) {
      if (quant == Quant::bf16) {
        values[i] = to_acc(static_cast<const bf16*>(stored)[c + i]);
      } else if (quant == Quant::fp8) {
        values[i] = decode_e4m3(bytes[c + i]) * scale;
      } else {
        const int code = (c + i) % 2 ? bytes[(c + i) / 2] >> 4 : bytes[(c + i) / 2] & 15;
        values[i] = static_cast<float>(code >= 8 ? code - 16 : code) * scale;
      }
    }
    store(row + c, load(values), count);
  }
}

}  // namespace sdm::cpu::SDM_ISA
