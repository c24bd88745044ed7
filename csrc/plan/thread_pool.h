// A persistent pool of threads with a low-latency fork and join. Knows nothing about the tasks.
//
// Tasks are claimed one by one, so a thread that the system has descheduled delays no other: the others do its share.
// Workers spin for some microseconds after a job (the next op of a plan comes soon), yield for a millisecond or two
// (the next step comes soon), then sleep: an idle pool uses no CPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace quire {

class ThreadPool {
 public:
  // Bytes of private working memory per thread (64-byte aligned, lazily touched, never cleared).
  static constexpr size_t kScratchBytes = size_t{2} << 20;

  // `threads` includes the caller of run(): threads - 1 workers are started.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Scratch of thread 0 <= thread < threads().
  void* scratch(int thread) const;

  // Calls f(task, thread) once for every 0 <= task < num_tasks and returns when all are done. f must not throw and
  // must not call the pool. One caller runs at a time; others wait. A single task, or thread, runs in place.
  template <class F>
  void parallel_for(int num_tasks, F&& f) {
    run(num_tasks, call<std::remove_reference_t<F>>, address(f));
  }

  // The same, but each thread starts with its own range of neighbouring tasks, always the same one, so that their data
  // stays in its cache; then it helps the others.
  template <class F>
  void parallel_shares(int num_tasks, F&& f) {
    run_shares(num_tasks, call<std::remove_reference_t<F>>, address(f));
  }

  using Task = void (*)(void* ctx, int task, int thread);
  void run(int num_tasks, Task fn, void* ctx);
  void run_shares(int num_tasks, Task fn, void* ctx);

 private:
  // A function object as a Task and its context.
  template <class Fn>
  static void call(void* fn, int task, int thread) {
    (*static_cast<Fn*>(fn))(task, thread);
  }
  template <class Fn>
  static void* address(Fn& fn) {
    return const_cast<void*>(static_cast<const void*>(&fn));
  }

  void run_alone(int num_tasks, Task fn, void* ctx);  // by the only caller

  struct State;
  int threads_;
  State* state_;  // owned: every kernel includes this header, and <memory> would double what they read
};

}  // namespace quire
