//! Deliberate mistakes in rules of pure code, one at a time, so that the simulation can prove that it finds them.
//!
//! They exist only with the cargo feature `mutations`, which no build for production has; without it
//! `Mutation::is_on` is constant.

/// One deliberate mistake.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Binds the record of an equal transaction although the own one may still arrive.
    TakesWhileOpen,
    /// Binds the record of an equal transaction although the own one may exist and be forgotten.
    TakesUnproven,
    /// Binds the record that another equal transaction needs, although a second one is left.
    TakesOldest,
    /// Lets a consumer act on a claim that it has lost.
    NoToken,
    /// Takes a relayer that has lost records for one that has kept them.
    NoMemoryProof,
    /// Believes a list of transactions that contradicts itself.
    TrustsAnyList,
    /// Believes a relayer's `failed`, `canceled` or `expired` about a signed transaction although there is a chain.
    BelievesFailed,
    /// Believes a relayer's `confirmed` although there is a chain.
    BelievesConfirmed,
    /// Believes a relayer that failed a record unsigned, although the chain may have the call.
    BelievesUnsigned,
    /// Re-routes a call that failed unsigned although it may be in a node's pool.
    IgnoresPool,
    /// Ends a row by a revert in a block that may be replaced.
    RevertsAtOnce,
    /// Takes a nonce for used for good although its block may be replaced.
    UsedIsSettled,
    /// Binds a row to the record in its relayer's answer although that is about another call.
    AcceptsOtherCall,
}

#[cfg(feature = "mutations")]
thread_local! {
    static ACTIVE: std::cell::Cell<Option<Mutation>> = const { std::cell::Cell::new(None) };
}

impl Mutation {
    /// Whether this thread makes the mistake.
    #[cfg(feature = "mutations")]
    pub(crate) fn is_on(self) -> bool {
        ACTIVE.get() == Some(self)
    }

    /// Never: this build cannot make mistakes on purpose.
    #[cfg(not(feature = "mutations"))]
    pub(crate) const fn is_on(self) -> bool {
        false
    }
}

/// Makes this thread commit the mistake from now on; `None` ends it.
#[cfg(feature = "mutations")]
#[doc(hidden)]
pub fn set(mutation: Option<Mutation>) {
    ACTIVE.set(mutation);
}
