//! Commands that read, on servers without Baton's tables or queues: they say so, and create nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;

use harness::engine::{TestEngine, server};
use harness::process::Program;
use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties, ExchangeKind};
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection as _, MySqlConnection, PgConnection};
use uuid::Uuid;

use crate::relay_fixture::SOON;

type Environment = BTreeMap<String, String>;

const RELAY: [&[&str]; 5] = [
    &["tx", "show", "00000000-0000-7000-8000-000000000000"],
    &["tx", "unknown"],
    &["dlq", "list"],
    &["dlq", "show", "some-id"],
    &["webhooks", "list"],
];
const USERS: [&[&str]; 2] = [&["dlq", "list", "--lane", "users"], &["dlq", "show", "some-id", "--lane", "users"]];

async fn run(args: &[&str], env: &Environment) -> (i32, String) {
    let program = Program::new(PathBuf::from(env!("CARGO_BIN_EXE_baton"))).args(args.to_vec()).envs(env.clone());
    let mut process = program.start().unwrap();
    let status = process.wait_exit(SOON).await.unwrap();
    (status.code().unwrap_or(-1), process.output())
}

/// Each command fails, with all of these texts in its error.
async fn assert_refused(commands: &[&[&str]], env: &Environment, error: &[&str]) {
    for command in commands {
        let (code, output) = run(command, env).await;
        assert!(code == 1 && error.iter().all(|text| output.contains(text)), "{command:?}: {code} {output}");
    }
}

/// A command that lists works on what `migrate` has made.
async fn assert_migrated(list: &[&str], env: &Environment) {
    for command in [&["migrate"], list] {
        let (code, output) = run(command, env).await;
        assert_eq!(code, 0, "{command:?}: {output}");
    }
}

async fn mysql_tables(env: &Environment) -> i64 {
    let mut connection = MySqlConnection::connect(&env["DATABASE_URL"]).await.unwrap();
    let count = "SELECT COUNT(*) FROM information_schema.tables WHERE table_schema = DATABASE()";
    sqlx::query_scalar(count).fetch_one(&mut connection).await.unwrap()
}

async fn postgres_tables(env: &Environment) -> i64 {
    let mut connection = PgConnection::connect(&env["USERS_DATABASE_URL"]).await.unwrap();
    let count = "SELECT COUNT(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace";
    sqlx::query_scalar(count).fetch_one(&mut connection).await.unwrap()
}

/// Whether SQS has this queue.
async fn sqs_has(url: &str) -> bool {
    // The emulator reads the region from the header and does not check the signature.
    let authorization = "AWS4-HMAC-SHA256 Credential=test/20260101/ap-northeast-2/sqs/aws4_request, SignedHeaders=host, \
                         Signature=0";
    let request = harness::http_client()
        .post(server("BATON_TEST_SQS_URL"))
        .header("content-type", "application/x-amz-json-1.0")
        .header("x-amz-target", "AmazonSQS.GetQueueUrl")
        .header("authorization", authorization)
        .timeout(SOON)
        .body(json!({ "QueueName": url.rsplit('/').next() }).to_string());
    let answer = request.send().await.unwrap();
    let (status, text) = (answer.status(), answer.text().await.unwrap());
    assert!(status.is_success() || text.contains("QueueDoesNotExist"), "{status} {text}");
    status.is_success()
}

/// Which of these queues and exchanges the broker has.
async fn rabbitmq_has(queues: &[String], exchanges: &[String]) -> Vec<String> {
    let properties = ConnectionProperties::default();
    let connection = Connection::connect(&server("BATON_TEST_AMQP_URL"), properties).await.unwrap();
    let mut found = Vec::new();
    // The broker closes a channel that asks for what does not exist.
    for queue in queues {
        let channel = connection.create_channel().await.unwrap();
        let look = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
        if channel.queue_declare(queue.as_str().into(), look, FieldTable::default()).await.is_ok() {
            found.push(queue.clone());
        }
    }
    for exchange in exchanges {
        let channel = connection.create_channel().await.unwrap();
        let look = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
        let kind = ExchangeKind::Direct;
        if channel.exchange_declare(exchange.as_str().into(), kind, look, FieldTable::default()).await.is_ok() {
            found.push(exchange.clone());
        }
    }
    found
}

/// The environment of commands with these variables, in which services may create queues.
fn environment(directory: &tempfile::TempDir, vars: impl IntoIterator<Item = (String, String)>) -> Environment {
    let mut env: Environment = vars.into_iter().collect();
    env.insert("BATON_DATA_DIR".to_owned(), directory.path().display().to_string());
    env.insert("QUEUE_AUTO_CREATE".to_owned(), "true".to_owned());
    env
}

/// The same with other queues, which do not exist.
fn with_other_queues(env: &Environment, variables: &[&str]) -> Environment {
    let mut env = env.clone();
    for variable in variables {
        let other = format!("{}-other", env[*variable]);
        env.insert((*variable).to_owned(), other);
    }
    env
}

