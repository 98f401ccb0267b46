// One sandbox: what it is now, what can be done with it, and its parts as tabs.
import { useEffect, useState } from "preact/hooks";
import { call, query, sandboxPath } from "./api";
import { DetailsView } from "./details";
import { FilesView } from "./files";
import { cause, duration } from "./format";
import { go, path, useAnswer, useKeys, useLive, useWork } from "./hooks";
import { ending, title } from "./list";
import { live } from "./live";
import { NetworkView } from "./network";
import { Confirm, Curve, Dialog, Field, Notice, StateMark, Tabs, Waiting, cpuText, memoryText } from "./parts";
import { PortsView } from "./ports";
import { ProcessesView } from "./processes";
import { TerminalsView } from "./terminal";
import type { Page, Provider, Sandbox } from "./types";

const TABS: [string, string][] = [
  ["terminal", "Terminal"],
  ["files", "Files"],
  ["processes", "Processes"],
  ["network", "Network"],
  ["ports", "Ports"],
  ["details", "Details"],
];

export function SandboxView({ id, tab, rest }: { id: string; tab: string; rest: string[] }) {
  useLive(true);
  const asked = useAnswer<Sandbox>(sandboxPath(id));
  useEffect(() => {
    if (asked.data) live.put(asked.data);
  }, [asked.data]);
  useEffect(() => live.want([asked.data?.id ?? id]), [asked.data?.id, id]);
  const byName = () => [...live.sandboxes.values()].find((each) => each.name === id && each.state !== "destroyed");
  const sandbox = live.sandboxes.get(asked.data?.id ?? id) ?? byName() ?? asked.data;
  useKeys(TABS.map(([name, what], at) => ({ keys: String(at + 1), what, run: () => go("sandboxes", id, name) })));
  if (!sandbox) {
    return (
      <section>
        <Back />
        <Waiting answer={{ ...asked, missing: false }} what="this" />
      </section>
    );
  }
  const curves = live.curves.get(sandbox.id);
  const now = Date.now() / 1000;
  return (
    <section class="sandbox" aria-labelledby="title">
      <Back />
      <div class="head">
        <h1 id="title">{title(sandbox)}</h1>
        <StateMark state={sandbox.state} doomed={sandbox.doomed} />
        <Actions sandbox={sandbox} />
      </div>
      <p class="facts-line">
        <span>{sandbox.provider}</span>
        <span title={sandbox.id}>
          <code>{sandbox.id.slice(0, 8)}</code>
        </span>
        <span>{duration(now - sandbox.created_at)} old</span>
        <span>{sandbox.state === "destroyed" ? `ended: ${cause(sandbox.cause)}` : `ends: ${ending(sandbox, now)}`}</span>
        {curves && sandbox.state !== "destroyed" && (
          <span class="measure">
            <Curve values={curves.cpu} top={100} label={`CPU ${cpuText(curves.cpu)}`} /> {cpuText(curves.cpu)}
            <Curve values={curves.memory} top={64 * 2 ** 20} label={`memory ${memoryText(curves.memory)}`} />{" "}
            {memoryText(curves.memory)}
          </span>
        )}
      </p>
      {sandbox.detail && <Notice kind="error">{sandbox.detail}</Notice>}
      <Tabs tabs={TABS} current={tab} href={(name) => path("sandboxes", id, name)} />
      <Part sandbox={sandbox} tab={tab} rest={rest} />
    </section>
  );
}

function Part({ sandbox, tab, rest }: { sandbox: Sandbox; tab: string; rest: string[] }) {
  if (tab === "details") return <DetailsView sandbox={sandbox} />;
  if (tab === "network") return <NetworkView sandbox={sandbox} />;
  if (sandbox.state !== "ready") return <Notice>It is {sandbox.state}; there is nothing to see here now.</Notice>;
  if (tab === "files") return <FilesView id={sandbox.id} folder={rest.join("/")} />;
  if (tab === "processes") return <ProcessesView sandbox={sandbox} />;
  if (tab === "ports") return <PortsView sandbox={sandbox} />;
  return <TerminalsView key={sandbox.id} id={sandbox.id} />;
}

function Back() {
  return (
    <a class="back" href={path("sandboxes")}>
      ← Sandboxes
    </a>
  );
}

type Asked = "snapshot" | "fork" | "destroy" | "stop" | null;

