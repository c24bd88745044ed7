// Token probabilities: each token shaded by how likely it was, its best candidates on demand, and another one to go on
// with. And the tokenizer's view of any text.

import { post } from "./api.js";
import { button, el, number } from "./dom.js";

const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥"));

/** OpenAI's logprob entries as [{token, probability, top: [{token, probability}]}]. */
export function entriesOf(logprobs) {
  return (logprobs?.content ?? []).map((entry) => ({
    token: entry.token,
    probability: Math.exp(entry.logprob),
    top: entry.top_logprobs.map((other) => ({ token: other.token, probability: Math.exp(other.logprob) })),
  }));
}

/** The same from the four lists of a completion. */
export function entriesOfCompletion(logprobs) {
  return (logprobs?.tokens ?? []).map((token, i) => ({
    token,
    probability: Math.exp(logprobs.token_logprobs[i]),
    top: Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([other, value]) => ({ token: other, probability: Math.exp(value) })).sort((a, b) => b.probability - a.probability),
  }));
}

/** Shaded tokens; `branch(at, token)` goes on with another candidate in the place of token `at`. */
export function tokensView(entries, branch) {
  const detail = el("div", { className: "candidates", hidden: true, "aria-live": "polite" });
  const line = el("div", { className: "tokens" });
  const show = (at) => {
    const entry = entries[at];
    const rows = entry.top.slice(0, 5).map((other) => {
      const bar = el("meter", { min: 0, max: 1, value: other.probability, "aria-hidden": "true" });
      const name = el("code", {}, visible(other.token));
      const share = el("span", { className: "dim" }, `${(other.probability * 100).toFixed(other.probability > 0.1 ? 0 : 2)}%`);
      const go = other.token === entry.token ? el("span", { className: "dim" }, "chosen") : button("Continue with this", () => branch(at, other.token));
      return el("li", {}, name, bar, share, go);
    });
    detail.replaceChildren(el("p", { className: "dim" }, `Token ${number.format(at + 1)}: ${(entry.probability * 100).toFixed(1)}%`), el("ul", {}, rows));
    detail.hidden = false;
  };
  entries.forEach((entry, at) => {
    const shade = entry.probability > 0.9 ? 0 : entry.probability > 0.5 ? 1 : entry.probability > 0.2 ? 2 : entry.probability > 0.05 ? 3 : 4;
    const piece = button(visible(entry.token), () => show(at), { className: `token shade${shade}`, title: `${(entry.probability * 100).toFixed(1)}%` });
    line.append(piece);
  });
  return el("div", {}, line, detail);
}

/** The tokens of a text as the model sees them, drawn into `box`. */
export async function tokenize(text, box) {
  const found = await post("tokenize", { prompt: text, return_token_strs: true });
  const pieces = found.tokens.map((id, i) => el("span", { className: `piece shade${i % 2}`, title: `id ${id}` }, visible(found.token_strs?.[i] ?? String(id))));
  box.replaceChildren(el("p", { className: "dim" }, `${number.format(found.count)} tokens, ${number.format(text.length)} characters`), el("div", { className: "tokens" }, pieces));
}
