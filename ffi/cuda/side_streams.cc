#include "ffi/cuda/side_streams.h"

#include <memory>
#include <mutex>
#include <vector>

namespace sdm::cuda {
namespace {

std::mutex& mutex() {
  static auto* const m = new std::mutex;
  return *m;
}
// Never destroyed: the driver may be gone by then.
std::vector<std::unique_ptr<SideStreams>>& sets() {
  static auto* const all = new std::vector<std::unique_ptr<SideStreams>>;
  return *all;
}

// The capture that a stream belongs to, 0 if none.
unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, &id, nullptr, nullptr, nullptr, nullptr);
#else
  const cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, &id);
#endif
  return error == cudaSuccess && status == cudaStreamCaptureStatusActive ? id + 1 : 0;
}

cudaError_t make(SideStreams* set) {
  // Making a stream or an event has no place in a capture, so nothing of it can be captured.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
  if (error != cudaSuccess) return error;
  for (int i = 1; i < kMostBranches && error == cudaSuccess; ++i) {
    error = cudaStreamCreateWithFlags(&set->streams[i], cudaStreamNonBlocking);
  }
  for (int i = 0; i <= kMostBranches && error == cudaSuccess; ++i) {
    error = cudaEventCreateWithFlags(&set->events[i], cudaEventDisableTiming);
  }
  cudaThreadExchangeStreamCaptureMode(&mode);
  return error;
}

}  // namespace

BorrowedStreams::BorrowedStreams(int device, cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(mutex());
  const unsigned long long capture = capture_of(stream);
  for (const auto& set : sets()) {
    if (set->taken || set->device != device) continue;
    const unsigned long long other = capture_of(set->streams[1]);
    if (other != 0 && other != capture) continue;
    set_ = set.get();
    break;
  }
  if (set_ == nullptr) {
    auto set = std::make_unique<SideStreams>();
    set->device = device;
    error_ = make(set.get());
    set_ = set.get();
    sets().push_back(std::move(set));
  }
  set_->taken = true;
  set_->streams[0] = stream;
}

BorrowedStreams::~BorrowedStreams() {
  const std::lock_guard<std::mutex> lock(mutex());
  // A set that could not be made is never offered again.
  if (error_ == cudaSuccess) set_->taken = false;
}

}  // namespace sdm::cuda
