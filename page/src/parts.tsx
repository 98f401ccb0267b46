// Small parts that all views use.
import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";
import { quantity, size } from "./format";
import type { Answer } from "./hooks";
import type { Link } from "./api";

export function StateMark({ state, doomed }: { state: string; doomed?: boolean }) {
  const shown = doomed && state !== "destroyed" ? "ending" : state;
  return (
    <span class={`state state-${shown}`}>
      <i aria-hidden="true" />
      {shown}
    </span>
  );
}

const WIDTH = 72;
const HEIGHT = 20;

/** A small curve; `top` is the least that its height stands for. */
export function Curve({ values, top, label }: { values: number[] | undefined; top: number; label: string }) {
  if (!values || values.length < 2) return <span class="curve none" aria-label={`${label}: not measured`} />;
  const most = Math.max(top, ...values);
  const step = WIDTH / (values.length - 1);
  const points = values.map((value, at) => `${(at * step).toFixed(1)} ${(HEIGHT - 1 - (value / most) * (HEIGHT - 3)).toFixed(1)}`);
  const line = `M${points.join("L")}`;
  return (
    <svg class="curve" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={label} preserveAspectRatio="none">
      <path class="area" d={`${line}V${HEIGHT}H0Z`} />
      <path class="line" d={line} />
    </svg>
  );
}

export function cpuText(values: number[] | undefined): string {
  return values?.length ? `${Math.round(values[values.length - 1]!)} %` : "";
}

export function memoryText(values: number[] | undefined): string {
  return values?.length ? size(values[values.length - 1]!) : "";
}

export function Notice({ kind = "note", children }: { kind?: "note" | "error"; children: ComponentChildren }) {
  return (
    <p class={`notice ${kind}`} role={kind === "error" ? "alert" : "status"}>
      {children}
    </p>
  );
}

/** What there is instead of an answer: that it comes, that it failed, or that this server has none. */
export function Waiting({ answer, what }: { answer: Answer<unknown>; what: string }) {
  if (answer.missing) return <Notice>This server does not offer {what}.</Notice>;
  if (answer.error) return <Notice kind="error">{answer.error}</Notice>;
  return answer.loading ? <p class="quiet">Looking …</p> : null;
}

const LINKS: Record<Link, string> = {
  connecting: "connecting",
  live: "live",
  lost: "connection lost, trying again",
  missing: "not live",
};

export function LinkMark({ link, why }: { link: Link; why?: string }) {
  return (
    <span class={`link link-${link}`} role="status" title={why}>
      <i aria-hidden="true" />
      {LINKS[link]}
    </span>
  );
}

export function Dialog({ title, close, children }: { title: string; close: () => void; children: ComponentChildren }) {
  const element = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => {
    const before = document.activeElement as HTMLElement | null;
    element.current?.showModal();
    return () => before?.focus?.();
  }, []);
  return (
    <dialog
      ref={element}
      aria-labelledby={id}
      onCancel={(event) => (event.preventDefault(), close())}
      onClick={(event) => event.target === element.current && close()}
    >
      <div class="dialog">
        <h2 id={id}>{title}</h2>
        {children}
      </div>
    </dialog>
  );
}

/** A button that asks once more before it acts. */
export function Confirm(props: { title: string; text: string; verb: string; run: () => void; close: () => void }) {
  return (
    <Dialog title={props.title} close={props.close}>
      <p>{props.text}</p>
      <div class="row end">
        <button type="button" onClick={props.close}>
          Cancel
        </button>
        <button type="button" class="danger" autofocus onClick={props.run}>
          {props.verb}
        </button>
      </div>
    </Dialog>
  );
}

export function Field(props: { label: string; hint?: string; wrong?: string; children: (id: string) => ComponentChildren }) {
  const id = useId();
  return (
    <div class={props.wrong ? "field wrong" : "field"}>
      <label for={id}>{props.label}</label>
      {props.children(id)}
      {props.wrong ? (
        <small role="alert">{props.wrong}</small>
      ) : (
        props.hint && <small>{props.hint}</small>
      )}
    </div>
  );
}

export function Tabs(props: { tabs: [string, string][]; current: string; href: (tab: string) => string }) {
  return (
    <nav class="tabs" aria-label="Parts of this sandbox">
      {props.tabs.map(([tab, title]) => (
        <a key={tab} href={props.href(tab)} aria-current={tab === props.current ? "page" : undefined}>
          {title}
        </a>
      ))}
    </nav>
  );
}

/** Facts of any shape as names and text. */
export function Facts({ of }: { of: Record<string, unknown> }) {
  const entries = Object.entries(of);
  if (!entries.length) return <p class="quiet">Nothing.</p>;
  return (
    <dl class="facts">
      {entries.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{typeof value === "string" ? value : (quantity(name, value) ?? JSON.stringify(value, null, 1))}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Copy({ text }: { text: string }) {
  const [done, setDone] = useState(false);
  const copy = () => void navigator.clipboard?.writeText(text).then(() => setDone(true));
  useEffect(() => {
    const timer = done ? setTimeout(() => setDone(false), 1500) : undefined;
    return () => clearTimeout(timer);
  }, [done]);
  return (
    <button type="button" class="plain" onClick={copy}>
      {done ? "Copied" : "Copy"}
    </button>
  );
}
