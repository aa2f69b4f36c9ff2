//! `webhooks list|show|attempts|redeliver|recover|enable|disable`: clients' endpoints, for operators. The commands open the
//! store of the configuration themselves, so no service needs to run. `webhooks listen` is
//! [`super::webhook_listener`].

use std::process::ExitCode;

use clap::Subcommand;
use uuid::Uuid;

use super::output::{OutputError, printable, say};
use super::webhook_listener::{self, ListenArgs};
use crate::clock::Clock;
use crate::config::{Config, Secret, Service};
use crate::notify::endpoint_change::{Changed, change_endpoint, disable, enable};
use crate::notify::endpoint_request::read_event_id;
use crate::relay::lane::RelayLane;
use crate::relay::store::notifications::{Attempt, EVERY_KEY, Endpoint, EndpointId, NotificationStore, Requeue};
use crate::timestamp::Timestamp;

/// Attempts that are read at once.
const PAGE_MAX: usize = 200;

/// A command on webhooks.
#[derive(Subcommand)]
pub enum WebhooksCommand {
    /// A command on the stored endpoints.
    #[command(flatten)]
    Endpoints(EndpointsCommand),
    /// Receive webhooks on this machine, print them, and verify their signatures
    Listen(ListenArgs),
}

/// A command on the stored endpoints.
#[derive(Subcommand)]
pub enum EndpointsCommand {
    /// List the endpoints of all API keys, oldest first
    List,
    /// Show an endpoint: its state, and how many events wait for it or were given up
    Show {
        /// Id of the endpoint
        #[arg(value_parser = parse_id)]
        id: Uuid,
    },
    /// List the attempts to deliver to an endpoint, newest first
    Attempts {
        /// Id of the endpoint
        #[arg(value_parser = parse_id)]
        id: Uuid,
        /// Maximum number of attempts
        #[arg(long, value_name = "N", default_value_t = 20)]
        max: usize,
    },
    /// Deliver one event again, whether it was delivered before or not
    Redeliver {
        /// Id of the endpoint
        #[arg(value_parser = parse_id)]
        id: Uuid,
        /// Id of the event, as `attempts` shows it (evt_…)
        event: String,
    },
    /// Deliver every event that was not delivered: waiting, given up, or written while the endpoint was disabled
    Recover {
        /// Id of the endpoint
        #[arg(value_parser = parse_id)]
        id: Uuid,
        /// Only events at or after this time (RFC 3339, such as 2026-11-15T22:00:00Z)
        #[arg(long, value_name = "TIME", value_parser = parse_time)]
        since: Timestamp,
    },
    /// Enable an endpoint that was disabled; events that it missed need `recover`
    Enable {
        /// Id of the endpoint
        #[arg(value_parser = parse_id)]
        id: Uuid,
    },
    /// Disable an endpoint: it gets nothing until it is enabled again
    Disable {
        /// Id of the endpoint
        #[arg(value_parser = parse_id)]
        id: Uuid,
        /// Why, for the endpoint's owner
        #[arg(long, value_name = "TEXT", default_value = "disabled by an operator")]
        reason: String,
    },
}

fn parse_id(text: &str) -> Result<Uuid, String> {
    Uuid::parse_str(text).map_err(|_| "must be a UUID, as `baton webhooks list` shows it".to_owned())
}

fn parse_time(text: &str) -> Result<Timestamp, String> {
    Timestamp::parse(text).ok_or_else(|| "must be an RFC 3339 time, such as 2026-11-15T22:00:00Z".to_owned())
}

/// Runs a command.
pub async fn run(command: WebhooksCommand) -> anyhow::Result<ExitCode> {
    let command = match command {
        WebhooksCommand::Endpoints(command) => command,
        // It needs no store and no configuration.
        WebhooksCommand::Listen(args) => return webhook_listener::run(args).await,
    };
    let config = Config::from_env(Service::Command)?;
    let lane = RelayLane::open_existing(&config).await?;
    let kept_since = lane.guarded.clock.now() - config.notify.retention;
    let done = run_on(lane.notifications.as_ref(), &lane.guarded.clock, kept_since, command).await;
    lane.close().await;
    done.map(|()| ExitCode::SUCCESS)
}

