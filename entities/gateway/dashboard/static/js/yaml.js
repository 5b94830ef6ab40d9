/** A value as YAML that people read: what a job was submitted with. Keys keep their order; what is null is left out. */

const PLAIN = /^[A-Za-z_./][\w./:@+-]*( [\w./:@+-]+)*$/;
const WORDS = new Set(["true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"]);

export function yaml(value) {
  return block(value, "").replace(/^\n/, "");
}

function block(value, indent) {
  if (Array.isArray(value)) {
    if (value.every((item) => item === null || typeof item !== "object")) return ` [${value.map(scalar).join(", ")}]`;
    return value.map((item) => `\n${indent}- ${block(item, `${indent}  `).trimStart()}`).join("");
  }
  if (value !== null && typeof value === "object") {
    const entries = Object.entries(value).filter(([, item]) => item !== null);
    if (!entries.length) return " {}";
    return entries.map(([key, item]) => `\n${indent}${scalar(key)}:${block(item, `${indent}  `)}`).join("");
  }
  return ` ${scalar(value)}`;
}

function scalar(value) {
  if (typeof value !== "string") return String(value).replace(/^(-?\d+)e/, "$1.0e"); // 1e-8 would be read as text
  const plain = PLAIN.test(value) && !WORDS.has(value.toLowerCase()) && !value.includes(": ") && !value.endsWith(":");
  return plain ? value : JSON.stringify(value);
}
