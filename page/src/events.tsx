// What happens to sandboxes, as it happens.
import { cause, moment, whole } from "./format";
import { path, useLive, useStream } from "./hooks";
import { title } from "./list";
import { live } from "./live";
import { LinkMark, Notice, StateMark } from "./parts";
import type { SandboxEvent } from "./types";

const MOST = 500;

export function EventsView() {
  useLive();
  const { items, link, why } = useStream<SandboxEvent>("/events?follow=true", MOST);
  return (
    <section aria-labelledby="title">
      <div class="head">
        <h1 id="title">Events</h1>
        <LinkMark link={link} why={why} />
      </div>
      {why && <Notice>{why}</Notice>}
      <ol class="log events" aria-label="Events">
        {items.map((event) => (
          <li key={event.seq}>
            <time title={whole(event.time)}>{moment(event.time)}</time>
            <b>{event.kind}</b>
            <a href={path("sandboxes", event.sandbox)}>{named(event.sandbox)}</a>
            <StateMark state={event.state} />
            <span class="quiet">{cause(event.cause)}</span>
          </li>
        ))}
        {!items.length && <li class="quiet">Nothing has happened yet.</li>}
      </ol>
    </section>
  );
}

function named(id: string): string {
  const sandbox = live.sandboxes.get(id);
  return sandbox ? title(sandbox) : id.slice(0, 8);
}
