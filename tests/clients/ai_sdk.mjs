// Runs one helper of the AI SDK: node ai_sdk.mjs BASE_URL PROVIDER CASE PROMPT [MODEL] [IMAGE]; prints what it gives as
// JSON. The image is a PNG file in base64; it may be empty, which is none.
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, provider, wanted, prompt, name = 'other', image = ''] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: 'none' });
const models = {
  compatible: () =>
    createOpenAICompatible({ name: 'server', baseURL, apiKey: 'none', supportsStructuredOutputs: true })(name),
  chat: () => openai.chat(name),
  responses: () => openai.responses(name),
};
const schema = z.object({ city: z.string(), celsius: z.number().int() });
const tools = {
  add: tool({
    description: 'Add two numbers.',
    inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: async ({ a, b }) => `${a + b}`,
  }),
  weather: tool({
    description: 'The weather of a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `21 C in ${city}`,
  }),
  mail: tool({
    description: 'Send a mail.',
    inputSchema: z.object({ to: z.email(), at: z.iso.datetime().optional() }),
    execute: async ({ to }) => `sent to ${to}`,
  }),
};
const options = { model: models[provider](), prompt, maxRetries: 0 };
const looped = { ...options, tools, stopWhen: stepCountIs(5) };
const output = Output.object({ schema });

async function streamed(result) {
  const kinds = new Set();
  for await (const part of result.fullStream) {
    if (part.type === 'error') throw part.error;
    kinds.add(part.type);
  }
  return { kinds: [...kinds], text: await result.text, steps: (await result.steps).length };
}

async function shown(messages) {
  const { text, usage } = await generateText({ model: options.model, maxRetries: 0, maxOutputTokens: 8, messages });
  return { text, tokens: usage.inputTokens };
}

const cases = {
  image: async () => {
    const parts = image ? [{ type: 'image', image, mediaType: 'image/png' }] : [];
    return shown([{ role: 'user', content: [{ type: 'text', text: prompt }, ...parts] }]);
  },
  imageOfTool: async () => {
    const call = { toolCallId: 'call00001', toolName: 'look' };
    const value = image ? [{ type: 'image-data', data: image, mediaType: 'image/png' }] : [];
    return shown([
      { role: 'user', content: prompt },
      { role: 'assistant', content: [{ type: 'tool-call', ...call, input: {} }] },
      { role: 'tool', content: [{ type: 'tool-result', ...call, output: { type: 'content', value } }] },
    ]);
  },
  generateText: async () => {
    const { text, steps } = await generateText(looped);
    return { text, steps: steps.length };
  },
  streamText: async () => streamed(streamText(looped)),
  required: async () => (await generateText({ ...options, tools, toolChoice: 'required' })).toolResults.map((r) => r.output),
  named: async () =>
    (await generateText({ ...options, tools, toolChoice: { type: 'tool', toolName: 'mail' } })).toolResults.map(
      (r) => r.output,
    ),
  outputWithTools: async () => (await generateText({ ...looped, output })).output,
  streamedOutputWithTools: async () => {
    const result = streamText({ ...looped, output });
    await streamed(result);
    return result.output;
  },
  generateObject: async () => (await generateObject({ ...options, schema })).object,
  generateArray: async () => (await generateObject({ ...options, schema, output: 'array' })).object,
  generateEnum: async () => (await generateObject({ ...options, output: 'enum', enum: ['warm', 'cold'] })).object,
  streamObject: async () => {
    const result = streamObject({ ...options, schema });
    for await (const _ of result.partialObjectStream);
    return result.object;
  },
  reasoning: async () => {
    const { reasoningText, text } = await generateText(options);
    return { reasoning: reasoningText?.trim(), text };
  },
};
console.log(JSON.stringify(await cases[wanted]()));
