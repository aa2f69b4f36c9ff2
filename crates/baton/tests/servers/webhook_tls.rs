//! Client notifications over TLS: a receiver gets an event only if its certificate is valid for the name in the URL, and
//! signed by a trusted authority.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use baton::notify::address_guard::{AddressGuard, AddressPolicy};
use baton::notify::lookups::Resolver;
use baton::notify::sender::{Sender, Sent};
use bytes::Bytes;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{RootCertStore, ServerConfig, ServerConnection, Stream};

use crate::own_authority::OwnAuthority;
use crate::relay_fixture::SOON;

const BODY: &str = r#"{"type":"transaction.confirmed"}"#;

#[tokio::test]
async fn only_a_valid_certificate_of_a_trusted_authority_gets_the_event() {
    let (ours, theirs) = (OwnAuthority::new("DNS:receiver.test"), OwnAuthority::new("DNS:receiver.test"));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let receiving = {
        let tls = Arc::new(server_config(&ours));
        std::thread::spawn(move || {
            let connections = listener.incoming().take(3);
            connections.map(|stream| receive(&tls, stream.unwrap())).collect::<Vec<String>>()
        })
    };
    let accepted = send(&ours, "receiver.test", port).await;
    assert_eq!((accepted.status, accepted.error), (Some(200), None));
    for (authority, name) in [(&theirs, "receiver.test"), (&ours, "other.test")] {
        let refused = send(authority, name, port).await;
        let error = refused.error.unwrap();
        assert!(error.starts_with("no TLS connection: invalid peer certificate"), "{error}");
        assert_eq!(refused.status, None);
    }
    let requests = tokio::task::spawn_blocking(|| receiving.join().unwrap()).await.unwrap();
    assert!(requests[0].starts_with("POST /hook HTTP/1.1\r\n"), "{requests:?}");
    assert_eq!(requests[1..], ["", ""]);
}

/// Sends to a name that resolves to this machine, trusting one authority only.
async fn send(authority: &OwnAuthority, name: &str, port: u16) -> Sent {
    let resolver: Resolver = Arc::new(|_, port| {
        let here = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Box::pin(async move { Ok(vec![here]) })
    });
    let policy = AddressPolicy { allow_http: false, allow_private: true, ports: Vec::new() };
    let mut trusted = RootCertStore::empty();
    trusted.add(CertificateDer::from_pem_file(authority.certificate()).unwrap()).unwrap();
    let sender = Sender::trusting(trusted, AddressGuard::with_resolver(policy, resolver), SOON).unwrap();
    sender.send("shop", &format!("https://{name}:{port}/hook"), Vec::new(), Bytes::from_static(BODY.as_bytes())).await
}

/// Answers one request and returns it; empty if the sender has ended the handshake.
fn receive(tls: &Arc<ServerConfig>, mut tcp: TcpStream) -> String {
    tcp.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut session = ServerConnection::new(Arc::clone(tls)).unwrap();
    let mut stream = Stream::new(&mut session, &mut tcp);
    let mut request = String::new();
    while !request.ends_with(BODY) {
        let mut piece = [0; 1024];
        match stream.read(&mut piece) {
            Ok(0) => break,
            Ok(read) => request.push_str(std::str::from_utf8(&piece[..read]).unwrap()),
            Err(error) => {
                assert_ne!(error.kind(), ErrorKind::WouldBlock, "the sender sends nothing");
                break;
            }
        }
    }
    if !request.is_empty() {
        stream.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").unwrap();
    }
    request
}

fn server_config(authority: &OwnAuthority) -> ServerConfig {
    let certificate = CertificateDer::from_pem_file(authority.files().join("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(authority.files().join("server.key")).unwrap();
    let provider = rustls::crypto::ring::default_provider().into();
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    builder.with_no_client_auth().with_single_cert(vec![certificate], key).unwrap()
}
