//! A link to the MySQL server that loses one chosen request or answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What a [`LossyLink`] loses when it sees what it waits for.
#[derive(Clone, Copy)]
pub enum Loss {
    /// The request, and the connection.
    Request,
    /// The answer, and the connection: the server did what was asked.
    Answer,
    /// Only the answer: the connection stays open, without a word.
    Silence,
}

/// A link to the server that waits for certain words and then loses something, once each time it is armed.
pub struct LossyLink {
    pub address: String,
    armed: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl LossyLink {
    pub async fn start(target: String, words: &'static str, loss: Loss) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", harness::ports::free_port())).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let armed = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&armed);
        let task = tokio::spawn(async move {
            let mut links = tokio::task::JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(&target).await.unwrap();
                links.spawn(carry(near, far, words, loss, Arc::clone(&seen)));
            }
        });
        Self { address, armed, task }
    }

    pub fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }
}

impl Drop for LossyLink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(mut near: TcpStream, mut far: TcpStream, words: &str, loss: Loss, armed: Arc<AtomicBool>) {
    let (mut request, mut answer) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    loop {
        tokio::select! {
            read = near.read(&mut request) => {
                let Ok(size @ 1..) = read else { return };
                let piece = &request[..size];
                let found = piece.windows(words.len()).any(|window| window == words.as_bytes());
                if found && armed.swap(false, Ordering::SeqCst) {
                    if matches!(loss, Loss::Request) { return }
                    far.write_all(piece).await.unwrap();
                    // The server has done it when it answers.
                    assert!(far.read(&mut answer).await.unwrap() > 0);
                    if matches!(loss, Loss::Answer) { return }
                    // Nothing more is said; the link ends when the near side gives up.
                    while let Ok(1..) = near.read(&mut request).await {}
                    return;
                }
                if far.write_all(piece).await.is_err() { return }
            }
            read = far.read(&mut answer) => {
                let Ok(size @ 1..) = read else { return };
                if near.write_all(&answer[..size]).await.is_err() { return }
            }
        }
    }
}
