// The OpenAI SDK for JavaScript: node use_openai.mjs BASE_URL MODEL. Whole, streamed, with tools, responses, errors.
import assert from "node:assert";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name a colour." }];
const weather = {
  type: "function",
  function: {
    name: "weather",
    parameters: { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] },
  },
};

const whole = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
assert(whole.choices[0].message.content);
let text = "";
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 8, temperature: 0, stream: true, stream_options: { include_usage: true },
});
let usage;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.completion_tokens, whole.usage.completion_tokens);

const asked = { model, messages, tools: [weather], tool_choice: "required", max_tokens: 100, temperature: 0 };
const called = await client.chat.completions.create(asked);
const [call] = called.choices[0].message.tool_calls;
assert(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
const final = await client.chat.completions.stream(asked).finalChatCompletion();
assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.function.arguments);

const answer = await client.responses.create({ model, input: "Name a colour.", max_output_tokens: 16, temperature: 0 });
assert(answer.output_text);
const kinds = [];
for await (const event of await client.responses.create({
  model, input: "Name a colour.", max_output_tokens: 16, temperature: 0, stream: true,
})) kinds.push(event.type);
assert.equal(kinds[0], "response.created");
assert(["response.completed", "response.incomplete"].includes(kinds.at(-1)));

assert((await client.models.list()).data.some((m) => m.id === model));
await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), { status: 400, param: "temperature" });
