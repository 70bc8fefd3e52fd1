#include "ffi/cpu/backend.h"

#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "ffi/cpu/parallel.h"

namespace sdm::cpu {
namespace {

using xla::ffi::Error;
using xla::ffi::ThreadPool;

// The columns in `parts` equal parts (whole cache lines of every dtype), and those in ranges of whole parts
// that tasks work on side by side: as few as keep all threads equally busy, because a row is best visited whole.
struct ColumnRanges {
  int64_t width, parts, step, ranges;

  ColumnRanges(const Shape& s, int64_t num_parts, int64_t threads)
      : width(s.width), parts(num_parts), step(((s.width + parts - 1) / parts + 31) / 32 * 32), ranges(1) {
    const auto uneven = [&](int64_t tasks) { return tasks % threads != 0 && tasks < 4 * threads; };
    while (ranges < parts && uneven(s.streams * ranges)) ++ranges;
  }

  Columns operator[](int64_t i) const {
    const int64_t first = parts * i / ranges, last = parts * (i + 1) / ranges;
    return {std::min(first * step, width), std::min(last * step, width), first, step};
  }
};

Columns all_columns(const Shape& s) { return {0, s.width, 0, s.width}; }

bool has_scales(Quant quant) { return quant == Quant::fp8 || quant == Quant::int4; }

// A result that is large and new is written first here; page by page that would take as long as the
// rest of the call, so huge pages are asked for where the system gives them on request.
void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHuge = uintptr_t{1} << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHuge - 1) & ~(kHuge - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) & ~(kHuge - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // a hint: may fail
#endif
}

// One task for each chunk that the arrays hold.
template <class F>
Error for_chunks(ThreadPool& pool, const Shape& s, size_t scratch_bytes, F&& f) {
  if (s.stored_chunks == 0) return Error::Success();
  parallel_for(pool, s.streams * s.stored_chunks, scratch_bytes, [&](int64_t task, void* scratch) {
    f(task / s.stored_chunks, s.first_chunk + task % s.stored_chunks, scratch);
  });
  return Error::Success();
}

// One task for each stream, on its only chunk.
template <class F>
Error for_streams(ThreadPool& pool, const Shape& s, size_t scratch_bytes, F&& f) {
  parallel_for(pool, s.streams, scratch_bytes, f);
  return Error::Success();
}

// Tasks of some rows each, for product keys.
template <class Params, class F>
Error for_rows(ThreadPool& pool, const Params& p, F&& f) {
  constexpr int64_t kTaskRows = 64;
  parallel_for(
      pool, (p.rows + kTaskRows - 1) / kTaskRows, topk_scratch_bytes(p.k, p.columns),
      [&](int64_t task, void* scratch) { f(task * kTaskRows, std::min(p.rows, (task + 1) * kTaskRows), scratch); });
  return Error::Success();
}

}  // namespace

Error Backend::copy(ThreadPool&, const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes);
  return Error::Success();
}

Error Backend::phase1(ThreadPool& pool, const Forward& f) {
  return for_chunks(pool, f.shape, phase1_scratch_bytes(f.shape),
                    [&](int64_t p, int64_t n, void* scratch) { kernels(f.dtype).phase1(f, p, n, scratch); });
}

Error Backend::solve(ThreadPool& pool, const Forward& f) {
  return for_chunks(pool, f.shape, 0, [&](int64_t p, int64_t n, void*) { kernels(f.dtype).solve(f, p, n); });
}

Error Backend::gather(ThreadPool& pool, const Forward& f) {
  return for_streams(pool, f.shape, 0,
                     [&](int64_t p, void*) { kernels(f.dtype).gather(f, p, 0, all_columns(f.shape)); });
}

Error Backend::take_snapshot(ThreadPool& pool, const Forward& f) {
  return for_streams(pool, f.shape, 0,
                     [&](int64_t p, void*) { kernels(f.dtype).take_snapshot(f, p, 0, all_columns(f.shape)); });
}

Error Backend::dual_matmul(ThreadPool& pool, const Forward& f) {
  return for_streams(pool, f.shape, 0,
                     [&](int64_t p, void*) { kernels(f.dtype).dual_matmul(f, p, 0, all_columns(f.shape)); });
}

Error Backend::mover(ThreadPool& pool, const Forward& f) {
  return for_streams(pool, f.shape, 0,
                     [&](int64_t p, void*) { kernels(f.dtype).mover(f, p, 0, all_columns(f.shape)); });
}

Error Backend::gather_gradient(ThreadPool& pool, const Backward& b) {
  return for_streams(pool, b.shape, 0,
                     [&](int64_t p, void*) { kernels(b.dtype).gather_gradient(b, p, 0, all_columns(b.shape)); });
}

Error Backend::du_matmul(ThreadPool& pool, const Backward& b) {
  return for_streams(pool, b.shape, 0,
                     [&](int64_t p, void*) { kernels(b.dtype).du_matmul(b, p, 0, all_columns(b.shape)); });
}

