// Files of a sandbox: browse, upload, download, and look at text and pictures. Nothing of them is ever HTML here.
import { useEffect, useRef, useState } from "preact/hooks";
import { call, query, raw, sandboxPath } from "./api";
import { moment, size, whole } from "./format";
import { go, useAnswer, useWork } from "./hooks";
import { Confirm, Dialog, Field, Notice, Waiting } from "./parts";
import type { FileInfo, Page } from "./types";

const LISTED = 2000;
const MOST = 256 * 1024;
const MOST_PICTURE = 16 * 2 ** 20;
const PICTURES: Record<string, string> = {
  png: "image/png",
  jpg: "image/jpeg",
  jpeg: "image/jpeg",
  gif: "image/gif",
  webp: "image/webp",
  avif: "image/avif",
  bmp: "image/bmp",
};

function join(folder: string, name: string): string {
  return folder.endsWith("/") ? folder + name : `${folder}/${name}`;
}

/** The words by which the server knows a file, also one whose name is no text. */
function named(file: FileInfo): { path?: string; path64?: string } {
  return file.path64 ? { path64: file.path64 } : { path: file.path };
}

function content(id: string, file: { path?: string; path64?: string }): string {
  return `${sandboxPath(id)}/files/content${query(file)}`;
}

function mode(bits: number): string {
  return [6, 3, 0].map((at) => ["r", "w", "x"].map((letter, bit) => ((bits >> (at + 2 - bit)) & 1 ? letter : "-")).join("")).join("");
}

export function FilesView({ id, folder }: { id: string; folder: string }) {
  const here = folder ? `/${folder.replace(/^\/+/, "")}` : ".";
  const answer = useAnswer<Page<FileInfo>>(`${sandboxPath(id)}/files${query({ path: here, limit: LISTED })}`);
  const [shown, setShown] = useState<FileInfo | null>(null);
  const [doomed, setDoomed] = useState<FileInfo | null>(null);
  const [naming, setNaming] = useState(false);
  const [over, setOver] = useState(false);
  const input = useRef<HTMLInputElement>(null);
  const work = useWork();
  const items = answer.data?.items ?? [];
  const files = [...items].sort((a, b) => Number(b.type === "dir") - Number(a.type === "dir") || a.name.localeCompare(b.name));
  // where that is in which one begins
  const home = useAnswer<FileInfo>(here === "." ? `${sandboxPath(id)}/files/stat${query({ path: here })}` : null);
  const base = here === "." ? (home.data?.path ?? ".") : here;
  // without a word that would be the folder in which one begins
  const enter = (path: string) => go("sandboxes", id, "files", ...(path === "/" ? [path] : path.split("/").filter(Boolean)));

  const upload = (list: FileList | null) => {
    const chosen = [...(list ?? [])];
    if (!chosen.length) return;
    work.run(async () => {
      for (const file of chosen) {
        await raw("PUT", content(id, { path: join(base, file.name) }), {
          body: file,
          headers: { "content-type": "application/octet-stream" },
        });
      }
      answer.again();
    });
  };
  const download = (file: FileInfo) =>
    work.run(async () => {
      const response = await raw("GET", content(id, named(file)));
      const url = URL.createObjectURL(new Blob([await response.blob()], { type: "application/octet-stream" }));
      const anchor = document.createElement("a");
      anchor.href = url;
      anchor.download = file.name;
      anchor.click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    });
  const remove = (file: FileInfo) => {
    setDoomed(null);
    work.run(async () => {
      await call("DELETE", `${sandboxPath(id)}/files${query({ ...named(file), recursive: file.type === "dir" })}`);
      answer.again();
    });
  };
  const open = (file: FileInfo) => (file.type === "dir" ? enter(file.path) : setShown(file));

  return (
    <div
      class={over ? "files over" : "files"}
      onDragOver={(event) => (event.preventDefault(), setOver(true))}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => (event.preventDefault(), setOver(false), upload(event.dataTransfer?.files ?? null))}
    >
      <div class="row tools">
        <Crumbs path={base} enter={enter} />
        <input
          ref={input}
          type="file"
          multiple
          hidden
          aria-label="Files to upload"
          onChange={(event) => (upload(event.currentTarget.files), (event.currentTarget.value = ""))}
        />
        <button type="button" onClick={() => setNaming(true)}>
          New folder
        </button>
        <button type="button" class="primary" disabled={work.busy} onClick={() => input.current?.click()}>
          {work.busy ? "Working …" : "Upload"}
        </button>
      </div>
      {work.error && <Notice kind="error">{work.error}</Notice>}
      {answer.data ? null : <Waiting answer={answer} what="files" />}
      {answer.data && (
        <ul class="filelist" aria-label="Files">
          {base !== "/" && base !== "." && (
            <li>
              <button type="button" class="plain entry" onClick={() => enter(parent(base))}>
                <Icon type="dir" /> ..
              </button>
            </li>
          )}
          {files.map((file) => (
            <li key={file.path}>
              <button type="button" class="plain entry" onClick={() => open(file)}>
                <Icon type={file.type} /> <span class="filename">{file.name}</span>
                {file.target && <small class="quiet">→ {file.target}</small>}
              </button>
              <span class="num quiet">{file.type === "file" ? size(file.size) : ""}</span>
              <code class="quiet wide">{mode(file.mode)}</code>
              <time class="quiet wide" title={whole(file.mtime)}>
                {moment(file.mtime)}
              </time>
              <span class="row">
                {file.type !== "dir" && (
                  <button type="button" class="plain" aria-label={`Download ${file.name}`} onClick={() => download(file)}>
                    ↓
                  </button>
                )}
                <button type="button" class="plain" aria-label={`Delete ${file.name}`} onClick={() => setDoomed(file)}>
                  ×
                </button>
              </span>
            </li>
          ))}
          {answer.data.next && <li class="quiet">Only the first {LISTED} are shown.</li>}
          {!files.length && <li class="quiet">This folder is empty. Drop files here.</li>}
        </ul>
      )}
      {shown && <Preview id={id} file={shown} close={() => setShown(null)} download={() => download(shown)} />}
      {doomed && (
        <Confirm
          title="Delete?"
          text={doomed.type === "dir" ? `${doomed.path} and all that is in it` : doomed.path}
          verb="Delete"
          run={() => remove(doomed)}
          close={() => setDoomed(null)}
        />
      )}
      {naming && <NewFolder id={id} base={base} close={() => (setNaming(false), answer.again())} />}
    </div>
  );
}

