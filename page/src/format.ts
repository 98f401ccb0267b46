// Numbers and times as people read them.

const STEPS: [number, string][] = [
  [86400, "d"],
  [3600, "h"],
  [60, "m"],
  [1, "s"],
];

export function duration(seconds: number): string {
  const whole = Math.max(0, Math.floor(seconds));
  const at = STEPS.findIndex(([size]) => whole >= size);
  const first = STEPS[at];
  if (!first) return "0s";
  const next = STEPS[at + 1];
  const rest = next ? Math.floor((whole % first[0]) / next[0]) : 0;
  const head = `${Math.floor(whole / first[0])}${first[1]}`;
  return next && rest && first[0] > 60 ? `${head} ${rest}${next[1]}` : head;
}

export function size(bytes: number): string {
  const units = ["B", "K", "M", "G", "T"];
  let value = bytes;
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });

export function moment(seconds: number): string {
  const when = new Date(seconds * 1000);
  const today = when.toDateString() === new Date().toDateString();
  return today ? clock.format(when) : `${day.format(when)} ${clock.format(when)}`;
}

export function whole(seconds: number): string {
  return new Date(seconds * 1000).toLocaleString();
}

const CAUSES: Record<string, string> = {
  user: "somebody ended it",
  lifetime: "its lifetime was over",
  idle: "it was idle",
  out_of_memory: "out of memory",
  agent_lost: "its agent was lost",
  box_died: "its box died",
  host_restarted: "the host restarted",
  creation_failed: "it could not be made",
  owner_died: "its owner died",
};

export function cause(text: string | null | undefined): string {
  return text ? (CAUSES[text] ?? text) : "";
}

const BYTES = new Set(["memory", "disk", "egress"]);

/** A field of a spec as people write it; null if its value says it best. */
export function quantity(name: string, value: unknown): string | null {
  if (typeof value !== "number") return null;
  if (name.endsWith("_s")) return value ? duration(value) : "never";
  return BYTES.has(name) ? size(value) : null;
}

/** Any value as one line of text. */
export function text(value: unknown): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "string") return value;
  if (Array.isArray(value) && value.every((each) => typeof each !== "object")) return value.join(" ");
  return JSON.stringify(value);
}
