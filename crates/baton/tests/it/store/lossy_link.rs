//! A link to the MySQL server that loses one chosen request or answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What a [`LossyLink`] loses.
#[derive(Clone, Copy)]
pub enum Loss {
    /// The request; the connection is closed.
    Request,
    /// The answer, after the server executed the request; the connection is closed.
    Answer,
    /// The answer, after the server executed the request; the connection stays open and silent.
    AnswerInSilence,
}

/// A link to the server. Once armed, it applies its [`Loss`] to the first request that contains the given text.
pub struct LossyLink {
    pub address: String,
    armed: Arc<AtomicBool>,
    task: tokio::task::JoinHandle<()>,
}

impl LossyLink {
    pub async fn start(target: String, text: &'static str, loss: Loss) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", harness::ports::free_port())).await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let armed = Arc::new(AtomicBool::new(false));
        let shared = Arc::clone(&armed);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(&target).await.unwrap();
                connections.spawn(carry(near, far, text, loss, Arc::clone(&shared)));
            }
        });
        Self { address, armed, task }
    }

    /// Applies the loss to the next matching request, once.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::SeqCst);
    }
}

impl Drop for LossyLink {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn carry(mut near: TcpStream, mut far: TcpStream, text: &str, loss: Loss, armed: Arc<AtomicBool>) {
    let (mut request, mut answer) = (vec![0; 64 * 1024], vec![0; 64 * 1024]);
    loop {
        tokio::select! {
            read = near.read(&mut request) => {
                let Ok(size @ 1..) = read else { return };
                let chunk = &request[..size];
                let found = chunk.windows(text.len()).any(|window| window == text.as_bytes());
                if found && armed.swap(false, Ordering::SeqCst) {
                    if matches!(loss, Loss::Request) { return }
                    far.write_all(chunk).await.unwrap();
                    // An answer means that the server has executed the request.
                    assert!(far.read(&mut answer).await.unwrap() > 0);
                    if matches!(loss, Loss::Answer) { return }
                    // Stays silent until the client closes the connection.
                    while let Ok(1..) = near.read(&mut request).await {}
                    return;
                }
                if far.write_all(chunk).await.is_err() { return }
            }
            read = far.read(&mut answer) => {
                let Ok(size @ 1..) = read else { return };
                if near.write_all(&answer[..size]).await.is_err() { return }
            }
        }
    }
}
