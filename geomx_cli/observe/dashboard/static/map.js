"use strict";
// The parties of the job, the processes of each, and what goes between them now.

const SPACE = "http://www.w3.org/2000/svg";
const STATES = { starting: "#B0B7BF", waiting: "#E69F00", training: "#0072B2", evaluating: "#56B4E9",
                 serving: "#009E73", finished: "#5b6570", ended: "#5b6570", stopped: "#5b6570", failed: "#b3261e", lost: "#b3261e" };
const KEY = "W worker · S server · G root · C, K schedulers";
const SHORT = { worker: "W", server: "S", scheduler: "C", global_server: "G", global_scheduler: "K" };

class PartyMap {
  constructor(id) {
    this.svg = document.getElementById(id);
  }

  show(processes, links) {
    const parties = [...new Set(processes.map(process => process.party))];
    // Drawn as wide as the boxes of a row need, and then scaled to the page.
    const row = Math.ceil((parties.length - 1) / (parties.length > 7 ? 2 : 1));
    const shown = this.svg.clientWidth || 400, width = Math.max(shown, row * 130);
    const height = (this.svg.clientHeight || 230) * width / shown;
    const places = placed(parties, width, height);
    const drawn = [];
    const pairs = new Map();
    for (const link of links) {
      const key = [link.from, link.to].sort().join("\n");
      pairs.set(key, [...(pairs.get(key) || []), link]);
    }
    for (const both of pairs.values()) drawn.push(...wire(both, places));
    for (const party of parties) {
      drawn.push(...box(party, places.get(party), processes.filter(process => process.party === party)));
    }
    drawn.push(element("text", { class: "rate", x: 2, y: height - 3 }, KEY));
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...drawn);
  }
}

// The first party, which is the central one where there is one, above; the others in a row below, or two.
function placed(parties, width, height) {
  const places = new Map(), [first, ...others] = parties;
  places.set(first, { x: width / 2, y: 34 });
  const rows = others.length > 6 ? 2 : 1, each = Math.ceil(others.length / rows);
  others.forEach((party, index) => {
    const row = Math.floor(index / each), inRow = Math.min(each, others.length - row * each);
    const y = rows === 1 ? height - 52 : height - 104 + row * 62;
    places.set(party, { x: width * (index % each + 0.5) / inRow, y });
  });
  return places;
}

function box(party, place, processes) {
  const width = Math.max(96, Math.min(processes.length, 8) * 20 + 16), rows = Math.ceil(processes.length / 8);
  const height = 26 + rows * 20, left = place.x - width / 2, top = place.y - height / 2;
  const items = [element("rect", { class: "party", x: left, y: top, width, height, rx: 6 }),
                 element("text", { class: "name", x: left + 8, y: top + 15 }, party)];
  processes.forEach((process, index) => {
    const x = left + 18 + (index % 8) * 20, y = top + 30 + Math.floor(index / 8) * 20;
    const dot = element("circle", { cx: x, cy: y, r: 8, fill: STATES[process.state] || "#B0B7BF" });
    dot.append(element("title", {}, `${process.name}: ${process.state}`));
    const letter = element("text", { x, y: y + 4, "text-anchor": "middle" }, SHORT[process.role] || "?");
    letter.style.fill = "#fff";
    letter.style.pointerEvents = "none";
    items.push(dot, letter);
  });
  return items;
}

function wire(links, places) {
  const [first] = links, from = places.get(first.from), to = places.get(first.to);
  if (!from || !to) return [];
  const rate = links.reduce((sum, link) => sum + link.bytes_per_s, 0);
  const line = element("line", { class: "wire", x1: from.x, y1: from.y, x2: to.x, y2: to.y });
  line.style.strokeWidth = 1 + Math.min(7, Math.log10(1 + rate / 1e3));
  // Above the lower box, where those of several parties are apart; an arrow points where it goes on the page.
  const low = from.y <= to.y ? to : from, level = from.y === to.y;
  const at = { x: level ? (from.x + to.x) / 2 : low.x, y: low.y - (level ? 38 : 26) };
  const texts = links.map((link, index) => {
    const end = places.get(link.to), start = places.get(link.from);
    const arrow = end.y > start.y ? "↓" : end.y < start.y ? "↑" : end.x > start.x ? "→" : "←";
    const text = element("text", { class: "rate", x: at.x, y: at.y + (index - 1) * 13, "text-anchor": "middle" },
      `${arrow} ${size(link.bytes_per_s)}/s · ${size(link.bytes)}`);
    text.append(element("title", {}, `${link.from} to ${link.to}`));
    return text;
  });
  return [line, ...texts];
}

function element(name, attributes, text = "") {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

// Bytes as in "1.2 MB".
function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let value = bytes, unit = 0;
  while (value >= 1000 && unit < units.length - 1) [value, unit] = [value / 1000, unit + 1];
  return `${unit ? value.toPrecision(3) : Math.round(value)} ${units[unit]}`;
}
