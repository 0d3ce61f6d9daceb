// The phases of one request as bars on one axis. Decode is usually much longer than all other phases, so the axis ends
// a third beyond them, and a bar that is cut there is marked.

import { bytes, make, number, percent, seconds, text } from "./dom.js";

export const KINDS = {
  gateway: "Gateway",
  queue: "Prefill queue",
  chunk: "Prefill chunk",
  pushes: "KV pushes",
  hand_off: "Exposed hand-off",
  decode: "Decode",
};

const of = (kind) => ({ "--of": `var(--${kind})` });

export function legend(element) {
  element.replaceChildren(
    ...Object.entries(KINDS).map(([kind, name]) => make("span", { className: "key", style: of(kind) }, name)),
  );
}

function axisOf({ spans, ttft_s: first }) {
  const end = Math.max(...spans.map((span) => span.end_s));
  const before = Math.max(first ?? 0, ...spans.filter((span) => span.kind !== "decode").map((span) => span.end_s));
  return Math.min(end, (before * 4) / 3 || end) || 1e-9;
}

function place(start, end, axis) {
  const left = Math.min(100, (start / axis) * 100);
  return { left: `${left}%`, width: `${Math.max(0, Math.min(100 - left, ((end - start) / axis) * 100))}%` };
}

/** The bars in one line without text, for the list. */
export function mini(request) {
  if (!request.spans.length) return make("span", { className: "mini" });
  const axis = axisOf(request);
  return make(
    "span",
    { className: "mini", role: "img", "aria-label": request.spans.map(say).join(", ") },
    ...request.spans.map((span) => make("i", { style: { ...of(span.kind), ...place(span.start_s, span.end_s, axis) } })),
  );
}

const say = (span) => `${span.name} ${seconds(span.end_s - span.start_s)}`;

/** The bars in rows, with their texts. */
export function waterfall(request) {
  if (!request.spans.length) return make("p", { className: "quiet" }, "Nothing has reached a pod yet.");
  const axis = axisOf(request);
  const rows = request.spans.map((span) => {
    const parts = span.parts.map((part) =>
      make("i", {
        className: "part",
        title: `${part.name}: ${seconds(part.end_s - part.start_s)}`,
        style: { ...of(span.kind), ...place(part.start_s, part.end_s, axis) },
      }),
    );
    const goesOn = span.end_s > axis * 1.001;
    const bar = make("i", {
      className: goesOn ? "bar on" : "bar",
      style: { ...of(span.kind), ...place(span.start_s, span.end_s, axis) },
    });
    return make(
      "li",
      {},
      make("span", { className: "key", style: of(span.kind) }, span.name),
      make("span", { className: "ms" }, seconds(span.end_s - span.start_s)),
      make("span", { className: "track", title: goesOn ? "continues beyond the axis" : "" }, bar, ...parts),
      make("span", { className: "why" }, span.detail),
    );
  });
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => make("span", {}, seconds(axis * share)));
  return make("ol", { className: "waterfall" }, ...rows, make("li", { ariaHidden: "true" }, make("span", { className: "axis" }, ...ticks)));
}

/** The facts of a request as a list. */
export function factsOf(request) {
  const cached = request.prompt_tokens ? request.cached_tokens / request.prompt_tokens : null;
  const drafts = request.accepted === null ? null : `${request.accepted} of ${request.accepted + (request.rejected ?? 0)}`;
  const facts = [
    ["State", request.error ? `${request.state}: ${request.error}` : request.state],
    ["TTFT", seconds(request.ttft_s)],
    ["Total", seconds(request.end_s ?? request.age_s)],
    ["Prompt", request.prompt_tokens ? `${number(request.prompt_tokens)} tokens, ${percent(cached)} from cache` : null],
    ["Output", `${number(request.output_tokens)} tokens`],
    ["Prefill", request.prefill_pod],
    ["Decode", request.decode_pod],
    ["KV", request.bytes ? `${bytes(request.bytes)} via ${text(request.transport)}` : null],
    ["Drafts accepted", drafts],
    ["Attempts", request.attempts > 1 ? request.attempts : null],
    ["Trace", request.trace_id],
    ["Id", request.id],
  ];
  const shown = facts.filter(([, value]) => value !== null && value !== undefined);
  return make("dl", { className: "facts-list" }, ...shown.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, String(value)))));
}
