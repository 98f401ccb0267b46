// A new sandbox: a form that offers what the chosen provider can do, and nothing else.
import { useEffect, useRef, useState } from "preact/hooks";
import { call, newKey } from "./api";
import { go, path, useAnswer, useWork } from "./hooks";
import { live } from "./live";
import { Field, Notice, Waiting } from "./parts";
import type { Page, Provider, Sandbox } from "./types";

type Form = Record<string, string>;

const EMPTY: Form = { lifetime: "2h", network: "none" };
const NETWORKS: [string, string][] = [
  ["none", "none: its own loopback and nothing else"],
  ["rules", "rules: what you allow, and nothing else"],
  ["bridge", "bridge: behind the provider's bridge"],
  ["host", "host: no isolation of the network"],
];

function lines(text: string | undefined): string[] {
  return (text ?? "").split(/[\n,]/).map((each) => each.trim()).filter(Boolean);
}

function pairs(text: string | undefined): Record<string, string> {
  const rows = (text ?? "").split("\n").filter((each) => each.trim());
  return Object.fromEntries(
    rows.map((row) => {
      const at = row.indexOf("=");
      return at < 0 ? [row.trim(), ""] : [row.slice(0, at).trim(), row.slice(at + 1)];
    }),
  );
}

/** The fields of a spec that were filled in. */
function spec(form: Form, provider: Provider | undefined): Record<string, unknown> {
  const body: Record<string, unknown> = {};
  if (form["provider"]) body["provider"] = form["provider"];
  for (const name of ["name", "image", "memory", "disk", "lifetime", "idle", "user", "command"])
    if (form[name]?.trim() && (name !== "image" || honours(provider, "image"))) body[name] = form[name].trim();
  if (form["cpus"]) body["cpus"] = Number(form["cpus"]);
  if (form["pids"]) body["pids"] = Number(form["pids"]);
  if (form["lifetime"] === "never") body["lifetime"] = null;
  if (form["network"] && form["network"] !== "none") body["network"] = form["network"];
  if (form["network"] === "rules") {
    if (lines(form["allow"]).length) body["allow"] = lines(form["allow"]);
    if (lines(form["deny"]).length) body["deny"] = lines(form["deny"]);
    if (form["egress"]?.trim()) body["egress"] = form["egress"].trim();
  }
  if (lines(form["ports"]).length) body["ports"] = lines(form["ports"]);
  if (form["labels"]?.trim()) body["labels"] = pairs(form["labels"]);
  if (form["env"]?.trim()) body["env"] = pairs(form["env"]);
  if (form["writable_root"] && honours(provider, "writable_root")) body["writable_root"] = true;
  if (form["admin"] && honours(provider, "admin")) body["admin"] = true;
  return body;
}

function honours(provider: Provider | undefined, field: string): boolean {
  return !provider?.honours || provider.honours.includes(field);
}

