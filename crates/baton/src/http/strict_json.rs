//! JSON from outside, read strictly: a name twice in one object is refused, since a proxy in front may have checked the
//! other value, and the number of values is bounded, since each takes many times the memory of its text.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Most values in one body, counting those inside others. The largest body that Baton knows has about thirty.
const VALUES_MAX: usize = 1000;
/// Characters of a name in an error.
const NAME_LENGTH_SHOWN: usize = 64;

/// Reads one value. The error says what the text has that it must not have, or where it is not JSON.
pub fn parse(text: &[u8]) -> Result<Value, String> {
    let left = Cell::new(VALUES_MAX);
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value = AnyValue(&left).deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    value.map_err(|error| if error.is_data() { format!("has {error}") } else { format!("is not JSON: {error}") })
}

/// Reads any value, as long as some are left.
#[derive(Clone, Copy)]
struct AnyValue<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for AnyValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let left = self.0.get();
        if left == 0 {
            return Err(D::Error::custom(format_args!("more than {VALUES_MAX} values")));
        }
        self.0.set(left - 1);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for AnyValue<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut read = Vec::new();
        while let Some(item) = items.next_element_seed(self)? {
            read.push(item);
        }
        Ok(Value::Array(read))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut read = Map::new();
        while let Some(name) = fields.next_key::<String>()? {
            if read.contains_key(&name) {
                let shown: String = name.chars().take(NAME_LENGTH_SHOWN).collect();
                return Err(A::Error::custom(format_args!("the field {shown:?} twice")));
            }
            read.insert(name, fields.next_value_seed(self)?);
        }
        Ok(Value::Object(read))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_reads_is_what_serde_json_reads() {
        for text in [r#"{"a":[1,-2,3.5,1e3,"x\u00e9",null,true,{}],"b":{"a":18446744073709551615}}"#, " 7 ", "[]"] {
            assert_eq!(parse(text.as_bytes()).unwrap(), serde_json::from_str::<Value>(text).unwrap(), "{text}");
        }
    }

    #[test]
    fn a_name_twice_is_refused_wherever_it_is() {
        for text in [r#"{"to":1,"value":2,"to":1}"#, r#"{"a":[{"to":1,"t\u006f":1}]}"#] {
            assert!(parse(text.as_bytes()).unwrap_err().starts_with(r#"has the field "to" twice"#), "{text}");
        }
        assert!(parse(br#"{"a":{"to":1},"b":{"to":1}}"#).is_ok());
    }

    #[test]
    fn the_number_of_values_is_bounded() {
        let items = |count: usize| format!("[{}]", vec!["0"; count].join(","));
        assert!(parse(items(VALUES_MAX - 1).as_bytes()).is_ok());
        assert!(parse(items(VALUES_MAX).as_bytes()).unwrap_err().starts_with("has more than 1000 values"));
    }

    #[test]
    fn text_that_is_not_json_is_refused() {
        for text in ["{", "", "{}x", "[1,]", "nul", "\u{feff}{}", &"[".repeat(100_000)] {
            assert!(parse(text.as_bytes()).unwrap_err().starts_with("is not JSON"), "{text:.20}");
        }
    }
}
