//! How a simulated relayer is set up. What changes at run time is in [`Faults`](crate::Faults).

use std::time::Duration;

/// The API that a relayer speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// The open-source relayer 1.8.0, as measured.
    #[default]
    Real,
    /// The older API of the documents: `POST /transactions`, camelCase, flat webhooks, `X-OZ-Signature` in hex.
    Spec,
}

/// The set-up of one relayer.
#[derive(Clone, Debug)]
pub struct RelayerOptions {
    /// Id in paths and records.
    pub id: String,
    /// Name in the list of relayers; derived from the id when absent.
    pub name: Option<String>,
    /// Network in the list of relayers.
    pub network: String,
    /// Id of its chain, which `/rpc` tells; there is no `/rpc` when absent.
    pub chain_id: Option<u64>,
    /// 0x-hex address that it signs with; derived from the id when absent.
    pub address: Option<String>,
    /// Bearer token that callers must present.
    pub api_key: String,
    /// URL for webhooks and the key that signs them; no webhooks when absent.
    pub webhook: Option<(String, String)>,
    /// The API that it speaks.
    pub dialect: Dialect,
    /// When a record reaches its statuses.
    pub timing: Timing,
    /// Pauses between two attempts of one webhook. There is one attempt more than there are pauses.
    pub webhook_pauses: Vec<Duration>,
    /// Port of the socket server; a free one when absent.
    pub port: Option<u16>,
    /// Start of the random sequence for hashes and webhook faults.
    pub seed: u64,
    /// Other relayers listed before this one, to force paging. They accept nothing.
    pub decoys: usize,
    /// Requests per second and burst; requests beyond get 429. The real relayer's default is 100 and 300.
    pub rate_limit: Option<(f64, f64)>,
    /// Final records are dropped after this long; never when absent. The real relayer's default is 4 hours.
    pub retention: Option<Duration>,
    /// Number of records above which the oldest final ones are dropped.
    pub records_max: usize,
    /// Whether answers carry a `Date` header.
    pub date_header: bool,
    /// Call data with this prefix (lower case) reverts.
    pub reverting_data: Option<String>,
    /// Who moves records on, and what outlives the process.
    pub mode: Mode,
}

/// Who moves records on, and what is kept about the past.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Records follow their plan. Everything that happened is kept for a test to look at.
    #[default]
    Audited,
    /// Records follow their plan, which is complete at acceptance, nonce included, so that one write makes a record
    /// durable. Nothing is kept for tests.
    Journaled,
    /// Records move when a signer on a chain says so.
    OnChain,
}

impl RelayerOptions {
    /// A relayer with this id, without webhooks and without a rate limit, about a hundred times faster than a real one.
    pub fn new(id: impl Into<String>) -> Self {
        let id = id.into();
        Self {
            name: None,
            network: "testnet".to_owned(),
            chain_id: Some(31337),
            address: None,
            api_key: format!("api-key-of-{id}-0123456789abcdef0123456789"),
            id,
            webhook: None,
            dialect: Dialect::Real,
            timing: Timing::default(),
            webhook_pauses: [100, 200, 400, 800].map(Duration::from_millis).to_vec(),
            port: None,
            seed: 1,
            decoys: 0,
            rate_limit: None,
            retention: None,
            records_max: usize::MAX,
            date_header: true,
            reverting_data: None,
            mode: Mode::Audited,
        }
    }

    /// A relayer with the times and limits that were measured at version 1.8.0 with its default settings.
    pub fn measured(id: impl Into<String>) -> Self {
        Self {
            timing: Timing::measured(),
            webhook_pauses: MEASURED_WEBHOOK_PAUSES.to_vec(),
            rate_limit: Some((100.0, 300.0)),
            retention: Some(Duration::from_secs(4 * 3600)),
            ..Self::new(id)
        }
    }

    /// With webhooks to this URL, signed with this key.
    #[must_use]
    pub fn webhook(mut self, url: impl Into<String>, key: impl Into<String>) -> Self {
        self.webhook = Some((url.into(), key.into()));
        self
    }
}

/// Webhook attempts at about 0, 2, 6, 15 and 23 s.
pub const MEASURED_WEBHOOK_PAUSES: [Duration; 4] =
    [Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(9), Duration::from_secs(8)];

/// When a record reaches its statuses, counted from its acceptance.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Nonce taken and signed.
    pub sent: Duration,
    /// Accepted by the node.
    pub submitted: Duration,
    /// In a block; skipped when absent, as the real relayer mostly does.
    pub mined: Option<Duration>,
    /// The final status, whichever it is.
    pub confirmed: Duration,
    /// When a record that never leaves `pending`, or cannot be encoded, is given up.
    pub given_up: Duration,
    /// When a record is given up whose signature the relayer has lost, so that it seems never to have been signed.
    pub lost_given_up: Duration,
    /// Largest random addition to each of the times above, in percent of the time since the status before. With it,
    /// records overtake each other.
    pub jitter_percent: u32,
}

impl Timing {
    /// As measured on a chain with blocks of 1 s: the first check comes 8 s after creation, the next ones 8 to 12 s
    /// apart, and a record is given up after 2 minutes.
    pub fn measured() -> Self {
        Self {
            sent: Duration::from_millis(600),
            submitted: Duration::from_millis(800),
            mined: None,
            confirmed: Duration::from_secs(8),
            given_up: Duration::from_secs(120),
            lost_given_up: Duration::from_secs(120),
            jitter_percent: 50,
        }
    }

    /// One step between two statuses, `mined` included.
    pub fn every(step: Duration) -> Self {
        Self {
            sent: step,
            submitted: step * 2,
            mined: Some(step * 3),
            confirmed: step * 4,
            given_up: step * 2,
            lost_given_up: step * 2,
            jitter_percent: 20,
        }
    }
}

impl Default for Timing {
    fn default() -> Self {
        let [sent, submitted, confirmed] = [50, 100, 200].map(Duration::from_millis);
        let (given_up, lost_given_up) = (confirmed, confirmed);
        Self { sent, submitted, mined: None, confirmed, given_up, lost_given_up, jitter_percent: 0 }
    }
}

/// What a relayer still knows after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// All records, as with Redis storage; those under way go on.
    Keep,
    /// No records, as with the default in-memory storage: known ids are 404. Only the chain's nonce is unchanged.
    Forget,
    /// All but the records stored within this time before the crash, which the storage had not yet written.
    ForgetLast(Duration),
    /// All records, but those stored within this time before the crash and without a nonce have lost their job: they are
    /// listed as `pending` and never move.
    LoseJobs(Duration),
}
