// Which other jobs of this machine are drawn beside this one.

import { ask } from "./api.js";
import { get, make } from "./dom.js";

const MOST = 4;

export class Compare {
  constructor(onChange) {
    this.onChange = onChange;
    this.chosen = [];
    get("compare").addEventListener("toggle", () => get("compare").open && this.load());
  }

  async load() {
    try {
      const { jobs } = await ask("/jobs");
      const items = jobs.map(job => make("label", {}, make("input", { type: "checkbox", value: job.job, checked: this.chosen.includes(job.job),
        onchange: event => this.choose(job.job, event.target.checked) }), ` ${job.job} · ${job.what} · ${new Date(1000 * job.started).toLocaleString()}`));
      get("jobs").replaceChildren(...(items.length ? items : ["there is no other job on this machine"]));
      this.limit();
    } catch (error) {
      get("jobs").replaceChildren(error.message);
    }
  }

  choose(job, chosen) {
    this.chosen = chosen ? [...this.chosen, job] : this.chosen.filter(one => one !== job);
    this.limit();
    this.onChange();
  }

  limit() {
    for (const box of get("jobs").querySelectorAll("input")) box.disabled = !box.checked && this.chosen.length >= MOST;
  }

  // What is known of the chosen jobs, and what is missing.
  show(others) {
    get("comparison").replaceChildren(...Object.entries(others).map(([job, other]) =>
      make("li", {}, [`${job} ${other.what}`, other.reading ? "reading" : "", other.problem].filter(Boolean).join(" · "))));
  }
}
