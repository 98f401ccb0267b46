// All sandboxes, live: only the rows that are seen exist, so that thousands cost no more than a few.
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import { cause, duration, whole } from "./format";
import { go, path, useKeys, useLive } from "./hooks";
import { live } from "./live";
import { Curve, LinkMark, Notice, StateMark, cpuText, memoryText } from "./parts";
import type { Sandbox } from "./types";

const ROW = 48;
const SPARE = 6;

type Order = "name" | "age" | "end" | "cpu" | "memory";

const last = (values: number[] | undefined) => values?.[values.length - 1] ?? -1;

const COMPARE: Record<Order, (a: Sandbox, b: Sandbox) => number> = {
  name: (a, b) => title(a).localeCompare(title(b)),
  age: (a, b) => b.created_at - a.created_at,
  end: (a, b) => (a.ends_at ?? Infinity) - (b.ends_at ?? Infinity) || b.created_at - a.created_at,
  cpu: (a, b) => last(live.curves.get(b.id)?.cpu) - last(live.curves.get(a.id)?.cpu),
  memory: (a, b) => last(live.curves.get(b.id)?.memory) - last(live.curves.get(a.id)?.memory),
};

export function title(sandbox: Sandbox): string {
  return sandbox.name ?? sandbox.id.slice(0, 8);
}

/** Every word must be somewhere: in the id, name, state, provider, project or a label. */
function fits(sandbox: Sandbox, words: string[]): boolean {
  const labels = Object.entries(sandbox.labels).map(([name, value]) => `${name}=${value}`);
  const { id, name, state, provider, project } = sandbox;
  const text = [id, name, state, provider, project, sandbox.spec["image"], ...labels].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

export function ending(sandbox: Sandbox, now: number): string {
  if (sandbox.state === "destroyed") return cause(sandbox.cause) || "ended";
  if (sandbox.doomed) return "being destroyed";
  const parts: string[] = [];
  if (sandbox.ends_at) parts.push(`in ${duration(sandbox.ends_at - now)}`);
  const idle = sandbox.spec["idle_s"];
  if (typeof idle === "number" && idle > 0) parts.push(`idle ${duration(idle)}`);
  if (sandbox.ephemeral) parts.push("with its maker");
  return parts.join(", ") || "never";
}

let keptFilter = "";
let keptOrder: Order = "age";

export function ListView() {
  useLive(true);
  const [filter, setFilter] = useState(keptFilter);
  const [order, setOrder] = useState<Order>(keptOrder);
  const [ended, setEnded] = useState(false);
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => {
    if (ended) live.wantEnded();
  }, [ended]);
  keptFilter = filter;
  keptOrder = order;
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const known = [...live.sandboxes.values()];
  const alive = known.filter((each) => ended || each.state !== "destroyed");
  const rows = alive.filter((each) => fits(each, words)).sort(COMPARE[order]);
  const counts = useMemo(() => count(known), [known]);
  useKeys([{ keys: "/", what: "Filter sandboxes", run: () => input.current?.focus() }]);

  return (
    <section class="list" aria-labelledby="title">
      <div class="head">
        <h1 id="title">Sandboxes</h1>
        <LinkMark link={live.link} />
        <a class="button primary" href={path("new")}>
          New sandbox
        </a>
      </div>
      <div class="row tools">
        <input
          ref={input}
          type="search"
          placeholder="Filter by name, state, provider, label …"
          aria-label="Filter sandboxes"
          value={filter}
          onInput={(event) => setFilter(event.currentTarget.value)}
          onKeyDown={(event) => event.key === "Escape" && (setFilter(""), event.currentTarget.blur())}
        />
        <select aria-label="Order" value={order} onChange={(event) => setOrder(event.currentTarget.value as Order)}>
          <option value="age">Newest first</option>
          <option value="name">By name</option>
          <option value="end">Ends soonest</option>
          <option value="cpu">Most CPU</option>
          <option value="memory">Most memory</option>
        </select>
        <label class="check">
          <input type="checkbox" checked={ended} onChange={(event) => setEnded(event.currentTarget.checked)} /> ended
        </label>
        <span class="quiet" role="status">
          {words.length ? `${rows.length} of ${alive.length}` : counts}
        </span>
      </div>
      {live.error && <Notice kind="error">{live.error}</Notice>}
      {rows.length ? (
        <Table rows={rows} all={order === "cpu" || order === "memory"} />
      ) : (
        <div class="empty">{live.loaded ? <Empty filtered={words.length > 0} /> : <p>Looking …</p>}</div>
      )}
    </section>
  );
}

function Empty({ filtered }: { filtered: boolean }) {
  if (filtered) return <p>No sandbox fits this filter.</p>;
  return (
    <>
      <p>There are no sandboxes yet.</p>
      <p>
        <a href={path("new")}>Make one</a>, or press <kbd>n</kbd>.
      </p>
    </>
  );
}

function count(sandboxes: Sandbox[]): string {
  const found = new Map<string, number>();
  for (const each of sandboxes) found.set(each.state, (found.get(each.state) ?? 0) + 1);
  return [...found].map(([state, number]) => `${number} ${state}`).join(" · ");
}

let keptTop = 0;
let keptId: string | null = null;

