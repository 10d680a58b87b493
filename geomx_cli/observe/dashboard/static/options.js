// The options of the job: what differs from the defaults, and the rest.

import { get, make } from "./dom.js";

export function showOptions(facts) {
  const list = options => make("dl", {}, ...options.map(option =>
    make("div", {}, make("dt", {}, `--${option.name.replaceAll("_", "-")}`), make("dd", {}, option.value || "none"))));
  const changed = facts.options.filter(option => !option.default), others = facts.options.filter(option => option.default);
  const parts = [make("h3", {}, changed.length ? "Set or chosen for this job" : "All options have their defaults"), list(changed)];
  if (others.length) parts.push(make("h3", {}, "Defaults"), list(others));
  get("options").querySelector(".columns").replaceChildren(...parts);
}
