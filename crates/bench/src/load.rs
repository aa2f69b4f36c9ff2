//! HTTP load generator: each connection sends one prepared request after another. It does as little as possible, since it
//! shares the machine with the service under test.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

/// The responses of one run.
#[derive(Default)]
pub struct LoadResult {
    /// Responses with the expected status.
    pub expected: u64,
    /// Responses with another status.
    pub unexpected: u64,
    elapsed: Duration,
    /// Latencies in microseconds, sorted.
    latencies_us: Vec<u32>,
}

impl LoadResult {
    /// Expected responses per second.
    pub fn rate(&self) -> f64 {
        self.expected as f64 / self.elapsed.as_secs_f64()
    }

    /// Latency at this quantile (0.5 is the median), in milliseconds.
    pub fn latency_ms(&self, quantile: f64) -> f64 {
        let last = self.latencies_us.len().saturating_sub(1);
        let index = ((self.latencies_us.len() as f64 * quantile) as usize).min(last);
        self.latencies_us.get(index).map_or(0.0, |micros| f64::from(*micros) / 1000.0)
    }
}

/// A prepared POST of JSON. `headers` are whole lines, each with its CRLF.
pub fn post(address: SocketAddr, path: &str, headers: &str, body: &str) -> Arc<[u8]> {
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n{headers}\
         content-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
    .into()
}

/// Sends `request` over each connection until `span` has passed.
pub async fn run(
    address: SocketAddr,
    request: Arc<[u8]>,
    connections: usize,
    expected_status: u16,
    span: Duration,
) -> anyhow::Result<LoadResult> {
    let started = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..connections {
        let request = Arc::clone(&request);
        tasks.spawn(async move { run_connection(address, &request, expected_status, started + span).await });
    }
    let mut result = LoadResult::default();
    while let Some(done) = tasks.join_next().await {
        let part = done.context("a load task panicked")??;
        result.expected += part.expected;
        result.unexpected += part.unexpected;
        result.latencies_us.extend(part.latencies_us);
    }
    result.elapsed = started.elapsed();
    result.latencies_us.sort_unstable();
    Ok(result)
}

async fn run_connection(
    address: SocketAddr,
    request: &[u8],
    expected_status: u16,
    deadline: Instant,
) -> anyhow::Result<LoadResult> {
    let mut stream = TcpStream::connect(address).await.with_context(|| format!("cannot connect to {address}"))?;
    stream.set_nodelay(true)?;
    let mut result = LoadResult::default();
    let mut buffer = vec![0; 16 * 1024];
    while Instant::now() < deadline {
        let sent_at = Instant::now();
        stream.write_all(request).await?;
        let status = read_response(&mut stream, &mut buffer).await?;
        result.latencies_us.push(u32::try_from(sent_at.elapsed().as_micros()).unwrap_or(u32::MAX));
        if status == expected_status {
            result.expected += 1;
        } else {
            result.unexpected += 1;
        }
    }
    Ok(result)
}

/// Reads one whole response and returns its status.
async fn read_response(stream: &mut TcpStream, buffer: &mut [u8]) -> anyhow::Result<u16> {
    let mut filled = 0;
    loop {
        if let Some(head) = find(&buffer[..filled], b"\r\n\r\n") {
            let text = std::str::from_utf8(&buffer[..head])?;
            let status =
                text.split(' ').nth(1).and_then(|status| status.parse().ok()).context("a response without a status")?;
            let length = text
                .split("\r\n")
                .filter_map(|line| line.split_once(':'))
                .find(|(name, _)| name.eq_ignore_ascii_case("content-length"))
                .and_then(|(_, value)| value.trim().parse::<usize>().ok())
                .context("a response without a content-length")?;
            if filled >= head + 4 + length {
                return Ok(status);
            }
        }
        if filled == buffer.len() {
            bail!("a response exceeds {} bytes", buffer.len());
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
