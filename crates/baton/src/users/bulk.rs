//! `POST /users/bulk`: one user a line (NDJSON), one answer a line, in the same order, while the rest is still coming.
//!
//! Nothing is gathered: the answer's body pulls the request's. A few groups of lines are on their way to the queue at any
//! time, and while their answers are not read by the client, no more of its lines are read either. A client that sends
//! everything before it reads anything must expect to be held up.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::{Request, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt, stream};
use metrics::counter;
use serde_json::{Value, json};

use super::api::problem;
use super::intake::Intake;
use super::user::{User, UserId};
use crate::http::auth::Caller;
use crate::http::idempotency::read_idempotency_key;
use crate::http::problem::Problem;
use crate::http::server::BodyLimits;

/// How many lines go to the queue together at most.
const GROUP_LINES_MAX: usize = 500;
/// How many groups are on their way at once: the next is read while one is confirmed.
const GROUPS_MAX: usize = 4;
/// The longest line; two names of the longest kind, escaped, are a tenth of it.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// Answers each line as it is settled.
pub(super) async fn enrol_many(
    State(intake): State<Arc<Intake>>,
    Extension(Caller(caller)): Extension<Caller>,
    request: Request,
) -> Result<Response, Problem> {
    let key = read_idempotency_key(request.headers())?.map(str::to_owned);
    let ids = Arc::new(Ids { caller, key });
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !["application/x-ndjson", "application/ndjson", "application/jsonl"].contains(&essence) {
        return Err(Problem::wrong_content_type_for("application/x-ndjson"));
    }
    let limits = *request.extensions().get::<BodyLimits>().expect("the server sets the limits of every request");
    let lines = Lines::new(request.into_body().into_data_stream(), limits.timeout);
    let answers =
        groups(lines).map(move |group| answer(Arc::clone(&intake), Arc::clone(&ids), group)).buffered(GROUPS_MAX);
    let body = Body::from_stream(answers.map(Ok::<_, Infallible>));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// Where the lines' ids come from.
struct Ids {
    caller: String,
    /// Under one key the same line is always the same user, so that an upload that broke off can be sent again whole.
    key: Option<String>,
}

impl Ids {
    fn of_line(&self, line: usize) -> UserId {
        match &self.key {
            // No header holds a line feed: no other request's key is the same.
            Some(key) => UserId::of_key(&self.caller, &format!("{key}\n{line}")),
            None => UserId::generate(),
        }
    }
}

/// A line, or why there are no more.
type Line = Result<Bytes, Problem>;

/// The request's body, cut into lines.
struct Lines {
    body: BodyDataStream,
    /// How long the next piece may take to come.
    patience: Duration,
    ready: VecDeque<Line>,
    /// The beginning of a line whose end has not come yet.
    begun: Vec<u8>,
    ended: bool,
}

impl Lines {
    fn new(body: BodyDataStream, patience: Duration) -> Self {
        Self { body, patience, ready: VecDeque::new(), begun: Vec::new(), ended: false }
    }

    /// The lines that are here, at least one unless the body has ended.
    async fn next_group(&mut self) -> Option<Vec<Line>> {
        while self.ready.is_empty() && !self.ended {
            match tokio::time::timeout(self.patience, self.body.next()).await {
                Ok(Some(Ok(piece))) => self.take_in(&piece),
                Ok(None) => {
                    self.ended = true;
                    self.end_line();
                }
                Ok(Some(Err(_))) => self.break_off(Problem::bad_request("the body broke off")),
                Err(_) => self.break_off(Problem::too_slow()),
            }
        }
        let lines: Vec<_> = self.ready.drain(..self.ready.len().min(GROUP_LINES_MAX)).collect();
        (!lines.is_empty()).then_some(lines)
    }

    fn take_in(&mut self, piece: &[u8]) {
        let mut parts = piece.split(|byte| *byte == b'\n');
        self.begun.extend_from_slice(parts.next().unwrap_or_default());
        for part in parts {
            self.end_line();
            self.begun.extend_from_slice(part);
        }
        if self.begun.len() > LINE_BYTES_MAX {
            self.break_off(Problem::too_large(LINE_BYTES_MAX));
        }
    }

    /// Blank lines are no lines: the last one has an end too, and some systems write two characters for it.
    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.begun);
        if line.iter().any(|byte| !byte.is_ascii_whitespace()) {
            let fits = line.len() <= LINE_BYTES_MAX;
            self.ready.push_back(if fits { Ok(line.into()) } else { Err(Problem::too_large(LINE_BYTES_MAX)) });
        }
    }

    /// There is no telling where the next line would begin: what came before is settled, and this is the last answer.
    fn break_off(&mut self, why: Problem) {
        self.begun.clear();
        self.ended = true;
        self.ready.push_back(Err(why));
    }
}

