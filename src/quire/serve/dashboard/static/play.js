// The playground: a chat and a text to continue. What the model writes is only ever set as text, never as markup.

import { ServerError, stream } from "./api.js";

const $ = (id) => document.getElementById(id);
const number = new Intl.NumberFormat("en");

/** Sampling parameters from the settings; empty fields are left to the server. */
function parameters() {
  const found = {};
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    const value = $(name).value.trim();
    if (value !== "") found[name] = Number(value);
  }
  return found;
}

/** Counts and times of one answer, as a line to show under it. */
class Timing {
  constructor() {
    this.start = performance.now();
    this.first = 0;
    this.last = 0;
    this.pieces = 0;
    this.usage = null;
  }

  piece() {
    this.last = performance.now();
    this.first ||= this.last;
    this.pieces += 1;
  }

  line(finish) {
    if (!this.first) return "";
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const parts = [`${number.format(tokens)} ${tokens === 1 ? "token" : "tokens"}`, `first after ${milliseconds(this.first - this.start)}`];
    const seconds = (this.last - this.first) / 1000;
    if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(seconds > 0.05 ? 0 : 1)} a second`);
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${number.format(cached)} of ${number.format(this.usage.prompt_tokens)} prompt tokens from cache`);
    if (finish === "length") parts.push("cut at the limit");
    if (finish === "stopped") parts.push("stopped");
    return parts.join(" · ");
  }
}

export function milliseconds(ms) {
  if (ms >= 10000) return `${(ms / 1000).toFixed(0)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms >= 10 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

/** One answer that is being written: the abort switch, and the buttons that show it. */
class Writing {
  constructor(send, stop) {
    this.send = send;
    this.stop = stop;
    this.abort = null;
    stop.addEventListener("click", () => this.end());
  }

  get busy() {
    return this.abort !== null;
  }

  begin() {
    this.abort = new AbortController();
    this.show();
    return this.abort.signal;
  }

  end() {
    this.abort?.abort();
  }

  done() {
    this.abort = null;
    this.show();
  }

  show() {
    const focused = document.activeElement === this.send || document.activeElement === this.stop;
    this.send.hidden = this.busy;
    this.stop.hidden = !this.busy;
    if (focused) (this.busy ? this.stop : this.send).focus();
  }
}

/** Follow a stream: `write(text)` for each piece. Returns why it ended and its timing; throws what goes wrong. */
async function follow(path, body, signal, pick, write) {
  const timing = new Timing();
  let finish = null;
  try {
    for await (const event of stream(path, body, signal)) {
      const choice = event.choices?.[0];
      const text = choice ? pick(choice) : "";
      if (text) {
        timing.piece();
        write(text, choice);
      }
      finish = choice?.finish_reason ?? finish;
      timing.usage = event.usage ?? timing.usage;
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    finish = "stopped";
  }
  return { finish, timing };
}

export function startChat(model, openComplete) {
  const log = $("log");
  const input = $("chat-input");
  const writing = new Writing($("chat-send"), $("chat-stop"));
  let messages = [];

  const atEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  const toEnd = () => (log.scrollTop = log.scrollHeight);
  const fit = () => {
    input.style.height = "auto";
    input.style.height = `${input.scrollHeight}px`;
  };

  function turn(role, text) {
    const box = element("div", "turn");
    box.dataset.role = role;
    const said = element("div", "said", text);
    box.append(said);
    log.append(box);
    return { box, said };
  }

  function trouble(error) {
    const box = element("div", "trouble", error instanceof ServerError ? error.message : `No answer from the server: ${error.message}`);
    if (/chat template/i.test(error.message)) {
      const button = element("button", "quiet", "Open Complete, which needs none");
      button.type = "button";
      button.onclick = openComplete;
      box.append(element("div", ""), button);
    }
    log.append(box);
  }

  async function send(text) {
    $("empty").hidden = true;
    const asked = turn("user", text);
    const { box, said } = turn("assistant", "");
    box.classList.add("busy");
    toEnd();
    const system = $("system").value.trim();
    const start = system ? [{ role: "system", content: system }] : [];
    const body = { model: model(), messages: [...start, ...messages, { role: "user", content: text }], ...parameters() };
    const signal = writing.begin();
    try {
      const thoughts = element("div", "thoughts");
      const pick = (c) => (c.delta?.reasoning_content ?? "") + (c.delta?.content ?? "");
      const { finish, timing } = await follow("v1/chat/completions", body, signal, pick, (piece, { delta }) => {
        const stay = atEnd();
        if (delta.reasoning_content) {
          thoughts.append(delta.reasoning_content);
          box.prepend(thoughts);
        }
        said.append(delta.content ?? "");
        if (stay) toEnd();
      });
      messages.push({ role: "user", content: text }, { role: "assistant", content: said.textContent });
      const line = element("p", "note", timing.line(finish) || "The answer was empty.");
      box.append(line);
      $("announce").textContent = `The answer is done: ${said.textContent}`;
    } catch (error) {
      box.remove();
      asked.box.remove();
      trouble(error);
      if (!input.value) input.value = text;
      fit();
    } finally {
      box.classList.remove("busy");
      writing.done();
      toEnd();
    }
  }

  function submit() {
    const text = input.value.trim();
    if (!text || writing.busy) return;
    for (const old of log.querySelectorAll(".trouble")) old.remove();
    input.value = "";
    fit();
    send(text);
  }

  $("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  input.addEventListener("input", fit);
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  $("ideas").addEventListener("click", (event) => {
    if (event.target.tagName === "BUTTON") {
      input.value = event.target.textContent;
      submit();
      input.focus();
    }
  });
  $("clear").addEventListener("click", () => {
    writing.end();
    messages = [];
    for (const old of log.querySelectorAll(".turn, .trouble")) old.remove();
    $("empty").hidden = false;
    input.focus();
  });
  return writing;
}

export function startComplete(model) {
  const input = $("complete-input");
  const output = $("complete-output");
  const writing = new Writing($("complete-send"), $("complete-stop"));
  let whole = "";

  async function send() {
    const prompt = input.value;
    if (!prompt || writing.busy) return;
    $("complete-note").textContent = "";
    $("complete-keep").hidden = true;
    output.hidden = false;
    output.replaceChildren(element("span", "given", prompt));
    whole = prompt;
    try {
      const body = { model: model(), prompt, ...parameters() };
      const { finish, timing } = await follow("v1/completions", body, writing.begin(), (c) => c.text, (piece) => {
        output.append(piece);
        output.scrollTop = output.scrollHeight;
        whole += piece;
      });
      $("complete-note").textContent = timing.line(finish) || "Nothing was written.";
      $("announce").textContent = "The text is complete.";
      $("complete-keep").hidden = whole === prompt;
    } catch (error) {
      output.replaceChildren(element("div", "trouble", error instanceof ServerError ? error.message : `No answer from the server: ${error.message}`));
    } finally {
      writing.done();
    }
  }

  $("complete-form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("complete-keep").addEventListener("click", () => {
    input.value = whole;
    output.hidden = true;
    $("complete-keep").hidden = true;
    $("complete-note").textContent = "";
    input.focus();
    input.scrollTop = input.scrollHeight;
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      send();
    }
  });
  return writing;
}
