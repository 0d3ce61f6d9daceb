// Requests to the gateway. The API key, if the gateway needs one, stays in this tab's session storage.

const KEY = "baton.key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

function headers(more = {}) {
  return key.get() ? { ...more, authorization: `Bearer ${key.get()}` } : more;
}

async function refusal(response) {
  try {
    return new Refused(response.status, (await response.json()).error.message);
  } catch {
    return new Refused(response.status, `the gateway answered ${response.status}`);
  }
}

/** Returns the JSON at a relative path, which works behind a prefix too. Throws Refused, or TypeError without an answer. */
export async function get(path) {
  const response = await fetch(path, { headers: headers(), cache: "no-store", signal: AbortSignal.timeout(10_000) });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** Streams a chat completion: yields its chunks. `started` is called with the request's id before the first chunk. */
export async function* chat(body, { signal, started }) {
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers({ "content-type": "application/json" }),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  started(response.headers.get("x-request-id"));
  const decoder = new TextDecoder();
  let rest = "";
  for await (const part of chunksOf(response.body)) {
    rest += decoder.decode(part, { stream: true });
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refused(event.error.code ?? 500, event.error.message);
      yield event;
    }
  }
}

async function* chunksOf(stream) {
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
