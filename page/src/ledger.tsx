// The ledger: what was done, by whom, with search, and as it happens.
import { useEffect, useState } from "preact/hooks";
import { Link, Problem, follow, get, query, sandboxPath } from "./api";
import { moment, text, whole } from "./format";
import { message, path as routeTo } from "./hooks";
import { Dialog, Facts, LinkMark, Notice } from "./parts";
import type { LedgerLine, Page } from "./types";

const MOST = 2000;
const FIRST = 200;

export interface Lines {
  lines: LedgerLine[];
  link: Link;
  error: string;
  more: (() => void) | null;
}

/** Lines that fit, the newest first: those there are, older ones when asked for, and new ones as they come. */
export function useLedger(filter: string): Lines {
  const [lines, setLines] = useState<LedgerLine[]>([]);
  const [next, setNext] = useState<string | null>(null);
  const [link, setLink] = useState<Link>("connecting");
  const [error, setError] = useState("");
  useEffect(() => {
    const stop = new AbortController();
    const { signal } = stop;
    setLines([]);
    setError("");
    const begin = async () => {
      const page = await get<Page<LedgerLine>>(`/ledger${query({ newest: true, limit: FIRST })}${filter}`, signal);
      setLines(page.items);
      setNext(page.next ?? null);
      let waiting: LedgerLine[] = [];
      const flush = () => {
        const come = waiting.reverse();
        waiting = [];
        if (!signal.aborted) setLines((before) => [...come, ...before].slice(0, MOST));
      };
      const on = ({ data }: { data: string }) => {
        if (!waiting.length) setTimeout(flush, 80);
        waiting.push(JSON.parse(data) as LedgerLine);
        if (waiting.length > MOST) waiting.shift();
      };
      // without a line there is no number to go on from; then all that comes from now on is new
      await follow(`/ledger/follow${query({ after: page.items[0]?.seq ?? "" }) || "?"}${filter}`, { on, state: setLink, signal });
    };
    begin().catch((failure: unknown) => {
      if (signal.aborted) return;
      setLink("missing");
      const missing = failure instanceof Problem && failure.isMissing;
      setError(missing ? "This server does not offer its ledger." : message(failure));
    });
    return () => stop.abort();
  }, [filter]);
  const more = async () => {
    try {
      const page = await get<Page<LedgerLine>>(`/ledger${query({ newest: true, limit: FIRST, after: next })}${filter}`);
      setLines((before) => [...before, ...page.items].slice(-MOST));
      setNext(page.next ?? null);
    } catch (failure) {
      setError(message(failure));
    }
  };
  return { lines, link, error, more: next === null ? null : () => void more() };
}

/** A line in words, without what has a column of its own. */
export function summary(line: LedgerLine): string {
  const facts = Object.entries(line.facts ?? {});
  return facts.map(([name, value]) => `${name} ${text(value)}`).join("  ").slice(0, 400);
}

function fits(line: LedgerLine, words: string[]): boolean {
  const all = `${line.kind} ${line.sandbox ?? ""} ${line.who.actor ?? ""} ${line.who.tool} ${summary(line)}`.toLowerCase();
  return words.every((word) => all.includes(word));
}

export function LedgerView() {
  const [search, setSearch] = useState("");
  const [sandbox, setSandbox] = useState("");
  const [kind, setKind] = useState("");
  const [shown, setShown] = useState<LedgerLine | null>(null);
  const [filter, setFilter] = useState("");
  useEffect(() => {
    const parts = { sandbox: sandbox.trim(), kind: kind.trim() };
    const timer = setTimeout(() => setFilter(query(parts).replace("?", "&")), 250);
    return () => clearTimeout(timer);
  }, [sandbox, kind]);
  const { lines, link, error, more } = useLedger(filter);
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = lines.filter((line) => fits(line, words));
  return (
    <section aria-labelledby="title">
      <div class="head">
        <h1 id="title">Ledger</h1>
        <LinkMark link={link} />
      </div>
      <div class="row tools">
        <input
          type="search"
          aria-label="Search in the lines"
          placeholder="Search …"
          value={search}
          onInput={(event) => setSearch(event.currentTarget.value)}
        />
        <input
          aria-label="Sandbox"
          placeholder="Sandbox: id or name"
          value={sandbox}
          onInput={(event) => setSandbox(event.currentTarget.value)}
        />
        <input
          aria-label="Kind of line"
          placeholder="Kind: exec, connect …"
          list="kinds"
          value={kind}
          onInput={(event) => setKind(event.currentTarget.value)}
        />
        <datalist id="kinds">
          {["create", "ready", "exec", "exit", "connect", "refuse", "close", "rules", "destroy", "end", "secret"].map((each) => (
            <option key={each} value={each} />
          ))}
        </datalist>
      </div>
      {error && <Notice kind="error">{error}</Notice>}
      <ol class="log ledger" aria-label="Lines of the ledger">
        {found.map((line) => (
          <li key={line.seq} class={`kind-${line.kind}`}>
            <time title={whole(line.time)}>{moment(line.time)}</time>
            <b>{line.kind}</b>
            <button type="button" class="plain entry" onClick={() => setShown(line)}>
              {summary(line) || "—"}
            </button>
            <span class="quiet who">{line.who.actor || line.who.tool}</span>
            {line.sandbox ? (
              <a href={routeTo("sandboxes", line.sandbox)}>
                <code>{line.sandbox.slice(0, 8)}</code>
              </a>
            ) : (
              <span />
            )}
          </li>
        ))}
        {!found.length && !error && <li class="quiet">No line fits.</li>}
      </ol>
      {more && (
        <button type="button" onClick={more}>
          Older lines
        </button>
      )}
      {shown && (
        <Dialog title={`${shown.kind}, line ${shown.seq}`} close={() => setShown(null)}>
          <p class="quiet">
            {whole(shown.time)} · {shown.who.actor || shown.who.tool} · uid {shown.who.uid}
            {shown.who.tenant ? ` · ${shown.who.tenant}` : ""}
          </p>
          {shown.sandbox && (
            <p>
              <a href={routeTo("sandboxes", shown.sandbox, "details")} title={sandboxPath(shown.sandbox)}>
                <code>{shown.sandbox}</code>
              </a>
            </p>
          )}
          <Facts of={shown.facts ?? {}} />
          <div class="row end">
            <button type="button" autofocus onClick={() => setShown(null)}>
              Close
            </button>
          </div>
        </Dialog>
      )}
    </section>
  );
}
