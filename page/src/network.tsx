// What a sandbox may reach, and what was allowed and refused as it happens.
import { useState } from "preact/hooks";
import { call, query, sandboxPath } from "./api";
import { moment, size, text } from "./format";
import { useAnswer, useWork } from "./hooks";
import { useLedger } from "./ledger";
import { LinkMark, Notice, Waiting } from "./parts";
import type { Rules, Sandbox } from "./types";

export function NetworkView({ sandbox }: { sandbox: Sandbox }) {
  const base = `${sandboxPath(sandbox.id)}/network`;
  const answer = useAnswer<Rules>(base);
  const work = useWork();
  const rules = answer.data;
  const set = (allow: string[], deny: string[]) =>
    work.run(async () => {
      await call("PUT", base, { allow, deny });
      answer.again();
    });
  const change = sandbox.state !== "destroyed" && rules?.network === "rules";
  return (
    <div class="network">
      {rules ? null : <Waiting answer={answer} what="network rules" />}
      {work.error && <Notice kind="error">{work.error}</Notice>}
      {rules && rules.network !== "rules" && (
        <Notice>Its network is “{rules.network}”, which has no rules. Make one with the network “rules” to have some.</Notice>
      )}
      {rules && rules.network === "rules" && (
        <div class="grid">
          <RuleList title="Allowed" rules={rules.allow} change={change} set={(allow) => set(allow, rules.deny)} />
          <RuleList title="Refused" rules={rules.deny} change={change} set={(deny) => set(rules.allow, deny)} />
        </div>
      )}
      {rules && rules.reach.length > 0 && <p class="quiet">It may reach {rules.reach.join(", ")} of its fleet.</p>}
      {rules && Object.keys(rules.secrets).length > 0 && (
        <ul class="quiet" aria-label="Secrets">
          {Object.entries(rules.secrets).map(([name, hosts]) => (
            <li key={name}>
              <code>{name}</code> for {hosts.join(", ")}
            </li>
          ))}
        </ul>
      )}
      <Traffic id={sandbox.id} />
    </div>
  );
}

interface RuleListProps {
  title: string;
  rules: string[];
  change: boolean;
  set: (rules: string[]) => void;
}

function RuleList({ title, rules, change, set }: RuleListProps) {
  const [rule, setRule] = useState("");
  const add = (event: Event) => {
    event.preventDefault();
    set([...rules, rule.trim()]);
    setRule("");
  };
  return (
    <div class="card">
      <h2>{title}</h2>
      <ul class="rules">
        {rules.map((each) => (
          <li key={each}>
            <code>{each}</code>
            {change && (
              <button
                type="button"
                class="plain"
                aria-label={`Remove ${each}`}
                onClick={() => set(rules.filter((one) => one !== each))}
              >
                ×
              </button>
            )}
          </li>
        ))}
        {!rules.length && <li class="quiet">nothing</li>}
      </ul>
      {change && (
        <form class="row" onSubmit={add}>
          <input
            aria-label={`Add a rule: ${title}`}
            placeholder="pypi.org, github.com:22 …"
            spellcheck={false}
            value={rule}
            onInput={(event) => setRule(event.currentTarget.value)}
          />
          <button type="submit" disabled={!rule.trim()}>
            Add
          </button>
        </form>
      )}
    </div>
  );
}

const WORDS: Record<string, string> = { connect: "allowed", refuse: "refused", close: "closed", resolve: "looked up", secret: "secret" };

function Traffic({ id }: { id: string }) {
  const { lines, link, error } = useLedger(`${query({ sandbox: id }).replace("?", "&")}&kind=connect&kind=refuse&kind=close`);
  return (
    <>
      <div class="row tools">
        <h2>As it happens</h2>
        <LinkMark link={link} />
      </div>
      {error && <Notice>{error}</Notice>}
      <ol class="log" aria-label="Connections" aria-live="polite">
        {lines.map((line) => (
          <li key={line.seq} class={`kind-${line.kind}`}>
            <time>{moment(line.time)}</time>
            <b>{WORDS[line.kind] ?? line.kind}</b>
            <span>
              {text(line.facts?.["name"])}:{text(line.facts?.["port"])}
            </span>
            <span class="quiet">{about(line.facts ?? {})}</span>
          </li>
        ))}
        {!lines.length && <li class="quiet">Nothing went out yet.</li>}
      </ol>
    </>
  );
}

function about(facts: Record<string, unknown>): string {
  const { up, down, rule, why, reason, address } = facts;
  if (typeof up === "number" && typeof down === "number") return `${size(up)} up, ${size(down)} down`;
  return [rule && `by ${text(rule)}`, why ?? reason, address].filter(Boolean).map(text).join(" · ");
}
