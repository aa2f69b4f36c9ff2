//! The forms of the relayer's answers: envelopes, pages, plain text, and the refusals with bodies of their own.

use std::ops::Range;

use serde::Serialize;
use serde_json::Value;

use crate::api::SimResponse;

const PER_PAGE_DEFAULT: usize = 10;

#[derive(Serialize)]
struct Envelope<'a, T: Serialize> {
    success: bool,
    data: T,
    error: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pagination: Option<Pagination>,
}

#[derive(Serialize)]
struct Pagination {
    current_page: usize,
    per_page: usize,
    total_items: usize,
}

pub(crate) fn success(data: impl Serialize) -> SimResponse {
    json_body(200, &Envelope { success: true, data, error: None, pagination: None })
}

pub(crate) fn failure(status: u16, message: &str) -> SimResponse {
    json_body(status, &Envelope { success: false, data: Value::Null, error: Some(message), pagination: None })
}

/// Some errors of the real relayer are plain text.
pub(crate) fn text(status: u16, message: String) -> SimResponse {
    answer(status, "text/plain; charset=utf-8", message.into_bytes())
}

pub(crate) fn json_body(status: u16, body: &impl Serialize) -> SimResponse {
    answer(status, "application/json", serde_json::to_vec(body).expect("an answer has text keys only"))
}

fn answer(status: u16, content_type: &str, body: Vec<u8>) -> SimResponse {
    SimResponse { status, headers: vec![("content-type", content_type.to_owned())], body }
}

pub(crate) fn unauthorized_missing() -> SimResponse {
    let body = r#"{"success": false, "code": 401, "error": "Unauthorized", "message": "Unauthorized"}"#;
    answer(401, "application/json", body.into())
}

/// The real relayer sends this without a content type.
pub(crate) fn unauthorized_wrong() -> SimResponse {
    let body = r#"{"success":false,"code":401,"error":"Unauthorized","message":"Unauthorized"}"#;
    SimResponse { status: 401, headers: Vec::new(), body: body.into() }
}

pub(crate) fn rate_limited() -> SimResponse {
    let body =
        r#"{ "success": false, "code":429, "error": "TooManyRequests", "message": "Too Many Requests", "after": 0}"#;
    let mut response = answer(429, "application/json", body.into());
    response.headers.extend(["retry-after", "x-ratelimit-after"].map(|name| (name, "0".to_owned())));
    response
}

/// A page of a list. Pages count from 1.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Page {
    number: usize,
    size: usize,
}

impl Page {
    /// The error is the text of a 400.
    pub(crate) fn parse(query: &str) -> Result<Self, String> {
        let number = |name, default| match find(query, name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|error| format!("Query deserialize error: {error}")),
        };
        Ok(Self { number: number("page", 1)?.max(1), size: number("per_page", PER_PAGE_DEFAULT)? })
    }

    /// The places on this page of a list with this many items.
    pub(crate) fn range(&self, total: usize) -> Range<usize> {
        let start = (self.number - 1).saturating_mul(self.size).min(total);
        start..start.saturating_add(self.size).min(total)
    }

    pub(crate) fn answer<T: Serialize>(&self, data: &[T], total_items: usize) -> SimResponse {
        let pagination = Some(Pagination { current_page: self.number, per_page: self.size, total_items });
        json_body(200, &Envelope { success: true, data, error: None, pagination })
    }
}

/// A parameter of a query string. Values that need percent-encoding are not used here.
pub(crate) fn find<'a>(query: &'a str, name: &str) -> Option<&'a str> {
    query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name).map(|(_, value)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_the_real_relayers_defaults() {
        assert_eq!(Page::parse("other=x"), Ok(Page { number: 1, size: 10 }));
        assert_eq!(Page::parse("page=0&per_page=1000"), Ok(Page { number: 1, size: 1000 }));
        assert!(Page::parse("page=-1").unwrap_err().starts_with("Query deserialize error: "));
    }
}
