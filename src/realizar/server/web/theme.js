// Runs before the page is painted, so that it never shows in the wrong colours first.
"use strict";
try {
  const theme = localStorage.getItem("realizar.theme");
  if (theme === "light" || theme === "dark") {
    document.documentElement.dataset.theme = theme;
  }
} catch {
  // Storage is turned off: the system's theme it is.
}
