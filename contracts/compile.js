// Compiles the contracts that the tests deploy: our token, and OpenZeppelin's forwarder as published.
//
//   NODE_PATH=.../node_modules node compile.js DIRECTORY
//
// writes DIRECTORY/NAME.json with `abi` and `bytecode` for each. `scripts/services` runs it; solc and the sources that
// are imported come from NODE_PATH.

const fs = require("node:fs");
const path = require("node:path");
const solc = require("solc");

const SOURCES = {
  "Token.sol": path.join(__dirname, "Token.sol"),
  "@openzeppelin/contracts/metatx/ERC2771Forwarder.sol": undefined,
};
const CONTRACTS = ["Token", "ERC2771Forwarder"];

const read = (name) => fs.readFileSync(SOURCES[name] ?? require.resolve(name), "utf8");

const input = {
  language: "Solidity",
  sources: Object.fromEntries(Object.keys(SOURCES).map((name) => [name, { content: read(name) }])),
  settings: {
    // The oldest EVM version that OpenZeppelin's contracts support.
    evmVersion: "cancun",
    optimizer: { enabled: true, runs: 200 },
    outputSelection: { "*": { "*": ["abi", "evm.bytecode.object"] } },
  },
};
const output = JSON.parse(solc.compile(JSON.stringify(input), { import: (name) => ({ contents: read(name) }) }));
const problems = output.errors ?? [];
for (const problem of problems) {
  console.error(problem.formattedMessage);
}
if (problems.length > 0) {
  process.exit(1);
}

for (const file of Object.keys(SOURCES)) {
  for (const [name, contract] of Object.entries(output.contracts[file])) {
    if (CONTRACTS.includes(name)) {
      const compiled = { abi: contract.abi, bytecode: `0x${contract.evm.bytecode.object}` };
      fs.writeFileSync(path.join(process.argv[2], `${name}.json`), JSON.stringify(compiled));
    }
  }
}
