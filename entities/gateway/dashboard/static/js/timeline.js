/** What happened when: lanes under the curves, on the same time axis, and the list beside them. */

import { h, keyed } from "./dom.js";
import { clock } from "./format.js";

const LANES = [
  ["faults", ["fault"]],
  ["mended", ["recovery"]],
  ["alerts", ["alert", "skipped"]],
  ["policies", ["policy", "change", "recut", "fault_choice"]],
  ["saved", ["checkpoint", "validation"]],
];
const MARKS = 240;
const LISTED = 150;

/** What the line has: events of a job and of nobody, and faults that no event tells of. */
export function incidents(store, job) {
  const found = store.events.filter((row) => row.job === job || row.job === null);
  return found;
}

export class Timeline {
  constructor(store) {
    this.store = store;
    this.lanes = LANES.map(([name, kinds]) => {
      const marks = h("div.marks", {});
      return { name, kinds: new Set(kinds), marks, element: h("div.lane", {}, h("span.label", {}, name), marks) };
    });
    this.hair = h("div.hair", { hidden: true });
    this.element = h("div.lanes", { role: "group", "aria-label": "Time line" }, this.lanes.map((lane) => lane.element), this.hair);
    this.list = h("ol.happened", { "aria-label": "What happened, the latest first" });
  }

  show(job, [from, to]) {
    const rows = incidents(this.store, job);
    const place = (at) => `${Math.max(0, Math.min(100, (100 * (at - from)) / (to - from || 1)))}%`;
    for (const lane of this.lanes) {
      const mine = rows.filter((row) => lane.kinds.has(row.kind) && row.at >= from).slice(-MARKS);
      const spans = lane.name === "faults" ? this.spans(job, from) : [];
      keyed(lane.marks, [...spans, ...mine], (row) => row.key ?? row.id, (row) => (row.span ? h("span.span", {}) : this.mark(row)), (element, row) => {
        element.style.left = place(row.span ? row.opened_at : row.at);
        if (row.span) {
          const over = row.state === "handled" || row.state === "given_up";
          element.style.width = `calc(${place(over ? row.changed_at : to)} - ${place(row.opened_at)})`;
          element.className = `span ${row.state}`;
          element.title = describeFault(row);
        }
      });
    }
    this.showList(rows);
  }

  spans(job, from) {
    return [...this.store.faults.values()]
      .filter((row) => (row.job === job || row.job === null) && !row.warning && row.changed_at >= from)
      .slice(-MARKS)
      .map((row) => ({ ...row, key: `span ${row.id}`, span: true }));
  }

  mark(row) {
    const line = `${clock(row.at)} ${row.kind}: ${row.text}`;
    return h(`button.tick.k-${row.kind}`, { type: "button", title: line, "aria-label": line, click: () => this.point(row.id) });
  }

  point(id) {
    const item = this.list.known?.get(id);
    if (!item) return;
    this.list.querySelector(".now")?.classList.remove("now");
    item.classList.add("now");
    item.scrollIntoView({ block: "nearest" });
  }

  showList(rows) {
    const latest = rows.slice(-LISTED).reverse();
    keyed(this.list, latest, (row) => row.id, (row) =>
      h("li", {},
        h("time", {}, clock(row.at)),
        h(`span.tick.k-${row.kind}`, { "aria-hidden": "true" }),
        h("span.text", {}, h("span.dim", {}, `${row.kind} `), row.text || row.state || "")));
  }

  /** The hair under the cursor of the curves. */
  cursor(at, [from, to]) {
    this.hair.hidden = at === null;
    if (at === null) return;
    const lane = this.lanes[0].element;
    this.hair.style.left = `${lane.offsetLeft + (lane.offsetWidth * (at - from)) / (to - from || 1)}px`;
  }
}

export function describeFault(row) {
  const what = [row.kind, row.sid, row.job].filter(Boolean).join(" ");
  return `${clock(row.opened_at)} ${what}: ${row.state}${row.reason ? `: ${row.reason}` : ""}${row.action ? `; ${row.action}` : ""}`;
}
