//! Values bound to conditions that are put together at run time (lists, sweeps).

use time::PrimitiveDateTime;

use super::columns::{Statement, datetime, id};
use crate::relay::state::transaction::TransactionId;
use crate::timestamp::Timestamp;

/// A value of a condition whose SQL is put together at run time.
pub(super) enum Value {
    Text(String),
    Moment(PrimitiveDateTime),
    Count(u64),
}

impl From<TransactionId> for Value {
    fn from(transaction: TransactionId) -> Self {
        Self::Text(id(transaction))
    }
}

impl From<Timestamp> for Value {
    fn from(at: Timestamp) -> Self {
        Self::Moment(datetime(at))
    }
}

impl From<usize> for Value {
    fn from(count: usize) -> Self {
        Self::Count(u64::try_from(count).unwrap_or(u64::MAX))
    }
}

/// Binds the values in order.
pub(super) fn bind_all<'q>(statement: Statement<'q>, values: &[Value]) -> Statement<'q> {
    values.iter().fold(statement, |statement, value| match value {
        Value::Text(text) => statement.bind(text),
        Value::Moment(at) => statement.bind(*at),
        Value::Count(count) => statement.bind(*count),
    })
}
