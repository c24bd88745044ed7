// Saved conversations: IndexedDB in this browser, nothing on the server. Without it (private windows) nothing is saved.

const NAME = "quire";
const CHATS = "chats";

function open() {
  return new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(CHATS, { keyPath: "id" });
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

let database = null;

/** Run one operation on the store; null if the browser has no storage for this page. */
async function run(mode, job) {
  try {
    database ??= await open();
  } catch {
    return null;
  }
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(CHATS, mode);
    const asked = job(transaction.objectStore(CHATS));
    transaction.oncomplete = () => resolve(asked.result ?? true);
    transaction.onerror = () => reject(transaction.error);
  });
}

export const save = (chat) => run("readwrite", (store) => store.put(structuredClone(chat)));
export const drop = (id) => run("readwrite", (store) => store.delete(id));
export const load = async (id) => {
  const found = await run("readonly", (store) => store.get(id));
  return found === true ? null : found;
};

/** All conversations, last changed first. */
export async function all() {
  const found = await run("readonly", (store) => store.getAll());
  return Array.isArray(found) ? found.sort((a, b) => b.updated - a.updated) : [];
}

/** A setting of the page that survives reloads. */
export function setting(name, fallback) {
  const found = localStorage.getItem(`quire-${name}`);
  try {
    return found === null ? fallback : JSON.parse(found);
  } catch {
    return fallback;
  }
}

export const remember = (name, value) => localStorage.setItem(`quire-${name}`, JSON.stringify(value));
