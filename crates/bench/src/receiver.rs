//! A receiver of client notifications that answers at once, in a process of its own.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::Context;
use axum::Router;
use axum::http::StatusCode;
use clap::Args;
use relayer_sim::server::ports::free_port;

use crate::Settings;
use crate::process::{ServiceProcess, Vars};

/// Signs the notifications; the benchmark does not verify the signature.
const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

/// The arguments of the hidden command `receiver`.
#[derive(Args)]
pub struct ReceiverArgs {
    /// Port to listen on
    #[arg(long)]
    port: u16,
}

/// Answers 204 until the process is killed.
pub async fn serve(args: ReceiverArgs) -> anyhow::Result<()> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port));
    let listener = tokio::net::TcpListener::bind(address).await.context("the receiver's port")?;
    let routes = Router::new().fallback(|_: axum::body::Bytes| async { StatusCode::NO_CONTENT });
    Ok(axum::serve(listener, routes).await?)
}

/// A running receiver, if notifications are measured.
pub struct Receiver(Option<ServiceProcess>);

impl Receiver {
    /// Starts one with `--notify`.
    pub async fn start(settings: &Settings) -> anyhow::Result<Self> {
        if !settings.notify {
            return Ok(Self(None));
        }
        let port = free_port();
        let process = ServiceProcess::start_own(port, &["receiver", "--port", &port.to_string()], &Vars::new()).await?;
        Ok(Self(Some(process)))
    }

    /// The variables by which a service sends it every event.
    pub fn vars(&self) -> Vars {
        let Some(process) = &self.0 else { return Vars::new() };
        vec![
            ("CLIENT_WEBHOOK_URL", format!("http://{}/", process.address)),
            ("CLIENT_WEBHOOK_SECRET", SECRET.to_owned()),
            ("WEBHOOK_ALLOW_PRIVATE", "true".to_owned()),
        ]
    }

    /// What the figures were measured with.
    pub fn note(&self) -> &'static str {
        if self.0.is_some() { "; every event is delivered to a receiver on this machine" } else { "" }
    }
}
