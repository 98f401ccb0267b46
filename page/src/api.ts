// Calls of the server: the token, problems as errors, and streams of server-sent events that come back by themselves.

const KEY = "skerry.token";
export const API = "/v1";

export class Problem extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    detail: string,
    readonly field: string | null = null,
  ) {
    super(detail);
  }

  /** Whether this server has no such call at all. */
  get isMissing(): boolean {
    return this.status === 405 || this.status === 501 || (this.status === 404 && this.message === "Not Found");
  }
}

let signedOut: () => void = () => undefined;

export function onSignedOut(then: () => void): void {
  signedOut = then;
}

export function token(): string | null {
  return sessionStorage.getItem(KEY);
}

export function setToken(text: string | null): void {
  if (text === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, text);
}

/** Take the token out of `#token=...`, so that neither the address bar nor the history keep it. */
export function takeTokenFromLink(): void {
  const match = /^#token=([\w.~-]+)$/.exec(location.hash);
  if (match?.[1]) {
    setToken(match[1]);
    history.replaceState(null, "", `${location.pathname}${location.search}`);
  }
}

type Values = Record<string, string | number | boolean | null | undefined>;

export function query(values: Values): string {
  const given = Object.entries(values).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(given.map(([name, value]) => [name, String(value)])).toString();
  return text ? `?${text}` : "";
}

export function sandboxPath(id: string): string {
  return `/sandboxes/${encodeURIComponent(id)}`;
}

/** A call as it is, for bodies that are no JSON. Throws a Problem for every answer that is no success. */
export async function raw(method: string, path: string, options: RequestInit = {}): Promise<Response> {
  const headers = new Headers(options.headers);
  const bearer = token();
  if (bearer) headers.set("authorization", `Bearer ${bearer}`);
  let response: Response;
  try {
    response = await fetch(API + path, { ...options, method, headers, credentials: "omit" });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Problem(0, "unreachable", "the server does not answer");
  }
  if (response.ok) return response;
  const problem = await problemOf(response);
  if (problem.status === 401) signedOut();
  throw problem;
}

async function problemOf(response: Response): Promise<Problem> {
  try {
    const body = (await response.json()) as { code?: string; detail?: string; field?: string };
    return new Problem(response.status, body.code ?? "error", body.detail ?? response.statusText, body.field ?? null);
  } catch {
    return new Problem(response.status, "error", response.statusText || `status ${response.status}`);
  }
}

interface Options {
  signal?: AbortSignal | undefined;
  /** Key under which the same call made again has the same effect once. */
  key?: string;
}

export async function call<T>(method: string, path: string, body?: unknown, more: Options = {}): Promise<T> {
  const headers = new Headers(more.key ? { "idempotency-key": more.key } : {});
  const options: RequestInit = { headers, signal: more.signal ?? null };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    headers.set("content-type", "application/json");
  }
  const response = await raw(method, path, options);
  const text = await response.text();
  return (text ? JSON.parse(text) : undefined) as T;
}

export const get = <T>(path: string, signal?: AbortSignal): Promise<T> => call<T>("GET", path, undefined, { signal });

/** All pages of a list. */
export async function all<T>(path: string, values: Values = {}, signal?: AbortSignal): Promise<T[]> {
  const found: T[] = [];
  let after: string | undefined;
  do {
    const page = await get<{ items: T[]; next?: string | null } | T[]>(path + query({ ...values, after }), signal);
    if (Array.isArray(page)) return page;
    found.push(...page.items);
    after = page.next ?? undefined;
  } while (after);
  return found;
}

export interface Told {
  id: string;
  event: string;
  data: string;
}

/** Parts of a stream of server-sent events. */
export async function* events(response: Response): AsyncGenerator<Told> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        const told = parse(block);
        if (told) yield told;
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

function parse(block: string): Told | null {
  const told: Told = { id: "", event: "message", data: "" };
  const lines: string[] = [];
  for (const line of block.split(/\r?\n/)) {
    const at = line.indexOf(":");
    if (at <= 0) continue;
    const value = line.slice(at + 1).replace(/^ /, "");
    const field = line.slice(0, at);
    if (field === "data") lines.push(value);
    else if (field === "id") told.id = value;
    else if (field === "event") told.event = value;
  }
  told.data = lines.join("\n");
  return lines.length ? told : null;
}

export type Link = "connecting" | "live" | "lost" | "missing";

interface Following {
  on: (told: Told) => void;
  state?: (link: Link, why?: string) => void;
  signal: AbortSignal;
}

/** Follow a stream until the signal, from where it was when the connection was lost. */
export async function follow(path: string, { on, state, signal }: Following): Promise<void> {
  let last = "";
  let wait = 500;
  while (!signal.aborted) {
    try {
      state?.("connecting");
      const headers: Record<string, string> = { accept: "text/event-stream" };
      if (last) headers["last-event-id"] = last;
      const response = await raw("GET", path, { headers, signal });
      state?.("live");
      for await (const told of events(response)) {
        if (told.id) last = told.id;
        wait = 500;
        on(told);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Problem && error.status >= 400 && error.status < 500 && error.status !== 429) {
        state?.("missing", error.isMissing ? "this server does not offer it" : error.message);
        return;
      }
    }
    if (signal.aborted) return;
    state?.("lost");
    await pause(wait, signal);
    wait = Math.min(wait * 2, 10_000);
  }
}

export function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}

/** A WebSocket of the API; browsers send no header there, so the token is named as a protocol. */
export function openSocket(path: string): WebSocket {
  const scheme = location.protocol === "https:" ? "wss:" : "ws:";
  const bearer = token();
  const protocols = ["skerry.v1", ...(bearer ? [`skerry.bearer.${bearer}`] : [])];
  const socket = new WebSocket(`${scheme}//${location.host}${API}${path}`, protocols);
  socket.binaryType = "arraybuffer";
  return socket;
}

/** A key for a call that makes something; also where the page is not served by TLS, and so has no randomUUID. */
export function newKey(): string {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (each) => each.toString(16).padStart(2, "0")).join("");
}
