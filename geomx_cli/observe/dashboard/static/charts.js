// The charts of the page: which there are, what they draw, and why one is empty.

import { Chart } from "./chart.js";
import { get } from "./dom.js";

const MOST_LINES = 12;
const KINDS = [
  ["accuracy", "Test accuracy", { range: within, digits: 4 }],
  ["loss", "Loss", {}],
  ["speed", "Samples per second", { digits: 4 }],
  ["waiting", "Part of the time spent waiting", { range: [0, 1], digits: 2 }],
  ["wan", "Sent to other parties, MB per second", { scale: 1e-6 }],
];

const MEANS = "Means over workers and time; the newest of their newest values.";
const NOT_FINITE = "Numbers that are not finite are not drawn.";
const UNKNOWN = {
  bytes: "Nothing was sent between parties yet: choose time or rounds.",
  rounds: "No round is known: choose time.",
  steps: "The script has reported no step: choose time.",
};

export class Charts {
  constructor() {
    this.charts = new Map(KINDS.map(([name, title, style]) => [name, new Chart(get("charts"), name, title, style)]));
    this.metrics = new Map();
  }

  show(known, axis, weight) {
    for (const [name, chart] of this.charts) chart.show(lines(known, name), axis, weight, why(known, name, axis), how(known, name));
    // A language model has no accuracy.
    get("accuracy").hidden = "validation_loss" in (known.metrics || {}) && !lines(known, "accuracy").length;
    this.showMetrics(known, axis, weight);
  }

  // The validation loss, and what scripts report of their own: {metric: {process: [[seconds, value], ...]}}.
  showMetrics(known, axis, weight) {
    for (const [metric, processes] of Object.entries(known.metrics || {})) {
      if (!this.metrics.has(metric)) {
        this.metrics.set(metric, new Chart(get("charts"), `metric-${this.metrics.size}`, metric, { digits: 4 }));
      }
      const found = Object.entries(processes).slice(0, MOST_LINES).map(([name, points]) => ({ name, points, axes: known.axes }));
      const allFinite = !lacks(known, "metrics", metric);
      const how = [allFinite ? "" : NOT_FINITE, known.averaged ? MEANS : ""].filter(Boolean).join(" ");
      const nothing = allFinite ? "The script has not reported it yet." : NOT_FINITE;
      this.metrics.get(metric).show(found, axis, weight, UNKNOWN[axis] || nothing, how);
    }
  }
}

// This job's curves; beside other jobs one for each job.
function lines(known, name) {
  const others = Object.entries(known.others).filter(([, other]) => other.curves);
  if (!others.length) {
    return Object.entries(known.curves[name]).map(([group, points]) => ({ name: group, points, axes: known.axes }));
  }
  const jobs = [[known.job, known.overall], ...others];
  const label = job => [job === known.job ? `${job} (this job)` : job, known.labels[job]].filter(Boolean).join(": ");
  return jobs.flatMap(([job, { curves, axes }]) => Object.values(curves[name]).map(points => ({ name: label(job), points, axes, dashed: job in known.others })));
}

// The range of values between 0 and 1, with some room.
function within(_, low, high) {
  if (low == null) return [0, 1];
  const room = Math.max(0.05 * (high - low), 0.002);
  return [Math.max(0, low - room), Math.min(1, high + room)];
}

// Which values are none that a worker has measured.
function how(known, name) {
  return [lacks(known, "curves", name) ? NOT_FINITE : "", averages(known, name)].filter(Boolean).join(" ");
}

// Whether values of a curve or a metric are not drawn, as they are NaN or infinite.
function lacks(known, kind, name) {
  return Boolean(known.not_finite) && known.not_finite[kind].includes(name);
}

function averages(known, name) {
  if (name === "wan") return "Means over each second or longer, of all processes: from the job's start, before workers train, to its end.";
  const others = Object.values(known.others).filter(other => other.curves);
  const averaged = others.length ? [known.overall, ...others].some(one => one.averaged) : known.averaged;
  if (!averaged || !["loss", "waiting", "speed"].includes(name)) return "";
  return name === "speed" ? "Sums over workers, of means over time." : MEANS;
}

function why(known, name, axis) {
  const ended = known.over, script = known.script;
  if (name === "wan" && known.parties.length < 2) return "There is one party: nothing is sent to others.";
  if (Object.keys(known.curves[name]).length) {
    return UNKNOWN[axis];
  }
  if (lacks(known, "curves", name)) return NOT_FINITE;
  if (known.state === "orphaned" || !known.seconds) return "No event of the job has arrived yet.";
  if (name === "wan") return ended ? "Nothing was sent to other parties." : "Nothing has been sent to other parties yet.";
  if (!known.trained && !ended) return "Training has not begun: see the states of the processes.";
  if (name === "accuracy" && script) return "The script has reported no accuracy.";
  if (name === "accuracy") return ended ? "The job ended before its first evaluation." : "The first evaluation is yet to come (--eval-every).";
  if (name === "waiting" && script) return "For how long a script waits is not known.";
  if (name === "loss" && script) return "The script has reported no loss.";
  return ended ? "The job ended before a worker reported any." : "No worker has reported any yet.";
}
