// Talks to the server: the key, requests, server-sent events. Touches no element but the key's dialog.

const STORE = "quire-key";
let key = sessionStorage.getItem(STORE) || "";
let asking = null;
let wanted = false;
let refused = false;

export class ServerError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** Whether this tab has a key, or the server has asked for one. */
export const usesKey = () => key !== "" || wanted;

const UNREACHABLE = "The server does not answer. Check that it is running, then retry.";

/** Show the dialog; resolves to whether a key was given. Concurrent callers share one dialog. */
export function askForKey(why) {
  refused = false;
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
      wanted = true;
      document.dispatchEvent(new Event(given ? "quire-key" : "quire-no-key"));
      resolve(given);
    };
  });
  return asking;
}

/**
 * Fetch with the key. Asks for a key if the server wants one, once: after Cancel only the API key button asks again.
 * Throws ServerError with the server's own words, or AbortError.
 */
export async function request(path, options = {}) {
  for (;;) {
    const used = key;
    const headers = { ...(options.body && { "Content-Type": "application/json" }), ...(key && { Authorization: `Bearer ${key}` }) };
    const response = await fetch(path, { ...options, headers }).catch((error) => {
      throw error.name === "AbortError" ? error : new ServerError(0, UNREACHABLE);
    });
    if (response.ok) return response;
    if (response.status === 401) {
      if (used !== key) continue;
      if (!refused) {
        if (await askForKey(key ? "The server did not accept that key. It is kept in this tab only." : null)) continue;
        refused = true;
      }
      throw new ServerError(401, "This server needs an API key: press “API key” above.");
    }
    throw new ServerError(response.status, ...(await reason(response)));
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error, detail } = JSON.parse(text);
    return [String(error?.message ?? error ?? detail ?? text), error?.code];
  } catch {
    return [text || `The server answered ${response.status}.`];
  }
}

/** The data of each server-sent event of `response`, as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        throw error.name === "AbortError" ? error : new ServerError(0, "The connection broke off before the answer was complete.");
      });
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
    if (event.error) throw new ServerError(0, event.error.message ?? "The server broke off the answer.");
    yield event;
  }
  throw new ServerError(0, "The connection broke off before the answer was complete.");
}

/** Post JSON and return the parsed answer. */
export async function post(path, body, signal) {
  return (await request(path, { method: "POST", body: JSON.stringify(body), signal })).json();
}