/** `all`: the curves of all are wanted, and not of those that are seen alone. */
function Table({ rows, all }: { rows: Sandbox[]; all: boolean }) {
  const body = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(keptTop);
  const [height, setHeight] = useState(600);
  const [bar, setBar] = useState(0);
  const [chosen, setChosen] = useState<string | null>(keptId);
  const now = Date.now() / 1000;
  keptTop = top;
  keptId = chosen;
  useLayoutEffect(() => {
    const element = body.current!;
    element.scrollTop = keptTop;
    const seen = new ResizeObserver(() => {
      setHeight(element.clientHeight);
      setBar(element.offsetWidth - element.clientWidth);
    });
    seen.observe(element);
    seen.observe(element.firstElementChild!);
    return () => seen.disconnect();
  }, []);
  useEffect(() => {
    const element = body.current!;
    if (element.scrollTop > rows.length * ROW) element.scrollTop = 0;
  }, [rows.length]);

  const first = Math.max(0, Math.floor(top / ROW) - SPARE);
  const seen = rows.slice(first, first + Math.ceil(height / ROW) + 2 * SPARE);
  const ids = all ? null : seen.map((each) => each.id);
  useEffect(() => live.want(ids), [ids?.join()]);
  const at = rows.findIndex((each) => each.id === chosen);
  const choose = (to: number) => {
    const index = Math.max(0, Math.min(rows.length - 1, to));
    const element = body.current!;
    if (index * ROW < element.scrollTop) element.scrollTop = index * ROW;
    if ((index + 1) * ROW > element.scrollTop + element.clientHeight)
      element.scrollTop = (index + 1) * ROW - element.clientHeight;
    setTop(element.scrollTop);
    setChosen(rows[index]!.id);
  };
  const onKey = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor(height / ROW) - 1);
    const moves: Record<string, number> = {
      ArrowDown: at + 1,
      j: at + 1,
      ArrowUp: at - 1,
      k: at - 1,
      PageDown: at + page,
      PageUp: at - page,
      Home: 0,
      End: rows.length - 1,
    };
    const to = moves[event.key];
    if (to !== undefined && !event.ctrlKey && !event.metaKey && !event.altKey) choose(to);
    else if (event.key === "Enter" && at >= 0) go("sandboxes", rows[at]!.id);
    else return;
    event.preventDefault();
  };

  return (
    <div class="table" role="grid" aria-label="Sandboxes" aria-rowcount={rows.length + 1}>
      <div class="tr th" role="row" aria-rowindex={1} style={{ marginRight: `${bar}px` }}>
        <span role="columnheader">Name</span>
        <span role="columnheader">State</span>
        <span role="columnheader" class="wide">Provider</span>
        <span role="columnheader" class="wide">Age</span>
        <span role="columnheader" class="wide">Ends</span>
        <span role="columnheader">CPU</span>
        <span role="columnheader">Memory</span>
      </div>
      <div
        ref={body}
        class="rows"
        role="rowgroup"
        tabIndex={0}
        aria-label="Sandboxes: arrow keys move, Enter opens"
        aria-activedescendant={at >= 0 ? `row-${chosen}` : undefined}
        onScroll={(event) => setTop(event.currentTarget.scrollTop)}
        onKeyDown={onKey}
        onFocus={() => at < 0 && choose(0)}
      >
        <div class="space" style={{ height: `${rows.length * ROW}px` }}>
          {seen.map((each, offset) => (
            <Row key={each.id} sandbox={each} index={first + offset} chosen={each.id === chosen} now={now} />
          ))}
        </div>
      </div>
    </div>
  );
}

function Row({ sandbox, index, chosen, now }: { sandbox: Sandbox; index: number; chosen: boolean; now: number }) {
  const curves = live.curves.get(sandbox.id);
  const memory = typeof sandbox.spec["memory"] === "number" ? sandbox.spec["memory"] : 0;
  const labels = Object.entries(sandbox.labels).filter(([name]) => !name.startsWith("skerry."));
  const name = title(sandbox);
  return (
    <div
      class="tr"
      role="row"
      id={`row-${sandbox.id}`}
      aria-rowindex={index + 2}
      aria-selected={chosen}
      style={{ transform: `translateY(${index * ROW}px)` }}
      onClick={() => go("sandboxes", sandbox.id)}
    >
      <span role="gridcell" class="name">
        <a href={path("sandboxes", sandbox.id)} tabIndex={-1} title={sandbox.id}>
          {name}
        </a>
        <small>
          {sandbox.name !== null && <code>{sandbox.id.slice(0, 8)}</code>}
          {labels.map(([key, value]) => (
            <span key={key} class="label">{value ? `${key}=${value}` : key}</span>
          ))}
        </small>
      </span>
      <span role="gridcell">
        <StateMark state={sandbox.state} doomed={sandbox.doomed} />
      </span>
      <span role="gridcell" class="wide">
        {sandbox.provider}
      </span>
      <span role="gridcell" class="wide num" title={whole(sandbox.created_at)}>
        {duration(now - sandbox.created_at)}
      </span>
      <span role="gridcell" class="wide ends" title={sandbox.ends_at ? whole(sandbox.ends_at) : undefined}>
        {ending(sandbox, now)}
      </span>
      <span role="gridcell" class="measure">
        <Curve values={curves?.cpu} top={100} label={`CPU ${cpuText(curves?.cpu)}`} />
        <small class="num">{cpuText(curves?.cpu)}</small>
      </span>
      <span role="gridcell" class="measure">
        <Curve values={curves?.memory} top={memory || 64 * 2 ** 20} label={`memory ${memoryText(curves?.memory)}`} />
        <small class="num">{memoryText(curves?.memory)}</small>
      </span>
    </div>
  );
}
