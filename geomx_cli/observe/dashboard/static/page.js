"use strict";
// Asks the dashboard for what is known once a second, and shows it. What comes is only ever put into text nodes.

const EVERY = 1000, EVERY_WHEN_OVER = 5000, EVERY_WHEN_LOST = 2000;
const token = new URLSearchParams(location.search).get("token") || "";
const get = id => document.getElementById(id);

const charts = {
  accuracy: new Chart("accuracy", { range: [0, 1], digits: 4 }),
  loss: new Chart("loss"),
  speed: new Chart("speed"),
  waiting: new Chart("waiting", { range: [0, 1] }),
  wan: new Chart("wan", { scale: 1e-6 }),
};
const map = new PartyMap("map");

async function turn() {
  let wait = EVERY_WHEN_LOST, known = null;
  try {
    const answer = await fetch(`/data?token=${encodeURIComponent(token)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(`it answers ${answer.status}`);
    known = await answer.json();
    trouble("");
    wait = known.over ? EVERY_WHEN_OVER : EVERY;
  } catch (error) {
    trouble(`no connection to geomx dashboard (${error.message}); trying again`);
  }
  setTimeout(turn, wait);
  if (known) show(known);
}

function show(known) {
  document.title = `geomx ${known.job}`;
  get("job").textContent = known.job;
  get("summary").textContent = summary(known);
  get("cause").textContent = known.cause;
  get("cause").hidden = !known.cause;
  for (const [name, chart] of Object.entries(charts)) chart.show(known.curves[name]);
  map.show(known.processes, known.links);
  get("processes").tBodies[0].replaceChildren(...known.processes.map(row));
  get("messages").replaceChildren(...messages(known.messages));
  document.body.dataset.state = known.state;
}

function summary(known) {
  const workers = known.processes.filter(process => process.trains);
  const speed = workers.filter(one => one.state === "training").reduce((sum, one) => sum + (one.samples_per_s || 0), 0);
  const done = workers.length ? workers.reduce((sum, one) => sum + (one.progress || 0), 0) / workers.length : 0;
  const left = Math.max(0, ...workers.map(one => one.left_s || 0));
  const curve = Object.values(known.curves.accuracy)[0] || [];
  const parts = [known.what, known.state, clock(known.seconds)];
  if (done) parts.push(`${Math.round(100 * done)} % done`);
  if (left && !known.over) parts.push(`${clock(left)} left`);
  if (speed && !known.over) parts.push(`${Math.round(speed)} samples/s`);
  if (curve.length) parts.push(`test accuracy ${curve[curve.length - 1][1].toFixed(4)}`);
  for (const [option, [before, after]] of Object.entries(known.encoded))
    if (after) parts.push(`${option} ${(before / after).toFixed(1)} ×`);
  return parts.filter(Boolean).join(" · ");
}

function row(process) {
  const part = number => number == null ? "" : `${Math.round(100 * number)} %`;
  const cells = [process.name, process.host, process.state, process.round ?? "",
                 process.samples_per_s == null ? "" : Math.round(process.samples_per_s), part(process.waiting),
                 process.loss == null ? (process.loss === null ? "nan" : "") : process.loss.toPrecision(4),
                 process.wan[0] || process.wan[1] ? `${size(process.wan[0])} / ${size(process.wan[1])}` : ""];
  const line = document.createElement("tr");
  line.append(...cells.map((text, index) => {
    const cell = document.createElement("td");
    cell.textContent = text;
    if (index === 2 && ["failed", "lost"].includes(process.state)) cell.className = "failed";
    return cell;
  }));
  return line;
}

function messages(list) {
  if (!list.length) {
    const none = document.createElement("li");
    none.className = "none";
    none.textContent = "none";
    return [none];
  }
  return [...list].reverse().map(message => {
    const item = document.createElement("li"), when = document.createElement("span");
    when.className = "when";
    when.textContent = clock(message.seconds);
    item.append(when, [message.process, message.text].filter(Boolean).join(": "));
    if (message.kind === "failed") item.classList.add("failed");
    return item;
  });
}

function trouble(text) {
  get("trouble").textContent = text;
  get("trouble").hidden = !text;
}

turn();
