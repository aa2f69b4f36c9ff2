// The local chain. A block every second besides the one for each transaction: a relayer calls a transaction confirmed
// when another block follows it, so on a chain that only mines on demand the last transaction would never be.
module.exports = {
  solidity: "0.8.28",
  networks: { hardhat: { chainId: 31337, mining: { auto: true, interval: 1000 } } },
};