Error Backend::write_mover(ThreadPool& pool, const Backward& b) {
  return for_streams(pool, b.shape, mover_scratch_bytes(b.shape), [&](int64_t p, void* scratch) {
    kernels(b.dtype, b.grad_dtype).write_mover(b, p, 0, all_columns(b.shape), scratch);
  });
}

Error Backend::read_mover(ThreadPool& pool, const Backward& b) {
  return for_streams(pool, b.shape, mover_scratch_bytes(b.shape), [&](int64_t p, void* scratch) {
    kernels(b.dtype, b.grad_dtype).read_mover(b, p, 0, all_columns(b.shape), scratch);
  });
}

Error Backend::phase1_backward(ThreadPool& pool, const Backward& b) {
  return for_chunks(pool, b.shape, phase1_scratch_bytes(b.shape),
                    [&](int64_t p, int64_t n, void* scratch) { kernels(b.dtype).phase1_backward(b, p, n, scratch); });
}

// Phase 1 and the solve of a slab of chunks, each chunk a task; then Phase 2, one task for each stream
// and column range, which runs all the slab's chunks with its columns in cache.
Error Backend::forward(ThreadPool& pool, const Forward& whole, int64_t parts) {
  const Kernels& k = kernels(whole.dtype);
  if (whole.snapshot && has_scales(whole.quant)) parts = 1;  // the scale of a row needs all its columns
  Forward f = whole;
  Shape& s = f.shape;
  if (f.snapshot) {
    ask_for_huge_pages(f.snapshot,
                       s.streams * s.stored_chunks * s.write_slots * snapshot_row_bytes(f.quant, f.dtype, s.width));
  }
  const ColumnRanges columns_of(s, parts, pool.num_threads());
  const int64_t chunks = s.chunks(), slab = s.stored_chunks;
  for (s.first_chunk = 0; s.first_chunk < chunks; s.first_chunk += slab) {
    const int64_t count = std::min(slab, chunks - s.first_chunk);
    parallel_for(pool, s.streams * count, phase1_scratch_bytes(s), [&](int64_t task, void* scratch) {
      const int64_t p = task / count, n = s.first_chunk + task % count;
      k.phase1(f, p, n, scratch);
      k.solve(f, p, n);
    });
    parallel_for(pool, s.streams * columns_of.ranges, 0, [&](int64_t task, void*) {
      const int64_t p = task / columns_of.ranges;
      const Columns columns = columns_of[task % columns_of.ranges];
      for (int64_t n = s.first_chunk; n < s.first_chunk + count; ++n) {
        k.gather(f, p, n, columns);
        k.dual_matmul(f, p, n, columns);
        k.mover(f, p, n, columns);
      }
    });
  }
  return Error::Success();
}

// Phase 2 in reverse, one task for each stream and column range; then the sums over the ranges and the
// Phase-1 backward, each chunk a task.
Error Backend::backward(ThreadPool& pool, const Backward& b) {
  const Kernels& k = kernels(b.dtype, b.grad_dtype);
  const Shape& s = b.shape;
  const ColumnRanges columns_of(s, b.parts, pool.num_threads());
  parallel_for(pool, s.streams * columns_of.ranges, mover_scratch_bytes(s), [&](int64_t task, void* scratch) {
    const int64_t p = task / columns_of.ranges;
    const Columns columns = columns_of[task % columns_of.ranges];
    for (int64_t n = s.chunks() - 1; n >= 0; --n) {
      k.gather_gradient(b, p, n, columns);
      k.du_matmul(b, p, n, columns);
      k.write_mover(b, p, n, columns, scratch);
      k.read_mover(b, p, n, columns, scratch);
    }
  });
  return for_chunks(pool, s, phase1_scratch_bytes(s), [&](int64_t p, int64_t n, void* scratch) {
    k.add_parts(b, p, n);
    k.phase1_backward(b, p, n, scratch);
  });
}

Error Backend::decode(ThreadPool& pool, const Decode& d) {
  return for_streams(pool, d.shape, decode_scratch_bytes(d.shape),
                     [&](int64_t p, void* scratch) { kernels(d.dtype).decode(d, p, all_columns(d.shape), scratch); });
}

Error Backend::product_key_topk(ThreadPool& pool, const ProductKey& p) {
  return for_rows(pool, p,
                  [&](int64_t begin, int64_t end, void* scratch) { kernels(p.dtype).topk(p, begin, end, scratch); });
}

Error Backend::product_key_topk_backward(ThreadPool& pool, const ProductKeyBackward& p) {
  return for_rows(pool, p, [&](int64_t begin, int64_t end, void* scratch) {
    kernels(p.dtype).topk_backward(p, begin, end, scratch);
  });
}

}  // namespace sdm::cpu
