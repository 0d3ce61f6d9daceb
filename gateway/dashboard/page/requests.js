// The view of recent requests, newest first. An opened one shows its waterfall, live while it runs.

import { get } from "./api.js";
import { $, make, number, seconds, text } from "./dom.js";
import { factsOf, mini, waterfall } from "./waterfall.js";

const MOST = 100;
const shown = new Map(); // id -> its <details>
let cursor = 0;

const GOOD = { ok: "good", running: "warn", aborted: "warn" };

export async function refresh() {
  const answer = await get(`dashboard/requests?limit=${MOST}&since=${cursor}`);
  cursor = answer.cursor;
  const list = $("list");
  for (const request of answer.requests.reverse()) {
    const old = shown.get(request.id);
    const element = old ?? make("details", { className: "request" });
    render(element, request);
    if (!old) {
      list.prepend(element);
      shown.set(request.id, element);
    }
  }
  for (const [id, element] of [...shown].slice(0, Math.max(0, shown.size - MOST))) {
    if (element.open) continue;
    element.remove();
    shown.delete(id);
  }
  const empty = list.querySelector(".quiet");
  if (!shown.size && !empty) list.append(make("p", { className: "quiet" }, "No requests yet. The playground makes one."));
  if (shown.size) empty?.remove();
}

/** Drops all requests: a restarted gateway has others, and another clock. */
export function forget() {
  cursor = 0;
  shown.clear();
  $("list").replaceChildren();
}

function render(element, request) {
  const summary = make(
    "summary",
    {},
    make("span", {}, new Date(request.created * 1000).toLocaleTimeString([], { hour12: false })),
    make("span", { title: request.id }, text(request.model)),
    make("span", { className: `state ${GOOD[request.state] ?? "bad"}` }, request.state),
    make("span", { className: "wide" }, `TTFT ${seconds(request.ttft_s)}`),
    make("span", { className: "wide" }, `${number(request.prompt_tokens)} → ${number(request.output_tokens)} tokens`),
    mini(request),
  );
  const focused = element.contains(document.activeElement);
  element.replaceChildren(summary, make("div", { className: "body" }, factsOf(request), waterfall(request)));
  if (focused) summary.focus();
}