/// Groups of lines with the number of the first, from 1.
fn groups(lines: Lines) -> impl Stream<Item = (usize, Vec<Line>)> {
    stream::unfold((1, lines), |(number, mut lines)| async move {
        let group = lines.next_group().await?;
        let next = number + group.len();
        Some(((number, group), (next, lines)))
    })
}

/// Queues the good lines of a group and answers all of them.
async fn answer(intake: Arc<Intake>, ids: Arc<Ids>, (first, lines): (usize, Vec<Line>)) -> Bytes {
    let mut users = Vec::with_capacity(lines.len());
    let read: Vec<Result<UserId, Problem>> = lines
        .into_iter()
        .enumerate()
        .map(|(place, line)| {
            let user = parse(&line?, ids.of_line(first + place))?;
            let id = user.id;
            users.push(user);
            Ok(id)
        })
        .collect();
    let mut accepted = intake.accept(&users).await.into_iter();
    let mut text = Vec::with_capacity(read.len() * 64);
    for (place, read) in read.into_iter().enumerate() {
        let line = first + place;
        let settled = read.and_then(|id| accepted.next().unwrap_or(Ok(())).map(|()| id).map_err(problem));
        let shown = match settled {
            Ok(id) => json!({ "line": line, "status": 200, "id": id }),
            Err(problem) => refused(line, &problem),
        };
        counter!("baton_users_bulk_lines_total", "status" => shown["status"].to_string()).increment(1);
        text.extend_from_slice(shown.to_string().as_bytes());
        text.push(b'\n');
    }
    text.into()
}

fn parse(line: &[u8], id: UserId) -> Result<User, Problem> {
    let value: Value = serde_json::from_slice(line)
        .map_err(|error| Problem::bad_request(format!("the line is not JSON: column {}", error.column())))?;
    User::from_request(&value, id).map_err(Problem::invalid)
}

fn refused(line: usize, problem: &Problem) -> Value {
    let id = problem.more.iter().find(|(name, _)| *name == "id").map(|(_, id)| id);
    json!({ "line": line, "status": problem.status, "id": id, "error": problem.to_json(None) })
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(pieces: &[&str]) -> Vec<Vec<Result<String, &'static str>>> {
        let pieces: Vec<Result<Bytes, Infallible>> =
            pieces.iter().map(|piece| Ok(Bytes::copy_from_slice(piece.as_bytes()))).collect();
        let body = Body::from_stream(stream::iter(pieces)).into_data_stream();
        let groups = groups(Lines::new(body, Duration::from_secs(5))).map(|(_, group)| {
            let text =
                |line: Line| line.map(|line| String::from_utf8_lossy(&line).into_owned()).map_err(|why| why.code);
            group.into_iter().map(text).collect()
        });
        groups.collect().await
    }

    #[tokio::test]
    async fn lines_are_found_wherever_the_pieces_are_cut() {
        let groups = read(&["a\nb", "b\n\r\n", "\n", "c"]).await;
        assert_eq!(groups.concat(), [Ok("a".into()), Ok("bb".into()), Ok("c".into())]);
        assert!(read(&["\n\n"]).await.is_empty());
    }

    #[tokio::test]
    async fn a_line_without_end_breaks_off_with_one_answer() {
        let long = "x".repeat(LINE_BYTES_MAX);
        let groups = read(&["a\n", &long, &long, "\nb\n"]).await;
        assert_eq!(groups.concat(), [Ok("a".into()), Err("too-large")]);
    }

    #[tokio::test]
    async fn a_group_is_no_longer_than_the_queue_takes_at_once() {
        let many = "x\n".repeat(GROUP_LINES_MAX * 2 + 1);
        let sizes: Vec<_> = read(&[&many]).await.iter().map(Vec::len).collect();
        assert_eq!(sizes, [GROUP_LINES_MAX, GROUP_LINES_MAX, 1]);
    }
}
