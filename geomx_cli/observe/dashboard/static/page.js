// Asks the dashboard for what is known once a second, while the page is seen, and shows it.

import { ask } from "./api.js";
import { Charts } from "./charts.js";
import { Compare } from "./compare.js";
import { get, setText } from "./dom.js";
import { clock, whole } from "./format.js";
import { showHosts } from "./hosts.js";
import { setUpLog } from "./log.js";
import { PartyMap } from "./map.js";
import { showMessages } from "./messages.js";
import { showOptions } from "./options.js";
import { Processes } from "./processes.js";

const EVERY = 1000, EVERY_WHEN_OVER = 5000, EVERY_WHEN_LOST = 2000;
const charts = new Charts(), map = new PartyMap(), processes = new Processes(), compare = new Compare(() => turn());
let newest = null, facts = null, timer = 0, turns = 0;

async function turn() {
  clearTimeout(timer);
  const mine = ++turns;  // an earlier answer that comes late is not shown
  let wait = EVERY_WHEN_LOST, known = null;
  try {
    if (!facts) setUp(await ask("/job"));
    known = await ask("/data", compare.chosen.length ? { with: compare.chosen.join(",") } : {});
    trouble("");
    wait = known.over ? EVERY_WHEN_OVER : EVERY;
  } catch (error) {
    trouble(`no connection to geomx dashboard (${error.message}); trying again`);
  }
  if (mine !== turns) return;
  if (!document.hidden) timer = setTimeout(turn, wait);
  if (known) show(newest = known);
}

function setUp(found) {
  facts = found;
  setText(get("network"), facts.network);
  get("network").hidden = !facts.network;
  showOptions(facts);
  setUpLog(facts.processes);
}

function show(known) {
  document.title = `geomx ${known.job}`;
  setText(get("job"), known.job);
  setText(get("summary"), summary(known));
  setText(get("cause"), known.cause);
  get("cause").hidden = !known.cause;
  map.show(known);
  processes.show(known);
  showHosts(known.hosts, facts.hosts.length, known.over);
  showMessages(known.messages);
  compare.show(known.others);
  drawCharts(known);
  document.body.dataset.state = known.state;
}

function drawCharts(known) {
  const weight = Number(get("smoothing").value), axis = document.querySelector("#axis input:checked").value;
  get("steps").hidden = !Object.values(known.axes.steps).some(points => points.length);
  setText(get("smoothed"), weight ? weight.toFixed(2) : "off");
  charts.show({ ...known, script: facts.script, trained: known.totals.trained }, axis, weight);
}

function summary(known) {
  const { samples_per_s: speed, progress, left_s: left, processes: count } = known.totals;
  const curve = Object.values(known.curves.accuracy)[0] || [];
  const parts = [known.what, known.state, clock(known.seconds)];
  if (count > 100) parts.push(`${whole(count)} processes`);
  if (progress) parts.push(`${Math.round(100 * progress)} % done`);
  if (left && !known.over) parts.push(`${clock(left)} left`);
  if (speed && !known.over) parts.push(`${whole(speed)} samples/s`);
  if (curve.length) parts.push(`test accuracy ${curve[curve.length - 1][1].toFixed(4)}`);
  for (const [option, [before, after]] of Object.entries(known.encoded))
    if (after) parts.push(`${option} ${(before / after).toFixed(1)} ×`);
  return parts.filter(Boolean).join(" · ");
}

function trouble(text) {
  setText(get("trouble"), text);
  get("trouble").hidden = !text;
}

get("axis").addEventListener("change", () => newest && drawCharts(newest));
get("smoothing").addEventListener("input", () => newest && drawCharts(newest));
document.addEventListener("visibilitychange", () => document.hidden || turn());
turn();
