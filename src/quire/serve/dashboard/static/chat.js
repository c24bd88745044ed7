// The chat: a tree of messages, of which one path is shown, and the answer that is being written at its end.

import { ServerError } from "./api.js";
import { $, announce, el, number, perFrame } from "./dom.js";
import { Library } from "./library.js";
import { parameters, optionsAreValid, showOptions } from "./options.js";
import { showRequest } from "./snippets.js";
import { remember, save, setting } from "./store.js";
import { showStructure, structure } from "./structure.js";
import { entriesOf } from "./tokens.js";
import * as tree from "./tree.js";
import { Parts, turnOf } from "./turns.js";
import { Writing, follow } from "./writing.js";

const LARGEST_FILE = 1 << 20;

export class Chat {
  /** `page` has `about`, `model` and `openComplete()`. */
  constructor(page) {
    this.page = page;
    this.log = $("log");
    this.input = $("chat-input");
    this.writing = new Writing($("chat-send"), $("chat-stop"));
    this.library = new Library((chat) => this.open(chat), () => this.chat);
    this.drawn = new Map(); // node id -> {raw, tokens}
    this.context = 0; // tokens of the conversation, as the last answer's usage counts them
    this.following = true;
    this.chat = tree.conversation(setting("settings", {}));
    this.actions = {
      shrink: (node) => (tree.remove(this.chat, node.id), this.answer(node.parent, null, true)),
      regenerate: (node) => this.answer(node.parent),
      extend: (node) => this.extend(node),
      branch: (node, at, token) => this.branch(node, at, token),
      answer: (node, results) => this.answerCalls(node, results),
      edit: (node, text) => this.edit(node, text),
      remove: (node) => this.remove(node),
      step: (node, by) => (tree.choose(this.chat, node.id, by), this.changed()),
      toggle: (node, name) => this.toggle(node, name),
      redraw: () => this.redraw(),
    };
    this.listen();
  }

  listen() {
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.input.addEventListener("input", () => this.fit());
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    $("ideas").addEventListener("click", (event) => {
      if (event.target.tagName !== "BUTTON") return;
      this.input.value = event.target.textContent;
      this.submit();
    });
    $("clear").addEventListener("click", () => this.open(null));
    $("chat-request").addEventListener("click", () => showRequest("v1/chat/completions", this.body(null, this.input.value.trim())));
    this.log.addEventListener("scroll", () => (this.following = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 80));
    $("system").addEventListener("input", () => {
      this.chat.settings.system = $("system").value;
      this.settingsChanged();
    });
    for (const name of ["dragover", "drop"]) $("panel-chat").addEventListener(name, (event) => event.preventDefault());
    $("panel-chat").addEventListener("drop", (event) => this.attach(event.dataTransfer.files));
    $("attach").addEventListener("click", () => $("attach-file").click());
    $("attach-file").addEventListener("change", (event) => this.attach(event.target.files).then(() => (event.target.value = "")));
  }

  /** Show `chat`, or a new one. An answer that is being written ends first: it belongs to the old conversation. */
  open(chat) {
    this.writing.end();
    this.running = null;
    this.chat = chat ?? tree.conversation(structuredClone(this.chat.settings));
    this.drawn.clear();
    this.context = 0;
    this.showSettings();
    this.redraw();
    this.library.draw();
    this.input.focus();
  }

  showSettings() {
    const { settings } = this.chat;
    $("system").value = settings.system ?? "";
    const changed = () => this.settingsChanged();
    showOptions($("options"), settings, this.page.about, changed);
    showStructure(settings, changed);
  }

  settingsChanged() {
    remember("settings", this.chat.settings);
    if (tree.leaf(this.chat).id !== tree.ROOT) this.library.keep(this.chat);
  }

  fit() {
    this.input.style.height = "auto";
    this.input.style.height = `${this.input.scrollHeight}px`;
  }

  toEnd() {
    this.log.scrollTop = this.log.scrollHeight;
  }

  // --- drawing

  redraw() {
    const shown = tree.path(this.chat);
    for (const old of this.log.querySelectorAll(".turn, .trouble")) old.remove();
    this.log.append(...shown.map((node) => this.turn(node)));
    $("empty").hidden = shown.length > 0;
    this.showMeter();
    if (this.following) this.toEnd();
  }

  turn(node) {
    const all = tree.siblings(this.chat, node.id);
    return turnOf(node, this.actions, { ...this.drawn.get(node.id), place: all.indexOf(node.id), count: all.length });
  }

  replace(node) {
    this.log.querySelector(`.turn[data-id="${node.id}"]`)?.replaceWith(this.turn(node));
  }

  toggle(node, name) {
    const state = this.drawn.get(node.id) ?? {};
    this.drawn.set(node.id, { ...state, [name]: !state[name] });
    this.replace(node);
  }

  showMeter() {
    const longest = this.page.about.max_model_len;
    const meter = $("context");
    meter.hidden = !longest || !this.context;
    if (meter.hidden) return;
    meter.firstElementChild.value = this.context / longest;
    meter.lastElementChild.textContent = `${number.format(this.context)} of ${number.format(longest)} tokens of context`;
  }

  changed() {
    this.redraw();
    return this.library.keep(this.chat);
  }

  // --- verbs

  submit() {
    const text = this.input.value.trim();
    if (!text || this.writing.busy) return;
    if (!optionsAreValid()) {
      announce("A setting is not valid.");
      $("settings").hidden = false;
      document.querySelector('#settings [aria-invalid="true"], #settings textarea')?.focus();
      return;
    }
    this.input.value = "";
    this.fit();
    this.following = true;
    const asked = tree.add(this.chat, tree.leaf(this.chat).id, { role: "user", content: text });
    this.answer(asked.id);
  }

