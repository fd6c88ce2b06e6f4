// The settings drawer, the theme switch and the question for the key.

import { loadKey, loadSettings, onSettingsElsewhere, saveKey, saveSettings, saveTheme } from "./store.js";

const byId = (id) => document.getElementById(id);

/** Settings as they stand in the drawer; `request()` gives those that are set as fields of a request. */
export class Settings {
  constructor() {
    this.inputs = [...document.querySelectorAll("[data-setting]")];
    this.show();
    for (const input of this.inputs) {
      input.addEventListener("input", () => {
        this.save([input]);
        this.forgetReset();
        checkTools();
      });
    }
    onSettingsElsewhere(() => this.show());
    const drawer = byId("settings");
    byId("open-settings").addEventListener("click", () => drawer.showModal());
    byId("close-settings").addEventListener("click", () => drawer.close());
    byId("reset-settings").addEventListener("click", () => this.reset());
    drawer.addEventListener("close", () => this.forgetReset());
    drawer.addEventListener("click", (event) => {
      if (event.target === drawer) {
        drawer.close();
      }
    });
  }

  /** Shows what is saved; a field that is being filled in keeps what it has. */
  show() {
    const saved = loadSettings();
    for (const input of this.inputs.filter((each) => each !== document.activeElement)) {
      input.value = saved[input.dataset.setting] ?? "";
    }
    checkTools();
  }

  /** Saves some fields, and leaves the others as another tab may have saved them. */
  save(inputs) {
    saveSettings({ ...loadSettings(), ...Object.fromEntries(inputs.map((each) => [each.dataset.setting, each.value])) });
  }

  /** Empties the fields, or fills them again with what they had before that. */
  reset() {
    const before = this.before ?? null;
    this.before = before ? null : this.inputs.map((input) => input.value);
    this.inputs.forEach((input, index) => { input.value = before ? before[index] : ""; });
    this.save(this.inputs);
    checkTools();
    byId("reset-settings").textContent = before ? "Reset" : "Undo reset";
  }

  forgetReset() {
    this.before = null;
    byId("reset-settings").textContent = "Reset";
  }

  get system() {
    return byId("system").value.trim();
  }

  request() {
    const tools = parsedTools(byId("tools").value);
    const numbers = this.inputs.filter((input) => input.type === "number" && input.value && input.validity.valid);
    const given = Object.fromEntries(numbers.map((input) => [input.dataset.setting, Number(input.value)]));
    return tools?.length ? { ...given, tools } : given;
  }
}

/** A list of tools as a request has them, of its JSON; null if it is none. A function alone becomes a tool. */
function parsedTools(text) {
  let value;
  try {
    value = text.trim() ? JSON.parse(text) : [];
  } catch {
    return null;
  }
  const isTool = (each) => typeof (each?.function ?? each)?.name === "string";
  return Array.isArray(value) && value.every(isTool)
    ? value.map((each) => (each.function ? each : { type: "function", function: each }))
    : null;
}

function checkTools() {
  const isWrong = parsedTools(byId("tools").value) === null;
  byId("tools").setCustomValidity(isWrong ? "This is no JSON list of functions; no tool is sent." : "");
  byId("tools-error").hidden = !isWrong;
}

/** Shows the server's defaults in empty fields: values by the names of the API's fields. */
export function showDefaults(defaults) {
  const known = [...document.querySelectorAll("input[data-setting]")].filter(
    (input) => typeof defaults?.[input.dataset.setting] === "number",
  );
  for (const input of known) {
    input.placeholder = String(defaults[input.dataset.setting]);
  }
  if (known.length) {
    byId("sampling-note").textContent = "Empty fields use the server’s values, shown in grey.";
  }
}

export function setUpTheme() {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const mark = () => {
    const theme = root.dataset.theme ?? (system.matches ? "dark" : "light");
    root.classList.toggle("dark", theme === "dark");
  };
  mark();
  system.addEventListener("change", mark);
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = root.classList.contains("dark") ? "light" : "dark";
    saveTheme(root.dataset.theme);
    mark();
  });
}

/** Asks for the key; resolves to whether one was given. */
export function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) {
    return Promise.resolve(false);
  }
  const input = byId("key");
  byId("key-error").hidden = !loadKey();
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    byId("key-cancel").onclick = () => dialog.close("");
    dialog.querySelector("form").onsubmit = () => {
      saveKey(input.value.trim());
      dialog.returnValue = "given";
    };
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "given"), { once: true });
  });
}
