// Hooks: the address after `#`, keys, what is live, and answers of calls.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { Link, Problem, Told, follow, get } from "./api";
import { live } from "./live";

export function useRoute(): string[] {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decode);
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function path(...parts: string[]): string {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

export function go(...parts: string[]): void {
  location.hash = path(...parts);
}

/** Draw again when sandboxes change, and every second if ages are shown. */
export function useLive(ticks = false): void {
  const [, draw] = useState(0);
  useEffect(() => {
    const again = () => draw((count) => count + 1);
    const unlisten = live.listen(again);
    const timer = ticks ? setInterval(again, 1000) : undefined;
    return () => (unlisten(), clearInterval(timer));
  }, [ticks]);
}

export interface Answer<T> {
  data: T | undefined;
  error: string;
  missing: boolean;
  loading: boolean;
  again: () => void;
}

/** The answer of a call, asked again every `every` milliseconds while somebody looks. */
export function useAnswer<T>(path: string | null, every = 0): Answer<T> {
  const [state, setState] = useState<Omit<Answer<T>, "again">>(ASKING);
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    if (path === null) return;
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    const ask = async () => {
      try {
        const data = await get<T>(path, stop.signal);
        setState({ data, error: "", missing: false, loading: false });
      } catch (error) {
        if (stop.signal.aborted) return;
        const missing = error instanceof Problem && error.isMissing;
        setState((before) => ({ ...before, error: message(error), missing, loading: false }));
        if (missing) return;
      }
      if (every && !stop.signal.aborted) timer = setTimeout(ask, every);
    };
    void ask();
    return () => (stop.abort(), clearTimeout(timer));
  }, [path, every, turn]);
  useEffect(() => setState(ASKING), [path]);
  return { ...state, again: useCallback(() => setTurn((count) => count + 1), []) };
}

const ASKING = { data: undefined, error: "", missing: false, loading: true };

/** The newest of what a stream tells, the newest first. */
export function useStream<T>(path: string | null, most: number): { items: T[]; link: Link; why: string } {
  const [items, setItems] = useState<T[]>([]);
  const [link, setLink] = useState<[Link, string]>(["connecting", ""]);
  useEffect(() => {
    setItems([]);
    if (path === null) return;
    const stop = new AbortController();
    let waiting: T[] = [];
    const flush = () => {
      const come = waiting.reverse();
      waiting = [];
      setItems((before) => [...come, ...before].slice(0, most));
    };
    const on = (told: Told) => {
      if (!waiting.length) setTimeout(flush, 60);
      waiting.push(JSON.parse(told.data) as T);
      if (waiting.length > most) waiting.shift();
    };
    void follow(path, { on, state: (to, why) => setLink([to, why ?? ""]), signal: stop.signal });
    return () => stop.abort();
  }, [path, most]);
  return { items, link: link[0], why: link[1] };
}

export function message(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** Run work at a click: busy while it runs, and what went wrong. */
export function useWork(): { busy: boolean; error: string; field: string; run: (work: () => Promise<unknown>) => void } {
  const [state, setState] = useState({ busy: false, error: "", field: "" });
  const alive = useRef(true);
  useEffect(() => () => void (alive.current = false), []);
  const run = (work: () => Promise<unknown>) => {
    setState({ busy: true, error: "", field: "" });
    work()
      .then(() => ({ busy: false, error: "", field: "" }))
      .catch((error: unknown) => ({
        busy: false,
        error: message(error),
        field: (error instanceof Problem && error.field) || "",
      }))
      .then((next) => alive.current && setState(next));
  };
  return { ...state, run };
}

export interface Shortcut {
  keys: string;
  what: string;
  run: () => void;
}

const active: Shortcut[][] = [];

/** Keys that work while a part of the page is shown, and not while somebody writes. */
export function useKeys(shortcuts: Shortcut[]): void {
  const current = useRef(shortcuts);
  current.current = shortcuts;
  useEffect(() => {
    const mine: Shortcut[] = [];
    const proxy = new Proxy(mine, { get: (_, key) => Reflect.get(current.current, key) });
    active.push(proxy);
    return () => void active.splice(active.indexOf(proxy), 1);
  }, []);
}

export function shortcuts(): Shortcut[] {
  return active.flatMap((each) => Array.from(each));
}

let before = "";

addEventListener("keydown", (event) => {
  const target = event.target as HTMLElement;
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
  if (target.closest("input, textarea, select, .xterm, [contenteditable]")) return;
  if (document.querySelector("dialog[open]")) return;
  const key = event.key;
  const found =
    shortcuts().find((each) => each.keys === `${before} ${key}`) ?? shortcuts().find((each) => each.keys === key);
  before = found ? "" : key;
  if (!found) return;
  event.preventDefault();
  found.run();
});
