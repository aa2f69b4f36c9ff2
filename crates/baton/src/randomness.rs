//! Randomness as a value: ids, claim tokens and the jitter of pauses. Handed to each part that needs it, so that the
//! simulation can replay a run from its seed.

use std::sync::Arc;

use uuid::Uuid;

/// A source of randomness.
pub trait RandomSource: Send + Sync + 'static {
    /// An unpredictable UUID, for claim tokens.
    fn uuid_v4(&self) -> Uuid;

    /// A UUID that sorts after those made before it, for transactions and messages.
    fn uuid_v7(&self) -> Uuid;

    /// At least 0, less than 1.
    fn fraction(&self) -> f64;
}

/// The randomness of this process.
#[derive(Clone)]
pub struct Randomness(Arc<dyn RandomSource>);

impl Randomness {
    /// Draws from any source.
    pub fn new(source: impl RandomSource) -> Self {
        Self(Arc::new(source))
    }

    /// Draws from the operating system.
    pub fn system() -> Self {
        Self::new(SystemRandomness)
    }

    /// See [`RandomSource::uuid_v4`].
    pub fn uuid_v4(&self) -> Uuid {
        self.0.uuid_v4()
    }

    /// See [`RandomSource::uuid_v7`].
    pub fn uuid_v7(&self) -> Uuid {
        self.0.uuid_v7()
    }

    /// See [`RandomSource::fraction`].
    pub fn fraction(&self) -> f64 {
        self.0.fraction()
    }
}

struct SystemRandomness;

impl RandomSource for SystemRandomness {
    fn uuid_v4(&self) -> Uuid {
        Uuid::new_v4()
    }

    fn uuid_v7(&self) -> Uuid {
        Uuid::now_v7()
    }

    fn fraction(&self) -> f64 {
        rand::random()
    }
}
