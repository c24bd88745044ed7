// A text to continue, with its probabilities, and the tokenizer's view of it.

import { $, announce, button, el, perFrame } from "./dom.js";
import { parameters } from "./options.js";
import { showRequest } from "./snippets.js";
import { entriesOfCompletion, tokenize, tokensView } from "./tokens.js";
import { trouble } from "./turns.js";
import { Writing, follow } from "./writing.js";

export class Complete {
  /** `page` has `model` and `settings()`. */
  constructor(page) {
    this.page = page;
    this.input = $("complete-input");
    this.output = $("complete-output");
    this.writing = new Writing($("complete-send"), $("complete-stop"));
    this.whole = "";
    $("complete-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.input.value);
    });
    $("complete-request").addEventListener("click", () => showRequest("v1/completions", this.body(this.input.value)));
    $("complete-tokens").addEventListener("click", () => this.showTokens());
    $("complete-keep").addEventListener("click", () => this.keep());
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.send(this.input.value);
      }
    });
  }

  body(prompt) {
    return { model: this.page.model, prompt, ...parameters(this.page.settings(), false) };
  }

  async send(prompt) {
    if (!prompt || this.writing.busy) return;
    $("complete-note").textContent = "";
    $("complete-keep").hidden = true;
    this.output.hidden = false;
    const written = el("span");
    this.output.replaceChildren(el("span", { className: "given" }, prompt), written);
    let text = "";
    const entries = [];
    const flush = perFrame(() => {
      written.textContent = text;
      this.output.scrollTop = this.output.scrollHeight;
    });
    const { finish, timing, error } = await follow("v1/completions", this.body(prompt), this.writing.begin(), (choice) => {
      text += choice.text ?? "";
      entries.push(...entriesOfCompletion(choice.logprobs));
      flush();
      return Boolean(choice.text);
    });
    flush.now();
    this.writing.done();
    this.whole = prompt + text;
    if (entries.length) written.replaceWith(tokensView(entries, (at, token) => this.send(prompt + entries.slice(0, at).map((e) => e.token).join("") + token)));
    if (error) this.output.append(trouble(error.message, [button("Retry", () => this.send(prompt))]));
    $("complete-note").textContent = timing.line(finish) || (text || error ? "" : "The model ended the text without a word.");
    $("complete-keep").hidden = !text;
    announce(error ? error.message : "The text is complete.");
  }

  async showTokens() {
    this.output.hidden = false;
    try {
      await tokenize(this.input.value, this.output);
    } catch (error) {
      this.output.replaceChildren(trouble(error.message));
    }
  }

  keep() {
    this.input.value = this.whole;
    this.output.hidden = true;
    $("complete-keep").hidden = true;
    $("complete-note").textContent = "";
    this.input.focus();
    this.input.scrollTop = this.input.scrollHeight;
  }
}
