// A conversation as a tree of messages: editing or regenerating adds a sibling, and `chosen` says which one is shown.
// Pure data, so that it can be stored, exported and tested without a page.

export const ROOT = "root";

/** An empty conversation. */
export function conversation(settings = {}) {
  const now = Date.now();
  return {
    id: crypto.randomUUID?.() ?? `${now}-${Math.random().toString(36).slice(2)}`,
    title: "",
    created: now,
    updated: now,
    settings,
    next: 1,
    nodes: { [ROOT]: { id: ROOT, parent: null, children: [], chosen: null, message: null } },
  };
}

/** Add `message` ({role, content, ...}) under `parent` and show it. Returns its node. */
export function add(chat, parent, message) {
  const node = { id: `m${chat.next}`, parent, children: [], chosen: null, message };
  chat.next += 1;
  chat.nodes[node.id] = node;
  chat.nodes[parent].children.push(node.id);
  chat.nodes[parent].chosen = node.id;
  chat.updated = Date.now();
  return node;
}

/** The nodes that are shown, first message first, up to and including `until` if it is given. */
export function path(chat, until = null) {
  const found = [];
  for (let id = chat.nodes[ROOT].chosen; id !== null; id = chat.nodes[id].chosen) {
    found.push(chat.nodes[id]);
    if (id === until) break;
  }
  return found;
}

export const leaf = (chat) => path(chat).at(-1) ?? chat.nodes[ROOT];

export const siblings = (chat, id) => chat.nodes[chat.nodes[id].parent].children;

/** Show the sibling `step` places away from node `id`. */
export function choose(chat, id, step) {
  const parent = chat.nodes[chat.nodes[id].parent];
  const place = parent.children.indexOf(id) + step;
  if (place >= 0 && place < parent.children.length) parent.chosen = parent.children[place];
}

/** Remove node `id` with all that follows it; an undo restores the conversation as it was. */
export function remove(chat, id) {
  const before = structuredClone({ nodes: chat.nodes });
  const parent = chat.nodes[chat.nodes[id].parent];
  const place = parent.children.indexOf(id);
  parent.children.splice(place, 1);
  if (parent.chosen === id) parent.chosen = parent.children[Math.min(place, parent.children.length - 1)] ?? null;
  const doomed = [id];
  while (doomed.length) {
    const next = doomed.pop();
    doomed.push(...chat.nodes[next].children);
    delete chat.nodes[next];
  }
  return () => Object.assign(chat, before);
}

/** Leave the oldest turn up to `until` out of what is sent; returns whether there is one beside the last. */
export function leaveOut(chat, until, mark = true) {
  const sent = path(chat, until).filter((node) => !node.message.left_out);
  const asked = sent.flatMap((node, i) => (node.message.role === "user" ? [i] : []));
  if (mark && asked.length > 1) for (const node of sent.slice(0, asked[1])) node.message.left_out = true;
  return asked.length > 1;
}

/** What a request sends: the shown messages up to `until`, without what is left out and what only this page needs. */
export function messages(chat, until = null) {
  return path(chat, until)
    .map((node) => node.message)
    .filter((m) => !m.left_out)
    .filter((m) => m.content || m.tool_calls?.length || m.role === "tool")
    .map((m) => {
      const sent = { role: m.role, content: m.content };
      if (m.tool_calls?.length) sent.tool_calls = m.tool_calls;
      if (m.tool_call_id) sent.tool_call_id = m.tool_call_id;
      return sent;
    });
}

/** A title from the first question. */
export function titleOf(chat) {
  const first = path(chat).find((node) => node.message.role === "user")?.message.content ?? "";
  const line = first.trim().replace(/\s+/g, " ");
  return chat.title || (line.length > 60 ? `${line.slice(0, 57)}…` : line) || "New chat";
}

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool", system: "System" };

export function asMarkdown(chat) {
  const parts = path(chat).map(({ message: m }) => {
    const calls = (m.tool_calls ?? []).map((c) => `\`${c.function.name}(${c.function.arguments})\``).join("\n");
    return `## ${NAMES[m.role] ?? m.role}\n\n${[m.content, calls].filter(Boolean).join("\n\n")}`;
  });
  return `# ${titleOf(chat)}\n\n${parts.join("\n\n")}\n`;
}

/** OpenAI's request body for the conversation as it is shown. */
export function asJson(chat) {
  const system = chat.settings.system ? [{ role: "system", content: chat.settings.system }] : [];
  return JSON.stringify({ title: titleOf(chat), messages: [...system, ...messages(chat)] }, null, 2);
}

/** A conversation from `asJson`'s form, or any object or list of OpenAI's messages. Throws Error for anything else. */
export function fromJson(text) {
  const data = JSON.parse(text);
  const list = Array.isArray(data) ? data : data?.messages;
  if (!Array.isArray(list)) throw new Error("The file has no list of messages.");
  const chat = conversation();
  chat.title = typeof data.title === "string" ? data.title.slice(0, 200) : "";
  let parent = ROOT;
  for (const message of list) {
    const { role, content = "", tool_calls: calls, tool_call_id: answered } = message ?? {};
    const said = typeof content === "string" || content === null ? content ?? "" : null;
    if (typeof role !== "string" || said === null) throw new Error("Each message needs a role and a text.");
    if (role === "system" && parent === ROOT) chat.settings.system = said;
    else parent = add(chat, parent, { role, content: said, ...(calls && { tool_calls: calls }), ...(answered && { tool_call_id: answered }) }).id;
  }
  return chat;
}
