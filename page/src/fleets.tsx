// Fleets: their phases as a graph, each with how far it is, and the members of one.
import { useEffect, useMemo, useState } from "preact/hooks";
import { query } from "./api";
import { duration } from "./format";
import { go, path, useAnswer, useLive } from "./hooks";
import { title } from "./list";
import { live } from "./live";
import { Curve, Notice, StateMark, cpuText } from "./parts";
import type { Page, Sandbox } from "./types";

interface Phase {
  name: string;
  total: number;
  after: string[];
}

interface Summary {
  name: string;
  project: string;
}

interface Told {
  phases: { name: string; count: number; wait_for?: string[] }[];
  operation?: string | null;
}

const label = (sandbox: Sandbox, name: string) => sandbox.labels[`skerry.${name}`] ?? "";

export function FleetsView({ name }: { name: string | undefined }) {
  useLive(true);
  const answer = useAnswer<Page<Summary>>("/fleets", 10_000);
  const members = [...live.sandboxes.values()].filter((each) => label(each, "fleet") && each.state !== "destroyed");
  const names = [...new Set([...(answer.data?.items ?? []).map((each) => each.name), ...members.map((each) => label(each, "fleet"))])].sort();
  const chosen = name ?? names[0];
  return (
    <section aria-labelledby="title">
      <div class="head">
        <h1 id="title">Fleets</h1>
      </div>
      {answer.error && !answer.missing && <Notice kind="error">{answer.error}</Notice>}
      {names.length > 0 && (
        <nav class="tabs" aria-label="Fleets">
          {names.map((each) => (
            <a key={each} href={path("fleets", each)} aria-current={each === chosen ? "page" : undefined}>
              {each}
            </a>
          ))}
        </nav>
      )}
      {chosen && names.includes(chosen) ? (
        <Fleet
          key={chosen}
          name={chosen}
          project={answer.data?.items.find((each) => each.name === chosen)?.project}
          members={members.filter((each) => label(each, "fleet") === chosen)}
        />
      ) : (
        <div class="empty">
          <p>{live.loaded ? "There are no fleets." : "Looking …"}</p>
          <p>
            <code>skerry fleet up</code> makes one from a file.
          </p>
        </div>
      )}
    </section>
  );
}

/** The phases that the server tells of, and those that members name beside them. */
function phasesOf(told: Told | undefined, members: Sandbox[]): Phase[] {
  const found = new Map<string, Phase>();
  for (const { name, count, wait_for } of told?.phases ?? []) found.set(name, { name, total: count, after: wait_for ?? [] });
  for (const member of members) {
    const name = label(member, "phase");
    if (!found.has(name)) found.set(name, { name, total: 0, after: [] });
  }
  for (const phase of found.values()) {
    phase.total = Math.max(phase.total, members.filter((each) => label(each, "phase") === phase.name).length);
  }
  return [...found.values()];
}

function Fleet({ name, project, members }: { name: string; project: string | undefined; members: Sandbox[] }) {
  const answer = useAnswer<Told>(`/fleets/${encodeURIComponent(name)}${query({ project, timeout_s: 1 })}`, 5000);
  const [chosen, setChosen] = useState<string | null>(null);
  const phases = useMemo(() => phasesOf(answer.data, members), [answer.data, members]);
  const shown = members
    .filter((each) => chosen === null || label(each, "phase") === chosen)
    .sort((a, b) => title(a).localeCompare(title(b), undefined, { numeric: true }));
  const now = Date.now() / 1000;
  const ids = shown.map((each) => each.id);
  useEffect(() => live.want(ids), [ids.join()]);
  return (
    <>
      {answer.data?.operation && <Notice>It is being changed right now.</Notice>}
      <Graph phases={phases} members={members} chosen={chosen} choose={(phase) => setChosen(phase === chosen ? null : phase)} />
      <h2>{chosen === null ? "Members" : `Members of ${chosen}`}</h2>
      <ul class="members" aria-label="Members">
        {shown.map((each) => (
          <li key={each.id} onClick={() => go("sandboxes", each.id)}>
            <a href={path("sandboxes", each.id)}>{title(each)}</a>
            <StateMark state={isPending(each) ? "creating" : each.state} doomed={each.doomed} />
            <span class="quiet num">{duration(now - each.created_at)}</span>
            <Curve values={live.curves.get(each.id)?.cpu} top={100} label={`CPU ${cpuText(live.curves.get(each.id)?.cpu)}`} />
          </li>
        ))}
        {!shown.length && <li class="quiet">There are none now.</li>}
      </ul>
    </>
  );
}

