// Keys that work anywhere on the page; the settings list them.

/** `handlers`: search(), newChat(), write() that goes to the field for messages, editLast() that gives whether it could. */
export function setUpShortcuts(prompt, { search, newChat, write, editLast }) {
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]") || event.isComposing || event.altKey) {
      return;
    }
    const key = event.key.toLowerCase();
    const isCommand = event.ctrlKey || event.metaKey;
    const isTyping = event.target.closest?.("input, textarea, select") !== null;
    let run = null;
    if (isCommand && !event.shiftKey && key === "k") {
      run = search;
    } else if (isCommand && event.shiftKey && key === "o") {
      run = newChat;
    } else if (key === "/" && !isCommand && !isTyping) {
      run = write;
    } else if (key === "arrowup" && event.target === prompt && !prompt.value && !isCommand && !event.shiftKey) {
      run = editLast;
    }
    if (run) {
      event.preventDefault();
      run();
    }
  });
}
