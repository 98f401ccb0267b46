// All sandboxes, kept as they are on the server: a list once, then whatever events tell of.
import { Link, Problem, all, follow, get, pause, query, sandboxPath } from "./api";
import type { History, Page, Sandbox, Series } from "./types";

const FEW = 12;
const GATHER_MS = 120;
const CURVES_MS = 4000;
const POINTS = 40;

type Listener = () => void;

/** Something that changes and tells whoever looks at it, at most once a frame. */
class Watched {
  private readonly listeners = new Set<Listener>();
  private due = false;

  listen(listener: Listener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  protected changed(): void {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      for (const listener of [...this.listeners]) listener();
    });
  }
}

export class Live extends Watched {
  readonly sandboxes = new Map<string, Sandbox>();
  readonly curves = new Map<string, Series>();
  link: Link = "connecting";
  error = "";
  loaded = false;
  private readonly dirty = new Set<string>();
  private gathering = false;
  private ended = false;
  private wanted: string[] | null = [];
  private hurry: () => void = () => undefined;
  private stop: AbortController | null = null;

  start(): void {
    this.close();
    const stop = (this.stop = new AbortController());
    void this.begin(stop.signal);
    void this.keepCurves(stop.signal);
  }

  close(): void {
    this.stop?.abort();
    this.stop = null;
    this.sandboxes.clear();
    this.curves.clear();
    this.loaded = false;
  }

  /** Look at one again now, such as after a change that we asked for. */
  async refresh(id: string): Promise<void> {
    try {
      this.put(await get<Sandbox>(sandboxPath(id)));
    } catch (error) {
      if (error instanceof Problem && (error.status === 404 || error.status === 410)) this.sandboxes.delete(id);
    }
    this.changed();
  }

  /** Have those that have ended too. */
  wantEnded(): void {
    if (this.ended || !this.stop) return;
    this.ended = true;
    void this.relist(this.stop.signal);
  }

  put(sandbox: Sandbox): void {
    const known = this.sandboxes.get(sandbox.id);
    if (known && known.version > sandbox.version) return;
    this.sandboxes.set(sandbox.id, sandbox);
    this.changed();
  }

  private async begin(signal: AbortSignal): Promise<void> {
    await follow(`/events${query({ follow: true, after: -1 })}`, {
      signal,
      on: (told) => {
        const event = JSON.parse(told.data) as { sandbox?: string };
        if (event.sandbox) this.touch(event.sandbox, signal);
      },
      state: (link) => {
        this.link = link;
        // listed once events come, so that nothing is missed between the two
        if (link === "live") void this.relist(signal);
        if (link === "missing") void this.relist(signal).then(() => this.poll(signal));
        this.changed();
      },
    });
  }

  private async poll(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      await pause(3000, signal);
      await this.relist(signal);
    }
  }

  private async relist(signal: AbortSignal): Promise<void> {
    try {
      const found = await all<Sandbox>("/sandboxes", { limit: 1000, ended: this.ended || null }, signal);
      const ids = new Set(found.map((each) => each.id));
      for (const [id, each] of this.sandboxes) if (!ids.has(id) && each.state !== "destroyed") this.sandboxes.delete(id);
      for (const each of found) this.put(each);
      this.error = "";
    } catch (error) {
      if (signal.aborted) return;
      this.error = error instanceof Error ? error.message : String(error);
    }
    this.loaded = true;
    this.changed();
  }

  private touch(id: string, signal: AbortSignal): void {
    this.dirty.add(id);
    if (this.gathering) return;
    this.gathering = true;
    void pause(GATHER_MS, signal).then(async () => {
      this.gathering = false;
      const ids = [...this.dirty];
      this.dirty.clear();
      if (signal.aborted) return;
      if (ids.length > FEW) await this.relist(signal);
      else await Promise.all(ids.map((each) => this.refresh(each)));
    });
  }

  /** Say whose curves are looked at; nobody else's are asked for. `null` is everybody's. */
  want(ids: string[] | null): void {
    const news = ids?.some((id) => !this.wanted?.includes(id)) ?? this.wanted !== null;
    this.wanted = ids;
    if (news) this.hurry();
  }

  private async keepCurves(signal: AbortSignal): Promise<void> {
    while (!signal.aborted) {
      if (document.visibilityState === "visible" && this.wanted?.length !== 0) {
        try {
          const many = this.wanted === null ? { points: 12 } : { points: POINTS };
          const named = (this.wanted ?? []).map((id) => `&sandbox=${encodeURIComponent(id)}`).join("");
          const { items } = await get<Page<History>>(`/metrics/history${query(many)}${named}`, signal);
          for (const each of items) this.curves.set(each.id, { cpu: each.cpu_percent, memory: each.memory_bytes });
          this.changed();
        } catch (error) {
          if (error instanceof Problem && error.isMissing) return;
        }
      }
      const early = new AbortController();
      this.hurry = () => void setTimeout(() => early.abort(), GATHER_MS);
      await pause(CURVES_MS, AbortSignal.any([signal, early.signal]));
    }
  }
}

export const live = new Live();
