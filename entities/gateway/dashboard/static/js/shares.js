/** Who gets what share, and why: a line for each instance, by stage; and all about the one that is chosen. */

import { stageColour } from "./colours.js";
import { empty, h, keyed, setState, stateOf, text } from "./dom.js";
import { bytesPerS, ms, percent, quantity, seconds, shortName, unitName } from "./format.js";
import { compare } from "./layout.js";

const LISTED = 12; // per stage, until all are asked for

export class Shares {
  /** @param {(sid: string) => void} choose */
  constructor(choose) {
    this.choose = choose;
    this.all = new Set();
    this.places = new Map();
    this.list = h("div", {});
    this.one = h("div", { hidden: true });
    this.none = h("div", { hidden: true }, empty("No shares yet", "Who gets how many microbatches, and why, stands here while a job runs."));
    this.element = h("div", {}, this.one, this.list, this.none);
  }

  show(rows, selected) {
    const chosen = rows.find((row) => row.sid === selected);
    this.one.hidden = !chosen;
    this.none.hidden = rows.length > 0;
    this.one.replaceChildren(...(chosen ? [this.details(chosen)] : []));
    const stages = new Map();
    for (const row of rows) {
      if (!stages.has(row.stage)) stages.set(row.stage, []);
      stages.get(row.stage).push(row);
    }
    this.order(rows);
    const sorted = [...stages].sort(([one], [other]) => one - other);
    keyed(this.list, sorted, ([stage]) => String(stage), ([stage, [first]]) => this.makeStage(stage, unitName(first)), (element, [stage, held]) => {
      held.sort((one, other) => odd(one) - odd(other) || this.places.get(one.sid) - this.places.get(other.sid));
      const cut = this.all.has(stage) ? held : held.slice(0, LISTED);
      const active = held.filter((row) => row.state === "active").length;
      text(element.count, `${active === held.length ? held.length : `${active} of ${held.length}`} active`);
      element.swatch.style.background = stageColour(stage);
      keyed(element.rows, cut, (row) => row.sid, (row) => this.makeRow(row), (line, row) => this.update(line, row, selected));
      element.more.hidden = cut.length === held.length;
      text(element.more, `${held.length - cut.length} more`);
    });
  }

  /** Names are compared when there are others: that costs more than all the rest. */
  order(rows) {
    if (rows.length === this.places.size && rows.every((row) => this.places.has(row.sid))) return;
    const names = rows.map((row) => row.sid).sort(compare);
    this.places = new Map(names.map((sid, index) => [sid, index]));
  }

  makeStage(stage, name) {
    const swatch = h("span.swatch", {});
    const count = h("span.dim", {});
    const rows = h("div", {});
    const more = h("button.quiet.small", { type: "button", hidden: true, click: () => {
      this.all.add(stage);
      this.again?.();
    } });
    const element = h("section", { "aria-label": name },
      h("div.stage-head", {}, swatch, h("h3", {}, name), count), rows, more);
    return Object.assign(element, { swatch, count, rows, more });
  }

  makeRow(row) {
    const state = h("span.state", {});
    const name = h("span.name", {}, state);
    const bar = h("i", {});
    const share = h("span.num", {});
    const service = h("span.num.dim", {});
    const why = h("span.why", {});
    const line = h("button.share-row", { type: "button", click: () => this.choose(row.sid) },
      name, h("span.track", { "aria-hidden": "true" }, bar), share, service, why);
    return Object.assign(line, { state, bar, share, service, why });
  }

  update(line, row, selected) {
    const chosen = String(row.sid === selected);
    if (line.row === row && line.ariaPressed === chosen) return;
    line.row = row;
    line.ariaPressed = chosen;
    setState(line.state, row.state);
    text(line.state, shortName(row));
    line.bar.style.transform = `scaleX(${row.share ?? 0})`;
    line.bar.style.background = stageColour(row.stage);
    text(line.share, percent(row.share));
    text(line.service, row.service_ms ? ms(row.service_ms).replace(" ms", "") + " ms" : "");
    const reason = row.state === "active" ? reasons(row)[0]?.[1] ?? (row.stage < 0 ? made(row) : "no route yet") : row.reason || row.state;
    text(line.why, reason);
    line.title = `${row.sid} on ${row.cluster}/${row.node}: ${row.state}. ${reason}`;
  }

  details(row) {
    const pairs = [
      ["instance", row.sid],
      ["state", stateOf(row.state)],
      ["runs on", `${row.cluster} / ${row.node}, ${row.device}`],
      ["share", `${percent(row.share)} of ${unitName(row)}, weight ${row.weight ?? "–"}, window ${row.window ?? "–"}`],
      ...(reasons(row).length ? reasons(row).map(([from, why]) => [from ? `why, from ${from}` : "why", why]) : [["why", "–"]]),
      ["busy", row.busy === undefined ? "–" : `${percent(row.busy)}, queue ${row.queue}, open ${row.open}`],
      ["a microbatch", row.service_ms ? ms(row.service_ms) : "–"],
      ...(row.stalled_s === undefined || row.stalled_s === null ? [] : [["waits for data", `${percent(row.stalled)} of the time, ${seconds(row.stalled_s)} in all`]]),
      ...(tiers(row) ? [["read", tiers(row)]] : []),
      ...(row.temperature_c ? [["temperature", `${row.temperature_c} °C`]] : []),
      ...(row.reason ? [["says", row.reason]] : []),
    ];
    const links = (row.links ?? []).slice(0, 12);
    return h("section", { "aria-label": `About ${row.sid}` },
      h("dl.pairs", {}, pairs.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
      links.length ? h("table", {},
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "sends to"), h("th.num", { scope: "col" }, "rate"), h("th.num", { scope: "col" }, "a transfer"), h("th.num", { scope: "col" }, "lost"))),
        h("tbody", {}, links.map(([peer, rate, transfer, loss, trend]) => h("tr", {},
          h("td", {}, shortName({ sid: peer, job: row.job })),
          h("td.num", {}, bytesPerS(rate)),
          h("td.num", {}, transfer === null ? "–" : ms(transfer), trend === "slower" ? h("span.wait", {}, " slower") : null),
          h("td.num", {}, loss ? percent(loss) : "–"))))) : null);
  }
}

/** What an instance before the first stage does, and whether the stages wait for it. */
const made = (row) => `makes the microbatches${row.stalled >= 0.01 ? `, which wait for data ${percent(row.stalled)} of the time` : ""}`;

/** Bytes of stores by where they came from. */
const tiers = (row) => Object.entries(row.read_bytes ?? {}).map(([tier, count]) => `${quantity(count)}B from ${tier === "disk" ? "this node's cache" : tier}`).join(", ");

/** Why it has its weight, as the routers say it: `[senders' cluster, reason]`, one line where they agree. */
function reasons(row) {
  const told = Object.entries(row.why ?? {}).map(([from, why]) => [from, why.replace(/^policy \d+: /, "")]);
  return new Set(told.map(([, why]) => why)).size === 1 ? [["", told[0][1]]] : told;
}

const odd = (row) => (row.state === "active" ? 1 : 0);
