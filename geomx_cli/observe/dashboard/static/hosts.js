// CPU, memory and GPUs of each host. Hosts on one machine, as in a job on one's own, are one row.

import { get, make, setText } from "./dom.js";
import { percent, size } from "./format.js";

export function showHosts(hosts, total, over) {
  setText(get("no-hosts"), hosts.length ? "as last reported before the end" : over ? "no host had reported its use" : "no host has reported its use yet");
  get("no-hosts").hidden = hosts.length > 0 && !over;
  get("hosts").parentElement.hidden = !hosts.length;
  const machines = new Map();
  for (const host of hosts) {
    const key = host.machine || host.name, known = machines.get(key);
    machines.set(key, { newest: known && known.newest.time > host.time ? known.newest : host, names: [...(known ? known.names : []), host.name] });
  }
  const rows = [...machines.values()].map(({ newest, names }) => make("tr", {}, make("td", {}, named(names)),
    make("td", {}, bar(newest.cpu, 1, `CPU of ${names[0]}`), `${percent(newest.cpu)} of ${newest.cores}`),
    make("td", {}, bar(newest.memory[0] / (newest.memory[1] || 1), 0.95, `memory of ${names[0]}`), `${size(newest.memory[0])} of ${size(newest.memory[1])}`),
    make("td", {}, size(newest.peak)),
    make("td", {}, ...gpus(newest.gpus))));
  if (hosts.length < total && hosts.length >= 100) rows.push(make("tr", {}, make("td", { colspan: 5 }, `the busiest ${hosts.length} of ${total}`)));
  get("hosts").tBodies[0].replaceChildren(...rows);
}

const named = names => names.length > 4 ? `${names.slice(0, 3).join(", ")} and ${names.length - 3} more` : names.join(", ");

// Marked from `high` on.
function bar(value, high, name) {
  return make("meter", { min: 0, max: 1, high, value, "aria-label": name });
}

function gpus(list) {
  if (!list.length) return ["none"];
  return list.map(gpu => make("div", {}, `${gpu.name}: ${gpu.busy == null ? "" : `${percent(gpu.busy)} busy, `}${size(gpu.memory[0])} of ${size(gpu.memory[1])}`));
}
