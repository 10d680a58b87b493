"use strict";
// The curves of the page: one uPlot chart for each, redrawn when the names of its lines change.

// Okabe and Ito, "Color universal design", 2008, and shades for more lines than that.
const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6BB1",
                 "#7F7F7F", "#A6761D", "#1B9E77", "#666666"];
const HEIGHT = 150;

class Chart {
  constructor(id, { range = null, scale = 1, digits = 3 } = {}) {
    this.element = document.getElementById(id);
    this.range = range;
    this.scale = scale;
    this.digits = digits;
    this.names = [];
    this.plot = null;
    new ResizeObserver(() => this.fit()).observe(this.element);
  }

  // curves: {name: [[seconds, value], ...]}
  show(curves) {
    const names = Object.keys(curves);
    if (!names.length) return;
    const times = [...new Set(names.flatMap(name => curves[name].map(point => point[0])))].sort((a, b) => a - b);
    const place = new Map(times.map((time, index) => [time, index]));
    const rows = names.map(name => {
      const row = new Array(times.length).fill(null);
      for (const [time, value] of curves[name]) row[place.get(time)] = value * this.scale;
      return row;
    });
    if (names.join("\n") !== this.names.join("\n")) this.rebuild(names);
    this.plot.setData([times, ...rows]);
  }

  rebuild(names) {
    if (this.plot) this.plot.destroy();
    this.names = names;
    const value = (_, number) => number == null ? "" : number.toPrecision(this.digits);
    this.plot = new uPlot({
      width: this.element.clientWidth, height: HEIGHT,
      scales: { x: { time: false }, y: this.range ? { range: this.range } : {} },
      axes: [{ values: (_, ticks) => ticks.map(clock), size: 28 }, { size: 48 }],
      series: [{ label: "time", value: (_, seconds) => seconds == null ? "" : clock(seconds) },
               ...names.map((name, index) => ({
                 label: name, stroke: COLOURS[index % COLOURS.length], width: 1.5, spanGaps: true, value,
                 points: { show: true, size: 4 },
               }))],
    }, [[], ...names.map(() => [])], this.element);
  }

  fit() {
    if (this.plot) this.plot.setSize({ width: this.element.clientWidth, height: HEIGHT });
  }
}

// Seconds as in "1:05" or "2:00:05".
function clock(seconds) {
  const whole = Math.round(seconds), two = number => String(number).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return (hours ? `${hours}:${two(minutes)}` : `${minutes}`) + `:${two(whole % 60)}`;
}
