// The distinct slots of a chunk and their entries, as Phase 1 lists them.
#pragma once

#include "ffi/cpu/chunk_view.h"

namespace sdm::cpu::SDM_ISA {

// The lists of one chunk. They may come from a caller, so every position is checked before use.
struct SlotLists {
  const int32_t* slots;
  const int32_t* starts;
  const int32_t* order;
  int64_t most;     // slots listed at most
  int64_t entries;  // entries of the chunk, valid or not
  int64_t num_slots;

  bool listed(int64_t i) const { return i < most && slots[i] >= 0 && slots[i] < num_slots; }
  int64_t begin(int64_t i) const { return bounded(starts[i]); }
  int64_t end(int64_t i) const { return bounded(starts[i + 1]); }
  bool valid(int32_t position) const { return position >= 0 && position < entries; }

 private:
  int64_t bounded(int64_t start) const { return start < 0 ? 0 : start < entries ? start : entries; }
};

inline SlotLists write_slots(const Chunks& chunks, const ChunkView& view) {
  const Shape& s = view.s;
  return {chunks.slots + view.stored_chunk * s.write_slots,
          chunks.starts + view.stored_chunk * (s.write_slots + 1),
          chunks.order + view.stored_chunk * s.chunk * s.writes,
          s.write_slots,
          view.tokens * s.writes,
          s.slots};
}

inline SlotLists read_slots(const Chunks& chunks, const ChunkView& view) {
  const Shape& s = view.s;
  return {chunks.read_slots + view.stored_chunk * s.read_slots,
          chunks.read_starts + view.stored_chunk * (s.read_slots + 1),
          chunks.read_order + view.stored_chunk * s.chunk * s.reads,
          s.read_slots,
          view.tokens * s.reads,
          s.slots};
}

}  // namespace sdm::cpu::SDM_ISA
