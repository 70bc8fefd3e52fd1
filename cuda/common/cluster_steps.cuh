// The parts of a kernel that takes a slice of the columns through all chunks (forward_steps.cu): how clusters share the
// work, copies and prefetches, small products. A cluster of blocks takes the slice of one stream, eight tokens of a
// chunk a block, a warp a token; eight lanes share a row's slice.
//
// A cluster takes work in pieces of some chunks of one slice, in the order of a counter: as many clusters as the
// device holds then share slices evenly. A piece waits for the one before it of its slice, which has an earlier number.
// A cluster takes its next number while it works, and works through its numbers in order; so the cluster that has the
// earliest piece not done is at work on it, and none waits for ever.
#pragma once

#include <cooperative_groups.h>

#include <utility>

#include "cuda/common/launch.cuh"
#include "cuda/common/lists.cuh"
#include "cuda/common/tensor.cuh"

namespace sdm::gpu::cluster {

inline constexpr int kTokens = 8;  // of a block, a warp each
inline constexpr int kThreads = 32 * kTokens;
inline constexpr int kLanes = 8;            // that share a row's slice
inline constexpr int kTeams = 32 / kLanes;  // rows a warp takes at once
inline constexpr int kMostTokens = 64;      // of a chunk: eight blocks
inline constexpr int kMostEntries = 64;     // of a token and kind
inline constexpr int kHalves = kMostEntries / 32;
inline constexpr int kInFlight = 8;
inline constexpr int kPieceChunks = 4;

// Counters of the pieces; zero before the kernel.
struct Pieces {
  unsigned* taken;
  unsigned* done;  // [tasks]
  int tasks, count;
};

// Whether the device and the sizes of a call suit these kernels.
inline bool serves(const Shape& s, int64_t vector, size_t shared_bytes) {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
  return major >= 9 && s.chunk <= kMostTokens && s.writes <= kMostEntries && s.reads <= kMostEntries &&
         s.width % vector == 0 && shared_bytes <= shared_limit();
}

// `counters` has room for 1 + tasks.
inline Pieces pieces_of(void* counters, int64_t tasks, int64_t chunks) {
  unsigned* taken = static_cast<unsigned*>(counters);
  return {taken, taken + 1, static_cast<int>(tasks), static_cast<int>(tasks * div_up(chunks, kPieceChunks))};
}

inline cudaError_t reset(void* counters, int64_t tasks, Launch where) {
  if (tasks == 0) return cudaSuccess;
  return cudaMemsetAsync(counters, 0, sizeof(unsigned) * static_cast<size_t>(1 + tasks), where.stream);
}

template <class Params>
cudaError_t launch(void (*kernel)(Params), const Params& a, const Shape& s, int tasks, size_t shared_bytes,
                   Launch where) {
  if (tasks == 0) return cudaSuccess;
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  const unsigned blocks = static_cast<unsigned>(div_up(s.chunk, kTokens));
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(tasks) * blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = where.stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, a);
}

// What the blocks of a cluster tell each other, where barriers of the cluster would hold up every warp until all its
// writes have arrived. A signal of a block is complete once a round, and every thread of the block waits
// once a round. A round must have been waited for by all blocks, through another signal, before any gives to the next.
class Signal {
 public:
  // By one thread; `arrivals` a round. Before a barrier of the cluster.
  __device__ void start(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // The one arrival of a round that also waits for so many bytes that `send` brings.
  __device__ void expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
  }
  // Sixteen bytes, to the same place in the shared memory of block `rank`, whose signal counts them.
  __device__ void send(int rank, const float* to, float a, float b, float c, float d) const {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            remote(rank, address_of(to))),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(remote(rank, address()))
        : "memory");
  }
  // An arrival at the signal of block `rank`, with all that this thread has written, or that others have before
  // a barrier of the block.
  __device__ void give(int rank) const {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(remote(rank, address()))
                 : "memory");
  }
  // By every thread; `round` counts from 0.
  __device__ void wait(int round) const {
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{ .reg .pred done; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2; "
          "selp.u32 %0, 1, 0, done; }"
          : "=r"(done)
          : "r"(address()), "r"(round & 1)
          : "memory");
    }
  }

 private:
  __device__ static uint32_t address_of(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
  __device__ static uint32_t remote(int rank, uint32_t address) {
    uint32_t there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
  }
  __device__ uint32_t address() const { return address_of(&barrier_); }

  uint64_t barrier_;
};

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A number of the counter: a task and the piece's number within it, or none at the end.
struct Piece {
  int task, part;
  bool some;
  __device__ Piece(const Pieces& pieces, unsigned number)
      : task(static_cast<int>(number) % pieces.tasks),
        part(static_cast<int>(number) / pieces.tasks),
        some(number < static_cast<unsigned>(pieces.count)) {}
  // Its first chunk, of a task that begins at `first`.
  __device__ int64_t begin(int64_t first) const { return first + static_cast<int64_t>(part) * kPieceChunks; }
};

// Takes the next number for the whole cluster, into a word of every block's, which all may read after the next barrier
// of the cluster or what stands for one.
__device__ inline void take_piece(const cooperative_groups::cluster_group& cluster, const Pieces& pieces,
                                  unsigned* shared) {
  const unsigned blocks = cluster.num_blocks();
  if (cluster.block_rank() != 0 || threadIdx.x >= blocks) return;
  unsigned number = 0;
  if (threadIdx.x == 0) number = atomicAdd(pieces.taken, 1u);
  number = __shfl_sync((1u << blocks) - 1, number, 0);
  *cluster.map_shared_rank(shared, threadIdx.x) = number;
}

