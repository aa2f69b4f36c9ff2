//! The whole configuration: defaults, required variables, contradictions, and that all problems are reported at once.

use std::time::Duration;

use sha2::{Digest, Sha256};

use super::*;

fn read(service: Service, vars: &[(&str, &str)]) -> Result<Config, ConfigError> {
    Config::from_vars(service, |name| {
        vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    })
}

const GOOD: [(&str, &str); 4] = [
    ("RELAY_API_KEY", "0123456789abcdef0123456789abcdef"),
    ("OZ_RELAYER_URLS", "http://a:1, http://b:2"),
    ("OZ_RELAYER_API_KEY", "secret"),
    ("WEBHOOK_SIGNING_KEY", "0123456789abcdef0123456789abcdef"),
];

#[test]
fn four_variables_are_enough_to_serve() {
    let config = read(Service::Serve, &GOOD).unwrap();
    assert_eq!(config.relay.relayers.len(), 2);
    assert_eq!(config.relay.relayers[1].1.expose(), "secret");
    assert_eq!((config.http.listen.port(), config.relay.concurrency), (3000, 64));
    assert_eq!(config.relay.mode, RelayMode::FireAndForget);
    assert_eq!(config.relay.timings, Timings::DEFAULT);
}

#[test]
fn every_missing_variable_is_named() {
    let ConfigError(problems) = read(Service::Serve, &[]).unwrap_err();
    for name in ["RELAY_API_KEY", "OZ_RELAYER_URLS", "OZ_RELAYER_API_KEY", "WEBHOOK_SIGNING_KEY"] {
        assert!(problems.iter().any(|found| found.starts_with(name)), "{name} in {problems:?}");
    }
    assert!(read(Service::Command, &[]).is_ok());
    assert_eq!(read(Service::QueueConsumer, &GOOD[1..3]).unwrap().http.listen.port(), 3001);
}

/// A notifier or a command beside an API has its environment, but perhaps not its keys.
#[test]
fn a_process_that_needs_no_relayers_does_not_check_their_keys() {
    let vars = [("OZ_RELAYER_URLS", "http://a:1,http://b:2"), ("WEBHOOK_SIGNING_KEY", "short")];
    for service in [Service::Notifier, Service::Command, Service::UsersConsumer] {
        let config = read(service, &vars).unwrap_or_else(|problems| panic!("{}: {problems}", service.name()));
        assert!(config.relay.relayers.is_empty() && config.relay.webhook_keys.is_empty(), "{}", service.name());
    }
    assert!(read(Service::QueueConsumer, &vars[..1]).is_err());
}

#[test]
fn every_bad_variable_is_named_at_once() {
    let mut vars = GOOD.to_vec();
    let bad = [
        ("PORT", "70000"),
        ("HOST", "no host"),
        ("RELAY_MODE", "sometimes"),
        ("CONSUMER_CONCURRENCY", "0"),
        ("RELAYER_SUBMIT_TIMEOUT_MS", "soon"),
        ("RELAYER_MIN_BALANCE_WEI", "1.5"),
        ("LOG_FORMAT", "xml"),
        ("DATABASE_URL", "postgres://x"),
        ("REDIS_URL", "here"),
        ("RELAY_QUEUE", "carrier-pigeon"),
        ("QUEUE_AUTO_CREATE", "perhaps"),
        ("RELAY_API_KEYS", "nohash"),
        ("RECONCILE_PENDING_MS", "0"),
    ];
    vars.extend(bad);
    let ConfigError(problems) = read(Service::Serve, &vars).unwrap_err();
    for (name, _) in bad {
        assert!(problems.iter().any(|found| found.starts_with(name)), "{name} in {problems:?}");
    }
    assert_eq!(problems.len(), bad.len(), "{problems:?}");
}

#[test]
fn a_name_of_this_machine_is_an_address_to_listen_on() {
    for (host, wanted) in [("localhost", "127.0.0.1:3000"), ("::1", "[::1]:3000"), ("0.0.0.0", "0.0.0.0:3000")] {
        let mut vars = GOOD.to_vec();
        vars.push(("HOST", host));
        assert_eq!(read(Service::Serve, &vars).unwrap().http.listen.to_string(), wanted);
    }
}

