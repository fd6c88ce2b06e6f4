// The page: what is shown, what its controls do, and where the reader looks.

import { Archive } from "./archive.js";
import { Chats, tellTrouble } from "./chat.js";
import { connect, hasSeveral, knownModel, onModelShown, refreshModels, setUpPicker } from "./connection.js";
import { setContextLength, showContext } from "./context.js";
import { Drawer } from "./drawer.js";
import { readEarlier, takeOver } from "./earlier.js";
import { Attachments } from "./files.js";
import { selectedSource } from "./formula.js";
import { saveAs, search, takeFile } from "./library.js";
import { Log } from "./log.js";
import { notify } from "./notices.js";
import { setUpTheme, Settings } from "./settings.js";
import { setUpShortcuts } from "./shortcuts.js";
import { loadDraft, saveDraft } from "./store.js";
import { copyText } from "./view.js";

const IDEAS = [
  "Explain how tides work, in three sentences",
  "Write a haiku about patience",
  "What is a closure in JavaScript? Show an example",
  "Compare tea and coffee in a table",
];
const byId = (id) => document.getElementById(id);
const [log, scroller, prompt, speed] = [byId("log"), byId("scroller"), byId("prompt"), byId("speed")];
const settings = new Settings();
const archive = new Archive();
const attachments = new Attachments();
const chats = new Chats(archive, {
  onShow: show,
  onGrow: grow,
  prepare: async (turns, isBegun) => ({
    model: (await knownModel()).id,
    messages: turns,
    ...settings.request(),
    ...(isBegun ? { continue_final_message: true, add_generation_prompt: false } : {}),
  }),
  system: () => settings.system,
});
const drawer = new Drawer({
  open: (id, message) => open(id, message, message !== null),
  list: () => listed(() => archive.list(), []),
  rename: (id, title) => write(() => archive.change(id, { title })),
  remove,
  restore,
  erase,
  search: (text) => listed(() => search(archive, text), new Map()),
  save: (id) => write(() => saveAs(archive, id)),
  take: (file) => listed(() => takeFile(archive, file), ""),
});
let deletedOpen = null; // the chat that was open when it was deleted here
let following = true; // the end stays in sight until the reader scrolls up
let lastTop = 0; // where the log was scrolled to last
let opening = Promise.resolve();

const handlers = {
  edit(message, text) {
    following = true;
    chats.edit(message, text);
    prompt.focus();
  },
  regenerate(message) {
    following = true;
    chats.regenerate(message);
    prompt.focus();
  },
  proceed(message) {
    following = true;
    chats.proceed(message);
    prompt.focus();
  },
  giveResults(message, results) {
    following = true;
    chats.giveResults(message, results);
    prompt.focus();
  },
  isLast: (message) => chats.open?.tree.path().at(-1) === message,
  hasSeveral,
  siblings: (message) => chats.open?.tree.siblings(message) ?? [],
  choose(message, label) {
    following = false;
    chats.choose(message);
    const all = handlers.siblings(message);
    byId("announcer").textContent = `Version ${all.indexOf(message) + 1} of ${all.length}`;
    shown.views.get(message.id)?.node.querySelector(`[aria-label="${label}"]`).focus();
  },
};

const shown = new Log(log, byId("earlier"), handlers, () => {
  following = false;
  show();
});

/** Shows the branch that is chosen. `done`: an answer that just ended. */
function show(done = null) {
  const path = chats.open?.tree.path() ?? [];
  shown.show(path, chats.answer?.message ?? null);
  byId("welcome").hidden = path.length > 0;
  showAddress();
  showBusy();
  showUse();
  if (done && shown.views.has(done.id)) {
    byId("announcer").textContent = done.error ?? done.content.slice(0, 2000);
  }
  if (done) {
    refreshModels();
  }
  if (drawer.dialog.open || drawer.current !== (chats.open?.id ?? null)) {
    drawer.refresh(chats.open?.id ?? null);
  }
  follow();
}

/** Shows how much of the context is in use. */
function showUse() {
  showContext(chats.open?.tree.path() ?? [], chats.answer?.clock.deltas ?? 0);
}

function showBusy() {
  const busy = chats.answer !== null;
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  speed.hidden = !busy;
  speed.textContent = chats.answer?.speed ?? "";
}

/** The address names the chat, and this tab's history the branch: a reload and the browser's Back find both. */
function showAddress() {
  const [address, state] = [chats.open ? `#${chats.open.id}` : "", { leaf: chats.open?.tree.leaf ?? null }];
  const url = location.pathname + location.search + address;
  if (location.hash !== address) {
    history.pushState(state, "", url);
  } else if (history.state?.leaf !== state.leaf) {
    history.replaceState(state, "", url);
  }
}

let painting = false;
let begun = null; // the last answer of which something came

/** Shows what came of an answer, at most once a frame. */
function grow() {
  if (painting) {
    return;
  }
  painting = true;
  requestAnimationFrame(() => {
    painting = false;
    const message = chats.answer?.message;
    if (message && shown.views.has(message.id)) {
      shown.views.get(message.id).update(true);
      speed.textContent = chats.answer.speed;
      showUse();
      follow();
      if (begun !== message.id) {
        begun = message.id;
        refreshModels();
      }
    }
  });
}

