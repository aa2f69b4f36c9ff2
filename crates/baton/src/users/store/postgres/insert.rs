//! Writing a batch. One statement is one commit, and in a batch without fault that is all there is.
//!
//! When the database refuses a row, nothing of the statement is kept, and it names the row only in words for people. So
//! the batch is written again in one transaction with savepoints: first without the row that those words seem to mean,
//! which is then tried alone; where that does not help, by halves. Whatever the words say, only a row that is refused
//! alone counts as refused.

use sqlx::postgres::PgDatabaseError;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::pool::{Pool, is_row_fault, work};
use crate::users::store::{Fate, Inserted, OTHER_USER, StoreError};
use crate::users::user::User;

/// A message may come twice, and the row is there already; any other conflict is a fault of the row.
const INSERT: &str = "INSERT INTO users (id, name, email) SELECT id, name, email \
     FROM UNNEST($1::uuid[], $2::text[], $3::text[]) AS new (id, name, email) ON CONFLICT (id) DO NOTHING";

const FIND: &str = "SELECT id, name, email FROM users WHERE id = ANY($1)";

/// How often the database's words are followed; each time costs a batch, so with more bad rows halving is cheaper.
const HINTS_MAX: usize = 3;

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
        let new = match write(connection, rows).await {
            Ok(new) => new,
            Err(error) if is_row_fault(&error) => sift(connection, rows, error, &mut fates).await?,
            Err(error) => return Err(error),
        };
        let refused = fates.iter().filter(|fate| **fate != Fate::Stored).count();
        if new + refused < count {
            compare(connection, rows, &mut fates).await?;
        }
        Ok(Inserted { fates, new })
    }))
    .await
}

/// Writes the rows with one statement; returns how many were not there before.
async fn write(connection: &mut PgConnection, rows: &[(usize, &User)]) -> Result<usize, sqlx::Error> {
    let ids: Vec<Uuid> = rows.iter().map(|(_, user)| user.id.0).collect();
    let names: Vec<&str> = rows.iter().map(|(_, user)| user.name.as_str()).collect();
    let emails: Vec<&str> = rows.iter().map(|(_, user)| user.email.as_str()).collect();
    let done = sqlx::query(INSERT).bind(ids).bind(names).bind(emails).execute(connection).await?;
    Ok(usize::try_from(done.rows_affected()).unwrap_or(usize::MAX))
}

/// Writes the rows that the database takes and marks the others, in one transaction.
async fn sift<'u>(
    connection: &mut PgConnection,
    rows: &[(usize, &'u User)],
    error: sqlx::Error,
    fates: &mut [Fate],
) -> Result<usize, sqlx::Error> {
    // Whatever goes wrong from here on closes the connection, and with it the transaction.
    sqlx::raw_sql("BEGIN").execute(&mut *connection).await?;
    let (mut new, mut hints) = (0, 0);
    let mut groups: Vec<Vec<(usize, &'u User)>> = split(rows, &error, &mut hints);
    while let Some(group) = groups.pop() {
        sqlx::raw_sql("SAVEPOINT part").execute(&mut *connection).await?;
        match write(connection, &group).await {
            Ok(added) => {
                sqlx::raw_sql("RELEASE SAVEPOINT part").execute(&mut *connection).await?;
                new += added;
            }
            Err(error) if is_row_fault(&error) => {
                sqlx::raw_sql("ROLLBACK TO SAVEPOINT part").execute(&mut *connection).await?;
                match group[..] {
                    [(place, _)] => fates[place] = Fate::Refused(reason(&error)),
                    _ => groups.extend(split(&group, &error, &mut hints)),
                }
            }
            Err(error) => return Err(error),
        }
    }
    sqlx::raw_sql("COMMIT").execute(&mut *connection).await?;
    Ok(new)
}

/// The rest and the suspect, or two halves; the last one in the list is tried first.
fn split<'u>(rows: &[(usize, &'u User)], error: &sqlx::Error, hints: &mut usize) -> Vec<Vec<(usize, &'u User)>> {
    let suspect = if *hints < HINTS_MAX { suspect(rows, error) } else { None };
    match suspect {
        _ if rows.len() == 1 => vec![rows.to_vec()],
        Some(place) => {
            *hints += 1;
            let rest = rows[..place].iter().chain(&rows[place + 1..]).copied().collect();
            // Last, so that of two that exclude each other the first one stays.
            vec![vec![rows[place]], rest]
        }
        None => {
            let (left, right) = rows.split_at(rows.len() / 2);
            vec![right.to_vec(), left.to_vec()]
        }
    }
}

/// The row that the database's words are about, if they show its id or a whole value of it. It writes a row as
/// `(id, name, …)` and a key as `(column)=(value)`.
fn suspect(rows: &[(usize, &User)], error: &sqlx::Error) -> Option<usize> {
    let detail = error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?.detail()?;
    let by_id = rows.iter().position(|(_, user)| detail.contains(&user.id.to_string()));
    by_id.or_else(|| {
        let is_key = |value: &str| detail.contains(&format!("=({value})"));
        // Of two new rows that exclude each other the second is the one refused.
        rows.iter().rposition(|(_, user)| is_key(&user.email) || is_key(&user.name))
    })
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
