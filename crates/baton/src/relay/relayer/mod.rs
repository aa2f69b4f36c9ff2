//! The relayers: [`wire`] knows their JSON (both dialects, pure), [`client`] talks to one of them, [`pool`] hands out the
//! next one, [`watch`] learns in the background what the pool goes by, [`routing`] decides (pure).

pub mod client;
pub mod pool;
pub mod routing;
pub mod watch;
pub mod wire;
