// Sizes of grids and blocks, as functions of the shapes (and the class of the device) only, so that a
// result never depends on which device of a class ran it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sdm.h"

namespace sdm::gpu {

// Column ranges are whole slices of this many columns: the 128 bytes of a bfloat16 row that one access
// of the movers takes.
inline constexpr int64_t kColumnStep = 64;

inline int64_t column_slices(const Shape& s) { return (s.width + kColumnStep - 1) / kColumnStep; }

// Slices that a block of the backward's movers takes one after another, so that the sums over columns
// come in `parts` ranges.
inline int64_t part_slices(const Shape& s, int64_t parts) { return (column_slices(s) + parts - 1) / parts; }

// Warps that share the entries of a token in the gather: enough that each lane's loads fill its
// `in_flight` registers once, a power of two up to a block's 8.
inline int gather_warps(int entries, int rows_per_load, int in_flight) {
  int warps = 1;
  while (warps < 8 && warps * rows_per_load * in_flight < entries) warps *= 2;
  return warps;
}

// Groups that the slots of a chunk are split into in the movers: one block for each group, slice of
// columns and stream. A block stages C token rows of its slice in shared memory, so it wants many
// slots; the device wants some hundred blocks.
inline int64_t mover_groups(int64_t slices, int64_t streams, int64_t slots, int64_t slots_per_pass) {
  const int64_t wanted = 528 / (slices * streams) + 1;
  const int64_t useful = std::max<int64_t>(1, slots / (2 * slots_per_pass));
  return std::min<int64_t>(std::max<int64_t>(1, wanted), std::min<int64_t>(useful, 64));
}

// Column ranges that run side by side on streams of their own: one range's loads fill the gaps between
// the other's kernels. A range keeps whole 512-byte pieces of a row where it can.
inline int column_branches(const Shape& s, int64_t element_bytes) {
  const int64_t pieces = s.width * element_bytes / 512;
  return pieces >= 4 ? 4 : pieces >= 2 ? 2 : 1;
}

}  // namespace sdm::gpu
