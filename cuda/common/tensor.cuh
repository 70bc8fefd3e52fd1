// Products of small float32 tiles on the tensor cores (TF32), split so that they keep more than TF32's 11
// bits: 3 products are accurate to about 2^-22, 2 keep the right side's bits and round the left's.
#pragma once

#include <cstdint>

namespace sdm::gpu {

__device__ inline uint32_t to_tf32(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// x in two TF32 parts: `high` rounded, `low` what that leaves, at most 12 bits and a sign, of which the tensor cores
// take 11 (they ignore the last 13 bits of an operand). `low` is NaN if x is not finite, so that NaN is never lost.
__device__ inline void split_tf32(float x, uint32_t& high, uint32_t& low) {
  high = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  low = __float_as_uint(x - __uint_as_float(high));
}

// sum += left * right for one 16 x 8 x 8 product.
__device__ inline void multiply_tf32(float (&sum)[4], const uint32_t (&left)[4], const uint32_t (&right)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}

// A 16 x 8 piece of the left side (rows, depth) and an 8 x 8 piece of the right (depth, columns), as a warp
// holds them: high TF32 parts, and what those leave.
template <int Products>
struct LeftPiece {
  uint32_t high[4], low[4];
  // at(row, depth)
  template <class At>
  __device__ void load(At at) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    set({at(g, t), at(g + 8, t), at(g, t + 4), at(g + 8, t + 4)});
  }
  __device__ void set(const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Products == 3) {
        split_tf32(x[i], high[i], low[i]);
      } else {
        high[i] = to_tf32(x[i]);
      }
    }
  }
};
template <int Products>
struct RightPiece {
  uint32_t high[2], low[2];
  // at(depth, column)
  template <class At>
  __device__ void load(At at) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    set({at(t, g), at(t + 4, g)});
  }
  __device__ void set(const float (&x)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (Products >= 2) {
        split_tf32(x[i], high[i], low[i]);
      } else {
        high[i] = to_tf32(x[i]);
      }
    }
  }
};

template <int Products>
__device__ inline void multiply(float (&sum)[4], const LeftPiece<Products>& left, const RightPiece<Products>& right) {
  if constexpr (Products == 3) multiply_tf32(sum, left.low, right.high);
  if constexpr (Products >= 2) multiply_tf32(sum, left.high, right.low);
  multiply_tf32(sum, left.high, right.high);
}

// Row and column of value i of a warp's 16 x 8 sums.
__device__ inline int sum_row(int i) { return static_cast<int>(threadIdx.x & 31) / 4 + (i >= 2 ? 8 : 0); }
__device__ inline int sum_column(int i) { return static_cast<int>(threadIdx.x & 3) * 2 + (i & 1); }

// Sixteen bytes from global to shared memory, or zeros, without waiting.
__device__ inline void copy_async(float* to, const float* from, bool inside) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = inside ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}
// Copies since the last call of this are a group.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups but the newest.
template <int Newest>
__device__ inline void wait_for_older_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newest) : "memory");
}
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace sdm::gpu
