// All that is known of a sandbox: why it ends, its spec, how its limits are held, its end that can be moved.
import { useState } from "preact/hooks";
import { call, sandboxPath } from "./api";
import { text, whole } from "./format";
import { useAnswer, useWork } from "./hooks";
import { live } from "./live";
import { Copy, Facts, Field, Notice, Waiting } from "./parts";
import type { Explanation, Sandbox } from "./types";

export function DetailsView({ sandbox }: { sandbox: Sandbox }) {
  const explained = useAnswer<Explanation>(`${sandboxPath(sandbox.id)}/explain`, 10_000);
  return (
    <div class="details">
      <div class="card">
        <h2>Why and when it ends</h2>
        {explained.data ? (
          <ul>
            {explained.data.why.map((each) => (
              <li key={each}>{each}</li>
            ))}
          </ul>
        ) : (
          <Waiting answer={explained} what="reasons" />
        )}
        {sandbox.state !== "destroyed" && <Ends sandbox={sandbox} />}
      </div>
      <div class="card">
        <h2>Identity</h2>
        <dl class="facts">
          <div>
            <dt>id</dt>
            <dd>
              {sandbox.id} <Copy text={sandbox.id} />
            </dd>
          </div>
          <div>
            <dt>project</dt>
            <dd>{sandbox.project}</dd>
          </div>
          <div>
            <dt>made</dt>
            <dd>{whole(sandbox.created_at)}</dd>
          </div>
          <div>
            <dt>changed</dt>
            <dd>{whole(sandbox.updated_at)}</dd>
          </div>
          {Object.entries(sandbox.labels).map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        </dl>
      </div>
      <div class="card">
        <h2>How its limits are held</h2>
        <dl class="facts">
          {Object.entries(sandbox.enforced).map(([name, how]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{held(how)}</dd>
            </div>
          ))}
        </dl>
      </div>
      <div class="card">
        <h2>Spec</h2>
        <Facts of={sandbox.spec} />
      </div>
    </div>
  );
}

function held(how: unknown): string {
  if (how && typeof how === "object") {
    const { by, why_not } = how as { by?: string; why_not?: string };
    if (by || why_not) return by ? `by ${by}` : `not held: ${why_not}`;
  }
  return text(how);
}

function Ends({ sandbox }: { sandbox: Sandbox }) {
  const [lifetime, setLifetime] = useState("");
  const work = useWork();
  const submit = (event: Event) => {
    event.preventDefault();
    work.run(async () => {
      live.put(await call<Sandbox>("PATCH", sandboxPath(sandbox.id), { lifetime: lifetime === "never" ? null : lifetime }));
      setLifetime("");
    });
  };
  return (
    <form class="row" onSubmit={submit}>
      <Field label="Lifetime from now" wrong={work.error || undefined}>
        {(id) => (
          <input id={id} placeholder="2h, never" value={lifetime} onInput={(event) => setLifetime(event.currentTarget.value)} />
        )}
      </Field>
      <button type="submit" disabled={work.busy || !lifetime.trim()}>
        Set
      </button>
      {work.busy && <Notice>Working …</Notice>}
    </form>
  );
}
