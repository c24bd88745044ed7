#include "draft/suffix_tree.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace quire {

namespace {

constexpr int32_t kNone = -1;

uint64_t key(int32_t node, int32_t token) { return uint64_t(uint32_t(node)) << 32 | uint32_t(token); }

}  // namespace

SuffixTree::SuffixTree(int max_depth) : max_depth_(max_depth) {
  if (max_depth < 2) throw std::invalid_argument("a suffix tree needs a depth of at least 2");
  nodes_.push_back({kNone, kNone, kNone, kNone, kNone, kNone, 0, 0, 0});
}

int32_t SuffixTree::token_at(const Node& node, int32_t offset) const {
  return texts_[size_t(node.text)].tokens[size_t(node.start + offset)];
}

int32_t SuffixTree::child(int32_t node, int32_t token) const {
  const auto found = children_.find(key(node, token));
  return found == children_.end() ? kNone : found->second;
}

void SuffixTree::link(int32_t parent, int32_t node, int32_t token) {
  Node& n = nodes_[size_t(node)];
  Node& p = nodes_[size_t(parent)];
  n.parent = parent, n.previous = kNone, n.next = p.first_child;
  if (n.next != kNone) nodes_[size_t(n.next)].previous = node;
  p.first_child = node;
  children_[key(parent, token)] = node;
  if (p.best == kNone || n.count > nodes_[size_t(p.best)].count) p.best = node;
}

void SuffixTree::unlink(int32_t node) {
  const Node& n = nodes_[size_t(node)];
  Node& p = nodes_[size_t(n.parent)];
  if (n.previous != kNone) nodes_[size_t(n.previous)].next = n.next;
  if (n.next != kNone) nodes_[size_t(n.next)].previous = n.previous;
  if (p.first_child == node) p.first_child = n.next;
  children_.erase(key(n.parent, token_at(n, 0)));
  if (p.best != node) return;
  p.best = p.first_child;
  for (int32_t other = p.first_child; other != kNone; other = nodes_[size_t(other)].next)
    if (nodes_[size_t(other)].count > nodes_[size_t(p.best)].count) p.best = other;
}

int32_t SuffixTree::make_node(int32_t parent, int32_t text, int32_t start, int32_t length, int32_t count) {
  int32_t id;
  if (free_nodes_.empty()) {
    id = int32_t(nodes_.size());
    nodes_.emplace_back();
  } else {
    id = free_nodes_.back();
    free_nodes_.pop_back();
  }
  nodes_[size_t(id)] = {parent, kNone, kNone, kNone, kNone, text, start, length, count};
  ++texts_[size_t(text)].references;
  link(parent, id, token_at(nodes_[size_t(id)], 0));
  return id;
}

// The node above `node` that ends after the first `length` tokens of its label.
int32_t SuffixTree::split(int32_t node, int32_t length) {
  const Node lower = nodes_[size_t(node)];
  unlink(node);
  const int32_t upper = make_node(lower.parent, lower.text, lower.start, length, lower.count);
  nodes_[size_t(node)].start += length;
  nodes_[size_t(node)].length -= length;
  link(upper, node, token_at(nodes_[size_t(node)], 0));
  return upper;
}

void SuffixTree::relabel(int32_t node, int32_t text, int32_t start) {
  Node& n = nodes_[size_t(node)];
  const int32_t old = n.text;
  n.text = text, n.start = start;
  if (old == text) return;
  ++texts_[size_t(text)].references;
  --texts_[size_t(old)].references;
  release(old);
}

void SuffixTree::release(int32_t text) {
  Text& t = texts_[size_t(text)];
  if (t.alive || t.references > 0) return;
  num_tokens_ -= t.tokens.size();
  t = Text{};
  free_texts_.push_back(text);
}

void SuffixTree::count_up(int32_t node) {
  Node& n = nodes_[size_t(node)];
  ++n.count;
  Node& p = nodes_[size_t(n.parent)];
  if (n.count > nodes_[size_t(p.best)].count) p.best = node;
}

void SuffixTree::count_down(int32_t node) {
  Node& n = nodes_[size_t(node)];
  if (--n.count > 0) {
    Node& p = nodes_[size_t(n.parent)];
    if (p.best == node)
      for (int32_t other = p.first_child; other != kNone; other = nodes_[size_t(other)].next)
        if (nodes_[size_t(other)].count > nodes_[size_t(p.best)].count) p.best = other;
    return;
  }
  unlink(node);
  const int32_t text = n.text;
  n.parent = node;  // marks a free node
  free_nodes_.push_back(node);
  --texts_[size_t(text)].references;
  release(text);
}

// Where a suffix that ends at `node` ends after the token at `position` of `text`, the last one there is.
int32_t SuffixTree::step(int32_t node, int32_t text, int32_t position) {
  Node& n = nodes_[size_t(node)];
  if (n.count == 1 && n.first_child == kNone && node != 0 && n.text == text && n.start + n.length == position) {
    ++n.length;  // nobody else has been here
    return node;
  }
  const int32_t next = child(node, texts_[size_t(text)].tokens[size_t(position)]);
  if (next == kNone) return make_node(node, text, position, 1, 1);
  const int32_t end = nodes_[size_t(next)].length == 1 ? next : split(next, 1);
  count_up(end);
  relabel(end, text, position);
  return end;
}

