"""The chat page in Chromium. A package, so that its tests share one browser."""
