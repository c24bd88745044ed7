// One turn of a conversation as elements: text or Markdown, reasoning, tool calls, and what one can do with it.

import { button, copy, el } from "./dom.js";
import { Growing } from "./markdown.js";
import { tokensView } from "./tokens.js";

const LABELS = { user: "You", assistant: "Answer", tool: "Tool result", system: "System message" };

/** The elements of one node. `actions` are the chat's verbs; `state` says how to draw: {raw, tokens, place, count}. */
export function turnOf(node, actions, state) {
  const { message } = node;
  const box = el("article", { className: "turn", data: { role: message.role, id: node.id }, "aria-label": LABELS[message.role] ?? message.role });
  const parts = new Parts(box, message, state.raw);
  box.append(...parts.boxes(message));
  parts.show(message);
  if (state.tokens && message.logprobs?.length) parts.said.replaceChildren(tokensView(message.logprobs, (at, token) => actions.branch(node, at, token)));
  if (message.calls_open) box.append(answersForm(node, actions));
  const again = message.full ? button("Leave out the oldest turns", () => actions.shrink(node)) : button("Retry", () => actions.regenerate(node));
  if (message.error) box.append(trouble(message.error, [again]));
  if (message.left_out) box.append(el("p", { className: "note" }, "The context is full: this is no longer sent to the model."));
  if (message.note) box.append(el("p", { className: "note" }, message.note));
  box.append(toolbar(node, actions, state));
  return box;
}

/** The parts of a turn that grow while it is written. */
export class Parts {
  constructor(box, message, raw) {
    this.box = box;
    this.summary = el("summary", {}, "Reasoning");
    this.thoughtText = el("div", { className: "thoughts", dir: "auto" });
    this.thoughts = el("details", { className: "reasoning", hidden: true }, this.summary, this.thoughtText);
    this.said = el("div", { className: "said", dir: "auto" });
    this.calls = el("div", { className: "calls" });
    this.plain = raw || message.role !== "assistant";
    this.growing = this.plain ? null : new Growing(this.said);
    this.shownThoughts = 0;
  }

  boxes(message) {
    return message.role === "assistant" ? [this.thoughts, this.said, this.calls] : [this.said];
  }

  show(message) {
    const thoughts = message.reasoning ?? "";
    this.thoughts.hidden = !thoughts;
    if (thoughts.length > this.shownThoughts) {
      this.thoughtText.append(thoughts.slice(this.shownThoughts));
      this.shownThoughts = thoughts.length;
      this.summary.textContent = message.content ? "Reasoning" : "Reasoning…";
    } else if (thoughts && message.content) this.summary.textContent = "Reasoning";
    this.box.classList.toggle("raw", this.plain);
    if (this.plain) this.said.textContent = message.content;
    else this.growing.update(message.content);
    if (message.tool_calls?.length) this.calls.replaceChildren(...message.tool_calls.map(callCard));
  }
}

function callCard(call) {
  let shown = call.function.arguments;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    // A call that was cut off: show the arguments as far as they came.
  }
  return el("figure", { className: "call" }, el("figcaption", {}, "Calls ", el("code", {}, call.function.name)), el("pre", { tabIndex: 0 }, shown));
}

/** A form that answers the tool calls of a message in the function's place. */
function answersForm(node, actions) {
  const inputs = node.message.tool_calls.map((call) => el("textarea", { rows: 2, placeholder: "Result", "aria-label": `Result of ${call.function.name}` }));
  const form = el("form", { className: "answers" }, node.message.tool_calls.map((call, i) => el("label", {}, `${call.function.name} returns`, inputs[i])), el("button", { className: "primary", type: "submit" }, "Send results"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    actions.answer(node, inputs.map((input) => input.value));
  });
  return form;
}

export function trouble(text, buttons = []) {
  return el("div", { className: "trouble", role: "alert" }, el("p", {}, text), el("div", { className: "row" }, buttons));
}

function toolbar(node, actions, state) {
  const { message } = node;
  const made = el("div", { className: "verbs", role: "group", "aria-label": "What to do with this turn" });
  if (state.count > 1) {
    const step = (by, label, text) => button(text, () => actions.step(node, by), { "aria-label": label, disabled: by < 0 ? state.place === 0 : state.place === state.count - 1 });
    made.append(step(-1, "Previous version", "‹"), el("span", { className: "dim" }, `${state.place + 1}/${state.count}`), step(1, "Next version", "›"));
  }
  made.append(button("Copy", (event) => copy(message.content, event.target)));
  if (message.role === "assistant") {
    made.append(button("Regenerate", () => actions.regenerate(node)));
    if (message.content && !message.tool_calls?.length) made.append(button("Continue", () => actions.extend(node)));
    if (message.logprobs?.length) made.append(button("Tokens", () => actions.toggle(node, "tokens"), { "aria-pressed": String(Boolean(state.tokens)) }));
    if (message.content) made.append(button("Raw", () => actions.toggle(node, "raw"), { "aria-pressed": String(Boolean(state.raw)) }));
  }
  if (message.role !== "tool") made.append(button("Edit", () => edit(node, actions)));
  made.append(button("Delete", () => actions.remove(node)));
  return made;
}

/** Replace the turn by an editor; saving a question asks it again, saving an answer keeps it as another version. */
function edit(node, actions) {
  const box = document.querySelector(`.turn[data-id="${node.id}"]`);
  const input = el("textarea", { value: node.message.content, rows: Math.min(12, node.message.content.split("\n").length + 1), "aria-label": "Edit this turn" });
  const verb = node.message.role === "user" ? "Send" : "Save";
  const form = el("form", { className: "edit" }, input, el("div", { className: "row" }, el("button", { className: "primary", type: "submit" }, verb), button("Cancel", () => actions.redraw())));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    actions.edit(node, input.value);
  });
  box.replaceChildren(form);
  input.focus();
}