/// `kept_since`: what was delivered before is not known any more.
async fn run_on(
    store: &dyn NotificationStore,
    clock: &Clock,
    kept_since: Timestamp,
    command: EndpointsCommand,
) -> anyhow::Result<()> {
    match command {
        EndpointsCommand::List => list(store).await,
        EndpointsCommand::Show { id } => show(store, id, clock.now()).await,
        EndpointsCommand::Attempts { id, max } => attempts(store, id, max).await,
        EndpointsCommand::Redeliver { id, event } => {
            let endpoint = find(store, id).await?;
            let queued = match read_event_id(&event) {
                Some(event) => store.requeue(endpoint.id, &Requeue::Event(event), clock.now()).await?.queued,
                None => 0,
            };
            anyhow::ensure!(
                queued > 0,
                "endpoint {id} has no event {event}; `baton webhooks attempts {id}` shows some"
            );
            say!("{event} is due again");
            say_if_disabled(&endpoint)?;
            Ok(())
        }
        EndpointsCommand::Recover { id, since } => {
            let endpoint = find(store, id).await?;
            if since < kept_since {
                say!("events are kept for WEBHOOK_RETENTION_DAYS: recovering those since {kept_since}");
            }
            let (mut queued, mut next) = (0, Some(since.max(kept_since)));
            while let Some(since) = next {
                let done = store.requeue(endpoint.id, &Requeue::Since(since), clock.now()).await?;
                queued += done.queued;
                next = done.next_since;
                if let Some(next) = next {
                    say!("{queued} due again so far; events since {next} follow");
                }
            }
            say!("{queued} due again");
            if queued > 0 {
                say_if_disabled(&endpoint)?;
            }
            Ok(())
        }
        EndpointsCommand::Enable { id } => {
            change(store, id, clock.now(), enable).await?;
            say!("{id} is enabled");
            Ok(())
        }
        EndpointsCommand::Disable { id, reason } => {
            let now = clock.now();
            change(store, id, now, |endpoint| disable(endpoint, &reason, now)).await?;
            say!("{id} is disabled");
            Ok(())
        }
    }
}

/// Events that are due wait for a disabled endpoint.
fn say_if_disabled(endpoint: &Endpoint) -> Result<(), OutputError> {
    if endpoint.disabled.is_some() {
        say!("the endpoint is disabled and gets nothing until it is enabled: `baton webhooks enable {}`", endpoint.id);
    }
    Ok(())
}

async fn list(store: &dyn NotificationStore) -> anyhow::Result<()> {
    let endpoints = store.endpoints(None).await?;
    for endpoint in &endpoints {
        say!("{}  {}  {}  {}", endpoint.id, owner(endpoint), state(endpoint), url(endpoint));
    }
    say!("{} {}", endpoints.len(), if endpoints.len() == 1 { "endpoint" } else { "endpoints" });
    Ok(())
}

async fn show(store: &dyn NotificationStore, id: Uuid, now: Timestamp) -> anyhow::Result<()> {
    let endpoint = find(store, id).await?;
    let counts = store.endpoint_counts(endpoint.id).await?;
    say!("endpoint     {}", endpoint.id);
    say!("key          {}", owner(&endpoint));
    say!("url          {}", url(&endpoint));
    say!("events       {}", endpoint.events.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(", "));
    if let Some(description) = &endpoint.description {
        say!("description  {}", printable(description));
    }
    for line in state_lines(&endpoint, now) {
        say!("{line}");
    }
    say!("waiting      {}", counts.waiting);
    say!("given up     {}", counts.given_up);
    Ok(())
}

/// The state of an endpoint, as [`crate::notify::endpoint_view`] shows it to its owner: pauses and overlaps that are over
/// are left out, and a disabled endpoint has no failures.
fn state_lines(endpoint: &Endpoint, now: Timestamp) -> Vec<String> {
    let mut lines = vec![format!("status       {}", state(endpoint))];
    match &endpoint.disabled {
        Some(disabled) => lines.push(format!("since        {}", disabled.at)),
        None => {
            if let Some(since) = endpoint.failing_since {
                let noun = if endpoint.failures == 1 { "failure" } else { "failures" };
                lines.push(format!("failing      since {since}, {} {noun}", endpoint.failures));
            }
            if let Some(until) = endpoint.paused_until.filter(|until| *until > now) {
                lines.push(format!("paused       until {until}"));
            }
        }
    }
    lines.push(format!("registered   {}", endpoint.created_at));
    lines.push(format!("changed      {}", endpoint.updated_at));
    if let Some((_, until)) = endpoint.previous_secret.as_ref().filter(|(_, until)| *until > now) {
        lines.push(format!("old secret   used until {until}"));
    }
    lines
}

