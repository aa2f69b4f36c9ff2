// Sends each relayer 100 ether on the local chain, and refuses a pool in which two relayers share a signing key: they would
// take each other's nonces. Run it after the first start: docker compose … run --rm fund-relayers
"use strict";

const AMOUNT_WEI = 100n * 10n ** 18n;
const TIMEOUT_MS = 10_000;

main().catch((error) => {
  console.error(`fund-relayers: ${error.message}`);
  process.exitCode = 1;
});

async function main() {
  const urls = list("OZ_RELAYER_URLS");
  const keys = list("OZ_RELAYER_API_KEY");
  if (keys.length !== urls.length) throw new Error(`${keys.length} keys for ${urls.length} relayers`);

  const relayers = [];
  for (const [index, url] of urls.entries()) {
    const answer = await request(`${url}/api/v1/relayers`, { headers: { authorization: `Bearer ${keys[index]}` } });
    for (const { id, address } of answer.data) relayers.push({ id, address: address.toLowerCase() });
  }
  const addresses = new Set(relayers.map(({ address }) => address));
  if (addresses.size < relayers.length) {
    throw new Error(`relayers share a signer: ${relayers.map(({ id, address }) => `${id} ${address}`).join(", ")}`);
  }

  for (const { id, address } of relayers) {
    const balance = BigInt(await rpc("eth_getBalance", [address, "latest"]));
    if (balance < AMOUNT_WEI) await rpc("hardhat_setBalance", [address, `0x${AMOUNT_WEI.toString(16)}`]);
    console.log(`${id} ${address} has ${BigInt(await rpc("eth_getBalance", [address, "latest"]))} wei`);
  }
}

async function rpc(method, params) {
  const answer = await request(variable("RPC_URL"), {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ jsonrpc: "2.0", id: 1, method, params }),
  });
  if (answer.error) throw new Error(`${method}: ${answer.error.message}`);
  return answer.result;
}

async function request(url, options) {
  const response = await fetch(url, { ...options, signal: AbortSignal.timeout(TIMEOUT_MS) }).catch((error) => {
    throw new Error(`${url}: ${error.cause?.message ?? error.message}`);
  });
  if (!response.ok) throw new Error(`${url} answered ${response.status}`);
  return response.json();
}

function list(name) {
  return variable(name).split(",").map((item) => item.trim()).filter((item) => item !== "");
}

function variable(name) {
  const value = process.env[name];
  if (!value) throw new Error(`${name} is not set`);
  return value;
}
