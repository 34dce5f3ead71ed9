// OpenAI's client for JavaScript.
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { Event, LONGEST, MAX_TOKENS, Place, PROMPT, RESULT, report } from "./scenario.mjs";

const used = ({ usage }) => ({
  prompt: usage.prompt_tokens,
  completion: usage.completion_tokens,
  cached: usage.prompt_tokens_details.cached_tokens,
});
const callOf = ({ function: { name, arguments: text } }) => [name, text];

const [baseURL, model] = process.argv.slice(2);
const { completions } = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 }).chat;
const messages = [{ role: "user", content: PROMPT }];
const asked = { model, messages, temperature: 0 };
const plain = { ...asked, max_tokens: MAX_TOKENS };
const whole = await completions.create(plain);
const streamed = await completions.stream({ ...plain, stream_options: { include_usage: true } }).finalChatCompletion();
const response_format = zodResponseFormat(Event, "event");
const parsed = await completions.parse({ ...asked, max_tokens: LONGEST, response_format });

const tools = [zodFunction({ name: "forecast", description: "The weather.", parameters: Place })];
const calling = { ...asked, max_tokens: LONGEST, tools, tool_choice: "required", parallel_tool_calls: false };
const called = (await completions.parse(calling)).choices[0].message;
const streamedCall = (await completions.stream(calling).finalChatCompletion()).choices[0].message;
const answered = [...messages, called, { role: "tool", tool_call_id: called.tool_calls[0].id, content: RESULT }];
const after = await completions.parse({ ...calling, messages: answered, tool_choice: "none", response_format });
report(["openai"], {
  text: whole.choices[0].message.content,
  streamed: streamed.choices[0].message.content,
  usage: used(whole),
  streamed_usage: used(streamed),
  parsed: parsed.choices[0].message.parsed,
  call: callOf(called.tool_calls[0]),
  streamed_call: callOf(streamedCall.tool_calls[0]),
  parsed_after_result: after.choices[0].message.parsed,
  usage_after_result: used(after),
});
