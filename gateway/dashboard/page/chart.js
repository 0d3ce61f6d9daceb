// A line chart of the last minutes. Hovering, or the arrow keys on a focused chart, shows the values of one moment.

import { make } from "./dom.js";

const WIDTH = 320;
const HEIGHT = 120;
const LEFT = 4;
const BOTTOM = 16;
const TOP = 14;

/** A round number at or above the value. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

export class Chart {
  /** lines: [{series, name, color (name of a custom property), dash}]. format: value to text. most: fixed end of the axis, or null. */
  constructor(title, lines, format, most = null) {
    [this.lines, this.format, this.most, this.at] = [lines, format, most, null];
    this.values = lines.map((line) =>
      make("span", { className: line.dash ? "key dash" : "key", style: { "--of": `var(--${line.color})` } }, line.name),
    );
    this.svg = make("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
    this.words = make("p", { className: "sr", ariaLive: "polite" });
    this.end = make("span", { className: "most", ariaHidden: "true" });
    this.element = make(
      "figure",
      { className: "chart", tabIndex: 0, onpointermove: (e) => this.#point(e), onpointerleave: () => this.#show(null), onkeydown: (e) => this.#step(e) },
      make("figcaption", {}, make("b", {}, title), ...this.values),
      this.svg,
      this.end,
      this.words,
    );
    this.title = title;
  }

  update(series) {
    this.series = series;
    this.#draw();
  }

  #draw() {
    const { t } = this.series;
    const all = this.lines.flatMap((line) => this.series[line.series]).filter((value) => value !== null);
    const top = this.most ?? ceiling(Math.max(0, ...all));
    const first = t[0] ?? -1;
    this.x = (time) => LEFT + ((time - first) / (Math.max(...t, 0) - first || 1)) * (WIDTH - 2 * LEFT);
    const y = (value) => TOP + (1 - Math.min(1, value / top)) * (HEIGHT - BOTTOM - TOP);
    const parts = [0, 0.5, 1].map((share) =>
      make("line", { class: "grid", x1: 0, x2: WIDTH, y1: y(top * share), y2: y(top * share), "vector-effect": "non-scaling-stroke" }),
    );
    for (const line of this.lines) {
      let path = "";
      let pen = "M";
      this.series[line.series].forEach((value, i) => {
        if (value === null) pen = "M";
        else {
          path += `${pen}${this.x(t[i]).toFixed(1)} ${y(value).toFixed(1)}`;
          pen = "L";
        }
      });
      // A single point is drawn as a line of no length, of which the round cap is visible.
      if (path) parts.push(make("path", { d: path.includes("L") ? path : `${path}h.1`, "stroke-linecap": "round", style: { stroke: `var(--${line.color})`, "stroke-dasharray": line.dash ? "5 4" : "none" } }));
    }
    const at = this.at === null ? null : Math.min(this.at, t.length - 1);
    if (at !== null && at >= 0) parts.push(make("line", { class: "cursor", x1: this.x(t[at]), x2: this.x(t[at]), y1: TOP, y2: HEIGHT - BOTTOM, "vector-effect": "non-scaling-stroke" }));
    this.svg.replaceChildren(...parts);
    this.#say(at ?? t.length - 1, top, at !== null);
  }

  #say(at, top, chosen) {
    const { t } = this.series;
    const texts = this.lines.map((line, i) => {
      const value = at >= 0 ? this.series[line.series][at] : null;
      const words = `${line.name} ${value === null || value === undefined ? "–" : this.format(value)}`;
      this.values[i].textContent = words.trim();
      return words;
    });
    this.end.textContent = this.format(top);
    const when = at >= 0 && t[at] < -1 ? `${Math.round(-t[at])} s ago` : "now";
    this.element.title = when;
    this.svg.setAttribute("aria-label", `${this.title}, ${when}: ${texts.join(", ")}`);
    this.words.textContent = chosen ? `${when}: ${texts.join(", ")}` : "";
  }

  #show(at) {
    this.at = at;
    if (this.series) this.#draw();
  }

  #point(event) {
    if (!this.series?.t.length) return;
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const away = this.series.t.map((time) => Math.abs(this.x(time) - x));
    this.#show(away.indexOf(Math.min(...away)));
  }

  #step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.#show(null);
    if (!by || !this.series?.t.length) return;
    event.preventDefault();
    const last = this.series.t.length - 1;
    this.#show(Math.max(0, Math.min(last, (this.at ?? last) + by)));
  }
}
