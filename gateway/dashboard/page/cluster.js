// The view of pods, KV links, and metrics of the last minutes.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { $, bytes, make, number, percent, seconds, text } from "./dom.js";

const STATES = { ready: "good", starting: "warn", connecting: "warn", draining: "warn", stuck: "bad", gone: "bad", refused: "bad" };
const BLOCKS = { leased: "chunk", cached: "pushes", quarantined: "bad", free: "grid" };

const CHARTS = [
  new Chart("Time to first token", [{ series: "ttft_p50", name: "p50", color: "chunk" }, { series: "ttft_p99", name: "p99", color: "chunk", dash: true }], seconds),
  new Chart("Inter-token latency", [{ series: "itl_p50", name: "p50", color: "decode" }, { series: "itl_p99", name: "p99", color: "decode", dash: true }], seconds),
  new Chart("Output", [{ series: "output_tokens_per_s", name: "tokens/s", color: "accent" }], number),
  new Chart("Requests", [{ series: "running", name: "running", color: "decode" }, { series: "waiting", name: "waiting", color: "queue", dash: true }], number),
  new Chart("Prefix cache hits", [{ series: "hit_rate", name: "of prompt tokens", color: "pushes" }], percent, 1),
  new Chart("KV blocks in use", [{ series: "kv_used", name: "of all pods", color: "chunk" }], percent, 1),
];

export function start() {
  $("charts").replaceChildren(...CHARTS.map((chart) => chart.element));
  $("kv-legend").replaceChildren(
    ...Object.entries(BLOCKS).map(([name, color]) => make("span", { className: "key", style: { "--of": `var(--${color})` } }, `${name} blocks`)),
  );
}

export async function refresh() {
  const state = await get("dashboard/state");
  tiles(state);
  for (const chart of CHARTS) chart.update(state.series);
  table($("pods"), POD_COLUMNS, state.pods, "No pods are known.");
  table($("links"), LINK_COLUMNS, state.links, "No blocks have moved yet.");
  return state;
}

function tiles({ rates, latency, cache, errors, speculation, window_s: window }) {
  const pair = (one) => [seconds(one?.p50), `p99 ${seconds(one?.p99)}`];
  const shown = [
    ["TTFT p50", ...pair(latency.ttft)],
    ["ITL p50", ...pair(latency.itl)],
    ["Exposed hand-off p50", ...pair(latency.exposed)],
    ["Queue p50", ...pair(latency.queue)],
    ["Requests/s", number(rates.requests_per_s, 2), `${number(rates.rejections_per_s, 2)} refused, ${number(rates.retries_per_s, 2)} retried`],
    ["Output tokens/s", number(rates.output_tokens_per_s), `${number(rates.prompt_tokens_per_s)} prompt tokens/s`],
    ["Cache hits", percent(cache.hit_rate), `${number(cache.hit_tokens)} of ${number(cache.prompt_tokens)} tokens`],
    ["Errors", percent(errors.ratio), `${number(errors.failed)} of ${number(errors.requests)} requests`],
  ];
  if (speculation) {
    const useless = speculation.useless.length ? `useless on ${speculation.useless.join(", ")}` : `${number(speculation.accepted)} of ${number(speculation.proposed)} drafts`;
    shown.push(["Acceptance length", number(speculation.acceptance_length, 2), useless]);
  }
  $("tiles").replaceChildren(
    ...shown.map(([name, value, more]) => make("dl", { className: "tile" }, make("dt", {}, name), make("dd", {}, value, make("small", {}, more)))),
  );
  $("tiles").title = `last ${seconds(window)}`;
}

function occupancy(pod) {
  if (!pod.blocks) return "–";
  const { total } = pod.blocks;
  const words = Object.keys(BLOCKS).map((name) => `${pod.blocks[name]} ${name}`).join(", ");
  const bars = Object.entries(BLOCKS).filter(([name]) => name !== "free").map(([name, color]) =>
    make("i", { style: { "--of": `var(--${color})`, width: `${(pod.blocks[name] / total) * 100}%` } }),
  );
  return make("span", { className: "kv", role: "img", "aria-label": words, title: `${words} of ${total}` }, ...bars);
}

const gpu = ({ gpu: one }) => (one ? `${percent(one.utilization)}, ${bytes(one.memory_used)} of ${bytes(one.memory_total)}` : "–");

// [heading, cell, numeric]
const POD_COLUMNS = [
  ["Pod", (pod) => make("span", { title: pod.address }, pod.name)],
  ["Role", (pod) => text(pod.role)],
  ["State", (pod) => make("span", { className: `state ${STATES[pod.state] ?? "warn"}`, title: pod.reason ?? "" }, pod.reason ? `${pod.state}: ${pod.reason}` : pod.state)],
  ["KV", occupancy],
  ["In use", (pod) => percent(pod.kv_used), true],
  ["Queued tokens", (pod) => number(pod.queued_tokens), true],
  ["Running", (pod) => number(pod.running), true],
  ["Waiting", (pod) => number(pod.waiting), true],
  ["Prefill tok/s", (pod) => number(pod.prefill_tokens_per_s), true],
  ["Output tok/s", (pod) => number(pod.generated_tokens_per_s), true],
  ["Preempted", (pod) => number(pod.preemptions), true],
  ["Acceptance", (pod) => (pod.speculation ? `${number(pod.speculation.acceptance_length, 2)} (${pod.speculation.proposer})` : "–"), true],
  ["GPU", gpu],
];

const LINK_COLUMNS = [
  ["From", (link) => link.from],
  ["To", (link) => link.to],
  ["Transport", (link) => text(link.transport)],
  ["GB/s", (link) => number(link.gb_per_s, 2), true],
  ["Moved", (link) => bytes(link.bytes), true],
  ["Under way", (link) => seconds(link.busy_s), true],
];

function table(element, columns, rows, empty) {
  const kind = (numeric) => (numeric ? "num" : "");
  const head = make("thead", {}, make("tr", {}, ...columns.map(([name, , numeric]) => make("th", { scope: "col", className: kind(numeric) }, name))));
  const lines = rows.map((row) =>
    make("tr", {}, ...columns.map(([, cell, numeric], i) => make(i ? "td" : "th", { className: kind(numeric), scope: i ? null : "row" }, cell(row)))),
  );
  if (!lines.length) lines.push(make("tr", {}, make("td", { colSpan: columns.length, className: "quiet" }, empty)));
  element.replaceChildren(head, make("tbody", {}, ...lines));
}
