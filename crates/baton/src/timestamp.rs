//! A point in time, in milliseconds since 1970: what the stores keep and what clients read as RFC 3339.
//!
//! A plain value: the current one comes from a [`crate::clock::Clock`], and pure code takes it as an argument.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Serialize, Serializer};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;

/// Milliseconds since 1970-01-01T00:00:00Z.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// Reads RFC 3339 with any number of fractional digits and any offset, as relayers write it.
    pub fn parse(text: &str) -> Option<Self> {
        let moment = OffsetDateTime::parse(text, &Rfc3339).ok()?;
        i64::try_from(moment.unix_timestamp_nanos() / 1_000_000).ok().map(Self)
    }

    /// Reads the `Date` header of HTTP.
    pub fn parse_http(text: &str) -> Option<Self> {
        let format =
            format_description!("[weekday repr:short], [day] [month repr:short] [year] [hour]:[minute]:[second] GMT");
        let moment = time::PrimitiveDateTime::parse(text, &format).ok()?.assume_utc();
        Some(Self(moment.unix_timestamp().saturating_mul(1000)))
    }

    /// Time passed since `earlier`; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }
}

impl From<SystemTime> for Timestamp {
    fn from(moment: SystemTime) -> Self {
        let since = moment.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
    }
}

impl std::ops::Add<Duration> for Timestamp {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }
}

impl std::ops::Sub<Duration> for Timestamp {
    type Output = Self;

    fn sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(i64::try_from(span.as_millis()).unwrap_or(i64::MAX)))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:3]Z");
        let text = OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.0) * 1_000_000)
            .ok()
            .and_then(|moment| moment.format(&format).ok());
        f.write_str(text.as_deref().unwrap_or("(out of range)"))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_relayers_write_and_prints_milliseconds() {
        let moment = Timestamp::parse("2026-11-15T18:30:57.458707822+00:00").unwrap();
        assert_eq!(moment.to_string(), "2026-11-15T18:30:57.458Z");
        assert_eq!(Timestamp::parse("2026-11-15T20:30:57.458+02:00"), Some(moment));
        assert_eq!(Timestamp::parse("yesterday"), None);
    }

    #[test]
    fn reads_the_date_of_an_http_answer() {
        let moment = Timestamp::parse_http("Sun, 15 Nov 2026 22:37:51 GMT").unwrap();
        assert_eq!(moment.to_string(), "2026-11-15T22:37:51.000Z");
        assert_eq!(Timestamp::parse_http("15 Nov"), None);
    }

    #[test]
    fn since_never_goes_below_zero() {
        assert_eq!(Timestamp(5).since(Timestamp(9)), Duration::ZERO);
        assert_eq!(Timestamp(9).since(Timestamp(5)), Duration::from_millis(4));
    }
}
