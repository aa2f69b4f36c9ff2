//! MariaDB and PostgreSQL behind TLS, with a certificate of an own authority that is valid for `localhost` alone. Each
//! `verify` mode takes what it must and refuses the rest, and a refused certificate is an error, not an outage.

use std::collections::BTreeMap;

use harness::engine::{TestEngine, server};
use harness::ports::free_port;
use harness::servers::Servers;
use sqlx::Connection;

use crate::own_authority::OwnAuthority;
use crate::relay_fixture::{RelaySetup, SOON, baton};

/// A database server as Baton is told of it.
struct Database {
    variable: &'static str,
    /// `scheme://user@127.0.0.1:port/database`.
    url: String,
    /// The parameters of the mode and of the authority.
    mode: &'static str,
    authority: &'static str,
    /// The modes that check the authority alone, and the host name too.
    verify_authority: &'static str,
    verify_name: &'static str,
}

impl Database {
    fn mysql(url: String) -> Self {
        let (mode, authority) = ("ssl-mode", "ssl-ca");
        let (verify_authority, verify_name) = ("VERIFY_CA", "VERIFY_IDENTITY");
        Self { variable: "DATABASE_URL", url, mode, authority, verify_authority, verify_name }
    }

    fn postgres(url: String) -> Self {
        let (mode, authority) = ("sslmode", "sslrootcert");
        let (verify_authority, verify_name) = ("verify-ca", "verify-full");
        Self { variable: "USERS_DATABASE_URL", url, mode, authority, verify_authority, verify_name }
    }

    fn url(&self, host: &str, mode: &str, authority: &str) -> String {
        let url = self.url.replace("127.0.0.1", host);
        format!("{url}?{}={mode}&{}={authority}", self.mode, self.authority)
    }

    /// Migrates through this URL.
    async fn migrate(&self, host: &str, mode: &str, authority: &str) -> (i32, String) {
        let directory = tempfile::tempdir().unwrap();
        let env = BTreeMap::from([
            ("BATON_DATA_DIR".to_owned(), directory.path().display().to_string()),
            (self.variable.to_owned(), self.url(host, mode, authority)),
        ]);
        let mut process = baton(["migrate"], &env).start().unwrap();
        let status = process.wait_exit(SOON).await.unwrap();
        (status.code().unwrap_or(-1), process.output())
    }
}

#[tokio::test]
async fn databases_behind_tls_are_used_if_certificate_and_name_are_right() {
    let (ours, theirs) = (OwnAuthority::new("DNS:localhost"), OwnAuthority::new("DNS:localhost"));
    let servers = Servers::databases_with_tls(ours.files()).await;
    let mysql = servers.address("BATON_TEST_MYSQL_URL");
    let mut connection = sqlx::MySqlConnection::connect(&mysql).await.unwrap();
    sqlx::query("CREATE DATABASE baton").execute(&mut connection).await.unwrap();
    let databases =
        [Database::mysql(format!("{mysql}/baton")), Database::postgres(servers.address("BATON_TEST_POSTGRES_URL"))];
    let (ours, theirs) = (ours.certificate().display().to_string(), theirs.certificate().display().to_string());
    for database in &databases {
        let (authority, name) = (database.verify_authority, database.verify_name);
        for (host, mode) in [("localhost", name), ("localhost", authority), ("127.0.0.1", authority)] {
            let (code, output) = database.migrate(host, mode, &ours).await;
            assert_eq!(code, 0, "{mode} at {host}: {output}");
        }
        for (host, mode, trusted, reason) in [
            ("127.0.0.1", name, ours.as_str(), "not valid for name"),
            ("localhost", name, &theirs, "invalid peer certificate"),
            ("localhost", authority, &theirs, "invalid peer certificate"),
            ("localhost", authority, "/nowhere.pem", "No such file"),
        ] {
            let (code, output) = database.migrate(host, mode, trusted).await;
            assert!(code == 1 && output.contains(reason), "{mode} at {host}, trusting {trusted}: {code} {output}");
        }
    }

    // A service does not wait for a server that it does not trust.
    let relay = RelaySetup::relayers(1).engine(TestEngine::Embedded).start().await;
    for database in &databases {
        let directory = tempfile::tempdir().unwrap();
        let mut env = relay.env.clone();
        env.insert("BATON_DATA_DIR".to_owned(), directory.path().display().to_string());
        env.insert(database.variable.to_owned(), database.url("localhost", database.verify_name, &theirs));
        let mut process = baton(["serve"], &env).env("PORT", free_port().to_string()).start().unwrap();
        let status = process.wait_exit(SOON).await.unwrap();
        let output = process.output();
        assert!(status.code() == Some(1) && output.contains("invalid peer certificate"), "{status}: {output}");
    }
}

#[tokio::test]
async fn a_database_without_tls_is_refused_if_tls_is_asked_for() {
    let ours = OwnAuthority::new("DNS:localhost");
    let authority = ours.certificate().display().to_string();
    let mysql = Database::mysql(format!("{}/mysql", server("BATON_TEST_MYSQL_URL")));
    for database in [mysql, Database::postgres(server("BATON_TEST_POSTGRES_URL"))] {
        let (code, output) = database.migrate("localhost", database.verify_authority, &authority).await;
        assert!(code == 1 && output.contains("TLS"), "{code} {output}");
    }
}
