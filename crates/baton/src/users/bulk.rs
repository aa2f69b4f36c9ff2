//! `POST /users/bulk`: one user per line (NDJSON), one answer per line, in the same order, streamed while the upload goes on.
//!
//! Memory is bounded: the answer's body pulls the request's. At most `GROUPS_MAX` groups of lines are in flight to the
//! queue, and while the client does not read their answers, no more of its lines are read. So a client that sends
//! everything before it reads anything stalls.

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

use super::intake::UserIntake;
use super::user::{User, UserId};
use crate::http::auth::Caller;
use crate::http::body::BodyLimits;
use crate::http::idempotency_header::read_idempotency_key;
use crate::http::problem::Problem;
use crate::http::strict_json;

/// Maximum number of lines sent to the queue together.
const GROUP_LINES_MAX: usize = 500;
/// Groups in flight at once: the next is read while earlier ones are confirmed.
const GROUPS_MAX: usize = 4;
/// Longest line. A name and an address of the maximum length, escaped, need a tenth of it.
const LINE_BYTES_MAX: usize = 64 * 1024;

/// Streams one answer per line.
pub(super) async fn enrol_many(
    State(intake): State<Arc<UserIntake>>,
    Extension(Caller(caller)): Extension<Caller>,
    request: Request,
) -> Result<Response, Problem> {
    let key = read_idempotency_key(request.headers())?.map(str::to_owned);
    let ids = Arc::new(LineIds { caller, key });
    let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    if !["application/x-ndjson", "application/ndjson", "application/jsonl"].contains(&essence) {
        return Err(Problem::wrong_content_type_for("application/x-ndjson"));
    }
    let limits = BodyLimits::of(&request);
    let lines = Lines::new(request.into_body().into_data_stream(), limits.timeout);
    let answers =
        groups(lines).map(move |group| answer(Arc::clone(&intake), Arc::clone(&ids), group)).buffered(GROUPS_MAX);
    let body = Body::from_stream(answers.map(Ok::<_, Infallible>));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

/// Decides the id of each line's user.
struct LineIds {
    caller: String,
    /// Under one key the same line is always the same user, so that an interrupted upload can be repeated as a whole.
    key: Option<String>,
}

impl LineIds {
    fn of_line(&self, line: usize) -> UserId {
        match &self.key {
            // A header cannot hold a line feed, so this equals no other request's key.
            Some(key) => UserId::of_key(&self.caller, &format!("{key}\n{line}")),
            None => UserId::generate(),
        }
    }
}

/// A line, or the reason why the upload ends here.
type Line = Result<Bytes, Problem>;

/// The request's body, split into lines.
struct Lines {
    body: BodyDataStream,
    /// Longest wait for the next piece of the body.
    piece_timeout: Duration,
    ready: VecDeque<Line>,
    /// The start of a line whose end has not arrived.
    partial: Vec<u8>,
    ended: bool,
}

impl Lines {
    fn new(body: BodyDataStream, piece_timeout: Duration) -> Self {
        Self { body, piece_timeout, ready: VecDeque::new(), partial: Vec::new(), ended: false }
    }

    /// The lines that have arrived, at least one; `None` at the end of the body.
    async fn next_group(&mut self) -> Option<Vec<Line>> {
        while self.ready.is_empty() && !self.ended {
            match tokio::time::timeout(self.piece_timeout, self.body.next()).await {
                Ok(Some(Ok(piece))) => self.split(&piece),
                Ok(None) => {
                    self.ended = true;
                    self.end_line();
                }
                Ok(Some(Err(_))) => self.abort(Problem::bad_request("the body ended early")),
                Err(_) => self.abort(Problem::too_slow()),
            }
        }
        let lines: Vec<_> = self.ready.drain(..self.ready.len().min(GROUP_LINES_MAX)).collect();
        (!lines.is_empty()).then_some(lines)
    }

    fn split(&mut self, piece: &[u8]) {
        let mut parts = piece.split(|byte| *byte == b'\n');
        self.partial.extend_from_slice(parts.next().unwrap_or_default());
        for part in parts {
            self.end_line();
            self.partial.extend_from_slice(part);
        }
        if self.partial.len() > LINE_BYTES_MAX {
            self.abort(Problem::too_large(LINE_BYTES_MAX));
        }
    }

    /// Blank lines are skipped: a last line may end with a line feed too, and some systems end lines with CR LF.
    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.partial);
        if line.iter().any(|byte| !byte.is_ascii_whitespace()) {
            let fits = line.len() <= LINE_BYTES_MAX;
            self.ready.push_back(if fits { Ok(line.into()) } else { Err(Problem::too_large(LINE_BYTES_MAX)) });
        }
    }

    /// Ends the upload: the start of the next line is unknown. Lines before are answered, then this problem.
    fn abort(&mut self, reason: Problem) {
        self.partial.clear();
        self.ended = true;
        self.ready.push_back(Err(reason));
    }
}

/// Groups of lines, each with the number of its first line, counted from 1.
fn groups(lines: Lines) -> impl Stream<Item = (usize, Vec<Line>)> {
    stream::unfold((1, lines), |(number, mut lines)| async move {
        let group = lines.next_group().await?;
        let next = number + group.len();
        Some(((number, group), (next, lines)))
    })
}

/// Queues the valid lines of a group and answers all of its lines.
async fn answer(intake: Arc<UserIntake>, ids: Arc<LineIds>, (first, lines): (usize, Vec<Line>)) -> Bytes {
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
        let settled = read.and_then(|id| accepted.next().unwrap_or(Ok(())).map(|()| id).map_err(Problem::from));
        let shown = match settled {
            Ok(id) => json!({ "line": line, "status": 200, "id": id }),
            Err(problem) => refusal(line, &problem),
        };
        counter!("baton_users_bulk_lines_total", "status" => shown["status"].to_string()).increment(1);
        text.extend_from_slice(shown.to_string().as_bytes());
        text.push(b'\n');
    }
    text.into()
}

fn parse(line: &[u8], id: UserId) -> Result<User, Problem> {
    let value = strict_json::parse(line).map_err(|rule| Problem::bad_request(format!("the line {rule}")))?;
    User::from_request(&value, id).map_err(Problem::invalid)
}

fn refusal(line: usize, problem: &Problem) -> Value {
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
            let text = |line: Line| {
                line.map(|line| String::from_utf8_lossy(&line).into_owned()).map_err(|problem| problem.code)
            };
            group.into_iter().map(text).collect()
        });
        groups.collect().await
    }

    #[tokio::test]
    async fn lines_are_found_wherever_the_body_is_split() {
        let groups = read(&["a\nb", "b\n\r\n", "\n", "c"]).await;
        assert_eq!(groups.concat(), [Ok("a".into()), Ok("bb".into()), Ok("c".into())]);
        assert!(read(&["\n\n"]).await.is_empty());
    }

    #[tokio::test]
    async fn a_line_that_is_too_long_ends_the_upload_with_one_answer() {
        let long = "x".repeat(LINE_BYTES_MAX);
        let groups = read(&["a\n", &long, &long, "\nb\n"]).await;
        assert_eq!(groups.concat(), [Ok("a".into()), Err("too-large")]);
    }

    #[tokio::test]
    async fn no_group_exceeds_its_maximum() {
        let many = "x\n".repeat(GROUP_LINES_MAX * 2 + 1);
        let sizes: Vec<_> = read(&[&many]).await.iter().map(Vec::len).collect();
        assert_eq!(sizes, [GROUP_LINES_MAX, GROUP_LINES_MAX, 1]);
    }
}
