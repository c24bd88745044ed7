// The settings of a conversation or a completion: sampling options with the server's defaults, checked at the field,
// and what the model's template knows of reasoning.

import { $, el } from "./dom.js";

const whole = (text) => /^-?\d+$/.test(text);
const range = (low, high, step = "any", open = false) => ({ min: low, max: high, step, check: (v) => v <= high && (open ? v > low : v >= low), says: `from ${open ? "above " : ""}${low} to ${high}` });
const least = (low) => ({ min: low, step: 1, check: (v, text) => whole(text) && v >= low, says: `a whole number from ${low}` });

/** name, label, what it does, how it is checked. Fields of the OpenAI API and vLLM's beside it. */
export const FIELDS = [
  ["max_tokens", "Most tokens", "The answer ends after so many tokens. Empty: up to the model's context.", least(1)],
  ["temperature", "Temperature", "0 always takes the most likely token; higher values vary more.", range(0, 5, 0.1)],
  ["top_p", "Top p", "Sample from the most likely tokens that together have this probability.", range(0, 1, 0.01, true)],
  ["top_k", "Top k", "Sample from so many of the most likely tokens. 0: all.", least(-1)],
  ["min_p", "Min p", "Leave out tokens less likely than this share of the most likely one.", range(0, 1, 0.01)],
  ["seed", "Seed", "The same seed gives the same text.", { step: 1, check: (v, text) => whole(text), says: "a whole number" }],
  ["presence_penalty", "Presence penalty", "Lowers every token that has occurred.", range(-2, 2, 0.1)],
  ["frequency_penalty", "Frequency penalty", "Lowers a token each time it occurs.", range(-2, 2, 0.1)],
  ["repetition_penalty", "Repetition penalty", "Divides the score of tokens in prompt or answer. 1: off.", range(0, 10, 0.05, true)],
  ["min_tokens", "Fewest tokens", "The answer does not end before.", least(0)],
];

/** Draw the fields into `box` from `settings`, and write each valid change back. `changed()` follows a change. */
export function showOptions(box, settings, about, changed) {
  box.replaceChildren();
  const put = (name, value) => {
    if (value === "" || value === false) delete settings[name];
    else settings[name] = value;
    changed();
  };
  for (const [name, label, help, rule] of FIELDS) {
    const note = el("small", { id: `${name}-note` }, help);
    const input = el("input", {
      id: name, type: "number", inputMode: rule.step === 1 ? "numeric" : "decimal", step: rule.step, value: settings[name] ?? "",
      placeholder: defaultOf(name, about), "aria-describedby": note.id, ...(rule.min !== undefined && { min: rule.min }), ...(rule.max !== undefined && { max: rule.max }),
    });
    input.addEventListener("input", () => {
      const text = input.value.trim();
      const good = text === "" ? !input.validity.badInput : rule.check(Number(text), text);
      input.setAttribute("aria-invalid", String(!good));
      note.textContent = good ? help : `${label} must be ${rule.says}.`;
      if (good) put(name, text);
    });
    box.append(el("label", {}, label, input, note));
  }
  const stop = el("textarea", { id: "stop", rows: 2, value: settings.stop ?? "", placeholder: "none" });
  stop.addEventListener("input", () => put("stop", stop.value));
  box.append(el("label", {}, "Stop at", stop, el("small", {}, "One text per line.")));
  const checks = el("div", { className: "checks" });
  const check = (name, text, on, off = false) => {
    const input = el("input", { type: "checkbox", id: name, checked: settings[name] ?? off });
    input.addEventListener("change", () => on(input.checked));
    checks.append(el("label", {}, input, text));
  };
  check("logprobs", "Keep token probabilities", (value) => put("logprobs", value));
  if (about.thinking) check("thinking", "Let the model think first", (value) => put("thinking", value ? "on" : "off"), true);
  if (about.thinking) checks.querySelector("#thinking").checked = settings.thinking !== "off";
  check("drop_oldest", "Leave out the oldest turns when the context is full", (value) => put("drop_oldest", value));
  box.append(checks);
  if (about.efforts?.length) {
    const select = el("select", { id: "effort" }, ["", ...about.efforts].map((value) => el("option", { value, selected: value === (settings.effort ?? "") }, value || "as the model does")));
    select.addEventListener("change", () => put("effort", select.value));
    box.append(el("label", {}, "Reasoning effort", select));
  }
}

function defaultOf(name, about) {
  if (name === "max_tokens") return about.max_model_len ? `up to ${about.max_model_len}` : "no limit";
  if (name === "seed") return "random";
  return String(about.defaults?.[name] ?? "default");
}

/** Request fields from settings; a chat's reasoning switches too. */
export function parameters(settings, chat) {
  const found = {};
  for (const [name] of FIELDS) {
    if (settings[name] !== undefined && settings[name] !== "") found[name] = Number(settings[name]);
  }
  const stops = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  if (stops.length) found.stop = stops;
  if (settings.logprobs) Object.assign(found, chat ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  if (chat && settings.thinking === "off") found.enable_thinking = false;
  if (chat && settings.effort) found.reasoning_effort = settings.effort;
  return found;
}

/** Whether every field of the form holds what it may. */
export const optionsAreValid = () => !document.querySelector('#options [aria-invalid="true"]') && $("format-state").dataset.state !== "bad" && $("tools-state").dataset.state !== "bad";
