// Streams beside the caller's, on which ranges of streams or columns run side by side.
#pragma once

#include <cuda_runtime_api.h>

namespace sdm::cuda {

inline constexpr int kMostBranches = 4;

// Streams and events of one device, made on first use and kept for the life of the process.
struct SideStreams {
  int device = 0;
  bool taken = false;
  cudaStream_t streams[kMostBranches] = {};  // the first is the caller's
  cudaEvent_t events[kMostBranches + 1] = {};
};

// Takes a set that no other call uses and that is not part of another capture than `stream`'s; gives it
// back at the end. Work on it may still be running then: whoever takes it next waits its turn on the device.
class BorrowedStreams {
 public:
  BorrowedStreams(int device, cudaStream_t stream);
  ~BorrowedStreams();
  BorrowedStreams(const BorrowedStreams&) = delete;
  BorrowedStreams& operator=(const BorrowedStreams&) = delete;

  cudaError_t error() const { return error_; }
  const cudaStream_t* streams() const { return set_->streams; }
  const cudaEvent_t* events() const { return set_->events; }

 private:
  SideStreams* set_ = nullptr;
  cudaError_t error_ = cudaSuccess;
};

}  // namespace sdm::cuda
