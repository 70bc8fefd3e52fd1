// Sizes of grids and blocks, as functions of the shapes (and the class of the device) only, so that a
// result never depends on which device of a class ran it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sdm.h"

namespace sdm::gpu {

// Columns of a slice of the movers. Wide ones move more bytes of a row at once, and look half as much up; narrow ones,
// 128 bytes of a bfloat16 row, make more warps, which short chunks of narrow rows need. Column ranges are whole slices.
// `slice_columns` of sdm_jax/_cuda_calls.py agrees.
inline constexpr int kSlice = 64;
inline constexpr int kWideSlice = 128;

inline bool has_wide_slices(const Shape& s) { return s.width % kWideSlice == 0 && (s.chunk > 64 || s.width >= 512); }
inline int64_t slice_columns(const Shape& s) { return has_wide_slices(s) ? kWideSlice : kSlice; }
inline int64_t column_slices(const Shape& s) { return (s.width + slice_columns(s) - 1) / slice_columns(s); }

// Slices that a block of the backward's movers takes one after another, so that the sums over columns
// come in `parts` ranges.
inline int64_t part_slices(const Shape& s, int64_t parts) { return (column_slices(s) + parts - 1) / parts; }

// Warps that share the entries of a token in the gather, of which a warp has `in_flight` on their way at once: a power
// of two up to a block's 8, few enough that each fills its registers four times, or eight times where there is much to
// do (`pieces`: of the rows of a chunk's tokens, in all streams).
inline int gather_warps(int entries, int in_flight, int64_t pieces) {
  const int fills = pieces >= 2048 ? 8 : 4;
  int warps = 1;
  while (warps < 8 && warps * in_flight * fills < entries) warps *= 2;
  return warps;
}

// Entries of a token that a warp of the gradient mover takes: `most`, or half as many where there would be few warps.
inline int gradient_mover_items(const Shape& s, int64_t entries, int most) {
  const int64_t warps = s.streams * s.chunk * column_slices(s) * ((entries + most - 1) / most);
  return warps > 2048 ? most : most / 2;
}

// Ranges of streams, or of columns where there are few streams, run side by side on CUDA streams of their
// own: one range's loads fill the gaps between the other's kernels. A range of columns keeps whole 256-byte
// pieces of a row.
inline bool splits_streams(const Shape& s) { return s.streams >= 4; }

inline int range_branches(const Shape& s, int64_t element_bytes) {
  if (splits_streams(s)) return 4;
  const int64_t pieces = s.width * element_bytes / 256;
  return pieces >= 8 ? 4 : pieces >= 2 ? 2 : 1;
}

}  // namespace sdm::gpu
