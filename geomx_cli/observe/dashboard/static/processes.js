// The table of processes by party. Of a job of very many, a party's are asked for when it is opened, 100 at a time.

import { ask } from "./api.js";
import { get, make, setText } from "./dom.js";
import { percent, size, whole } from "./format.js";

const PAGE = 100, EVERY = 3000;
const COLUMNS = 8;

export class Processes {
  constructor() {
    this.table = get("processes");
    this.groups = new Map();
  }

  show(known) {
    const complete = known.processes.length === known.totals.processes;
    for (const party of known.parties) {
      if (!this.groups.has(party.name)) this.groups.set(party.name, new Group(this.table, complete || party.count === 0));
      const own = known.processes.filter(process => process.party === party.name);
      this.groups.get(party.name).show(party, own, complete);
    }
  }
}

class Group {
  constructor(table, opened) {
    this.opened = opened;
    this.first = 0;
    this.asked = 0;
    this.button = make("button", { type: "button", "aria-expanded": opened ? "true" : "false", onclick: () => this.toggle() });
    this.cells = Array.from({ length: COLUMNS - 1 }, () => make("td"));
    this.body = make("tbody", {}, make("tr", { class: "party" }, make("th", { scope: "rowgroup" }, this.button), ...this.cells));
    table.append(this.body);
  }

  show(party, processes, complete) {
    Object.assign(this, { party, processes, complete });
    setText(this.button, `${this.opened ? "▾" : "▸"} ${party.name}`);
    const states = new Map();
    for (const [, state, count] of party.groups) states.set(state, (states.get(state) || 0) + count);
    const said = [...states].sort((a, b) => b[1] - a[1]).map(([state, count]) => `${count} ${state}`).join(", ");
    const texts = [party.hosts === 1 ? "1 host" : `${party.hosts} hosts`, said, party.round || "", party.samples_per_s ? whole(party.samples_per_s) : "",
                   percent(party.waiting), party.loss == null ? "" : party.loss.toPrecision(4), traffic(party.wan)];
    this.cells.forEach((cell, index) => setText(cell, String(texts[index])));
    this.cells[1].className = states.has("failed") || states.has("lost") ? "failed" : "";
    if (complete) this.fill(this.opened ? processes : [], party.count);
    else if (!this.opened) this.fill(processes, processes.length);  // the failed and lost ones
    else this.load();
  }

  async load() {
    if (this.party.others || Date.now() - this.asked < EVERY) return;
    this.asked = Date.now();
    try {
      const found = await ask("/rows", { party: this.party.name, first: this.first });
      if (this.opened && found.first === this.first) this.fill(found.rows, found.count);
    } catch { /* the page says that there is no connection */ }
  }

  fill(processes, count) {
    const rows = processes.map(row);
    if (count > PAGE) rows.push(this.pages(count));
    while (this.body.rows.length > 1) this.body.rows[1].remove();
    this.body.append(...rows);
  }

  pages(count) {
    const last = Math.min(count, this.first + PAGE);
    const go = (text, first, possible) => make("button", { type: "button", disabled: !possible, onclick: () => this.turn(first) }, text);
    return make("tr", { class: "pages" }, make("td", { colspan: COLUMNS }, `${this.first + 1} to ${last} of ${count} `,
      go("previous", this.first - PAGE, this.first > 0), go("next", this.first + PAGE, last < count)));
  }

  turn(first) {
    this.first = first;
    this.asked = 0;
    this.load();
  }

  toggle() {
    this.opened = !this.opened;
    this.asked = 0;
    this.button.setAttribute("aria-expanded", this.opened);
    this.show(this.party, this.processes, this.complete);
  }
}

function row(process) {
  const loss = process.loss === null ? "nan" : process.loss == null ? "" : process.loss.toPrecision(4);
  const texts = [process.name, process.host, process.state, process.round || "", whole(process.samples_per_s),
                 percent(process.waiting), loss, traffic(process.wan)];
  const cells = texts.map(text => make("td", {}, String(text)));
  if (["failed", "lost"].includes(process.state)) cells[2].className = "failed";
  return make("tr", { class: "process" }, ...cells);
}

const traffic = ([sent, received]) => sent || received ? `${size(sent)} / ${size(received)}` : "";