function parent(path: string): string {
  return path.replace(/\/+$/, "").replace(/\/[^/]*$/, "") || "/";
}

function Icon({ type }: { type: string }) {
  const path = type === "dir" ? "M1.500 4.500a1 1 0 0 1 1-1h4l1.500 2h5.500a1 1 0 0 1 1 1v6a1 1 0 0 1-1 1h-11a1 1 0 0 1-1-1z" : "M3.500 1.500h6l3 3v10h-9z";
  return (
    <svg class={`icon icon-${type}`} viewBox="0 0 16 16" aria-hidden="true">
      <path d={path} />
    </svg>
  );
}

function Crumbs({ path, enter }: { path: string; enter: (path: string) => void }) {
  const parts = path.split("/").filter((each) => each && each !== ".");
  return (
    <nav class="crumbs" aria-label="Folder">
      <button type="button" class="plain" onClick={() => enter("/")}>
        /
      </button>
      {parts.map((part, at) => (
        <button key={at} type="button" class="plain" onClick={() => enter(`/${parts.slice(0, at + 1).join("/")}`)}>
          {part}
          {at < parts.length - 1 ? " /" : ""}
        </button>
      ))}
    </nav>
  );
}

type Seen = { text: string; cut: boolean } | { url: string } | { refused: string } | null;

function Preview({ id, file, close, download }: { id: string; file: FileInfo; close: () => void; download: () => void }) {
  const [seen, setSeen] = useState<Seen>(null);
  useEffect(() => {
    const stop = new AbortController();
    let url = "";
    look(id, file, stop.signal).then(
      (found) => {
        if (found && "url" in found) url = found.url;
        if (!stop.signal.aborted) setSeen(found);
      },
      (error: unknown) => !stop.signal.aborted && setSeen({ refused: error instanceof Error ? error.message : String(error) }),
    );
    return () => {
      stop.abort();
      if (url) URL.revokeObjectURL(url);
    };
  }, [id, file]);
  return (
    <Dialog title={file.name} close={close}>
      <div class="preview">
        {!seen && <p class="quiet">Looking …</p>}
        {seen && "text" in seen && <pre tabIndex={0}>{seen.text || " "}</pre>}
        {seen && "text" in seen && seen.cut && <p class="quiet">Only the beginning is shown.</p>}
        {seen && "url" in seen && <img src={seen.url} alt={file.name} />}
        {seen && "refused" in seen && <Notice>{seen.refused}</Notice>}
      </div>
      <div class="row end">
        <span class="quiet">{size(file.size)}</span>
        <button type="button" onClick={download}>
          Download
        </button>
        <button type="button" class="primary" autofocus onClick={close}>
          Close
        </button>
      </div>
    </Dialog>
  );
}

/** A file as text or as a picture; what is neither is told. */
async function look(id: string, file: FileInfo, signal: AbortSignal): Promise<Seen> {
  const type = PICTURES[file.name.split(".").pop()?.toLowerCase() ?? ""];
  if (type) {
    if (file.size > MOST_PICTURE) return { refused: "This picture is too large to be shown." };
    const response = await raw("GET", content(id, named(file)), { signal });
    return { url: URL.createObjectURL(new Blob([await response.arrayBuffer()], { type })) };
  }
  const headers: Record<string, string> = file.size > MOST ? { range: `bytes=0-${MOST - 1}` } : {};
  const response = await raw("GET", content(id, named(file)), { signal, headers });
  const bytes = new Uint8Array(await response.arrayBuffer()).subarray(0, MOST);
  if (bytes.subarray(0, 8000).includes(0)) return { refused: "This is no text; download it." };
  return { text: new TextDecoder().decode(bytes), cut: file.size > MOST };
}

function NewFolder({ id, base, close }: { id: string; base: string; close: () => void }) {
  const [name, setName] = useState("");
  const work = useWork();
  const submit = (event: Event) => {
    event.preventDefault();
    work.run(async () => {
      await call("POST", `${sandboxPath(id)}/files/folder`, { path: join(base, name) });
      close();
    });
  };
  return (
    <Dialog title="New folder" close={close}>
      <form onSubmit={submit}>
        <Field label={`In ${base}`}>
          {(field) => (
            <input id={field} autofocus required value={name} onInput={(event) => setName(event.currentTarget.value)} />
          )}
        </Field>
        {work.error && <Notice kind="error">{work.error}</Notice>}
        <div class="row end">
          <button type="button" onClick={close}>
            Cancel
          </button>
          <button type="submit" class="primary" disabled={work.busy}>
            Make it
          </button>
        </div>
      </form>
    </Dialog>
  );
}
