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
    ("RELAY_API_KEY", "key"),
    ("OZ_RELAYER_URLS", "http://a:1, http://b:2"),
    ("OZ_RELAYER_API_KEY", "secret"),
    ("WEBHOOK_SIGNING_KEY", "0123456789abcdef0123456789abcdef"),
];

#[test]
fn the_least_that_serves() {
    let config = read(Service::Serve, &GOOD).unwrap();
    assert_eq!(config.relay.relayers.len(), 2);
    assert_eq!(config.relay.relayers[1].1.expose(), "secret");
    assert_eq!((config.http.listen.port(), config.relay.concurrency), (3000, 64));
    assert_eq!(config.relay.mode, RelayMode::FireAndForget);
    assert_eq!(config.relay.clocks.submit_timeout, Duration::from_secs(30));
}

#[test]
fn nothing_set_names_everything_that_is_missing() {
    let ConfigError(problems) = read(Service::Serve, &[]).unwrap_err();
    for name in ["RELAY_API_KEY", "OZ_RELAYER_URLS", "OZ_RELAYER_API_KEY", "WEBHOOK_SIGNING_KEY"] {
        assert!(problems.iter().any(|found| found.starts_with(name)), "{name} in {problems:?}");
    }
    assert!(read(Service::Command, &[]).is_ok());
    assert_eq!(read(Service::QueueConsumer, &GOOD[1..3]).unwrap().http.listen.port(), 3001);
}

#[test]
fn every_bad_variable_is_named_at_once() {
    let mut vars = GOOD.to_vec();
    let bad = [
        ("PORT", "70000"),
        ("HOST", "here"),
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
        ("BREAKER_OPEN_MAX_MS", "1"),
    ];
    vars.extend(bad);
    let ConfigError(problems) = read(Service::Serve, &vars).unwrap_err();
    for (name, _) in bad {
        assert!(problems.iter().any(|found| found.starts_with(name)), "{name} in {problems:?}");
    }
    assert_eq!(problems.len(), bad.len(), "{problems:?}");
}

/// A store would refuse them with every transaction, for ever.
#[test]
fn what_no_store_could_keep_is_refused_at_the_start() {
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
fn an_engine_is_chosen_by_its_url_alone_and_needs_the_rest_of_it() {
    let with = |more: &[(&'static str, &'static str)]| {
        let mut vars = GOOD.to_vec();
        vars.extend(more);
        read(Service::Serve, &vars)
    };
    let embedded = with(&[("RABBITMQ_URL", "amqp://h")]).unwrap();
    assert!(matches!(embedded.engine.relay_queue, QueueEngine::Embedded), "the users lane may use it alone");
    assert_eq!(embedded.relay.queue_lease, Duration::from_secs(20));
    let missing = with(&[("SQS_QUEUE_URL", "http://h/0/q"), ("SQS_ENDPOINT_URL", "http://h")]).unwrap_err().0;
    for name in ["SQS_DLQ_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
        assert!(missing.iter().any(|found| found.starts_with(name)), "{name} in {missing:?}");
    }
    let sqs = with(&[("SQS_QUEUE_URL", "https://h/0/q"), ("SQS_DLQ_URL", "https://h/0/d")]).unwrap();
    assert!(matches!(&sqs.engine.relay_queue, QueueEngine::Sqs(sqs) if sqs.endpoint.is_none()), "instance role");
    assert_eq!(sqs.relay.queue_lease, Duration::from_secs(60));
    assert_eq!(sqs.relay.dead_letters_every, Duration::from_secs(60));
    assert_eq!(embedded.relay.dead_letters_every, Duration::from_secs(5));
    let rabbitmq = with(&[("RELAY_QUEUE", "rabbitmq"), ("RABBITMQ_URL", "amqp://u:secret@h")]).unwrap();
    assert!(!format!("{rabbitmq:?}").contains("secret@"), "passwords are not shown");
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
    assert!(with("OZ_RELAYER_URLS", "ftp://a")[0].contains("no http"));
    assert!(with("OZ_RELAYER_URLS", "http://me:secret@a:1")[0].contains("user or password"));
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

#[test]
fn secrets_do_not_print() {
    let config = read(Service::Serve, &GOOD).unwrap();
    let printed = format!("{config:?}");
    assert!(!printed.contains("secret") && !printed.contains("0123456789abcdef"));
}

#[test]
fn the_example_and_the_documentation_list_every_variable() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let example = std::fs::read_to_string(format!("{root}/.env.example")).unwrap();
    let page = std::fs::read_to_string(format!("{root}/docs/operations/configuration.md")).unwrap();
    for variable in variables() {
        let in_example = example
            .lines()
            .any(|line| line.trim_start_matches("# ").starts_with(&format!("{}={}", variable.name, variable.default)));
        assert!(in_example, ".env.example lacks {}={}", variable.name, variable.default);
        let row =
            format!("| `{}` | {} |", variable.name, if variable.default.is_empty() { "-" } else { variable.default });
        assert!(page.contains(&row), "configuration.md lacks {row}");
    }
    let known: Vec<_> = variables().map(|variable| variable.name).collect();
    for line in example.lines().filter(|line| line.contains('=')) {
        let name = line.trim_start_matches("# ").split('=').next().unwrap();
        assert!(known.contains(&name), ".env.example has the unknown {name}");
    }
}
