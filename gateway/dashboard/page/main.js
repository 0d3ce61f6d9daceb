// Switches the views, refreshes the shown one, and fills the header.

import { key, Refused } from "./api.js";
import * as cluster from "./cluster.js";
import { $, number, seconds } from "./dom.js";
import * as playground from "./playground.js";
import * as requests from "./requests.js";
import { legend } from "./waterfall.js";

const PERIOD_MS = { cluster: 2000, requests: 1000, playground: 5000 };
const TABS = [...document.querySelectorAll("[role=tab]")];
const THEME = "baton.theme";

let view = "cluster";
let timer = 0;
let gateway = null;
let keyAsked = false; // the dialog opens by itself only once

function show(name, focus = false) {
  view = name in PERIOD_MS ? name : "cluster";
  for (const tab of TABS) {
    const chosen = tab.getAttribute("aria-controls") === view;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    $(tab.getAttribute("aria-controls")).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  if (location.hash !== `#/${view}`) history.replaceState(null, "", `#/${view}`);
  refresh();
}

async function refresh() {
  clearTimeout(timer);
  const asked = view;
  try {
    const state = await cluster.refresh();
    if (gateway && gateway.id !== state.gateway.id) requests.forget();
    gateway = state.gateway;
    heading(state);
    playground.models(state.models);
    if (asked === "requests") await requests.refresh();
    $("trouble").hidden = true;
  } catch (error) {
    trouble(error);
  }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(refresh, PERIOD_MS[view]);
}

function heading({ gateway: it, pods, models }) {
  const ready = pods.filter((pod) => pod.state === "ready").length;
  const state = it.draining ? "draining" : it.ready ? "ready" : "not ready";
  const index = { redis: "index: Redis", local: "index: unreachable, this gateway's own", hash: "index: unreachable, by hash" }[it.index_mode];
  $("gateway").textContent = [
    `${models.map((model) => model.name).join(", ")}: ${state}`,
    `${ready} of ${pods.length} pods`,
    `${number(it.running)} running, ${number(it.waiting)} waiting`,
    index,
    `version ${it.version}, up ${seconds(it.uptime_s)}`,
  ].join(" · ");
  document.title = `Baton · ${state}`;
}

function trouble(error) {
  const wants = error instanceof Refused && [401, 403].includes(error.status);
  $("key").hidden = !wants && !key.get();
  $("trouble").textContent = wants ? `${error.message} Use the button “API key”.` : `The gateway does not answer (${error.message}). The page may show old data.`;
  $("trouble").hidden = false;
  if (wants && !keyAsked) askKey();
}

function askKey() {
  keyAsked = true;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

function start() {
  const saved = localStorage.getItem(THEME) ?? "";
  $("theme").value = saved;
  theme(saved);
  $("theme").addEventListener("change", () => {
    localStorage.setItem(THEME, $("theme").value);
    theme($("theme").value);
  });
  for (const tab of TABS) {
    tab.addEventListener("click", () => show(tab.getAttribute("aria-controls")));
    tab.addEventListener("keydown", (event) => {
      const at = TABS.indexOf(tab);
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: TABS.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      show(TABS[(to + TABS.length) % TABS.length].getAttribute("aria-controls"), true);
    });
  }
  $("key").addEventListener("click", askKey);
  $("key-cancel").addEventListener("click", () => $("key-dialog").close("cancel"));
  $("key-dialog").addEventListener("close", () => {
    if ($("key-dialog").returnValue === "ok") key.set($("key-input").value.trim());
    $("key-input").value = "";
    refresh();
  });
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) refresh();
  });
  addEventListener("hashchange", () => show(location.hash.slice(2)));
  document.querySelectorAll(".span-legend").forEach(legend);
  cluster.start();
  playground.start();
  show(location.hash.slice(2)); // "#/requests": not an id, to which the browser would scroll
}

start();
