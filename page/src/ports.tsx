// Ports of a sandbox, each with a link that a browser can open.
import { useState } from "preact/hooks";
import { call, sandboxPath } from "./api";
import { duration } from "./format";
import { useAnswer, useWork } from "./hooks";
import { Copy, Notice, Waiting } from "./parts";
import type { Page, Sandbox } from "./types";

interface PortLink {
  url: string;
  expires_at: number;
  public: boolean;
}

interface Port {
  port: number;
  listening: boolean | null;
  address: string | null;
  links: { id: string; public: boolean; expires_at: number }[];
}

export function PortsView({ sandbox }: { sandbox: Sandbox }) {
  const answer = useAnswer<Page<Port>>(`${sandboxPath(sandbox.id)}/ports`, 10_000);
  const [extra, setExtra] = useState<number[]>([]);
  const [port, setPort] = useState("");
  const known = answer.data?.items ?? [];
  const more = extra.filter((each) => !known.some((one) => one.port === each));
  const ports = [...known, ...more.map((each): Port => ({ port: each, listening: null, address: null, links: [] }))];
  const add = (event: Event) => {
    event.preventDefault();
    setExtra([...extra, Number(port)]);
    setPort("");
  };
  return (
    <div class="ports">
      {answer.data ? null : <Waiting answer={answer} what="ports" />}
      <ul class="cards">
        {ports.map((each) => (
          <PortCard key={each.port} id={sandbox.id} port={each} changed={answer.again} />
        ))}
      </ul>
      {answer.data && !ports.length && <p class="quiet">Nothing listens in it yet. Any port can have a link:</p>}
      <form class="row tools" onSubmit={add}>
        <input
          type="number"
          min={1}
          max={65535}
          aria-label="Port of the sandbox"
          placeholder="Port, such as 8000"
          value={port}
          onInput={(event) => setPort(event.currentTarget.value)}
        />
        <button type="submit" disabled={!port}>
          Add
        </button>
      </form>
    </div>
  );
}

function PortCard({ id, port, changed }: { id: string; port: Port; changed: () => void }) {
  const [link, setLink] = useState<PortLink | null>(null);
  const [open, setOpen] = useState(false);
  const work = useWork();
  const path = `${sandboxPath(id)}/ports/${port.port}/link`;
  const make = () =>
    work.run(async () => {
      setLink(await call<PortLink>("POST", path, { public: open }));
      changed();
    });
  const end = () =>
    work.run(async () => {
      await call("DELETE", path);
      setLink(null);
      changed();
    });
  // a link is only followed to where a browser shows a page
  const url = link && /^https?:\/\//.test(link.url) ? link.url : null;
  const last = Math.max(...port.links.map((each) => each.expires_at));
  return (
    <li class="card">
      <div class="row">
        <h2 class="num">{port.port}</h2>
        {port.address && <code class="quiet">{port.address}</code>}
        {port.listening !== null && (
          <span class={port.listening ? "state state-ready" : "state state-stopped"}>
            <i aria-hidden="true" />
            {port.listening ? "listens" : "nothing listens"}
          </span>
        )}
      </div>
      {url && link && (
        <p>
          <a href={url} target="_blank" rel="noopener noreferrer">
            Open in the browser
          </a>{" "}
          <Copy text={url} />
        </p>
      )}
      <p class="quiet">
        {port.links.length > 0
          ? `${port.links.some((each) => each.public) ? "Open to everybody" : "Open to whoever has a link"} for ${duration(last - Date.now() / 1000)}.`
          : "No link leads to it."}
      </p>
      <div class="row">
        <button type="button" class={url ? "" : "primary"} disabled={work.busy} onClick={make}>
          {url ? "Another link" : "Make a link"}
        </button>
        {port.links.length > 0 && (
          <button type="button" disabled={work.busy} onClick={end}>
            End its links
          </button>
        )}
        <label class="check">
          <input type="checkbox" checked={open} onChange={(event) => setOpen(event.currentTarget.checked)} /> public
        </label>
      </div>
      {work.error && <Notice kind="error">{work.error}</Notice>}
    </li>
  );
}