function isPending(sandbox: Sandbox): boolean {
  return "skerry.setup" in sandbox.labels;
}

const WIDTH = 168;
const HEIGHT = 64;
const GAP_X = 56;
const GAP_Y = 18;

/** Columns by how many phases are waited for in a row; a circle, which the server refuses, would only be drawn badly. */
function columns(phases: Phase[]): Phase[][] {
  const byName = new Map(phases.map((each) => [each.name, each]));
  const depths = new Map<string, number>();
  const depth = (phase: Phase, seen: Set<string>): number => {
    const known = depths.get(phase.name);
    if (known !== undefined) return known;
    if (seen.has(phase.name)) return 0;
    const before = phase.after.flatMap((name) => byName.get(name) ?? []);
    const found = before.length ? 1 + Math.max(...before.map((each) => depth(each, new Set([...seen, phase.name])))) : 0;
    depths.set(phase.name, found);
    return found;
  };
  const found: Phase[][] = [];
  for (const phase of phases) (found[depth(phase, new Set())] ??= []).push(phase);
  return found.map((each) => each ?? []);
}

interface GraphProps {
  phases: Phase[];
  members: Sandbox[];
  chosen: string | null;
  choose: (phase: string) => void;
}

function Graph({ phases, members, chosen, choose }: GraphProps) {
  if (!phases.length) return null;
  const layers = columns(phases);
  const places = new Map<string, [number, number]>();
  const tall = Math.max(1, ...layers.map((each) => each.length));
  layers.forEach((layer, column) =>
    layer.forEach((phase, row) => {
      const top = ((tall - layer.length) * (HEIGHT + GAP_Y)) / 2;
      places.set(phase.name, [column * (WIDTH + GAP_X) + 1, top + row * (HEIGHT + GAP_Y) + 1]);
    }),
  );
  const width = layers.length * (WIDTH + GAP_X) - GAP_X + 2;
  const height = tall * (HEIGHT + GAP_Y) - GAP_Y + 2;
  return (
    <div class="graph" role="group" aria-label="Phases">
      <svg width={width} height={height} viewBox={`0 0 ${width} ${height}`}>
        {phases.flatMap((phase) =>
          phase.after.map((name) => {
            const from = places.get(name);
            const to = places.get(phase.name)!;
            if (!from) return null;
            const [x1, y1, x2, y2] = [from[0] + WIDTH, from[1] + HEIGHT / 2, to[0], to[1] + HEIGHT / 2];
            const middle = (x1 + x2) / 2;
            return <path key={`${name} ${phase.name}`} class="edge" d={`M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`} />;
          }),
        )}
        {phases.map((phase) => {
          const mine = members.filter((each) => label(each, "phase") === phase.name);
          const ready = mine.filter((each) => each.state === "ready" && !isPending(each)).length;
          const bad = mine.some((each) => each.state === "lost");
          const [x, y] = places.get(phase.name)!;
          const kind = bad ? "bad" : ready === phase.total && ready ? "done" : mine.length ? "going" : "waiting";
          return (
            <g
              key={phase.name}
              class={`phase ${kind}`}
              transform={`translate(${x} ${y})`}
              role="button"
              tabindex={0}
              aria-pressed={chosen === phase.name}
              aria-label={`${phase.name}: ${ready} of ${phase.total} ready`}
              onClick={() => choose(phase.name)}
              onKeyDown={(event) => {
                if (event.key === "Enter" || event.key === " ") event.preventDefault(), choose(phase.name);
              }}
            >
              <rect class="box" width={WIDTH} height={HEIGHT} rx={10} />
              <text x={14} y={26}>{phase.name.length > 18 ? `${phase.name.slice(0, 17)}…` : phase.name}</text>
              <text class="count" x={14} y={44}>{`${ready} of ${phase.total} ready`}</text>
              <rect class="track" x={14} y={51} width={WIDTH - 28} height={4} rx={2} />
              <rect class="bar" x={14} y={51} width={((WIDTH - 28) * ready) / Math.max(1, phase.total)} height={4} rx={2} />
            </g>
          );
        })}
      </svg>
    </div>
  );
}
