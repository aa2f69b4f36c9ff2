//! The chain's settings, for gasless transactions, pre-flight checks and block numbers. All are off by default; an
//! incomplete combination is refused at start.

use std::time::Duration;

use alloy_primitives::Address;

use super::Secret;
use super::reader::Vars;
use crate::evm::parse_address;

/// The chain behind `RPC_URL`.
#[derive(Debug, Clone)]
pub struct ChainConfig {
    /// `RPC_URL`: its JSON-RPC endpoint. Providers put their keys into it, so it is secret.
    pub rpc_url: Secret,
    /// `RPC_TIMEOUT_MS`: timeout of one JSON-RPC call.
    pub rpc_timeout: Duration,
    /// `CHAIN_ID`: its expected id; `None`: any chain.
    pub chain_id: Option<u64>,
    /// `RELAY_PREFLIGHT`: try each transaction with `eth_call` before it is submitted.
    pub preflight: bool,
    /// `FORWARDER_*`; `None`: gasless transactions are off.
    pub forwarder: Option<ForwarderConfig>,
    /// What a gasless request may ask of the relayers.
    pub gasless: GaslessPolicy,
    /// `CHAIN_DECIDES`: whether relayers' final reports are compared with the chain.
    pub decides: bool,
    /// `CHAIN_FINALITY_BLOCKS`: confirmations after which a block counts as final.
    pub finality_blocks: u64,
    /// `RPC_RATE_PER_SECOND`: maximum calls per second of one consumer; `None`: no limit.
    pub calls_per_second: Option<u32>,
}

/// The forwarder of gasless transactions. With the chain's id it is the EIP-712 domain that clients sign for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwarderConfig {
    /// `FORWARDER_ADDRESS`: the ERC2771Forwarder contract.
    pub address: Address,
    /// `FORWARDER_NAME`: the name in its EIP-712 domain.
    pub name: String,
    /// `CHAIN_ID`: part of the EIP-712 domain.
    pub chain_id: u64,
    /// `FORWARDER_GAS_OVERHEAD`: gas for the forwarder itself, on top of what grows with the request.
    pub gas_overhead: u64,
}

/// What a gasless request may ask of the relayers, who pay for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GaslessPolicy {
    /// `GASLESS_ALLOW_VALUE`: whether a request may carry a value, which its relayer pays.
    pub allow_value: bool,
    /// `GASLESS_GAS_MAX`: maximum gas of a request.
    pub gas_max: u64,
    /// `GASLESS_PREFLIGHT`: try each request with `eth_call` before it is submitted.
    pub preflight: bool,
}

