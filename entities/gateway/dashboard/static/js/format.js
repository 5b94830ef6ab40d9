/** Numbers and times as people read them. Pure. */

const UNITS = ["", "k", "M", "G", "T"];

export function quantity(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  let unit = 0;
  let left = Math.abs(value);
  while (left >= 999.5 && unit < UNITS.length - 1) {
    left /= 1000;
    unit += 1;
  }
  const whole = left >= 100 ? 0 : left >= 10 ? Math.min(1, digits - 2) : Math.max(0, digits - 1);
  const shown = unit === 0 && Number.isInteger(value) ? String(left) : left.toFixed(whole);
  return `${value < 0 ? "−" : ""}${shown}${UNITS[unit] ? ` ${UNITS[unit]}` : ""}`;
}

export const bytesPerS = (value) => (value ? `${quantity(value)}${value < 999.5 ? " " : ""}B/s` : "–");
export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(value * 100)} %`);
export const ms = (value) => (value === null || value === undefined ? "–" : `${value >= 100 ? Math.round(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ms`);

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

const MOST_STEPS = 2 ** 40;

/** A job's number of steps; null: it has none, and ends with its feed or by a metric. */
export const bounded = (steps) => (steps && steps < MOST_STEPS ? steps : null);

/** How far a job is: `5/100`; without a number of steps `5/–`, and `5` once it has ended. */
export const progress = (done, steps, ended) => (ended && !bounded(steps) ? String(done) : `${done}/${bounded(steps) ?? "–"}`);

const two = (value) => String(value).padStart(2, "0");

export function clock(at, digits = 0) {
  const time = new Date(at * 1000);
  const base = `${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
  return digits ? `${base}.${String(time.getMilliseconds()).padStart(3, "0").slice(0, digits)}` : base;
}

/** A day and a time of it. */
export const date = (at) => `${new Date(at * 1000).toLocaleDateString()} ${clock(at)}`;

/** An instance as one calls it next to its job: `s0 · r1`. */
export function shortName(row) {
  return bareName(row).replace("-", " · ");
}

const bareName = ({ sid, job }) => (job && sid.startsWith(`${job}-`) ? sid.slice(job.length + 1) : sid);

/** What an instance is one of: `stage 0`, `data`, or the name of a preprocessing function. */
export const unitName = (row) => (row.stage < 0 ? bareName(row).replace(/-r\d+$/, "") : `stage ${row.stage}`);
