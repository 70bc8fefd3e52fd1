// Runs tasks on a thread pool: XLA's, in the custom calls.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace sdm::cpu {

// Calls run(task, scratch) for every task in [0, tasks), and returns when all are done. `scratch` is
// a worker's own memory of `scratch_bytes`. What a task computes must not depend on who runs it.
//
// The calling thread takes tasks too. It may itself belong to the pool, so it must never wait for a
// thread that has not started: at the end it waits only for tasks that are already running, and those
// wait for nobody. A helper that starts late finds no task left and goes home.
//
// `Pool` has `num_threads()` and `Schedule(function)`.
template <class Pool>
void parallel_for(Pool& pool, int64_t tasks, size_t scratch_bytes, const std::function<void(int64_t, void*)>& run) {
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
    int64_t tasks;
    size_t scratch_bytes;
    const std::function<void(int64_t, void*)>* run;  // lives until all tasks are done

    void work() {
      int64_t task = next.fetch_add(1);
      if (task >= tasks) return;
      const auto scratch = std::make_unique<char[]>(scratch_bytes);
      int64_t count = 0;
      for (; task < tasks; task = next.fetch_add(1), ++count) (*run)(task, scratch.get());
      const std::lock_guard<std::mutex> lock(mutex);
      done += count;
      if (done == tasks) all_done.notify_all();
    }
  };
  if (tasks <= 0) return;
  const auto state = std::make_shared<State>();
  state->tasks = tasks;
  state->scratch_bytes = scratch_bytes;
  state->run = &run;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), tasks) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    pool.Schedule([state] { state->work(); });
  }
  state->work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == tasks; });
}

}  // namespace sdm::cpu
