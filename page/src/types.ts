// What the server answers, as far as the page reads it.

export interface Sandbox {
  id: string;
  name: string | null;
  state: string;
  provider: string;
  project: string;
  labels: Record<string, string>;
  addresses: Record<string, string | null>;
  ends_at: number | null;
  created_at: number;
  updated_at: number;
  version: number;
  cause: string | null;
  detail: string;
  doomed: boolean;
  ephemeral: boolean;
  spec: Record<string, unknown>;
  enforced: Record<string, unknown>;
}

export interface Page<T> {
  items: T[];
  next?: string | null;
}

export interface WhoAmI {
  actor: string;
  tenant?: string | null;
  scopes?: string[];
}

export interface Provider {
  name: string;
  available: boolean;
  reason?: string;
  fix?: string;
  isolation?: string;
  capabilities?: string[];
  honours?: string[];
  needs_image?: boolean;
  default?: boolean;
  details?: Record<string, { by?: string; why_not?: string }>;
}

export interface FileInfo {
  name: string;
  path: string;
  path64?: string | null;
  type: string;
  size: number;
  mode: number;
  uid: number;
  gid: number;
  mtime: number;
  target?: string | null;
}

export interface ProcessInfo {
  process: number;
  pid: number;
  argv: string[];
  running: boolean;
  background?: boolean;
  pty?: boolean;
  tag?: string | null;
  started?: number;
  exit_code?: number | null;
  signal?: number | null;
}

export interface ExecView {
  exit_code: number;
  stdout?: string;
  stderr?: string;
  timed_out?: boolean;
  signal?: number | null;
}

export interface LedgerLine {
  seq: number;
  time: number;
  kind: string;
  sandbox?: string | null;
  who: { uid: number; tool: string; pid: number; actor?: string; tenant?: string };
  facts?: Record<string, unknown>;
}

export interface SandboxEvent {
  seq: number;
  time: number;
  sandbox: string;
  kind: string;
  state: string;
  cause?: string | null;
}

export interface Rules {
  network: string;
  allow: string[];
  deny: string[];
  reach: string[];
  secrets: Record<string, string[]>;
}

export interface Explanation {
  reachable: boolean;
  ends_at: number | null;
  idle_s: number | null;
  running: number;
  why: string[];
}

export interface Series {
  cpu: number[];
  memory: number[];
}

export interface History {
  id: string;
  cpu_percent: number[];
  memory_bytes: number[];
}
