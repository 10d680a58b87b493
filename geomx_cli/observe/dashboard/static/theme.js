// Light or dark: as the system, or as chosen in this browser.

import { get } from "./dom.js";

const KEY = "geomx-theme";
const known = new Map();
const listeners = [];
const probe = document.createElement("span");

// A colour of page.css as canvases need it.
export function colour(name) {
  if (!known.has(name)) {
    probe.style.color = `var(--${name})`;
    known.set(name, getComputedStyle(probe).color);
  }
  return known.get(name);
}

export function onTheme(listener) {
  listeners.push(listener);
}

function changed() {
  known.clear();
  for (const listener of listeners) listener();
}

function stored() {
  try { return localStorage.getItem(KEY); } catch { return null; }
}

function choose(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem(KEY, theme); } catch { /* private window */ }
  changed();
}

probe.hidden = true;
document.body.append(probe);
get("theme").value = ["light", "dark"].includes(stored()) ? stored() : "auto";
document.documentElement.dataset.theme = get("theme").value;
get("theme").addEventListener("change", event => choose(event.target.value));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
