// Curves as pure data: over another axis, aligned for a chart, smoothed.

import { clock, decimals, size, sizes, whole } from "./format.js";

const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map(digit => digit * 10 ** power)).flat();
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200].concat(WHOLE.map(days => 86400 * days));

// steps: possible distances of marks; marks: their texts, no two of them alike.
export const AXES = {
  time: { title: "time", text: clock, steps: CLOCK, marks: ticks => ticks.map(clock) },
  rounds: { title: "rounds", text: whole, steps: WHOLE, marks: decimals },
  bytes: { title: "bytes between parties", text: bytes => size(bytes), steps: WHOLE, marks: sizes },
  steps: { title: "steps of the script", text: whole, steps: WHOLE, marks: decimals },
};

const ALL = "all workers";

// [[seconds, value], ...] as [[x, value], ...]; x is what had been reached by then, by linear interpolation.
export function over(axis, axes, group, points) {
  if (axis === "time") return points;
  const reached = axis === "bytes" ? axes.bytes : axes[axis][group] || axes[axis][ALL];
  if (!reached.length) return [];
  const places = [[0, 0], ...reached];
  let next = 1;
  return points.map(([seconds, value]) => {
    while (next < places.length - 1 && places[next][0] < seconds) next++;
    const [[begin, low], [end, high]] = [places[next - 1], places[next]];
    const part = end > begin ? Math.min(1, Math.max(0, (seconds - begin) / (end - begin))) : 1;
    return [low + (high - low) * part, value];
  });
}

// Lines of points as [xs, one row of values for each line]; of several values at one x the last.
export function aligned(lines) {
  const xs = [...new Set(lines.flatMap(line => line.points.map(point => point[0])))].sort((a, b) => a - b);
  const place = new Map(xs.map((x, index) => [x, index]));
  return [xs, ...lines.map(line => {
    const row = new Array(xs.length).fill(null);
    for (const [x, value] of line.points) row[place.get(x)] = value;
    return row;
  })];
}

// Exponential moving average with the weight of what was before, without bias to the first value.
export function smoothed(row, weight) {
  let mean = 0, rest = 1;
  return row.map(value => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    rest *= weight;
    return mean / (1 - rest);
  });
}