// Until the piece before it of its task is done. By the whole block.
__device__ inline void wait_for_piece(const Pieces& pieces, const Piece& piece) {
  if (piece.part == 0) return;
  if (threadIdx.x == 0) {
    unsigned done = 0;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(done) : "l"(pieces.done + piece.task) : "memory");
    } while (done < static_cast<unsigned>(piece.part));
  }
  __syncthreads();
}

// After `Signal::wait` for what all blocks wrote.
__device__ inline void finish_piece(const cooperative_groups::cluster_group& cluster, const Pieces& pieces,
                                    const Piece& piece) {
  if (cluster.block_rank() != 0 || threadIdx.x != 0) return;
  __threadfence();
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(pieces.done + piece.task), "r"(piece.part + 1u) : "memory");
}

// One or two words of four bytes from global to shared memory without waiting.
template <int Words = 1>
__device__ inline void copy_words(void* to, const void* from) {
  const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(4 * Words) : "memory");
}

// Sixteen bytes, or zeros.
__device__ inline void copy_vector(void* to, const void* from, bool inside) {
  copy_async(static_cast<float*>(to), static_cast<const float*>(from), inside);
}

inline constexpr int kSector = 32;  // bytes
// Brings the 32 bytes at an address into the second-level cache, without waiting; a predicate instead of a branch.
__device__ inline void prefetch(const void* from, bool on) {
  asm volatile("{ .reg .pred on; setp.ne.s32 on, %1, 0; @on prefetch.global.L2 [%0]; }" ::"l"(from),
               "r"(static_cast<int>(on)));
}

// The lanes together bring in `bytes` from an address on.
__device__ inline void prefetch_all(const void* from, int bytes) {
#pragma unroll 1
  for (int b = threadIdx.x % 32 * kSector; b < bytes; b += 32 * kSector) {
    prefetch(static_cast<const char*>(from) + b, true);
  }
}

// The same of the first `bytes` (at most kBytes) at `base` + row * stride for up to kMostEntries rows (-1: none), of
// which a lane holds those at its number and 32 further.
template <int kBytes>
__device__ inline void prefetch_rows(const void* base, int64_t stride, const int (&rows)[kHalves], int count,
                                     int bytes) {
  constexpr int kPerRow = kBytes / kSector, kRows = 32 / kPerRow;
  const int lane = threadIdx.x % 32, offset = lane % kPerRow * kSector;
#pragma unroll
  for (int i = 0; i < kMostEntries / kRows; ++i) {
    if (i * kRows >= count) break;
    const int row = __shfl_sync(0xffffffffu, rows[i / kPerRow], i % kPerRow * kRows + lane / kPerRow);
    prefetch(static_cast<const char*>(base) + row * stride + offset, row >= 0 && offset < bytes);
  }
}

// Puts the records of a warp's slots in order, in its shared memory: those of slots with one entry, then the others.
__device__ inline void sort_records(int4* records, int count, int* simple, int* others) {
  const int lane = threadIdx.x % 32;
  SlotRecord record[kHalves];
  unsigned simple_lanes[kHalves], other_lanes[kHalves];
  *simple = *others = 0;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    const int e = 32 * h + lane;
    record[h] = e < count ? SlotRecord{records[e]} : SlotRecord::none();
    const bool first = record[h].slot() >= 0;
    simple_lanes[h] = __ballot_sync(0xffffffffu, first && record[h].single());
    other_lanes[h] = __ballot_sync(0xffffffffu, first && !record[h].single());
    *simple += __popc(simple_lanes[h]);
    *others += __popc(other_lanes[h]);
    record[h].bits.y |= e << SlotRecord::kItemShift;
  }
  __syncwarp();
  const unsigned before = (1u << lane) - 1;
  int next_simple = 0, next_other = *simple;
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    if (simple_lanes[h] >> lane & 1) records[next_simple + __popc(simple_lanes[h] & before)] = record[h].bits;
    if (other_lanes[h] >> lane & 1) records[next_other + __popc(other_lanes[h] & before)] = record[h].bits;
    next_simple += __popc(simple_lanes[h]);
    next_other += __popc(other_lanes[h]);
  }
  __syncwarp();
}

// A lane's V values of a row of floats, in 16-byte pieces.
template <int V>
__device__ inline void load_floats(const float* from, float (&x)[V]) {
#pragma unroll
  for (int i = 0; i < V; i += 4) {
    const float4 q = *reinterpret_cast<const float4*>(from + i);
    x[i] = q.x;
    x[i + 1] = q.y;
    x[i + 2] = q.z;
    x[i + 3] = q.w;
  }
}

// Sums over the teams of a warp, in a fixed order; every lane gets them.
template <int V>
__device__ inline void sum_teams(float (&x)[V]) {
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int i = 0; i < V; ++i) x[i] += __shfl_xor_sync(0xffffffffu, x[i], offset);
  }
}

// sum += left right over the first depths, a multiple of 8, of a 16 x 8 tile; left(row, depth), right(depth,
// column). The tensor cores cut off what they add up; a float32 addition for every 32 of the depth keeps
// that small.
template <class Left, class Right>
__device__ inline void product(float (&sum)[4], int end, Left at_left, Right at_right) {
  for (int k0 = 0; k0 < end; k0 += 32) {
    float some[4] = {};
#pragma unroll
    for (int k = k0; k < k0 + 32; k += 8) {
      if (k >= end) break;
      LeftPiece<3> left;
      RightPiece<3> right;
      left.load([&](int r, int d) { return at_left(r, k + d); });
      right.load([&](int d, int c) { return at_right(k + d, c); });
      multiply(some, left, right);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += some[i];
  }
}

#endif

}  // namespace sdm::gpu::cluster
