// One message, two models or settings, side by side.

import { $, button, el, perFrame } from "./dom.js";
import { Growing } from "./markdown.js";
import { parameters } from "./options.js";
import { trouble } from "./turns.js";
import { Writing, follow } from "./writing.js";

class Side {
  constructor(box, models, temperature) {
    this.model = el("select", { "aria-label": "Model" }, models.map((name) => el("option", { value: name }, name)));
    this.temperature = el("input", { type: "number", min: 0, max: 5, step: 0.1, value: temperature, placeholder: "default", "aria-label": "Temperature" });
    this.system = el("textarea", { rows: 2, placeholder: "System message", "aria-label": "System message" });
    this.said = el("div", { className: "said", dir: "auto" });
    this.note = el("p", { className: "note" });
    box.replaceChildren(el("div", { className: "row" }, this.model, el("label", {}, "Temperature ", this.temperature)), this.system, this.said, this.note);
  }

  async answer(text, settings, signal) {
    const system = this.system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: text }];
    const temperature = this.temperature.value === "" ? {} : { temperature: Number(this.temperature.value) };
    const body = { model: this.model.value, messages, ...parameters(settings, true), ...temperature };
    this.said.replaceChildren();
    this.note.textContent = "";
    const growing = new Growing(this.said);
    let whole = "";
    const flush = perFrame(() => growing.update(whole));
    const { finish, timing, error } = await follow("v1/chat/completions", body, signal, (choice) => {
      whole += choice.delta?.content ?? "";
      flush();
      return Boolean(choice.delta?.content);
    });
    flush.now();
    if (error) this.said.append(trouble(error.message));
    this.note.textContent = timing.line(finish);
  }
}

/** `page` has `models` and `settings()`. */
export function startCompare(page) {
  const writing = new Writing($("compare-send"), $("compare-stop"));
  const sides = [new Side($("compare-left"), page.models, ""), new Side($("compare-right"), page.models, "0")];
  if (page.models.length > 1) sides[1].model.value = page.models[1];
  $("compare-form").onsubmit = async (event) => {
    event.preventDefault();
    const text = $("compare-input").value.trim();
    if (!text || writing.busy) return;
    const signal = writing.begin();
    await Promise.all(sides.map((side) => side.answer(text, page.settings(), signal)));
    writing.done();
  };
  return { writing, button };
}
