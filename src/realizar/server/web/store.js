// What outlives a reload: conversation, settings and theme in localStorage, the key in sessionStorage.

const PREFIX = "realizar.";

function read(storage, name, fallback) {
  try {
    const text = storage().getItem(PREFIX + name);
    return text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

function write(storage, name, value) {
  try {
    storage().setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // Full or turned off: the page goes on without a memory.
  }
}

const local = () => localStorage;
const session = () => sessionStorage;

export function loadMessages() {
  const messages = read(local, "conversation", []);
  const known = (message) => ["user", "assistant"].includes(message?.role) && typeof message.content === "string";
  return Array.isArray(messages) ? messages.filter(known) : [];
}

export const saveMessages = (messages) => write(local, "conversation", messages);
export const loadSettings = () => ({ ...read(local, "settings", {}) });
export const saveSettings = (settings) => write(local, "settings", settings);
export const loadKey = () => read(session, "key", "");
export const saveKey = (key) => write(session, "key", key);

export function saveTheme(theme) {
  try {
    localStorage.setItem(`${PREFIX}theme`, theme); // as it is: theme.js reads it
  } catch {
    // As above.
  }
}
