/** Links as they are drawn: one by one, or, where there are too many to be told apart, summed by stage and cluster. Pure. */

const LINKS_DRAWN = 320; // above it, links are drawn by bundles
const SEEN = 0.12; // part of the widest by which one must change for an eye to see it

/**
 * @param rows instances, whose `links` are `[peer, bytes per second, transfer, loss, trend]`
 * @param {Map<string, Box>} boxes where they stand, see `layout.js`
 */
export function bundle(rows, boxes) {
  const links = [];
  for (const row of rows) {
    const from = boxes.get(row.sid);
    if (!from) continue;
    for (const link of row.links ?? []) {
      const to = boxes.get(link[0]);
      if (to && from.stage < to.stage) links.push([from, to, link]);
    }
  }
  const bundled = links.length > LINKS_DRAWN;
  const groups = bundled ? summed(links) : links.map(([from, to, link]) => ({ from, to, stage: to.stage, rate: link[1], lossy: link[3] > 0.005 }));
  const most = groups.reduce((found, group) => Math.max(found, group.rate), 1);
  for (const group of groups) group.load = Math.sqrt(group.rate / most);
  return { groups, bundled };
}

function summed(links) {
  const all = new Map();
  for (const [from, to, link] of links) {
    let there = all.get(from.cell);
    if (!there) all.set(from.cell, (there = new Map()));
    let group = there.get(to.cell);
    if (!group) there.set(to.cell, (group = { from: from.cell, to: to.cell, stage: to.stage, rate: 0, lossy: false }));
    group.rate += link[1];
  }
  return [...all.values()].flatMap((there) => [...there.values()]);
}

/** Whether an eye could tell one picture of links from the other. */
export function differ(one, other) {
  if (one.groups.length !== other.groups.length) return true;
  return one.groups.some((group, index) => {
    const now = other.groups[index];
    return group.from !== now.from || group.to !== now.to || Math.abs(group.load - now.load) > SEEN;
  });
}
