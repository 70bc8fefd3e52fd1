// The Python module of the GPU: its custom calls by name.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <iterator>
#include <string>

#include "ffi/cuda/stages.h"

namespace nb = nanobind;

namespace {

namespace ffi = xla::ffi;
using Context = sdm::cuda::Backend::Context;

std::atomic<int64_t> calls{0};

template <auto handler>
ffi::Error on_stream(cudaStream_t stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets,
                     ffi::Dictionary attrs) {
  calls.fetch_add(1, std::memory_order_relaxed);
  return handler(Context{stream, device}, args, rets, attrs);
}

template <auto handler>
XLA_FFI_Error* call(XLA_FFI_CallFrame* frame) {
  static const auto* bound = ffi::Ffi::Bind()
                                 .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                 .Ctx<ffi::DeviceOrdinal>()
                                 .RemainingArgs()
                                 .RemainingRets()
                                 .Attrs()
                                 .To(on_stream<handler>, {ffi::Traits::kCmdBufferCompatible})
                                 .release();
  return bound->Call(frame);
}

template <auto handler>
nb::capsule capsule() {
  return nb::capsule(reinterpret_cast<void*>(&call<handler>), "xla._CUSTOM_CALL_TARGET");
}

// The compute capabilities that this module was built for, ascending; the last as PTX too, which newer ones run.
constexpr int kArchs[] = {SDM_CUDA_ARCHS};

bool serves(int capability) {
  for (const int arch : kArchs) {
    if (capability / 10 == arch / 10 && capability >= arch) return true;
  }
  return capability >= kArchs[std::size(kArchs) - 1];
}

std::string refusal() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return "";
  for (int device = 0; device < count; ++device) {
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (serves(10 * major + minor)) continue;
    std::string built;
    for (const int arch : kArchs) built += (built.empty() ? "" : ", ") + std::to_string(arch);
    return "the GPU has compute capability " + std::to_string(10 * major + minor) + ", the CUDA module was built for " +
           built + " (from 80 on can be had, by the environment variable SDM_CUDA_ARCHS)";
  }
  return "";
}

}  // namespace

NB_MODULE(_cuda, m) {
  // How often any handler has run: a replayed command buffer runs none.
  m.def("calls", [] { return calls.load(); });
  // Why the kernels cannot run on a GPU here; empty if they can, or if there is none.
  m.def("refusal", &refusal);
  // Capsules of all handlers, for jax.ffi.register_ffi_target.
  m.def("targets", [] {
    nb::dict targets;
#define SDM_ADD(name) targets["sdm_" #name] = capsule<&sdm::Handlers<sdm::cuda::Backend>::name>();
    SDM_FOR_STEP_CALLS(SDM_ADD)
#undef SDM_ADD
    targets["sdm_forward_stage"] = capsule<&sdm::cuda::StageHandlers::forward_stage>();
    targets["sdm_backward_stage"] = capsule<&sdm::cuda::StageHandlers::backward_stage>();
    return targets;
  });
}
