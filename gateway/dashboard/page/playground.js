// The view of a chat, with the waterfall of the request that is being answered.

import { chat, get } from "./api.js";
import { $, make } from "./dom.js";
import { factsOf, waterfall } from "./waterfall.js";

const LIVE_MS = 300;

const messages = [];
let running = null; // AbortController of the running answer
let watched = null; // id of the request in the waterfall

export function start() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", () => {
    running?.abort();
    messages.length = 0;
    $("talk").replaceChildren();
    $("prompt").focus();
  });
}

export function models(list) {
  const names = list.flatMap((model) => [model.name, ...model.aliases]);
  const select = $("model");
  if ([...select.options].map((option) => option.value).join("\n") === names.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", { value: name, selected: name === chosen }, name)));
}

async function send() {
  const prompt = $("prompt").value.trim();
  if (!prompt) return;
  $("prompt").value = "";
  messages.push({ role: "user", content: prompt });
  bubble("user", "You", prompt);
  const answer = bubble("assistant", $("model").value, "");
  const controller = new AbortController();
  running = controller;
  busy(true);
  const [said, thought] = [make("span", {}), make("span", { className: "thought" })];
  answer.append(thought, said);
  try {
    const body = {
      model: $("model").value,
      messages,
      temperature: Number($("temperature").value),
      max_tokens: Number($("max-tokens").value),
    };
    for await (const event of chat(body, { signal: controller.signal, started: watch })) {
      const delta = event.choices[0]?.delta ?? {};
      thought.append(delta.reasoning_content ?? "");
      said.append(delta.content ?? "");
      follow();
    }
  } catch (error) {
    if (!controller.signal.aborted) {
      answer.classList.add("failed");
      said.append(`${said.textContent ? "\n" : ""}${error.message}`);
    }
  } finally {
    const content = said.textContent;
    if (content && !answer.classList.contains("failed")) messages.push({ role: "assistant", content });
    else messages.pop(); // a question without an answer is not repeated
    if (running === controller) running = null;
    busy(running !== null);
  }
}

function busy(yes) {
  $("send").disabled = yes;
  $("stop").hidden = !yes;
}

function bubble(kind, who, content) {
  const element = make("div", { className: `message ${kind}` }, make("b", {}, who), content);
  $("talk").append(element);
  follow(true);
  return element;
}

/** Scrolls to the end, unless the reader has scrolled up. */
function follow(always = false) {
  const box = $("talk");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 80) box.scrollTop = box.scrollHeight;
}

async function watch(id) {
  watched = id;
  let last = "";
  while (watched === id) {
    try {
      const request = await get(`dashboard/requests/${encodeURIComponent(id)}`);
      const now = JSON.stringify([request.spans, request.state]);
      if (now !== last && watched === id) $("this-request").replaceChildren(factsOf(request), waterfall(request));
      last = now;
      if (request.state !== "running") return;
    } catch {
      // The request is not recorded yet, or no longer. The answer itself shows errors.
    }
    await new Promise((wake) => setTimeout(wake, LIVE_MS));
  }
}
