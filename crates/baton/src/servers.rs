//! The servers that a lane needs, and whether a failure to open the lane is an outage of one of them. A process waits for a
//! server that is away; a server that answers and refuses is an error of the configuration.

use std::time::Duration;

use pipeline::QueueError;
use reqwest::Url;
use tokio::net::TcpStream;

use crate::config::{Config, QueueEngine};

/// A server, without the credentials of its URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// The variable that names it.
    pub variable: &'static str,
    /// `scheme://host:port`, for people.
    pub address: String,
    host: String,
    port: u16,
}

/// Longest wait for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

impl Server {
    /// The server that this URL names; `None` if it names no host.
    fn new(variable: &'static str, url: &str) -> Option<Self> {
        let url = Url::parse(url).ok()?;
        let host = url.host_str()?.trim_matches(['[', ']']).to_owned();
        let port = url.port_or_known_default().or(match url.scheme() {
            "mysql" | "mariadb" => Some(3306),
            "postgres" | "postgresql" => Some(5432),
            "amqp" => Some(5672),
            "amqps" => Some(5671),
            _ => None,
        })?;
        let address = format!("{}://{}:{port}", url.scheme(), url.host_str()?);
        Some(Self { variable, address, host, port })
    }

    /// Whether it takes connections.
    async fn is_up(&self) -> bool {
        let connecting = TcpStream::connect((self.host.as_str(), self.port));
        tokio::time::timeout(CONNECT_TIMEOUT, connecting).await.is_ok_and(|connected| connected.is_ok())
    }
}

impl std::fmt::Display for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.variable, self.address)
    }
}

/// The servers of the relay lane.
pub fn relay_servers(config: &Config) -> Vec<Server> {
    let store = config.engine.database_url.as_ref().and_then(|url| Server::new("DATABASE_URL", url.expose()));
    store.into_iter().chain(queue_server(&config.engine.relay_queue, "SQS_QUEUE_URL")).collect()
}

/// The servers of the users lane.
pub fn users_servers(config: &Config) -> Vec<Server> {
    let store = config.users.database_url.as_ref().and_then(|url| Server::new("USERS_DATABASE_URL", url.expose()));
    store.into_iter().chain(queue_server(&config.users.queue, "USERS_SQS_QUEUE_URL")).collect()
}

fn queue_server(queue: &QueueEngine, sqs_variable: &'static str) -> Option<Server> {
    match queue {
        QueueEngine::Embedded => None,
        QueueEngine::RabbitMq { url, .. } => Server::new("RABBITMQ_URL", url.expose()),
        QueueEngine::Sqs(sqs) => match &sqs.endpoint {
            Some(endpoint) => Server::new("SQS_ENDPOINT_URL", endpoint.url.as_str()),
            None => Server::new(sqs_variable, sqs.queue_url.as_str()),
        },
    }
}

/// The server of `servers` that an attempt to open a lane waits for; `None` if waiting does not help.
pub async fn awaited(servers: &[Server], error: &anyhow::Error) -> Option<Server> {
    for server in servers {
        if !server.is_up().await {
            return Some(server.clone());
        }
    }
    // It takes connections, and then answers nothing: it is starting or overloaded, or a proxy stands for it.
    let is_queue = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<QueueError>().is_some_and(QueueError::is_server_away)
    };
    if error.chain().any(is_queue) {
        // The queue's server is the last one.
        return servers.last().cloned();
    }
    let broke_off = error.chain().any(|cause| {
        let database = cause.downcast_ref::<sqlx::Error>().and_then(sqlx::Error::as_database_error);
        let state = database.and_then(|error| error.code());
        cause.is::<tokio::time::error::Elapsed>()
            || cause.downcast_ref::<std::io::Error>().is_some_and(|error| is_outage(error) && !servers.is_empty())
            // Connection exception, insufficient resources (too many connections), operator intervention (starting).
            || state.is_some_and(|state| ["08", "53", "57"].iter().any(|class| state.starts_with(class)))
    });
    servers.first().filter(|_| broke_off).cloned()
}

/// Whether a connection failed for a reason that may pass: not for a certificate that is refused, or the file of its
/// authority that cannot be read.
fn is_outage(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{InvalidData, InvalidInput, IsADirectory, NotFound, PermissionDenied};
    !matches!(error.kind(), InvalidData | InvalidInput | IsADirectory | NotFound | PermissionDenied)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_named_without_credentials() {
        let server = Server::new("DATABASE_URL", "mysql://baton:s3cret@db.example/baton?ssl-mode=required").unwrap();
        assert_eq!(server.to_string(), "DATABASE_URL (mysql://db.example:3306)");
        let server = Server::new("RABBITMQ_URL", "amqp://u:p@[::1]:5673/%2f").unwrap();
        assert_eq!((server.to_string().as_str(), server.host.as_str()), ("RABBITMQ_URL (amqp://[::1]:5673)", "::1"));
        assert_eq!(Server::new("DATABASE_URL", "mysql:nothing"), None);
    }

    #[tokio::test]
    async fn only_an_outage_is_awaited() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("mysql://127.0.0.1:{}/baton", listener.local_addr().unwrap().port());
        let servers = [Server::new("DATABASE_URL", &url).unwrap()];
        let refused = anyhow::anyhow!("access denied");
        assert_eq!(awaited(&servers, &refused).await, None);
        let reset =
            anyhow::Error::from(std::io::Error::from(std::io::ErrorKind::ConnectionReset)).context("DATABASE_URL");
        assert_eq!(awaited(&servers, &reset).await, Some(servers[0].clone()));
        assert_eq!(awaited(&[], &reset).await, None, "an unusable data directory is no outage");
        for kind in [std::io::ErrorKind::InvalidData, std::io::ErrorKind::NotFound] {
            let certificate = anyhow::Error::from(std::io::Error::from(kind));
            assert_eq!(awaited(&servers, &certificate).await, None, "{kind}");
        }
        drop(listener);
        assert_eq!(awaited(&servers, &refused).await, Some(servers[0].clone()), "it takes no connections");
    }
}
