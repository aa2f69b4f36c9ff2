//! The product as its users meet it: the real binary on the embedded engine, relayers that can misbehave, and HTTP.

mod bad_input;
mod commands;
mod journey;
mod mended;
mod routing;
mod stand;
mod start;
mod store;
mod webhooks;
