//! Forward requests compared with ethers: the signing hash and the call data are the same.

use alloy_primitives::{Address, B256, Bytes, U256, Uint};
use baton::config::ForwarderConfig;
use baton::relay::request::forward::{self, GaslessRequest};
use harness::chain::{CHAIN_ID, FORWARDER_NAME, ForwardRequest};
use harness::process::Program;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use crate::chain_fixture::SOON;

const COUNT: usize = 1000;
/// Maximum bytes of call data; most requests have fewer, padded and unpadded.
const DATA_MAX: usize = 2000;

/// The product's signing hash and call data.
fn ours(request: &ForwardRequest, signature: &Bytes, forwarder: Address) -> (B256, Vec<u8>) {
    let ForwardRequest { from, to, value, gas, nonce, deadline, data } = request.clone();
    let request = forward::ForwardRequest { from, to, value, gas, nonce, deadline, data };
    let gasless = GaslessRequest { request, signature: signature.clone(), retry_on_failure: false };
    let name = FORWARDER_NAME.to_owned();
    let forwarder = ForwarderConfig { address: forwarder, name, chain_id: CHAIN_ID, gas_overhead: 0 };
    (gasless.signing_hash(&forwarder), gasless.calldata())
}

#[tokio::test]
async fn a_thousand_requests_have_the_same_hash_and_call_data_as_in_ethers() {
    let seed = std::env::var("ETHERS_SEED").map_or_else(|_| rand::random(), |seed| seed.parse().unwrap());
    println!("ETHERS_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let asked: Vec<_> = (0..COUNT).map(|place| any_request(&mut random, place)).collect();
    let lines: Vec<String> = asked.iter().map(|(request, signature, at)| line(request, signature, *at)).collect();
    let theirs = ask_ethers(&lines).await;
    assert_eq!(theirs.len(), COUNT);
    for ((request, signature, forwarder), theirs) in asked.iter().zip(theirs) {
        let (hash, calldata) = ours(request, signature, *forwarder);
        assert_eq!(theirs["hash"], hash.to_string(), "{request:?} for {forwarder}");
        assert_eq!(theirs["calldata"], Bytes::from(calldata).to_string(), "{request:?} with {signature}");
    }
}

/// Computes hash and call data of all lines in one Node process.
async fn ask_ethers(lines: &[String]) -> Vec<Value> {
    let contracts = harness::engine::server("BATON_TEST_CONTRACTS");
    let directory = tempfile::tempdir().unwrap();
    let (input, output) = (directory.path().join("input"), directory.path().join("output"));
    std::fs::write(&input, lines.join("\n")).unwrap();
    let mut node = Program::new("node")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../contracts/forward_requests.js"))
        .arg(format!("{contracts}/ERC2771Forwarder.json"))
        .args([&input, &output])
        .env("NODE_PATH", format!("{contracts}/node_modules"))
        .start()
        .unwrap();
    let status = node.wait_exit(SOON).await.unwrap();
    assert!(status.success(), "{}", node.log_excerpt());
    let made = std::fs::read_to_string(&output).unwrap();
    made.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn line(request: &ForwardRequest, signature: &Bytes, forwarder: Address) -> String {
    let ForwardRequest { from, to, value, gas, nonce, deadline, data } = request;
    json!({
        "domain": {"name": FORWARDER_NAME, "version": "1", "chainId": CHAIN_ID, "verifyingContract": forwarder.to_string()},
        "request": {
            "from": from.to_string(), "to": to.to_string(), "value": value.to_string(), "gas": gas.to_string(),
            "nonce": nonce.to_string(), "deadline": deadline.to_string(), "data": data.to_string(),
        },
        "signature": signature.to_string(),
    })
    .to_string()
}

/// A random request. In the first 20, every field is an edge case; in the others, each field is one with probability 1/5.
fn any_request(random: &mut StdRng, place: usize) -> (ForwardRequest, Bytes, Address) {
    let extreme = |random: &mut StdRng| place < 20 || random.random_ratio(1, 5);
    let amount = |random: &mut StdRng| match extreme(random) {
        true => [U256::ZERO, U256::from(1), U256::MAX, U256::MAX - U256::from(1), U256::from(u64::MAX)]
            [random.random_range(0..5)],
        // Shifted, so that all lengths occur.
        false => U256::from_be_bytes(random.random::<[u8; 32]>()) >> random.random_range(0..256),
    };
    let (value, gas, nonce) = (amount(random), amount(random), amount(random));
    let address = |random: &mut StdRng| match extreme(random) {
        true => [Address::ZERO, Address::repeat_byte(0xff), Address::with_last_byte(1)][random.random_range(0..3)],
        false => Address::from(random.random::<[u8; 20]>()),
    };
    let (from, to, forwarder) = (address(random), address(random), address(random));
    let deadline = match extreme(random) {
        true => [0, 1, (1 << 48) - 1, u64::from(u32::MAX)][random.random_range(0..4)],
        false => random.random_range(0..1 << 48),
    };
    let size = match extreme(random) {
        true => [0, 1, 31, 32, 33, DATA_MAX][random.random_range(0..6)],
        false => random.random_range(0..200),
    };
    let data: Vec<u8> = (0..size).map(|_| random.random()).collect();
    let signature: Vec<u8> = (0..65).map(|_| random.random()).collect();
    let deadline = Uint::from(deadline);
    (ForwardRequest { from, to, value, gas, nonce, deadline, data: data.into() }, signature.into(), forwarder)
}
