// Chooses the instruction set of the CPU kernels, once, from what the processor has.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "ffi/cpu/kernels.h"

namespace sdm::cpu {

#define SDM_DECLARE_ISA(isa)                      \
  namespace isa {                                 \
  const Kernels& kernels(DType bank, DType grad); \
  }
SDM_DECLARE_ISA(baseline)
#if defined(SDM_X86_ISAS)
SDM_DECLARE_ISA(avx2)
SDM_DECLARE_ISA(avx512)
#endif
#undef SDM_DECLARE_ISA

namespace {

struct Isa {
  const char* name;
  const Kernels& (*kernels)(DType, DType);
};

Isa choose() {
  const char* asked = std::getenv("SDM_CPU_ISA");
  [[maybe_unused]] const auto allowed = [&](const char* name) {
    // A lower one than `name` was asked for.
    if (asked == nullptr) return true;
    if (std::strcmp(asked, "baseline") == 0) return false;
    return !(std::strcmp(asked, "avx2") == 0 && std::strcmp(name, "avx512") == 0);
  };
#if defined(SDM_X86_ISAS)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  if (has_avx512 && allowed("avx512")) return {"avx512", avx512::kernels};
  if (has_avx2 && allowed("avx2")) return {"avx2", avx2::kernels};
#endif
  return {"baseline", baseline::kernels};
}

const Isa& isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace

const Kernels& kernels(DType bank, DType grad) { return isa().kernels(bank, grad); }
const char* isa_name() { return isa().name; }

int64_t snapshot_row_bytes(Quant quant, DType bank, int64_t width) {
  switch (quant) {
    case Quant::none:
      return width * (bank == DType::f64 ? 8 : bank == DType::f32 ? 4 : 2);
    case Quant::bf16:
      return width * 2;
    case Quant::fp8:
      return width;
    case Quant::int4:
      return (width + 1) / 2;
  }
  return 0;
}

size_t phase1_scratch_bytes(const Shape& s) {
  const int64_t entries = s.chunk * (s.writes > s.reads ? s.writes : s.reads);
  // Two arrays of sort keys, and SlotTokens.
  return 2 * sizeof(uint64_t) * entries + s.chunk * (6 * sizeof(double) + sizeof(int32_t)) +
         2 * sizeof(int32_t) * s.chunk * s.writes;
}
size_t mover_scratch_bytes(const Shape& s) { return sizeof(double) * s.width; }
size_t decode_scratch_bytes(const Shape& s) {
  return sizeof(double) * (s.width + 2 * s.writes) + sizeof(int32_t) * s.writes;
}
size_t topk_scratch_bytes(int64_t k, int64_t columns) {
  // Forward: for up to 2 k candidates four vectors of keys and two of slots (half as long), all aligned.
  constexpr size_t kMostVectorBytes = 64;
  return std::max<size_t>((2 * k * 5 + 1) * kMostVectorBytes, sizeof(double) * columns);
}

}  // namespace sdm::cpu
