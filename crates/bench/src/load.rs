//! A load generator: so many connections, each sending one prepared request after another. It does as little as it can,
//! since it shares the machine with what it measures.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What a run came to.
#[derive(Debug, Clone, Default)]
pub struct Load {
    /// Answers with the wanted status.
    pub good: u64,
    /// Any other answers.
    pub bad: u64,
    /// How long the run took.
    pub took: Duration,
    /// Each answer's time, in microseconds, in order of size.
    pub micros: Vec<u32>,
}

impl Load {
    /// Good answers a second.
    pub fn rate(&self) -> f64 {
        self.good as f64 / self.took.as_secs_f64()
    }

    /// The time within which this share of the answers came, in milliseconds.
    pub fn within(&self, share: f64) -> f64 {
        let index = ((self.micros.len() as f64 * share) as usize).min(self.micros.len().saturating_sub(1));
        self.micros.get(index).map_or(0.0, |micros| f64::from(*micros) / 1000.0)
    }
}

/// A prepared POST of JSON.
pub fn post(address: SocketAddr, path: &str, headers: &str, body: &str) -> Arc<[u8]> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n{headers}\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
    .into()
}

/// Runs the load.
pub async fn run(
    address: SocketAddr,
    request: Arc<[u8]>,
    connections: usize,
    wanted: u16,
    span: Duration,
) -> anyhow::Result<Load> {
    let started = Instant::now();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let request = Arc::clone(&request);
        tasks.spawn(async move { one_connection(address, &request, wanted, started + span).await });
    }
    let mut load = Load::default();
    while let Some(done) = tasks.join_next().await {
        let part = done.context("a load task failed")??;
        load.good += part.good;
        load.bad += part.bad;
        load.micros.extend(part.micros);
    }
    load.took = started.elapsed();
    load.micros.sort_unstable();
    Ok(load)
}

async fn one_connection(address: SocketAddr, request: &[u8], wanted: u16, deadline: Instant) -> anyhow::Result<Load> {
    let mut stream = TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
    stream.set_nodelay(true)?;
    let mut load = Load::default();
    let mut buffer = vec![0; 16 * 1024];
    while Instant::now() < deadline {
        let sent_at = Instant::now();
        stream.write_all(request).await?;
        let status = read_answer(&mut stream, &mut buffer).await?;
        load.micros.push(u32::try_from(sent_at.elapsed().as_micros()).unwrap_or(u32::MAX));
        if status == wanted {
            load.good += 1;
        } else {
            load.bad += 1;
        }
    }
    Ok(load)
}

/// Reads one whole answer; gives its status.
async fn read_answer(stream: &mut TcpStream, buffer: &mut [u8]) -> anyhow::Result<u16> {
    let mut filled = 0;
    loop {
        if let Some(head) = find(&buffer[..filled], b"\r\n\r\n") {
            let text = std::str::from_utf8(&buffer[..head])?;
            let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).context("no HTTP status")?;
            let length = text
                .split("\r\n")
                .filter_map(|line| line.split_once(':'))
                .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
                .and_then(|(_, value)| value.trim().parse::<usize>().ok())
                .context("an answer without a length")?;
            if filled >= head + 4 + length {
                return Ok(status);
            }
        }
        if filled == buffer.len() {
            bail!("an answer that is too long");
        }
        let read = stream.read(&mut buffer[filled..]).await?;
        if read == 0 {
            bail!("the server closed the connection");
        }
        filled += read;
    }
}

fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}
