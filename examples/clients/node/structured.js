// OpenAI's client in JavaScript: node structured.js [URL [MODEL]], with the libraries that examples/clients/build.sh node
// puts into build/clients. An answer that is a value of a schema, then a call whose arguments are, each whole and as a
// stream: one JSON a line.
const path = require("path");
const build = process.env.OUT || path.join(__dirname, "../../../build/clients");
const load = (name) => require(require.resolve(name, { paths: [path.join(build, "node"), __dirname] }));
const OpenAI = load("openai");
const { zodFunction, zodResponseFormat } = load("openai/helpers/zod");
const { z } = load("zod");

// Bounds let a small model come to an end.
const Place = z.object({ city: z.string().max(12), country: z.enum(["de", "fr", "it"]) });
const Event = z.object({
  name: z.string().min(1).max(16),
  day: z.number().int().min(1).max(31),
  places: z.array(Place).max(2),
});

async function main(baseURL = "http://127.0.0.1:8000/v1", model = "python") {
  const { completions } = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 }).chat;
  const messages = [{ role: "user", content: "def plan_event(name, day):" }];
  const ask = { model, messages, temperature: 0, max_completion_tokens: 250 };
  const both = async (body) => {
    const whole = await completions.parse(body);
    const streamed = await completions.stream(body).finalChatCompletion();
    return [whole, streamed].map((answer) => answer.choices[0].message);
  };

  const response_format = zodResponseFormat(Event, "event");
  for (const message of await both({ ...ask, response_format })) console.log(JSON.stringify(message.parsed));

  const tools = [zodFunction({ name: "add_event", parameters: Event })];
  const calling = { ...ask, tools, tool_choice: "required", parallel_tool_calls: false };
  for (const message of await both(calling)) {
    const { name, parsed_arguments } = message.tool_calls[0].function;
    console.log(JSON.stringify({ name, arguments: parsed_arguments }));
  }
}
main(...process.argv.slice(2));
