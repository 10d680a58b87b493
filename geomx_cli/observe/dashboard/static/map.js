// The parties of the job, the processes of each, and what goes between them now. The party with the most links is above;
// wires run beside the columns of the others, so that none crosses a box or a rate.

import { get, make, svg } from "./dom.js";
import { size } from "./format.js";

const STATES = ["starting", "waiting", "training", "evaluating", "serving", "saving", "failing", "finished", "ended", "stopped", "failed", "lost"];
const COLOURS = { saving: "serving", failing: "bad", finished: "over", ended: "over", stopped: "over", failed: "bad", lost: "bad" };
const DARK = ["starting", "waiting", "evaluating"];
const LETTERS = { worker: "W", server: "S", scheduler: "C", global_server: "G", global_scheduler: "K" };
const ROLES = { W: "worker", S: "server", G: "global server", C: "scheduler", K: "global scheduler" };
const GUTTER = 26, GAP = 14, BOX = 132, DOT = 20, LETTER = 6.2, SINGLE = 12, MOST_BOXES = 60;

export class PartyMap {
  constructor() {
    this.element = get("map");
    this.known = null;
    new ResizeObserver(() => this.known && this.draw()).observe(this.element);
  }

  show(known) {
    this.known = known;
    get("parties").classList.toggle("many", known.parties.length > 5);
    get("links").hidden = !known.links.length;
    if (get("links").open) get("links").querySelector("tbody").replaceChildren(...known.links.map(link => make("tr", {},
      ...[link.from, link.to, size(link.bytes_per_s), size(link.bytes)].map(text => make("td", {}, text)))));
    this.draw();
  }

  draw() {
    const { parties, processes, links } = this.known, width = this.element.clientWidth;
    if (!width || !parties.length) return;
    const top = hub(parties, links), others = parties.filter(party => party !== top).slice(0, MOST_BOXES);
    const first = box(top, processes), boxes = others.map(party => ({ party, ...box(party, processes) }));
    for (const one of boxes) one.rates = rates(one.party.name, top.name, links);
    const widest = Math.max(BOX, ...boxes.map(one => one.width), ...boxes.flatMap(one => one.rates).map(text => text.length * LETTER));
    const columns = Math.max(1, Math.min(others.length, Math.floor((width - 4 + GAP) / (widest + GUTTER + GAP))));
    const used = columns * (widest + GUTTER + GAP) - GAP, left = Math.max(2, (width - used) / 2);
    const at = Math.max(2, Math.min(width - first.width - 2, (width - first.width) / 2)), bus = first.height + 16;
    const drawn = [placed(first, at, 2)], wires = [], ends = [];
    let y = bus + 10;
    for (let start = 0; start < boxes.length; start += columns) {
      const row = boxes.slice(start, start + columns);
      const lines = Math.max(...row.map(one => one.rates.length));
      row.forEach((one, column) => {
        const x = left + column * (widest + GUTTER + GAP), under = y + lines * 14 + 4, middle = under + one.height / 2;
        one.rates.forEach((text, line) => drawn.push(svg("text", { class: "rate", x: x + GUTTER, y: y + 11 + line * 14 }, text)));
        drawn.push(placed(one, x + GUTTER, under));
        const rate = links.filter(link => joins(link, one.party.name, top.name)).reduce((sum, link) => sum + link.bytes_per_s, 0);
        const total = links.some(link => joins(link, one.party.name, top.name));
        if (!total) return;
        wires.push(svg("polyline", { class: "wire", "stroke-width": thickness(rate), points: `${x + 8},${bus} ${x + 8},${middle} ${x + GUTTER},${middle}` }));
        ends.push(x + 8);
      });
      y += lines * 14 + 4 + Math.max(...row.map(one => one.height)) + GAP;
    }
    if (ends.length) {
      const middle = at + first.width / 2, from = Math.min(middle, ...ends), to = Math.max(middle, ...ends);
      wires.push(svg("polyline", { class: "wire", points: `${middle},${first.height + 2} ${middle},${bus}` }),
                 svg("polyline", { class: "wire", points: `${from},${bus} ${to},${bus}` }));
    }
    const hidden = parties.length - 1 - others.length;
    if (hidden > 0) y = note(drawn, `and ${hidden} more parties: see the processes below`, y);
    const element = svg("svg", { viewBox: `0 0 ${width} ${y}`, height: y, role: "img", "aria-label": described(this.known) }, ...wires, ...drawn);
    this.element.replaceChildren(element, key(parties, boxes.some(one => one.rates.some(text => text.startsWith("↔")))));
  }
}

