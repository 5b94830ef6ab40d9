/** Colours with meaning: a hue for each stage; red, amber and green belong to states alone. Pure but for the theme. */

// Away from red (25), amber (80) and green (150). Data is grey: it computes nothing.
const HUES = [250, 195, 305, 225, 345, 275, 170, 325];

export function isDark() {
  return document.documentElement.dataset.theme === "dark";
}

/** @param {number} stage -1 is data. @param {number} alpha 0 to 1. */
export function stageColour(stage, alpha = 1) {
  const dark = isDark();
  if (stage < 0) return dark ? `rgb(146 158 174 / ${alpha})` : `rgb(98 110 126 / ${alpha})`;
  const hue = HUES[stage % HUES.length];
  return dark ? `oklch(0.74 0.125 ${hue} / ${alpha})` : `oklch(0.55 0.14 ${hue} / ${alpha})`;
}

/** What the canvas needs of the style sheet. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    ground: read("--ground"), surface: read("--surface"), raised: read("--raised"), rule: read("--rule"),
    ruleStrong: read("--rule-strong"), ink: read("--ink"), ink2: read("--ink-2"), ink3: read("--ink-3"),
    accent: read("--accent"), good: read("--good"), wait: read("--wait"), bad: read("--bad"), focus: read("--focus"),
    sans: read("--sans"), mono: read("--mono"),
  };
}
