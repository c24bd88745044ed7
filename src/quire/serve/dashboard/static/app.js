// Puts the parts together: tabs, settings, colours, keys of the keyboard, the model's name.

import { askForKey, hasKey, request } from "./api.js";
import { startLive } from "./live.js";
import { startChat, startComplete } from "./play.js";

const $ = (id) => document.getElementById(id);
let model = "";

/* --- colours: as the system, light, dark */

const THEMES = { system: "as the system", light: "light", dark: "dark" };
const dark = window.matchMedia("(prefers-color-scheme: dark)");
let theme = localStorage.getItem("quire-theme") in THEMES ? localStorage.getItem("quire-theme") : "system";

function applyTheme() {
  document.documentElement.dataset.theme = theme;
  const label = `Colours: ${THEMES[theme]}`;
  $("theme").setAttribute("aria-label", label);
  $("theme").title = label;
  document.dispatchEvent(new Event("quire-colours"));
}

dark.addEventListener("change", applyTheme);
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  localStorage.setItem("quire-theme", theme);
  applyTheme();
});
applyTheme();

/* --- tabs, with the arrow keys */

const tabs = [$("tab-chat"), $("tab-complete")];

function choose(tab, focus = true) {
  for (const other of tabs) {
    const on = other === tab;
    other.setAttribute("aria-selected", String(on));
    other.tabIndex = on ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !on;
  }
  $("clear").hidden = tab !== $("tab-chat");
  document.querySelector("label.full").hidden = tab !== $("tab-chat");
  document.querySelector(".skip").href = tab === $("tab-chat") ? "#chat-input" : "#complete-input";
  if (focus) tab.focus();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) choose(tabs[(tabs.indexOf(tab) + step + tabs.length) % tabs.length]);
  });
}

/* --- settings and key */

$("settings-button").addEventListener("click", () => {
  const show = $("settings").hidden;
  $("settings").hidden = !show;
  $("settings-button").setAttribute("aria-expanded", String(show));
});
$("settings").addEventListener("submit", (event) => event.preventDefault());

const showKeyButton = () => ($("key-button").hidden = !hasKey());
document.addEventListener("quire-key", showKeyButton);
$("key-button").addEventListener("click", () => askForKey());
showKeyButton();

/* --- the parts */

const writings = [startChat(() => model, () => choose($("tab-complete"))), startComplete(() => model)];
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("key-dialog").open) for (const writing of writings) writing.end();
});
choose($("tab-chat"), false);
$("chat-input").focus({ preventScroll: true });

async function findModel() {
  try {
    model = (await (await request("v1/models")).json()).data[0].id;
    $("model").textContent = model;
  } catch (error) {
    $("model").textContent = "";
    console.warn(`The list of models cannot be read: ${error.message}`);
  }
}

document.addEventListener("quire-key", () => model || findModel());
findModel().then(startLive);
