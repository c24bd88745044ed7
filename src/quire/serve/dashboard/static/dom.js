// Elements and number formats that all parts of the page share. Text from outside only ever becomes textContent.

export const $ = (id) => document.getElementById(id);

/** Make an element. `props` are properties, or attributes if the name has a dash or starts with "data"/"role". */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, handler] of Object.entries(value)) made.addEventListener(event, handler);
    else if (name === "data") Object.assign(made.dataset, value);
    else if (name in made && !name.includes("-")) made[name] = value;
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** A button that is not a submit button. */
export function button(text, onclick, props = {}) {
  return el("button", { type: "button", className: "quiet", ...props, on: { click: onclick } }, text);
}

export const number = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const short = (value) => (Math.abs(value) < 10000 ? number.format(Math.round(value)) : compact.format(value));

export function milliseconds(ms) {
  if (ms >= 10000) return `${(ms / 1000).toFixed(0)} s`;
  if (ms >= 1000) return `${(ms / 1000).toFixed(1)} s`;
  return `${ms >= 10 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let value = count;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export const percent = (share) => `${share >= 0.1 || share === 0 ? Math.round(share * 100) : (share * 100).toFixed(1)}%`;

export const plural = (count, word) => `${number.format(count)} ${count === 1 ? word : `${word}s`}`;

/** Copy text and confirm it on the button for a moment. */
export async function copy(text, source) {
  const before = source.textContent;
  try {
    await navigator.clipboard.writeText(text);
    source.textContent = "Copied";
  } catch {
    source.textContent = "Press Ctrl+C";
    const area = el("textarea", { value: text, className: "unseen", readOnly: true });
    document.body.append(area);
    area.select();
    if (document.execCommand("copy")) source.textContent = "Copied";
    area.remove();
  }
  setTimeout(() => (source.textContent = before), 1200);
}

/** Offer `text` as a file. */
export function download(name, text, type = "text/plain") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/** Say something to screen readers. */
export const announce = (text) => ($("announce").textContent = text);

/** Run `job` at most once per frame, with the latest arguments. */
export function perFrame(job) {
  let waiting = null;
  let latest = [];
  const run = () => {
    waiting = null;
    job(...latest);
  };
  const later = (...given) => {
    latest = given;
    waiting ??= requestAnimationFrame(run);
  };
  later.now = () => {
    if (waiting === null) return;
    cancelAnimationFrame(waiting);
    run();
  };
  return later;
}
