// Warnings and failures, newest first.

import { get, make } from "./dom.js";
import { clock } from "./format.js";

let shown = "";

export function showMessages(list) {
  const now = JSON.stringify([list.length, list[0], list[list.length - 1]]);
  if (now === shown) return;
  shown = now;
  const items = [...list].reverse().map(message => make("li", { class: message.kind === "failed" ? "failed" : "" },
    make("span", { class: "when" }, clock(message.seconds)), [message.process, message.text].filter(Boolean).join(": ")));
  get("messages").replaceChildren(...(items.length ? items : [make("li", { class: "none" }, "no process has reported one")]));
}
