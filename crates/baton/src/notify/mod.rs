//! Client notifications: endpoints of clients, and the delivery of events to them.
//!
//! An event is written by the store in the same commit as the change that it reports
//! ([`crate::relay::state::event`]); this folder registers endpoints and delivers.
//!
//! | question | file |
//! |---|---|
//! | Which calls manage endpoints? | [`api`], with [`endpoint_request`] and [`endpoint_view`] |
//! | How is an endpoint changed beside other writers? | [`endpoint_change`] |
//! | Which addresses may be called? | [`address_guard`], which finds them with [`lookups`] |
//! | How is one attempt made, and what is read of the answer? | [`sender`], over `connections` |
//! | How is it signed? | [`signature`] |
//! | What follows from an attempt: when is it tried again, given up, the endpoint disabled? | [`schedule`] |
//! | Which delivery is next, and how many run at once? | [`outbox_queue`] |
//! | When is a host that gives no answer left alone? | `host_breaker` |
//! | Who does it? | [`delivery`], run by [`notifier`] |

pub mod address_guard;
pub mod api;
mod connections;
pub mod delivery;
pub mod endpoint_change;
pub mod endpoint_request;
pub mod endpoint_view;
mod host_breaker;
pub mod lookups;
pub mod notifier;
pub mod outbox_queue;
pub mod schedule;
pub mod sender;
pub mod signature;
