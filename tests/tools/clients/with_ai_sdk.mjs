// The AI SDK by its provider for servers that speak OpenAI's API.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { Event, LONGEST, MAX_TOKENS, Place, PROMPT, RESULT, report } from "./scenario.mjs";

const used = (usage) => ({
  prompt: usage.inputTokens,
  completion: usage.outputTokens,
  cached: usage.inputTokenDetails.cacheReadTokens,
});
const callOf = ({ toolName, input }) => [toolName, JSON.stringify(input)];

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "outrider", baseURL, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const asked = { model: provider(name), prompt: PROMPT, temperature: 0, maxRetries: 0 };
const plain = { ...asked, maxOutputTokens: MAX_TOKENS };
const whole = await generateText(plain);
const streamed = streamText(plain);
let text = "";
for await (const piece of streamed.textStream) text += piece;
const output = Output.object({ schema: Event });
const parsed = await generateText({ ...asked, maxOutputTokens: LONGEST, output });

const forecast = tool({ description: "The weather.", inputSchema: Place, strict: true, execute: async () => RESULT });
const calling = { ...asked, maxOutputTokens: LONGEST, tools: { forecast }, toolChoice: "required" };
const streamedCall = streamText(calling);
await streamedCall.consumeStream();
// A call first, whose result goes back, then an answer of the form: both are in every request.
const agent = await generateText({
  ...calling, output, stopWhen: isStepCount(2),
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" }),
});
report(["ai", "@ai-sdk/openai-compatible"], {
  text: whole.text,
  streamed: text,
  usage: used(whole.usage),
  streamed_usage: used(await streamed.usage),
  parsed: parsed.output,
  call: callOf(agent.steps[0].toolCalls[0]),
  streamed_call: callOf((await streamedCall.toolCalls)[0]),
  parsed_after_result: agent.output,
  usage_after_result: used(agent.steps[1].usage),
});