function Actions({ sandbox }: { sandbox: Sandbox }) {
  const [asked, setAsked] = useState<Asked>(null);
  const providers = useAnswer<Page<Provider>>("/providers");
  const work = useWork();
  const can = providers.data?.items.find((each) => each.name === sandbox.provider)?.capabilities;
  const offers = (verb: string) => !can || can.includes(verb);
  const base = sandboxPath(sandbox.id);
  const act = (verb: string, body = {}) => {
    setAsked(null);
    work.run(async () => {
      live.put(await call<Sandbox>("POST", `${base}/${verb}`, body));
    });
  };
  const destroy = () => {
    setAsked(null);
    work.run(async () => {
      await call("DELETE", base + query({ grace_s: 2 }));
      await live.refresh(sandbox.id);
      go("sandboxes");
    });
  };
  if (sandbox.state === "destroyed") return null;
  return (
    <div class="row actions" role="group" aria-label="Actions">
      {sandbox.state === "ready" && offers("pause") && <Verb name="Pause" run={() => act("pause")} busy={work.busy} />}
      {sandbox.state === "ready" && offers("memory") && (
        <Verb name="Sleep" run={() => act("pause", { save: true })} busy={work.busy} />
      )}
      {["paused", "asleep"].includes(sandbox.state) && (
        <Verb name="Resume" run={() => act("resume")} busy={work.busy} />
      )}
      {sandbox.state === "ready" && offers("stop") && <Verb name="Stop" run={() => setAsked("stop")} busy={work.busy} />}
      {sandbox.state === "stopped" && <Verb name="Start" run={() => act("start")} busy={work.busy} />}
      {offers("snapshot") && <Verb name="Snapshot" run={() => setAsked("snapshot")} busy={work.busy} />}
      {offers("snapshot") && <Verb name="Fork" run={() => setAsked("fork")} busy={work.busy} />}
      <button type="button" class="danger" disabled={work.busy} onClick={() => setAsked("destroy")}>
        Destroy
      </button>
      {work.error && <Notice kind="error">{work.error}</Notice>}
      {asked === "destroy" && (
        <Confirm
          title={`Destroy ${title(sandbox)}?`}
          text="Its files and processes are gone then. Its volumes are kept."
          verb="Destroy"
          run={destroy}
          close={() => setAsked(null)}
        />
      )}
      {asked === "stop" && (
        <Confirm
          title={`Stop ${title(sandbox)}?`}
          text="Its processes end; its files stay, and it can be started again."
          verb="Stop"
          run={() => act("stop")}
          close={() => setAsked(null)}
        />
      )}
      {asked === "snapshot" && <Naming sandbox={sandbox} verb="Snapshot" close={() => setAsked(null)} />}
      {asked === "fork" && <Naming sandbox={sandbox} verb="Fork" close={() => setAsked(null)} />}
    </div>
  );
}

function Verb({ name, run, busy }: { name: string; run: () => void; busy: boolean }) {
  return (
    <button type="button" disabled={busy} onClick={run}>
      {name}
    </button>
  );
}

/** A dialog that asks for the name of what is made. */
function Naming({ sandbox, verb, close }: { sandbox: Sandbox; verb: "Snapshot" | "Fork"; close: () => void }) {
  const [name, setName] = useState("");
  const work = useWork();
  const submit = (event: Event) => {
    event.preventDefault();
    work.run(async () => {
      if (verb === "Snapshot") {
        await call("POST", `${sandboxPath(sandbox.id)}/snapshots`, { name });
      } else {
        const made = await call<Sandbox>("POST", `${sandboxPath(sandbox.id)}/fork`, name ? { name } : {});
        live.put(made);
        go("sandboxes", made.id);
      }
      close();
    });
  };
  return (
    <Dialog title={`${verb} ${title(sandbox)}`} close={close}>
      <form onSubmit={submit}>
        <Field label={verb === "Snapshot" ? "Name of the snapshot" : "Name of the fork (optional)"}>
          {(id) => (
            <input
              id={id}
              autofocus
              value={name}
              required={verb === "Snapshot"}
              onInput={(event) => setName(event.currentTarget.value)}
            />
          )}
        </Field>
        {work.error && <Notice kind="error">{work.error}</Notice>}
        <div class="row end">
          <button type="button" onClick={close}>
            Cancel
          </button>
          <button type="submit" class="primary" disabled={work.busy}>
            {work.busy ? "Working …" : verb}
          </button>
        </div>
      </form>
    </Dialog>
  );
}
