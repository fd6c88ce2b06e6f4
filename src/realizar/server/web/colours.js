// Colours of code, by highlight.js, which is fetched when the first code in a named language is shown.

const MAX_LENGTH = 20_000; // characters: a block that grows is coloured at each frame
const CLASS = /^(?:hljs-[a-z_-]+|[a-z]+_)$/;
let highlighter = null;
let loading = null;

/** Fetches highlight.js once; an attempt that failed is made again. Resolves to whether code can be coloured. */
export function loadHighlighter() {
  loading ??= import("./vendor/highlight.min.js").then(
    ({ default: found }) => {
      highlighter = found;
      return true;
    },
    () => {
      loading = null;
      return false;
    },
  );
  return loading;
}

/** Colours an element's text as code of a language, now or when that can be done; text in no known language stays. */
export function colourCode(node, language) {
  if (!language || node.textContent.length > MAX_LENGTH) {
    return;
  }
  if (highlighter) {
    colour(node, language);
  } else {
    loadHighlighter().then((isThere) => isThere && colour(node, language));
  }
}

function colour(node, language) {
  if (!highlighter.getLanguage(language)) {
    return;
  }
  const { value } = highlighter.highlight(node.textContent, { language, ignoreIllegals: true });
  // The markup is read in a document that runs nothing, and only spans with known classes are taken from it.
  const parsed = new DOMParser().parseFromString(`<pre>\n${value}</pre>`, "text/html").body.firstChild;
  node.replaceChildren(...copies(parsed));
}

function copies(parent) {
  return [...parent.childNodes].map((node) => {
    if (node.nodeType !== Node.ELEMENT_NODE) {
      return node.textContent;
    }
    const span = document.createElement("span");
    span.className = [...node.classList].filter((name) => CLASS.test(name)).join(" ");
    span.append(...copies(node));
    return span;
  });
}
