// Ask Flashduet over gRPC from Node, knowing only its descriptor set. Fields have the names that
// the .proto files give them.
//
//     npm ci
//     node client.mjs "Why is the sky blue?" --max-tokens 60 --choices 2
//
// The text goes to stderr as it comes; at the end one line of JSON goes to stdout.

import { readFileSync } from "node:fs";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    address: { type: "string", default: "127.0.0.1:50050" },
    "max-tokens": { type: "string", default: "100" },
    temperature: { type: "string", default: "0" },
    seed: { type: "string" },
    choices: { type: "string", default: "1" },
    "top-logprobs": { type: "string" },
    timeout: { type: "string", default: "120" },
    descriptors: {
      type: "string",
      default: new URL("../../flashduet/v1/flashduet.v1.binpb", import.meta.url).pathname,
    },
  },
});
if (positionals.length !== 1) {
  console.error('one prompt is needed: node client.mjs "Why is the sky blue?"');
  process.exit(2);
}

const definition = protoLoader.loadFileDescriptorSetFromBuffer(readFileSync(options.descriptors), {
  longs: String, // a seed has 64 bits, a JavaScript number 53
  enums: String,
  defaults: true, // absent scalars as zero, absent lists as []
  oneofs: true, // response.message names the member that is set
});
const { GatewayService } = grpc.loadPackageDefinition(definition).flashduet.v1;

const client = new GatewayService(options.address, grpc.credentials.createInsecure());
const request = {
  chat: { messages: [{ role: "user", content: positionals[0] }] },
  max_tokens: Number(options["max-tokens"]),
  n: Number(options.choices),
  sampling: { temperature: Number(options.temperature) },
};
if (options.seed !== undefined) request.sampling.seed = options.seed;
if (options["top-logprobs"] !== undefined) request.top_logprobs = Number(options["top-logprobs"]);

const answer = {
  choices: Array.from({ length: request.n }, () => ({
    text: "",
    token_ids: [],
    logprobs: [],
    finish_reason: "",
  })),
};

// The call's deadline is the request's: past it the gateway frees all that it holds.
const deadline = Date.now() + Number(options.timeout) * 1000;
const call = client.Generate(request, { deadline });
call.on("data", (response) => {
  if (response.message === "started") {
    answer.seed = response.started.seed;
  } else if (response.message === "chunk") {
    const { choice, text, token_ids, logprobs } = response.chunk;
    answer.choices[choice].text += text;
    answer.choices[choice].token_ids.push(...token_ids);
    answer.choices[choice].logprobs.push(...logprobs.map((position) => position.chosen.logprob));
    process.stderr.write(text);
  } else if (response.message === "finished") {
    answer.choices[response.finished.choice].finish_reason = response.finished.finish_reason;
  } else if (response.message === "complete") {
    answer.prompt_tokens = response.complete.usage.prompt_tokens;
    answer.completion_tokens = response.complete.usage.completion_tokens;
    answer.acceptance_length = response.complete.speculation.acceptance_length;
  }
});
// "status" comes last, also after an error, whose event must have a listener all the same.
call.on("error", () => {});
call.on("status", ({ code, details }) => {
  process.stderr.write("\n");
  if (code === grpc.status.OK) {
    console.log(JSON.stringify(answer));
  } else {
    console.error(`${grpc.status[code]}: ${details}`);
    process.exitCode = 1;
  }
  client.close();
});
