// A chart as a file: all its values as CSV, or what is seen as PNG.

import { make, save } from "./dom.js";
import { AXES } from "./series.js";
import { colour } from "./theme.js";

// Values without smoothing, also if the page shows them smoothed.
export function csv(chart) {
  const [xs, ...rows] = chart.data, titles = [AXES[chart.axis].title, ...chart.lines.map(line => line.name)];
  const lines = [titles.map(quoted), ...xs.map((x, index) => [x, ...rows.map(row => row[index] ?? "")])];
  save(`${fileName(chart)}.csv`, new Blob([lines.map(line => line.join(",")).join("\r\n") + "\r\n"], { type: "text/csv" }));
}

export function png(chart) {
  const seen = chart.plot.ctx.canvas, ratio = devicePixelRatio, pad = 12 * ratio, step = 16 * ratio;
  const canvas = make("canvas"), context = canvas.getContext("2d"), font = `${12 * ratio}px system-ui`;
  context.font = font;
  const entries = chart.lines.map((line, index) => ({ name: line.name, index })).filter(entry => !chart.hidden.has(entry.name));
  const wide = Math.max(0, ...entries.map(entry => context.measureText(entry.name).width)) + 34 * ratio;
  const columns = Math.max(1, Math.floor(seen.width / wide));
  canvas.width = seen.width + 2 * pad;
  canvas.height = seen.height + 2 * pad + 2 * step + Math.ceil(entries.length / columns) * step;
  context.fillStyle = colour("card");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.font = font;
  context.fillStyle = colour("ink");
  const how = chart.weight ? `, smoothed (moving average, weight ${chart.weight.toFixed(2)})` : "";
  context.fillText(`${chart.title} over ${AXES[chart.axis].title}${how}`, pad, pad + step * 0.7);
  context.drawImage(seen, pad, pad + step);
  entries.forEach((entry, place) => {
    const x = pad + (place % columns) * wide, y = pad + seen.height + step * (2 + Math.floor(place / columns));
    context.fillStyle = colour(`curve-${entry.index % 12}`);
    context.fillRect(x, y - 5 * ratio, 16 * ratio, 3 * ratio);
    context.fillStyle = colour("ink");
    context.fillText(entry.name, x + 22 * ratio, y);
  });
  canvas.toBlob(blob => save(`${fileName(chart)}.png`, blob), "image/png");
}

// A name that a spreadsheet would take for a formula is marked as text.
export function quoted(name) {
  const safe = /^[=+\-@\t\r]/.test(name) ? `'${name}` : name;
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function fileName(chart) {
  return `${document.title}-${chart.title}`.replace(/[^A-Za-z0-9]+/g, "-").toLowerCase();
}
