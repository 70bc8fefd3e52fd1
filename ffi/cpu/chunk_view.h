// Where the arrays of one chunk of one stream lie.
#pragma once

#include "cuda/sdm.h"
#include "ffi/cpu/vec.h"

namespace sdm::cpu::SDM_ISA {

// Offsets of chunk `n` of stream `p`, in entries of each kind of array.
struct ChunkView {
  const Shape& s;
  int64_t p;
  int64_t n;
  int64_t tokens;        // of this chunk
  int64_t token;         // first token, for arrays [P, T, ..]
  int64_t stored_token;  // first token, for arrays [P, T stored, ..]
  int64_t stored_chunk;  // for arrays [P, N, ..]

  ChunkView(const Shape& shape, int64_t stream, int64_t chunk)
      : s(shape),
        p(stream),
        n(chunk),
        tokens(shape.chunk_tokens(chunk)),
        token(stream * shape.tokens + chunk * shape.chunk),
        stored_token(stream * shape.stored_tokens + (chunk - shape.first_chunk) * shape.chunk),
        stored_chunk(stream * shape.stored_chunks + (chunk - shape.first_chunk)) {}

  int64_t square() const { return stored_chunk * s.chunk * s.chunk; }
  int64_t bank() const { return p / s.streams_per_bank * s.slots * s.width; }
  int64_t one_chunk_row() const { return p * s.chunk * s.width; }  // arrays [P, C, D]
  bool valid(int32_t id) const { return id >= 0 && id < s.slots; }
};

template <class T>
inline T* at(void* base, int64_t offset) {
  return static_cast<T*>(base) + offset;
}
template <class T>
inline const T* at(const void* base, int64_t offset) {
  return static_cast<const T*>(base) + offset;
}

}  // namespace sdm::cpu::SDM_ISA
