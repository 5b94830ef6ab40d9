/** Tables that scroll by themselves, and lists that are read page by page. */

import { ask } from "./door.js";
import { h, say, text } from "./dom.js";
import { date } from "./format.js";

/** A table that can be scrolled by keyboard; `columns`: names, those of numbers begin with `#`. */
export function table(label, columns, body) {
  return h("div.scroll", { tabIndex: 0, role: "group", "aria-label": label }, h("table.stack", {},
    h("thead", {}, h("tr", {}, columns.map((name) =>
      h(name.startsWith("#") ? "th.num" : "th", { scope: "col" }, name.replace(/^#/, ""))))), body));
}

/** A cell with its column's name, which narrow screens show; `#NAME` for numbers. */
export function cell(name, ...children) {
  return h(name.startsWith("#") ? "td.num" : "td", { "data-name": name.replace(/^#/, "").toLowerCase() }, ...children);
}

/** A list of what happened, with days. */
export const datedList = () => h("ol.happened.dated", {});

/** One item of it; `at` null: nobody knows when. */
export function dated(at, words) {
  return h("li", {}, h("time", {}, at === null ? "" : date(at)), h("span.tick.k-state", { "aria-hidden": "true" }), h("span.text", {}, words));
}

/** A line below a panel's head: what was done, or why not. */
export class Note {
  constructor() {
    this.element = h("p.line-note", { role: "status", hidden: true });
  }

  tell(line, bad = false) {
    this.element.hidden = !line;
    this.element.classList.toggle("bad", bad);
    text(this.element, line);
    if (line) say(line);
  }
}

/** A list that the gateway gives in pages; `more` is a button that reads the next one. */
export class Pages {
  /**
   * @param {(cursor: string | null) => string} path
   * @param {(answer: any) => any[]} rows
   * @param {() => void} changed
   * @param {(why: string) => void} failed
   */
  constructor(path, rows, changed, failed) {
    Object.assign(this, { path, rows, changed, failed, items: [], next: null, turn: 0 });
    this.more = h("button", { type: "button", hidden: true, click: () => this.read(this.next) }, "Show more");
  }

  /** Begins anew. */
  begin() {
    return this.read(null);
  }

  async read(cursor) {
    const turn = (this.turn += 1);
    this.more.disabled = true;
    try {
      const answer = await ask(this.path(cursor));
      if (turn !== this.turn) return;
      this.items = cursor === null ? this.rows(answer) : [...this.items, ...this.rows(answer)];
      this.next = answer.next ?? null;
      this.failed("");
    } catch (error) {
      if (turn !== this.turn) return;
      this.failed(error.message);
    }
    this.more.disabled = false;
    this.more.hidden = this.next === null;
    this.changed();
  }
}

/** A query string of what is set. */
export function query(values) {
  const set = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return set.length ? `?${new URLSearchParams(set.map(([name, value]) => [name, String(value)]))}` : "";
}

/** Asks before something that can't be undone by itself. */
export class Question {
  constructor(id) {
    this.title = h("h2", { id });
    this.words = h("p", {});
    this.yes = h("button.danger", { type: "button", click: () => {
      this.element.close();
      this.act();
    } });
    this.element = h("dialog", { "aria-labelledby": id }, this.title, this.words,
      h("div.actions", {}, h("button", { type: "button", click: () => this.element.close() }, "Leave it"), this.yes));
  }

  ask(title, words, verb, act) {
    text(this.title, title);
    text(this.words, words);
    text(this.yes, verb);
    this.act = act;
    this.element.showModal();
    this.element.querySelector("button").focus();
  }
}
