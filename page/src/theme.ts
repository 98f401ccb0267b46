// Light, dark, or as the system has it.

const KEY = "skerry.theme";
const THEMES = ["auto", "light", "dark"];

export function themeName(): string {
  const kept = localStorage.getItem(KEY);
  return kept && THEMES.includes(kept) ? kept : "auto";
}

export function isDark(): boolean {
  const name = themeName();
  return name === "dark" || (name === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
}

export function applyTheme(): void {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  dispatchEvent(new Event("skerry-theme"));
}

export function nextTheme(): string {
  const next = THEMES[(THEMES.indexOf(themeName()) + 1) % THEMES.length]!;
  localStorage.setItem(KEY, next);
  applyTheme();
  return next;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