export function CreateView() {
  const answer = useAnswer<Page<Provider>>("/providers");
  const [form, setForm] = useState<Form>(EMPTY);
  const work = useWork();
  const name = useRef<HTMLInputElement>(null);
  const providers = answer.data?.items ?? [];
  const here = providers.filter((each) => each.available);
  const provider = providers.find((each) => each.name === form["provider"]);
  useEffect(() => name.current?.focus(), []);
  useEffect(() => {
    const first = providers.find((each) => each.default && each.available) ?? providers.find((each) => each.available);
    if (first && !form["provider"]) setForm((before) => ({ ...before, provider: first.name }));
  }, [answer.data]);

  const set = (field: string) => (event: { currentTarget: HTMLInputElement | HTMLTextAreaElement | HTMLSelectElement }) => {
    const element = event.currentTarget;
    const value = element.type === "checkbox" ? ((element as HTMLInputElement).checked ? "yes" : "") : element.value;
    setForm((before) => ({ ...before, [field]: value }));
  };
  const wrong = (field: string) => (work.field.split(/[.[]/)[0] === field ? work.error : undefined);
  const input = (field: string, more: Record<string, unknown> = {}) => (id: string) => (
    <input id={id} value={form[field] ?? ""} onInput={set(field)} spellcheck={false} autocomplete="off" {...more} />
  );
  const area = (field: string, hint: string) => (id: string) => (
    <textarea id={id} rows={3} placeholder={hint} value={form[field] ?? ""} onInput={set(field)} spellcheck={false} />
  );
  const submit = (event: Event) => {
    event.preventDefault();
    work.run(async () => {
      const made = await call<Sandbox>("POST", "/sandboxes", spec(form, provider), { key: newKey() });
      live.put(made);
      go("sandboxes", made.id);
    });
  };

  return (
    <section class="narrow" aria-labelledby="title">
      <div class="head">
        <h1 id="title">New sandbox</h1>
      </div>
      <form class="card" onSubmit={submit}>
        <Field label="Name" hint="Lower case letters, digits, dots and dashes; it may have none." wrong={wrong("name")}>
          {input("name", { ref: name, pattern: "[a-z0-9][a-z0-9._\\-]*", maxLength: 63 })}
        </Field>
        <fieldset class="choices">
          <legend>Provider</legend>
          {!providers.length && <Waiting answer={answer} what="a list of its providers; its default is used" />}
          {here.map((each) => (
            <Choice key={each.name} provider={each} chosen={each.name === form["provider"]} choose={set("provider")} />
          ))}
        </fieldset>
        {providers.length > here.length && (
          <details>
            <summary>{providers.length - here.length} others are not available here</summary>
            <dl class="facts">
              {providers.filter((each) => !each.available).map((each) => (
                <div key={each.name}>
                  <dt>{each.name}</dt>
                  <dd>{each.reason || "not available"}</dd>
                </div>
              ))}
            </dl>
          </details>
        )}
        {honours(provider, "image") && (
          <Field
            label={provider?.needs_image ? "Image" : "Image (optional)"}
            hint="The name of an image that the provider has or can pull."
            wrong={wrong("image")}
          >
            {input("image", { placeholder: "debian:12", required: provider?.needs_image ?? false })}
          </Field>
        )}
        <div class="grid">
          <Field label="Memory" wrong={wrong("memory")}>{input("memory", { placeholder: "512M" })}</Field>
          <Field label="CPUs" wrong={wrong("cpus")}>
            {input("cpus", { type: "number", min: 0.01, step: "any", placeholder: "1" })}
          </Field>
          <Field label="Disk" wrong={wrong("disk")}>{input("disk", { placeholder: "1G" })}</Field>
          <Field label="Processes" wrong={wrong("pids")}>{input("pids", { type: "number", min: 1, placeholder: "256" })}</Field>
          <Field label="Lifetime" hint="2h, 30m, never" wrong={wrong("lifetime")}>{input("lifetime")}</Field>
          <Field label="Ends when idle for" wrong={wrong("idle")}>{input("idle", { placeholder: "never" })}</Field>
        </div>
        <Field label="Network" wrong={wrong("network")}>
          {(id) => (
            <select id={id} value={form["network"]} onChange={set("network")}>
              {NETWORKS.map(([value, text]) => (
                <option key={value} value={value}>
                  {text}
                </option>
              ))}
            </select>
          )}
        </Field>
        {form["network"] === "rules" && (
          <div class="grid">
            <Field label="Allow" wrong={wrong("allow")}>{area("allow", "pypi.org\n*.pythonhosted.org\ngithub.com:22")}</Field>
            <Field label="Deny" wrong={wrong("deny")}>{area("deny", "example.com")}</Field>
            <Field label="Sends in a second" hint="At most; more of it waits." wrong={wrong("egress")}>
              {input("egress", { placeholder: "10M" })}
            </Field>
          </div>
        )}
        <details>
          <summary>Command, ports, environment, labels</summary>
          <Field label="Command that is kept running" wrong={wrong("command")}>{input("command", { placeholder: "python3 -m http.server 8000" })}</Field>
          <Field label="Ports" hint="With commas: 3000, 8080:80" wrong={wrong("ports")}>{input("ports")}</Field>
          <div class="grid">
            <Field label="Environment" wrong={wrong("env")}>{area("env", "NAME=value")}</Field>
            <Field label="Labels" wrong={wrong("labels")}>{area("labels", "team=blue")}</Field>
          </div>
          {honours(provider, "writable_root") && (
            <label class="check">
              <input type="checkbox" onChange={set("writable_root")} /> the files of its image can be changed
            </label>
          )}
          {honours(provider, "admin") && (
            <label class="check">
              <input type="checkbox" onChange={set("admin")} /> it is root within its box, to install packages
            </label>
          )}
        </details>
        {work.error && !["name", "memory", "cpus"].includes(work.field) && <Notice kind="error">{work.error}</Notice>}
        <div class="row end">
          <a class="button" href={path("sandboxes")}>
            Cancel
          </a>
          <button type="submit" class="primary" disabled={work.busy}>
            {work.busy ? "Making it …" : "Create"}
          </button>
        </div>
      </form>
    </section>
  );
}

interface ChoiceProps {
  provider: Provider;
  chosen: boolean;
  choose: (event: { currentTarget: HTMLInputElement }) => void;
}

function Choice({ provider, chosen, choose }: ChoiceProps) {
  const can = [provider.isolation, ...(provider.capabilities ?? [])].filter(Boolean).join(" · ");
  return (
    <label class="choice">
      <input
        type="radio"
        name="provider"
        value={provider.name}
        checked={chosen}
        onChange={choose}
      />
      <span>
        <b>{provider.name}</b>
        <small>{can}</small>
      </span>
    </label>
  );
}
