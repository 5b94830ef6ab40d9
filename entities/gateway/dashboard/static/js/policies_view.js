/** Functional modules, what they suggested, what became of it, and why. */

import { code, empty, h, keyed, setState, text } from "./dom.js";
import { clock, percent } from "./format.js";
import { moduleKey } from "./store.js";

const LISTED = 120;

export class PoliciesView {
  constructor(store) {
    this.store = store;
    this.modules = h("tbody", {});
    this.decisions = h("tbody", {});
    this.only = h("select", { change: () => this.update(new Set(["decisions"])) },
      h("option", { value: "" }, "adopted and declined"), h("option", { value: "adopted" }, "adopted"), h("option", { value: "declined" }, "declined"));
    this.noModules = h("div", { hidden: true }, empty("No functional module runs", h("span", {}, "Add one to the running mesh: ", code("dmsc policy run examples/my_policy.py"))));
    this.noDecisions = h("div", { hidden: true }, empty("Nothing has been suggested yet", "Each suggestion stands here with what the orchestrator decided, and why."));
    this.element = h("div", {},
      h("section.panel", { "aria-labelledby": "modules-title" },
        h("header", {}, h("h2", { id: "modules-title" }, "Modules")),
        (this.moduleTable = table("Modules", ["Module", "State", "Suggested", "Adopted", "Declined", "Strikes", "Says"], [2, 3, 4, 5], this.modules)), this.noModules),
      h("section.panel.gap", { "aria-labelledby": "decisions-title" },
        h("header", {}, h("h2", { id: "decisions-title" }, "Suggestions, and what became of them"),
          h("span.end", {}, h("label", {}, h("span.visually-hidden", {}, "Show"), this.only))),
        (this.decisionTable = table("Suggestions", ["Time", "Outcome", "Module", "Wish", "Sure", "Why it was suggested", "Why it was decided so"], [4], this.decisions)), this.noDecisions));
  }

  update(topics) {
    const every = topics.has("all");
    if (every || topics.has("modules")) {
      const rows = [...this.store.modules.values()];
      this.noModules.hidden = rows.length > 0;
      this.moduleTable.hidden = rows.length === 0;
      keyed(this.modules, rows, moduleKey, makeModule, showModule);
    }
    if (every || topics.has("decisions")) {
      const wanted = this.only.value;
      const rows = [...this.store.decisions.values()].filter((row) => !wanted || row.adopted === (wanted === "adopted")).slice(-LISTED).reverse();
      this.noDecisions.hidden = rows.length > 0;
      this.decisionTable.hidden = rows.length === 0;
      keyed(this.decisions, rows, (row) => row.id, makeDecision, showDecision);
    }
  }
}

function table(label, names, numbers, body) {
  return h("div.scroll", { tabIndex: 0, role: "group", "aria-label": label }, h("table.stack", {},
    h("thead", {}, h("tr", {}, names.map((name, index) => h(numbers.includes(index) ? "th.num" : "th", { scope: "col" }, name)))), body));
}

function makeModule(row) {
  const state = h("span.state", {});
  const counts = ["suggested", "adopted", "declined", "strikes"].map((name) => h("td.num", { "data-name": name }));
  const says = h("td.full", {});
  return Object.assign(h("tr", {}, h("td", {}, row.module, h("span.sub", {}, row.version)), h("td", {}, state), counts, says), { state, counts, says });
}

function showModule(line, row) {
  setState(line.state, row.alive ? row.state : "gone");
  [row.suggestions, row.adopted, row.declined, row.strikes].forEach((value, index) => text(line.counts[index], String(value)));
  text(line.says, row.alive ? row.reason : "its process is gone");
}

function makeDecision(row) {
  const time = h("time", {});
  const times = h("span.sub", {});
  const why = h("td.full", {});
  const outcome = h(row.adopted ? "span.good" : "span.dim", {}, row.adopted ? "✓ adopted" : "– declined");
  return Object.assign(h("tr", {},
    h("td", {}, time, times), h("td", {}, outcome),
    h("td", {}, row.module, h("span.sub", {}, `${row.version} · ${row.job}`)),
    h("td.full", {}, row.wish || "–"), h("td.num", {}, row.confidence === null ? "–" : percent(row.confidence)),
    why, h("td.full", {}, row.reason)), { time, times, why });
}

function showDecision(line, row) {
  text(line.time, clock(row.at));
  text(line.times, row.times > 1 ? `${row.times} times` : "");
  text(line.why, row.why || "–");
}
