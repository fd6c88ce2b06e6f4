// A worker that colours code: highlight.js may take time that grows with the square of a text's length, and the page
// reacts meanwhile.

import highlighter from "./vendor/highlight.min.js";

addEventListener("message", ({ data: { code, language } }) => {
  const isKnown = Boolean(highlighter.getLanguage(language));
  postMessage(isKnown ? highlighter.highlight(code, { language, ignoreIllegals: true }).value : null);
});
postMessage("ready");
