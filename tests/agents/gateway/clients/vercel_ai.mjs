// Vercel's AI SDK in the folder that has its packages: node vercel_ai.mjs PROVIDER.
import { createRequire } from "node:module";

const require = createRequire(process.cwd() + "/");
const { generateText, streamText, stepCountIs, tool, jsonSchema } = require("ai");
const task = JSON.parse(process.env.AGENTEVO_TASK);
const { boxes } = task.metadata;
const settings = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const models = {
  openai: () => require("@ai-sdk/openai").createOpenAI(settings)("policy"),
  "openai-compatible": () =>
    require("@ai-sdk/openai-compatible").createOpenAICompatible({ name: "agentevo", ...settings })(
      "policy",
    ),
  anthropic: () => require("@ai-sdk/anthropic").createAnthropic(settings)("policy"),
};

function openBox({ colour }) {
  const place = boxes.indexOf(colour);
  if (place < 0) return "The box is empty.";
  const next = boxes[place + 1];
  return next ? `A note: open the ${next} box.` : `You find a ${task.answer}.`;
}

const parameters = {
  type: "object",
  properties: { colour: { type: "string" } },
  required: ["colour"],
};
const [, , provider] = process.argv;
const ask = provider === "openai" ? generateText : streamText;
const answer = await ask({
  model: models[provider](),
  system: "Follow the notes from box to box. Then answer with the treasure, in one word.",
  prompt: task.query,
  tools: {
    open_box: tool({
      description: "Opens the box of a colour.",
      inputSchema: jsonSchema(parameters),
      execute: openBox,
    }),
  },
  stopWhen: stepCountIs(6),
});
console.log(JSON.stringify({ reward: (await answer.text).trim() === task.answer ? 1 : 0 }));
