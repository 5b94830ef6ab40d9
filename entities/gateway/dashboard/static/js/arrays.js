/** Jobs of an array under one line: what it is known by, how far it is, and which of its jobs are shown. Pure. */

const MEMBER = /^(r[0-9a-f]{6})_([0-9]{1,4})$/;
/** Of an opened array; of more the terminal has a list. */
export const SHOWN = 100;
const ORDER = ["running", "recovering", "finishing", "deploying", "parked", "queued", "failed", "cancelled", "done"];

/** The array that a job is of; empty: none. */
export const arrayOf = (job) => MEMBER.exec(job)?.[1] ?? "";

/** The name of an array by that of one of its jobs, which ends with its number. */
export const nameOf = (member) => member.replace(/(.)-[^-]*$/, "$1");

const place = (state) => (ORDER.includes(state) ? ORDER.indexOf(state) : 0);

/**
 * Lines in the order of the jobs: an array is where its first one is, and an opened one is followed by its jobs.
 * A line is `{key, job}`, or `{key, array, jobs}` with all jobs of the array that are known.
 */
export function folded(jobs, opened) {
  const lines = [];
  const arrays = new Map();
  for (const job of jobs) {
    const array = arrayOf(job.job);
    if (!array) lines.push({ key: job.job, job });
    else if (arrays.has(array)) arrays.get(array).jobs.push(job);
    else {
      const line = { key: array, array, jobs: [job] };
      arrays.set(array, line);
      lines.push(line);
    }
  }
  return lines.flatMap((line) => (line.array && opened.has(line.array) ? [line, ...members(line.jobs)] : [line]));
}

/** Of an array's jobs those that say most: at work first, then waiting, then ended ones. */
function members(jobs) {
  const ranked = [...jobs].sort((one, other) => place(one.state) - place(other.state) || index(one) - index(other));
  return ranked.slice(0, SHOWN).map((job) => ({ key: job.job, job }));
}

const index = (job) => Number(MEMBER.exec(job.job)[2]);

/** How many jobs are in which state, as `3 running, 40 queued, 957 done`. */
export function counts(jobs) {
  const found = new Map();
  for (const { state } of jobs) found.set(state, (found.get(state) ?? 0) + 1);
  return [...found].sort(([one], [other]) => place(one) - place(other)).map(([state, count]) => `${count} ${state}`).join(", ");
}

/** The state of an array: that of the job that is furthest from its end. */
export const stateOfAll = (jobs) => jobs.reduce((state, job) => (place(job.state) < place(state) ? job.state : state), jobs[0].state);
