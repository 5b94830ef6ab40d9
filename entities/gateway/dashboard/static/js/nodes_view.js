/** Nodes with their load and devices, and the entities of the control plane. */

import { code, empty, h, keyed, setState, text } from "./dom.js";
import { percent } from "./format.js";
import { nodeKey } from "./store.js";

export class NodesView {
  constructor(store) {
    this.store = store;
    this.nodes = h("tbody", {});
    this.entities = h("tbody", {});
    this.none = h("div", { hidden: true }, empty("No node has joined yet", h("span", {}, "On any machine: ", code("dmsc join nats://HOST:4222 --token …"))));
    this.table = scrolled("Nodes", h("table.stack", {}, head(["Node", "Slots", "CPU", "Memory", "Devices", "State"]), this.nodes));
    this.element = h("div", {},
      h("section.panel", { "aria-labelledby": "nodes-title" }, h("header", {}, h("h2", { id: "nodes-title" }, "Nodes")), this.table, this.none),
      h("section.panel.gap", { "aria-labelledby": "entities-title" }, h("header", {}, h("h2", { id: "entities-title" }, "Control plane")),
        scrolled("Control plane", h("table.stack", {}, head(["Service", "Kind", "Where", "State"]), this.entities))));
  }

  update(topics) {
    if (["all", "nodes"].some((topic) => topics.has(topic))) {
      const rows = [...this.store.nodes.values()].sort((one, other) => nodeKey(one).localeCompare(nodeKey(other)));
      this.none.hidden = rows.length > 0;
      this.table.hidden = rows.length === 0;
      keyed(this.nodes, rows, nodeKey, makeNode, showNode);
    }
    if (["all", "entities"].some((topic) => topics.has(topic))) {
      const rows = [...this.store.entities.values()].sort((one, other) => one.kind.localeCompare(other.kind) || one.sid.localeCompare(other.sid));
      keyed(this.entities, rows, (row) => row.sid, makeEntity, (line, row) => setState(line.state, row.state));
    }
  }
}

function head(names) {
  return h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, name))));
}

function scrolled(label, table) {
  return h("div.scroll", { tabIndex: 0, role: "group", "aria-label": label }, table);
}

function meter() {
  const bar = h("i", {});
  const figure = h("span", {});
  return Object.assign(h("span.meter", {}, h("span.track", { "aria-hidden": "true" }, bar), figure), { bar, figure });
}

function showMeter(element, part, words) {
  element.bar.style.transform = `scaleX(${Math.min(1, part ?? 0)})`;
  text(element.figure, words ?? percent(part));
}

function makeNode(row) {
  const parts = { slots: meter(), cpu: meter(), memory: meter(), devices: h("td.full", {}), state: h("span.state", {}), why: h("span.sub", {}), labels: h("span.sub", {}) };
  return Object.assign(h("tr", {},
    h("td.full", {}, `${row.cluster} / ${row.node}`, parts.labels, h("span.sub", {}, row.version && `dmsc ${row.version}`)),
    h("td", { "data-name": "slots" }, parts.slots), h("td", { "data-name": "cpu" }, parts.cpu), h("td", { "data-name": "memory" }, parts.memory),
    parts.devices, h("td.full", {}, parts.state, parts.why)), { parts });
}

function showNode({ parts }, row) {
  showMeter(parts.slots, row.slots ? row.taken / row.slots : 0, row.slots === null ? "–" : `${row.taken}/${row.slots}`);
  showMeter(parts.cpu, row.cpu);
  showMeter(parts.memory, row.memory);
  text(parts.labels, [row.speed !== null && `speed ${row.speed}`, ...Object.entries(row.labels).map(([key, value]) => `${key}=${value}`)]
    .filter(Boolean).join(" "));
  text(parts.devices, row.devices.map((device) => [
    device.device, device.utilization !== null && percent(device.utilization), device.temperature_c !== null && `${device.temperature_c} °C`,
    device.power_w !== null && `${device.power_w} W`].filter(Boolean).join(" ")).join(", ") || "cpu");
  const whole = row.cordons.find((cordon) => cordon.slot === null);
  setState(parts.state, whole ? "draining" : row.warm === false ? "pending" : "active");
  text(parts.state, row.cordons.length ? (whole ? "cordoned" : `${row.cordons.length} slots cordoned`) : row.warm === false ? "warming up" : "ready");
  text(parts.why, row.cordons.map((cordon) => `${cordon.reason} (${cordon.by})${cordon.progress ? `: ${cordon.progress}` : ""}`).join("; "));
}

function makeEntity(row) {
  const state = h("span.state", {});
  return Object.assign(h("tr", {}, h("td", {}, row.sid), h("td", {}, row.kind.replaceAll("-", " ")), h("td", {}, `${row.cluster} / ${row.node}`), h("td", {}, state)), { state });
}
