// OpenAI's SDK for Node. No line is changed: the client reads OPENAI_BASE_URL and OPENAI_API_KEY,
// which the run sets; the task comes as AGENTEVO_TASK, and the last line printed is the reward.
import OpenAI from "openai";

const task = JSON.parse(process.env.AGENTEVO_TASK);
const { boxes } = task.metadata;
const client = new OpenAI();

function openBox({ colour }) {
  const place = boxes.indexOf(colour);
  if (place < 0) return "The box is empty.";
  const next = boxes[place + 1];
  return next ? `A note: open the ${next} box.` : `You find a ${task.answer}.`;
}

const tools = [
  {
    type: "function",
    function: {
      name: "open_box",
      description: "Opens the box of a colour.",
      parameters: {
        type: "object",
        properties: { colour: { type: "string" } },
        required: ["colour"],
      },
    },
  },
];
const messages = [
  {
    role: "system",
    content: "Follow the notes from box to box. Then answer with the treasure, in one word.",
  },
  { role: "user", content: task.query },
];
let reward = 0;
for (let turn = 0; turn < 6; turn++) {
  const answer = await client.chat.completions.create({ model: "policy", messages, tools });
  const said = answer.choices[0].message;
  if (!said.tool_calls?.length) {
    reward = said.content.trim().toLowerCase() === task.answer ? 1 : 0;
    break;
  }
  messages.push(said);
  for (const call of said.tool_calls) {
    const content = openBox(JSON.parse(call.function.arguments));
    messages.push({ role: "tool", tool_call_id: call.id, content });
  }
}
console.log(JSON.stringify({ reward }));
