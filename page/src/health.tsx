// Health of the machine and its providers, as the doctor finds it.
import { useAnswer } from "./hooks";
import { Facts, Notice, Waiting } from "./parts";
import type { Page, Provider } from "./types";

interface Findings {
  ok?: boolean;
  default_provider?: string;
  providers: Provider[];
  [section: string]: unknown;
}

export function HealthView() {
  const doctor = useAnswer<Findings>("/doctor");
  // a tenant may not ask the doctor, and yet see what it can use
  const listed = useAnswer<Page<Provider>>(doctor.error ? "/providers" : null);
  const providers = doctor.data?.providers ?? listed.data?.items;
  const sections = Object.entries(doctor.data ?? {}).filter(
    (each): each is [string, Record<string, unknown>] =>
      each[0] !== "providers" && typeof each[1] === "object" && each[1] !== null && !Array.isArray(each[1]),
  );
  return (
    <section aria-labelledby="title">
      <div class="head">
        <h1 id="title">Health</h1>
        <button
          type="button"
          onClick={() => {
            doctor.again();
            listed.again();
          }}
        >
          Look again
        </button>
      </div>
      {doctor.data && !doctor.data.ok && (
        <Notice kind="error">The default provider, {String(doctor.data.default_provider)}, does not work here.</Notice>
      )}
      {!providers && <Waiting answer={doctor.error ? listed : doctor} what="its health" />}
      <ul class="cards">
        {[...(providers ?? [])].sort((a, b) => Number(b.available) - Number(a.available)).map((each) => (
          <ProviderCard key={each.name} provider={each} isDefault={each.default ?? each.name === doctor.data?.default_provider} />
        ))}
      </ul>
      {sections.length > 0 && (
        <ul class="cards">
          {sections.map(([name, facts]) => (
            <li key={name} class="card">
              <h2>{name}</h2>
              <Facts of={facts} />
            </li>
          ))}
        </ul>
      )}
    </section>
  );
}

function ProviderCard({ provider, isDefault }: { provider: Provider; isDefault: boolean }) {
  const details = Object.entries(provider.details ?? {});
  return (
    <li class={provider.available ? "card" : "card absent"}>
      <div class="row">
        <h2>{provider.name}</h2>
        {isDefault && <span class="label">default</span>}
        <span class={provider.available ? "state state-ready" : "state state-stopped"}>
          <i aria-hidden="true" />
          {provider.available ? "works" : "not here"}
        </span>
      </div>
      {provider.available ? (
        <p class="quiet">{[provider.isolation, ...(provider.capabilities ?? [])].filter(Boolean).join(" · ")}</p>
      ) : (
        <>
          <p>{provider.reason}</p>
          {provider.fix && <pre class="fix">{provider.fix}</pre>}
        </>
      )}
      {details.length > 0 && (
        <details>
          <summary>How limits are held</summary>
          <dl class="facts">
            {details.map(([name, how]) => (
              <div key={name}>
                <dt>{name}</dt>
                <dd>{how.by ? `by ${how.by}` : `not held: ${how.why_not ?? ""}`}</dd>
              </div>
            ))}
          </dl>
        </details>
      )}
    </li>
  );
}
