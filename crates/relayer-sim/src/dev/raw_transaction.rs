//! A private key, and the bytes of a transaction signed with it: EIP-1559, or legacy with EIP-155 for a plain gas price.
//!
//! Two shapes are all that a development relayer signs. Encoded here, they spare every build the forty crates of a full
//! Ethereum client. The chain tests have a real node decode and execute these bytes.

use std::{fmt, str::FromStr};

use alloy_primitives::{Address, B256, Bytes, Signature, TxKind, U256, keccak256};
use alloy_rlp::{EMPTY_LIST_CODE, Encodable, Header};
use k256::ecdsa::SigningKey;

use super::signed::{Fees, Signed};
use crate::server::now_ms;

/// Type byte of an EIP-1559 transaction.
const EIP1559: u8 = 2;

/// The private key of a development relayer. Its digits never appear in messages.
#[derive(Clone)]
pub struct Key(SigningKey);

/// Everything that is signed.
#[derive(Debug)]
pub(super) struct Unsigned {
    pub(super) chain_id: u64,
    pub(super) nonce: u64,
    pub(super) gas_limit: u64,
    pub(super) fees: Fees,
    pub(super) to: TxKind,
    pub(super) value: U256,
    pub(super) data: Bytes,
}

impl Key {
    /// The address that the key signs for.
    pub fn address(&self) -> Address {
        Address::from_private_key(&self.0)
    }

    pub(super) fn sign(&self, transaction: &Unsigned) -> Result<Signed, k256::ecdsa::Error> {
        let hash = keccak256(transaction.encode(None));
        let signature = Signature::from(self.0.sign_prehash_recoverable(hash.as_slice())?);
        let raw = transaction.encode(Some(&signature));
        Ok(Signed {
            chain_id: transaction.chain_id,
            from: self.address(),
            nonce: transaction.nonce,
            hash: keccak256(&raw),
            raw: raw.into(),
            gas_limit: transaction.gas_limit,
            fees: transaction.fees,
            value: transaction.value,
            r: B256::from(signature.r()),
            s: B256::from(signature.s()),
            v: u8::from(signature.v()),
            at_ms: now_ms(),
        })
    }
}

impl FromStr for Key {
    type Err = NotAKey;

    fn from_str(text: &str) -> Result<Self, NotAKey> {
        let bytes = hex::decode(text.strip_prefix("0x").unwrap_or(text)).map_err(|_| NotAKey)?;
        SigningKey::from_slice(&bytes).map(Self).map_err(|_| NotAKey)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({})", self.address())
    }
}

/// The text is not a private key: 64 hexadecimal digits, with or without 0x.
#[derive(Debug, thiserror::Error)]
#[error("not a private key (0x and 64 hexadecimal digits)")]
pub struct NotAKey;

impl Unsigned {
    /// What is hashed and signed; with the signature, what is sent.
    fn encode(&self, signature: Option<&Signature>) -> Vec<u8> {
        let Self { chain_id, nonce, gas_limit, to, value, data, .. } = self;
        let mut fields = Vec::new();
        match self.fees {
            Fees::Eip1559 { max, priority } => {
                encode_all(&mut fields, &[chain_id, nonce, &priority, &max, gas_limit, to, value, data]);
                fields.push(EMPTY_LIST_CODE);
                if let Some(signature) = signature {
                    encode_all(&mut fields, &[&signature.v(), &signature.r(), &signature.s()]);
                }
                let mut encoded = vec![EIP1559];
                encoded.extend(list(fields));
                encoded
            }
            Fees::GasPrice(price) => {
                encode_all(&mut fields, &[nonce, &price, gas_limit, to, value, data]);
                match signature {
                    None => encode_all(&mut fields, &[chain_id, &0u8, &0u8]),
                    Some(signature) => {
                        let v = u128::from(*chain_id) * 2 + 35 + u128::from(signature.v());
                        encode_all(&mut fields, &[&v, &signature.r(), &signature.s()]);
                    }
                }
                list(fields)
            }
        }
    }
}

fn encode_all(out: &mut Vec<u8>, fields: &[&dyn Encodable]) {
    for field in fields {
        field.encode(out);
    }
}

fn list(fields: Vec<u8>) -> Vec<u8> {
    let mut encoded = Vec::with_capacity(fields.len() + 9);
    Header { list: true, payload_length: fields.len() }.encode(&mut encoded);
    encoded.extend(fields);
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example in EIP-155: key 0x46…46, nonce 9, 20 gwei, 21000 gas, 1 ether to 0x35…35, chain 1.
    #[test]
    fn a_legacy_transaction_is_signed_as_in_the_example_of_eip_155() {
        let key: Key = "46".repeat(32).parse().expect("a key");
        let signed = key
            .sign(&Unsigned {
                chain_id: 1,
                nonce: 9,
                gas_limit: 21_000,
                fees: Fees::GasPrice(20_000_000_000),
                to: TxKind::Call(Address::repeat_byte(0x35)),
                value: U256::from(10).pow(U256::from(18)),
                data: Bytes::new(),
            })
            .expect("signed");
        assert_eq!(
            hex::encode(&signed.raw),
            "f86c098504a817c800825208943535353535353535353535353535353535353535880de0b6b3a76400008025\
             a028ef61340bd939bc2195fe537567866003e1a15d3c71ff63e1590620aa636276\
             a067cbe9d8997f761aecb703304b3800ccf555c9f3dc64214b297fb1966a3b6d83"
        );
    }

    #[test]
    fn a_signature_belongs_to_the_key_and_the_type_byte_comes_first() {
        let key: Key = format!("0x{}", "11".repeat(32)).parse().expect("a key");
        let unsigned = Unsigned {
            chain_id: 31_337,
            nonce: 0,
            gas_limit: 100_000,
            fees: Fees::Eip1559 { max: 2_000_000_000, priority: 1 },
            to: TxKind::Create,
            value: U256::ZERO,
            data: Bytes::from_static(&[0x60, 0x00]),
        };
        let signed = key.sign(&unsigned).expect("signed");
        let signature = Signature::new(signed.r.into(), signed.s.into(), signed.v == 1);
        let recovered = signature.recover_address_from_prehash(&keccak256(unsigned.encode(None)));
        assert_eq!(recovered.ok(), Some(key.address()));
        assert_eq!(signed.raw[0], EIP1559);
    }

    #[test]
    fn a_text_that_is_no_key_is_refused_without_repeating_it() {
        for text in ["", "0x12", "zz", &"00".repeat(32), &"ff".repeat(32)] {
            let refused = text.parse::<Key>().expect_err("refused");
            assert!(text.is_empty() || !refused.to_string().contains(text), "{refused}");
        }
    }
}