/// Otherwise the store would refuse every transaction.
#[test]
fn names_and_urls_too_long_for_a_store_are_refused() {
    let long = "a".repeat(1000);
    let (urls, pair) = (format!("http://a/{long}"), format!("{long}:{}", "0".repeat(64)));
    for (name, value) in [("OZ_RELAYER_URLS", urls), ("RELAY_API_KEYS", pair)] {
        let mut vars = vec![(name, value.as_str())];
        vars.extend(GOOD);
        let ConfigError(problems) = read(Service::Serve, &vars).unwrap_err();
        assert!(matches!(&problems[..], [found] if found.starts_with(name)), "{problems:?}");
    }
}

#[test]
fn a_url_chooses_its_engine_and_requires_the_rest_of_its_settings() {
    let with = |more: &[(&'static str, &'static str)]| {
        let mut vars = GOOD.to_vec();
        vars.extend(more);
        read(Service::Serve, &vars)
    };
    let embedded = with(&[("RABBITMQ_URL", "amqp://h")]).unwrap();
    assert!(matches!(embedded.engine.relay_queue, QueueEngine::Embedded), "RABBITMQ_URL moves only the users lane");
    assert_eq!(embedded.relay.queue_lease, Duration::from_secs(20));
    let missing = with(&[("SQS_QUEUE_URL", "http://h/0/q"), ("SQS_ENDPOINT_URL", "http://h")]).unwrap_err().0;
    for name in ["SQS_DLQ_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
        assert!(missing.iter().any(|found| found.starts_with(name)), "{name} in {missing:?}");
    }
    let sqs = with(&[("SQS_QUEUE_URL", "https://h/0/q"), ("SQS_DLQ_URL", "https://h/0/d")]).unwrap();
    assert!(
        matches!(&sqs.engine.relay_queue, QueueEngine::Sqs(sqs) if sqs.endpoint.is_none()),
        "the default credential chain"
    );
    assert_eq!(sqs.relay.queue_lease, Duration::from_secs(60));
    assert_eq!(sqs.relay.dead_letters_reread_after, Some(Duration::from_secs(60)));
    assert_eq!(embedded.relay.dead_letters_reread_after, None);
    let rabbitmq = with(&[("RELAY_QUEUE", "rabbitmq"), ("RABBITMQ_URL", "amqp://u:secret@h")]).unwrap();
    assert!(!format!("{rabbitmq:?}").contains("secret@"), "passwords do not print");
}

#[test]
fn contradictions_are_refused() {
    let with = |name: &'static str, value: &'static str| {
        let mut vars: Vec<_> = GOOD.iter().copied().filter(|(known, _)| *known != name).collect();
        vars.push((name, value));
        read(Service::Serve, &vars).unwrap_err().0
    };
    assert!(with("OZ_RELAYER_API_KEY", "a,b,c")[0].contains("3 keys for 2 URLs"));
    assert!(with("OZ_RELAYER_URLS", "http://a:1,http://a:1")[0].contains("twice"));
    assert!(with("OZ_RELAYER_URLS", "ftp://a")[0].contains("not a list of http"));
    for secret in ["http://me:s3cret@a:1", "http://a:1?token=s3cret", "http://a:1/#s3cret", "htp://a:1?token=s3cret"] {
        let problems = with("OZ_RELAYER_URLS", secret);
        assert!(problems.len() == 1 && !problems[0].contains("s3cret"), "{problems:?}");
    }
    assert!(with("WEBHOOK_SIGNING_KEY", "short")[0].contains("too short"));
}

#[test]
fn named_keys_are_read_by_hash() {
    let hash = hex::encode(Sha256::digest(b"key-a"));
    let mut vars = GOOD.to_vec();
    let pairs = format!("team-a:{hash}");
    vars.push(("RELAY_API_KEYS", &pairs));
    let keys = read(Service::Serve, &vars).unwrap().http.api_keys;
    assert_eq!(keys.iter().map(|key| key.name.as_str()).collect::<Vec<_>>(), ["default", "team-a"]);
}

