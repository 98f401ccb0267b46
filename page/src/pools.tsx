// Pools: how many wait warm, and how often one was there when it was wanted.
import { duration } from "./format";
import { useAnswer } from "./hooks";
import { Notice, Waiting } from "./parts";
import type { Page } from "./types";

interface Stats {
  ready: number;
  booting: number;
  hits: number;
  misses: number;
  discards: number;
  failures: number;
  age_p50_s: number;
}

interface Pool {
  id: string;
  name: string;
  project: string;
  size: number;
  stats: Stats | null;
  error: string;
}

export function PoolsView() {
  const answer = useAnswer<Page<Pool>>("/pools", 2000);
  const pools = answer.data?.items ?? [];
  return (
    <section aria-labelledby="title">
      <div class="head">
        <h1 id="title">Pools</h1>
      </div>
      {answer.data ? null : <Waiting answer={answer} what="pools" />}
      {answer.data && !pools.length && (
        <div class="empty">
          <p>There are no pools. A pool keeps sandboxes warm, so that one is there at once.</p>
        </div>
      )}
      <ul class="cards">
        {pools.map((pool) => (
          <PoolCard key={pool.id} pool={pool} />
        ))}
      </ul>
    </section>
  );
}

function PoolCard({ pool }: { pool: Pool }) {
  const { ready = 0, booting = 0, hits = 0, misses = 0, discards = 0, failures = 0, age_p50_s = 0 } = pool.stats ?? {};
  const asked = hits + misses;
  return (
    <li class="card">
      <h2>{pool.name}</h2>
      <Meter label="warm" value={ready} of={pool.size} text={`${ready} of ${pool.size}${booting ? `, ${booting} booting` : ""}`} />
      <Meter label="hit rate" value={hits} of={asked} text={asked ? `${Math.round((hits / asked) * 100)} % of ${asked}` : "never asked"} />
      <p class="quiet">
        {age_p50_s ? `half wait ${duration(age_p50_s)} or less · ` : ""}
        {discards} discarded · {failures} failed
      </p>
      {pool.error && <Notice kind="error">{pool.error}</Notice>}
    </li>
  );
}

export function Meter({ label, value, of, text }: { label: string; value: number; of: number; text: string }) {
  return (
    <div class="meter">
      <span>{label}</span>
      <span class="num">{text}</span>
      <progress max={Math.max(1, of)} value={value} aria-label={`${label}: ${text}`} />
    </div>
  );
}