function send(text) {
  const content = text.trim();
  if ((!content && attachments.isEmpty) || chats.answer) {
    return;
  }
  prompt.value = "";
  saveDraft("");
  fitPrompt();
  following = true;
  opening = opening.then(() => attachments.take()).then((files) => { // a chat that is being opened is the one that is meant
    if (!content && !files.length) {
      return; // no file could be read
    }
    if (chats.answer) {
      prompt.value = content;
      attachments.files = files;
      attachments.show();
    } else {
      chats.send(content, files);
    }
  });
}

/** Shows another chat, at the end of its branch that was last said or is named; or with null a new chat. */
function open(id, leaf = null, isSought = false) {
  following = id !== null;
  opening = opening.then(async () => {
    const isThere = await chats.show(id, leaf, (path) => shown.restart(path, isSought ? leaf : null));
    if (!isThere) {
      notify("missing", "This browser does not have that chat.");
    }
    scrollToEnd();
    if (isSought) {
      following = false;
      shown.views.get(leaf)?.node.scrollIntoView({ block: "center" });
    }
  });
  return opening;
}

function follow() {
  if (following) {
    scrollToEnd();
  }
  const gap = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  byId("to-end").hidden = gap < 160;
}

function scrollToEnd() {
  scroller.scrollTop = chats.open ? scroller.scrollHeight : 0; // the welcome is read from its top
  lastTop = scroller.scrollTop;
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, window.innerHeight * 0.4)}px`;
}

/** What is read from storage, or something else where that fails, which the page says. */
async function listed(work, otherwise) {
  try {
    return await work();
  } catch (error) {
    tellTrouble(error);
    return otherwise;
  }
}

async function write(work) {
  try {
    await work();
  } catch (error) {
    tellTrouble(error);
  }
}

async function remove(id) {
  const isOpen = chats.open?.id === id;
  chats.answering.get(id)?.answer.stop();
  await write(() => archive.change(id, { deleted: Date.now() }));
  if (isOpen) {
    deletedOpen = id;
    await open(null);
  }
  await drawer.refresh();
}

/** Erases a chat for good, and gives what brings it back. */
async function erase(id) {
  const kept = await listed(() => archive.load(id), null);
  await write(() => archive.erase(id));
  await drawer.refresh();
  return kept && (() => write(() => archive.add([kept])));
}

async function restore(id) {
  await write(() => archive.change(id, { deleted: undefined }));
  if (deletedOpen === id && !chats.open) {
    deletedOpen = null;
    await open(id);
  }
  await drawer.refresh();
}

function listenToWindow() {
  archive.onChange = (id) => {
    chats.hear(id);
    if (drawer.dialog.open) {
      drawer.refresh();
    }
  };
  window.addEventListener("popstate", ({ state }) => open(location.hash.slice(1) || null, state?.leaf));
  window.addEventListener("pagehide", () => archive.leaveLastWords());
  window.addEventListener("beforeunload", (event) => {
    if (archive.isFailing && archive.unsaved.size) {
      event.preventDefault(); // the browser asks whether to leave
    }
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && chats.open) {
      chats.hear(chats.open.id); // a page that slept may have missed what other tabs said
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && chats.answer && !document.querySelector("dialog[open]")) {
      chats.stop();
    }
  });
}

function listen() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send(prompt.value);
  });
  byId("stop").addEventListener("click", () => chats.stop());
  const newChat = () => {
    open(null);
    prompt.focus();
  };
  byId("new-chat").addEventListener("click", newChat);
  setUpShortcuts(prompt, {
    search: () => drawer.show(true),
    newChat,
    write: () => prompt.focus(),
    editLast: () => shown.views.get(chats.open?.tree.path().findLast(({ role }) => role === "user")?.id)?.edit(),
  });
  byId("to-end").addEventListener("click", () => {
    following = true;
    follow();
  });
  prompt.addEventListener("input", () => {
    saveDraft(prompt.value);
    fitPrompt();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(prompt.value);
    }
  });
  scroller.addEventListener("scroll", () => {
    const gap = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
    // The event of the page's own scrolling may come after the window has shrunk: only who scrolls up leaves the end.
    following = gap < 48 || (following && scroller.scrollTop >= lastTop);
    lastTop = scroller.scrollTop;
    byId("to-end").hidden = gap < 160;
  });
  new ResizeObserver(follow).observe(scroller); // the field for messages grows, or a phone's keyboard comes
  log.addEventListener("copy", (event) => {
    const text = selectedSource(getSelection());
    if (text !== null) {
      event.clipboardData.setData("text/plain", text);
      event.preventDefault();
    }
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
}

/** Opens the chat that the address names, after what pages before this one left is taken in. */
async function start() {
  let earlier = null;
  try {
    await archive.takeLastWords();
    earlier = await takeOver(archive);
    await archive.tidy();
  } catch (error) {
    tellTrouble(error);
    const unstored = readEarlier();
    if (unstored) {
      chats.showUnstored(unstored);
      return;
    }
  }
  const id = location.hash.slice(1) || earlier?.chat.id || null;
  if (!(await chats.show(id, history.state?.leaf))) {
    notify("missing", "This browser does not have that chat.");
  }
  scrollToEnd();
}

setUpTheme();
setUpPicker();
onModelShown((model) => {
  setContextLength(model.max_model_len);
  attachments.showKinds(Boolean(model.largest_image));
  showUse();
  shown.update(chats.answer?.message); // messages name their models or do not
});
document.addEventListener("drawn", follow);
showIdeas();
byId("welcome").hidden = location.hash !== "";
listen();
listenToWindow();
opening = start();
connect();
prompt.value = loadDraft();
fitPrompt();
if (matchMedia("(hover: hover)").matches) {
  prompt.focus();
}
