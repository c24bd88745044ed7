// Counts how often each token string of bounded length occurs in a set of sequences, for suffix decoding (Oliaro et
// al. 2024, arXiv:2411.04975). Knows token ids only.
//
// A compressed trie of all suffixes, cut at a depth. The count of a string is the number of suffixes that begin with
// it, so a suffix that is still growing always ends at a node. An edge's label is a piece of a sequence's text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <vector>

namespace quire {

struct SuffixDraft {
  std::vector<int32_t> tokens;
  std::vector<float> probabilities;  // of each token and all before it
  float score = 0;                   // their sum: the number of tokens that are expected to be right
  int match_length = 0;
};

struct SuffixRule {
  int max_tokens;
  double factor, offset;  // a match of m tokens drafts at most m * factor + offset
  float min_probability;
};

class SuffixTree {
 public:
  explicit SuffixTree(int max_depth);

  // Appends tokens to a sequence; a new id begins one.
  void extend(int64_t sequence, const int32_t* tokens, size_t count);
  // The sequence grows no more.
  void close(int64_t sequence);
  // Forgets a sequence. Unknown ids are ignored.
  void remove(int64_t sequence);
  // The best continuation of `context` over all lengths of a match.
  SuffixDraft draft(const int32_t* context, size_t size, const SuffixRule& rule) const;

  int max_depth() const { return max_depth_; }
  size_t num_sequences() const { return ids_.size(); }
  size_t bytes() const;  // about
  // Whether the counts of all nodes are the sums that they must be.
  bool sound() const;

 private:
  struct Node {
    int32_t parent, first_child, next, previous, best;  // children are a list; best has the largest count
    int32_t text, start, length;                        // the label of the edge to it
    int32_t count;
  };
  struct Text {
    std::vector<int32_t> tokens;
    std::deque<int32_t> points;  // the nodes where its last suffixes end, longest first; the first may be at max_depth
    int64_t references = 0;      // labels
    bool alive = true;
  };
  struct Place {
    int32_t node, offset;  // so many tokens of the node's label are matched
  };

  int32_t token_at(const Node& node, int32_t offset) const;
  int32_t child(int32_t node, int32_t token) const;
  int32_t make_node(int32_t parent, int32_t text, int32_t start, int32_t length, int32_t count);
  int32_t split(int32_t node, int32_t length);
  void link(int32_t parent, int32_t node, int32_t token);
  void unlink(int32_t node);
  void relabel(int32_t node, int32_t text, int32_t start);
  void count_up(int32_t node);
  void count_down(int32_t node);
  void release(int32_t text);
  int32_t step(int32_t node, int32_t text, int32_t position);
  bool find(const int32_t* tokens, int length, Place& place) const;
  SuffixDraft expand(Place place, int match, const SuffixRule& rule) const;

  int max_depth_;
  std::vector<Node> nodes_;  // 0 is the root
  std::vector<int32_t> free_nodes_, free_texts_;
  std::vector<Text> texts_;
  std::unordered_map<uint64_t, int32_t> children_;  // by parent and first token
  std::unordered_map<int64_t, int32_t> ids_;        // sequence to text
  size_t num_tokens_ = 0;
};

}  // namespace quire
