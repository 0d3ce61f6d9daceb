// k6: an open loop of streamed chats. k6 reports only the times of the first and the last byte of a response. The gateway
// sends the first byte when a decode pod has reserved, so k6 cannot see the first token.
//
//   k6 run -e MODEL=smollm2 -e URL=http://127.0.0.1:8000 -e RATE=4 -e DURATION=60s loadtest/recipes/k6.js
import http from "k6/http";
import { check } from "k6";
import { Counter, Trend } from "k6/metrics";

const url = __ENV.URL || "http://127.0.0.1:8000";
const tokens = Number(__ENV.OUTPUT_TOKENS || 64);
const reserved = new Trend("reserved", true);
const whole = new Trend("whole_answer", true);
const output = new Counter("output_tokens");

export const options = {
  summaryTrendStats: ["avg", "p(50)", "p(90)", "p(95)", "p(99)", "max"],
  scenarios: {
    open: {
      executor: "constant-arrival-rate",
      rate: Number(__ENV.RATE || 4),
      timeUnit: "1s",
      duration: __ENV.DURATION || "60s",
      preAllocatedVUs: 64,
      maxVUs: 2048,
    },
  },
  thresholds: { reserved: ["p(99)<2000"], checks: ["rate>0.99"] },
};

export default function () {
  const body = {
    model: __ENV.MODEL || "smollm2",
    messages: [{ role: "user", content: `Tell me about the number ${__VU * 100000 + __ITER}.` }],
    max_tokens: tokens,
    stream: true,
    stream_options: { include_usage: true },
    ignore_eos: true,
  };
  const headers = { "content-type": "application/json" };
  if (__ENV.API_KEY) headers.authorization = `Bearer ${__ENV.API_KEY}`;
  const answer = http.post(`${url}/v1/chat/completions`, JSON.stringify(body), { headers, timeout: "600s" });
  const good = check(answer, {
    "status is 200": (r) => r.status === 200,
    "stream is whole": (r) => r.body.endsWith("data: [DONE]\n\n") && !r.body.includes('data: {"error"'),
  });
  if (good) {
    reserved.add(answer.timings.waiting);
    whole.add(answer.timings.duration);
    output.add(tokens);
  }
}