/// A request without a header was taken for one with an empty key, whose hash a script wrote when its key was not set.
#[test]
fn the_hash_of_nothing_and_a_short_key_are_refused() {
    let nothing = format!("ci:{}", hex::encode(Sha256::digest(b"")));
    for (name, value) in [("RELAY_API_KEYS", nothing.as_str()), ("RELAY_API_KEY", "0123456789abcdef0123456789abcde")] {
        let mut vars: Vec<_> = GOOD.into_iter().filter(|(known, _)| *known != name).collect();
        vars.push((name, value));
        let ConfigError(problems) = read(Service::Serve, &vars).unwrap_err();
        assert!(matches!(&problems[..], [found] if found.starts_with(name)), "{problems:?}");
        assert!(!problems[0].contains(value), "the message does not quote the key");
    }
}

#[test]
fn the_port_of_probes_follows_the_port_of_the_service() {
    let admin = |port: &str, admin: &str| {
        let mut vars = GOOD.to_vec();
        vars.extend([("PORT", port), ("ADMIN_PORT", admin)]);
        read(Service::Serve, &vars).map(|config| config.http.admin_listen.port())
    };
    assert_eq!((admin("", ""), admin("8080", ""), admin("8080", "9090")), (Ok(4000), Ok(9080), Ok(9090)));
    assert_eq!((admin("65000", ""), admin("0", "")), (Ok(64000), Ok(0)));
    assert!(admin("8080", "-1").is_err());
}

#[test]
fn webhook_keys_can_be_several_and_one_for_each_relayer() {
    let (old, new) = ("old-0123456789abcdef0123456789abcdef", "new-0123456789abcdef0123456789abcdef==");
    let keys = |value: &str| {
        let mut vars: Vec<_> = GOOD.into_iter().filter(|(known, _)| *known != "WEBHOOK_SIGNING_KEY").collect();
        vars.push(("WEBHOOK_SIGNING_KEY", value));
        read(Service::Serve, &vars).map(|config| {
            let keys = config.relay.webhook_keys.into_iter();
            keys.map(|key| (key.relayer.map(|url| url.to_string()), key.secret.expose().to_owned())).collect::<Vec<_>>()
        })
    };
    assert_eq!(keys(&format!("{new}, {old}")), Ok(vec![(None, new.to_owned()), (None, old.to_owned())]));
    let of_b = vec![(None, old.to_owned()), (Some("http://b:2/".to_owned()), new.to_owned())];
    assert_eq!(keys(&format!("{old},http://b:2={new}")), Ok(of_b));
    for (bad, rule) in [(format!("{old},short"), "too short"), (format!("http://c:3={old}"), "OZ_RELAYER_URLS")] {
        let ConfigError(problems) = keys(&bad).unwrap_err();
        assert!(matches!(&problems[..], [found] if found.starts_with("WEBHOOK_SIGNING_KEY") && found.contains(rule)));
        assert!(!problems[0].contains(old), "the message does not quote the key");
    }
}

/// A relayer answered 401 to the three dots of the documentation, and the process ran.
#[test]
fn a_placeholder_is_refused_for_every_secret_and_beside_other_problems() {
    let secrets: Vec<_> = variables::variables().filter(|variable| variable.secret).collect();
    for placeholder in ["…", "...", "changeme", "<your-key>"] {
        let value = |variable: &Variable| match variable.kind {
            Kind::Url(schemes) => format!("{}://user:{placeholder}@host/name", schemes[0]),
            _ => placeholder.to_owned(),
        };
        let ConfigError(problems) = Config::from_vars(Service::Serve, |name| match name {
            "OZ_RELAYER_URLS" | "SQS_QUEUE_URL" | "SQS_DLQ_URL" | "SQS_ENDPOINT_URL" => Some("http://a:1".to_owned()),
            "AWS_ACCESS_KEY_ID" => Some("id".to_owned()),
            "PORT" => Some("70000".to_owned()),
            _ => secrets.iter().find(|variable| variable.name == name).map(|variable| value(variable)),
        })
        .unwrap_err();
        for name in secrets.iter().map(|variable| variable.name) {
            let of_this: Vec<_> = problems.iter().filter(|found| found.starts_with(&format!("{name} "))).collect();
            assert!(matches!(&of_this[..], [found] if found.contains("placeholder")), "{name}: {of_this:?}");
        }
        assert!(problems.iter().all(|found| !found.contains(placeholder)), "{problems:?}");
        assert_eq!(problems.len(), secrets.len() + 1, "and PORT: {problems:?}");
    }
}

