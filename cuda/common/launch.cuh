// How a kernel is launched: dynamic shared memory, programmatic dependent launch, dtype dispatch.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/common/rows.cuh"
#include "cuda/launch.h"

namespace sdm::gpu {

// Before the first access to memory that the kernel before this one in the stream writes (or reads,
// if this kernel writes it). A no-op where the kernel was launched to start after it.
__device__ inline void wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
// From here on the next kernel of the stream may start, up to its own wait_for_previous.
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), dim3 grid, int threads, size_t shared_bytes, Launch where, Args... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  if (shared_bytes > 32 * 1024) {  // with the static memory it may be more than the 48 KB of every kernel
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = where.stream;
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (where.overlap) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (where.urgent) {
    int least = 0, greatest = 0;
    const cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute& priority = attributes[config.numAttrs++];
    priority.id = cudaLaunchAttributePriority;
    priority.val.priority = greatest;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// Calls f(T{}, std::integral_constant<int, V>{}) for a row dtype and width.
template <class F>
cudaError_t for_rows(DType dtype, int64_t width, F&& f) {
  if (dtype == DType::bf16) {
    if (width % kVector<bf16> == 0) return f(bf16{}, std::integral_constant<int, kVector<bf16>>{});
    return f(bf16{}, std::integral_constant<int, 1>{});
  }
  if (width % kVector<float> == 0) return f(float{}, std::integral_constant<int, kVector<float>>{});
  return f(float{}, std::integral_constant<int, 1>{});
}

// Shared memory that a block may have on the current device.
inline size_t shared_limit() {
  int device = 0, bytes = 48 * 1024;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return static_cast<size_t>(bytes);
}

inline int64_t div_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
T* at(void* base, int64_t offset) {
  return base == nullptr ? nullptr : static_cast<T*>(base) + offset;
}
template <class T>
const T* at(const void* base, int64_t offset) {
  return base == nullptr ? nullptr : static_cast<const T*>(base) + offset;
}

// Offsets of chunk `n` in the arrays of stream 0, and the strides from stream to stream.
struct ChunkAt {
  int tokens;            // of this chunk
  int64_t token;         // arrays [P, T, ..]
  int64_t stored_token;  // arrays [P, T stored, ..]
  int64_t stored_chunk;  // arrays [P, N stored, ..]
  ChunkAt(const Shape& s, int64_t n)
      : tokens(static_cast<int>(s.chunk_tokens(n))),
        token(n * s.chunk),
        stored_token((n - s.first_chunk) * s.chunk),
        stored_chunk(n - s.first_chunk) {}
};

}  // namespace sdm::gpu
