// The local chain. A block every second in addition to the one for each transaction: a relayer reports a transaction as
// confirmed when another block follows it, which never happens to the last one on a chain that mines only on demand.
module.exports = {
  solidity: "0.8.28",
  networks: { hardhat: { chainId: 31337, mining: { auto: true, interval: 1000 } } },
};
