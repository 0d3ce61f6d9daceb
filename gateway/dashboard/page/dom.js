// Creates elements, and formats numbers. No function parses HTML: text of clients and models is always inserted as text.

export const $ = (id) => document.getElementById(id);

/** Creates an element. A name that is not a property of the element becomes an attribute; children that are strings become text. */
export function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "g", "rect", "circle"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") for (const [property, v] of Object.entries(value)) element.style.setProperty(property, v);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (!svg && name in element && name !== "role") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const none = "–";
const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** A number as text; large and whole numbers without decimals. */
export function number(value, digits = 1) {
  if (!known(value)) return none;
  if (Math.abs(value) >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return value.toFixed(digits);
}

export function seconds(value) {
  if (!known(value)) return none;
  if (value < 0.0995) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 0.9995) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 100) return `${value.toFixed(2)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const percent = (value) => (known(value) ? `${(value * 100).toFixed(1)}%` : none);

export function bytes(value) {
  if (!known(value)) return none;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

export const text = (value) => (value === null || value === undefined || value === "" ? none : String(value));
