// One panel of the page: a curve for each name, a legend, the same as a table, and both as files.

import { csv, png } from "./chart_files.js";
import { make, setText } from "./dom.js";
import { decimals, figure } from "./format.js";
import { aligned, AXES, over, smoothed } from "./series.js";
import { colour, onTheme } from "./theme.js";

const COLOURS = 12, HEIGHT = 186, RATIO = 0.45, MOST_TABLE_ROWS = 20;
const sizeAt = width => ({ width, height: Math.max(HEIGHT, Math.round(RATIO * width)) });

export class Chart {
  // range: of the values, if fixed, or a function of the plot, their minimum and maximum; scale: from bytes to what the title says.
  constructor(parent, id, title, { range = null, scale = 1, digits = 3 } = {}) {
    Object.assign(this, { title, range, scale, digits, lines: [], data: [[]], axis: "time", weight: 0, names: "", plot: null });
    this.hidden = new Set();
    this.canvas = make("div", { class: "chart", role: "img", hidden: true });
    this.empty = make("p", { class: "empty" });
    this.note = make("p", { class: "note", hidden: true });
    this.legend = make("ul", { class: "legend", hidden: true });
    this.head = make("thead");
    this.body = make("tbody");
    const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `${title}, table` },
                        make("table", {}, this.head, this.body));
    this.table = make("details", { hidden: true, ontoggle: () => this.fillTable() }, make("summary", {}, "Table"), scroll);
    const button = (name, action) => make("button", { type: "button", "aria-label": `${title} as ${name}`, onclick: action }, name);
    this.files = make("span", { hidden: true }, button("CSV", () => csv(this)), button("PNG", () => png(this)));
    parent.append(make("section", { id }, make("div", { class: "head" }, make("h2", {}, title), this.files),
                       this.canvas, this.empty, this.note, this.legend, this.table));
    new ResizeObserver(() => this.fit()).observe(this.canvas);
    onTheme(() => this.plot && this.plot.redraw());
  }

  // lines: [{name, points: [[seconds, value], ...], axes, dashed}]; why: what to say if there is nothing to draw; how: what
  // to know about the values.
  show(lines, axis, weight, why, how = "") {
    const known = lines.map(line => ({ ...line, points: over(axis, line.axes, line.name, line.points) }))
                       .filter(line => line.points.length);
    for (const part of [this.canvas, this.legend, this.table, this.files]) part.hidden = !known.length;
    this.empty.hidden = known.length > 0;
    setText(this.empty, why);
    const smooth = weight ? `Smoothed: exponential moving average, weight ${weight.toFixed(2)}. Faint: without.` : "";
    const note = [how, smooth].filter(Boolean).join(" ");
    this.note.hidden = !known.length || !note;
    setText(this.note, note);
    if (!known.length) return;
    const names = JSON.stringify([known.map(line => [line.name, isPoint(line)]), axis, weight > 0]);
    const [xs, ...rows] = aligned(known);
    const scaled = rows.map(row => row.map(value => value == null ? null : value * this.scale));
    Object.assign(this, { lines: known, axis, weight, data: [xs, ...scaled] });
    this.shown = weight ? scaled.map(row => smoothed(row, weight)) : scaled;
    if (names !== this.names) this.rebuild(names);
    this.plot.setData([xs, ...(weight ? scaled : []), ...this.shown]);
    this.setLegend(null);
    this.fillTable();
  }

  rebuild(names) {
    if (this.plot) this.plot.destroy();
    this.names = names;
    const kinds = this.weight ? ["raw", "shown"] : ["shown"];
    const series = kinds.flatMap(kind => this.lines.map((line, index) => ({
      label: line.name, spanGaps: true, show: !this.hidden.has(line.name), alpha: kind === "raw" ? 0.25 : 1,
      width: kind === "raw" ? 1 : 1.5, stroke: () => colour(`curve-${index % COLOURS}`),
      dash: line.dashed || index >= COLOURS ? [6, 4] : [],
      points: kind === "raw" && this.weight ? { show: false } : isPoint(line) ? { show: true, size: 6 } : { size: 4 },
    })));
    const { title, steps, marks } = AXES[this.axis], axis = { stroke: () => colour("soft"), grid: { stroke: () => colour("grid"), width: 1 },
                                                 ticks: { stroke: () => colour("grid"), width: 1 }, font: "11px system-ui" };
    this.plot = new uPlot({
      ...sizeAt(this.canvas.clientWidth), legend: { show: false }, cursor: { y: false },
      scales: { x: { time: false }, y: this.range ? { range: this.range } : {} },
      axes: [{ ...axis, incrs: steps, values: (_, ticks) => marks(ticks), size: 30, space: 70,
               label: title, labelSize: 16, labelGap: 0, labelFont: "11px system-ui" },
             { ...axis, size: 56, values: (_, ticks) => decimals(ticks) }],
      series: [{}, ...series],
      hooks: { setCursor: [plot => this.setLegend(plot.cursor.idx)] },
    }, [[], ...series.map(() => [])], this.canvas);
    this.items = this.lines.map((line, index) => {
      const mark = make("i"), value = make("span");
      mark.style.background = `var(--curve-${index % COLOURS})`;
      const button = make("button", { type: "button", "aria-pressed": !this.hidden.has(line.name) ? "true" : "false",
                                      onclick: () => this.toggle(index) }, mark, `${line.name} `, value);
      return { button, value };
    });
    this.legend.replaceChildren(...this.items.map(item => make("li", {}, item.button)));
  }

  // The values under the cursor, else the newest ones.
  setLegend(index) {
    const texts = this.shown.map(row => {
      const known = index == null ? lastOf(row, row.length - 1) : row[index];
      return figure(known, this.digits);
    });
    this.items.forEach((item, place) => setText(item.value, texts[place]));
    if (index == null) {
      const said = this.lines.slice(0, COLOURS).map((line, place) => `${line.name} ${texts[place]}`).join(", ");
      this.canvas.setAttribute("aria-label", `${this.title} over ${AXES[this.axis].title}, newest values: ${said}`);
    }
  }

  toggle(index) {
    const { name } = this.lines[index], shows = this.hidden.has(name);
    if (shows) this.hidden.delete(name); else this.hidden.add(name);
    this.items[index].button.setAttribute("aria-pressed", shows);
    for (let place = index + 1; place < this.plot.series.length; place += this.lines.length) {
      this.plot.setSeries(place, { show: shows });
    }
  }

  // Some 20 rows, evenly picked, the newest one among them, each with the newest values until then.
  fillTable() {
    if (!this.table.open || this.table.hidden) return;
    const [xs, ...rows] = this.data, each = Math.ceil(xs.length / MOST_TABLE_ROWS);
    const picked = [...xs.keys()].filter(index => (xs.length - 1 - index) % each === 0);
    const titles = [AXES[this.axis].title, ...this.lines.map(line => line.name)];
    this.head.replaceChildren(make("tr", {}, ...titles.map(title => make("th", { scope: "col" }, title))));
    this.body.replaceChildren(...picked.map(index => make("tr", {}, make("td", {}, AXES[this.axis].text(xs[index])),
      ...rows.map(row => make("td", {}, figure(lastOf(row, index), this.digits))))));
  }

  fit() {
    const width = this.canvas.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize(sizeAt(width));
  }
}

// A curve of one point is seen only if that is marked.
function isPoint(line) {
  return line.points.length === 1;
}

function lastOf(row, index) {
  while (index >= 0 && row[index] == null) index--;
  return row[index];
}
