// The server's model: waited for at the start, and asked for a key where the server wants one.

import { fetchModel, isReady } from "./api.js";
import { askForKey, showDefaults } from "./settings.js";
import { loadKey } from "./store.js";

const byId = (id) => document.getElementById(id);
let model = null;

/** The model's record; asks for a key where the server wants one. */
export async function knownModel() {
  while (!model) {
    try {
      model = await fetchModel(loadKey());
      showModel(model);
    } catch (error) {
      if (error.status !== 401 || !(await askForKey())) {
        throw error;
      }
    }
  }
  return model;
}

function showModel(found) {
  const name = byId("model");
  name.textContent = found.id;
  const context = found.max_model_len ? `, ${found.max_model_len.toLocaleString()} tokens of context` : "";
  name.title = found.id + context;
  byId("welcome-model").textContent = found.id;
  document.title = `${found.id} · realizar`;
  showDefaults(found.default_sampling);
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
  showModel(found);
}
