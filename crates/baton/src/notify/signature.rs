//! Signatures of deliveries: Standard Webhooks 1.0 with a shared secret (`v1`).
//!
//! The signed text is `id.timestamp.body` with the body's exact bytes. Pure: the caller passes the time, and signs each
//! attempt anew, because receivers reject a timestamp that is more than five minutes off.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use rand::TryRng;
use rand::rngs::SysRng;
use sha2::Sha256;

use crate::config::{Secret, secret_bytes};

/// Tolerance of timestamps, in seconds, in either direction: that of the official verifiers.
const TOLERANCE_S: u64 = 5 * 60;
/// Length of a generated secret; the specification allows 24 to 64.
const SECRET_BYTES: usize = 32;

/// The `webhook-signature` header: one signature per secret, separated by spaces, so that receivers with the new secret
/// and receivers with the previous one both accept it during a rotation. `None` if there is no secret or one is
/// malformed.
pub fn sign(secrets: &[Secret], id: &str, timestamp_s: i64, body: &[u8]) -> Option<String> {
    let timestamp = timestamp_s.to_string();
    let signed = secrets.iter().map(|secret| {
        let signature = mac(secret, id, &timestamp, body)?.finalize().into_bytes();
        Some(format!("v1,{}", BASE64_STANDARD.encode(signature)))
    });
    let signatures = signed.collect::<Option<Vec<_>>>()?;
    (!signatures.is_empty()).then(|| signatures.join(" "))
}

/// A new secret: `whsec_` and the base64 of 32 random bytes of the operating system.
///
/// # Panics
/// If the operating system provides no randomness.
pub fn generate_secret() -> Secret {
    let mut bytes = [0; SECRET_BYTES];
    SysRng.try_fill_bytes(&mut bytes).expect("the operating system provides randomness");
    Secret::new(format!("whsec_{}", BASE64_STANDARD.encode(bytes)))
}

/// Checks a delivery as a receiver does: `timestamp_s` and `signatures` are the headers `webhook-timestamp` and
/// `webhook-signature`. One matching `v1` signature suffices; signatures of other versions are ignored.
pub fn verify(
    secret: &Secret,
    id: &str,
    timestamp_s: &str,
    signatures: &str,
    body: &[u8],
    now_s: i64,
) -> Result<(), String> {
    let sent_s: i64 = timestamp_s.parse().map_err(|_| "the timestamp is not a number".to_owned())?;
    if sent_s.abs_diff(now_s) > TOLERANCE_S {
        return Err("the timestamp is more than 5 minutes off".to_owned());
    }
    let mac = mac(secret, id, timestamp_s, body)
        .ok_or("the secret is malformed: it must be whsec_ and the base64 of 24 to 64 bytes")?;
    let listed = signatures.split(' ').filter_map(|signature| signature.strip_prefix("v1,"));
    let decoded = listed.filter_map(|signature| BASE64_STANDARD.decode(signature).ok());
    // `verify_slice` compares in constant time.
    let matches = decoded.filter(|signature| mac.clone().verify_slice(signature).is_ok()).count();
    if matches > 0 { Ok(()) } else { Err("no signature matches".to_owned()) }
}

/// The HMAC over the signed text. The timestamp is text, because a receiver signs the header's bytes, not its number.
fn mac(secret: &Secret, id: &str, timestamp_s: &str, body: &[u8]) -> Option<Hmac<Sha256>> {
    let mut mac = Hmac::<Sha256>::new_from_slice(&secret_bytes(secret)?).ok()?;
    for part in [id.as_bytes(), b".", timestamp_s.as_bytes(), b".", body] {
        mac.update(part);
    }
    Some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const ID: &str = "msg_p5jXN8AQM9LWM0D4loKWxJek";
    const AT: i64 = 1_614_265_330;
    const BODY: &[u8] = br#"{"test": 2432232314}"#;
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn check(signatures: &str, body: &[u8], now_s: i64) -> Result<(), String> {
        verify(&Secret::new(SECRET), ID, &AT.to_string(), signatures, body, now_s)
    }

    #[test]
    fn the_published_vector_is_signed_and_verified() {
        assert_eq!(sign(&[Secret::new(SECRET)], ID, AT, BODY).as_deref(), Some(SIGNATURE));
        assert_eq!(check(SIGNATURE, BODY, AT), Ok(()));
    }

    #[test]
    fn two_secrets_give_two_signatures_and_either_suffices() {
        let (old, new) = (Secret::new(SECRET), generate_secret());
        let header = sign(&[new.clone(), old.clone()], ID, AT, BODY).unwrap();
        assert_eq!(header.split(' ').count(), 2);
        assert!(header.ends_with(SIGNATURE));
        for secret in [&old, &new] {
            assert_eq!(verify(secret, ID, &AT.to_string(), &header, BODY, AT), Ok(()));
        }
        let other = verify(&generate_secret(), ID, &AT.to_string(), &header, BODY, AT);
        assert_eq!(other, Err("no signature matches".to_owned()));
    }

    #[test]
    fn a_changed_delivery_is_rejected() {
        assert!(check(SIGNATURE, b"{}", AT).is_err());
        let secret = Secret::new(SECRET);
        assert!(verify(&secret, "msg_another", &AT.to_string(), SIGNATURE, BODY, AT).is_err());
        assert!(verify(&secret, ID, &(AT + 1).to_string(), SIGNATURE, BODY, AT).is_err());
        assert!(verify(&secret, ID, "soon", SIGNATURE, BODY, AT).unwrap_err().contains("not a number"));
        for signatures in ["", "v1,", "v1,AAAA", "v1,not base64", &SIGNATURE.replace("v1,", "v1a,"), &SIGNATURE[3..]] {
            assert!(check(signatures, BODY, AT).is_err(), "{signatures}");
        }
        assert_eq!(check(&format!("v1a,AAAA v1,AAAA {SIGNATURE}"), BODY, AT), Ok(()));
    }

    #[test]
    fn a_timestamp_may_be_five_minutes_off() {
        for now_s in [AT - 300, AT + 300] {
            assert_eq!(check(SIGNATURE, BODY, now_s), Ok(()));
        }
        for now_s in [AT - 301, AT + 301, i64::MIN, i64::MAX] {
            assert!(check(SIGNATURE, BODY, now_s).unwrap_err().contains("5 minutes"));
        }
    }

    #[test]
    fn a_malformed_or_missing_secret_signs_nothing() {
        for malformed in ["", "whsec_", "whsec_c2hvcnQ=", "whsec_???", &SECRET[6..]] {
            let malformed = Secret::new(malformed);
            assert_eq!(sign(&[Secret::new(SECRET), malformed.clone()], ID, AT, BODY), None);
            assert!(verify(&malformed, ID, &AT.to_string(), SIGNATURE, BODY, AT).unwrap_err().contains("secret"));
        }
        assert_eq!(sign(&[], ID, AT, BODY), None);
    }

    #[test]
    fn generated_secrets_are_well_formed_and_differ() {
        let (first, second) = (generate_secret(), generate_secret());
        assert_eq!(secret_bytes(&first).map(|bytes| bytes.len()), Some(SECRET_BYTES));
        assert_ne!(first, second);
    }
}
