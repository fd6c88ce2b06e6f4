// What outlives a reload: settings and theme in localStorage, the key and what is being
// typed in sessionStorage. Chats are kept by archive.js.

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
    return true;
  } catch {
    return false; // Full or turned off: the page goes on without a memory.
  }
}

const local = () => localStorage;
const session = () => sessionStorage;

export const loadSettings = () => ({ ...read(local, "settings", {}) });
export const saveSettings = (settings) => write(local, "settings", settings);

/** Calls when another tab saved settings. */
export function onSettingsElsewhere(run) {
  window.addEventListener("storage", ({ key }) => {
    if (key === `${PREFIX}settings` || key === null) {
      run();
    }
  });
}

export const loadKey = () => read(session, "key", "");
export const saveKey = (key) => write(session, "key", key);
export const loadDraft = () => String(read(session, "draft", ""));
export const saveDraft = (text) => write(session, "draft", text);

export const loadChosenModel = () => String(read(local, "model", ""));
export const saveChosenModel = (name) => write(local, "model", name);

export const loadDraftFiles = () => [read(session, "files", [])].flat();
/** Without images where there is no room for them. */
export const saveDraftFiles = (files) => write(session, "files", files) || write(session, "files", files.filter(({ text }) => text !== undefined));

export function saveTheme(theme) {
  try {
    localStorage.setItem(`${PREFIX}theme`, theme); // as it is: theme.js reads it
  } catch {
    // As above.
  }
}
