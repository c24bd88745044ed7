// The list of saved conversations: search, rename, delete with undo, export and import.

import { $, button, download, el } from "./dom.js";
import { all, drop, load, remember, save, setting } from "./store.js";
import { asJson, asMarkdown, fromJson, titleOf } from "./tree.js";

const DAY = 86400000;

function when(time) {
  const age = Date.now() - time;
  if (age < DAY && new Date(time).getDate() === new Date().getDate()) return new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit" }).format(time);
  return new Intl.DateTimeFormat("en", age < 300 * DAY ? { day: "numeric", month: "short" } : { dateStyle: "medium" }).format(time);
}

export class Library {
  /** `open(chat)` shows a conversation; `current()` is the one that is shown. */
  constructor(open, current) {
    this.open = open;
    this.current = current;
    this.undo = null;
    $("chat-search").addEventListener("input", () => this.draw());
    $("chat-import").addEventListener("change", (event) => this.import(event.target));
    $("chat-import-button").addEventListener("click", () => $("chat-import").click());
    const unsaved = $("unsaved");
    unsaved.checked = setting("unsaved", false);
    unsaved.addEventListener("change", () => remember("unsaved", unsaved.checked));
  }

  /** Save `chat` unless the reader said not to. */
  async keep(chat) {
    if ($("unsaved").checked || Object.keys(chat.nodes).length < 2) return;
    await save(chat);
    await this.draw();
  }

  async draw() {
    const wanted = $("chat-search").value.trim().toLowerCase();
    const chats = (await all()).filter((chat) => !wanted || this.matches(chat, wanted));
    const now = this.current()?.id;
    $("chat-list").replaceChildren(...chats.map((chat) => this.row(chat, chat.id === now)));
    $("chat-none").hidden = chats.length > 0;
    $("chat-none").textContent = wanted ? "No conversation has that text." : "Conversations are kept in this browser only.";
  }

  matches(chat, wanted) {
    return titleOf(chat).toLowerCase().includes(wanted) || Object.values(chat.nodes).some((n) => n.message?.content?.toLowerCase().includes(wanted));
  }

  row(chat, here) {
    const name = button(titleOf(chat), async () => this.open((await load(chat.id)) ?? chat), { className: "chat-name", "aria-current": here ? "true" : null, dir: "auto" });
    const menu = el("details", { className: "menu" }, el("summary", { "aria-label": `More about ${titleOf(chat)}` }, "⋯"), el("div", {}, [
      button("Rename", () => this.rename(chat)),
      button("Export as Markdown", () => download(`${titleOf(chat)}.md`, asMarkdown(chat), "text/markdown")),
      button("Export as JSON", () => download(`${titleOf(chat)}.json`, asJson(chat), "application/json")),
      button("Delete", () => this.remove(chat)),
    ]));
    return el("li", { data: { id: chat.id } }, name, el("span", { className: "dim" }, when(chat.updated)), menu);
  }

  rename(chat) {
    const row = $("chat-list").querySelector(`[data-id="${chat.id}"]`);
    const input = el("input", { value: titleOf(chat), maxLength: 200, "aria-label": "Title" });
    const done = async () => {
      chat.title = input.value.trim();
      const shown = this.current();
      if (shown?.id === chat.id) shown.title = chat.title;
      await save(chat);
      await this.draw();
    };
    const form = el("form", {}, input);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      done();
    });
    input.addEventListener("keydown", (event) => event.key === "Escape" && this.draw());
    row.replaceChildren(form);
    input.focus();
    input.select();
  }

  async remove(chat) {
    await drop(chat.id);
    if (this.current()?.id === chat.id) this.open(null);
    await this.draw();
    const note = $("chat-undo");
    note.replaceChildren(`Deleted “${titleOf(chat)}”. `, button("Undo", async () => {
      note.replaceChildren();
      await save(chat);
      await this.draw();
    }));
    clearTimeout(this.undo);
    this.undo = setTimeout(() => note.replaceChildren(), 10000);
  }

  async import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      const chat = fromJson(await file.text());
      await save(chat);
      this.open(chat);
      await this.draw();
    } catch (error) {
      $("chat-undo").textContent = `${file.name} cannot be imported: ${error.message}`;
    }
  }
}