#[test]
fn a_placeholder_that_a_process_does_not_read_is_no_problem() {
    let vars = [("OZ_RELAYER_API_KEY", "…"), ("CLIENT_WEBHOOK_SECRET", "whsec_…"), ("AWS_SECRET_ACCESS_KEY", "…")];
    assert!(read(Service::UsersConsumer, &vars).is_ok());
    let commanded = read(Service::Command, &[("DATABASE_URL", "mysql://baton:…@db/baton")]).unwrap_err();
    assert!(commanded.0[0].starts_with("DATABASE_URL "), "{commanded}");
}

/// Each secret variable gets a value with a marker that must not reach any log.
#[test]
fn secrets_do_not_print() {
    const MARKER: &str = "s3cret-marker-of-more-than-32-characters";
    const MARKER_BASE64: &str = "czNjcmV0LW1hcmtlci1vZi1tb3JlLXRoYW4tMzItY2hhcmFjdGVycw==";
    let value = |variable: &Variable| match variable.kind {
        Kind::Url(schemes) => format!("{}://user:{MARKER}@host/name", schemes[0]),
        _ => MARKER.to_owned(),
    };
    let config = Config::from_vars(Service::Serve, |name| match name {
        "OZ_RELAYER_URLS" | "SQS_QUEUE_URL" | "SQS_DLQ_URL" | "SQS_ENDPOINT_URL" => Some("http://a:1".to_owned()),
        "AWS_ACCESS_KEY_ID" => Some("id".to_owned()),
        "CLIENT_WEBHOOK_SECRET" => Some(format!("whsec_{}", MARKER_BASE64)),
        _ => variables::variables().find(|variable| variable.secret && variable.name == name).map(value),
    });
    let config = config.unwrap();
    assert!(config.users.database_url.as_ref().is_some_and(|url| url.expose().contains(MARKER)));
    let secret = config.notify.environment_endpoint.as_ref().map(|(_, secret)| secret.expose());
    assert!(secret.is_some_and(|secret| secret.contains(MARKER_BASE64)));
    let printed = format!("{config:?}");
    assert!(!printed.contains(MARKER) && !printed.contains(MARKER_BASE64));
}

#[test]
fn the_table_names_each_variable_once_and_no_removed_one() {
    let names: Vec<_> = variables::variables().map(|variable| variable.name).collect();
    for (index, name) in names.iter().enumerate() {
        assert!(!names[..index].contains(name), "{name} is in the table twice");
        assert!(variables::REMOVED.iter().all(|(removed, _)| removed != name), "{name} is removed and in the table");
    }
    for variable in variables::variables() {
        assert!(!variable.about.ends_with('.') && !variable.about.contains('|'), "{}", variable.name);
    }
}

/// A default that its own variable would refuse differs from what the documentation promises.
#[test]
fn every_default_is_valid_when_set() {
    let config = |lookup: &dyn Fn(&str) -> Option<String>| Config::from_vars(Service::Command, lookup);
    let with = |variable: &Variable| {
        let (name, default) = (variable.name, variable.default.to_owned());
        // FORWARDER_NAME alone is incomplete.
        let rest = [
            ("FORWARDER_ADDRESS", "0x5FbDB2315678afecb367f032d93F642f64180aa3"),
            ("CHAIN_ID", "1"),
            ("RPC_URL", "http://h"),
        ];
        config(&move |asked| {
            let rest = rest.iter().find(|(known, _)| *known == asked).map(|(_, value)| (*value).to_owned());
            (asked == name && !default.is_empty()).then(|| default.clone()).or(rest)
        })
    };
    for variable in variables::variables() {
        assert!(with(variable).is_ok(), "{}: {:?}", variable.name, with(variable).err());
    }
}

#[test]
fn a_removed_variable_that_is_still_set_is_a_warning() {
    let mut vars = GOOD.to_vec();
    vars.push(("BREAKER_OPEN_MAX_MS", "120000"));
    let warnings = read(Service::Serve, &vars).unwrap().warnings;
    assert_eq!(
        warnings,
        ["BREAKER_OPEN_MAX_MS is set but no longer read: a circuit breaker stays open for at most 60 s"]
    );
    assert!(read(Service::Serve, &GOOD).unwrap().warnings.is_empty());
}
