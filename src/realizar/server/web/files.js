// Text files that go with a message: chosen, dropped or pasted, shown as chips until it is sent.

import { dismiss, notify } from "./notices.js";
import { loadDraftFiles, saveDraftFiles } from "./store.js";

const MAX_BYTES = 1 << 20; // of a file
const MAX_FILES = 20;
const byId = (id) => document.getElementById(id);

/** True for a stored list of files, `[{name, text}]`. */
export function areFiles(value) {
  return Array.isArray(value) && value.length > 0
    && value.every((file) => typeof file?.name === "string" && typeof file.text === "string");
}

/** A message's text as the model gets it: its files in fences, each below its name, and then what was written. */
export function withFiles(message) {
  const parts = (message.files ?? []).map(({ name, text }) => {
    const runs = text.match(/`+/g) ?? [];
    const fence = "`".repeat(runs.reduce((most, run) => Math.max(most, run.length + 1), 3));
    return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...parts, message.content].filter(Boolean).join("\n\n");
}

/** A file of a message, its text folded away. */
export function fileNode({ name, text }) {
  const node = document.createElement("details");
  node.className = "fold file";
  const [summary, pre] = [document.createElement("summary"), document.createElement("pre")];
  summary.textContent = `${name} (${size(text)})`;
  pre.textContent = text;
  pre.tabIndex = 0;
  node.append(summary, pre);
  return node;
}

function size(text) {
  const lines = text.split("\n").length - (text.endsWith("\n") ? 1 : 0);
  return `${lines.toLocaleString()} ${lines === 1 ? "line" : "lines"}`;
}

async function readText(file) {
  if (file.size > MAX_BYTES) {
    throw new Error(`“${file.name}” is larger than ${MAX_BYTES >> 20} MiB, the most that a message takes.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    text = "\0";
  }
  if (text.includes("\0")) {
    throw new Error(`“${file.name}” is no text in UTF-8; the model reads nothing else.`);
  }
  return text;
}

/** The files that go with the next message. */
export class Attachments {
  constructor() {
    this.files = loadDraftFiles().filter((file) => areFiles([file]));
    byId("attach").addEventListener("click", () => byId("attach-file").click());
    byId("attach-file").addEventListener("change", ({ target }) => {
      this.add([...target.files]);
      target.value = "";
    });
    byId("prompt").addEventListener("paste", (event) => {
      if (event.clipboardData.files.length) {
        event.preventDefault();
        this.add([...event.clipboardData.files]);
      }
    });
    this.listenToDrops();
    this.show();
  }

  listenToDrops() {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const mark = (isOver) => document.body.classList.toggle("dropping", isOver);
    addEventListener("dragover", (event) => {
      if (hasFiles(event)) {
        event.preventDefault();
        mark(true);
      }
    });
    addEventListener("dragleave", (event) => mark(event.relatedTarget !== null));
    addEventListener("drop", (event) => {
      if (hasFiles(event)) {
        event.preventDefault(); // the browser would open it in the page's place
        mark(false);
        this.add([...event.dataTransfer.files]);
      }
    });
  }

  /** Takes files in; one that is no text or too large is refused with a sentence. */
  async add(files) {
    dismiss("file");
    for (const file of files) {
      try {
        if (this.files.length >= MAX_FILES) {
          throw new Error(`A message takes at most ${MAX_FILES} files.`);
        }
        this.files.push({ name: file.name, text: await readText(file) });
      } catch (error) {
        notify("file", error.message);
      }
    }
    this.show();
    byId("prompt").focus();
  }

  /** Gives the files, and keeps none. */
  take() {
    const taken = this.files;
    this.files = [];
    this.show();
    return taken;
  }

  remove(file) {
    const at = this.files.indexOf(file);
    this.files.splice(at, 1);
    this.show();
    byId("prompt").focus();
    const back = () => {
      this.files.splice(at, 0, file);
      this.show();
    };
    notify("file", `“${file.name}” was taken out.`, { label: "Undo", run: back });
  }

  show() {
    saveDraftFiles(this.files);
    byId("files").replaceChildren(...this.files.map((file) => this.chip(file)));
    byId("files").hidden = !this.files.length;
  }

  chip(file) {
    const [item, name, remove] = [document.createElement("li"), document.createElement("span"), document.createElement("button")];
    name.textContent = `${file.name} (${size(file.text)})`;
    remove.type = "button";
    remove.className = "dismiss";
    remove.textContent = "×";
    remove.setAttribute("aria-label", `Take “${file.name}” out`);
    remove.addEventListener("click", () => this.remove(file));
    item.append(name, remove);
    return item;
  }
}
