// Encodes forward requests with ethers: the hash that a user signs, and the call of the forwarder.
//
//   NODE_PATH=.../node_modules node forward_requests.js FORWARDER_JSON INPUT OUTPUT
//
// INPUT has one {domain, request, signature} per line, OUTPUT gets one {hash, calldata} for each. FORWARDER_JSON is the
// compiled contract, whose own ABI encodes the call.

const fs = require("node:fs");
const { Interface, TypedDataEncoder } = require("ethers");

const [, , forwarder, input, output] = process.argv;
const abi = new Interface(JSON.parse(fs.readFileSync(forwarder, "utf8")).abi);
const types = {
  ForwardRequest: [
    { name: "from", type: "address" },
    { name: "to", type: "address" },
    { name: "value", type: "uint256" },
    { name: "gas", type: "uint256" },
    { name: "nonce", type: "uint256" },
    { name: "deadline", type: "uint48" },
    { name: "data", type: "bytes" },
  ],
};

const lines = fs.readFileSync(input, "utf8").trimEnd().split("\n");
const made = lines.map((line) => {
  const { domain, request, signature } = JSON.parse(line);
  const { nonce, ...unnumbered } = request;
  const hash = TypedDataEncoder.hash(domain, types, request);
  return JSON.stringify({ hash, calldata: abi.encodeFunctionData("execute", [{ ...unnumbered, signature }]) });
});
fs.writeFileSync(output, made.join("\n") + "\n");
