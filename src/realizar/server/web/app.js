// The page: a conversation, the request that is running, and where the reader looks.

import { fetchModel, isReady, streamChat } from "./api.js";
import { askForKey, setUpTheme, Settings } from "./settings.js";
import { loadKey, loadMessages, saveMessages } from "./store.js";
import { copyText, MessageView } from "./view.js";

const IDEAS = [
  "Explain how tides work, in three sentences",
  "Write a haiku about patience",
  "What is a closure in JavaScript? Show an example",
  "Compare tea and coffee in a table",
];
const byId = (id) => document.getElementById(id);
const [log, scroller, prompt, speed] = [byId("log"), byId("scroller"), byId("prompt"), byId("speed")];
const settings = new Settings();
const messages = loadMessages();
const views = new Map();
let model = null;
let running = null; // AbortController of the answer that is coming
let following = true; // the end stays in sight until the reader scrolls up

const handlers = {
  edit(message) {
    stop();
    prompt.value = message.content;
    dropFrom(messages.indexOf(message));
    fitPrompt();
    prompt.focus();
  },
  regenerate(message) {
    stop();
    dropFrom(messages.indexOf(message));
    answer();
  },
};

function add(message) {
  messages.push(message);
  show(message);
  return message;
}

function show(message) {
  const view = new MessageView(message, handlers);
  views.set(message, view);
  log.append(view.node);
  byId("welcome").hidden = true;
}

function dropFrom(index) {
  for (const message of messages.splice(index)) {
    views.get(message)?.node.remove();
    views.delete(message);
  }
  byId("welcome").hidden = messages.length > 0;
  saveMessages(messages);
}

function send(text) {
  const content = text.trim();
  if (!content || running) {
    return;
  }
  add({ role: "user", content });
  prompt.value = "";
  fitPrompt();
  answer();
}

function stop() {
  running?.abort();
  running = null;
  setBusy(false);
}

function setBusy(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  speed.hidden = !busy;
  speed.textContent = "";
}

/** What is sent. A question that got no word is left out: many templates refuse two questions in a row. */
function conversation() {
  const said = messages.filter((message) => message.content);
  const turns = said
    .filter(({ role }, index) => role !== "user" || said[index + 1]?.role !== "user")
    .map(({ role, content }) => ({ role, content }));
  return settings.system ? [{ role: "system", content: settings.system }, ...turns] : turns;
}

/** Asks for the model's answer to the conversation as it stands, and shows it while it comes. */
async function answer() {
  const controller = new AbortController();
  running = controller;
  setBusy(true);
  following = true;
  const body = { messages: conversation(), ...settings.request() };
  const message = add({ role: "assistant", content: "" });
  const view = views.get(message);
  view.update(true);
  scrollToEnd();
  const clock = { start: performance.now(), first: 0, last: 0, pieces: 0, tokens: null };
  try {
    model ??= await known();
    await receive(message, view, { model: model.id, ...body }, controller, clock);
  } catch (error) {
    if (controller.signal.aborted) {
      message.stopped = true;
    } else {
      message.error = error.message;
    }
  }
  message.stats = summary(clock);
  if (views.has(message)) {
    view.update(false);
    saveMessages(messages);
    byId("announcer").textContent = message.error ?? message.content.slice(0, 2000);
  }
  if (running === controller) {
    running = null;
    setBusy(false);
    follow();
  }
}

/** The model's record; asks for a key where the server wants one. */
async function known() {
  for (;;) {
    try {
      const found = await fetchModel(loadKey());
      showModel(found);
      return found;
    } catch (error) {
      if (error.status !== 401 || !(await askForKey())) {
        throw error;
      }
    }
  }
}

async function receive(message, view, body, controller, clock) {
  for (;;) {
    try {
      for await (const chunk of streamChat(body, loadKey(), controller.signal)) {
        take(message, view, chunk, clock);
      }
      return;
    } catch (error) {
      if (error.status !== 401 || !(await askForKey())) {
        throw error;
      }
    }
  }
}

