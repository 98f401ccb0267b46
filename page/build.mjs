// Builds the page into the package: bundles with a hash of their content in their names, the page that names them, the
// licences of what is bundled, and a hash of the sources, by which a test sees whether the built files are stale.
import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { basename, join, relative } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
const out = join(here, "../src/skerry/surfaces/page/static");
const OTHERS = [".npmrc", "build.mjs", "package-lock.json", "package.json", "tsconfig.json"];

function sources() {
  const below = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true });
  const files = below.filter((each) => each.isFile()).map((each) => relative(here, join(each.parentPath, each.name)));
  return [...OTHERS, ...files].sort();
}

/** Hash of names and contents; tests/surfaces/page/test_built.py has its twin. */
function fingerprint() {
  const hash = createHash("sha256");
  for (const name of sources()) {
    const content = readFileSync(join(here, name));
    hash.update(`${name}\0${content.length}\0`).update(content);
  }
  return hash.digest("hex");
}

function licences() {
  const names = Object.keys(JSON.parse(readFileSync(join(here, "package.json"))).dependencies).sort();
  return names
    .map((name) => `${name}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}\n`)
    .join(`\n${"-".repeat(80)}\n\n`);
}

const result = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx", style: "src/style.css", icon: "src/icon.svg" },
  entryNames: "[name]-[hash]",
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  loader: { ".svg": "copy" },
  legalComments: "none",
  write: false,
});

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
let page = readFileSync(join(here, "src/index.html"), "utf8");
for (const file of result.outputFiles) {
  const name = basename(file.path);
  writeFileSync(join(out, name), file.contents);
  page = page.replace(`{${name.split("-")[0]}}`, `/assets/${name}`);
}
if (/\{\w+\}/.test(page)) throw new Error("the page names a file that was not built");
writeFileSync(join(out, "index.html"), page);
writeFileSync(join(out, "LICENSES.txt"), licences());
writeFileSync(join(out, "sources.sha256"), `${fingerprint()}\n`);
