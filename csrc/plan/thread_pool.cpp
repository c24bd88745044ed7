// The pool's protocol to claim, spin and sleep. Knows nothing about the tasks.
#include "plan/thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "plan/memory.h"

namespace quire {

namespace {

// About 15 us of pauses on x86 (40-140 cycles each), longer than the serial gaps between ops. A thread that must wait
// longer, for the end of a step or for a thread that lost its core, yields its own core.
constexpr int kSpinsBeforeYield = 1000;
// Then a millisecond or two: the next step arrives sooner than a sleeping thread would wake.
constexpr int kYieldsBeforeSleep = 2000;

// Waits a moment, for the `spin`th time.
inline void wait_a_moment(int spin) {
  if (spin >= kSpinsBeforeYield) return std::this_thread::yield();
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

constexpr uint64_t ticket(uint32_t epoch, uint32_t next) { return (uint64_t{epoch} << 32) | next; }

}  // namespace

// Tasks next..end-1 of a thread's share, open to any thread.
struct alignas(64) Share {
  std::atomic<int> next{0};
  int end = 0;
};

struct ThreadPool::State {
  // High half: the job's number; low half: its next unclaimed task. A claim is a compare-and-swap on both, so a late
  // thread can never take a task of a job it has not seen, and a job's fields stay put while any claimed task runs.
  alignas(64) std::atomic<uint64_t> claim{0};
  alignas(64) std::atomic<int> finished{0};
  alignas(64) std::atomic<uint32_t> epoch{0};
  std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  // Published by the store of `claim`; relaxed atomics because a late thread may read them while they change.
  std::atomic<int> num_tasks{0};
  std::atomic<Task> fn{nullptr};
  std::atomic<void*> ctx{nullptr};
  alignas(64) std::mutex callers;  // away from the cache lines that workers spin on
  std::vector<std::thread> workers;
  std::vector<Share> shares;
  HugeBuffer scratch;
  pid_t owner = 0;

  // Runs tasks of job `job` until all are claimed.
  void work(uint32_t job, int thread) {
    for (;;) {
      uint64_t seen = claim.load(std::memory_order_acquire);
      const int total = num_tasks.load(std::memory_order_relaxed);
      if (uint32_t(seen >> 32) != job || int(uint32_t(seen)) >= total) return;
      if (!claim.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
      fn.load(std::memory_order_relaxed)(ctx.load(std::memory_order_relaxed), int(uint32_t(seen)), thread);
      finished.fetch_add(1, std::memory_order_acq_rel);
    }
  }

  // Shares of even sizes.
  void divide(int tasks) {
    const int64_t count = int64_t(shares.size());
    for (int64_t i = 0; i < count; ++i) {
      shares[size_t(i)].next.store(int(tasks * i / count), std::memory_order_relaxed);
      shares[size_t(i)].end = int(tasks * (i + 1) / count);
    }
  }

  // An unclaimed task of the thread's own share, or of the next share that has one; -1 if all are claimed.
  int claim_share(int thread) {
    for (size_t i = 0; i < shares.size(); ++i) {
      Share& share = shares[(size_t(thread) + i) % shares.size()];
      if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
      const int task = share.next.fetch_add(1, std::memory_order_relaxed);
      if (task < share.end) return task;
    }
    return -1;
  }

  void loop(int thread) {
    uint32_t seen = 0;
    for (;;) {
      uint32_t now = epoch.load(std::memory_order_acquire);
      for (int spin = 0; now == seen && spin < kSpinsBeforeYield + kYieldsBeforeSleep; ++spin) {
        wait_a_moment(spin);
        now = epoch.load(std::memory_order_acquire);
      }
      if (now == seen) {
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        epoch.wait(seen, std::memory_order_seq_cst);
        sleepers.fetch_sub(1, std::memory_order_relaxed);
        now = epoch.load(std::memory_order_acquire);
      }
      if (stop.load(std::memory_order_acquire)) return;
      seen = now;
      work(now, thread);
    }
  }
};

ThreadPool::ThreadPool(int threads) : threads_(threads < 1 ? 1 : threads) {
  auto state = std::make_unique<State>();
  state->scratch = HugeBuffer(kScratchBytes * size_t(threads_));
  state->shares = std::vector<Share>(size_t(threads_));
  state->owner = getpid();
  state_ = state.release();
  for (int i = 1; i < threads_; ++i) state_->workers.emplace_back([this, i] { state_->loop(i); });
}

ThreadPool::~ThreadPool() {
  // After a fork the child has no workers; run() still works there (the caller claims every task).
  if (state_->owner != getpid()) {
    for (std::thread& t : state_->workers) t.detach();
    delete state_;
    return;
  }
  state_->stop.store(true, std::memory_order_release);
  state_->epoch.fetch_add(1, std::memory_order_seq_cst);
  state_->epoch.notify_all();
  for (std::thread& t : state_->workers) t.join();
  delete state_;
}

void* ThreadPool::scratch(int thread) const {
  return static_cast<char*>(state_->scratch.data()) + kScratchBytes * size_t(thread);
}

void ThreadPool::run(int num_tasks, Task fn, void* ctx) {
  const std::lock_guard<std::mutex> lock(state_->callers);
  run_alone(num_tasks, fn, ctx);
}

void ThreadPool::run_shares(int num_tasks, Task fn, void* ctx) {
  const std::lock_guard<std::mutex> lock(state_->callers);
  if (num_tasks <= 1) return run_alone(num_tasks, fn, ctx);
  state_->divide(num_tasks);
  struct Job {
    State& state;
    Task fn;
    void* ctx;
  } job{*state_, fn, ctx};
  run_alone(threads_, [](void* all, int, int thread) {
    const Job& job = *static_cast<const Job*>(all);
    for (int task; (task = job.state.claim_share(thread)) >= 0;) job.fn(job.ctx, task, thread);
  }, &job);
}

void ThreadPool::run_alone(int num_tasks, Task fn, void* ctx) {
  if (num_tasks <= 0) return;
  State& s = *state_;
  if (threads_ == 1 || num_tasks == 1) {
    for (int task = 0; task < num_tasks; ++task) fn(ctx, task, 0);
    return;
  }
  const uint32_t job = s.epoch.load(std::memory_order_relaxed) + 1;
  // The last job's tasks are all claimed (low half >= its count), so no thread claims while the fields change: first
  // set the new job's number without tasks, then the fields, then its tasks.
  s.claim.store(ticket(job, INT32_MAX), std::memory_order_seq_cst);
  s.num_tasks.store(num_tasks, std::memory_order_relaxed);
  s.fn.store(fn, std::memory_order_relaxed);
  s.ctx.store(ctx, std::memory_order_relaxed);
  s.finished.store(0, std::memory_order_relaxed);
  s.claim.store(ticket(job, 0), std::memory_order_release);
  s.epoch.store(job, std::memory_order_seq_cst);
  if (s.sleepers.load(std::memory_order_seq_cst) > 0) s.epoch.notify_all();
  s.work(job, 0);
  for (int spin = 0; s.finished.load(std::memory_order_acquire) != num_tasks; spin += spin < kSpinsBeforeYield)
    wait_a_moment(spin);
}

}  // namespace quire
