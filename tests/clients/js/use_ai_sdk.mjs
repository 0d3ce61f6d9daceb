// Vercel's ai-sdk: node use_ai_sdk.mjs BASE_URL MODEL. Text, streams, objects and tools over chats and responses.
import assert from "node:assert";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  baseURL, apiKey: "none", name: "baton", includeUsage: true, supportsStructuredOutputs: true,
});
const shared = { maxRetries: 0, temperature: 0, prompt: "Name a colour." };
const weather = tool({
  description: "Returns the weather of a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});

for (const model of [openai(name), openai.chat(name), compatible(name)]) {
  const whole = await generateText({ model, ...shared, maxOutputTokens: 16 });
  assert(whole.text);
  assert(whole.usage.outputTokens > 0);
  const streamed = streamText({ model, ...shared, maxOutputTokens: 16 });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  assert.equal(text, whole.text);
  const made = await generateText({
    model, ...shared, maxOutputTokens: 200,
    output: Output.object({ schema: z.object({ red: z.number().int(), named: z.boolean() }) }),
  });
  assert.equal(typeof made.output.named, "boolean");
  const called = await generateText({
    model, ...shared, maxOutputTokens: 100, tools: { weather }, toolChoice: "required", stopWhen: stepCountIs(1),
  });
  assert.equal(called.toolCalls[0].toolName, "weather");
  assert(called.toolResults[0].output.startsWith("It is sunny"));
  const steps = await generateText({
    model, ...shared, maxOutputTokens: 60, tools: { weather }, stopWhen: stepCountIs(2), providerOptions: { openai: { store: false } },
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
  });
  assert.equal(steps.steps.length, 2);
}
