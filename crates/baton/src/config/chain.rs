//! The chain's variables: what gasless transactions, the pre-flight and a status's block need. None of it is on unless
//! asked for, and what is asked for by halves is refused at the start.

use std::time::Duration;

use alloy_primitives::Address;

use super::vars::Vars;
use super::{Secret, Variable, var};
use crate::evm::parse_address;

/// The chain behind `RPC_URL`.
#[derive(Debug, Clone)]
pub struct ChainConfig {
    /// `RPC_URL`: its JSON-RPC endpoint. Providers put their keys into it, so it is not shown.
    pub rpc_url: Secret,
    /// `RPC_TIMEOUT_MS`: how long one question to it may take.
    pub rpc_timeout: Duration,
    /// `CHAIN_ID`: which chain it must be.
    pub chain_id: Option<u64>,
    /// `RELAY_PREFLIGHT`: whether a transaction is tried with `eth_call` before it is submitted.
    pub preflight: bool,
    /// `FORWARDER_*`: gasless transactions, if there is a forwarder.
    pub forwarder: Option<ForwarderConfig>,
}

/// The forwarder of gasless transactions, which with the chain's id is the domain that clients sign for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwarderConfig {
    /// `FORWARDER_ADDRESS`: the contract.
    pub address: Address,
    /// `FORWARDER_NAME`: what it calls itself in its EIP-712 domain.
    pub name: String,
    /// `CHAIN_ID`.
    pub chain_id: u64,
    /// `FORWARDER_GAS_OVERHEAD`: the gas that it needs itself, beside what grows with the request.
    pub gas_overhead: u64,
}

/// The variables, in the order of the documentation.
pub(super) const VARIABLES: &[Variable] = &[
    var(
        "RPC_URL",
        "",
        "the chain's JSON-RPC endpoint; gasless transactions, the pre-flight and a status's block need it",
    ),
    var("RPC_TIMEOUT_MS", "5000", "how long one question to it may take"),
    var("CHAIN_ID", "", "the id that the chain must have; gasless transactions need it"),
    var("FORWARDER_ADDRESS", "", "the ERC2771Forwarder; unset: gasless transactions are off"),
    var("FORWARDER_NAME", "ERC2771Forwarder", "the name in the forwarder's EIP-712 domain"),
    var(
        "FORWARDER_GAS_OVERHEAD",
        "100000",
        "gas that the forwarder needs itself, added to the gas that was signed for",
    ),
    var(
        "RELAY_PREFLIGHT",
        "false",
        "try each transaction with eth_call before it is submitted; one that reverts fails",
    ),
];

impl Vars<'_> {
    pub(super) fn chain(&mut self) -> Option<ChainConfig> {
        let rpc_timeout = self.millis("RPC_TIMEOUT_MS");
        let preflight = self.parsed("RELAY_PREFLIGHT", false, "true or false");
        let chain_id = self.chain_id();
        let forwarder = self.forwarder(chain_id);
        let rpc_url = self.url("RPC_URL", &["http", "https"]);
        if self.text("RPC_URL").is_none() {
            if self.text("FORWARDER_ADDRESS").is_some() {
                let why = "is not set: gasless transactions need the chain; set it, or unset FORWARDER_ADDRESS";
                self.problem("RPC_URL", why);
            } else if preflight {
                self.problem("RPC_URL", "is not set: the pre-flight needs the chain; set it, or unset RELAY_PREFLIGHT");
            }
        }
        let rpc_url = Secret::new(rpc_url?.to_string());
        Some(ChainConfig { rpc_url, rpc_timeout, chain_id, preflight, forwarder })
    }

    fn chain_id(&mut self) -> Option<u64> {
        let id = self.text("CHAIN_ID")?.parse().ok().filter(|id| *id > 0);
        if id.is_none() {
            self.problem("CHAIN_ID", "must be a whole number of at least 1, such as 137");
        }
        id
    }

    fn forwarder(&mut self, chain_id: Option<u64>) -> Option<ForwarderConfig> {
        let gas_overhead = self.count("FORWARDER_GAS_OVERHEAD");
        let name = self.text("FORWARDER_NAME");
        let Some(address) = self.text("FORWARDER_ADDRESS") else {
            if name.is_some() {
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
        let name = name.unwrap_or_else(|| "ERC2771Forwarder".to_owned());
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
        assert!(read(&[("CHAIN_ID", "31337")]).unwrap().is_none(), "as in the environment of the relayers");
    }

    #[test]
    fn the_least_that_is_gasless() {
        let vars = [("RPC_URL", "https://h/secret-key"), ("CHAIN_ID", "137"), ("FORWARDER_ADDRESS", FORWARDER)];
        let chain = read(&vars).unwrap().unwrap();
        let forwarder = chain.forwarder.clone().unwrap();
        assert_eq!((forwarder.name.as_str(), forwarder.chain_id), ("ERC2771Forwarder", 137));
        assert_eq!(forwarder.address.to_checksum(None), FORWARDER);
        assert!(!format!("{chain:?}").contains("secret-key"), "providers put their keys into the URL");
    }

    #[test]
    fn what_is_set_by_halves_names_what_is_missing() {
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
            ("FORWARDER_GAS_OVERHEAD", "0"),
        ] {
            let mut vars = vec![(name, bad)];
            vars.extend([("RPC_URL", "http://h"), ("CHAIN_ID", "1"), ("FORWARDER_ADDRESS", FORWARDER)]);
            assert_eq!(named(&vars), [name], "{name}={bad}");
        }
    }
}
