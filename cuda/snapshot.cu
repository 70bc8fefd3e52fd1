// Snapshot rows in every mode (section 5 of the specification): a warp a slot, the whole row, because
// a scale needs all columns. Reads the rows that a chunk writes, once from memory, and stores them.
#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/common/snapshot.cuh"

namespace sdm::gpu {
namespace {

constexpr int kThreads = 256;

struct Params {
  const void* bank;
  const int32_t* slots;  // of the chunk in stream 0
  void* stored;          // the same
  float* scale;          // the same
  int64_t width, bank_stride, slots_stride, row_bytes, rows, first_stream;
  int most, streams_per_bank, num_slots;
};

template <class T, Quant Q>
__global__ void __launch_bounds__(kThreads) snapshot_kernel(const __grid_constant__ Params a) {
  const int lane = threadIdx.x & 31;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row >= a.rows) return;
  const int64_t p = a.first_stream + row / a.most, i = row % a.most;
  const int slot = a.slots[p * a.slots_stride + i];
  wait_for_previous();
  if (static_cast<unsigned>(slot) >= static_cast<unsigned>(a.num_slots)) return;
  const T* from = static_cast<const T*>(a.bank) + p / a.streams_per_bank * a.bank_stride + slot * a.width;
  uint8_t* to = static_cast<uint8_t*>(a.stored) + (p * a.slots_stride + i) * a.row_bytes;
  if constexpr (Q == Quant::none) {
    for (int64_t c = lane; c < a.width; c += 32) reinterpret_cast<T*>(to)[c] = from[c];
  } else if constexpr (Q == Quant::bf16) {
    for (int64_t c = lane; c < a.width; c += 32) {
      reinterpret_cast<bf16*>(to)[c] = __float2bfloat16_rn(to_float(from[c]));
    }
  } else {
    constexpr float kLevels = Q == Quant::fp8 ? 448.0f : 7.0f;
    uint32_t largest = 0;  // magnitudes order like their bits; infinities and NaN come last
    for (int64_t c = lane; c < a.width; c += 32) {
      largest = max(largest, __float_as_uint(to_float(from[c])) & 0x7fffffffu);
    }
    largest = __reduce_max_sync(0xffffffffu, largest);
    const bool finite = largest < 0x7f800000u;
    const float scale = finite ? to_float(__float2bfloat16_rn(fmaxf(__uint_as_float(largest) / kLevels, 1e-12f)))
                               : __uint_as_float(0x7fc00000u);
    if (lane == 0) a.scale[p * a.slots_stride + i] = scale;
    if constexpr (Q == Quant::fp8) {
      for (int64_t c = lane; c < a.width; c += 32) {
        to[c] = finite ? static_cast<uint8_t>(encode_e4m3(to_float(from[c]) / scale)) : 0;
      }
    } else {
      for (int64_t b = lane; b < a.row_bytes; b += 32) {
        uint32_t byte = finite ? encode_int4(to_float(from[2 * b]) / scale) : 0;
        if (finite && 2 * b + 1 < a.width) byte |= encode_int4(to_float(from[2 * b + 1]) / scale) << 4;
        to[b] = static_cast<uint8_t>(byte);
      }
    }
  }
}

template <class T>
auto kernel_for(Quant quant) {
  switch (quant) {
    case Quant::none:
      return snapshot_kernel<T, Quant::none>;
    case Quant::bf16:
      return snapshot_kernel<T, Quant::bf16>;
    case Quant::fp8:
      return snapshot_kernel<T, Quant::fp8>;
    case Quant::int4:
      break;
  }
  return snapshot_kernel<T, Quant::int4>;
}

}  // namespace

cudaError_t take_snapshot(const Forward& f, int64_t n, Range range, Launch where) {
  const Shape& s = f.shape;
  const ChunkAt c(s, n);
  const int64_t element = f.dtype == DType::bf16 ? 2 : 4, first = c.stored_chunk * s.write_slots;
  const int64_t row_bytes = snapshot_row_bytes(f.quant, element, s.width);
  const Params params{f.bank,
                      f.chunks.slots + first,
                      at<char>(f.snapshot, first * row_bytes),
                      f.scale == nullptr ? nullptr : f.scale + first,
                      s.width,
                      s.slots * s.width,
                      s.stored_chunks * s.write_slots,
                      row_bytes,
                      range.streams * s.write_slots,
                      range.first_stream,
                      static_cast<int>(s.write_slots),
                      static_cast<int>(s.streams_per_bank),
                      static_cast<int>(s.slots)};
  const auto kernel =
      f.dtype == DType::bf16 ? kernel_for<bf16>(effective(f.quant, f.dtype)) : kernel_for<float>(f.quant);
  return launch(kernel, dim3(div_up(params.rows, kThreads / 32)), kThreads, 0, where, params);
}

}  // namespace sdm::gpu
