// The server's models: waited for at the start, and asked for a key where the server wants one. Which one answers is
// chosen where there are several.

import { fetchModels, isReady } from "./api.js";
import { askForKey, showDefaults } from "./settings.js";
import { loadChosenModel, loadKey, saveChosenModel } from "./store.js";

const byId = (id) => document.getElementById(id);
const STATES = { known: "not loaded" }; // words for the server's
let models = [];
let onModel = () => {};

/** Calls with the model's record whenever another one is to answer. */
export function onModelShown(run) {
  onModel = run;
}

/** The record of the model that answers; asks for a key where the server wants one. */
export async function knownModel() {
  while (!models.length) {
    try {
      models = await fetchModels(loadKey());
      showModel();
    } catch (error) {
      if (error.status !== 401 || !(await askForKey())) {
        throw error;
      }
    }
  }
  return chosen();
}

/** The model that was chosen here, or the first one. */
const chosen = () => models.find(({ id }) => id === loadChosenModel()) ?? models[0];

/** True if answers may come from several models, so that each says whose it is. */
export const hasSeveral = () => models.length > 1;

function showModel() {
  const found = chosen();
  const [name, picker] = [byId("model"), byId("models")];
  name.textContent = found.id;
  const context = found.max_model_len ? `, ${found.max_model_len.toLocaleString()} tokens of context` : "";
  name.title = picker.title = found.id + context;
  name.hidden = hasSeveral();
  picker.hidden = !hasSeveral();
  picker.replaceChildren(...models.map(({ id, state }) => new Option(state && state !== "ready" ? `${id} (${STATES[state] ?? state})` : id, id)));
  picker.value = found.id;
  byId("welcome-model").textContent = found.id;
  document.title = `${found.id} · realizar`;
  showDefaults(found.default_sampling);
  onModel(found);
}

/** Lets the reader choose; the list is asked for anew as the field is entered, as models come and go. */
export function setUpPicker() {
  const picker = byId("models");
  picker.addEventListener("change", () => {
    saveChosenModel(picker.value);
    showModel();
  });
  picker.addEventListener("focus", askAnew);
}

/** Shows the states of several models anew, as an answer loads its model; not while the reader chooses. */
export async function refreshModels() {
  if (hasSeveral() && document.activeElement !== byId("models")) {
    await askAnew();
  }
}

async function askAnew() {
  const found = await fetchModels(loadKey()).catch(() => models);
  if (JSON.stringify(found) !== JSON.stringify(models)) {
    models = found;
    showModel();
  }
}

/** Waits for the server at the start: it may still be loading weights. */
export async function connect() {
  let found = null;
  while (!found) {
    try {
      found = await knownModel();
    } catch (error) {
      if (error.status === 401) {
        byId("model").textContent = "locked: send a message to give a key";
        return;
      }
      byId("model").textContent = "server not reachable";
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
  while (!(await isReady())) {
    byId("model").textContent = `${found.id} is loading…`;
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  showModel();
}
