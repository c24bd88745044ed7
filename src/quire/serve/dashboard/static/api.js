// Talking to the server: the key, requests, and server-sent events. Knows no elements but the key's dialog.

const STORE = "quire-key";
let key = sessionStorage.getItem(STORE) || "";
let asking = null;

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Whether this tab has a key. */
export const hasKey = () => key !== "";

/** Show the dialog; resolves to whether a key was given. Callers at the same time share one dialog. */
export function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key-input");
    if (why) document.getElementById("key-why").textContent = why;
    input.value = key;
    dialog.showModal();
    input.select();
    let given = false;
    document.getElementById("key-form").onsubmit = (event) => {
      event.preventDefault();
      key = input.value.trim();
      if (key) sessionStorage.setItem(STORE, key);
      else sessionStorage.removeItem(STORE);
      given = true;
      dialog.close();
    };
    document.getElementById("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      input.value = "";
      asking = null;
      document.dispatchEvent(new Event("quire-key"));
      resolve(given);
    };
  });
  return asking;
}

/** Fetch with the key; asks for one where the server wants it. Throws ServerError with the server's own words. */
export async function request(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...(options.body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers });
    if (response.ok) return response;
    if (response.status === 401) {
      if (used !== key) continue;
      if (await askForKey(key ? "That key was not accepted. It is kept in this tab only." : null)) continue;
    }
    throw new ServerError(response.status, await reason(response));
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error, detail } = JSON.parse(text);
    return String(error?.message ?? error ?? detail ?? text);
  } catch {
    return text || `The server answered ${response.status}.`;
  }
}

/** The data of each server-sent event of `response`, as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
    if (rest.startsWith("data:")) data.push(rest.slice(5).trimStart());
    if (data.length) yield data.join("\n");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Post `body` and yield the parsed events up to [DONE]. */
export async function* stream(path, body, signal) {
  const full = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request(path, { method: "POST", body: JSON.stringify(full), signal });
  for await (const data of events(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(0, event.error.message ?? "The stream broke off.");
    yield event;
  }
}
