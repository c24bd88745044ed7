// Puts the parts together: views, colours, keyboard, the key, what the server says of its model.

import { askForKey, request, usesKey } from "./api.js";
import { Chat } from "./chat.js";
import { startCompare } from "./compare.js";
import { Complete } from "./complete.js";
import { $, bytes, el, number, short } from "./dom.js";
import { startLive } from "./live.js";
import { remember, setting } from "./store.js";
import { startVectors } from "./vectors.js";

/** What the parts know of each other. */
const page = {
  about: {},
  models: [],
  get model() {
    return $("model").value;
  },
  settings: () => chat.chat.settings,
  openComplete: () => choose("complete"),
};

/* --- colours: as the system, light, dark */

const THEMES = { system: "as the system", light: "light", dark: "dark" };
let theme = setting("theme", "system") in THEMES ? setting("theme", "system") : "system";

function applyTheme() {
  document.documentElement.dataset.theme = theme;
  const label = `Colours: ${THEMES[theme]}`;
  $("theme").setAttribute("aria-label", label);
  $("theme").title = label;
  document.dispatchEvent(new Event("quire-colours"));
}

window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  remember("theme", theme);
  applyTheme();
});
applyTheme();

/* --- views: tabs, with the arrow keys. On wide screens the engine stays beside the others */

const VIEWS = ["chat", "complete", "compare", "vectors", "engine"];
const FOCUS = { chat: "chat-input", complete: "complete-input", compare: "compare-input", vectors: "vectors-texts", engine: "live" };

function choose(view, focus = false) {
  document.body.dataset.view = view;
  for (const name of VIEWS) {
    const tab = $(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    if (name !== "engine") $(`panel-${name}`).hidden = name !== view;
  }
  document.querySelector(".skip").href = `#${FOCUS[view]}`;
  for (const id of ["clear", "chats-button"]) $(id).hidden = view !== "chat";
  $("settings-button").hidden = view === "vectors" || view === "engine";
  if ($("settings-button").hidden) $("settings").hidden = true;
  for (const part of document.querySelectorAll("#settings .chat-only")) part.hidden = view !== "chat";
  if (focus) $(`tab-${view}`).focus();
}

const offered = () => VIEWS.filter((name) => !$(`tab-${name}`).hidden);
for (const name of VIEWS) {
  $(`tab-${name}`).addEventListener("click", () => choose(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const names = offered();
    if (step) choose(names[(names.indexOf(name) + step + names.length) % names.length], true);
  });
}

/* --- panels and dialogs */

function panel(buttonId, id) {
  $(buttonId).addEventListener("click", () => {
    const show = $(id).hidden;
    $(id).hidden = !show;
    $(buttonId).setAttribute("aria-expanded", String(show));
  });
}
panel("settings-button", "settings");
panel("chats-button", "library");
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("request-close").addEventListener("click", () => $("request-dialog").close());

const showKeyButton = () => ($("key-button").hidden = !usesKey());
for (const name of ["quire-key", "quire-no-key"]) document.addEventListener(name, showKeyButton);
$("key-button").addEventListener("click", () => askForKey());
showKeyButton();

/* --- the parts */

const chat = new Chat(page);
const complete = new Complete(page);
let compare = null;
chat.showSettings();
chat.redraw();
chat.library.draw();
choose("chat");
$("chat-input").focus({ preventScroll: true });

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  for (const writing of [chat.writing, complete.writing, compare?.writing]) writing?.end();
});

/* --- the model */

function describe(about) {
  const facts = [];
  if (about.parameters) facts.push(`${short(about.parameters)} parameters`);
  if (about.max_model_len) facts.push(`${number.format(about.max_model_len)} tokens of context`);
  if (about.weight_bytes) facts.push(`${bytes(about.weight_bytes)} of weights`);
  $("model-facts").textContent = facts.join(" · ");
}

async function findModel() {
  try {
    const [about, models] = await Promise.all(["dashboard/about", "v1/models"].map(async (path) => (await request(path)).json()));
    page.about = about;
    page.models = models.data.map((entry) => entry.id);
  } catch (error) {
    $("model-facts").textContent = error.message;
    return;
  }
  const { about } = page;
  $("model").replaceChildren(...page.models.map((name) => el("option", { value: name }, name)));
  $("model").hidden = false;
  describe(about);
  $("version").textContent = about.version ? `Quire ${about.version}` : "";
  $("advice").textContent = about.advice ?? "";
  $("hello").textContent = about.greeting ?? "What shall we write?";
  if (about.ideas?.length) $("ideas").replaceChildren(...about.ideas.map((text) => el("li", {}, el("button", { type: "button" }, text))));
  const generates = about.generates !== false;
  for (const name of ["chat", "complete"]) $(`tab-${name}`).hidden = !generates;
  $("tab-compare").hidden = !generates;
  $("tab-vectors").hidden = generates;
  chat.showSettings();
  if (generates) compare = startCompare(page);
  else {
    startVectors(page);
    choose("vectors");
  }
  if (generates && about.chat === false) choose("complete");
}

document.addEventListener("quire-key", () => page.models.length || findModel());
findModel();
startLive();
