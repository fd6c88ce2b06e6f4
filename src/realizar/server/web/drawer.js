// The list of chats: open, rename, delete and restore them.

import { icon } from "./view.js";

const byId = (id) => document.getElementById(id);

function element(kind, className, text = "") {
  const node = document.createElement(kind);
  node.className = className;
  node.textContent = text;
  return node;
}

function button(className, label, run, text = "") {
  const node = element("button", className, text);
  node.type = "button";
  node.title = label;
  node.setAttribute("aria-label", label);
  node.addEventListener("click", run);
  return node;
}

const SEARCH_AFTER_MS = 150; // without another key

/**
 * `handlers`: open(id, message), list(), search(text), rename(id, title), remove(id), restore(id), erase(id) that gives
 * what undoes it, save(id or null for all), take(file) that gives what is said of it; promises, but for open.
 */
export class Drawer {
  constructor(handlers) {
    this.handlers = handlers;
    this.dialog = byId("chats");
    this.current = null;
    this.found = null; // what was searched for: places by the chats' ids
    byId("open-chats").addEventListener("click", () => this.show());
    this.dialog.addEventListener("close", () => this.say("", null));
    byId("close-chats").addEventListener("click", () => this.dialog.close());
    byId("undo-delete").addEventListener("click", () => this.undo());
    byId("search").addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.search(), SEARCH_AFTER_MS);
    });
    byId("export-chats").addEventListener("click", () => handlers.save(null));
    byId("import-chats").addEventListener("click", () => byId("import-file").click());
    byId("import-file").addEventListener("change", ({ target }) => this.take(target));
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) {
        this.dialog.close();
      }
    });
  }

  /** Opens the list, with the focus in the field for searching if that is what is wanted. */
  async show(isSearch = false) {
    this.say("", null);
    byId("search").value = "";
    this.found = null;
    await this.refresh();
    if (!this.dialog.open) {
      this.dialog.showModal();
    }
    if (isSearch) {
      byId("search").focus();
    }
  }

  async search() {
    const wanted = byId("search").value;
    const found = wanted.trim() ? await this.handlers.search(wanted) : null;
    if (wanted !== byId("search").value) {
      return; // there is a later one
    }
    this.found = found;
    await this.refresh();
    const count = byId("chat-list").children.length;
    this.say(found ? `${count || "No"} ${count === 1 ? "chat has" : "chats have"} it.` : "", null);
  }

  async take(field) {
    const file = field.files[0];
    field.value = ""; // the same one may be chosen again
    if (file) {
      this.say(await this.handlers.take(file), null);
      await this.refresh();
    }
  }

  /** Shows the list as it is now, with the chat that is open marked; the focus stays where it is. */
  async refresh(current = this.current) {
    this.current = current;
    const all = await this.handlers.list();
    if (this.dialog.querySelector(".rename")) {
      return; // somebody is typing
    }
    const [focused, kind] = [document.activeElement?.closest("li")?.dataset.id, document.activeElement?.className];
    const deleted = all.filter((chat) => chat.deleted);
    const kept = all.filter((chat) => !chat.deleted && (!this.found || this.found.has(chat.id)));
    byId("chat-list").replaceChildren(...kept.map((chat) => this.item(chat)));
    byId("deleted-list").replaceChildren(...deleted.map((chat) => this.deletedItem(chat)));
    byId("no-chats").hidden = kept.length > 0 || this.found !== null;
    byId("export-chats").disabled = all.length === deleted.length;
    byId("deleted").hidden = !deleted.length;
    byId("deleted-count").textContent = `Deleted (${deleted.length})`;
    const same = [...this.dialog.querySelectorAll("li")].find((node) => node.dataset.id === focused);
    [...(same?.querySelectorAll("button") ?? [])].find((node) => node.className === kind)?.focus();
  }

  item(chat) {
    const item = element("li", chat.id === this.current ? "chat-item current" : "chat-item");
    item.dataset.id = chat.id;
    const place = this.found?.get(chat.id);
    const open = button("chat-open", chat.title, () => {
      this.dialog.close();
      this.handlers.open(chat.id, place?.message ?? null);
    });
    const when = new Date(chat.updated).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    open.append(element("span", "chat-title", chat.title), element("span", "chat-when", place?.text || when));
    if (chat.id === this.current) {
      open.setAttribute("aria-current", "true");
    }
    const rename = button("action rename-chat", `Rename “${chat.title}”`, () => this.rename(item, chat));
    rename.append(icon("edit"));
    const remove = button("action delete-chat", `Delete “${chat.title}”`, () => this.remove(chat));
    remove.append(icon("trash"));
    const save = button("action save-chat", `Export “${chat.title}”`, () => this.handlers.save(chat.id));
    save.append(icon("save"));
    item.append(open, rename, save, remove);
    return item;
  }

  deletedItem(chat) {
    const item = element("li", "chat-item");
    item.dataset.id = chat.id;
    const restore = button("quiet", `Restore “${chat.title}”`, () => this.handlers.restore(chat.id), "Restore");
    const erase = button("quiet danger", `Erase “${chat.title}” for good`, () => this.erase(chat), "Erase");
    item.append(element("span", "chat-title", chat.title), restore, erase);
    return item;
  }

  rename(item, chat) {
    const form = element("form", "rename");
    const field = element("input", "");
    field.value = chat.title;
    field.setAttribute("aria-label", "Name of the chat");
    form.append(field);
    let isOver = false;
    const finish = async (title) => {
      if (isOver) {
        return;
      }
      isOver = true;
      form.remove();
      if (title && title !== chat.title) {
        await this.handlers.rename(chat.id, title);
      }
      await this.refresh();
      const again = [...byId("chat-list").children].find((node) => node.dataset.id === chat.id);
      again?.querySelector(".rename-chat").focus();
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      finish(field.value.trim());
    });
    field.addEventListener("blur", () => finish(field.value.trim()));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.preventDefault(); // the list stays open
        event.stopPropagation();
        finish("");
      }
    });
    item.replaceChildren(form);
    field.focus();
    field.select();
  }

  async remove(chat) {
    await this.handlers.remove(chat.id);
    this.say(`“${chat.title}” was deleted.`, { id: chat.id, run: () => this.handlers.restore(chat.id) });
    byId("undo-delete").focus();
  }

  /** Takes a chat away for good; until this list is closed that can be undone too. */
  async erase(chat) {
    const run = await this.handlers.erase(chat.id);
    if (run) {
      this.say(`“${chat.title}” was erased.`, { id: chat.id, run });
      byId("undo-delete").focus();
    }
  }

  async undo() {
    const { id, run } = this.undoable;
    this.say("", null);
    await run();
    await this.refresh();
    const again = [...this.dialog.querySelectorAll("li")].find((node) => node.dataset.id === id);
    again?.querySelector("button").focus();
  }

  /** Says what was done; `undoable`: null, or the chat's id and what takes it back. */
  say(text, undoable) {
    this.undoable = undoable;
    byId("chats-said").textContent = text;
    byId("undo-delete").hidden = undoable === null;
    byId("chats-status").classList.toggle("empty", !text);
  }
}