void SuffixTree::extend(int64_t sequence, const int32_t* tokens, size_t count) {
  const auto [at, fresh] = ids_.try_emplace(sequence, 0);
  if (fresh) {
    if (free_texts_.empty()) {
      at->second = int32_t(texts_.size());
      texts_.emplace_back();
    } else {
      at->second = free_texts_.back();
      free_texts_.pop_back();
    }
  }
  const int32_t id = at->second;
  if (texts_[size_t(id)].tokens.size() + count > size_t(INT32_MAX)) throw std::invalid_argument("a text is too long");
  for (size_t i = 0; i < count; ++i) {
    Text& text = texts_[size_t(id)];
    const int32_t position = int32_t(text.tokens.size());
    text.tokens.push_back(tokens[i]);
    ++num_tokens_;
    if (int(text.points.size()) == max_depth_) text.points.pop_front();
    text.points.push_back(0);
    for (size_t j = 0; j < text.points.size(); ++j) text.points[j] = step(text.points[j], id, position);
  }
}

void SuffixTree::close(int64_t sequence) {
  const auto at = ids_.find(sequence);
  if (at != ids_.end()) texts_[size_t(at->second)].points.clear();
}

void SuffixTree::remove(int64_t sequence) {
  const auto at = ids_.find(sequence);
  if (at == ids_.end()) return;
  const int32_t id = at->second;
  ids_.erase(at);
  ++texts_[size_t(id)].references;  // keeps the text until the end
  const std::vector<int32_t> tokens = texts_[size_t(id)].tokens;
  std::vector<int32_t> path;
  for (size_t start = 0; start < tokens.size(); ++start) {
    path.clear();
    const size_t end = std::min(tokens.size(), start + size_t(max_depth_));
    int32_t node = 0;
    for (size_t i = start; i < end; i += size_t(nodes_[size_t(node)].length)) {
      node = child(node, tokens[i]);
      path.push_back(node);
    }
    for (auto it = path.rbegin(); it != path.rend(); ++it) count_down(*it);
  }
  Text& text = texts_[size_t(id)];
  --text.references;
  text.alive = false;
  text.points.clear();
  release(id);
}

bool SuffixTree::find(const int32_t* tokens, int length, Place& place) const {
  int32_t node = 0, offset = 0;
  for (int i = 0; i < length; ++i) {
    if (offset == nodes_[size_t(node)].length) {
      node = child(node, tokens[i]);
      if (node == kNone) return false;
      offset = 1;
    } else {
      if (token_at(nodes_[size_t(node)], offset) != tokens[i]) return false;
      ++offset;
    }
  }
  place = {node, offset};
  return true;
}

SuffixDraft SuffixTree::expand(Place place, int match, const SuffixRule& rule) const {
  SuffixDraft draft;
  draft.match_length = match;
  const int limit = std::min(rule.max_tokens, int(std::floor(match * rule.factor + rule.offset + 1e-6)));
  float probability = 1;
  while (int(draft.tokens.size()) < limit) {
    if (place.offset == nodes_[size_t(place.node)].length) {
      const int32_t next = nodes_[size_t(place.node)].best;
      if (next == kNone) break;
      probability *= float(nodes_[size_t(next)].count) / float(nodes_[size_t(place.node)].count);
      place = {next, 0};
    }
    if (probability < rule.min_probability) break;
    draft.tokens.push_back(token_at(nodes_[size_t(place.node)], place.offset++));
    draft.probabilities.push_back(probability);
    draft.score += probability;
  }
  return draft;
}

SuffixDraft SuffixTree::draft(const int32_t* context, size_t size, const SuffixRule& rule) const {
  SuffixDraft best;
  const int most = int(std::min(size, size_t(max_depth_))) - 1;
  for (int match = 1; match <= most; ++match) {
    Place place{};
    if (!find(context + size - size_t(match), match, place)) break;
    SuffixDraft draft = expand(place, match, rule);
    if (draft.score >= best.score) best = std::move(draft);
  }
  return best;
}

size_t SuffixTree::bytes() const {
  return (nodes_.size() - free_nodes_.size()) * (sizeof(Node) + 64) + num_tokens_ * sizeof(int32_t);
}

bool SuffixTree::sound() const {
  for (size_t i = 1; i < nodes_.size(); ++i) {
    const Node& n = nodes_[i];
    if (n.parent == int32_t(i)) continue;  // free
    int32_t sum = 0, most = 0;
    for (int32_t other = n.first_child; other != kNone; other = nodes_[size_t(other)].next) {
      sum += nodes_[size_t(other)].count;
      most = std::max(most, nodes_[size_t(other)].count);
    }
    if (n.count < 1 || sum > n.count || n.length < 1) return false;
    if (most > 0 && nodes_[size_t(n.best)].count != most) return false;
  }
  return true;
}

}  // namespace quire
