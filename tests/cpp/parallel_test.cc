// parallel_for on a pool of threads, for a thread sanitizer: nested calls from inside the pool, pools whose
// helpers start late or never, and far more calls than threads.
#include "ffi/cpu/parallel.h"

#include <cstdio>
#include <cstdlib>
#include <queue>
#include <thread>
#include <vector>

namespace {

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Pool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }
  template <class F>
  void Schedule(F&& f) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      queue_.emplace(std::forward<F>(f));
    }
    wake_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::function<void()> f;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return closed_ || !queue_.empty(); });
        if (queue_.empty()) return;
        f = std::move(queue_.front());
        queue_.pop();
      }
      f();
    }
  }
  std::mutex mutex_;
  std::condition_variable wake_;
  std::queue<std::function<void()>> queue_;
  std::vector<std::thread> threads_;
  bool closed_ = false;
};

// Schedules nothing until the call is over.
class LatePool {
 public:
  int64_t num_threads() const { return 8; }
  template <class F>
  void Schedule(F&& f) {
    late_.emplace_back(std::forward<F>(f));
  }
  void run() {
    for (auto& f : late_) f();
    late_.clear();
  }

 private:
  std::vector<std::function<void()>> late_;
};

void expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  std::exit(1);
}

// Every task runs once; what it wrote is seen after the call; scratch is a worker's own.
template <class P>
void run_tasks(P& pool, int64_t tasks) {
  std::vector<int64_t> results(tasks, 0);
  sdm::cpu::parallel_for(pool, tasks, sizeof(int64_t), [&](int64_t task, void* scratch) {
    int64_t* mine = static_cast<int64_t*>(scratch);
    *mine = 0;
    for (int64_t i = 0; i <= task; ++i) *mine += i;
    results[task] += *mine;
  });
  for (int64_t i = 0; i < tasks; ++i) expect(results[i] == i * (i + 1) / 2, "each task runs once");
}

}  // namespace

int main() {
  for (int threads : {1, 2, 4}) {
    Pool pool(threads);
    for (int repeat = 0; repeat < 50; ++repeat) {
      for (int64_t tasks : {0, 1, 2, 3, 100}) run_tasks(pool, tasks);
    }
    // Callers that are pool threads themselves, more of them than threads.
    std::atomic<int> finished{0};
    for (int i = 0; i < 16; ++i) {
      pool.Schedule([&] {
        run_tasks(pool, 20);
        finished.fetch_add(1);
      });
    }
    while (finished.load() < 16) std::this_thread::yield();
  }
  LatePool late;
  run_tasks(late, 10);
  late.run();  // helpers that find nothing left
  std::puts("1 passed, 0 failed");
  return 0;
}