// The party that most others are linked to; the first one of several.
function hub(parties, links) {
  const linked = new Map(parties.map(party => [party.name, new Set()]));
  for (const link of links) {
    linked.get(link.from)?.add(link.to);
    linked.get(link.to)?.add(link.from);
  }
  return parties.reduce((best, party) => linked.get(party.name).size > linked.get(best.name).size ? party : best);
}

const joins = (link, one, other) => link.from === one && link.to === other || link.from === other && link.to === one;

// What a party sends and receives: to and from the one above, and with all others together.
function rates(party, top, links) {
  const text = (arrow, link) => `${arrow} ${size(link.bytes_per_s)}/s · ${size(link.bytes)}`;
  const found = links.filter(link => joins(link, party, top)).sort((a, b) => (b.from === party) - (a.from === party))
                     .map(link => text(link.from === party ? "↑" : "↓", link));
  const apart = links.filter(link => (link.from === party) !== (link.to === party) && !joins(link, party, top));
  if (apart.length) {
    const sum = field => apart.reduce((sum, link) => sum + link[field], 0);
    found.push(text("↔", { bytes: sum("bytes"), bytes_per_s: sum("bytes_per_s") }));
  }
  return found;
}

// A party's box: a dot for each process, or for very many one for each role and state with their number.
function box(party, processes) {
  const own = processes.filter(process => process.party === party.name), single = party.count <= SINGLE;
  const known = own.length === party.count
    ? own.map(process => [process.role, process.state, process.name])
    : party.groups.flatMap(([role, state, count]) => Array(single ? count : 0).fill([role, state, role]));
  const items = single
    ? known.map(([role, state, name]) => ({ role, state, count: "", title: `${name}: ${state}` }))
    : party.groups.map(([role, state, count]) => ({ role, state, count: `× ${count}`, title: `${count} ${role}: ${state}` }));
  const each = single ? DOT : 62, inRow = single ? 6 : 2, rows = Math.ceil(items.length / inRow);
  const width = Math.max(BOX, Math.min(items.length, inRow) * each + 14), height = 28 + rows * DOT;
  const group = svg("g", {}, svg("rect", { class: "party", width, height, rx: 6 }),
                    svg("text", { class: "name", x: 9, y: 16 }, shortened(party.name)));
  items.forEach((item, index) => {
    const x = 17 + (index % inRow) * each, y = 32 + Math.floor(index / inRow) * DOT;
    const dot = svg("circle", { cx: x, cy: y, r: 8 }, svg("title", {}, item.title));
    dot.style.fill = filling(item.state);
    group.append(dot, svg("text", { class: DARK.includes(item.state) ? "letter dark" : "letter", x, y: y + 4, "text-anchor": "middle" },
                          LETTERS[item.role] || "?"), svg("text", { x: x + 12, y: y + 4 }, item.count));
  });
  return { group, width, height };
}

function placed(one, x, y) {
  one.group.setAttribute("transform", `translate(${x} ${y})`);
  return one.group;
}

function note(drawn, text, y) {
  drawn.push(svg("text", { class: "rate", x: 2, y: y + 12 }, text));
  return y + 16;
}

// What the letters and colours on the map mean.
function key(parties, apart) {
  const roles = new Set(parties.flatMap(party => party.groups.map(([role]) => LETTERS[role])));
  const states = new Set(parties.flatMap(party => party.groups.map(([, state]) => state)));
  const letters = Object.entries(ROLES).filter(([letter]) => roles.has(letter)).map(([letter, role]) => make("li", {}, `${letter} ${role}`));
  if (apart) letters.push(make("li", {}, "↔ with parties other than the one above"));
  return make("ul", { class: "key" }, ...letters, ...STATES.filter(state => states.has(state)).map(state => {
    const dot = make("i");
    dot.style.background = filling(state);
    return make("li", {}, dot, state);
  }));
}

const filling = state => `var(--${COLOURS[state] || (STATES.includes(state) ? state : "starting")})`;

function described({ parties, links }) {
  const rate = links.reduce((sum, link) => sum + link.bytes_per_s, 0);
  return `${parties.length} parties, ${size(rate)} per second between them; the tables say more`;
}

const thickness = rate => 1 + Math.min(4, 0.7 * Math.log10(1 + rate / 1e3));
const shortened = name => name.length > 18 ? `${name.slice(0, 17)}…` : name;
