/** Who waits for slots, in the order of the queue, and slots that are kept for a time. */

import { arrayOf } from "./arrays.js";
import { empty, h, keyed, text } from "./dom.js";
import { clock, seconds } from "./format.js";

const DAY_S = 86400;

export class QueueView {
  constructor(store) {
    this.store = store;
    this.waiting = h("tbody", {});
    this.reservations = h("tbody", {});
    this.none = h("div", { hidden: true }, empty("No job waits for slots"));
    this.table = scrolled("Queue", ["Position", "Job", "Slots", "Waits", "May start", "Why"], this.waiting);
    this.kept = h("section.panel.gap", { "aria-labelledby": "reservations-title", hidden: true },
      h("header", {}, h("h2", { id: "reservations-title" }, "Reservations")),
      scrolled("Reservations", ["Name", "Slots", "From", "Until", "For", "Of", "By"], this.reservations));
    this.queue = h("section.panel.gap", { "aria-labelledby": "queue-title" },
      h("header", {}, h("h2", { id: "queue-title" }, "Queue"), (this.count = h("span.end", {}))), this.table, this.none);
  }

  get elements() {
    return [this.queue, this.kept];
  }

  update(topics) {
    if (!["all", "queue", "reservations", "capacity"].some((topic) => topics.has(topic))) return;
    const rows = [...this.store.queue.values()].sort((one, other) => one.position - other.position);
    const { order, free, slots, waiting, lacking } = this.store.capacity;
    text(this.count, order ? `${waiting} waiting by ${order}, ${free} of ${slots} slots free, ${lacking} more would have all start` : "");
    this.none.hidden = rows.length > 0;
    this.table.hidden = rows.length === 0;
    const behind = new Map(); // array → how many of its jobs wait behind its first one
    const first = rows.filter(({ job }) => {
      const array = arrayOf(job);
      if (array) behind.set(array, behind.has(array) ? behind.get(array) + 1 : 0);
      return !array || !behind.get(array);
    });
    keyed(this.waiting, first, (row) => row.job, makePlace, (line, row) => this.show(line, row, behind.get(arrayOf(row.job)) ?? 0));
    const kept = [...this.store.reservations.values()].sort((one, other) => one.start_at - other.start_at);
    this.kept.hidden = kept.length === 0;
    keyed(this.reservations, kept, (row) => row.name, makeReservation, (line, row) => this.showReservation(line, row));
  }

  show({ parts }, row, behind) {
    text(parts.position, row.position);
    text(parts.slots, row.work === "preparation" ? `${row.slots} lanes` : row.slots);
    text(parts.waits, seconds(Math.max(0, this.store.now() - row.since)));
    text(parts.starts, row.expected_at === null ? "–" : this.moment(row.expected_at));
    text(parts.why, behind ? `${row.reason}; ${behind} more of ${arrayOf(row.job)} behind it` : row.reason);
  }

  showReservation({ parts }, row) {
    text(parts.slots, row.slots);
    text(parts.from, this.moment(row.start_at));
    text(parts.until, this.moment(row.end_at));
    text(parts.whom, row.job || row.user || "nobody");
    text(parts.which, [row.device, ...row.clusters, ...Object.entries(row.labels).map(([key, value]) => `${key}=${value}`)].filter(Boolean).join(", ") || "any");
    text(parts.by, row.by);
  }

  /** A time of day, with its date if that may be another one. */
  moment(at) {
    return Math.abs(at - this.store.now()) < DAY_S / 2 ? clock(at) : `${new Date(at * 1000).toLocaleDateString()} ${clock(at)}`;
  }
}

function scrolled(label, names, body) {
  return h("div.scroll", { tabIndex: 0, role: "group", "aria-label": label },
    h("table.stack", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name)))), body));
}

const cell = (name) => h("td", { "data-name": name });

function makePlace(row) {
  const parts = { position: cell("position"), slots: cell("slots"), waits: cell("waits"), starts: cell("may start"), why: h("td.full", {}) };
  return Object.assign(h("tr", {}, parts.position, h("td.full", {}, row.name, h("span.sub.mono", {}, row.job)),
    parts.slots, parts.waits, parts.starts, parts.why), { parts });
}

function makeReservation(row) {
  const parts = { slots: cell("slots"), from: cell("from"), until: cell("until"), whom: cell("for"), which: cell("of"), by: cell("by") };
  return Object.assign(h("tr", {}, h("td.full", {}, row.name), ...Object.values(parts)), { parts });
}