async fn attempts(store: &dyn NotificationStore, id: Uuid, max: usize) -> anyhow::Result<()> {
    let Endpoint { id, .. } = find(store, id).await?;
    let (mut before, mut left) = (None, max);
    while left > 0 {
        let page = store.attempts(id, before, left.min(PAGE_MAX)).await?;
        let Some(last) = page.last() else { break };
        for attempt in &page {
            print_attempt(attempt)?;
        }
        left -= page.len();
        before = Some(last.id);
    }
    say!("{} shown", max - left);
    Ok(())
}

fn print_attempt(attempt: &Attempt) -> Result<(), OutputError> {
    let status = attempt.status.map_or("-".to_owned(), |status| status.to_string());
    let result = attempt.error.as_deref().map_or("delivered".to_owned(), |why| format!("failed: {}", printable(why)));
    let (at, event, number, took) = (attempt.at, &attempt.event, attempt.number, attempt.duration.as_millis());
    say!("{at}  {event}  attempt {number}  {status}  {took} ms  {result}");
    if let Some(answer) = attempt.answer.as_deref().filter(|answer| !answer.is_empty()) {
        say!("  {}", printable(answer));
    }
    Ok(())
}

async fn find(store: &dyn NotificationStore, id: Uuid) -> anyhow::Result<Endpoint> {
    store.endpoint(EndpointId(id)).await?.ok_or_else(|| missing(id))
}

fn missing(id: Uuid) -> anyhow::Error {
    anyhow::anyhow!("there is no endpoint {id} in this store (BATON_DATA_DIR or DATABASE_URL)")
}

async fn change(
    store: &dyn NotificationStore,
    id: Uuid,
    now: Timestamp,
    alter: impl Fn(&mut Endpoint) + Send,
) -> anyhow::Result<()> {
    match change_endpoint(store, EndpointId(id), None, now, alter).await? {
        Changed::Saved(_) => Ok(()),
        Changed::Missing => Err(missing(id)),
        Changed::Outrun => anyhow::bail!("{id} is being changed by others; try again"),
    }
}

fn owner(endpoint: &Endpoint) -> &str {
    if endpoint.owner == EVERY_KEY { "(every key)" } else { &endpoint.owner }
}

fn state(endpoint: &Endpoint) -> String {
    match &endpoint.disabled {
        Some(disabled) => format!("disabled: {}", printable(&disabled.reason)),
        None if endpoint.failing_since.is_some() => "enabled, failing".to_owned(),
        None => "enabled".to_owned(),
    }
}

/// The URL; of the environment's endpoint only its address, since the environment may hold a secret in the rest.
fn url(endpoint: &Endpoint) -> String {
    match endpoint.id {
        EndpointId::ENVIRONMENT => format!("CLIENT_WEBHOOK_URL, {}", Secret::new(endpoint.url.as_str()).address()),
        _ => printable(&endpoint.url),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::state::event::EventType;
    use crate::relay::store::notifications::Disabled;

    /// The names of the lines that an endpoint with one failure shows at a time.
    fn shown(disabled: Option<Disabled>, now: Timestamp) -> String {
        let endpoint = Endpoint {
            id: EndpointId(Uuid::from_u128(7)),
            owner: "default".to_owned(),
            url: "https://client.example/hooks".to_owned(),
            events: vec![EventType::Completed],
            description: None,
            secret: Secret::new("whsec_new"),
            previous_secret: Some((Secret::new("whsec_old"), Timestamp(2000))),
            version: 1,
            created_at: Timestamp(0),
            updated_at: Timestamp(0),
            disabled,
            failing_since: Some(Timestamp(500)),
            failures: 1,
            paused_until: Some(Timestamp(900)),
        };
        state_lines(&endpoint, now).join("\n")
    }

    #[test]
    fn a_pause_and_an_overlap_are_shown_until_they_are_over() {
        let during = shown(None, Timestamp(800));
        assert!(during.contains("1970-01-01T00:00:00.500Z, 1 failure\n"), "{during}");
        assert!(during.contains("paused  ") && during.contains("old secret  "), "{during}");
        let after = shown(None, Timestamp(2000));
        assert!(!after.contains("paused  ") && !after.contains("old secret  "), "{after}");
    }

    #[test]
    fn a_disabled_endpoint_has_neither_failures_nor_a_pause() {
        let disabled = Disabled { at: Timestamp(600), reason: "it answered 410".to_owned() };
        let lines = shown(Some(disabled), Timestamp(800));
        assert!(lines.contains("disabled: it answered 410\nsince        1970-01-01T00:00:00.600Z"), "{lines}");
        assert!(!lines.contains("failing  ") && !lines.contains("paused  "), "{lines}");
    }
}