  edit(node, text) {
    if (node.message.role !== "user") {
      const { error, full, left_out, note, logprobs, ...message } = node.message;
      tree.add(this.chat, node.parent, { ...message, content: text });
      return this.changed();
    }
    const asked = tree.add(this.chat, node.parent, { role: "user", content: text });
    return this.answer(asked.id);
  }

  remove(node) {
    if (this.writing.busy) this.writing.end();
    const undo = tree.remove(this.chat, node.id);
    this.changed();
    const note = $("chat-undo");
    const back = el("button", { type: "button", className: "quiet" }, "Undo");
    back.addEventListener("click", () => {
      undo();
      note.replaceChildren();
      this.changed();
    });
    note.replaceChildren("Turn deleted. ", back);
  }

  answerCalls(node, results) {
    node.message.calls_open = false;
    let parent = node.id;
    node.message.tool_calls.forEach((call, i) => {
      parent = tree.add(this.chat, parent, { role: "tool", content: results[i], tool_call_id: call.id }).id;
    });
    return this.answer(parent);
  }

  /** Continue an answer where it ends: as another version, so that the old one stays. */
  extend(node) {
    return this.answer(node.parent, { content: node.message.content, reasoning: node.message.reasoning });
  }

  /** Another version of an answer that takes candidate `token` in the place of token `at` and goes on. */
  branch(node, at, token) {
    const before = node.message.logprobs.slice(0, at).map((entry) => entry.token).join("");
    return this.answer(node.parent, { content: before + token });
  }

  /** The request for an answer below `parent`; `start` is text that the answer begins with. */
  body(parent, extra = "", start = null) {
    const { settings } = this.chat;
    const system = settings.system?.trim() ? [{ role: "system", content: settings.system.trim() }] : [];
    const messages = [...system, ...tree.messages(this.chat, parent)];
    if (extra) messages.push({ role: "user", content: extra });
    const begun = start?.content ? { add_generation_prompt: false, continue_final_message: true } : {};
    if (start?.content) messages.push({ role: "assistant", content: start.content });
    return { model: this.page.model, messages, ...begun, ...parameters(settings, true), ...structure(settings) };
  }

  /** Write an answer below node `parent`. Its events reach its own conversation, whatever is shown by then. */
  async answer(parent, start = null, shrinks = this.chat.settings.drop_oldest) {
    if (this.writing.busy) return;
    const chat = this.chat;
    const body = this.body(parent, "", start);
    const node = tree.add(chat, parent, { role: "assistant", content: start?.content ?? "", reasoning: start?.reasoning ?? "" });
    const { message } = node;
    this.redraw();
    const box = this.log.querySelector(`.turn[data-id="${node.id}"]`);
    const parts = new Parts(box, message, false);
    box.replaceChildren(...parts.boxes(message));
    box.classList.add("busy");
    const flush = perFrame(() => {
      if (chat !== this.chat) return;
      parts.show(message);
      if (this.following) this.toEnd();
    });
    flush();
    const writing = this.writing.begin();
    const { finish, timing, error } = await follow("v1/chat/completions", body, writing, (choice) => {
      const brought = take(message, choice);
      flush();
      return brought;
    });
    flush.now();
    const full = error?.code === "context_length_exceeded";
    if (full && shrinks && chat === this.chat && tree.leaveOut(chat, parent)) {
      this.writing.done();
      return this.actions.shrink(node);
    }
    message.full = full && tree.leaveOut(chat, parent, false);
    finishMessage(message, finish, timing, error);
    if (chat === this.chat) {
      box.classList.remove("busy");
      this.writing.done();
      const usage = timing.usage;
      if (usage) this.context = usage.prompt_tokens + usage.completion_tokens;
      this.redraw();
      if (error instanceof ServerError && /chat template/i.test(error.message)) this.offerComplete();
      announce(error ? `The answer broke off: ${error.message}` : `The answer is complete: ${message.content}`);
      this.library.keep(chat);
    } else {
      this.writing.done();
      if (!$("unsaved").checked) save(chat).then(() => this.library.draw());
    }
  }

  offerComplete() {
    const open = el("button", { type: "button", className: "quiet" }, "Open Complete, which needs no template");
    open.addEventListener("click", () => this.page.openComplete());
    this.log.querySelector(".turn:last-of-type .trouble .row")?.append(open);
  }

  /** Put text files into the message. */
  async attach(files) {
    for (const file of files) {
      const text = file.size <= LARGEST_FILE ? await file.text() : null;
      const fit = text !== null && !text.includes("\0") && !text.includes("�");
      if (fit) this.input.value += `${this.input.value ? "\n\n" : ""}${file.name}:\n\`\`\`\n${text}\n\`\`\`\n`;
      $("chat-undo").textContent = fit ? "" : `${file.name} is not a text file of at most 1 MB.`;
    }
    this.fit();
    this.input.focus();
  }
}

/** Take one choice of a stream into the message; returns whether it brought anything to read. */
function take(message, choice) {
  const delta = choice.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  message.reasoning += thought;
  message.content += delta.content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id = piece.id ?? call.id;
    call.function.name = piece.function?.name ?? call.function.name;
    call.function.arguments += piece.function?.arguments ?? "";
  }
  const entries = entriesOf(choice.logprobs);
  if (entries.length) (message.logprobs ??= []).push(...entries);
  return Boolean(thought || delta.content || delta.tool_calls?.length);
}

function finishMessage(message, finish, timing, error) {
  if (error) {
    message.error = message.content || message.reasoning ? `The answer broke off. ${error.message}` : error.message;
  }
  if (message.tool_calls?.length && !error) message.calls_open = true;
  const empty = !message.content && !message.reasoning && !message.tool_calls?.length;
  message.note = timing.line(finish) || (empty && !error ? "The model ended its answer without a word." : "");
}
