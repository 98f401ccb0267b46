// Styles of the terminal in a page whose policy lets no style be written into it: what would be a `style` element goes
// into a sheet that a script makes, and an attribute of style into properties, both of which the policy allows.

function create(tag: string): HTMLElement {
  return Document.prototype.createElement.call(document, tag);
}

/** An element that stands for a style element: its text becomes a sheet. */
function sheetElement(): HTMLElement {
  const sheet = new CSSStyleSheet();
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  const element = create("i");
  element.hidden = true;
  Object.defineProperty(element, "textContent", { set: (css: string) => void sheet.replaceSync(css) });
  element.remove = () => {
    document.adoptedStyleSheets = document.adoptedStyleSheets.filter((each) => each !== sheet);
    Element.prototype.remove.call(element);
  };
  return element;
}

// colours of single letters are set so
HTMLSpanElement.prototype.setAttribute = function (name: string, value: string) {
  if (name === "style") this.style.cssText = value;
  else Element.prototype.setAttribute.call(this, name, value);
};

/** Do work that makes style elements. */
export function strictly(work: () => void): void {
  const strict = (tag: string) => (tag === "style" ? sheetElement() : create(tag));
  document.createElement = strict as typeof document.createElement;
  try {
    work();
  } finally {
    Reflect.deleteProperty(document, "createElement");
  }
}