function take(message, view, chunk, clock) {
  clock.tokens = chunk.usage?.completion_tokens ?? clock.tokens;
  const choice = chunk.choices?.[0];
  const [text, thought] = [choice?.delta?.content ?? "", choice?.delta?.reasoning_content ?? ""];
  if (choice?.finish_reason === "length") {
    message.stopped = false;
    message.error = "The answer reached its limit of tokens.";
  }
  if (!text && !thought) {
    return;
  }
  clock.last = performance.now();
  clock.first ||= clock.last;
  clock.pieces += 1;
  message.content += text;
  if (thought) {
    message.reasoning = (message.reasoning ?? "") + thought;
  }
  schedule(view, clock);
}

let painting = false;

/** Shows what came, at most once a frame. */
function schedule(view, clock) {
  if (painting) {
    return;
  }
  painting = true;
  requestAnimationFrame(() => {
    painting = false;
    if (running && views.has(view.message)) {
      view.update(true);
      speed.textContent = clock.pieces > 4 ? `${perSecond(clock).toFixed(1)} tok/s` : "";
      follow();
    }
  });
}

function perSecond({ first, last, pieces, tokens }) {
  return last > first ? (((tokens ?? pieces) - 1) / (last - first)) * 1000 : 0;
}

function summary(clock) {
  const count = clock.tokens ?? clock.pieces;
  if (!clock.first || !count) {
    return "";
  }
  const parts = [`${count} ${count === 1 ? "token" : "tokens"}`];
  if (count > 1 && clock.last > clock.first) {
    parts.unshift(`${perSecond(clock).toFixed(1)} tok/s`);
  }
  return [...parts, `first after ${((clock.first - clock.start) / 1000).toFixed(2)} s`].join(" · ");
}

function follow() {
  if (following) {
    scrollToEnd();
  }
  const gap = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  byId("to-end").hidden = gap < 160;
}

function scrollToEnd() {
  scroller.scrollTop = messages.length ? scroller.scrollHeight : 0; // the welcome is read from its top
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, window.innerHeight * 0.4)}px`;
}

function showModel(found) {
  const name = byId("model");
  name.textContent = found.id;
  const context = found.max_model_len ? `, ${found.max_model_len.toLocaleString()} tokens of context` : "";
  name.title = found.id + context;
  byId("welcome-model").textContent = found.id;
  document.title = `${found.id} · realizar`;
}

/** Waits for the server at the start: it may still be loading weights. */
async function connect() {
  for (;;) {
    try {
      model = await known();
      break;
    } catch (error) {
      if (error.status === 401) {
        byId("model").textContent = "locked: send a message to give a key";
        return;
      }
      byId("model").textContent = "server not reachable";
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
  while (!(await isReady())) {
    byId("model").textContent = `${model.id} is loading…`;
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  showModel(model);
}

function listen() {
  window.addEventListener("pagehide", () => { // what came of an answer is kept
    if (running) {
      messages.at(-1).stopped = true;
      saveMessages(messages);
    }
  });
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(prompt.value);
  });
  byId("stop").addEventListener("click", stop);
  byId("new-chat").addEventListener("click", () => {
    stop();
    dropFrom(0);
    scrollToEnd();
    prompt.focus();
  });
  byId("to-end").addEventListener("click", () => {
    following = true;
    follow();
  });
  prompt.addEventListener("input", fitPrompt);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(prompt.value);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) {
      stop();
    }
  });
  scroller.addEventListener("scroll", () => {
    const gap = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    following = gap < 48;
    byId("to-end").hidden = gap < 160;
  });
  log.addEventListener("click", (event) => {
    const button = event.target.closest(".copy-code");
    if (button) {
      copyText(button.closest("figure").querySelector("code").textContent, button);
    }
  });
}

function showIdeas() {
  for (const idea of IDEAS) {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = idea;
    button.addEventListener("click", () => send(idea));
    item.append(button);
    byId("ideas").append(item);
  }
  byId("welcome").hidden = messages.length > 0;
}

setUpTheme();
showIdeas();
messages.forEach(show);
listen();
connect();
scrollToEnd();
if (matchMedia("(hover: hover)").matches) {
  prompt.focus();
}
