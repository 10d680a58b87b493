// The log viewer: the end of a log, or the lines that contain a text. Read from the hosts only when asked for.

import { ask } from "./api.js";
import { get, make, setText } from "./dom.js";

const EVERY = 5000, MOST_PROCESSES = 100;
let reading = false, again = false;

export function setUpLog(processes) {
  const names = processes.map(name => make("option", { value: name }, name));
  if (processes.length <= MOST_PROCESSES) names.unshift(make("option", { value: "" }, "all"));
  get("log-process").replaceChildren(...names);
  get("log-process").addEventListener("change", read);
  get("log").addEventListener("toggle", () => get("log").open && read());
  get("log").querySelector("form").addEventListener("submit", event => { event.preventDefault(); read(); });
  setInterval(() => get("log").open && get("log-follow").checked && !document.hidden && !reading && read(), EVERY);
}

async function read() {
  again = reading;  // something else was chosen meanwhile
  if (reading) return;
  reading = true;
  do {
    again = false;
    await readOnce();
  } while (again);
  reading = false;
}

async function readOnce() {
  const process = get("log-process").value, search = get("log-search").value;
  setText(get("log-status"), "reading …");
  try {
    const found = await ask("/log", { process, search });
    setText(get("log-status"), status(found, search));
    show(found.lines, process, search);
  } catch (error) {
    setText(get("log-status"), error.message);
  }
}

function status(found, search) {
  const shown = found.lines.length, what = search ? `${found.matched} of the last ${found.searched} lines contain “${search}”` : `the last ${shown} lines`;
  const cut = search && shown < found.matched ? `; the last ${shown} of them are shown` : "";
  return [found.searched ? what + cut : "the log is empty", ...found.problems].join("; ");
}

function show(lines, process, search) {
  const element = get("log-lines"), atEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - 20;
  element.hidden = !lines.length;
  element.replaceChildren(...lines.flatMap(([name, text]) =>
    [...(process ? [] : [make("b", {}, `${name}  `)]), ...marked(text, search), "\n"]));
  if (atEnd || search === "") element.scrollTop = element.scrollHeight;
}

// The text with what was searched for marked.
function marked(text, search) {
  if (!search) return [text];
  const parts = [], low = text.toLowerCase(), wanted = search.toLowerCase();
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0 && low.length === text.length; at = low.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), make("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}