async fn assert_no_queues_on_sqs(commands: &[&[&str]], env: &Environment, [queue, dead]: [&str; 2]) {
    let other = with_other_queues(env, &[queue, dead]);
    assert_refused(commands, &other, &[queue, "does not exist"]).await;
    for variable in [queue, dead] {
        assert!(sqs_has(&env[variable]).await, "{variable}");
        assert!(!sqs_has(&other[variable]).await, "a command that reads created {}", other[variable]);
    }
}

#[tokio::test]
async fn commands_that_read_create_nothing_on_mysql_and_sqs() {
    let (engine, directory) = (TestEngine::MySqlSqs.set_up(), tempfile::tempdir().unwrap());
    let env = environment(&directory, engine.vars.clone());
    assert_refused(&RELAY, &env, &["DATABASE_URL", "baton migrate"]).await;
    assert_eq!(mysql_tables(&env).await, 0);
    assert_migrated(&["dlq", "list"], &env).await;
    assert_no_queues_on_sqs(&RELAY, &env, ["SQS_QUEUE_URL", "SQS_DLQ_URL"]).await;
}

#[tokio::test]
async fn commands_that_read_create_nothing_on_mysql_and_rabbitmq() {
    let (engine, directory) = (TestEngine::MySqlRabbitMq.set_up(), tempfile::tempdir().unwrap());
    let env = environment(&directory, engine.vars.clone());
    assert_refused(&RELAY, &env, &["DATABASE_URL", "baton migrate"]).await;
    assert_eq!(mysql_tables(&env).await, 0);
    assert_migrated(&["dlq", "list"], &env).await;

    let other = with_other_queues(&env, &["RELAY_QUEUE_NAME"]);
    let names = |env: &Environment| [env["RELAY_QUEUE_NAME"].clone(), format!("{}-dlq", env["RELAY_QUEUE_NAME"])];
    assert_refused(&RELAY, &other, &["RABBITMQ_URL", &names(&other)[1]]).await;
    assert_eq!(rabbitmq_has(&names(&env), &[]).await, names(&env));
    assert_eq!(rabbitmq_has(&names(&other), &[]).await, [""; 0]);
}

/// Creates an empty database; returns its name and its URL.
async fn postgres_database() -> (String, String) {
    let (name, postgres) = (format!("baton_{}", Uuid::new_v4().simple()), server("BATON_TEST_POSTGRES_URL"));
    let mut admin = PgConnection::connect(&postgres).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut admin).await.unwrap();
    let mut url = reqwest::Url::parse(&postgres).unwrap();
    url.set_path(&name);
    (name, url.to_string())
}

#[tokio::test]
async fn commands_that_read_create_nothing_on_postgres_and_rabbitmq() {
    let ((name, database), directory) = (postgres_database().await, tempfile::tempdir().unwrap());
    let amqp = server("BATON_TEST_AMQP_URL");
    let vars = [("USERS_DATABASE_URL", database), ("RABBITMQ_URL", amqp), ("USERS_QUEUE_NAME", name)];
    let env = environment(&directory, vars.map(|(name, value)| (name.to_owned(), value)));
    assert_refused(&USERS, &env, &["USERS_DATABASE_URL", "baton migrate"]).await;
    assert_eq!(postgres_tables(&env).await, 0);
    assert_migrated(&["dlq", "list", "--lane", "users"], &env).await;

    let other = with_other_queues(&env, &["USERS_QUEUE_NAME"]);
    let names = |env: &Environment, kinds: [&str; 3]| kinds.map(|kind| format!("{}_{kind}", env["USERS_QUEUE_NAME"]));
    let queues = |env: &Environment| names(env, ["queue", "dlq", "retry_10s"]);
    let exchanges = |env: &Environment| names(env, ["exchange", "dlx", "retry_exchange"]);
    assert_refused(&USERS, &other, &["RABBITMQ_URL", &exchanges(&other)[1]]).await;
    assert_eq!(rabbitmq_has(&queues(&env), &exchanges(&env)).await, [queues(&env), exchanges(&env)].concat());
    assert_eq!(rabbitmq_has(&queues(&other), &exchanges(&other)).await, [""; 0]);
}

#[tokio::test]
async fn commands_that_read_create_nothing_on_postgres_and_sqs() {
    let ((name, database), directory) = (postgres_database().await, tempfile::tempdir().unwrap());
    let endpoint = server("BATON_TEST_SQS_URL");
    let vars = [
        ("USERS_DATABASE_URL", database),
        ("USERS_QUEUE", "sqs".to_owned()),
        ("USERS_SQS_QUEUE_URL", format!("{endpoint}/000000000000/{name}")),
        ("USERS_SQS_DLQ_URL", format!("{endpoint}/000000000000/{name}-dlq")),
        ("SQS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", "test".to_owned()),
        ("AWS_SECRET_ACCESS_KEY", "test".to_owned()),
    ];
    let env = environment(&directory, vars.map(|(name, value)| (name.to_owned(), value)));
    assert_migrated(&["dlq", "list", "--lane", "users"], &env).await;
    assert_no_queues_on_sqs(&USERS, &env, ["USERS_SQS_QUEUE_URL", "USERS_SQS_DLQ_URL"]).await;
}
