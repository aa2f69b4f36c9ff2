//! Addresses and amounts as text (pure): shared by the configuration, the API and the clients of relayers and chain.

use std::str::FromStr;

use alloy_primitives::{Address, U256};

/// The rule for an address, worded to follow the name of the field or variable.
pub const ADDRESS_RULE: &str = "must be a 20-byte address: 0x and 40 hex digits";

/// Parses an address. Mixed case must carry a valid EIP-55 checksum. The error is the rule that the text breaks.
pub fn parse_address(text: &str) -> Result<Address, String> {
    let digits = text.strip_prefix("0x").filter(|digits| digits.len() == 40).ok_or(ADDRESS_RULE)?;
    if !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(ADDRESS_RULE.to_owned());
    }
    let mixed =
        digits.bytes().any(|byte| byte.is_ascii_lowercase()) && digits.bytes().any(|byte| byte.is_ascii_uppercase());
    if mixed {
        return Address::parse_checksummed(text, None).map_err(|_| {
            "has a wrong EIP-55 checksum; send the checksummed address, or all lower case to skip it".to_owned()
        });
    }
    Address::from_str(text).map_err(|_| ADDRESS_RULE.to_owned())
}

/// Parses an amount of decimal digits or 0x hex; signs, points and exponents are refused.
pub fn parse_amount(text: &str) -> Option<U256> {
    let (digits, radix) = match text.strip_prefix("0x") {
        Some(hex) => (hex, 16),
        None => (text, 10),
    };
    let valid = !digits.is_empty() && digits.chars().all(|digit| digit.is_digit(radix));
    valid.then(|| U256::from_str_radix(digits, u64::from(radix)).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_in_mixed_case_needs_its_checksum() {
        let checksummed = "0x5FbDB2315678afecb367f032d93F642f64180aa3";
        assert_eq!(parse_address(checksummed).unwrap().to_checksum(None), checksummed);
        assert!(parse_address(&checksummed.to_lowercase()).is_ok());
        assert!(parse_address("0x5fbDB2315678afecb367f032d93F642f64180aa3").unwrap_err().contains("EIP-55"));
        for bad in ["", "0x", "0x12", "5FbDB2315678afecb367f032d93F642f64180aa3"] {
            assert_eq!(parse_address(bad).unwrap_err(), ADDRESS_RULE, "{bad:?}");
        }
    }

    #[test]
    fn an_amount_is_decimal_digits_or_hex() {
        assert_eq!(parse_amount("1000000000000000001"), Some(U256::from(1_000_000_000_000_000_001_u64)));
        assert_eq!(parse_amount("0x5208"), Some(U256::from(21_000)));
        for bad in ["", "0x", "-1", "+1", "1.5", "1e3", " 1", "1_000"] {
            assert_eq!(parse_amount(bad), None, "{bad:?}");
        }
    }
}
