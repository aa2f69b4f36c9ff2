//! Writing a batch: one call, one commit, also when the database refuses some of the rows.
//!
//! What a refused row undoes is kept small on the server: `users_insert` (`migrations/postgres/0002_users_insert.sql`)
//! writes the batch in parts and a part with a bad row one by one. What it never gets to see, a text that the server's
//! encoding has no letters for, and what shows only at the commit, a deferred constraint, fails the whole call: then each
//! half is written by itself, down to the row.

use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::pool::{Pool, is_row_fault};
use crate::store_pool::work;
use crate::users::store::{Fate, Inserted, OTHER_USER, StoreError};
use crate::users::user::User;

const INSERT: &str = "SELECT added, places, reasons FROM users_insert($1, $2, $3)";

const FIND: &str = "SELECT id, name, email FROM users WHERE id = ANY($1)";

/// Stores users, each by its own fate.
pub(super) async fn insert(pool: &Pool, users: &[User]) -> Result<Inserted, StoreError> {
    if users.is_empty() {
        return Ok(Inserted { fates: Vec::new(), new: 0 });
    }
    // Everybody writes in the order of the ids, so that two who meet wait for each other instead of dying.
    let mut rows: Vec<(usize, &User)> = users.iter().enumerate().collect();
    rows.sort_unstable_by_key(|(_, user)| user.id);
    let (rows, count) = (&rows[..], users.len());
    pool.call(work!(connection => {
        let mut fates = vec![Fate::Stored; count];
        let mut new = 0;
        // The last one is written first.
        let mut parts = vec![rows];
        while let Some(part) = parts.pop() {
            match write(connection, part, &mut fates).await {
                Ok(added) => new += added,
                Err(error) if is_row_fault(&error) => match part {
                    [(place, _)] => fates[*place] = Fate::Refused(reason(&error)),
                    _ => {
                        let (left, right) = part.split_at(part.len() / 2);
                        parts.extend([right, left]);
                    }
                },
                Err(error) => return Err(error),
            }
        }
        let refused = fates.iter().filter(|fate| **fate != Fate::Stored).count();
        if new + refused < count {
            compare(connection, rows, &mut fates).await?;
        }
        Ok(Inserted { fates, new })
    }))
    .await
}

/// Writes the rows that the database takes and marks the others; returns how many were not there before.
async fn write(
    connection: &mut PgConnection,
    rows: &[(usize, &User)],
    fates: &mut [Fate],
) -> Result<usize, sqlx::Error> {
    let ids: Vec<Uuid> = rows.iter().map(|(_, user)| user.id.0).collect();
    let names: Vec<&str> = rows.iter().map(|(_, user)| user.name.as_str()).collect();
    let emails: Vec<&str> = rows.iter().map(|(_, user)| user.email.as_str()).collect();
    // Answered after the commit: the row of the answer is not enough, its end is waited for.
    let done = sqlx::query(INSERT).bind(ids).bind(names).bind(emails).fetch_one(connection).await?;
    let (places, reasons): (Vec<i32>, Vec<String>) = (done.try_get("places")?, done.try_get("reasons")?);
    for (place, reason) in places.into_iter().zip(reasons) {
        let row = usize::try_from(place - 1).ok().and_then(|place| rows.get(place));
        let (place, _) = row.ok_or_else(|| sqlx::Error::Protocol(format!("users_insert names row {place}")))?;
        fates[*place] = Fate::Refused(reason);
    }
    Ok(usize::try_from(done.try_get::<i64, _>("added")?).unwrap_or(0))
}

/// Finds out which of the rows that were there already are other users under the same id.
async fn compare(
    connection: &mut PgConnection,
    rows: &[(usize, &User)],
    fates: &mut [Fate],
) -> Result<(), sqlx::Error> {
    let ids: Vec<Uuid> = rows.iter().map(|(_, user)| user.id.0).collect();
    let found = sqlx::query(FIND).bind(ids).fetch_all(connection).await?;
    let mut stored = std::collections::HashMap::with_capacity(found.len());
    for row in &found {
        stored
            .insert(row.try_get::<Uuid, _>("id")?, (row.try_get::<&str, _>("name")?, row.try_get::<&str, _>("email")?));
    }
    for (place, user) in rows.iter().filter(|(place, _)| fates[*place] == Fate::Stored).collect::<Vec<_>>() {
        if stored.get(&user.id.0) != Some(&(user.name.as_str(), user.email.as_str())) {
            fates[*place] = Fate::Refused(OTHER_USER.to_owned());
        }
    }
    Ok(())
}

/// For the dead letter: what the database says, without the row's contents.
fn reason(error: &sqlx::Error) -> String {
    error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().to_owned())
}
