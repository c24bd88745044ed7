// Operations of sparse attention: they store index keys and choose by them. Knows threads; knows no plan.
#include "kernels/parts.h"
#include "sparse/choose.h"
#include "sparse/keys.h"

namespace quire::QUIRE_ISA {

// Calls f(token, block table of its sequence, scratch) for all tokens.
template <class F>
inline void for_tokens(const StoreKeysArgs& a, ThreadPool& pool, F&& f) {
  constexpr int per_task = 8;
  pool.parallel_for((a.num_tokens + per_task - 1) / per_task, [&](int task, int thread) {
    const int first = task * per_task, last = min_of(first + per_task, a.num_tokens);
    int low = 0, high = a.num_seqs;  // cu_q[low] <= first < cu_q[high]
    while (high - low > 1) (a.cu_q[(low + high) / 2] <= first ? low : high) = (low + high) / 2;
    for (int t = first; t < last; ++t) {
      while (t >= a.cu_q[low + 1]) ++low;
      f(t, a.block_table + size_t(a.slots[low]) * a.block_table_stride, static_cast<float*>(pool.scratch(thread)));
    }
  });
}

void store_keys(const StoreKeysArgs& a, ThreadPool& pool) {
  const size_t width = size_t(a.channels), wide = round_up(width * (a.gates ? 2 : 1), 16);
  for_tokens(a, pool, [&](int t, const int32_t* table, float* key) {
    std::memcpy(key, a.x + size_t(t) * a.x_stride, width * 4);
    if (a.gates) std::memcpy(key + width, a.gates + size_t(t) * a.gates_stride, width * 4);
    const int position = a.positions[t];
    if (a.size == 1) return store_key(a, table, key, position, position, key + wide);
    const KVRow at = a.raw.row_of(position);
    store_keys(key, 0, 1, a.raw, 0, table[at.block], at.offset, key + wide);
  });
  if (a.size == 1) return;
  for_tokens(a, pool, [&](int t, const int32_t* table, float* key) {
    const int end = a.positions[t] + 1;
    if (end % a.size) return;
    float* rest = key + round_up(size_t(a.kv.head_dim), 16);
    make_entry(a, table, end, key, rest);
    store_key(a, table, key, end - a.size, end - 1, rest);
  });
}

size_t choose_workspace(int tokens, int num_heads, int groups, int head_dim, int top_k, int threads) {
  return ChooseSizes(tokens, num_heads, groups, head_dim, top_k, threads).bytes(threads);
}

// The best of all keys for each query of a run.
inline void choose_run(const Chooser& chooser, const QueryRun& r, int thread, void* bits) {
  chooser.run(r, 0, INT32_MAX, thread, [&](int token, int group, const Choice& c) {
    chooser.write(r.seq, token, group, c.kept, c.count, static_cast<uint64_t*>(bits));
  });
}

// Few queries: threads share their keys, `each` at a time, and the best of all parts are chosen again.
inline void choose_parts(const ChooseArgs& a, const Chooser& chooser, const QueryRun* runs, int count, int parts, int each,
                         ThreadPool& pool) {
  const ChooseSizes& sizes = chooser.sizes();
  const size_t counts = round_up(sizes.slot(), 64), stride = counts + round_up(sizes.choices * 4, 64);
  char* slots = chooser.thread_memory(pool.threads());
  auto kept_at = [&](int task, int place) {
    return reinterpret_cast<uint64_t*>(slots + size_t(task) * stride) + size_t(place) * size_t(a.top_k);
  };
  auto count_at = [&](int task, int place) {
    return reinterpret_cast<int32_t*>(slots + size_t(task) * stride + counts) + place;
  };
  pool.parallel_for(count * parts, [&](int task, int thread) {
    const QueryRun& r = runs[task / parts];
    const int low = task % parts * each;
    chooser.run(r, low, low + each, thread, [&](int token, int group, const Choice& c) {
      const int place = (token - r.first) * a.groups + group;
      *count_at(task, place) = c.count;
      std::memcpy(kept_at(task, place), c.kept, size_t(c.count) * 8);
    });
  });
  pool.parallel_for(count, [&](int number, int thread) {
    const QueryRun& r = runs[number];
    for (int place = 0; place < (r.last - r.first) * a.groups; ++place) {
      Choice all;
      all.begin(reinterpret_cast<uint64_t*>(chooser.thread_memory(thread)), a.top_k);
      for (int task = number * parts; task < (number + 1) * parts; ++task)
        for (int i = 0; i < *count_at(task, place); ++i) all.add(kept_at(task, place)[i]);
      all.close();
      chooser.write(r.seq, r.first + place / a.groups, place % a.groups, all.kept, all.count,
                    static_cast<uint64_t*>(pool.scratch(thread)));
    }
  });
}

void choose(const ChooseArgs& a, ThreadPool& pool) {
  const Chooser chooser(a, pool.threads());
  auto* runs = static_cast<QueryRun*>(a.workspace);
  int count = 0, most = 0;
  for (int seq = 0; seq < a.num_seqs; ++seq) {
    int first = a.cu_q[seq];
    const int last = a.cu_q[seq + 1];
    for (; first < last && !chooser.chooses(chooser.position(seq, first)); ++first) chooser.write_all(seq, first);
    for (; first < last; first += chooser.each()) runs[count++] = {seq, first, min_of(first + chooser.each(), last)};
    most = max_of(most, chooser.keys_of(a.kv_len[seq] - 1));
  }
  const int unit = chooser.unit(), units = (most + unit - 1) / unit;
  const int wanted = pool.threads() > 1 ? kChooseParts * pool.threads() / max_of(count, 1) : 1;
  const int parts = min_of(wanted, units);
  if (parts > 1) return choose_parts(a, chooser, runs, count, parts, (units + parts - 1) / parts * unit, pool);
  pool.parallel_for(count, [&](int task, int thread) { choose_run(chooser, runs[task], thread, pool.scratch(thread)); });
}

}  // namespace quire::QUIRE_ISA
