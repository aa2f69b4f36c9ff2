//! Inserts a batch: one call and one commit, even if the database refuses some of the rows.
//!
//! The server's function `users_insert` (`migrations/postgres/0002_users_insert.sql`) writes the batch in parts, and a part
//! with a bad row one row at a time, so that a bad row rolls back little. Two faults escape it and fail the whole call: text
//! that the server's encoding cannot represent, and a deferred constraint, which is checked at the commit. Then the batch
//! is halved and each half inserted by itself, down to single rows. A refused row is [`InsertOutcome::Refused`], of which
//! [`crate::users::consumer`] makes a dead letter; the rest of the batch is stored.

use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::pool::{Pool, is_row_fault};
use crate::store_pool::work;
use crate::users::store::{InsertOutcome, Inserted, OTHER_USER, UserStoreError};
use crate::users::user::User;

const INSERT: &str = "SELECT added, places, reasons FROM users_insert($1, $2, $3)";

const FIND: &str = "SELECT id, name, email FROM users WHERE id = ANY($1)";

/// Inserts users; one outcome for each.
pub(super) async fn insert(pool: &Pool, users: &[User]) -> Result<Inserted, UserStoreError> {
    if users.is_empty() {
        return Ok(Inserted { outcomes: Vec::new(), new: 0 });
    }
    // All writers insert in the order of the ids, so that two that meet wait for each other instead of deadlocking.
    let mut rows: Vec<(usize, &User)> = users.iter().enumerate().collect();
    rows.sort_unstable_by_key(|(_, user)| user.id);
    let (rows, count) = (&rows[..], users.len());
    pool.call(work!(connection => {
        let mut outcomes = vec![InsertOutcome::Stored; count];
        let mut new = 0;
        // A stack: the last part is written next.
        let mut parts = vec![rows];
        while let Some(part) = parts.pop() {
            match write(connection, part, &mut outcomes).await {
                Ok(added) => new += added,
                Err(error) if is_row_fault(&error) => match part {
                    [(place, _)] => outcomes[*place] = InsertOutcome::Refused(reason(&error)),
                    _ => {
                        let (left, right) = part.split_at(part.len() / 2);
                        parts.extend([right, left]);
                    }
                },
                Err(error) => return Err(error),
            }
        }
        let refused = outcomes.iter().filter(|fate| **fate != InsertOutcome::Stored).count();
        if new + refused < count {
            compare(connection, rows, &mut outcomes).await?;
        }
        Ok(Inserted { outcomes, new })
    }))
    .await
}

/// Inserts the rows that the database accepts and marks the others; returns the number of rows that are new.
async fn write(
    connection: &mut PgConnection,
    rows: &[(usize, &User)],
    outcomes: &mut [InsertOutcome],
) -> Result<usize, sqlx::Error> {
    let ids: Vec<Uuid> = rows.iter().map(|(_, user)| user.id.0).collect();
    let names: Vec<&str> = rows.iter().map(|(_, user)| user.name.as_str()).collect();
    let emails: Vec<&str> = rows.iter().map(|(_, user)| user.email.as_str()).collect();
    // `fetch_one` waits for the end of the answer, which comes after the commit; the row alone would come before it.
    let done = sqlx::query(INSERT).bind(ids).bind(names).bind(emails).fetch_one(connection).await?;
    let (places, reasons): (Vec<i32>, Vec<String>) = (done.try_get("places")?, done.try_get("reasons")?);
    for (place, reason) in places.into_iter().zip(reasons) {
        let row = usize::try_from(place - 1).ok().and_then(|place| rows.get(place));
        let (place, _) = row.ok_or_else(|| sqlx::Error::Protocol(format!("users_insert names row {place}")))?;
        outcomes[*place] = InsertOutcome::Refused(reason);
    }
    Ok(usize::try_from(done.try_get::<i64, _>("added")?).unwrap_or(0))
}

/// Refuses the rows whose id already belongs to a different user.
async fn compare(
    connection: &mut PgConnection,
    rows: &[(usize, &User)],
    outcomes: &mut [InsertOutcome],
) -> Result<(), sqlx::Error> {
    let ids: Vec<Uuid> = rows.iter().map(|(_, user)| user.id.0).collect();
    let found = sqlx::query(FIND).bind(ids).fetch_all(connection).await?;
    let mut stored = std::collections::HashMap::with_capacity(found.len());
    for row in &found {
        stored
            .insert(row.try_get::<Uuid, _>("id")?, (row.try_get::<&str, _>("name")?, row.try_get::<&str, _>("email")?));
    }
    for (place, user) in rows.iter().filter(|(place, _)| outcomes[*place] == InsertOutcome::Stored).collect::<Vec<_>>()
    {
        if stored.get(&user.id.0) != Some(&(user.name.as_str(), user.email.as_str())) {
            outcomes[*place] = InsertOutcome::Refused(OTHER_USER.to_owned());
        }
    }
    Ok(())
}

/// The database's message, without the row's contents.
fn reason(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}