impl Vars<'_> {
    pub(super) fn chain(&mut self) -> Option<ChainConfig> {
        let rpc_timeout = self.millis("RPC_TIMEOUT_MS");
        let preflight: bool = self.parsed("RELAY_PREFLIGHT");
        let chain_id = self.chain_id();
        let forwarder = self.forwarder(chain_id);
        let gasless = GaslessPolicy {
            allow_value: self.parsed("GASLESS_ALLOW_VALUE"),
            gas_max: self.count("GASLESS_GAS_MAX"),
            preflight: self.parsed("GASLESS_PREFLIGHT"),
        };
        let finality_blocks = self.parsed("CHAIN_FINALITY_BLOCKS");
        let calls_per_second = Some(self.parsed("RPC_RATE_PER_SECOND")).filter(|rate| *rate > 0);
        let decides: bool = self.parsed("CHAIN_DECIDES");
        let rpc_url = self.urls("RPC_URL");
        if self.text("RPC_URL").is_none() {
            if self.text("FORWARDER_ADDRESS").is_some() {
                let why = "is not set: gasless transactions need the chain; set it, or unset FORWARDER_ADDRESS";
                self.problem("RPC_URL", why);
            } else if preflight {
                self.problem(
                    "RPC_URL",
                    "is not set: pre-flight checks need the chain; set it, or unset RELAY_PREFLIGHT",
                );
            }
        }
        Some(ChainConfig {
            rpc_url: Secret::new(&rpc_url?),
            rpc_timeout,
            chain_id,
            preflight,
            forwarder,
            gasless,
            decides,
            finality_blocks,
            calls_per_second,
        })
    }

    pub(super) fn chain_id(&mut self) -> Option<u64> {
        let id = self.text("CHAIN_ID")?.parse().ok().filter(|id| *id > 0);
        if id.is_none() {
            self.problem("CHAIN_ID", "must be a whole number of at least 1, such as 137");
        }
        id
    }

    fn forwarder(&mut self, chain_id: Option<u64>) -> Option<ForwarderConfig> {
        let gas_overhead = self.count("FORWARDER_GAS_OVERHEAD");
        let Some(address) = self.text("FORWARDER_ADDRESS") else {
            if self.text("FORWARDER_NAME").is_some() {
                let why = "is not set, but FORWARDER_NAME is: set the forwarder's address, or unset FORWARDER_NAME";
                self.problem("FORWARDER_ADDRESS", why);
            }
            return None;
        };
        let address = match parse_address(&address) {
            Ok(address) => Some(address),
            Err(rule) => {
                self.problem("FORWARDER_ADDRESS", &rule);
                None
            }
        };
        if self.text("CHAIN_ID").is_none() {
            let why = "is not set: clients sign gasless transactions for one chain; set it, or unset FORWARDER_ADDRESS";
            self.problem("CHAIN_ID", why);
        }
        let name = self.text_or_default("FORWARDER_NAME");
        Some(ForwarderConfig { address: address?, name, chain_id: chain_id?, gas_overhead })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Config, ConfigError, Service};
    use super::*;

    const FORWARDER: &str = "0x5FbDB2315678afecb367f032d93F642f64180aa3";

    fn read(vars: &[(&str, &str)]) -> Result<Option<ChainConfig>, Vec<String>> {
        let lookup = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Config::from_vars(Service::Command, lookup).map(|config| config.relay.chain).map_err(|ConfigError(found)| found)
    }

    #[test]
    fn without_a_forwarder_gasless_is_off() {
        assert!(read(&[]).unwrap().is_none());
        let chain = read(&[("RPC_URL", "http://h:1"), ("CHAIN_ID", "31337")]).unwrap().unwrap();
        assert_eq!((chain.forwarder, chain.preflight, chain.chain_id), (None, false, Some(31337)));
        assert!(
            read(&[("CHAIN_ID", "31337")]).unwrap().is_none(),
            "CHAIN_ID alone says which chain the relayers must be on"
        );
        let lookup = |name: &str| (name == "CHAIN_ID").then(|| "31337".to_owned());
        assert_eq!(Config::from_vars(Service::Command, lookup).unwrap().relay.chain_id, Some(31337));
    }

    #[test]
    fn gasless_needs_an_rpc_url_a_chain_id_and_a_forwarder() {
        let vars = [("RPC_URL", "https://h/secret-key"), ("CHAIN_ID", "137"), ("FORWARDER_ADDRESS", FORWARDER)];
        let chain = read(&vars).unwrap().unwrap();
        let forwarder = chain.forwarder.clone().unwrap();
        assert_eq!((forwarder.name.as_str(), forwarder.chain_id), ("ERC2771Forwarder", 137));
        assert_eq!(forwarder.address.to_checksum(None), FORWARDER);
        assert!(!format!("{chain:?}").contains("secret-key"), "the URL may hold a provider's key");
        // Safe unless switched on: the relayers pay.
        assert_eq!(chain.gasless, GaslessPolicy { allow_value: false, gas_max: 2_000_000, preflight: true });
    }

    #[test]
    fn an_incomplete_chain_names_the_missing_variables() {
        let named = |vars: &[(&str, &str)]| -> Vec<String> {
            let problems = read(vars).unwrap_err();
            problems.iter().map(|found| found.split(' ').next().unwrap().to_owned()).collect()
        };
        assert_eq!(named(&[("FORWARDER_ADDRESS", FORWARDER)]), ["CHAIN_ID", "RPC_URL"]);
        assert_eq!(named(&[("FORWARDER_ADDRESS", FORWARDER), ("RPC_URL", "http://h")]), ["CHAIN_ID"]);
        assert_eq!(named(&[("FORWARDER_ADDRESS", FORWARDER), ("CHAIN_ID", "1")]), ["RPC_URL"]);
        assert_eq!(named(&[("FORWARDER_NAME", "Mine"), ("RPC_URL", "http://h")]), ["FORWARDER_ADDRESS"]);
        assert_eq!(named(&[("RELAY_PREFLIGHT", "true")]), ["RPC_URL"]);
        let wrong_case = "0x5fbDB2315678afecb367f032d93F642f64180aa3";
        for (name, bad) in [
            ("FORWARDER_ADDRESS", wrong_case),
            ("FORWARDER_ADDRESS", "0x12"),
            ("CHAIN_ID", "0"),
            ("CHAIN_ID", "0x89"),
            ("RPC_URL", "ws://h"),
            ("RELAY_PREFLIGHT", "maybe"),
            ("GASLESS_PREFLIGHT", "maybe"),
            ("GASLESS_ALLOW_VALUE", "5"),
            ("GASLESS_GAS_MAX", "0"),
            ("FORWARDER_GAS_OVERHEAD", "0"),
        ] {
            let mut vars = vec![(name, bad)];
            vars.extend([("RPC_URL", "http://h"), ("CHAIN_ID", "1"), ("FORWARDER_ADDRESS", FORWARDER)]);
            assert_eq!(named(&vars), [name], "{name}={bad}");
        }
    }
}
